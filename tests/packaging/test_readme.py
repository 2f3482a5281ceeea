"""The README's numbers are those of the committed result files, and its examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_tables_come_from_the_result_files() -> None:
    checked = subprocess.run(
        [sys.executable, "tools/readme_tables.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr


def test_the_model_builders_example_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    example = next(block for block in blocks if "fl.FusedMoE" in block)
    code = f"import sys; sys.path[:0] = ['src', 'models', 'server']\n{example}"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0 and "fused_moe" in ran.stdout and "trtllm_gen" in ran.stdout, ran.stderr
