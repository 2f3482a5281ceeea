"""Ladders between ranks: the file is what the results say, and a choice follows it as far as the workspace reaches."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlayers.comm import ladders
from fastlayers.comm.all_reduce.layer import ALL_REDUCE, AllReduceConfig
from fastlayers.comm.expert_exchange.layer import EXPERT_EXCHANGE, ExpertExchangeConfig
from fastlayers.comm.gather_rows.layer import GATHER_ROWS, GatherRowsConfig
from fastlayers.comm.parallel import Axis
from fastlayers.comm.rank_layer import RankConfig, with_limit
from fastlayers.comm.sum_norm.layer import SUM_NORM, SumNormConfig
from fastlayers.device import DESCRIBED
from fastlayers.registry import Registry
from fastlayers.registry.choice import Choice, Rung
from fastlayers.tuning import SHIPPED, TunedTableError

TOOLS = Path(__file__).parents[2] / "tools"
H200 = DESCRIBED["H200"]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    spec = importlib.util.spec_from_file_location("rank_ladders", TOOLS / "rank_ladders.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "rank_ladders", module)
    spec.loader.exec_module(module)
    return module


def test_the_file_is_what_the_results_say(tool: Any) -> None:
    shipped = json.loads((SHIPPED / ladders.NAME).read_text())
    assert json.loads(json.dumps(tool.table())) == shipped, "run: python tools/rank_ladders.py"
    (ours,) = [each for each in shipped["ladders"] if each["way"] == "spread"]
    rows = map(
        json.loads, (tool.SHIPPED.parents[2] / "benchmarks/results/two_gpus_rows_h200.jsonl").read_text().splitlines()
    )
    (most,) = [row for row in rows if row.get("what") == "exchange_time" and row["rows"] == 2048]
    assert ours["times"]["triton_symm_mem"][ours["tokens"].index(1024)] == most["scatter_norm_gather_us"]


def test_other_results_make_another_ladder(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = {"command": "c", "commit": "abc", "torch": "2", "nccl": "2", "ranks": 2, "device": "NVIDIA H200"}
    times = [(16, 10.0, 8.0), (64, 10.0, 9.95), (256, 11.0, 20.0)]
    rows = [
        {"what": "exchange_time", "hidden": 4096, "rows": n, "gather_us": a, "nccl_gather_us": b} for n, a, b in times
    ]
    partial = [head | {"commit": "later"}, rows[0] | {"nccl_gather_us": 99.0}]
    text = "\n".join(map(json.dumps, [head | {"commit": "old"}, rows[2], head, *rows, *partial]))
    (tmp_path / "two_gpus_rows_h200.jsonl").write_text(text)
    monkeypatch.setattr(sys.modules["distributed_tables"], "RESULTS", tmp_path)
    (entry,) = tool.table()["ladders"]
    # Rows of one rank; 9.95 us instead of 10 is noise, in which the rung goes on.
    assert entry["ladder"] == [
        {"max_tokens": 32, "backend": "nccl", "microseconds": 9.95},
        {"max_tokens": None, "backend": "triton_symm_mem", "microseconds": 11.0},
    ]
    assert (entry["made"]["commit"], entry["layer"], entry["hidden_size"]) == ("abc", "gather_rows", 4096)


def chosen(table: Registry, cfg: RankConfig, device: Any = H200) -> Choice:
    return with_limit(Choice(table.layer, cfg, device, "auto", (Rung(None, table.named("triton_symm_mem")),)), table)


@pytest.fixture
def with_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastlayers.comm.rank_layer.by_nccl", lambda group: True)


@pytest.mark.usefixtures("with_nccl")
def test_what_was_measured_serves_up_to_the_workspace() -> None:
    cfg = SumNormConfig(Axis(2), 7168, slots=1024)
    for given, hidden in ((7168, 7168), (8192, 7168), (2880, 2048)):
        made = chosen(SUM_NORM, replace(cfg, hidden_size=given))
        assert made.name == "triton_symm_mem:1024|nccl"
        assert (
            made.evidence.startswith("between_ranks.json: measured with 2 ranks to ")
            and f"rows of {hidden} " in made.evidence
        )
        assert made.evidence.endswith("; the workspace was made for 1024 rows")
    spread = chosen(SUM_NORM, replace(cfg, spread=True, slots=4096))
    assert spread.name == "triton_symm_mem:4096|nccl" and "to 8192 rows of 7168" in spread.evidence
    tokens = ExpertExchangeConfig(Axis(2), 7168, slots=512, num_experts=256, top_k=8)
    assert "to 512 rows" in chosen(EXPERT_EXCHANGE, tokens).evidence
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__version__", "3.0")
        assert ", with torch 2.11.0+cu130, now 3.0; the workspace" in chosen(SUM_NORM, cfg).evidence


@pytest.mark.usefixtures("with_nccl")
@pytest.mark.parametrize(
    ("table", "cfg", "device", "why"),
    [
        (SUM_NORM, SumNormConfig(Axis(4), 7168, slots=64), "H200", "no ladder was measured for 4 ranks, H200"),
        (SUM_NORM, SumNormConfig(Axis(2), 7168, slots=64), "H100", "no ladder was measured for 2 ranks, H100"),
        (SUM_NORM, SumNormConfig(Axis(2), 512, slots=64), "H200", "rows of 512 bfloat16"),
        (SUM_NORM, SumNormConfig(Axis(2), 7168, torch.float16, slots=64), "H200", "rows of 7168 float16"),
        (SUM_NORM, SumNormConfig(Axis(2), 4096, slots=64, spread=True), "H200", "no spread ladder was measured"),
        (GATHER_ROWS, GatherRowsConfig(Axis(2), 7168, slots=64, payload="fp8_128"), "H200", "no fp8_128 ladder"),
    ],
)  # fmt: skip
def test_without_a_measured_ladder_the_workspace_decides(table: Any, cfg: Any, device: str, why: str) -> None:
    made = chosen(table, cfg, DESCRIBED[device])
    assert made.name == "triton_symm_mem:64|nccl"
    assert made.evidence.startswith("rank; the workspace was made for 64 rows; ") and why in made.evidence


def planted(folder: Path, ladder: list[tuple[int | None, str]], **other: Any) -> str:
    """Write a file with a ladder of all_reduce; return its folder."""
    rows = [{"max_tokens": limit, "backend": name} for limit, name in ladder]
    entry = {
        "layer": "all_reduce", "way": "", "ranks": 2, "device": "H200", "dtype": "bfloat16", "hidden_size": 7168,
        "ladder": rows, "tokens": [1, 4096], "made": {"commit": "abc", "torch": torch.__version__},
    }  # fmt: skip
    (folder / ladders.NAME).write_text(json.dumps({"schema": 1, "ladders": [entry | other]}))
    return str(folder)


@pytest.mark.usefixtures("with_nccl")
@pytest.mark.parametrize(
    ("ladder", "name"),
    [
        ([(8, "nccl"), (512, "triton_symm_mem"), (None, "nccl")], "nccl:8|triton_symm_mem:512|nccl"),
        ([(8, "nccl"), (None, "triton_symm_mem")], "nccl:8|triton_symm_mem:1024|nccl"),
        ([(8, "nccl"), (2048, "triton_symm_mem"), (None, "nccl")], "nccl:8|triton_symm_mem:1024|nccl"),
        ([(2048, "nccl"), (None, "triton_symm_mem")], "nccl"),
        ([(None, "nccl")], "nccl"),
        ([(64, "triton_symm_mem"), (2048, "nccl"), (None, "triton_symm_mem")], "triton_symm_mem:64|nccl"),
    ],
)  # fmt: skip
def test_rungs_of_a_table_are_taken_and_cut(
    ladder: list[tuple[int | None, str]], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTLAYERS_TUNED_DIR", planted(tmp_path, ladder))
    assert chosen(ALL_REDUCE, AllReduceConfig(Axis(2), 7168, slots=1024)).name == name


@pytest.mark.usefixtures("with_nccl")
def test_a_table_names_only_what_runs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = AllReduceConfig(Axis(2), 7168, slots=1024)
    monkeypatch.setenv("FASTLAYERS_TUNED_DIR", planted(tmp_path, [(8, "multimem"), (None, "triton_symm_mem")]))
    made = chosen(ALL_REDUCE, cfg)
    assert made.name == "triton_symm_mem:1024|nccl"
    assert made.evidence.endswith("the measured ladder is not taken: multimem: multicast is off on this fabric")
    wrong: list[tuple[list[tuple[int | None, str]], dict[str, Any], str]] = [
        ([(None, "nobody")], {}, "backend 'nobody' is unknown; known: triton_symm_mem, nccl"),
        ([(8, "nccl"), (4, "nccl")], {}, r"thresholds \[8, 4\] are not positive, increasing"),
        ([(None, "nccl")], {"made": {}}, "is corrupt: KeyError: 'commit'"),
        ([(None, "nccl")], {"tokens": []}, "is corrupt: IndexError"),
    ]
    for ladder, other, said in wrong:
        planted(tmp_path, ladder, **other)
        ladders._read.cache_clear()
        with pytest.raises(TunedTableError, match=said):
            chosen(ALL_REDUCE, cfg)
