"""Build one module of a package, in a process of its own: ``python build_child.py``, and on its input a line of JSON.

The process leads a group, in which the package's compilers are, and ends the group when its input ends: then whoever
asked for the module is gone. What the package writes goes through; the last line is :data:`MARK` and the result.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import signal
import sys
import threading
from typing import Any

MARK = "fastlayers-module "


def argument(value: Any) -> Any:
    """Return what the package is given for a value of JSON: a mapping names one of torch's dtypes."""
    if not isinstance(value, dict):
        return value
    import torch

    return getattr(torch, value["dtype"])


def _end_with_who_asked() -> None:
    while os.read(0, 1):  # not sys.stdin, which a thread may not hold when the process ends
        pass
    os.killpg(0, signal.SIGKILL)


def build(request: dict[str, Any]) -> None:
    """Describe the module and build it, unless it comes built; one process at a time, which the package needs not see.

    Packages write a module's sources before they take a lock of their own.
    """
    sys.path[:] = request["path"]
    where, _, name = request["maker"].partition(":")
    with open(request["lock"], "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        module = getattr(importlib.import_module(where), name)(*map(argument, request["arguments"]))
        if not module.is_aot:
            module.build(False)


def main() -> None:
    """Do what the first line of the input says."""
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_who_asked, daemon=True).start()
    error = None
    try:
        build(request)
    except BaseException as raised:  # a package may raise anything; who asked has to know
        error = f"{type(raised).__name__}: {raised}"
    sys.stderr.flush()
    print("\n" + MARK + json.dumps(error), flush=True)
    os._exit(0)  # taking libraries down takes a second


if __name__ == "__main__":
    main()
