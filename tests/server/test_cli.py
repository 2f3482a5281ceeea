"""The command line: what people and machines get, exit codes, and errors without tracebacks."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

from fastlayers.device import DESCRIBED
from fastlayers.errors import ArgumentError, CheckpointError, FastlayersError
from fastlayers_models.find import TINY, assets
from fastlayers_server.cli import app, main
from fastlayers_server.ranks import check_heads
from fastlayers_server.variants import VARIANTS

GPT_OSS = str(Path(__file__).parents[2] / "checkpoints" / "tiny_gpt_oss")
ROOTS = [str(Path(__file__).parents[2] / root) for root in ("src", "models", "server")]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


MAIN = "from fastlayers_server.cli import main; main()"


def command(*arguments: str, path: str = "", code: str = MAIN, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, with ``path`` before everything else on the module path."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([p for p in (path, *ROOTS) if p])} | environment
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=env, timeout=240
    )


def test_a_reader_that_has_enough_is_no_error() -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, ROOTS)), "PYTHONUNBUFFERED": ""}
    arguments = [sys.executable, "-c", MAIN, "serve", "--json"]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(arguments, stdout=writer, stderr=subprocess.PIPE, text=True, env=env, timeout=240)
    finally:
        os.close(writer)
    assert done.stderr == ""


def test_doctor_reports_everything_that_it_looked_at() -> None:
    result = run("doctor", "--json")
    report = json.loads(result.stdout)
    names = {fact["name"] for fact in report["facts"]}
    assert {"python", "torch", "gpu", "triton", "transformers", "deep_gemm", "flashinfer", "sgl_kernel"} <= names
    assert result.exit_code == (0 if report["ok"] else 1)
    assert report["layers"]["rms_norm"]["works"]
    absent = [fact for fact in report["facts"] if fact["state"] == "absent" and fact["name"] != "gpu"]
    assert all("pip install" in fact["reason"] for fact in absent)
    assert "rms_norm" in run("doctor").stdout


def broken_package(folder: Path, name: str, text: str) -> str:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(text)
    return str(folder)


# One that kernels come from, and Triton, which ours are written in: together, since a process takes seconds to start.
BROKEN = [("sgl_kernel", "triton"), *(pytest.param((n,), marks=pytest.mark.slow) for n in ("deep_gemm", "triton"))]


@pytest.mark.parametrize("names", BROKEN, ids=" ".join)
def test_a_broken_package_fails_the_doctor_and_nothing_else(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        path = broken_package(tmp_path, name, "raise OSError('libcudart.so.99 is missing')\n")
    # The library first: it is not to depend on what the doctor has looked at.
    code = (
        "import torch, fastlayers as fl\n"
        "print(fl.RMSNorm(8)(torch.ones(2, 8)).shape, bool(fl.backends('mla', device='H200')), flush=True)\n" + MAIN
    )
    seen = command("doctor", "--json", path=path, code=code, TRITON_INTERPRET="0")
    used, _, doctor = seen.stdout.partition("\n")
    assert used == "torch.Size([2, 8]) True", seen.stderr
    report = json.loads(doctor)
    facts = [fact for fact in report["facts"] if fact["name"] in names]
    assert seen.returncode == 1 and len(facts) == len(names)
    assert all(fact["state"] == "broken" and "libcudart.so.99" in fact["reason"] for fact in facts)


def test_a_package_without_our_functions_disables_its_backend_only_and_meta_is_no_device(tmp_path: Path) -> None:
    path = broken_package(tmp_path, "triton", "__version__ = '1.0'\n")
    code = (
        # And, since a process takes seconds to start: a device without memory is refused before anything is loaded.
        "import sys; sys.argv = ['fastlayers', 'generate', 'hi', '--device', 'meta']\n"
        "from fastlayers_server.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: print(end.code, 'transformers' in sys.modules)  # which reads the tokenizer\n"
        "import torch, fastlayers as fl\n"
        "from fastlayers.errors import NoBackendError\n"
        "print(fl.RMSNorm(8).choice.name)\n"
        "try: fl.RMSNorm(8, backend='triton')\n"
        "except NoBackendError as e: print('refused', e.refused['triton'])\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([path, *ROOTS]), "TRITON_INTERPRET": "1"}
    used = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert used.returncode == 0 and used.stdout.startswith("1 False\ntorch\nrefused triton"), used.stdout + used.stderr
    assert "--device is 'meta'; accepted: cpu, cuda or cuda:N" in used.stderr


def test_disabled_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTLAYERS_DISABLE", "triton,transformers")
    seen = run("doctor", "--json")
    facts = {fact["name"]: fact for fact in json.loads(seen.stdout)["facts"]}
    assert seen.exit_code == 0 and facts["triton"]["state"] == "disabled"
    assert "FASTLAYERS_DISABLE" in facts["transformers"]["reason"]


def test_backends_answers_for_described_devices() -> None:
    rows = json.loads(run("backends", "mla", "--device", "H200", "--json").stdout)
    by_name = {row["name"]: row for row in rows}
    assert by_name["triton"]["hardware"] and not by_name["trtllm_gen"]["hardware"]
    assert "sm_100" in by_name["trtllm_gen"]["reason"]
    table = run("backends", "--device", "A100")
    assert table.exit_code == 0 and "fp8_linear" in table.stdout


def test_explain_names_what_a_model_runs() -> None:
    assert json.loads(run("explain", "rms_norm", "--json").stdout)[0]["chosen"] == "torch"
    rows = json.loads(run("explain", "tiny", "--dtype", "fp32", "--device", "cpu", "--json").stdout)
    assert {"mla", "fused_moe", "router", "rms_norm"} <= {row["layer"] for row in rows}
    assert all(row["chosen"] == "torch" for row in rows)


def test_explain_shows_the_phases_of_attention() -> None:
    shown = run("explain", "tiny", "--dtype", "fp32", "--device", "cpu").stdout
    assert "mla[decode]" in shown and "mla[extend]" in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU that is not there")
def test_explain_asks_about_the_device_that_it_is_given() -> None:
    assert run("explain", "rms_norm", "--device", "cpu").exit_code == 0
    assert isinstance(run("explain", "rms_norm", "--device", "cuda").exception, ArgumentError)


def test_help_says_what_every_argument_is() -> None:
    def missing(command: Any, path: str) -> list[str]:
        lacking = [f"{path} {p.name}" for p in command.params if not getattr(p, "help", None)]
        below = getattr(command, "commands", {})
        return lacking + [line for name in below for line in missing(below[name], f"{path} {name}")]

    assert missing(get_command(app), "fastlayers") == []
    shown = run("--help").stdout
    assert "--json" in shown and "``" not in shown and all(name in shown for name in ("explain", "tune", "bench"))
    assert all(name in run("backends", "--help").stdout for name in DESCRIBED)


def test_generate_answers_a_problem() -> None:
    found = json.loads(run("generate", "What is 127 + 45?", "--dtype", "fp32", "--device", "cpu", "--json").stdout)
    assert found["text"].strip() == "172" and found["finished"] == "stop"
    assert "172" in run("generate", "What is 127 + 45?", "--dtype", "bf16", "--device", "cpu").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["explain", "nowhere/at/all"],
            "target is 'nowhere/at/all'; accepted: 'tiny', a checkpoint directory, or a layer: linear",
        ),
        (
            ["generate", "hi", "--checkpoint", "tests/server"],
            "--checkpoint: tests/server: a directory without config.json; accepted: a directory with config.json",
        ),
        (["generate", "hi", "--checkpoint", "no/such/place"], "--checkpoint: no/such/place: no such directory"),
        (["demo", "model.gguf"], "checkpoint: model.gguf: a GGUF file; accepted:"),
        (["convert", "model.gguf", "out"], "source: model.gguf: a GGUF file; accepted:"),
        (["explain", "some/model.gguf"], "target: some/model.gguf: a GGUF file; accepted:"),
        (["eval", "--variants", "hf,mxfp4"], "--variants is 'mxfp4', made from a checkpoint that is mxfp4"),
        (["backends", "rmsnorm"], "layer 'rmsnorm' is unknown; known: linear"),
        (["backends", "--device", "H2000"], "device 'H2000' is unknown"),
        (["generate", "hi", "--dtype", "fp7"], "dtype is 'fp7'; accepted: bf16"),
        (["generate", "hi", "--device", "gpu"], "--device is 'gpu'"),
        (["generate", "hi", "--device", "meta"], "--device is 'meta'; accepted: cpu, cuda"),
        (["generate", "hi", "--device", "cpu:7"], "--device is 'cpu:7'; accepted: cpu, cuda"),
        (["generate", "hi", "--device", "meta", "--tp", "2"], "--device is 'meta'; accepted: cpu, cuda"),
        (["generate", "hi", "--dtype", "fp7", "--dp", "2"], "dtype is 'fp7'; accepted: bf16"),
        (["generate", "hi", "--tp", "100", "--device", "cpu"], "--tp × --dp is 100; accepted: at most 64 processes"),
        (["generate", "hi", "--tp", str(2**40)], "Ranks: tp * dp is 1099511627776; accepted: at most 65536"),
        (["convert", "tiny", "~nosuchuser/x"], "target is '~nosuchuser/x': Could not determine home"),
        (["eval", "--out", "~nosuchuser/x"], "--out is '~nosuchuser/x': Could not determine home"),
        (["eval", "--out", ""], "--out is '', which cannot be written (IsADirectoryError)"),
        (["backends", ""], "layer '' is unknown; known: linear"),
        (["generate", "\udcff"], "prompt is '\\udcff'; accepted: text in UTF-8"),
        (["generate", "hi", "--checkpoint", "~nosuchuser/x"], "--checkpoint: ~nosuchuser/x: Could not determine home"),
        (["warmup", "/nope"], "model '/nope' is unknown; accepted: deepseek-ai/DeepSeek-V3, "),
        (["bench", "model", "./nope"], "model './nope' is unknown; accepted: deepseek-ai/DeepSeek-V3, "),
        (["bench", "model", "~nosuchuser/x"], "model '~nosuchuser/x' is unknown: Could not determine home"),
        (["eval", "--out", "no/such/place.json"], "--out is 'no/such/place.json', which cannot be written"),
        (["eval", "--out", "tests"], "--out is 'tests', which cannot be written (IsADirectoryError)"),
        (["eval", "--variants", "best"], "variant 'best' is unknown; known: hf"),
        (["generate", "hi", "--max-new-tokens", "9999"], "accepted: at most max_length"),
    ],
)
def test_errors_are_one_sentence(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fastlayers", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    shown = " ".join(capsys.readouterr().err.split())
    assert exit_.value.code == 1 and words in shown and "Traceback" not in shown
    name = " ".join(arguments[: 2 if arguments[0] == "bench" else 1])
    assert shown.startswith(f"error: {name}: ") and shown.count(f"{name}: ") == 1


def test_debug_shows_the_traceback() -> None:
    seen = command("--debug", "backends", "rmsnorm")
    assert seen.returncode == 1 and "Traceback" in seen.stderr and "UnknownNameError" in seen.stderr


def test_demo_shows_identical_tokens_and_the_report() -> None:
    seen = run("demo", "--new-tokens", "8", "--prompt-tokens", "300", "--device", "cpu", "--json")
    found = json.loads(seen.stdout)
    assert seen.exit_code == 0 and found["identical"] and found["prompt_tokens"] >= 300
    assert found["stock"]["tokens"] == found["patched"]["tokens"] and len(found["patched"]["tokens"]) == 8
    assert sum(found["hits"].values()) > 0


def test_the_table_of_the_demo_is_not_as_wide_as_its_tokens() -> None:
    # As wide as what is not a terminal: nothing is wrapped there.
    options = ["demo", "--new-tokens", "24", "--prompt-tokens", "64", "--device", "cpu"]
    seen = CliRunner().invoke(app, options, env={"COLUMNS": "4096"})
    assert seen.exit_code == 0 and "identical tokens" in seen.stdout, seen.stderr
    lines = seen.stdout.splitlines()
    table = [line for line in lines if line[:1] in "┏┃┡│└"]
    assert len(table) == 6 and all(len(line) < 80 for line in table)
    shown = [line for line in lines if line.startswith("tokens, ")]
    assert all(len(line) > 80 for line in shown)
    tokens = [line.split(": ")[1].split() for line in shown]
    assert [len(ids) for ids in tokens] == [24, 24] and tokens[0] == tokens[1]


def test_demo_fails_if_the_tokens_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    import fastlayers_server.demo as demo

    real = demo._generate
    calls: list[int] = []

    def differing(*arguments: Any) -> Any:
        found = real(*arguments)
        calls.append(1)
        if len(calls) == 2:
            object.__setattr__(found, "tokens", [*found.tokens[:-1], found.tokens[-1] + 1])
        return found

    monkeypatch.setattr(demo, "_generate", differing)
    seen = run("demo", "--new-tokens", "4", "--prompt-tokens", "64", "--device", "cpu")
    assert seen.exit_code == 1 and "DIFFER" in seen.stdout


def test_eval_scores_each_variant() -> None:
    few = ("--limit", "5", "--stories", "2", "--hard", "4", "--json", "--device", "cpu")
    seen = run("eval", "tiny", "--variants", "hf,patched,fastlayers", *few)
    scores = json.loads(seen.stdout)
    assert list(scores) == ["hf", "patched", "fastlayers"]
    for name, row in scores.items():
        assert row["exact_match"] >= 0.9 and 1.0 < row["perplexity"] < 2.0, name
        assert row["hard_problems"] == 4 and 0 <= row["hard_exact_match"] <= 1
        assert 0 < row["kl_mean"] < row["kl_p99"] < 0.01 and 0.9 < row["top1_agreement"] <= 1
    assert scores["hf"]["within"] is None and scores["hf"]["kl_mean_bound"] is None
    for name in ("patched", "fastlayers"):
        assert scores[name]["kl_mean_bound"] > scores["hf"]["kl_mean"] and scores[name]["within"] is not None
    assert scores["patched"]["flips"] == 0 and scores["fastlayers"]["flips"] == 0
    assert scores["hf"]["backends"] == {} and scores["fastlayers"]["backends"]["rms_norm"] == "torch"


def test_eval_without_the_comparison_measures_the_rest() -> None:
    few = ("--limit", "2", "--stories", "1", "--hard", "0", "--no-divergence", "--device", "cpu")
    (row,) = json.loads(run("eval", "tiny", "--variants", "fastlayers", "--json", *few).stdout).values()
    assert row["perplexity"] > 1 and row["kl_mean"] is None and row["within"] is None
    assert row["hard_exact_match"] is None
    seen = run("eval", "tiny", "--variants", "fastlayers", "--check", *few)
    assert isinstance(seen.exception, ArgumentError) and "--no-divergence" in str(seen.exception)


def test_eval_can_fail_where_a_bound_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    # Weights in FP8 under the name of a variant whose numbers are to be those of fp32.
    wrong = dataclasses.replace(VARIANTS["fp8-block-fp32"], name="fastlayers-fp32", roundings=())
    monkeypatch.setitem(VARIANTS, "fastlayers-fp32", wrong)
    few = ("--limit", "1", "--stories", "1", "--hard", "0", "--device", "cpu", "--variants", "fastlayers-fp32")
    for options, code in (((), 0), (("--check",), 1)):
        seen = run("eval", "tiny", *few, *options)
        assert seen.exit_code == code and "its format accounts for" in " ".join(seen.stderr.split())


def test_eval_that_judged_nothing_has_checked_nothing() -> None:
    few = ("--limit", "1", "--stories", "1", "--hard", "0", "--device", "cpu", "--variants", "hf,hf")
    for options, code in (((), 0), (("--check",), 1)):
        seen = run("eval", "tiny", *few, *options)
        assert seen.exit_code == code and ("no variant was judged" in seen.stderr) == bool(options)
        assert seen.stdout.count("Hugging Face, bf16") == 1


def test_eval_says_why_a_variant_does_not_apply_and_runs_the_others() -> None:
    few = ("--limit", "2", "--stories", "1", "--hard", "0", "--json", "--device", "cpu")
    seen = run("eval", GPT_OSS, "--variants", "all", *few)
    scores = json.loads(seen.stdout)
    assert seen.exit_code == 0
    lacking = ("dequantised", "fp8-block", "fp8-block-fp32", "hf-dequantised", "hf-dequantised-fp32")
    assert list(scores) == [name for name in VARIANTS if name not in lacking]
    assert scores["mxfp4"]["flips"] == 0 and scores["mxfp4"]["exact_match"] == 1.0
    shown = " ".join(seen.stderr.split())
    for name in ("dequantised", "fp8-block", "fp8-block-fp32"):
        assert f"{name}: not run, made from a checkpoint that is unquantised, and this one is mxfp4" in shown


def test_eval_keeps_the_rows_that_were_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, device: Any) -> Any:
        raise RuntimeError("no room")

    monkeypatch.setitem(VARIANTS, "patched", dataclasses.replace(VARIANTS["patched"], build=fail))
    few = ("--limit", "2", "--stories", "1", "--hard", "0", "--json", "--device", "cpu")
    seen = run("eval", "tiny", "--variants", "hf,patched,fastlayers", *few)
    assert seen.exit_code == 1 and list(json.loads(seen.stdout)) == ["hf", "fastlayers"]
    assert "error: patched: RuntimeError: no room" in seen.stderr


@pytest.mark.parametrize("command", [("generate", "hi", "--checkpoint"), ("eval",), ("demo",)])
def test_a_checkpoint_without_tokenizer_is_named(command: tuple[str, ...], tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(assets() / TINY / name)
    error = run(*command, str(tmp_path)).exception
    assert isinstance(error, CheckpointError) and f"{tmp_path}: no tokenizer.json" in str(error)


def test_a_tokenizer_without_chat_template_is_named(tmp_path: Path) -> None:
    for file in (assets() / TINY).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings.pop("chat_template", None) or (tmp_path / "chat_template.jinja").exists()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    error = run("generate", "hi", "--checkpoint", str(tmp_path)).exception
    assert isinstance(error, CheckpointError) and "no chat_template.jinja" in str(error)


@pytest.mark.parametrize("command", [("generate", "hi", "--checkpoint"), ("eval",), ("demo",), ("explain",)])
@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_broken_files_of_a_checkpoint_are_named(file: str, command: tuple[str, ...], tmp_path: Path) -> None:
    for each in (assets() / TINY).iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    broken = json.loads((tmp_path / file).read_text()) | {"rms_norm_eps": "small", "model": 3}
    (tmp_path / file).write_text(json.dumps(broken))
    seen = run(*command, str(tmp_path))
    if command[0] == "explain" and file == "tokenizer.json":
        assert seen.exit_code == 0  # it reads no text
        return
    assert isinstance(seen.exception, FastlayersError), seen.exception
    words = str(seen.exception)
    assert "rms_norm_eps" in words if file == "config.json" else str(tmp_path) in words and "tokenizer" in words


def test_convert_says_whom_a_checkpoint_is_for(tmp_path: Path) -> None:
    words = "for fastlayers_models only: stock transformers refuses it, or loads it as other weights"
    for number, (options, shown) in enumerate(((["--format", "int8"], True), (["--ragged"], True), ([], False))):
        seen = run("convert", "tiny", str(tmp_path / str(number)), *options)
        assert seen.exit_code == 0 and (words in " ".join(seen.stdout.split())) == shown, options
    back = run("convert", GPT_OSS, str(tmp_path / "bf16"), "--format", "bf16")
    assert back.exit_code == 0 and "quantization_config" not in (tmp_path / "bf16" / "config.json").read_text()


def test_convert_refuses_what_our_loader_does(tmp_path: Path) -> None:
    tiny = assets() / TINY
    ours, both = ("--format", "int8"), ()
    for name, change, options, said in (
        ("sizes", {"hidden_size": 64}, both, "does not fit the model; wrong shapes: "),
        ("family", {"model_type": "mamba"}, ours, "model_type 'mamba' is unknown"),
        ("setting", {"rms_norm_eps": -1.0}, ours, "rms_norm_eps"),
        ("theirs", {"model_type": "mamba"}, both, ""),
    ):
        source, target = tmp_path / name, tmp_path / f"{name}_made"
        shutil.copytree(tiny, source)
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | change))
        seen = run("convert", str(source), str(target), *options)
        assert said in str(seen.exception) and target.exists() == (not said), (name, seen.exception)


def test_processes_that_fail_say_why_without_torchruns_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    asked = ["generate", "hi", "--checkpoint", str(tmp_path), "--tp", "2", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["fastlayers", *asked])
    monkeypatch.setattr(subprocess, "run", functools.partial(subprocess.run, timeout=240))
    monkeypatch.setenv("TMPDIR", str(folder := tmp_path / "temporary"))
    folder.mkdir()
    with pytest.raises(SystemExit) as ended:
        main()  # which starts the processes; what they write is captured with their descriptors
    shown, errors = capfd.readouterr()
    assert ended.value.code == 1 and shown == ""
    (said,) = set(errors.splitlines())
    assert said.startswith("error: ") and "model_type 'mamba' is unknown" in said
    assert not [path.name for path in folder.iterdir() if "torchelastic" in path.name or "fastlayers" in path.name]


def test_more_ranks_than_heads_are_refused_before_any_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    for tp, other in ((3, ("--device", "cpu")), (32, ("--dp", "2", "--device", "cpu"))):
        seen = run("generate", "hi", "--tp", str(tp), *other).exception
        assert isinstance(seen, ArgumentError) and f"generate: --tp is {tp}; accepted: 1, 2 or 4: each" in str(seen)
    config = {"num_attention_heads": 40}
    for fits in (1, 8, 20, 40, 100):  # of so many processes others say that these are too many
        check_heads("serve", fits, config)
        check_heads("serve", fits, {"text_config": config, "num_attention_heads": 3})
    for unknown in ({}, {"num_attention_heads": None}, {"num_attention_heads": "8"}, {"num_attention_heads": 0}):
        check_heads("serve", 3, unknown)  # the family says what is wrong
    with pytest.raises(ArgumentError, match="--tp is 2; accepted: 1: each"):
        check_heads("serve", 2, {"num_attention_heads": 1})


def test_groups_of_experts_that_do_not_divide_the_ranks_are_named_by_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    for command, words in (
        ("generate hi --dp 2 --ep 3", "generate: --ep is 3; accepted: a divisor of --tp × --dp = 2"),
        ("serve --ep 2", "serve: --ep is 2; accepted: a divisor of --tp × --attn-dp-size = 1"),
    ):
        seen = run(*command.split()).exception
        assert isinstance(seen, ArgumentError) and words in str(seen)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("generate", "hi", "--dtype", "fp64"), "generate: --dtype is 'fp64'; accepted: bf16, fp16, fp32"),
        (("generate", "hi", "--dtype", "e4m3"), "generate: --dtype is 'e4m3'; accepted: bf16, fp16, fp32"),
        (("generate", "hi", "--kv-dtype", "banana"), "--kv-dtype is 'banana'; accepted: bf16, fp16, fp32, e4m3"),
        (("demo", "--dtype", "x"), "demo: --dtype is 'x'; accepted: bf16, fp16, fp32"),
        (("explain", "tiny", "--device", "x"), "explain: --device is 'x'; accepted: cpu, cuda or cuda:N"),
        (("eval", "--device", "x"), "eval: --device is 'x'; accepted: cpu, cuda or cuda:N"),
        (("eval", "no/such/place"), "eval: checkpoint: no/such/place: no such directory"),
        (("warmup", "--device", "x"), "warmup: --device is 'x'; accepted: cpu, cuda or cuda:N"),
        (("tune", "tiny", "--tokens", "1,0"), "tune: --tokens is '1,0'; accepted: positive integers, comma separated"),
        (("tune", "tiny", "--kv-dtype", "x"), "tune: --kv-dtype is 'x'; accepted: bf16, fp16, fp32, e4m3"),
        (("bench", "layer", "nope"), "bench layer: layer is 'nope'; accepted: linear, "),
        (("bench", "layer", "rms_norm", "--tokens", "x"), "bench layer: --tokens is 'x'; accepted: positive integers"),
        (("bench", "model", "tiny", "--batch", "0"), "bench model: --batch is '0'; accepted: positive integers"),
        (("bench", "model", "tiny", "--dtype", "x"), "bench model: --dtype is 'x'; accepted: bf16, fp16, fp32"),
        (("bench", "ablation", "--batch", "-1"), "bench ablation: --batch is '-1'; accepted: positive integers"),
        (("bench", "ablation", "--items", "x"), "bench ablation: --items is 'x'; accepted: positive integers"),
        (("convert", "tiny", "never", "--format", "int8", "--ragged"), "--ragged is given with --format int8"),
    ],
)
def test_options_are_named_with_what_they_take(arguments: tuple[str, ...], words: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, FastlayersError) and words in str(result.exception)
