"""Commands over several processes: the one that a person starts starts the others by torchrun, and waits for them."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from fastlayers import env
from fastlayers.comm.ranks import Ranks
from fastlayers.errors import ArgumentError
from fastlayers_server.torchrun import state_of

# Processes that one command starts at most: a mistyped number is not to take the machine.
MOST = 64
STORE_SECONDS, SAYING_SECONDS = 5, 1.0  # that the store may take to answer, and that an error takes to be printed
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def started_elsewhere(command: str, ranks: Ranks) -> bool:
    """Run ``command`` again in as many processes as ``ranks`` asks for, and return whether that was done.

    ``False`` in a process of torchrun's, and where one process is enough: the caller does the work itself.

    Raises
    ------
    ArgumentError
        More processes than a host runs.
    SystemExit
        The processes failed; they have said why.
    """
    if (started := env.torchrun_rank()) is not None:
        if started[0] > 0:  # what is noticed of a model the first rank says
            logging.getLogger("fastlayers").setLevel(logging.ERROR)
            logging.getLogger("fastlayers_models").setLevel(logging.ERROR)
        # A terminal tells torchrun as well, which says nothing either. Who waits in a collective runs no handler.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        end_with_launcher()
        return False
    if ranks.processes == 1:
        return False
    if ranks.processes > MOST:
        accepted = f"at most {MOST} processes of this host; torchrun starts more over several"
        raise ArgumentError(command, "--tp × --dp", ranks.processes, accepted)
    started_again = [*launcher(ranks.processes, "fastlayers_server"), *sys.argv[1:]]
    if code := subprocess.run(started_again, check=False).returncode:
        if code < 0:  # so it could not say anything, and its processes are gone with it
            print(f"error: torchrun was ended by {signal.Signals(-code).name}", file=sys.stderr)
        raise SystemExit(max(1, code))
    return True


def check_heads(command: str, tp: int, config: Mapping[str, Any]) -> None:
    """Raise :class:`ArgumentError` for more ranks than a model's attention is split over; each would say so by itself.

    Parameters
    ----------
    command : str
        Named in the error.
    tp : int
    config : mapping
        The parsed ``config.json``. What is wrong with it others say.
    """
    text = config.get("text_config")
    config = text if isinstance(text, Mapping) else config
    heads = config.get("num_attention_heads")
    if tp == 1 or tp > MOST or not isinstance(heads, int) or heads < 1:
        return
    able = [str(count) for count in range(1, min(heads, MOST) + 1) if heads % count == 0]
    if str(tp) not in able:
        accepted = " or ".join(filter(None, (", ".join(able[:-1]), able[-1])))
        raise ArgumentError(command, "--tp", tp, f"{accepted}: each rank has as many of the {heads} attention heads")


def check_experts(command: str, ep: int, processes: int, flags: str) -> None:
    """Raise :class:`ArgumentError` for groups of experts that do not divide the ``processes`` that flags ask for."""
    if ep > 0 and processes > 0 and processes % ep:
        raise ArgumentError(command, "--ep", ep, f"a divisor of {flags} = {processes}")


def launcher(processes: int, module: str, program: str = "fastlayers_server.torchrun") -> list[str]:
    """Return the command that runs a module in so many processes of this host; its arguments are appended.

    ``program``: the module that calls :func:`fastlayers_server.torchrun.launch`.
    """
    options = ["--standalone", "--max-restarts", "0", "--nproc-per-node", str(processes)]
    return [sys.executable, "-m", program, *options, "-m", module]


def said_by_another(error: str) -> bool:
    """Return whether another rank of this command ends with the same words, and has said them.

    Ranks mostly fail alike. One that has nothing to say stays a while: with it torchrun ends those that speak.
    """
    try:
        if env.torchrun_rank() is None:
            return False
        import torch.distributed as dist

        store = next(dist.rendezvous("env://", timeout=timedelta(seconds=STORE_SECONDS)))[0]
        first = store.add(f"fastlayers/said/{error}", 1) == 1
    except (RuntimeError, ValueError):  # no store, nobody there, or numbers that are none
        return False
    if not first:
        time.sleep(SAYING_SECONDS)
    return not first


def end_with_launcher() -> None:
    """Have the system end this process when what started it is gone: also one that is stopped or hangs, where it can.

    Such a process could not end itself, and would keep its part of the GPU from those that are started in its place.
    """
    launcher = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)


def ended(process: int) -> bool:
    """Return whether a process is gone, or has ended while whoever started it has not asked for its exit code."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # somebody else's, but there
        return False
    try:
        return state_of(process) == "Z"
    except OSError:  # no such files on this system, or gone meanwhile
        return False
