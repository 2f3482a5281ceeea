"""Ctrl-C while a command imports what it needs: it ends as any program does, and nobody reads a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# What is imported instead of the command: it says that it is there, and waits for the interrupt.
WAITS = "import os, time\nos.write(1, b'imported')\ntime.sleep(60)\n"


@pytest.mark.parametrize("module", ["fastlayers_server", "fastlayers_server.torchrun"])
def test_an_interrupt_while_modules_are_imported_leaves_no_traceback(module: str, tmp_path: Path) -> None:
    """The command waits in its own imports, torchrun's process in those of torch."""
    instead = {"fastlayers_server": "fastlayers", "fastlayers_server.torchrun": "torch"}[module]
    (tmp_path / f"{instead}.py").write_text(WAITS)
    places = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-m", module, "--version"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": places},
        # As a terminal starts it; what runs in the background of a script ignores interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as started:  # fmt: skip
        assert started.stdout is not None and started.stderr is not None
        assert started.stdout.read(8) == b"imported"
        started.send_signal(signal.SIGINT)
        ended = started.wait(20)
        assert (started.stderr.read(), abs(ended) % 128) == (b"", signal.SIGINT)


def test_a_command_that_is_to_go_on_is_not_ended_by_an_interrupt(tmp_path: Path) -> None:
    (tmp_path / "fastlayers.py").write_text("import os\nos.write(1, b'imported')\nos.read(0, 1)\nraise SystemExit(7)\n")
    places = os.pathsep.join([str(tmp_path), *sys.path])
    command = ["sh", "-c", 'trap "" INT; exec "$0" -m fastlayers_server', sys.executable]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": places}
    ) as started:
        assert started.stdout is not None
        assert started.stdout.read(8) == b"imported"
        started.send_signal(signal.SIGINT)
        started.communicate(b"x", timeout=20)
        assert started.returncode == 7
