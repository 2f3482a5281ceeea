"""Programs of parts, small and on the CPU: they end well, and their rows say what the page asks for."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlayers.attention.buckets import ExtendBuckets
from fastlayers.registry import Backend
from fastlayers.runtime.graphs import CudaGraphs, EagerRuntime
from fastlayers_models.step import ModelStep
from fastlayers_server.engine.executor import TorchExecutor

ROOT = Path(__file__).parents[2]


def rows_of(tmp_path: Path, program: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a program in this process, which has imported most of what it needs; return its rows, the head first."""
    out, path = tmp_path / "rows.jsonl", ROOT / "benchmarks" / program
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(path.parent))
        # No point is left out, however busy the machine is.
        patched.setattr(sys, "argv", [str(path), "--seconds", "900", *arguments, "--out", str(out)])
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as ended:
            assert not ended.code, ended.code
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return what the page reads, from results in a folder of the test's own."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    found = import_module("systems_figures")
    monkeypatch.setattr(found, "RESULTS", tmp_path)
    return found


def test_small_figures_are_right(figures: Any, tmp_path: Path) -> None:
    _, *rows = rows_of(tmp_path, "systems.py", "--small", "--device", "cpu")
    assert {(row["item"], row["what"]) for row in rows} == {
        (19, "three axes"), (32, "scales"), (35, "nvfp4"), (19, "vision tower"),
    }  # fmt: skip
    assert all(row["right"] is True for row in rows)
    timed = [{name: value or 1.0 for name, value in row.items()} for row in rows]  # a CPU's microseconds are zeros
    (tmp_path / "systems_h200.jsonl").write_text("".join(json.dumps(row) + "\n" for row in timed))
    for figure in import_module("systems_items").FIGURES:
        file, _, word = figure.evidence.partition("#")
        if file == "systems_h200.jsonl":
            assert figure.find() is not None and word in (tmp_path / file).read_text(), figure.what


def test_products_behind_what_quantises(figures: Any, tmp_path: Path) -> None:
    _, *rows = rows_of(tmp_path, "gated.py", "--small", "--device", "cpu")
    # One and two rows are quantised by the interpreted product itself, behind a norm; behind an activation all count.
    assert [(row.get("norm", False), row["tokens"]) for row in rows] == [(False, 1), (False, 2), (False, 4), (True, 4)]
    assert all(row["equal"] is True for row in rows)
    timed = [row | {"one_us": 1.0 + ("norm" in row), "two_us": 1.0} for row in rows]
    (tmp_path / "gated_h200.jsonl").write_text("".join(json.dumps(row) + "\n" for row in timed))
    found = figures.gated()
    assert found is not None and found[0].startswith("3 of 3 points")


def test_a_slice_from_its_checkpoint_to_tokens(figures: Any, tmp_path: Path) -> None:
    _, *rows = rows_of(tmp_path, "slice.py", "--small", "--device", "cpu")
    told = ["written", "load", "capacity", "capacity", "prefill", "decode", "decode", "tokens"]
    assert [row["what"] for row in rows] == told
    narrow, wide = rows[2:4]
    assert (narrow["kv_dtype"], wide["kv_dtype"]) == ("float8_e4m3fn", "bfloat16")
    assert 1.99 * wide["tokens"] < narrow["tokens"] < 2.01 * wide["tokens"]
    (tmp_path / "rows.jsonl").rename(tmp_path / "slice_h200.jsonl")
    assert import_module("systems_caches").capacity().missing == "" and figures.deepseek() is None
    model = {"what": "model", "batch": 1, "us": 5e3, "of_floor": 0.5, "layers": 6}
    (tmp_path / "bench_model_h200.jsonl").write_text(json.dumps(model))
    assert figures.deepseek().missing == ""
    assert rows[-1] == {"what": "tokens", "new": 24, "equal_before_a_near_tie": 24, "weights_equal": True}


def test_a_layer_of_one_rank_of_eight_is_a_chain_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head, *rows = rows_of(tmp_path, "tp8_layer.py", "--small", "--device", "cpu", "--profile", "--build")
    told = [row.get("what", "profile") for row in rows]
    assert told == ["built", "decode", "decode", "prefill", "attention", "profile", "profile", "profile", "end"]
    decode, attention = rows[1:3], rows[4]
    assert [row["batch"] for row in decode] == [1, 3] and all(row["same_bits"] for row in (*decode, attention))
    assert all(row["us"] > 0 and row["finite"] for row in rows[1:5]) and attention["calls"] == rows[0]["layers"] == 3
    assert decode[0]["drawn_experts"] == 2 < decode[1]["drawn_experts"] <= 6
    names = {"self_attn", "self_attn.qkv_a_proj", "self_attn.q_b_proj", "self_attn.o_proj", "mlp.experts"}
    for row in rows[1:4]:
        assert names <= row["backends"].keys() and row["floor_us"] > 0 and row["mb"] > 0
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.setattr(import_module("performance_rows"), "RESULTS", tmp_path)
    lines = [head | {"device": "H200 (sm_90)"}, *rows]
    (tmp_path / "tp8_layer.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    layer = import_module("limit_targets").layer
    assert layer("decode", 1).value == decode[0]["us"] and layer("attention", 1).value == attention["us"]
    assert layer("prefill", 96).value == rows[3]["us"] and layer("decode", 64) is None


def test_ways_of_latent_attention_agree_on_all_pages(tmp_path: Path) -> None:
    _, *rows = rows_of(tmp_path, "mla_paths.py", "--small", "--device", "cpu")
    crossover, pages = [row for row in rows if "page" not in row], [row for row in rows if "page" in row]
    assert len(crossover) == 9 and {row["chosen"] for row in crossover} == {"mqa"}
    assert [row["page"] for row in pages] == [64, 16, 1]
    assert all(row["against_pages_of_64"] == 0.0 for row in pages)
    assert all(0.0 < row["chunked_against_one_shot"] < 0.01 for row in pages)


def test_first_tokens_behind_a_cached_prefix(tmp_path: Path) -> None:
    _, *rows = rows_of(tmp_path, "prefix_first_token.py", "--small", "--device", "cpu")
    assert [row["way"] for row in rows] == ["one shot", "two chunks", "latents"]
    assert [row["path"] for row in rows] == ["mha_one_shot", "mha_chunked", "mqa"]
    for row in rows:
        assert row["ms"] > row["planned_ms"] + row["launch_ms"] > row["planned_ms"] > 0 and not row["captured"]
        assert (row["prefix"], row["new"], row["layers"]) == (256, 32, 2)


@pytest.fixture
def captured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have servers capture their steps as on a GPU, where an extend of 32 tokens is padded to a bucket."""
    startup = import_module("fastlayers_server.engine.startup")

    def made(*given: Any, cuda_graph: Any, **options: Any) -> Any:
        graphs = CudaGraphs(runtime=EagerRuntime(), warm_ups=1)
        buckets = ExtendBuckets((32,), (1, 4))
        return TorchExecutor(*given, graphs=graphs, extend_buckets=buckets, **options)

    monkeypatch.setattr(startup, "TorchExecutor", made)


@pytest.mark.usefixtures("captured_steps")
def test_first_tokens_take_the_way_they_are_named_for_where_steps_are_captured(tmp_path: Path) -> None:
    _, *rows = rows_of(tmp_path, "prefix_first_token.py", "--small", "--device", "cpu")
    assert [(row["way"], row["path"], row["captured"]) for row in rows] == [
        ("one shot", "mha_one_shot", False), ("two chunks", "mha_chunked", False), ("latents", "mqa", True),
    ]  # fmt: skip


@pytest.mark.usefixtures("captured_steps")
def test_first_tokens_of_another_way_are_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As all three were once: captured steps attend to latents."""
    monkeypatch.setattr(ModelStep, "_outweighs_capture", lambda *given: False)
    with pytest.raises(RuntimeError, match=r"layers took \['mqa'\] in a step padded to .*, not mha_one_shot"):
        rows_of(tmp_path, "prefix_first_token.py", "--small", "--device", "cpu")


COLD = """
import json, argparse, sys
import cold_start
tiny = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64, head_dim=16,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=1024)
cold_start.MODELS["qwen3_8b"] |= tiny
rows = cold_start.bench("qwen3_8b", argparse.Namespace(layers=None, device="cpu", max_batch=2, prompts=1))
print(json.dumps(next(rows)))
"""


def test_a_cold_start_is_told_part_by_part() -> None:
    roots = os.pathsep.join(str(ROOT / name) for name in ("src", "models", "server", "benchmarks"))
    env = os.environ | {"PYTHONPATH": roots}
    row = json.loads(subprocess.run([sys.executable, "-c", COLD], capture_output=True, env=env, check=True).stdout)
    assert list(row["parts_s"]) == [
        "torch imported", "libraries imported", "device opened", "layers built, backends chosen",
        "weights drawn and packed", "cache and captured steps laid out", "first token",
    ]  # fmt: skip
    assert abs(sum(row["parts_s"].values()) - row["import_to_first_token_s"]) < 0.1
    assert abs(row["built_at_s"] - sum(list(row["parts_s"].values())[:5])) < 0.1
    assert row["packages_imported_s"].keys() <= {"triton"}


def test_a_frozen_heap_is_not_gone_through_between_tokens(tmp_path: Path) -> None:
    out = tmp_path / "pauses.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "pauses.py"), "--objects", "300000", "--ticks", "40"]
    roots = os.pathsep.join(str(ROOT / name) for name in ("src", "models", "server", "benchmarks"))
    env = os.environ | {"PYTHONPATH": roots}
    subprocess.run([*command, "--tick-ms", "1", "--json", str(out)], check=True, capture_output=True, env=env)
    left, frozen = json.loads(out.read_text())["rows"]
    assert (left["frozen"], frozen["frozen"]) == (False, True)
    assert left["full_collections"] >= 1 and left["longest_ms"] > left["full_collection_ms"]
    assert frozen["full_collection_ms"] < left["full_collection_ms"] / 4


def test_steps_that_verify_are_called_ahead_and_give_what_torch_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashMLA's times stand beside Triton's of the same step."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    program, called = import_module("several_tokens"), list[tuple[str, int]]()
    usual = program.built

    def noted(registry: Any, cfg: Any, device: str, name: str) -> Any:
        called.append((name, cfg.num_heads))
        return usual(registry, cfg, device, name)

    monkeypatch.setattr(program, "built", noted)
    with torch.inference_mode():
        program.compile_ahead([(2, 2, 1, 70), (3, 1, 2, 5)], "cpu")
        assert sorted(called) == [("triton", 2), ("triton", 3)]
        call_of = program.full_step(2, 3, 2, 70, program.cache_of(2, "cpu"), "cpu")
        found, wanted = (call_of(name)() for name in ("triton", "torch"))
    assert found.shape == (6, 2, 512) and program.error(found, wanted) < program.BOUND


def test_steps_that_verify_are_timed_as_they_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """For short contexts where another backend attends then, else for the capacity."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    program = import_module("several_tokens")
    assert program.captured_for(64, 4, 8, 500, "H200") == 4224  # without FlashMLA
    monkeypatch.setattr(Backend, "why_not", lambda row, cfg, device, ahead=None: row.refusal(cfg, device))
    wanted = {
        (64, 4, 8, 500): 1024, (16, 4, 64, 500): 1024, (64, 4, 8, 1020): 1024, (64, 4, 8, 1021): 4224,
        (64, 4, 64, 500): 4224, (64, 2, 8, 500): 4224,
    }  # fmt: skip
    assert {point: program.captured_for(*point, "H200") for point in wanted} == wanted
