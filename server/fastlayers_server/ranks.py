"""Commands over several processes: the one that a person starts starts the others by torchrun, and waits for them."""

from __future__ import annotations

import subprocess
import sys

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
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks.processes)]
    command = [sys.executable, *launcher, "-m", "fastlayers_server.cli", *sys.argv[1:]]
    if code := subprocess.run(command, check=False).returncode:
        raise SystemExit(code)
    return True
