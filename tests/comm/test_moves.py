"""Rows between attention groups by moves, sums within a group by a seam: every row, codes, words, planted bugs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from fastlayers.comm.collectives import collectives
from fastlayers.comm.communicator import LayerCommunicator
from fastlayers.comm.fabric import Fabric, Workspace
from fastlayers.comm.layouts import Hidden, Layout
from fastlayers.comm.padding import StepTokens
from fastlayers.comm.parallel import ParallelSpec
from fastlayers.comm.seam import Moves, Seam, alike_in_groups, late_of
from fastlayers.comm.transitions import RankOps
from fastlayers.device import DESCRIBED
from fastlayers.norm.rms_norm.layer import RMSNorm
from fastlayers.quant.coded_rows import CodedRows
from fastlayers.quant.group_quant.layer import quantize_groups
from fastlayers.registry import registry
from fastlayers.testing.comm_check import COMM_CASES, HIDDEN, SPREAD_CASES, CommCase, check_communicator
from fastlayers.testing.transition_check import GRIDS, Grid, check_transitions
from fastlayers.testing.world import Rank, WorldError, simulate, world

CPU = torch.device("cpu")
CASES = {case.name: case for case in (*COMM_CASES, *SPREAD_CASES)}
GROUPS = [case for case in CASES.values() if case.attn_dp > 1]


def connected(parallel: ParallelSpec, hidden: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return what the communicators of such ranks are given."""
    sizes: Any = parallel, None, hidden, dtype, CPU
    seam = Seam(*sizes) if parallel.attn_tp.size > 1 else None
    return {"seam": seam, "moves": Moves(*sizes) if parallel.attn_dp.size > 1 else None}


class Connected(LayerCommunicator):
    """Groups of one rank: moves alone. Of several: sums over a group by a seam, too."""

    def __init__(self, parallel: ParallelSpec, **options: Any) -> None:
        super().__init__(parallel, **connected(parallel, HIDDEN), **options)
        seam, moves = self.ops.seam, self.ops.moves
        assert moves is not None and moves.chosen == {
            "gather_rows": "gloo", "scatter_rows": "gloo", "rows between groups as codes": "False",
        }  # fmt: skip
        assert moves.status is None and late_of(self.ops) == ()
        if seam is not None:
            assert seam.axis is parallel.attn_tp and seam.chosen["gather_rows in a group"] == "gloo"
            assert seam.spread_rows == range(0)


class WithoutSeam(LayerCommunicator):
    """Moves alone, also between groups of several ranks: sums of a group are as they are without either."""

    def __init__(self, parallel: ParallelSpec, **options: Any) -> None:
        super().__init__(parallel, moves=connected(parallel, HIDDEN)["moves"], **options)


@pytest.mark.parametrize("case", GROUPS, ids=lambda case: case.name)
def test_transitions(case: CommCase) -> None:
    for kind in (Connected, WithoutSeam) if case.size > case.attn_dp else (Connected,):
        simulate(case.size, check_communicator, kind, case)


@pytest.mark.parametrize("grid", [grid for grid in GRIDS if grid.attn_dp > 1], ids=lambda grid: grid.name)
def test_every_row(grid: Grid) -> None:
    for kind in (Connected, WithoutSeam) if grid.size > grid.attn_dp else (Connected,):
        simulate(grid.size, check_transitions, kind, grid)


@pytest.mark.parametrize(
    "name", ["dp2_idle_sum_len", "dp4_skewed_decode", "dp2_tp2_graph", "dp2_tp2_idle_sum_len_spread"]
)
def test_over_gloo(name: str) -> None:
    world(CASES[name].size).run(check_communicator, Connected, CASES[name])


# ---- words -------------------------------------------------------------------------------------------------------


def table(size: int, attn_dp: int, **options: Any) -> list[str]:
    parallel, norm = ParallelSpec.grid(size, 0, attn_dp=attn_dp), RMSNorm(HIDDEN)
    made = LayerCommunicator(
        parallel, input_layernorm=norm, post_attention_layernorm=RMSNorm(HIDDEN), **connected(parallel, HIDDEN),
        **options,
    )  # fmt: skip
    return made.report()


def test_the_tables_in_words() -> None:
    codes = ", as codes and scales where FP8 products read them"
    given = "prepare_mlp: attn_full, sum over attn_tp due, residual attn_full -> full, residual attn_full"
    lines = table(2, 2, codes=lambda hook, rows: None)
    assert f"{given}: gather_rows=gloo behind the norm of own rows{codes}" in lines
    summed = "postprocess: full, sum over tp due, residual attn_full -> attn_full, residual attn_full"
    assert f"{summed}: scatter_rows=gloo of own rows" in lines
    assert f"{given}: gather_rows=gloo behind the norm of own rows" in table(4, 4)
    lines = table(4, 2, codes=lambda hook, rows: None)
    assert f"{given}: sum_norm=gloo, gather_rows=gloo of own rows{codes}" in lines
    assert f"{summed}: scatter_rows=gloo of own rows, gather_rows=gloo in the group" in lines
    lines = table(4, 2)
    own = "gather_rows=gloo behind the norm of own rows"
    assert f"prepare_attn: scattered, residual scattered -> attn_full, residual scattered: {own}" in lines
    given = "spread, prepare_mlp: attn_full, sum over attn_tp due, residual scattered -> full, residual scattered"
    assert f"{given}: scatter_rows=gloo, {own}" in lines
    assert not any("gather of partial sums" in line for line in lines)
    whole = "spread, prepare_mlp: attn_full, residual scattered -> full, residual scattered"
    assert f"{whole}: {own}" in lines


def test_why_rows_do_not_cross_in_symmetric_memory() -> None:
    parallel = ParallelSpec.grid(4, 2, attn_dp=2)
    far, near = (Workspace(Fabric(ranks, why)) for ranks, why in ((4, "ranks are on several hosts"), (2, "no memory")))
    moves, seam = Moves(parallel, far, 8, torch.float32, CPU), Seam(parallel, near, 8, torch.float32, CPU)
    assert moves.evidence[-1] == "no symmetric memory among ranks 0, 1, 2, 3: ranks are on several hosts"
    assert seam.evidence[-1] == "no symmetric memory among ranks 2, 3: no memory"
    symmetric = registry("gather_rows").named("triton_symm_mem").refuse
    assert symmetric(moves.gather.cfg, DESCRIBED["H200"]) == "ranks are on several hosts"
    assert {line.split(":")[0] for line in seam.evidence[:-1]} == {
        "all_reduce=gloo", "gather_rows=gloo", "scatter_rows=gloo",
    }  # fmt: skip


def unlike(rank: Rank, which: int | None) -> str | None:
    made = Workspace(Fabric(2, "no memory" if rank.rank == which else None))
    return alike_in_groups(rank.spec(attn_dp=2), made).fabric.refusal


def test_groups_have_symmetric_memory_alike() -> None:
    of_others = "the attention group of rank 3 has none: no memory"
    assert world(4).run(unlike, 3) == [of_others, of_others, of_others, "no memory"]
    assert world(4).run(unlike, None) == [None] * 4


# ---- codes -------------------------------------------------------------------------------------------------------

WIDE = 256


def coded(rank: Rank, attn_dp: int, counts: tuple[int, ...], mode: str, layout: str, spread: bool) -> tuple[bool, ...]:
    """Return whether both norms of a layer leave codes, the bits of which are those of their rows."""
    spec, asked = rank.spec(attn_dp=attn_dp), []
    n, d = spec.attn_tp.size, spec.attn_dp.rank
    rows = tuple(-(-count // n) * n for count in counts)
    rows = (max(rows) + n,) * len(rows) if mode == "max_len" else rows
    step = StepTokens(counts, rows, mode, n, spread)
    norms = [RMSNorm(WIDE, backend="torch", dtype=torch.bfloat16) for _ in range(2)]
    norms[1].weight.copy_(1 + 0.3 * torch.randn(WIDE, generator=torch.Generator().manual_seed(1)))

    def codes(hook: str, count: int) -> str:
        asked.append((hook, count))
        return layout

    draws = torch.Generator().manual_seed(10 + d)
    parts = torch.randn(n, rows[d], WIDE, generator=draws).bfloat16()
    residual = torch.randn(rows[d], WIDE, generator=draws).bfloat16()
    own = spec.attn_tp.part(rows[d], "rows") if spread else slice(None)
    found: list[tuple[Any, Any]] = []
    for takes in (codes, None):
        made = LayerCommunicator(
            spec, input_layernorm=norms[0], post_attention_layernorm=norms[1], codes=takes,
            **connected(spec, WIDE, torch.bfloat16),
        )  # fmt: skip
        made.trusted = True
        left = "scattered" if spread else "attn_full"
        with torch.inference_mode():
            hidden = Hidden(
                parts[spec.attn_tp.rank].clone(), residual[own].clone(), Layout("attn_full", "attn_tp", left)
            )
            hidden = made.prepare_mlp(hidden, step)
            attention = None
            if spread and n > 1:  # whole steps have rows in front of attention, and so have groups of one rank
                scattered = Hidden(parts[0][own], residual[own], Layout("scattered", None, "scattered"))
                attention = made.prepare_attn(scattered, step).tensor
        found.append((hidden, attention))
    (first, attended), (second, plain) = found
    same = [first.residual.equal(second.residual), equal(first.tensor, second.tensor, layout)]
    assert ("prepare_mlp", step.full_rows) in asked
    if plain is not None:  # rows that pad a group are cut off behind this hook
        padded = step.real[d] != rows[d]
        assert padded == (("prepare_attn", rows[d]) not in asked)
        same.append(attended.equal(plain) if padded else equal(attended, plain, layout))
    return tuple(same)


def equal(found: Any, rows: torch.Tensor, layout: str) -> bool:
    """Return whether codes are those of rows, in that layout."""
    codes, scales = quantize_groups(rows, scale_layout=layout)
    assert isinstance(found, CodedRows) and found.scales.stride() == scales.stride()
    return torch.equal(found.codes.view(torch.uint8), codes.view(torch.uint8)) and torch.equal(found.scales, scales)


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize(
    ("size", "attn_dp", "counts", "mode"),
    [
        (2, 2, (3, 5), "max_len"), (2, 2, (5, 0), "sum_len"), (4, 4, (3, 1, 2, 4), "sum_len"),
        (4, 2, (4, 6), "max_len"), (4, 2, (6, 3), "sum_len"), (8, 2, (8, 4), "sum_len"),
        (8, 4, (2, 2, 0, 4), "max_len"),
    ],
)  # fmt: skip
def test_codes_have_the_bits_of_rows(size: int, attn_dp: int, counts: tuple[int, ...], mode: str, spread: bool) -> None:
    layout = "col_tma4" if mode == "max_len" else "row"
    for same in simulate(size, coded, attn_dp, counts, mode, layout, spread):
        assert all(same)


def off(rank: Rank, switch: str) -> list[type]:
    """Return what an MLP gets where codes are switched off, nobody vouches, or a norm is no RMSNorm."""
    spec = rank.spec(attn_dp=2)
    own = RMSNorm(WIDE, backend="torch", dtype=torch.bfloat16)

    def other(x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        return own(x, residual)

    made = LayerCommunicator(
        spec, input_layernorm=own, post_attention_layernorm=other if switch == "norm" else own,
        codes=lambda hook, rows: "row", **connected(spec, WIDE, torch.bfloat16),
    )  # fmt: skip
    made.trusted = switch != "trusted"
    if switch == "codes":
        made.ops.moves.codes = False  # type: ignore[union-attr]
    step = StepTokens.plan([1, 3], extend=False)
    with torch.inference_mode():
        x = torch.randn(3, WIDE).bfloat16()
        hidden = made.prepare_mlp(Hidden(x, x, Layout("attn_full", None, "attn_full")), step)
    return [type(hidden.tensor)]


@pytest.mark.parametrize("switch", ["codes", "trusted"])
def test_rows_come_where_codes_may_not(switch: str) -> None:
    assert simulate(2, off, switch) == [[torch.Tensor]] * 2


def test_rows_behind_another_norm_are_quantised_before_they_are_sent() -> None:
    assert simulate(2, off, "norm") == [[CodedRows]] * 2


# ---- planted bugs ------------------------------------------------------------------------------------------------


class Bent:
    """A layer between ranks of which one thing is wrong."""

    def __init__(self, layer: Any, **wrong: Callable[..., Any]) -> None:
        self._layer, self._wrong, self.choice = layer, wrong, layer.choice

    def __call__(self, *given: Any) -> Any:
        return self._wrong.get("call", self._layer)(*given)

    def normed(self, *given: Any) -> Any:
        return self._wrong.get("normed", self._layer.normed)(*given)


def another_ranks_rows(layer: Any, ops: RankOps) -> Any:
    return Bent(layer, call=lambda x, *how: layer(x.roll(x.shape[0] // 2, 0), *how))


def a_mean(layer: Any, ops: RankOps) -> Any:
    return Bent(layer, call=lambda x, *how: layer(x, *how) / 2)


def other_order(layer: Any, ops: RankOps) -> Any:
    def normed(norm: Any, x: torch.Tensor, *how: Any) -> Any:
        y, h = layer.normed(norm, x, *how)
        return y.roll(x.shape[0], 0), h

    return Bent(layer, call=lambda x, *how: layer(x, *how).roll(x.shape[0], 0), normed=normed)


def sizes_ignored(layer: Any, ops: RankOps) -> Any:
    """As if each rank had as many rows as the one with the most."""

    def normed(norm: Any, x: torch.Tensor, residual: Any, sizes: Any, codes: Any) -> Any:
        if sizes is None:
            return layer.normed(norm, x, residual, sizes, codes)
        y, h = layer.normed(norm, torch.cat([x, x.new_zeros(max(sizes) - len(x), x.shape[1])]), torch.cat(
            [residual, residual.new_zeros(max(sizes) - len(x), x.shape[1])]
        ), None, codes)  # fmt: skip
        return y[: sum(sizes)], h[: len(x)]

    return Bent(layer, normed=normed)


def residual_forgotten(layer: Any, ops: RankOps) -> Any:
    return Bent(layer, normed=lambda norm, x, residual, *how: layer.normed(norm, x, None, *how))


def residual_twice(layer: Any, ops: RankOps) -> Any:
    return Bent(layer, normed=lambda norm, x, residual, *how: layer.normed(norm, x + residual, residual, *how))


def residual_of_the_neighbour(layer: Any, ops: RankOps) -> Any:
    def normed(norm: Any, x: torch.Tensor, residual: torch.Tensor, *how: Any) -> Any:
        return layer.normed(norm, x, residual.roll(1, 0), *how)

    return Bent(layer, normed=normed)


def norm_before_the_residual(layer: Any, ops: RankOps) -> Any:
    def normed(norm: Any, x: torch.Tensor, residual: torch.Tensor, *how: Any) -> Any:
        return layer(norm(x), *how), x + residual

    return Bent(layer, normed=normed)


def no_norm(layer: Any, ops: RankOps) -> Any:
    return Bent(layer, normed=lambda norm, x, residual, *how: (layer(x + residual, *how), x + residual))


def bent_sums(wrong: Callable[..., Any]) -> Any:
    """Return a bug of what sums over a group: ``wrong`` is called with it and its arguments."""

    def bug(sum_norm: Any, ops: RankOps) -> Any:
        def made(norm: Any, *, spread: bool = False) -> Any:
            layer = sum_norm(norm, spread=spread)
            return Bent(layer, call=partial(wrong, layer))

        return made

    bug.__name__ = wrong.__name__
    return bug


@bent_sums
def residual_on_each_rank(layer: Any, x: torch.Tensor, residual: torch.Tensor | None, *how: Any) -> Any:
    return layer(x if residual is None else x + residual, residual, *how)


@bent_sums
def residual_left_out(layer: Any, x: torch.Tensor, residual: torch.Tensor | None, *how: Any) -> Any:
    return layer(x, None, *how)


@bent_sums
def no_sum(layer: Any, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, *how: Any) -> Any:
    layer(x.clone(), residual, weight, *how)
    h = x if residual is None else x + residual
    return RMSNorm(HIDDEN, backend="torch")(h) * weight, h


BUGS = [
    ("seam", "sum_norm", residual_on_each_rank, "dp2_tp2_max_len"),
    ("seam", "sum_norm", residual_left_out, "dp2_tp2_sum_len"), ("seam", "sum_norm", no_sum, "dp2_tp2_graph"),
    ("moves", "scatter", another_ranks_rows, "dp2_graph"), ("moves", "scatter", a_mean, "dp2_graph"),
    ("moves", "scatter", a_mean, "dp2_tp2_sum_len"), ("moves", "scatter", another_ranks_rows, "dp2_tp2_max_len"),
    ("moves", "gather", other_order, "dp2_graph"), ("moves", "gather", other_order, "dp2_tp2_max_len"),
    ("moves", "gather", other_order, "dp2_tp2_max_len_spread"), ("moves", "gather", sizes_ignored, "dp4_sum_len"),
    ("moves", "gather", residual_forgotten, "dp2_max_len"), ("moves", "gather", residual_twice, "dp2_sum_len"),
    ("moves", "gather", residual_of_the_neighbour, "dp2_max_len"),
    ("moves", "gather", norm_before_the_residual, "dp2_max_len"), ("moves", "gather", no_norm, "dp2_max_len"),
    ("moves", "gather", residual_twice, "dp2_tp2_max_len_spread"),
    ("seam", "gather", other_order, "dp2_tp2_max_len"), ("seam", "gather", other_order, "dp2_tp2_max_len_spread"),
    ("seam", "gather", residual_forgotten, "dp2_tp2_max_len_spread"),
    ("seam", "scatter", another_ranks_rows, "dp2_tp2_sum_len_spread"),
    ("seam", "scatter", a_mean, "dp2_tp2_max_len_spread"),
]  # fmt: skip


def bent(across: str, name: str, bug: Any, parallel: ParallelSpec, **options: Any) -> LayerCommunicator:
    made = LayerCommunicator(parallel, **connected(parallel, HIDDEN), **options)
    held = getattr(made.ops, across)
    setattr(held, name, bug(getattr(held, name), made.ops))
    made._fill()
    return made


@pytest.mark.parametrize(("across", "name", "bug", "case"), BUGS, ids=lambda value: getattr(value, "__name__", value))
def test_planted_bugs_are_caught(across: str, name: str, bug: Any, case: str) -> None:
    right: Any = partial(bent, across, name, lambda layer, ops: layer if name == "sum_norm" else Bent(layer))
    simulate(CASES[case].size, check_communicator, right, CASES[case])
    with pytest.raises(WorldError, match=r"AssertionError|different calls|BrokenBarrier"):
        simulate(CASES[case].size, check_communicator, partial(bent, across, name, bug), CASES[case])


class NoGather(RankOps):
    def gather_group(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * self.attn_tp.size)


class SumLeftOut(RankOps):
    def own_rows(self, hidden: Hidden) -> torch.Tensor:
        return self.attn_tp.own_slice(hidden.tensor)


class SlicesOfRankZero(RankOps):
    def gather_replicate(self, x: torch.Tensor, step: StepTokens, codes: str | None = None) -> Any:
        assert self.moves is not None
        return self.moves.gather(x[: len(x) // self.attn_tp.size], self._ragged(step), codes)


@pytest.mark.parametrize(
    ("ops", "case"),
    [
        (NoGather, "dp2_tp2_max_len"), (NoGather, "dp2_tp2_idle_sum_len"), (SumLeftOut, "dp2_tp2_max_len_spread"),
        (SlicesOfRankZero, "dp2_tp2_max_len"),
    ],
)  # fmt: skip
def test_wrong_moves_in_groups_of_several_ranks_are_caught(ops: type[RankOps], case: str) -> None:
    class Wrong(LayerCommunicator):
        rank_ops = ops

        def __init__(self, parallel: ParallelSpec, **options: Any) -> None:
            super().__init__(parallel, **connected(parallel, HIDDEN), **options)

    with pytest.raises(WorldError, match=r"AssertionError|different calls|BrokenBarrier"):
        simulate(CASES[case].size, check_communicator, Wrong, CASES[case])


def sums(rank: Rank) -> bool:
    """Return whether groups of two ranks have the sums of their ranks, rounded once, before the residual is added."""
    spec, draws = rank.spec(attn_dp=2), torch.Generator().manual_seed(3)
    made = LayerCommunicator(
        spec, input_layernorm=RMSNorm(WIDE, dtype=torch.bfloat16), **connected(spec, WIDE, torch.bfloat16),
        post_attention_layernorm=RMSNorm(WIDE, backend="torch", dtype=torch.bfloat16),
    )  # fmt: skip
    parts, residual = (
        torch.randn(2, 4, WIDE, generator=draws).bfloat16(),
        torch.randn(4, WIDE, generator=draws).bfloat16(),
    )
    with torch.inference_mode():
        given = Hidden(parts[spec.attn_tp.rank].clone(), residual, Layout("attn_full", "attn_tp", "attn_full"))
        found = made.prepare_mlp(given, StepTokens.plan([4, 4], attn_tp=2, extend=False))
    h = (parts[0] + parts[1]) + residual  # of bf16 each
    y = RMSNorm(WIDE, backend="torch", dtype=torch.bfloat16)(h)
    assert collectives(spec.tp).size == 4 and found.residual is not None
    return torch.equal(found.residual, h) and torch.equal(found.tensor, torch.cat([y, y]))


def test_a_groups_sum_is_rounded_before_the_residual_is_added() -> None:
    assert simulate(4, sums) == [True] * 4
