"""torchrun without its report: a process that fails says why itself, and one that hangs is asked where.

``python -m fastlayers_server.torchrun`` takes torchrun's arguments; SIGUSR1, which reaches all processes, asks. Nothing
but Python's own is imported before :func:`launch`, so that Ctrl-C ends it from the first moment on without a traceback.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ANSWER_SECONDS = 0.05  # in which a rank says where it is
SILENT = dict.fromkeys("Tt", " is stopped and does not answer") | {"D": " waits in the kernel and may not answer"}


def state_of(process: int) -> str:
    """Return the letter by which Linux tells what a process does; an :class:`OSError` where it cannot be read."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def _ask_all(number: int, frame: object) -> None:
    """Pass a signal on to the ranks, one after the other, and say whose answer follows, or that none will."""
    pids = [pid for thread in Path("/proc/self/task").glob("*/children") for pid in thread.read_text().split()]
    for pid in sorted(map(int, pids)):  # as they were started
        with contextlib.suppress(OSError):  # it is gone
            given = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            rank = next((each[5:].decode() for each in given if each.startswith(b"RANK=")), "unknown")
            silent = SILENT.get(state_of(pid), "")
            os.write(2, f"rank {rank} (pid {pid}){silent}:\n".encode())  # what is in the middle of a print cannot print
            os.kill(pid, number)
            time.sleep(ANSWER_SECONDS)


def launch(arguments: Sequence[str], told: Callable[[str], None]) -> int:
    """Run torchrun with these arguments, and return the exit code; ``told`` hears which process a signal ended."""
    try:
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import main
    except KeyboardInterrupt:  # torchrun takes signals from its start on; importing it is seconds
        return 128 + signal.SIGINT

    signal.signal(signal.SIGUSR1, _ask_all)
    logging.disable(logging.ERROR)
    try:
        # It makes a folder for logs that it writes none to, and leaves it; a later --log-dir is the caller's own.
        with tempfile.TemporaryDirectory(prefix="fastlayers_ranks_", ignore_cleanup_errors=True) as logs:
            main(["--log-dir", logs, *arguments])
    except ChildFailedError as error:
        # Of those of the same second a signal is the cause of the others, unless it is torchrun's own.
        rank, first = min(
            error.failures.items(), key=lambda each: (each[1].timestamp, not _signalled(each[1].exitcode))
        )
        if first.exitcode == -signal.SIGINT:  # a terminal's, which torchrun hears as well
            return 128 + signal.SIGINT
        if first.exitcode < 0:  # by a signal, so it could not say anything
            told(f"the process of rank {rank} was ended by {first.signal_name()}")
        return max(1, first.exitcode)
    except SignalException as error:  # its processes are gone by then
        return 128 + error.sigval
    return 0


def _signalled(exitcode: int) -> bool:
    return exitcode < 0 and exitcode != -signal.SIGTERM


if __name__ == "__main__":
    raise SystemExit(launch(sys.argv[1:], lambda said: print(f"error: {said}", file=sys.stderr)))
