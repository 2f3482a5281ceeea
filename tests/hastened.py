"""Run a program as ``python PROGRAM`` would, its interpreted kernels hastened: ``python hastened.py PROGRAM ...``."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

if os.environ.get("TRITON_INTERPRET") == "1":
    from quick_interpreter import hasten

    hasten()
del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
