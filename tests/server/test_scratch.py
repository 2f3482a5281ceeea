"""Nothing of a run stays in the temporary folder: converted checkpoints, an engine's sockets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fastlayers_models

TINY = Path(fastlayers_models.__file__).parent / "assets" / "tiny_deepseek_v3"
# Imports take most of the time: the process that is killed is a fork, and what imported is the next one.
FORKS = """
import os, sys, time
{imports}
forked = os.fork()
if forked:
    os.waitpid(forked, 0)
    sys.stdin.readline()
{work}
print(os.getpid(), flush=True)
if not forked:
    time.sleep(60)
"""
CONVERT = FORKS.format(
    imports="from pathlib import Path\nfrom fastlayers_server.variants import BF16, _fp8_folder, _multiplied_out",
    work=f"assert (_multiplied_out(_fp8_folder(Path({str(TINY)!r})), BF16) / 'config.json').exists()",
)
START = FORKS.format(
    imports=(
        "from fastlayers_server.engine.config import EngineConfig\n"
        "from fastlayers_server.engine.client import EngineClient"
    ),
    work=(
        "engine = EngineClient(EngineConfig('tiny'), [sys.executable, '-c', 'import time; time.sleep(2)'])\n"
        "engine.start(lambda message: None)\n"
        # Between its fork and its exec the engine's process holds what ours does.
        "while not engine.pid:\n    time.sleep(0.01)\n"
        "assert engine._folder.is_dir()"
    ),
)


@pytest.mark.parametrize(
    "program", [CONVERT, START + "engine.shutdown()\n"], ids=["converted checkpoints", "an engine's sockets"]
)
def test_a_killed_process_leaves_what_the_next_removes(program: str, short_folder: Path) -> None:
    def left() -> list[str]:
        return [path.name for path in short_folder.iterdir() if path.name.startswith("fastlayers-")]

    command, pipe = [sys.executable, "-c", program], subprocess.PIPE
    environment = os.environ | {"TMPDIR": str(short_folder)}
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        forked = int(process.stdout.readline())
        assert forked != process.pid and left()
        os.kill(forked, signal.SIGKILL)
        assert left()
        process.stdin.write("\n")
        process.stdin.close()
        assert int(process.stdout.readline()) == process.pid and process.wait(120) == 0
    assert not left()
