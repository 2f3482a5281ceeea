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
CONVERT = (
    "import sys, time\n"
    "from pathlib import Path\n"
    "from fastlayers_server.variants import _bf16_folder, _fp8_folder\n"
    f"folder = _bf16_folder(_fp8_folder(Path({str(TINY)!r})))\n"
    "print((folder / 'config.json').exists(), flush=True)\n"
    "time.sleep(float(sys.argv[1]))\n"
)
START = (
    "import sys, time\n"
    "from fastlayers_server.engine.config import EngineConfig\n"
    "from fastlayers_server.engine.client import EngineClient\n"
    "engine = EngineClient(EngineConfig('tiny'), [sys.executable, '-c', 'import time; time.sleep(2)'])\n"
    "engine.start(lambda message: None)\n"
    "print(engine._folder.is_dir(), flush=True)\n"
    "time.sleep(float(sys.argv[1]))\n"
    "engine.shutdown()\n"
)


@pytest.mark.parametrize("program", [CONVERT, START], ids=["converted checkpoints", "an engine's sockets"])
def test_a_killed_process_leaves_what_the_next_removes(program: str, short_folder: Path) -> None:
    environment = os.environ | {"TMPDIR": str(short_folder)}
    for wait, killed in (("60", True), ("0", False)):
        command = [sys.executable, "-c", program, wait]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "True\n"
        if killed:
            process.send_signal(signal.SIGKILL)
        process.wait(120)
        found = [path.name for path in short_folder.iterdir() if path.name.startswith("fastlayers-")]
        assert bool(found) == killed, found
