"""Parts write what docs/systems.md reads: rows made of their own points, and nothing measured."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fastlayers import tuning
from fastlayers.device import DESCRIBED
from fastlayers.registry import registry
from fastlayers_server.ablation import SWITCHES
from fastlayers_server.tune_command import jobs_of_shapes

ROOT = Path(__file__).parents[2]
H200 = DESCRIBED["H200"]
# What parts of performance.py and of the ablation answer; the others' programs are run small, in test_programs.py.
ANSWERED = {5, 18, 22, 24, 28, 42, 44, 45, 46, 47}


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    for name in ("benchmarks", "tools"):
        monkeypatch.syspath_prepend(str(ROOT / name))
    found = import_module("systems_figures")
    monkeypatch.setattr(found, "RESULTS", tmp_path)
    return found


def names_of(item: Any, peers: dict[str, Any]) -> Iterator[str]:
    """Yield what is timed at an item's points on an H200 with all packages: "auto", other backends, peers."""
    for row in registry(item.layer).ranked:
        wanted = any(map(row.name.startswith, item.against)) if item.against else "cuda" in row.auto_on
        if wanted and row.refusal(item.cfg, H200) is None:
            yield row.name
    yield from (row.name for row in peers.get(item.layer, ()) if row.refusal(item.cfg, H200) is None)


def rows_of(part: Any) -> Iterator[dict[str, Any]]:
    """Yield what a part of performance.py writes, but for the times."""
    driver, peers = import_module("performance"), import_module("small_peers").PEERS
    words = shlex.split(part.command)
    only = words[words.index("--only") + 1] if "--only" in words else ""
    for item in driver.MEASURED[words[words.index("--part") + 1]]():
        if not re.search(only, f"{item.model} {item.layer} {item.cfg}"):
            continue
        names = list(names_of(item, peers))
        for key, count, context in item.points():
            about = {"key": key, "model": item.model, "cfg": repr(item.cfg), "context": context, "layer": item.layer}
            about |= {"tokens": count, "config": {}, "error": 0.01, "of_memory": 0.5, "ragged": item.ragged}
            yield from (about | {"backend": name, "auto": name == names[0], "us": 9.0} for name in names)


def test_figures_are_found_in_what_parts_write(figures: Any, tmp_path: Path) -> None:
    parts = import_module("parts").PARTS
    (tmp_path / "performance").mkdir()
    for part in parts:
        if "performance.py" in part.command and "_alone" not in part.name:
            with (tmp_path / part.result).open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows_of(part))
    (made,) = (part for part in parts if part.name == "ablation.DeepSeek-V3")
    about = {"model": "deepseek-ai/DeepSeek-V3", "batch": 1, "ratio": 1.1}
    (tmp_path / made.result).write_text("".join(json.dumps(about | {"what": each.what}) + "\n" for each in SWITCHES))
    found, lost = set(), []
    for figure in import_module("systems_items").FIGURES:
        file, _, word = figure.evidence.partition("#")
        if (tmp_path / file).is_file() and figure.item in ANSWERED and "slice" not in file:
            found.add(figure.item)
            there = word in (tmp_path / file).read_text()
            lost += [] if there and figure.find() is not None else [(figure.item, figure.what)]
    assert lost == [] and found == ANSWERED


def test_tables_are_found_where_tuners_write_them(figures: Any, tmp_path: Path) -> None:
    """Their files have the names that figures look for, and each of their layers' own kernels has something to try."""
    for part in import_module("parts").PARTS:
        names = ("fused_moe_257", "int8_linear", "weight_only_linear", "weight_only_linear_32", "fused_moe_w4a16")
        if part.name not in [f"retune.{name}" for name in names]:
            continue
        words = shlex.split(part.command)
        layer = words[words.index("--layer") + 1]
        shapes = [value for name, value in pairwise(words) if name == "--shape"]
        assert shapes and part.result == f"tuned/{layer}"
        for job in jobs_of_shapes(layer, shapes):
            path = tuning.path_of(tmp_path / "tuned", layer, job.key, H200)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
            assert len(registry(layer).named("triton").load().candidates(job.cfg, 16)) > 3
    measured = [item for item in import_module("performance").weight_only() if item.layer == "weight_only_linear"]
    four = {tuning.key_of(item.cfg) for item in measured if item.cfg.format == "w4a16"}
    folder = tmp_path / "tuned" / "weight_only_linear"
    assert {path.name.partition(",device_name")[0] for path in folder.iterdir()} == four
    assert figures.shared_experts() is not None
    shared = next(each for each in import_module("systems_items").FIGURES if each.find is figures.shared_experts)
    assert (tmp_path / shared.evidence).is_file()
    assert (
        figures.tuned_weights().measured == "shapes with a table: int8 1, w4a16 6, experts in w4a16 1, 8 bits alone 0"
    )
