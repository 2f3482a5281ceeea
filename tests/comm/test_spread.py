"""Steps whose residual is scattered: the table by hand, every grid against one process, planted bugs, equal bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers.comm.communicator import LayerCommunicator
from fastlayers.comm.layouts import Hidden, Layout, normed
from fastlayers.comm.padding import StepTokens
from fastlayers.comm.parallel import ParallelSpec
from fastlayers.comm.seam import Seam
from fastlayers.comm.transitions import RankOps
from fastlayers.errors import ArgumentError, LayoutError
from fastlayers.norm.rms_norm.layer import RMSNorm
from fastlayers.testing.comm_check import HIDDEN, SPREAD_CASES, CommCase, check_communicator
from fastlayers.testing.world import Rank, WorldError, simulate, world

CASES = {case.name: case for case in SPREAD_CASES}
ATTN, FULL = "attn_full", "full"
OWN = Layout("scattered", None, "scattered")


def communicator(parallel: ParallelSpec, **options: Any) -> LayerCommunicator:
    first, second = RMSNorm(HIDDEN, backend="torch"), RMSNorm(HIDDEN, backend="torch")
    return LayerCommunicator(parallel, input_layernorm=first, post_attention_layernorm=second, **options)


# One group, and several: (hook, place, sum due, residual) -> layout.
Table = dict[tuple[str, str, str | None, str | None], Layout]
FIRST: Table = {("prepare_attn", ATTN, due, None): Layout(ATTN, None, "scattered") for due in (None, "attn_tp")}
OWN_ROWS: Table = {("prepare_attn", "scattered", None, "scattered"): Layout(ATTN, None, "scattered")}
MLP: Table = {("prepare_mlp", ATTN, due, "scattered"): Layout(FULL, None, "scattered") for due in (None, "attn_tp")}
ONE_GROUP: Table = {
    **FIRST, **OWN_ROWS, **MLP,
    ("prepare_attn", ATTN, "tp", None): Layout(ATTN, None, "scattered"),
    **{("prepare_attn", ATTN, due, "scattered"): Layout(ATTN, None, "scattered") for due in (None, "attn_tp", "tp")},
    **{("postprocess", FULL, due, "scattered"): Layout(ATTN, due, "scattered") for due in (None, "tp")},
}  # fmt: skip
GROUPS: Table = {**FIRST, **OWN_ROWS, **MLP, **{("postprocess", FULL, due, "scattered"): OWN for due in (None, "tp")}}
EXCHANGED: Table = {
    **{("prepare_mlp", ATTN, due, "scattered"): OWN for due in (None, "attn_tp")},
    ("postprocess", "scattered", None, "scattered"): OWN,
}  # fmt: skip


@pytest.mark.parametrize(
    ("grid", "options", "wanted"),
    [
        ((2, 1), {}, ONE_GROUP),
        ((8, 1), {"mlp_kind": "moe"}, ONE_GROUP),
        ((2, 2), {}, GROUPS),
        ((4, 2), {}, GROUPS),
        ((4, 2), {"is_last": True}, GROUPS),
        ((4, 1), {"dense_tp": 1}, {k: v for k, v in ONE_GROUP.items() if k[0] == "prepare_attn"} | EXCHANGED),
        ((4, 2), {"mlp_kind": "moe", "all_to_all": True}, FIRST | OWN_ROWS | EXCHANGED),
    ],
)
def test_the_table(grid: tuple[int, int], options: dict[str, Any], wanted: dict[Any, Layout]) -> None:
    made = communicator(ParallelSpec.grid(grid[0], 0, attn_dp=grid[1]), **options)
    table = {(hook, given.place, given.pending, given.residual): to for (hook, given), to in made.spread_table.items()}
    assert table == wanted
    for kind in ({}, {"dense_tp": 1}, {"mlp_kind": "moe"}):  # whatever follows takes it
        following = communicator(ParallelSpec.grid(grid[0], 0, attn_dp=grid[1]), previous=made, **kind)
        assert all(("prepare_attn", layout) in following.spread_table for layout in made.outputs_of(spread=True))


def test_one_rank_has_one_table() -> None:
    made = communicator(ParallelSpec())
    assert made.spread_table == made.table and made.report() == []
    step = StepTokens.plan([2], extend=True, spread=True)
    hidden = made.prepare_attn(Hidden.start(torch.ones(2, HIDDEN)), step)
    hidden = made.prepare_mlp(hidden.complete(hidden.tensor), step)
    assert made.finish(made.postprocess(hidden.complete(hidden.tensor), step), None, step).shape == (2, HIDDEN)


def test_the_tables_in_words() -> None:
    lines = communicator(ParallelSpec.grid(2, 0)).report()
    due = "attn_full, sum over attn_tp due, residual"
    assert f"prepare_mlp: {due} attn_full -> full, residual attn_full: all-reduce, norm" in lines
    own = "reduce-scatter, norm of own rows, all-gather"
    assert f"spread, prepare_mlp: {due} scattered -> full, residual scattered: {own}" in lines
    seam = Seam(ParallelSpec(), None, HIDDEN, torch.float32, torch.device("cpu"))
    assert not any("sum_norm" in line for line in lines) and seam.spread_rows == range(0)
    lines = communicator(ParallelSpec.grid(2, 0), seam=seam).report()
    assert f"prepare_mlp: {due} attn_full -> full, residual attn_full: sum_norm=gloo" in lines
    assert f"spread, prepare_mlp: {due} scattered -> full, residual scattered: sum_norm=gloo of own rows" in lines


def test_explain_shows_each_table_once() -> None:
    class Layer(torch.nn.Module):
        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.communicator = communicator(ParallelSpec.grid(2, 0), **options)

    model, layers = torch.nn.Module(), [Layer(), Layer(), Layer(dense_tp=1)]
    model.layers = torch.nn.ModuleList(layers)
    shown = fl.explain(model)
    assert [line for line in shown.ranks if not line.startswith("    ")] == [
        "layers.0 to layers.1, 2 layers: between ranks", "layers.2: between ranks",
    ]  # fmt: skip
    assert [line.strip() for line in shown.ranks if line.startswith("    ")] == [
        line for layer in layers[1:] for line in layer.communicator.report()
    ]
    model.spread_rows = range(1025, 8193)  # type: ignore[assignment]
    assert str(fl.explain(model)).endswith("steps of 1,025 to 8,192 rows are spread over ranks")
    seam = Seam(ParallelSpec(), None, HIDDEN, torch.float32, torch.device("cpu"))
    seam.sum_norm(fl.RMSNorm(HIDDEN, dtype=torch.float32))
    model.seam = seam  # type: ignore[assignment]
    assert fl.explain(model).ranks[-3:-1] == ("all_reduce=gloo: rank", "sum_norm=gloo: rank")


def test_what_does_not_fit_a_spread_step_is_named() -> None:
    made, x = communicator(ParallelSpec.grid(2, 0)), torch.ones(4, HIDDEN)
    step = StepTokens.plan([4], attn_tp=2, extend=True, spread=True)
    words = r"prepare_attn: no transition from \(attn_full, residual attn_full\); accepted: .*residual scattered"
    with pytest.raises(LayoutError, match=words):
        made.prepare_attn(Hidden(x, x, Layout(ATTN, None, ATTN)), step)
    with pytest.raises(LayoutError, match=r"finish: attn_full, residual attn_full; accepted: attn_full, residual"):
        made.finish(Hidden(x, x, Layout(ATTN, None, ATTN)), None, step)
    uneven = StepTokens.plan([4], extend=True, spread=True)  # of a group of one rank
    with pytest.raises(ArgumentError, match="accepted: StepTokens of 1 groups of 2 ranks"):
        made.prepare_attn(Hidden.start(x), uneven)
    with pytest.raises(ArgumentError, match="StepTokens: spread is 1"):
        StepTokens.plan([4], extend=True, spread=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", SPREAD_CASES, ids=lambda case: case.name)
def test_every_grid_on_threads(case: CommCase) -> None:
    simulate(case.size, check_communicator, LayerCommunicator, case)


@pytest.mark.parametrize(
    "name", ["tp2", "tp2_scattered", "dp2_graph", "tp4", "tp4_ep2", "dp2_tp2_max_len", "dp2_tp2_sum_len", "dp4_ep4"]
)
def test_over_gloo(name: str) -> None:
    case = CASES[f"{name}_spread"]
    world(case.size).run(check_communicator, LayerCommunicator, case)


class WithSeam(LayerCommunicator):
    """Every layer with a seam over ``tp``."""

    def __init__(self, parallel: ParallelSpec, **options: Any) -> None:
        seam = Seam(parallel, None, HIDDEN, torch.float32, torch.device("cpu"))
        super().__init__(parallel, seam=seam, **options)
        made = seam.sum_norm(self.input_layernorm, spread=True)
        assert made is not None and made.cfg.spread and made is not seam.sum_norm(self.input_layernorm)
        assert seam.chosen["spread rows"] == "range(0, 0)"  # over Gloo it does not pay


@pytest.mark.parametrize("case", [case for case in SPREAD_CASES if case.attn_dp == 1 < case.size], ids=lambda c: c.name)
def test_with_a_seam(case: CommCase) -> None:
    simulate(case.size, check_communicator, WithSeam, case)


# ---- planted bugs ------------------------------------------------------------------------------------------------


class NoSum(RankOps):
    def own_rows(self, hidden: Hidden) -> torch.Tensor:
        return self.attn_tp.own_slice(hidden.tensor)


class RowsOfTheNeighbour(RankOps):
    def own_rows(self, hidden: Hidden) -> torch.Tensor:
        own = super().own_rows(hidden)
        parts = list(self.attn_tp.all_gather(own).chunk(self.attn_tp.size))
        return parts[(self.attn_tp.rank + 1) % self.attn_tp.size]


class NoScatter(RankOps):
    def scatter_sum(self, x: torch.Tensor, step: StepTokens) -> torch.Tensor:
        own = self.attn_tp.own_slice(self.own_group(x, step))
        return own * self.tp.size


class GroupsInAnotherOrder(RankOps):
    def gather_own(self, x: torch.Tensor, step: StepTokens) -> torch.Tensor:
        return super().gather_own(x, step).roll(step.rows[0], 0)


def normed_before_the_sum(self: Any, norm: Any, pending: Any, *, wide: bool = False) -> Any:
    def move(hidden: Hidden, step: StepTokens | None) -> Any:
        x, residual = self.ops.attn_tp.own_slice(hidden.tensor), hidden.residual
        y, _ = normed(norm, x, residual)
        h = self.ops.own_rows(hidden)
        return self.ops.attn_tp.all_gather(y), h if residual is None else h + residual

    return move, "wrong"


def residual_on_each_rank(self: Any, norm: Any, pending: Any, *, wide: bool = False) -> Any:
    def move(hidden: Hidden, step: StepTokens | None) -> Any:
        x, residual = hidden.tensor, hidden.residual
        if residual is not None:
            x = x + self.ops.attn_tp.all_gather(residual)  # before the sum: as often as there are ranks
        y, h = normed(norm, self.ops.own_rows(replace(hidden, tensor=x)), None)
        return self.ops.attn_tp.all_gather(y), h

    return move, "wrong"


BUGS: list[Any] = [
    (NoSum, "tp2_spread"), (NoSum, "dp2_tp2_sum_len_spread"), (RowsOfTheNeighbour, "tp2_spread"),
    (RowsOfTheNeighbour, "dp2_tp2_max_len_spread"), (NoScatter, "dp2_max_len_spread"),
    (NoScatter, "dp2_tp2_sum_len_spread"), (GroupsInAnotherOrder, "dp2_tp2_max_len_spread"),
    (normed_before_the_sum, "tp2_spread"), (residual_on_each_rank, "tp2_spread"), (residual_on_each_rank, "tp4_spread"),
]  # fmt: skip


@pytest.mark.parametrize(("bug", "name"), BUGS, ids=lambda v: v if isinstance(v, str) else v.__name__)
def test_planted_bugs_are_caught(bug: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: type[LayerCommunicator] = LayerCommunicator
    if isinstance(bug, type):
        wrong = type(bug.__name__, (LayerCommunicator,), {"rank_ops": bug})
    else:
        monkeypatch.setattr("fastlayers.comm.transitions.Tables._norm_of_own_rows", bug)
    with pytest.raises(WorldError, match=r"AssertionError|different calls|BrokenBarrier"):
        simulate(CASES[name].size, check_communicator, wrong, CASES[name])


# ---- the same bits -----------------------------------------------------------------------------------------------


def both_ways(rank: Rank, count: int, attn_dp: int) -> bool:
    """Return whether two layers give the same bits with a whole and with a scattered residual."""
    spec, generator = rank.spec(attn_dp=attn_dp), torch.Generator().manual_seed(5)
    norms = [RMSNorm(HIDDEN, backend="torch", dtype=torch.bfloat16) for _ in range(2)]
    weights = torch.randn(spec.tp.size, HIDDEN, HIDDEN, generator=generator).bfloat16()
    x = torch.randn(count, HIDDEN, generator=generator).bfloat16()
    made = LayerCommunicator(spec, input_layernorm=norms[0], post_attention_layernorm=norms[1])
    found = []
    for spread in (False, True):
        step = StepTokens.plan([count] * attn_dp, attn_tp=spec.attn_tp.size, extend=False, spread=spread)
        hidden = Hidden.start(torch.cat([x, x.new_zeros(step.rows[0] - count, HIDDEN)]))
        for _ in range(2):
            hidden = made.prepare_attn(hidden, step)
            hidden = hidden.partial(hidden.tensor @ weights[spec.attn_tp.rank], "attn_tp")
            hidden = made.prepare_mlp(hidden, step)
            hidden = made.postprocess(hidden.partial(hidden.tensor @ weights[spec.tp.rank], "tp"), step)
        found.append(made.finish(hidden, norms[0], step)[:count])
    return torch.equal(*found)


@pytest.mark.parametrize(("size", "attn_dp", "count"), [(2, 1, 5), (4, 1, 7), (4, 1, 8), (2, 2, 3), (4, 4, 2)])
def test_equal_bits_over_gloo(size: int, attn_dp: int, count: int) -> None:
    assert world(size).run(both_ways, count, attn_dp) == [True] * size
