"""Every row of both transition tables, on 2, 4 and 8 ranks, against the rows written down whole; planted bugs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastlayers.comm.collectives import Collectives
from fastlayers.comm.communicator import LayerCommunicator
from fastlayers.comm.padding import StepTokens
from fastlayers.comm.parallel import ParallelSpec
from fastlayers.comm.transitions import RankOps
from fastlayers.norm.rms_norm.layer import RMSNorm
from fastlayers.testing.transition_check import GRIDS, LAYERS, Grid, check_transitions, steps
from fastlayers.testing.world import WorldError, simulate, world

BY_NAME = {grid.name: grid for grid in GRIDS}


def rows_of(grid: Grid) -> int:
    """Return how many rows of tables there are to look at."""
    found, spec, norm = 0, ParallelSpec.grid(grid.size, 0, attn_dp=grid.attn_dp), RMSNorm(8)
    for options in LAYERS:
        made = LayerCommunicator(spec, input_layernorm=norm, post_attention_layernorm=norm, **options)
        for counts in grid.counts:
            for step in steps(counts, spec.attn_tp.size):
                found += len(made.spread_table if step.spread else made.table)
                found += len(made.outputs_of(spread=step.spread)) if made.is_last else 0
    return found


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
def test_every_row_over_gloo(grid: Grid) -> None:
    assert world(grid.size).run(check_transitions, LayerCommunicator, grid) == [rows_of(grid)] * grid.size


def test_the_grids_of_the_contract_are_there() -> None:
    assert [(grid.size, grid.attn_dp) for grid in GRIDS] == [
        (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 1), (8, 4), (8, 2)
    ]  # fmt: skip


# ---- planted bugs ------------------------------------------------------------------------------------------------

FEW = [
    Grid(name, BY_NAME[name].size, BY_NAME[name].attn_dp, counts)
    for name, counts in (("tp2", ((5,),)), ("dp2", ((3, 5),)), ("dp2_tp2", ((3, 5),)), ("dp4", ((3, 1, 2, 4),)))
]
MOVES = (
    "reduce_", "gather_replicate", "gather_partial", "add_residual_once", "own_group", "postprocess_sum", "own_rows",
    "gather_own", "scatter_sum",
)  # fmt: skip
SLICES = (
    ("attn_tp", "own_slice"), ("attn_tp", "all_gather"), ("attn_tp", "reduce_scatter"), ("tp", "all_gather"),
    ("tp", "reduce_scatter"), ("tp", "reduce_scatter_variable"), ("tp", "all_gather_variable"),
)  # fmt: skip


def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def rows_of_the_neighbour(x: torch.Tensor) -> torch.Tensor:
    return x.roll(1, 0)


def caught(ops: type[RankOps]) -> bool:
    """Return whether some grid shows it."""
    wrong = type(ops.__name__, (LayerCommunicator,), {"rank_ops": ops})
    for grid in FEW:
        try:
            simulate(grid.size, check_transitions, wrong, grid)
        except WorldError as error:
            assert "AssertionError" in str(error)
            return True
    return False


@pytest.mark.parametrize("bug", [twice, rows_of_the_neighbour], ids=lambda bug: bug.__name__)
@pytest.mark.parametrize("move", MOVES)
def test_a_wrong_move_is_caught(move: str, bug: Any) -> None:
    right = getattr(RankOps, move)
    assert caught(type("Wrong", (RankOps,), {move: lambda self, *given: bug(right(self, *given))}))


def test_no_move_is_left_out() -> None:
    own = {name for name, value in vars(RankOps).items() if callable(value) and not name.startswith("_")}
    assert own == {*MOVES, "gather_group"}  # which moves alone need: tests/comm/test_moves.py


class Wrong:
    """Collectives of which one is wrong."""

    def __init__(self, right: Collectives, name: str, bug: Any) -> None:
        self._right, self._name, self._bug = right, name, bug

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._right, name)
        return (lambda *given: self._bug(found(*given))) if name == self._name else found


@pytest.mark.parametrize(("axis", "name"), SLICES)
def test_slices_of_the_neighbour_are_caught(axis: str, name: str) -> None:
    class Ops(RankOps):
        def __init__(self, parallel: ParallelSpec) -> None:
            super().__init__(parallel)
            setattr(self, axis, Wrong(getattr(self, axis), name, rows_of_the_neighbour))

    assert caught(Ops)


class ResidualOfTheNeighbour(RankOps):
    """Of what is scattered each rank keeps what the next one is to keep."""

    def __init__(self, parallel: ParallelSpec) -> None:
        super().__init__(parallel)
        tp = parallel.attn_tp
        wrong = Wrong(self.attn_tp, "", None)
        wrong.own_slice = lambda x: x.chunk(tp.size)[(tp.rank + 1) % tp.size]
        self.attn_tp = wrong  # type: ignore[assignment]


class CountsIgnored(RankOps):
    """Rows of all groups are gathered as if each had as many as the fullest one."""

    def gather_replicate(self, x: torch.Tensor, step: StepTokens, codes: str | None = None) -> torch.Tensor:
        padded = torch.cat([x, x.new_zeros(max(step.rows) - len(x), x.shape[1])])
        return self.tp.all_gather(padded)[: step.full_rows]


@pytest.mark.parametrize(("ops", "grid"), [(ResidualOfTheNeighbour, FEW[0]), (CountsIgnored, FEW[1])])
def test_rows_of_others_are_caught(ops: type[RankOps], grid: Grid) -> None:
    with pytest.raises(WorldError, match="AssertionError"):
        simulate(grid.size, check_transitions, type(ops.__name__, (LayerCommunicator,), {"rank_ops": ops}), grid)


def test_the_real_ones_pass() -> None:
    for grid in FEW:
        simulate(grid.size, check_transitions, LayerCommunicator, grid)
