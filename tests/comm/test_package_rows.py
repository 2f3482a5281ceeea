"""Rows of packages between ranks: who is refused, and what packages are given, both played by torch on a CPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import sys
import threading
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlayers.comm import ladders, rank_layer
from fastlayers.comm.all_reduce import sgl_kernel
from fastlayers.comm.all_reduce.layer import ALL_REDUCE, AllReduceConfig
from fastlayers.comm.all_reduce.sgl_kernel import SglAllReduce
from fastlayers.comm.fabric import Fabric, Workspace, _lacking
from fastlayers.comm.parallel import Axis
from fastlayers.comm.rank_layer import with_limit
from fastlayers.comm.sum_norm.flashinfer import FlashInferSumNorm
from fastlayers.comm.sum_norm.layer import SUM_NORM, SumNorm, SumNormConfig
from fastlayers.comm.sum_norm.reference import ReferenceSumNorm, sum_in_order
from fastlayers.comm.symmetric import NoSymmetricMemory, local_arenas
from fastlayers.device import Package, as_device
from fastlayers.errors import ArgumentError, NoBackendError
from fastlayers.testing.world import Rank, simulate
from fastlayers.tuning.table import SCHEMA

BF16, MOST = torch.bfloat16, 1 << 14
SUMS = AllReduceConfig(Axis(2), 128, BF16, slots=8)
NORMS = SumNormConfig(Axis(2), 128, BF16, slots=8, rounding="scale_then_cast")


def lacking(name: str, why: str) -> Workspace:
    return Workspace(Fabric(2, None, {name: why}))


@pytest.mark.parametrize(
    ("cfg", "device", "words"),
    [
        (SUMS, "H200", None),
        (replace(SUMS, axis=Axis(6)), "H200", None),
        (replace(SUMS, axis=Axis(3)), "H200", "3 ranks; sgl_kernel's kernels are for 2, 4, 6, 8"),
        (SUMS, "cpu", "NCCL needs a CUDA device"),
        (SUMS, "A100", "needs sm_90 or newer, this is sm_80"),
        (replace(SUMS, slots=0), "H200", "no symmetric workspace was made for this axis"),
        (replace(SUMS, refusal="ranks are on several hosts"), "H200", "ranks are on several hosts"),
        (replace(SUMS, hidden_size=100), "H200", "a multiple of 8"),  # which are 16 bytes
        (replace(SUMS, workspace=lacking("sgl_kernel", "rank 1: it is absent")), "H200", "rank 1: it is absent"),
        (replace(SUMS, workspace=lacking("flashinfer", "rank 1: it is absent")), "H200", None),
        (NORMS, "H200", None),
        (replace(NORMS, rounding="one_plus", dtype=torch.float16, axis=Axis(8)), "H200", None),
        (replace(NORMS, rounding="cast_then_scale"), "H200", "rounds once, after the weight; this model rounds before"),
        (replace(NORMS, spread=True), "H200", "these rows are spread"),
        (replace(NORMS, dtype=torch.float32), "H200", "bf16 and fp16 only"),
        (replace(NORMS, axis=Axis(6)), "H200", "6 ranks; flashinfer's kernels are for 2, 4, 8"),
        (replace(NORMS, slots=0), "H200", "no symmetric workspace was made for this axis"),
        (replace(NORMS, workspace=lacking("flashinfer", "another version")), "H200", "another version"),
    ],
)  # fmt: skip
def test_who_is_refused(cfg: Any, device: str, words: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_layer, "by_nccl", lambda group: True)
    row = SUM_NORM.named("flashinfer") if isinstance(cfg, SumNormConfig) else ALL_REDUCE.named("sgl_kernel")
    why = row.refusal(cfg, as_device(device))
    assert row.auto_on == () and (why is None if words is None else words in str(why))


def test_another_group_and_a_missing_package_are_named() -> None:
    for registry, cfg, name in ((ALL_REDUCE, SUMS, "sgl_kernel"), (SUM_NORM, NORMS, "flashinfer")):
        with pytest.raises(NoBackendError, match=r"axis\.group has no NCCL"):
            registry.choose(cfg, "H200", name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rank_layer, "by_nccl", lambda group: True)
            patch.setenv("FASTLAYERS_DISABLE", name)
            with pytest.raises(NoBackendError, match=f"{name} is disabled by FASTLAYERS_DISABLE"):
                registry.choose(cfg, "H200", name)
    with pytest.raises(NoBackendError, match=r"(?s)sum_norm.*flashinfer: NCCL needs a CUDA device, this is cpu"):
        SumNorm(Axis(2), 128, rounding="one_plus", dtype=BF16, device="cpu", backend="flashinfer")


def test_a_package_counts_only_where_all_ranks_have_it_alike() -> None:
    both = {name: Package(name, "ok", "1.0", None) for name in ("flashinfer", "sgl_kernel")}
    absent = both | {"sgl_kernel": Package("sgl_kernel", "absent", None, "sgl_kernel is not installed")}
    newer = both | {"flashinfer": Package("flashinfer", "ok", "1.1", None)}
    assert _lacking([{"packages": both}] * 2) == {}
    assert _lacking([{"packages": both}, {"packages": absent}]) == {"sgl_kernel": "rank 1: sgl_kernel is not installed"}
    found = _lacking([{"packages": both}, {"packages": newer}])
    assert found == {"flashinfer": "ranks have different versions of flashinfer: {0: '1.0', 1: '1.1'}"}


def test_a_measured_ladder_may_name_a_package_as_far_as_the_workspace_reaches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"commit": "abc", "torch": torch.__version__}
    ladder = [{"max_tokens": 64, "backend": "flashinfer"}, {"max_tokens": None, "backend": "triton_symm_mem"}]
    entry = {
        "layer": "sum_norm", "way": "", "ranks": 2, "device": "H200", "dtype": "bfloat16", "hidden_size": 128,
        "tokens": [64], "ladder": ladder, "made": made,
    }  # fmt: skip
    written = json.dumps({"schema": SCHEMA, "ladders": [entry]})
    (tmp_path / ladders.NAME).write_text(written)
    monkeypatch.setenv("FASTLAYERS_TUNED_DIR", str(tmp_path))
    monkeypatch.setattr(rank_layer, "by_nccl", lambda group: True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastlayers.device.missing", lambda needs, load: None)
        for slots, name in ((1024, "flashinfer:64|triton_symm_mem:1024|nccl"), (32, "flashinfer:32|nccl")):
            assert with_limit(SUM_NORM.choose(replace(NORMS, slots=slots), "H200"), SUM_NORM).name == name
        entry |= {"layer": "all_reduce", "ladder": [{"max_tokens": None, "backend": "sgl_kernel"}]}
        (tmp_path / ladders.NAME).write_text(json.dumps({"schema": SCHEMA, "ladders": [entry]}))
        # Beyond what its buffers hold it would raise.
        assert with_limit(ALL_REDUCE.choose(SUMS, "H200"), ALL_REDUCE).name == f"sgl_kernel:{(8 << 20) // 256}|nccl"
    (tmp_path / ladders.NAME).write_text(written)
    absent = with_limit(SUM_NORM.choose(NORMS, "H200"), SUM_NORM)
    assert absent.name == "triton_symm_mem:8|nccl" and "not taken: flashinfer: flashinfer is not" in absent.evidence


class PlayedSums:
    """sgl_kernel's operators, which read what lies at the addresses in their records; ranks are threads."""

    def __init__(self, ranks: int, width: int = 8) -> None:
        self.meeting, self.width, self.ended = threading.Barrier(ranks, timeout=120.0), width, []  # type: ignore[var-annotated]
        self.objects: dict[int, Any] = {}
        self.captured = False

    def meta_size(self) -> int:
        return 256

    def init_custom_ar(self, heads: list[int], records: torch.Tensor, rank: int, nvlink: bool) -> int:
        assert nvlink and records.dtype == torch.uint8 and not any(ctypes.string_at(heads[rank], 256))
        rows = records.view(torch.int64).view(-1, self.width)
        self.objects[rank] = types.SimpleNamespace(rows=rows, registered=0, captured=0, size=len(heads))
        return rank

    def register_buffer(self, handle: int, places: list[int]) -> None:
        held = self.objects[handle]
        held.rows[held.registered, : held.size] = torch.tensor(places)
        held.registered += 1

    def all_reduce(self, handle: int, x: torch.Tensor, out: torch.Tensor, own: int, nbytes: int) -> None:
        held = self.objects[handle]
        assert x.is_contiguous() and x.nbytes <= nbytes == MOST
        record = held.rows[held.registered - 1]
        if self.captured:
            record, held.captured = held.rows[held.registered + held.captured], held.captured + 1
        assert record[handle] == own
        ctypes.memmove(own, x.data_ptr(), x.nbytes)
        self.meeting.wait()
        parts = [ctypes.string_at(int(place), x.nbytes) for place in record[: held.size]]
        self.meeting.wait()
        rows = torch.stack([torch.frombuffer(bytearray(part), dtype=x.dtype).view_as(x) for part in parts])
        out.copy_(sum_in_order(rows))

    def dispose(self, handle: int) -> None:
        self.ended.append(handle)


def play_sums(patch: pytest.MonkeyPatch, ranks: int, width: int = 8) -> PlayedSums:
    played, lock, arenas = PlayedSums(ranks, width), threading.Lock(), []  # type: ignore[var-annotated]

    def arena_of(axis: Axis, nbytes: int, device: Any) -> Any:
        with lock:
            arenas.extend([] if arenas else local_arenas(ranks, nbytes, device))
        return arenas[axis.rank]

    patch.setattr(sgl_kernel, "SymmArena", arena_of)
    patch.setattr(sgl_kernel, "RECORDS", 16)
    patch.setattr(sgl_kernel, "MOST_BYTES", MOST)
    patch.setattr(sgl_kernel, "_capturing", lambda x: played.captured)
    patch.setattr(torch.ops, "sgl_kernel", played, raising=False)
    patch.setitem(sys.modules, "sgl_kernel", types.ModuleType("sgl_kernel"))
    return played


def sums_of(rank: Rank, hidden: int, inputs: torch.Tensor) -> list[torch.Tensor]:
    (arena,) = local_arenas(1, 0)
    cfg = AllReduceConfig(replace(rank.spec().tp, group=None), hidden, BF16, 8, workspace=Workspace(Fabric(2), arena))
    first, second = SglAllReduce(cfg), SglAllReduce(cfg)
    assert first.sums is second.sums  # a workspace has one
    with pytest.raises(ArgumentError, match=rf"AllReduce.*rows.*at most {MOST // 2 // hidden}, which are 8 MB"):
        first(torch.empty(MOST // 2 // hidden + 1, hidden, dtype=BF16))
    assert first(inputs[0][:0]).shape == (0, hidden)
    return [first(rows) if turn % 2 else second(rows) for turn, rows in enumerate(inputs[rank.rank].split([1, 4]))]


@pytest.mark.parametrize(("ranks", "captured"), [(2, False), (2, True), (4, False)])
def test_sgl_sums_what_lies_at_the_addresses_that_it_was_given(
    ranks: int, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = play_sums(monkeypatch, ranks)
    played.captured = captured
    wide = torch.randn(ranks, 5, 80).to(BF16)
    found = simulate(ranks, sums_of, 72, wide[..., :72])  # rows further apart than they are long
    for sums in found:
        assert torch.equal(torch.cat(sums), sum_in_order(wide[..., :72]))
    gc.collect()
    assert sorted(played.ended) == list(range(ranks))


def test_sgl_refuses_other_records_and_more_captures_than_it_has_records(monkeypatch: pytest.MonkeyPatch) -> None:
    play_sums(monkeypatch, 1, width=16)
    with pytest.raises(ArgumentError, match=r"other records.*0\.4\.5"):
        sgl_kernel.CustomSums(Axis(1), torch.device("cpu"))
    played = play_sums(monkeypatch, 1)
    sums, x = sgl_kernel.CustomSums(Axis(1), torch.device("cpu")), torch.ones(1, 8)
    played.captured = True
    for _ in range(14):
        assert torch.equal(sums(x), x)
    with pytest.raises(ArgumentError, match=r"captured calls of sgl_kernel.*15.*14 in all"):
        sums(x)


class PlayedFusion:
    """FlashInfer's workspace and kernel; the other rank brings the same rows every time."""

    AllReduceFusionPattern = types.SimpleNamespace(kARResidualRMSNorm=1)

    def __init__(self, other: torch.Tensor) -> None:
        self.other, self.made, self.let_go, self.destroyed = other, [], [], 0  # type: ignore[var-annotated]

    def create_allreduce_fusion_workspace(self, **given: Any) -> Any:
        self.made.append(given)
        return types.SimpleNamespace(ipc_handles=len(self.made), destroy=self._destroy)

    def trtllm_destroy_ipc_workspace_for_all_reduce_fusion(self, handles: Any) -> None:
        self.let_go.append(handles)

    def _destroy(self) -> None:
        self.destroyed += 1

    def allreduce_fusion(self, **given: Any) -> None:
        x, weight, residual = given["input"], given["rms_gamma"], given["residual_in"]
        assert given["pattern"] == 1 and given["fp32_acc"] and not given["launch_with_pdl"]
        assert all(given[name].is_contiguous() for name in ("input", "residual_in", "residual_out", "norm_out"))
        h = (x.float() + self.other[: len(x)].float()).to(x.dtype) + residual
        given["residual_out"].copy_(h)
        unit = h.float() * torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + given["rms_eps"])
        given["norm_out"].copy_(unit * (given["weight_bias"] + weight.float()))


def play_fusion(patch: pytest.MonkeyPatch, other: torch.Tensor, others_fail: str | None = None) -> PlayedFusion:
    def gather(into: list[Any], mine: Any, group: Any = None) -> None:
        into[:] = [mine, others_fail]

    played, package = PlayedFusion(other), types.ModuleType("flashinfer.comm.trtllm_ar")
    package.get_trtllm_comm_module = lambda: None  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "flashinfer.comm", played)
    patch.setitem(sys.modules, "flashinfer.comm.trtllm_ar", package)
    patch.setattr(torch.distributed, "all_gather_object", gather)
    patch.setattr(torch.distributed, "barrier", lambda group: None)
    patch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 30))
    patch.setattr(torch.cuda, "device", contextlib.nullcontext)
    patch.setattr(torch.cuda, "synchronize", lambda device: None)
    return played


def norm_config(slots: int = 4, rounding: str = "scale_then_cast") -> SumNormConfig:
    (arena,) = local_arenas(1, 0)
    push = types.SimpleNamespace(hidden_size=64, dtype=BF16, slots=slots)
    made = Workspace(Fabric(2), arena, push)  # type: ignore[arg-type]
    return SumNormConfig(Axis(2), 64, BF16, slots, eps=1e-5, rounding=rounding, workspace=made)


@pytest.mark.parametrize("rounding", ["scale_then_cast", "one_plus"])
def test_flashinfer_is_given_what_the_reference_computes_with(rounding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, other, residual = torch.randn(3, 3, 80).to(BF16)[..., :64]
    weight = torch.rand(64).to(BF16)
    played, cfg = play_fusion(monkeypatch, other), norm_config(rounding=rounding)
    row, again = FlashInferSumNorm(cfg), FlashInferSumNorm(replace(cfg, eps=1e-4))
    assert row.fusion is again.fusion and len(played.made) == 1
    assert played.made[0] == {
        "backend": "trtllm", "world_size": 2, "rank": 0, "max_token_num": 4, "hidden_dim": 64, "dtype": BF16,
        "group": None,
    }  # fmt: skip
    for given in (residual, None):
        before = x.clone()
        y, h = row(x, given, weight, codes="row")
        wanted_y, wanted_h = ReferenceSumNorm(cfg).of_all(torch.stack([x, other]), given, weight)
        assert torch.equal(h, wanted_h) and torch.allclose(y.float(), wanted_y.float(), rtol=2**-7, atol=0)
        assert torch.equal(x, before)
    assert row(x[:0], residual[:0], weight)[0].shape == (0, 64)
    with pytest.raises(ArgumentError, match=r"SumNorm.*rows.*5.*at most 4, for which the workspace was made"):
        row(torch.zeros(5, 64, dtype=BF16), None, weight)
    del row, again, cfg
    gc.collect()
    assert played.let_go == [1] and played.destroyed == 1


def test_flashinfer_is_not_begun_where_a_rank_has_no_kernels_or_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    played = play_fusion(monkeypatch, torch.zeros(0), others_fail="Ninja build failed.")
    with pytest.raises(NoSymmetricMemory, match=r"rank 1 could not get flashinfer's workspace: Ninja build failed\."):
        FlashInferSumNorm(norm_config())
    played = play_fusion(monkeypatch, torch.zeros(0))
    with pytest.raises(NoSymmetricMemory, match=r"rank 0 could not .*: 1,048,576 bytes, of which 1,048,576 are free"):
        FlashInferSumNorm(norm_config(slots=1024))
    assert played.made == []
