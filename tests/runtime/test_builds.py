"""Nothing compiles on a request's path: a stub of deep_gemm that compiles a module for each number of tiles."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers import device, tuning
from fastlayers.attention.buckets import ExtendBuckets
from fastlayers.attention.gqa import triton
from fastlayers.attention.meta import AttentionState
from fastlayers.linear.fp8_block.deep_gemm import token_counts
from fastlayers.norm.rms_norm.layer import RMS_NORM
from fastlayers.registry import LAYERS, Backend, builtin_registry
from fastlayers.runtime import builds, precompile
from fastlayers.runtime.compile_log import CompileWatch
from fastlayers.runtime.kernel_cache import STORES

STUB = """
import os
from pathlib import Path

calls = []

def compile(tiles):
    calls.append(tiles)
    made = Path(os.environ["DG_JIT_CACHE_DIR"], "cache", f"kernel.{tiles}")
    made.mkdir(parents=True, exist_ok=True)
"""


class Jit:
    """RMS norm for as many tiles as were compiled; ``deep_gemm`` compiles the others when they come."""

    token_counts = staticmethod(token_counts)

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg

    def __call__(self, x: torch.Tensor, *rest: Any) -> Any:
        import deep_gemm

        tiles = -(-x.numel() // x.shape[-1] // 64)
        if not (STORES["deep_gemm"].directory() / "cache" / f"kernel.{tiles}").exists():
            deep_gemm.compile(tiles)
        return RMS_NORM.named("torch").load()(self.cfg)(x, *rest)


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "site" / "deep_gemm").mkdir(parents=True)
    (tmp_path / "site" / "deep_gemm" / "__init__.py").write_text(STUB)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    row = Backend("jit", Jit, ("deep_gemm:compile",), auto_on=("cpu",))
    monkeypatch.setattr(RMS_NORM, "ranked", [row, *RMS_NORM.ranked])
    device.forget_probes()
    builds.refresh()
    yield tmp_path / "cache"
    sys.modules.pop("deep_gemm", None)
    device.forget_probes()
    builds.refresh()


def compiled() -> list[int]:
    import deep_gemm

    return list(deep_gemm.calls)


def test_auto_leaves_out_what_is_not_built_and_says_what_builds_it(stub: Path) -> None:
    layer = fl.RMSNorm(8)
    assert layer.choice.name == "torch" and "deep_gemm" not in sys.modules  # nor is it imported, which takes seconds
    layer(torch.ones(3, 8))
    assert compiled() == []
    (found,) = fl.explain(layer)
    assert found.refused["jit"] == (
        "its modules for this shape are not built (deep_gemm; fastlayers warmup MODEL builds them); "
        "no table tells what that would gain"
    )
    assert fl.RMSNorm(8, backend="jit").choice.name == "jit"  # by name it compiles when it is called
    assert RMS_NORM.choose(layer.cfg, "cpu", built_only=False).name == "jit"


def test_a_warm_up_builds_and_then_nothing_compiles_for_any_length(stub: Path) -> None:
    layer = fl.RMSNorm(8)
    report = fl.warmup(layer, max_tokens=1000, max_batch=4, progress=False)
    assert layer.choice.name == "jit" and len(report.built) == 1 and "rms_norm=jit" in report.built[0]
    assert sorted(set(compiled())) == list(range(1, 17))
    watch, before = CompileWatch(), compiled()
    draw = random.Random(0)
    for _ in range(200):
        layer(torch.ones(draw.randint(1, 1000), 8))
    assert compiled() == before and watch.check() == []
    layer(torch.ones(1025, 8))  # beyond what was warmed up: seen
    assert watch.check() == ["deep_gemm/kernel.17"]
    watch.close()
    report.watch.close()


def test_what_is_built_is_read_once_and_again_by_a_warm_up(stub: Path) -> None:
    early, other = fl.RMSNorm(8), fl.RMSNorm(8)
    fl.warmup(other, tokens=[4], progress=False).watch.close()
    assert early.choice.name == "torch"  # nothing changes under a layer's feet
    assert fl.RMSNorm(8).choice.name == "jit" and fl.RMSNorm(16).choice.name == "torch"
    report = fl.warmup(early, tokens=[4], build=False, progress=False)
    report.watch.close()
    assert early.choice.name == "jit" and report.built == []
    record = stub / builds.RECORD
    kept = json.loads(record.read_text())
    assert list(kept["built"].values()) == [4]
    for damage in ("{", json.dumps(kept | {"versions": "other"}), json.dumps(kept | {"built": [1]})):
        record.write_text(damage)
        builds.refresh()
        assert fl.RMSNorm(8).choice.name == "torch"


def test_captured_steps_are_captured_again(stub: Path) -> None:
    from fastlayers.weights_epoch import epoch_of

    model = torch.nn.Sequential(fl.RMSNorm(8))
    epoch = epoch_of(model)
    before = epoch.value
    fl.warmup(model, tokens=[4], progress=False).watch.close()
    assert epoch.value > before
    before = epoch.value
    fl.warmup(model, tokens=[4], progress=False).watch.close()
    assert epoch.value == before  # nothing was chosen anew


def test_a_build_that_fails_leaves_what_was(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no space left")

    layer = fl.RMSNorm(8)
    monkeypatch.setattr(Jit, "__call__", fail)
    for tokens in ([4], "all"):
        with pytest.raises(RuntimeError, match="no space left"):
            fl.warmup(layer, tokens=tokens, max_tokens=100, progress=False)
        assert layer.choice.name == "torch" and not (stub / builds.RECORD).exists()
    report = fl.warmup(layer, tokens=[4], build=False, progress=False)
    report.watch.close()
    assert layer.choice.name == "torch"


def test_described_devices_and_packages_that_come_built() -> None:
    row = Backend("jit", Jit, ("deep_gemm:compile",))
    assert builds.unbuilt("rms_norm", row, None, device.DESCRIBED["H200"]) is None
    assert builds.compiling(row) == ("deep_gemm",)
    assert builds.compiling(Backend("x", Jit, ("triton:jit", "torch:matmul"))) == ()


@pytest.mark.parametrize("most", [1, 2, 63, 64, 100, 4096])
def test_token_counts_stand_for_all(most: int) -> None:
    found = precompile.cover(most, edges=(16, 5000), named=token_counts(None, most))
    assert found == sorted(set(found), reverse=True) and found[0] == most and found[-1] == 1
    assert {-(-count // 64) for count in found} == {-(-count // 64) for count in range(1, most + 1)}
    assert {16, 17} & set(range(1, most + 1)) <= set(found)


def test_rows_on_deep_gemm_name_the_counts_that_they_compile_for() -> None:
    rows = [row for layer in LAYERS for row in builtin_registry(layer).ranked if "deep_gemm" in builds.compiling(row)]
    assert {row.name for row in rows} == {"deep_gemm", "deep_gemm_masked", "deep_gemm_gathered"} and len(rows) == 5
    assert all(list(row.load().token_counts(None, 200)) == [64, 128, 192] for row in rows)


def test_jobs_of_a_package_never_overlap_and_tritons_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    lock, inside, most = threading.Lock(), {"deep_gemm": 0, "triton": 0}, {"deep_gemm": 0, "triton": 0}
    meet = threading.Barrier(3, timeout=120)

    def call(package: str) -> Callable[[], None]:
        def work() -> None:
            with lock:
                inside[package] += 1
                most[package] = max(most[package], inside[package])
            if package == "triton":
                meet.wait()
            with lock:
                inside[package] -= 1

        return work

    jobs = [precompile.Job(f"{p} {i}", 1, p, call(p)) for p in inside for i in range(3)]
    said: list[str] = []
    ended = precompile.run([*jobs, precompile.Job("large", 10**6, "triton", lambda: None)], said.append)
    assert ended.keys() == inside.keys() and all(0 < took < 120 for took in ended.values())
    assert most == {"deep_gemm": 1, "triton": 3} and said[-1] == "large" and len(said) == 7


def test_no_jobs_overlap_with_tritons_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    inside, most = [], []

    def work() -> None:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.002)
        inside.pop()

    jobs = [precompile.Job(f"{package} {i}", 1, package, work) for package in ("triton", "xqa") for i in range(8)]
    assert precompile.run(jobs, lambda label: None).keys() == {"triton", "xqa"}
    assert most == [1] * 16


def test_one_layer_of_each_kind() -> None:
    model = torch.nn.Sequential(fl.RMSNorm(8), fl.RMSNorm(8), fl.RMSNorm(16), fl.Linear(8, 8))
    assert [name for name, _ in precompile.representatives(model)] == ["0", "2", "3"]


def test_extends_of_several_requests_are_warmed_up_as_they_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    rotary = fl.RotaryEmbedding(16, max_position=64)
    layer = fl.Attention(32, 4, 2, 16, rotary=rotary, page_size=16, dtype=torch.float32, backend="triton")
    state = AttentionState(4, 32, 40, 16)  # 640 keys: split, where tiles are few
    step = SimpleNamespace(extend_buckets=ExtendBuckets((8, 32), (1, 2, 4)), state=state)
    asked: set[tuple[int, int]] = set()

    def launches(*args: Any) -> Any:
        splits = args[14]
        asked.add((args[-5], splits))  # BLOCK_B
        made = [torch.zeros(shape) for shape in (args[0], args[0][:2], *([(0,)] * 2 if splits > 1 else []))]
        return [lambda *tensors: made, lambda *tensors: None]

    monkeypatch.setattr(triton, "_launches", launches)

    def variants(jobs: Any) -> set[tuple[int, int]]:
        asked.clear()
        for job in jobs:
            job.call()
        return set(asked)

    jobs = list(precompile.jobs_of("layer", layer, lambda *_: [], 32, 4, step))
    assert [job.label for job in jobs if "of" in job.label] == [
        f"layer {tokens} of {requests} requests" for tokens in (8, 32) for requests in (1, 2, 4)
    ]
    assert {block for block, _ in variants(job for job in jobs if "of" in job.label)} == {0, 2, 4}
    few = precompile.jobs_of("layer", layer, lambda *_: [], 4, 2, step)
    assert [job.label for job in few if "of" in job.label] == [f"layer 8 of {n} requests" for n in (1, 2)]
    assert not any("of" in job.label for job in precompile.jobs_of("layer", layer, lambda *_: [], 32, 4))


def test_explain_says_what_a_build_would_gain(stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, here = fl.RMSNorm(8).cfg, device.as_device("cpu")
    monkeypatch.setenv("FASTLAYERS_TUNED_DIR", str(tmp_path / "tables"))
    path = tuning.path_of(tmp_path / "tables", "rms_norm", cfg.tuning_key(), here)
    rows = [{"max_tokens": 16, "backend": "torch"}, {"max_tokens": None, "backend": "jit"}]
    times = {"torch": [1.0, 3.0, 6.0], "jit": [2.0, 2.0, 3.0]}
    table = {"schema": 1, "layer": "rms_norm", "device": "cpu", "ladder": rows, "tokens": [16, 64, 256], "times": times}
    tuning.write(path, table)
    layer = fl.RMSNorm(8)
    assert layer.choice.name == "torch"
    assert layer.choice.evidence.endswith("; without its rungs of jit: its modules for this shape are not built")
    (found,) = fl.explain(layer)
    assert found.refused["jit"].endswith(
        "by the tuned table that would gain up to 2.00 ×, at 256 tokens; 1.50 × as a rule"
    )
    tuning.write(path, table | {"times": {"torch": [1.0, 3.0, 6.0], "jit": [2.0, 3.0, 6.0]}})
    (found,) = fl.explain(layer)
    assert found.refused["jit"].endswith("by the tuned table that would gain nothing")
    fl.warmup(layer, tokens=[4], progress=False).watch.close()
    assert layer.choice.name == "torch:16|jit"
