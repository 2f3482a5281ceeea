"""What a start does not import before it is ready: each of these costs a large part of a second."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fastlayers_server.cli import SERVERS

ROOTS = [str(Path(__file__).parents[2] / root) for root in ("src", "models", "server")]
BEGIN = f"import sys; sys.path[:0] = {ROOTS!r}\n"
# Until the engine's process is started: with that done early, both processes import at the same time.
BEFORE_THE_ENGINE = """
import asyncio
from pathlib import Path
from fastlayers_server import cli, serve_command
from fastlayers_server.engine import client

class Started(Exception):
    pass

def start(self, deliver):
    raise Started

client.EngineClient.start = start
try:
    serve_command.serve(["--port", "0", *{flags}])
except Started:
    pass
"""
FRONT = """
from fastlayers_server.front.app import make_app, make_front
from fastlayers_server.front.server import Runner
from fastlayers_server.engine.client import engine_client
"""
ENGINE = """
from fastlayers_server.engine import child, startup
"""
BUILT = """
import threading
from fastlayers_server.engine.config import EngineConfig
from fastlayers_server.engine.grammar import GrammarMasks
from fastlayers_server.engine.startup import build
GrammarMasks.read = lambda self: None  # on a thread of its own, when the engine is ready
parts = build(EngineConfig(model="tiny", max_model_len=256), lambda phase: None)
assert "grammar" in parts.info.features
"""
# What `pip install .` and `make demo` set up has none of them.
BARE = """
import contextlib, io
from importlib.machinery import PathFinder

found = PathFinder.find_spec
SERVERS = {servers}

def find_spec(cls, name, path=None, target=None):
    return None if name in SERVERS else found(name, path, target)

PathFinder.find_spec = classmethod(find_spec)
from fastlayers_server import cli, demo
for arguments in {commands}:
    sys.argv = ["fastlayers", *arguments]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            cli.main()
    except SystemExit as end:
        print(*arguments, "ends with", end.code or 0, file=sys.stderr)
"""
# What takes transformers' place in sys.modules is another module than the one whose import others may be waiting for.
REPLACED = """
import sys, time, types

class Found(BaseException):  # no handler of errors takes it
    pass

class PreTrainedTokenizerFast:
    def from_pretrained(folder, local_files_only):
        raise Found

time.sleep(0.5)
sys.modules[__name__] = types.SimpleNamespace(PreTrainedTokenizerFast=PreTrainedTokenizerFast, Found=Found)
del PreTrainedTokenizerFast
"""
WAITING = """
import importlib, threading, time
from pathlib import Path
from fastlayers_server.engine.grammar import tokenizer_info
from fastlayers_server.front.tokens import TokenText
sys.path.insert(0, "{folder}")
first = threading.Thread(target=importlib.import_module, args=("transformers",))
first.start()
while "transformers" not in sys.modules:
    time.sleep(0.001)
try:
    {call}
except importlib.import_module("transformers").Found:
    print("found")
"""
HEAVY = ("torch", "transformers", "xgrammar", "triton", "sympy", "aiohttp", "opentelemetry.sdk", "litellm", "openai")


def loaded(*codes: str) -> list[set[str]]:
    """Return the modules of a fresh process behind each of these, which it ran one after the other."""
    code = BEGIN + "".join(f"{code}\nprint(*sys.modules)\n" for code in codes)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [set(line.split()) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("flags", [[], ["Qwen/Qwen3-8B", "--load-format", "dummy"]])
def test_before_the_engines_process_is_started(flags: list[str]) -> None:
    (found,) = loaded(BEFORE_THE_ENGINE.replace("{flags}", repr(flags)))
    assert "fastlayers_server.engine.client" in found
    assert not found & {*HEAVY, "starlette.routing", "uvicorn", "tokenizers"}


def test_the_front_without_its_tokenizer() -> None:
    (found,) = loaded(FRONT)
    assert "starlette.routing" in found and not found & {*HEAVY}


def test_the_engine_and_one_that_is_built_on_a_cpu() -> None:
    """In one process: what the first may not import, the second has not found there."""
    began, built = loaded(ENGINE, BUILT)
    assert "torch" in began
    assert not began & {"transformers", "xgrammar", "triton", "sympy", "torch._dynamo", "torch._inductor", "starlette"}
    assert not built & {"transformers", "xgrammar", "torch._dynamo", "torch._inductor", "sympy", "starlette"}


@pytest.mark.parametrize("call", ["TokenText(Path('{folder}'))", "tokenizer_info(Path('{folder}'), 8, [])"])
def test_a_tokenizer_while_another_thread_imports_transformers(call: str, tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text(REPLACED)
    (tmp_path / "xgrammar.py").write_text("from transformers import PreTrainedTokenizerFast as TokenizerInfo")
    (tmp_path / "tokenizer.json").write_text("{}")
    found, _ = loaded(WAITING.replace("{call}", call).replace("{folder}", str(tmp_path)))
    assert found == {"found"}


def test_without_the_packages_of_a_server(tmp_path: Path) -> None:
    wanted = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    listed = [re.split(r"[>;]", text)[0] for text in wanted["optional-dependencies"]["server"]]
    servers = sorted({"pyzmq": "zmq"}.get(name, name) for name in listed if name != "pydantic")  # which typer brings
    assert servers == sorted(SERVERS), "what the sentence names is what the extra brings"
    runs = [["backends", "mla"], ["convert", "--help"], ["bench", "--help"], ["cache", "--help"]]
    need = [["generate", "x"], ["eval", "tiny"], ["serve"], ["bench", "serve"], ["bench", "startup"]]
    code = BARE.replace("{servers}", repr(servers)).replace("{commands}", repr([*runs, *need]))
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code], capture_output=True, text=True, check=False, cwd=tmp_path
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ends = [line for line in done.stderr.splitlines() if " ends with " in line]
    assert ends == [f"{' '.join(c)} ends with {int(c in need)}" for c in [*runs, *need]], done.stderr
    assert done.stderr.count("is not installed, which this command needs: pip install 'fastlayers[server]'") == len(
        need
    )
