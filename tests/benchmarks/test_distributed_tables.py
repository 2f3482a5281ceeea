"""The measured tables of docs/distributed.md: fresh, from the last run of each point, and empty where there is none."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "distributed_tables.py"


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location(TOOL.stem, TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_fresh(tool: Any) -> None:
    text = tool.PAGE.read_text()
    assert tool.fill(text) == text, "run: python tools/distributed_tables.py"


def write(folder: Path, name: str, *rows: dict[str, Any]) -> None:
    head = {"command": "bench", "commit": "abc", "torch": "2"}
    text = "".join(json.dumps(row) + "\n" for row in (head, *rows))
    (folder / f"two_gpus_{name}_h200.jsonl").write_text(text)


def test_what_was_not_measured_says_so(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "RESULTS", tmp_path)
    assert tool.targets().count(tool.MISSING) == 8 and "commit" not in tool.targets()
    assert len(tool.decoding().splitlines()) == len(tool.serving().splitlines()) == 2


def test_the_last_run_counts_and_misses_are_named(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "RESULTS", tmp_path)
    point = {"what": "decode", "model": "qwen3_8b", "prompt": 64, "batch": 1}
    ours = point | {"ranks": 2, "seam": "triton_symm_mem"}
    write(
        tmp_path, "decode", point | {"ranks": 1, "seam": "", "tpot_ms": 4.0}, ours | {"tpot_ms": 9.0, "early": True},
        ours | {"tpot_ms": 2.0, "early": True}, ours | {"tpot_ms": 3.0},
        point | {"ranks": 2, "seam": "nccl", "tpot_ms": 5.0},
    )  # fmt: skip
    assert tool.decoding().splitlines()[2] == "| Qwen3-8B | 1 | 4.000 | 5.000 | 2.000 | 2.00 × |"
    assert tool.faster(1) == tool.MISSING  # of the other models
    write(tmp_path, "exchange", {"what": "host_exchange", "board_median_us": 61.0, "board_p99_us": 70.0})
    assert tool.exchange().endswith("**missed**")
    timed = {"what": "sum_norm_time", "hidden": 7168, "sum_norm_us": 3.0, "nccl_norm_us": 9.0}
    write(tmp_path, "exchange", *(timed | {"rows": rows} for rows in tool.ROWS))
    assert tool.sums().endswith("FlashInfer's kernel was not timed): met")
    beside = {"what": "peer_time", "hidden": 7168, "rows": 64, "sum_norm_us": 3.0, "flashinfer_us": 2.5}
    write(tmp_path, "peer", beside | {"right": True})
    assert tool.sums().endswith("FlashInfer's kernel for 64 rows 2.50, ours beside it 3.00): **missed**")
    write(tmp_path, "peer", beside | {"right": False})  # what is wrong is no match
    assert tool.sums().endswith("FlashInfer's kernel for 64 rows 2.50 (wrong), ours beside it 3.00): met")
    write(tmp_path, "peer", beside | {"sum_norm_us": 2.0, "right": True, "ours_right": False})
    assert tool.sums().endswith("ours beside it 2.00): **missed**")
    (tmp_path / "two_gpus_peer_h200.jsonl").unlink()
    served = {"row": "at once", "prompts": 256, "median_ttft_ms": 1.0, "median_tpot_ms": 1.0}
    write(
        tmp_path, "serve", served | {"output_throughput": 100.0}, served | {"output_throughput": 149.0, "tp": 2},
        served | {"output_throughput": 500.0, "attn_dp_size": 2},
    )  # fmt: skip
    assert tool.server() == "1.49 × (149 against 100 tokens/s): **missed**"
    assert tool.sources() == [
        f"- `two_gpus_{name}_h200.jsonl`: `bench`, commit abc" for name in ("decode", "exchange", "serve")
    ]
