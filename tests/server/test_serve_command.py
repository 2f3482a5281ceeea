"""``fastlayers serve``: what an operator types, sees, and gets as exit code."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from fastlayers.errors import ArgumentError, CheckpointError, FastlayersError
from fastlayers_server.cli import main
from fastlayers_server.serve_command import engine_of, known, model_folder, resolved, serve
from fastlayers_server.serve_config import ServeConfig, parse

CODE = "from fastlayers_server.cli import main; main()"
# Without what TLS needs, which is read anew for each request: twenty times what the request takes.
get, post, stream = (functools.partial(f, timeout=60, verify=False) for f in (httpx.get, httpx.post, httpx.stream))

# A front without a tokenizer beside an engine without a model: of tests that ask it for no token.
BARE = f"""
import sys
from unittest.mock import MagicMock
from fastlayers_server.engine import client
from fastlayers_server.front import tokens
tokens.TokenText = MagicMock()
client.command_of = lambda config: [sys.executable, {str(Path(__file__).parent / "engine" / "scripted_child.py")!r}]
"""


@contextlib.contextmanager
def serving(*arguments: str, code: str = CODE) -> Iterator[tuple[str, subprocess.Popen[bytes], list[str]]]:
    """Run the command, wait until it is ready; yield its URL, process and log."""
    command = [sys.executable, "-c", code, "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    lines: list[str] = []
    try:
        assert process.stderr is not None
        url = ""
        for line in process.stderr:
            lines.append(line.decode())
            if " is served at " in lines[-1]:
                url = lines[-1].split(" is served at ")[1].split()[0]
                break
        assert url, "".join(lines)
        import threading

        threading.Thread(target=lambda: [lines.append(x.decode()) for x in process.stderr], daemon=True).start()  # type: ignore[union-attr]  # fmt: skip
        yield url, process, lines
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def engine_of_process(process: subprocess.Popen[bytes]) -> int:
    """The server's child that is its engine; another may be the grammar worker."""
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    children = {int(child) for task in tasks for child in (task / "children").read_text().split()}
    (found,) = [c for c in children if b"child" in Path(f"/proc/{c}/cmdline").read_bytes()]
    return found


def tools_are_called(url: str) -> None:
    """Ask as the guide does, whole and streamed; then tell the model what its call returned."""
    guide = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    forced = json.loads(guide.partition("### Tool calls")[2].partition("-d '")[2].partition("'\n")[0])
    forced["model"] = "tiny"
    client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    (choice,) = client.chat.completions.create(**forced, seed=1).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and call.type == "function" and call.function.name == "add"
    given = json.loads(call.function.arguments)
    assert set(given) == {"a", "b"} and 0 <= given["a"] <= 999 and given["b"] in (45, 127)
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**forced, seed=1, stream=True)]
    parts = [part.function for chunk in chunks for part in chunk.delta.tool_calls or () if part.function]
    assert chunks[-1].finish_reason == "tool_calls" and [p.name for p in parts if p.name] == ["add"]
    assert "".join(part.arguments or "" for part in parts) == call.function.arguments
    # By itself it answers, as it was trained to; what it is then told back, it takes.
    free = forced | {"tool_choice": "auto", "max_tokens": 20}
    (choice,) = client.chat.completions.create(**free).choices
    assert choice.message.content == "172" and not choice.message.tool_calls
    called = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    told = [*forced["messages"], called, {"role": "tool", "tool_call_id": call.id, "content": "172"}]
    (choice,) = client.chat.completions.create(**free | {"messages": told}).choices
    assert choice.message.content


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the engine's process through /proc")
def test_the_tiny_model_is_served_survives_its_engine_and_drains() -> None:
    asked = ("--served-model-name", "tiny", "--shutdown-timeout", "60", "--speculative-algorithm", "ngram")
    with serving(*asked) as (url, process, lines):
        ask = {"model": "tiny", "messages": [{"role": "user", "content": "What is 127 + 45?"}]}
        answer = post(f"{url}/v1/chat/completions", json=ask).json()
        assert answer["choices"][0]["message"]["content"].strip() == "172"
        chosen = ["yes", "no"]
        forced = {
            "model": "tiny",
            "prompt": "Once",
            "structured_outputs": {"choice": chosen},
            "temperature": 1.0,
            "n": 4,
        }
        said = post(f"{url}/v1/completions", json=forced).json()
        assert {c["text"] for c in said["choices"]} <= set(chosen), said
        schema = {
            "type": "object",
            "properties": {"n": {"type": "integer"}},
            "required": ["n"],
            "additionalProperties": False,
        }
        shaped = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        said = post(f"{url}/v1/chat/completions", json=ask | {"response_format": shaped, "max_tokens": 200})
        assert set(json.loads(said.json()["choices"][0]["message"]["content"])) == {"n"}
        scored = {"model": "tiny", "prompt": "One two", "echo": True, "logprobs": 1, "max_tokens": 1}
        choice = post(f"{url}/v1/completions", json=scored).json()["choices"][0]
        told = choice["logprobs"]
        assert told["tokens"][0] == "<|bos|>" and told["token_logprobs"][0] is None and told["text_offset"][1] == 0
        places = zip(told["tokens"][1:], told["text_offset"][1:], strict=True)
        assert all(choice["text"].startswith(token, at) for token, at in places) and choice["text"].startswith(
            "One two"
        )
        assert all(p < 0 for p in told["token_logprobs"][1:])
        bad = post(f"{url}/v1/completions", json=forced | {"structured_outputs": {"regex": "("}})
        assert (bad.status_code, bad.json()["error"]["code"]) == (400, "invalid_grammar")
        tools_are_called(url)
        chosen = get(f"{url}/backends").json()
        assert {"mla[decode]", "fused_moe"} <= {row["layer"] for row in chosen} and all(row["chosen"] for row in chosen)
        assert get(f"{url}/explain").json()["ticks"]
        assert "fastlayers_requests_total" in get(f"{url}/metrics").text
        # Kill the engine in the middle of a stream.
        first = engine_of_process(process)
        endless = {"model": "tiny", "prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with stream("POST", f"{url}/v1/completions", json=endless) as response:
            events = response.iter_lines()
            assert next(events).startswith("data: {")
            os.kill(first, signal.SIGKILL)
            rest = [line for line in events if line]
        assert rest[-1] == "data: [DONE]" and '"code":"engine_restarting"' in rest[-2]
        phases = set()
        end = time.monotonic() + 180
        while (ready := get(f"{url}/ready")).status_code != 200 and time.monotonic() < end:
            phases.add(ready.json()["phase"])
            refused = post(f"{url}/v1/completions", json=endless | {"stream": False, "max_tokens": 1})
            assert refused.status_code in (200, 503)
            time.sleep(0.25)
        assert ready.status_code == 200 and phases
        assert engine_of_process(process) != first
        assert post(f"{url}/v1/chat/completions", json=ask).json()["choices"][0]["message"] == answer["choices"][0]["message"]  # fmt: skip  # noqa: E501
        # What runs is finished on SIGTERM, which systemd sends to all processes of a service.
        with stream("POST", f"{url}/v1/completions", json=endless | {"max_tokens": 60}) as response:
            events = response.iter_lines()
            next(events)
            for pid in (engine_of_process(process), process.pid):
                os.kill(pid, signal.SIGTERM)
            rest = [line for line in events if line]
        assert '"finish_reason":"length"' in rest[-2]
        assert process.wait(120) == 0
        assert any("draining" in line for line in lines)
        # Machines read every line, the engine's as well; what people wait for is the one sentence.
        read = [json.loads(line) for line in lines if " is served at " not in line]
        assert {"fastlayers.access", "fastlayers_server.engine.startup"} <= {record["logger"] for record in read}


def test_one_process_is_enough_where_asked_for() -> None:
    with serving("--in-process", "--api-key", "sk-1") as (url, process, _):
        ask = {"model": "tiny_deepseek_v3", "messages": [{"role": "user", "content": "What is 127 + 45?"}]}
        assert post(f"{url}/v1/chat/completions", json=ask).status_code == 401
        headers = {"authorization": "Bearer sk-1"}
        answer = post(f"{url}/v1/chat/completions", json=ask, headers=headers).json()
        assert answer["choices"][0]["message"]["content"].strip() == "172"
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CODE, "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_a_context_that_the_model_lacks_is_one_sentence_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The engine's process says so; the front, which is none of its own here, ends."""
    asked = ["serve", "--port", "0", "--max-model-len", "5000", "--log-level", "error"]
    monkeypatch.setattr(sys, "argv", ["fastlayers", *asked])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capfd.readouterr().err
    assert "Traceback" not in said  # a sentence is enough
    assert ended.value.code == 1
    sentence = said.strip().splitlines()[-1]
    assert sentence.startswith("error: ") and "5000" in sentence and "4096" in sentence


@pytest.mark.slow  # that a start is refused in a sentence says the test in front, and which split is, others do
def test_one_rank_has_nobody_to_exchange_tokens_with_as_generate_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = "--expert-exchange", "exchange", "--device", "cpu"
    served = run("--port", "0", "--log-level", "error", *asked)
    monkeypatch.setattr(sys, "argv", ["fastlayers", "generate", "hi", *asked])
    with pytest.raises(SystemExit) as ended:
        main()
    said = " ".join(capsys.readouterr().err.split())  # in lines as wide as a terminal
    assert (served.returncode, served.stderr.strip().splitlines()[-1]) == (1, said.replace("generate: ", "", 1))
    words = "error: generate: ParallelSpec: expert_exchange is 'exchange', while"
    assert ended.value.code == 1 and said.startswith(words)


def test_what_cannot_start_starts_nothing(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(ArgumentError, match=f"127.0.0.1:{port}.*accepted: an address of this machine that is free"):
            serve(["--port", port])
    with pytest.raises(CheckpointError, match="or 'tiny', the one that ships"):
        serve([str(tmp_path / "nothing")])
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"holds no tokenizer\.json"):
        serve([str(tmp_path), "--port", "0", "--in-process"])
    with pytest.raises(ArgumentError, match="--chat-template"):
        serve(["--chat-template", str(tmp_path / "none.jinja"), "--port", "0"])
    (tmp_path / "empty").write_text("\n \n")
    for name in ("none", "empty"):
        with pytest.raises(ArgumentError, match="--api-key"):
            serve(["--api-key", f"@{tmp_path / name}", "--port", "0"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--api-key", "\udcff"], "--api-key is another text; accepted: text in UTF-8"),
        (["--served-model-name", "\udcff"], r"--served-model-name is \('\\udcff',\); accepted: text in UTF-8"),
        (["--profile-folder", "~nosuchuser/x"], "--profile-folder is '~nosuchuser/x' .*accepted: a directory that can"),
        (["--profile-folder", "/proc/x"], "--profile-folder is '/proc/x' .*accepted: a directory that can be written"),
        (["--speculative-algorithm", "draft", "--speculative-draft-model", "no/such/model"], "or 'tiny', the one that"),
        (["--speculative-algorithm", "draft"], "speculative_draft_model is ''; accepted: a model for 'draft'"),
        (
            ["--speculative-algorithm", "ngram", "--speculative-topk", "2"],
            "speculative_topk is 2; accepted: 1, or 2 to",
        ),
        (["--tp", "32"], "serve: --tp is 32; accepted: 1, 2 or 4: each rank has as many of the 4 attention heads"),
        (["--speculative-verify", "rejection"], "speculative_verify is 'rejection'; accepted: 'match', or"),
    ],
)
def test_what_a_server_could_not_use_later_is_refused_at_once(flags: list[str], said: str) -> None:
    with pytest.raises(FastlayersError, match=said):
        serve([*flags, "--port", "0"])


def test_a_start_that_is_ended_leaves_nothing(short_folder: Path) -> None:
    command = [sys.executable, "-c", CODE, "serve", "--port", "0"]
    for number, code, wait in ((signal.SIGTERM, 143, 0.0), (signal.SIGINT, 130, 0.02), (signal.SIGTERM, 143, 1.0)):
        process = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(short_folder)}, stderr=subprocess.PIPE)
        while not any(short_folder.glob("fastlayers-engine-*")):
            assert process.poll() is None
            time.sleep(0.001)
        time.sleep(wait)
        process.send_signal(number)
        said = process.communicate(timeout=180)[1]
        assert process.returncode == code and b"Traceback" not in said, said
        assert not [path.name for path in short_folder.iterdir() if path.name.startswith("fastlayers-")]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_whose_exception_was_swallowed_ends_the_start_later(
    number: signal.Signals, code: int, short_folder: Path
) -> None:
    """As an import does with a bare ``except``, or a finaliser."""
    swallowed = (
        "import os, signal; from fastlayers_server.front import app; make = app.make_front\n"
        "def make_front(*args):\n"
        "    try: os.kill(os.getpid(), signal.{}); import time; time.sleep(1)\n"
        "    except BaseException: pass\n"
        "    return make(*args)\n"
        "app.make_front = make_front\n"
    )
    command = [sys.executable, "-c", BARE + swallowed.format(number.name) + CODE, "serve", "--port", "0"]
    done = subprocess.run(command, env=os.environ | {"TMPDIR": str(short_folder)}, capture_output=True, timeout=300)
    assert done.returncode == code and b"Traceback" not in done.stderr, done.stderr
    assert not [path.name for path in short_folder.iterdir() if path.name.startswith("fastlayers-")]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the engine's process through /proc")
def test_a_server_that_is_killed_while_it_starts_takes_its_engine_along(short_folder: Path) -> None:
    environment = os.environ | {"TMPDIR": str(short_folder)}
    for wait in (0.0, 2.0):
        process = subprocess.Popen([sys.executable, "-c", CODE, "serve", "--port", "0"], env=environment)
        engine = 0
        while not engine:
            time.sleep(0.02)
            assert process.poll() is None
            with contextlib.suppress(ValueError, OSError):
                engine = engine_of_process(process)
        time.sleep(wait)
        process.kill()
        process.wait()
        status, end = Path(f"/proc/{engine}/stat"), time.monotonic() + 60
        with contextlib.suppress(OSError):  # gone, between any two looks
            while status.read_text().rpartition(")")[2].split()[0] != "Z":
                assert time.monotonic() < end, "the engine outlives its front"
                time.sleep(0.1)
        assert not [path.name for path in short_folder.iterdir() if path.name.startswith("fastlayers-")]


def test_a_second_signal_leaves_nothing(short_folder: Path) -> None:
    command = (sys.executable, "-c", BARE + CODE, "serve", "--port", "0", "--drain-delay", "60")
    process = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(short_folder)}, stderr=subprocess.PIPE)
    assert process.stderr is not None
    for line in process.stderr:
        if b" is served at " in line:
            break
    assert any(short_folder.glob("fastlayers-engine-*"))
    process.send_signal(signal.SIGTERM)
    url = line.split(b" is served at ")[1].split()[0].decode()
    while get(f"{url}/ready").status_code != 503:
        time.sleep(0.02)
    assert process.poll() is None, "it drains"
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=45)[1]  # of the sixty seconds that it would drain
    assert process.returncode == 1 and b"second signal" in said
    assert not [path.name for path in short_folder.iterdir() if path.name.startswith("fastlayers-")]


HANGING = """
import time
from starlette.responses import Response
from fastlayers_server.front import ops, server

async def version(request, front):
    if server.HUNG_SECONDS > 3.0:  # it has started, which may hold a loop up for longer on a busy machine
        server.HUNG_SECONDS = 3.0
        return Response()
    time.sleep(60)

ops.version = version
from fastlayers_server.cli import main; main()
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the engine's process through /proc")
def test_a_front_that_hangs_says_where_and_ends_with_its_engine() -> None:
    """One that was stopped for longer is not taken for it; who starts it again is the operator's choice."""
    with serving(code=BARE + HANGING) as (url, process, lines):
        engine = engine_of_process(process)
        assert get(f"{url}/version").status_code == 200
        process.send_signal(signal.SIGSTOP)
        time.sleep(4.0)
        process.send_signal(signal.SIGCONT)
        assert get(f"{url}/health").status_code == 200
        with pytest.raises(httpx.HTTPError):
            get(f"{url}/version", timeout=50)
        assert process.wait(60) == 71
        end = time.monotonic() + 60
        while not any("in version" in line for line in lines):
            assert time.monotonic() < end, lines
            time.sleep(0.25)
        assert "error: the front is hung: its loop did not turn for 3 s\n" in lines
        with contextlib.suppress(OSError):
            while Path(f"/proc/{engine}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                assert time.monotonic() < end, "the engine outlives its front"
                time.sleep(0.1)


def test_a_folder_whose_path_is_too_long_for_sockets_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ArgumentError, match=r"serve: TMPDIR is '.*ddd'; accepted: a folder of at most \d\d bytes"):
        serve(["--port", "0"])
    assert not any(deep.iterdir())


def test_flags_of_peers_are_understood() -> None:
    for given, name, value in (
        (["--max-num-seqs", "7"], "max_running_requests", 7),
        (["--block-size=16"], "page_size", 16),
        (["--context-length", "99"], "max_model_len", 99),
        (["--enforce-eager"], "disable_cuda_graph", True),
        (["--disable-radix-cache"], "no_prefix_cache", True),
        (["--no-async-scheduling"], "disable_overlap_schedule", True),
        (["--disable-mixed-steps"], "disable_mixed_steps", True),
        ([], "disable_mixed_steps", False),
        (["--scheduling-policy", "lpm"], "schedule_policy", "lpm"),
        (["--mem-fraction-static", "0.8"], "gpu_memory_utilization", 0.84),
        (["--model-path", "x"], "model", "x"),
        (["x"], "model", "x"),
        (["--dtype", "bfloat16"], "dtype", "bf16"),
        (["--dtype=half"], "dtype", "fp16"),
        (["--kv-cache-dtype", "fp8"], "kv_cache_dtype", "e4m3"),
        (["--kv-cache-dtype=fp8_e4m3"], "kv_cache_dtype", "e4m3"),
        (["--kv-cache-dtype", "bfloat16"], "kv_cache_dtype", "bf16"),
        (["--served-model-name", "a,b", "--served-model-name", "c"], "served_model_name", ("a", "b", "c")),
    ):
        assert getattr(parse(given)[0], name) == value, given


def test_random_weights_of_a_known_model_need_no_folder() -> None:
    config = ServeConfig(model="Qwen/Qwen3-8B", load_format="dummy", in_process=True)
    folder = model_folder(config)
    assert resolved(config, folder).name == "Qwen3-8B"
    from fastlayers_server.front.tokens import TokenText

    tokens = TokenText(folder, None, True, known(config))
    assert tokens.model_type == "qwen3"
    assert tokens.decode([5, 151_000]) == "t5 t151000" and tokens.encode("t7 t9") == [7, 9]
    engine: Any = engine_of(config, folder)
    assert engine.phase == "starting"


ELSEWHERE = """
import resource, sys
from fastlayers_models.find import TINY, assets
from fastlayers_server.front.app import make_app, make_front
from fastlayers_server.front.tokens import TokenText
from fastlayers_server.serve_command import engine_of, raise_file_limit, resolved, template_of
from fastlayers_server.serve_config import parse

config, _ = parse(["tiny", "--in-process", "--config", sys.argv[1], "--api-key", "@" + sys.argv[2]])
config, folder = resolved(config, assets() / TINY), assets() / TINY
tokens = TokenText(folder, template_of(config))
make_app(make_front(config, engine_of(config, folder), tokens))
print(ascii([config.name, config.api_key, tokens.hf.chat_template]))
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 2000))
raise_file_limit(1900)
print(resource.getrlimit(resource.RLIMIT_NOFILE))
raise_file_limit(4096)
"""


def test_a_shell_of_another_alphabet_and_with_few_files(tmp_path: Path) -> None:
    """Files are UTF-8 whatever the locale says, and connections as many as the system's limit lets."""
    for name, text in (("flags", "served_model_name: größe\nchat_template: t"), ("keys", "schlüssel"), ("t", "｜ü")):
        (tmp_path / name).write_text(text, "utf-8")
    # Python reads C and POSIX as UTF-8, unless told otherwise; what is left is any other locale's alphabet.
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, "flags", "keys"], env=env, cwd=tmp_path, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [ascii(["größe", ("schlüssel",), "｜ü"]), "(2000, 2000)"]
    told = [line for line in done.stderr.splitlines() if "files may be open" in line]
    assert told == ["2000 files may be open here (ulimit -Hn): fewer connections than --limit-concurrency 4096"]
