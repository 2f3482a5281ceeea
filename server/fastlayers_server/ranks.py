"""Commands over several processes: the one that a person starts starts the others by torchrun, and waits for them.

``python -m fastlayers_server.ranks`` is torchrun without its report: a process that fails says why itself.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Sequence

from fastlayers import env
from fastlayers.comm.ranks import Ranks
from fastlayers.errors import ArgumentError

# Processes that one command starts at most: a mistyped number is not to take the machine.
MOST = 64


def started_elsewhere(ranks: Ranks) -> bool:
    """Run this command again in as many processes as ``ranks`` asks for, and return whether that was done.

    ``False`` in a process of torchrun's, and where one process is enough: the caller does the work itself.

    Raises
    ------
    ArgumentError
        More processes than a host runs.
    SystemExit
        The processes failed; they have said why.
    """
    if ranks.processes == 1 or env.torchrun_rank() is not None:
        return False
    if ranks.processes > MOST:
        accepted = f"at most {MOST} processes of this host; torchrun starts more over several"
        raise ArgumentError("fastlayers", "--tp × --dp", ranks.processes, accepted)
    command = [*launcher(ranks.processes, "fastlayers_server.cli"), *sys.argv[1:]]
    if code := subprocess.run(command, check=False).returncode:
        raise SystemExit(code)
    return True


def launcher(processes: int, module: str) -> list[str]:
    """Return the command that runs a module in so many processes of this host; its arguments are appended."""
    options = ["--standalone", "--max-restarts", "0", "--nproc-per-node", str(processes)]
    return [sys.executable, "-m", "fastlayers_server.ranks", *options, "-m", module]


def _launch(arguments: Sequence[str]) -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    logging.disable(logging.ERROR)
    try:
        main(arguments)
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        if first.exitcode < 0:  # by a signal, so it could not say anything
            print(f"error: the process of rank {rank} was ended by {first.signal_name()}", file=sys.stderr)
        return max(1, first.exitcode)
    return 0


if __name__ == "__main__":
    raise SystemExit(_launch(sys.argv[1:]))
