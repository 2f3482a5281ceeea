"""The layers over several ranks: every row against the reference, planted bugs, refusals, and choice by rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers.comm import rank_layer
from fastlayers.comm.all_reduce.layer import ALL_REDUCE, AllReduce, AllReduceConfig
from fastlayers.comm.expert_exchange.layer import ExpertExchange
from fastlayers.comm.expert_exchange.triton_symm_mem import TritonExpertExchange
from fastlayers.comm.fabric import Fabric, Workspace, _refusal
from fastlayers.comm.gather_rows.collective import CollectiveGatherRows
from fastlayers.comm.gather_rows.layer import GatherRows
from fastlayers.comm.parallel import Axis
from fastlayers.comm.rank_layer import with_limit
from fastlayers.comm.scatter_rows.layer import ScatterRows
from fastlayers.comm.sum_norm.layer import SUM_NORM, SumNorm, SumNormConfig
from fastlayers.comm.sum_norm.triton_symm_mem import TritonSumNorm
from fastlayers.device import DESCRIBED
from fastlayers.errors import ArgumentError, NoBackendError
from fastlayers.norm.rms_norm.layer import RMSNorm
from fastlayers.quant.coded_rows import CodedRows
from fastlayers.quant.group_quant.layer import quantize_groups
from fastlayers.registry import COLLECTIVES, Backend, registry
from fastlayers.registry.choice import Choice, Rung
from fastlayers.testing.parity import ParityError, check_parity
from fastlayers.testing.spec import spec_of
from fastlayers.testing.world import Rank, world


def simulated() -> Iterator[tuple[str, str]]:
    for layer in COLLECTIVES:
        for case in spec_of(layer).cases:
            if case.small:
                yield layer, case.name


@pytest.mark.parametrize(("layer", "case"), list(simulated()))
def test_parity(layer: str, case: str) -> None:
    assert check_parity(layer, "triton_symm_mem", case, "cpu")


class _Broken(TritonSumNorm):
    """A base of planted bugs: what the ranks push is changed before, what they read after."""

    def __call__(self, x: Any, residual: Any, weight: Any, *, codes: str | None = None, part: int = 0) -> Any:
        return super().__call__(*self.given(x, residual, weight), codes=codes, part=part)

    def given(self, x: Any, residual: Any, weight: Any) -> tuple[Any, Any, Any]:
        return x, residual, weight


class SkipsTheOthers(_Broken):
    def given(self, x: Any, residual: Any, weight: Any) -> tuple[Any, Any, Any]:
        return (x if self.cfg.axis.rank == 0 else torch.zeros_like(x)), residual, weight


class NoResidual(_Broken):
    def given(self, x: Any, residual: Any, weight: Any) -> tuple[Any, Any, Any]:
        return x, None if residual is None else torch.zeros_like(residual), weight


class ResidualOfEachRank(_Broken):
    def given(self, x: Any, residual: Any, weight: Any) -> tuple[Any, Any, Any]:
        return (x if residual is None else x + residual), residual, weight


class NormBeforeSum(_Broken):
    def given(self, x: Any, residual: Any, weight: Any) -> tuple[Any, Any, Any]:
        unit = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return unit.to(x.dtype), residual, weight


@pytest.mark.parametrize("bug", [SkipsTheOthers, NoResidual, ResidualOfEachRank, NormBeforeSum])
def test_planted_bugs_are_caught(bug: type) -> None:
    with pytest.raises(ParityError):
        for case in spec_of("sum_norm").cases:
            if case.small:
                check_parity("sum_norm", Backend("bug", bug), case, "cpu")


class OtherExperts(TritonExpertExchange):
    def dispatch(self, x: Any, ids: Any, weights: Any, part: int = 0) -> Any:
        rows, local, there = super().dispatch(x, ids, weights, part)
        return rows, torch.where(local >= 0, (local + 1) % 2, local), there


class TakesNoPart(TritonExpertExchange):
    def combine(self, partial: Any, local_ids: Any, ids: Any, part: int = 0) -> Any:
        return super().combine(partial if self.cfg.axis.rank == 0 else torch.zeros_like(partial), local_ids, ids, part)


class SumsWhoTookNoPart(TritonExpertExchange):
    def combine(self, partial: Any, local_ids: Any, ids: Any, part: int = 0) -> Any:
        return super().combine(
            partial, torch.zeros_like(local_ids), torch.arange(ids.shape[1]).expand_as(ids).int(), part
        )


@pytest.mark.parametrize("bug", [OtherExperts, TakesNoPart, SumsWhoTookNoPart])
def test_planted_bugs_of_the_exchange_are_caught(bug: type) -> None:
    with pytest.raises(ParityError):
        for case in spec_of("expert_exchange").cases:
            if case.small:
                check_parity("expert_exchange", Backend("bug", bug), case, "cpu")


def test_refusals_name_the_reason() -> None:
    cfg = SumNormConfig(Axis(2), 128)
    rows = {backend.name: backend for backend in SUM_NORM.ranked}
    h200, cpu, a100 = DESCRIBED["H200"], DESCRIBED["cpu"], DESCRIBED["A100"]
    assert rows["nccl"].refuse(cfg, h200) == "axis.group has no NCCL"
    assert rows["gloo"].refuse(cfg, h200) == "gloo carries CPU tensors" and rows["gloo"].refuse(cfg, cpu) is None
    symmetric = rows["triton_symm_mem"].refuse
    assert symmetric(cfg, h200) == "no symmetric workspace was made for this axis"
    assert symmetric(replace(cfg, refusal="ranks are on several hosts"), h200) == "ranks are on several hosts"
    assert "multiple of 8" in str(symmetric(replace(cfg, hidden_size=100), h200))
    assert symmetric(cfg, a100) == "needs sm_90 or newer, this is sm_80"
    assert symmetric(replace(cfg, slots=8), h200) is None
    assert rows["multimem"].refuse(cfg, h200) == "multicast is off on this fabric"
    sums = {backend.name: backend for backend in ALL_REDUCE.ranked}
    ours = replace(AllReduceConfig(Axis(2), 128), refusal="ranks are on several hosts")
    assert sums["torch_symm_mem"].refuse(ours, cpu) == f"NCCL needs a CUDA device, this is {cpu}"
    assert sums["torch_symm_mem"].refuse(ours, h200) == "axis.group has no NCCL"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_layer, "by_nccl", lambda group: True)
        refuse = sums["torch_symm_mem"].refuse
        assert refuse(ours, h200) == "ranks are on several hosts"
        ours = replace(ours, refusal=None)
        assert refuse(ours, h200) is None and not sums["torch_symm_mem"].auto_on
        assert str(refuse(replace(ours, dtype=torch.float16), h200)).startswith("fp16")
        assert "multiple of 8" in str(refuse(replace(ours, hidden_size=100), h200))
    fp4 = registry("gather_rows").named("nvfp4")
    assert str(fp4.refuse(cfg, h200)).startswith("an FP4 payload is for FP4 products, of which sm_90 has none")
    assert not fp4.auto_on
    with pytest.raises(NoBackendError, match=r"axis\.group has no NCCL"):
        SUM_NORM.choose(cfg, "H200")


def guards() -> set[tuple[str, str]]:
    """Return (row, layer) of the rows that are there to refuse: they have no file of their own."""
    rows = {(row, layer) for layer in COLLECTIVES for row in registry(layer).ranked}
    return {(row.name, layer) for row, layer in rows if ".collective:" in str(row.target)} - {
        (name, layer) for name in ("nccl", "gloo") for layer in COLLECTIVES
    }


@pytest.mark.parametrize(("name", "layer"), sorted(guards()))
def test_guards_refuse_in_words_on_all_hardware_and_are_never_chosen(name: str, layer: str) -> None:
    rows, cfg = registry(layer), replace(spec_of(layer).cases[0].cfg, slots=8)
    row = rows.named(name)
    reasons = {row.refuse(cfg, device) for device in DESCRIBED.values()}
    assert len(reasons) == 1 and len(str(reasons.pop())) > 20 and not row.auto_on
    with pytest.raises(NoBackendError, match=re.escape(str(row.refuse(cfg, DESCRIBED["H200"])))):
        rows.choose(cfg, "H200", name)


def test_the_page_lists_the_guards_with_their_reasons() -> None:
    page = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text().partition("Rows that are guards only")[2]
    found = re.findall(r"^\| `(\w+)` \| ([`\w, ]+) \| (.+) \|$", page.partition("\n\n|")[2].partition("\n\n")[0], re.M)
    listed = {(name, layer): why for name, layers, why in found for layer in re.findall(r"\w+", layers)}
    assert listed.keys() == guards() >= {("nvshmem", "all_reduce"), ("mnnvl", "sum_norm")}
    for (name, layer), why in listed.items():
        assert registry(layer).named(name).refuse(None, DESCRIBED["H200"]) == why


def test_facts_of_all_ranks_decide() -> None:
    fact = {"host": "a", "device": "0", "type": "cuda", "capability": (9, 0), "lacks": None}
    other = fact | {"device": "1"}
    assert _refusal([fact, other]) is None
    assert _refusal([fact, fact]) == "several ranks share a device"
    assert _refusal([fact, other | {"host": "b"}]) == "ranks are on several hosts"
    assert _refusal([fact, other | {"capability": (8, 0)}]) == "needs sm_90 or newer, a rank has sm_80"
    assert _refusal([fact, other | {"lacks": "triton is missing"}]) == "triton is missing"
    assert "gloo carries" in str(_refusal([fact | {"type": "cpu"}, other]))


def test_rows_beyond_the_workspace_go_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = SumNormConfig(Axis(2), 128, slots=64)
    chosen = Choice("sum_norm", cfg, DESCRIBED["H200"], "auto", (Rung(None, SUM_NORM.named("triton_symm_mem")),))
    assert with_limit(chosen, SUM_NORM) is chosen  # no NCCL to give them to
    monkeypatch.setattr("fastlayers.comm.rank_layer.by_nccl", lambda group: True)
    assert with_limit(chosen, SUM_NORM).name == "triton_symm_mem:64|nccl"
    assert with_limit(replace(chosen, requested="triton_symm_mem"), SUM_NORM).name == "triton_symm_mem"


def over_gloo(rank: Rank) -> None:
    axis = rank.spec().tp
    workspace = Workspace.make(axis, 64, torch.float32, torch.device("cpu"))
    assert workspace.fabric == Fabric(2, "gloo carries CPU tensors; symmetric memory is for CUDA")
    torch.manual_seed(5)
    parts, residual, weight = torch.randn(2, 3, 64), torch.randn(3, 64), 1 + 0.1 * torch.randn(64)
    layers = [
        SumNorm(axis, 64, workspace=workspace, dtype=torch.float32, backend=name) for name in ("auto", "reference")
    ]
    assert [layer.choice.name for layer in layers] == ["gloo", "reference"]
    (y, h), (wanted_y, wanted_h) = [layer(parts[rank.rank].clone(), residual, weight) for layer in layers]
    torch.testing.assert_close(h, parts.sum(0) + residual)
    assert torch.equal(h, wanted_h)  # two terms have one order
    torch.testing.assert_close(y, wanted_y)
    total = AllReduce(axis, 64, workspace=workspace, dtype=torch.float32)
    assert total.choice.name == "gloo" and torch.equal(total(parts[rank.rank].clone()), parts.sum(0))
    empty = layers[0](parts[0, :0], residual[:0], weight)
    assert all(each.shape == (0, 64) for each in empty)
    with pytest.raises(ArgumentError, match="SumNorm: weight"):
        layers[0](parts[0], residual, weight[:8])


def test_over_gloo() -> None:
    world(2).run(over_gloo)


def rows_over_gloo(rank: Rank) -> None:
    axis = rank.spec().tp
    torch.manual_seed(6)
    parts, whole = torch.randn(2, 3, 16), torch.randn(2, 6, 16)
    for backend in ("auto", "reference"):
        gather = GatherRows(axis, 16, dtype=torch.float32, backend=backend)
        scatter = ScatterRows(axis, 16, dtype=torch.float32, backend=backend)
        assert gather.choice.name == scatter.choice.name == ("gloo" if backend == "auto" else backend)
        assert torch.equal(gather(parts[rank.rank]), parts.flatten(0, 1))
        assert torch.equal(scatter(whole[rank.rank].clone()), whole.sum(0)[3 * rank.rank : 3 * rank.rank + 3])
        sizes = (3, 1)
        ragged = gather(parts[rank.rank][: sizes[rank.rank]], sizes)
        assert torch.equal(ragged, torch.cat([parts[0], parts[1][:1]]))
        own = scatter(whole[rank.rank][:4].clone(), sizes)
        assert torch.equal(own, whole[:, :4].sum(0).split(sizes)[rank.rank])
    with pytest.raises(ArgumentError, match="GatherRows: x"):
        gather(parts[0].half())
    wide = torch.randn(2, 3, 256)
    wide[0, 1, 5] = float("nan")
    for layout in ("row", "col_tma4"):
        layer = GatherRows(axis, 256, payload="fp8_128", scale_layout=layout, dtype=torch.float32)
        wanted = quantize_groups(wide.flatten(0, 1), scale_layout=layout)
        ragged = layer(wide[rank.rank][: 3 - rank.rank], (3, 2))
        for (codes, scales), keep in ((layer(wide[rank.rank]), [*range(6)]), (ragged, [*range(5)])):
            assert torch.equal(codes.view(torch.uint8), wanted[0].view(torch.uint8)[keep])
            assert torch.equal(scales.nan_to_num(-1), wanted[1][keep].nan_to_num(-1)) and scales[1].isnan().any()
        assert scales.stride() == ((2, 1) if layout == "row" else (1, 8))
    with pytest.raises(ArgumentError, match="hidden_size is 64; accepted: a multiple of 128 with fp8_128"):
        GatherRows(axis, 64, payload="fp8_128")


def normed_over_gloo(rank: Rank) -> None:
    axis, norm = rank.spec().tp, RMSNorm(256, dtype=torch.float32, backend="torch")
    torch.manual_seed(7)
    parts, residuals = torch.randn(2, 3, 256), torch.randn(2, 3, 256)
    norm.weight.copy_(1 + 0.1 * torch.randn(256))
    whole, h = norm(parts.flatten(0, 1), residuals.flatten(0, 1))
    own, mine = parts[rank.rank], residuals[rank.rank]
    for backend, sizes in (("auto", None), ("reference", None), ("auto", (3, 1))):
        few = slice(None) if sizes is None else slice(sizes[rank.rank])
        keep = [*range(6)] if sizes is None else [0, 1, 2, 3]
        layer = GatherRows(axis, 256, dtype=torch.float32, backend=backend)
        y, summed = layer.normed(norm, own[few], mine[few], sizes)
        assert torch.equal(y, whole[keep]) and torch.equal(summed, h.unflatten(0, (2, 3))[rank.rank][few])
        y, summed = layer.normed(norm, own[few], None, sizes)
        assert torch.equal(y, norm(parts.flatten(0, 1)[keep])) and torch.equal(summed, own[few])
        for layout in ("row", "col", "col_tma4"):
            codes, scales = quantize_groups(whole[keep], scale_layout=layout)
            plain = layer(norm(own[few], mine[few])[0], sizes, layout)
            for found in (plain, layer.normed(norm, own[few], mine[few], sizes, layout)[0]):
                assert isinstance(found, CodedRows) and found.scales.stride() == scales.stride()
                assert torch.equal(found.codes.view(torch.uint8), codes.view(torch.uint8))
                assert torch.equal(found.scales, scales)
    with pytest.MonkeyPatch.context() as patch:  # who has no rows launches nothing
        patch.setattr(RMSNorm, "forward", lambda *given: pytest.fail("a norm of no rows"))
        patch.setattr(
            CollectiveGatherRows, "_quants", property(lambda self: pytest.fail("codes of no rows")), raising=False
        )
        nobody = layer.normed(norm, own[:0], mine[:0], None, "row")
    assert nobody[0].codes.shape == (0, 256) and nobody[1].shape == (0, 256)
    for wrong, words in (
        (lambda: layer.normed(norm, own.half(), mine), "GatherRows: x"),
        (lambda: layer.normed(norm, own, mine[:2]), "GatherRows: residual"),
        (lambda: layer.normed(RMSNorm(128), own, mine), "GatherRows: norm.weight"),
        (lambda: layer.normed(norm, own, mine, None, "colour"), "GatherRows: codes is 'colour'"),
        (
            lambda: GatherRows(axis, 64, dtype=torch.float32)(torch.ones(1, 64), None, "row"),
            "GatherRows: codes is row; accepted: None: 64 is no multiple of 128",
        ),
    ):
        with pytest.raises(ArgumentError, match=words):
            wrong()


def test_rows_behind_a_norm_over_gloo() -> None:
    world(2).run(normed_over_gloo)


def test_a_norm_that_writes_codes_is_asked_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = GatherRows(Axis(), 256, dtype=torch.bfloat16, backend="gloo", device="cpu")
    norm = RMSNorm(256, dtype=torch.bfloat16, backend="triton")
    x, residual = torch.randn(2, 3, 256).bfloat16()
    y, wanted = norm(x, residual)
    codes, scales = quantize_groups(y, scale_layout="col")
    monkeypatch.setattr(RMSNorm, "forward", lambda *given: pytest.fail("one launch writes codes"))
    found, h = layer.normed(norm, x, residual, None, "col")
    assert torch.equal(h, wanted) and torch.equal(found.codes.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(found.scales, scales) and found.scales.stride() == scales.stride()


def experts_over_gloo(rank: Rank) -> None:
    axis = rank.spec().tp
    torch.manual_seed(8)
    x, scores, weights = torch.randn(2, 5, 16), torch.rand(2, 5, 6), torch.rand(2, 5, 2)
    ids = scores.topk(2, -1).indices.int()
    ids[1, 3:] = -1  # padding
    scale = torch.arange(1.0, 7.0)

    def experts(rows: torch.Tensor, local: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        assert rows.shape == (10, 16) and bool(((local >= -1) & (local < 3)).all())
        factor = torch.where(local >= 0, scale[3 * rank.rank + local.clamp(min=0)] * given, 0.0).sum(-1, keepdim=True)
        took = (local >= 0).any(-1, keepdim=True)
        return torch.where(took, rows * factor, float("nan"))

    mine, own = ids[rank.rank], x[rank.rank]
    factor = torch.where(mine >= 0, scale[mine.clamp(min=0)] * weights[rank.rank], 0.0).sum(-1, keepdim=True)
    for backend in ("auto", "reference"):
        layer = ExpertExchange(axis, 16, 6, 2, dtype=torch.float32, backend=backend)
        torch.testing.assert_close(layer(own, mine, weights[rank.rank], experts), own * factor)
    with pytest.raises(ArgumentError, match="ExpertExchange: topk_ids"):
        layer(own, mine.long(), weights[rank.rank], experts)
    with pytest.raises(ArgumentError, match="num_experts is 7; accepted: a multiple of 2 ranks"):
        ExpertExchange(axis, 16, 7, 2)


def test_experts_over_gloo() -> None:
    world(2).run(experts_over_gloo)


def test_rows_over_gloo() -> None:
    world(2).run(rows_over_gloo)


def test_backends_are_listed_and_environment_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in COLLECTIVES:
        names = [backend.name for backend in registry(layer).ranked]
        assert names[:3] == ["triton_symm_mem", "nccl", "gloo"] and names[-1] == "reference"
        assert {row.name for row in fl.backends(layer, device="H200")} == set(names)
    monkeypatch.setenv("FASTLAYERS_BACKEND", "sum_norm=reference")
    assert SumNorm(Axis(), 8).choice.name == "reference"
