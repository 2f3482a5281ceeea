"""An out-of-tree backend in a real distribution: its metadata is found, it runs, and it leaves again with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

BACKEND = """
from fastlayers.registry import Backend

def register(add):
    add("rms_norm", Backend("doubler", "dummy_backend:Doubler", auto_on=("cpu",)), before="triton")

class Doubler:
    def __init__(self, cfg):
        self.cfg = cfg
    def __call__(self, x, weight, residual):
        return 2 * x, residual
"""
PROBE = """
import json, torch, fastlayers as fl
from importlib import import_module
norm = fl.RMSNorm(4)
x = torch.arange(4.0).view(1, 4)
print(json.dumps({
    "chosen": norm.choice.name, "y": norm(x)[0].tolist(), "rows": [r.name for r in fl.backends("rms_norm")],
    "torch": fl.RMSNorm(4, backend="torch").choice.name, "errors": import_module("fastlayers.registry").plugin_errors,
}))
"""


def install(folder: Path, name: str, entry: str, code: str) -> None:
    """Lay out an installed distribution by hand: what an installer leaves behind, without one."""
    (folder / f"{name}.py").write_text(code)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[fastlayers.backends]\n{name} = {entry}\n")


def probe(*paths: Path) -> dict:
    path = os.pathsep.join([*map(str, paths), *filter(None, sys.path)])
    run = subprocess.run(
        [sys.executable, "-c", PROBE], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_an_installed_backend_is_chosen_and_a_broken_one_is_only_reported(tmp_path: Path) -> None:
    install(tmp_path, "dummy_backend", "dummy_backend:register", BACKEND)
    install(tmp_path, "broken_backend", "broken_backend:register", "raise ImportError('needs libfast.so.3')")
    seen = probe(tmp_path)
    assert (seen["chosen"], seen["torch"]) == ("doubler", "torch")
    assert seen["y"] == [0.0, 2.0, 4.0, 6.0]
    assert seen["rows"][:2] == ["doubler", "triton"]
    assert seen["errors"] == {"broken_backend": "ImportError: needs libfast.so.3"}


def test_without_it_nothing_is_left() -> None:
    seen = probe()
    assert seen["chosen"] == "torch" and "doubler" not in seen["rows"] and seen["errors"] == {}
