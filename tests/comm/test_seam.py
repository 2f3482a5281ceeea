"""The communicator with a seam (sum, residual and norm as one operator) goes through the same check as without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastlayers.comm.communicator import LayerCommunicator
from fastlayers.comm.parallel import Axis, ParallelSpec
from fastlayers.comm.seam import Seam
from fastlayers.comm.sum_norm.collective import CollectiveSumNorm
from fastlayers.errors import ArgumentError
from fastlayers.norm.rms_norm.layer import RMSNorm
from fastlayers.testing.comm_check import COMM_CASES, HIDDEN, check_communicator
from fastlayers.testing.transition_check import GRIDS, Grid, check_transitions
from fastlayers.testing.world import Rank, WorldError, simulate, world

CASES = {case.name: case for case in COMM_CASES}
ONE_GROUP = [case for case in COMM_CASES if case.attn_dp == 1 and case.size > 1]


class WithSeam(LayerCommunicator):
    """Every layer with a seam over ``tp``."""

    def __init__(self, parallel: ParallelSpec, **options: Any) -> None:
        seam = Seam(parallel, None, HIDDEN, torch.float32, torch.device("cpu"))
        super().__init__(parallel, seam=seam, **options)
        assert seam.sum_norm(self.input_layernorm) is not None


@pytest.mark.parametrize("case", ONE_GROUP, ids=lambda case: case.name)
def test_transitions_with_a_seam(case: Any) -> None:
    simulate(case.size, check_communicator, WithSeam, case)


@pytest.mark.parametrize("grid", [grid for grid in GRIDS if grid.attn_dp == 1 and grid.size < 8], ids=lambda g: g.name)
def test_every_row_with_a_seam(grid: Grid) -> None:
    simulate(grid.size, check_transitions, WithSeam, grid)


def broken(rank: Rank, bug: Any, name: str) -> None:
    class Broken(WithSeam):
        def __init__(self, parallel: ParallelSpec, **options: Any) -> None:
            super().__init__(parallel, **options)
            for layer in self.ops.seam._norms.values():  # type: ignore[union-attr]
                impl = layer.ladder.single
                assert isinstance(impl, CollectiveSumNorm)
                layer.ladder.single = bug(impl, rank.rank)

    check_communicator(rank, Broken, CASES[name])


def no_sum(impl: Any, rank: int) -> Any:
    def call(x: Any, residual: Any, weight: Any) -> Any:
        impl(x.clone(), residual, weight)
        h = x if residual is None else x + residual
        return RMSNorm(HIDDEN, backend="torch")(h) * weight, h

    return call


def residual_of_each_rank(impl: Any, rank: int) -> Any:
    return lambda x, residual, weight: impl(x if residual is None else x + residual, residual, weight)


def forgets_residual(impl: Any, rank: int) -> Any:
    return lambda x, residual, weight: impl(x, None, weight)


@pytest.mark.parametrize("bug", [no_sum, residual_of_each_rank, forgets_residual])
def test_planted_bugs_in_the_seam_are_caught(bug: Any) -> None:
    with pytest.raises(WorldError, match=r"tp2|Tensor-likes|input"):
        simulate(2, broken, bug, "tp2")


def test_over_gloo() -> None:
    for name in ("tp2", "tp2_ep2", "tp2_no_tokens"):
        world(2).run(check_communicator, WithSeam, CASES[name])


def test_other_norms_stay_by_themselves() -> None:
    parallel = ParallelSpec.grid(2, 0)
    seam = Seam(ParallelSpec(), None, HIDDEN, torch.float32, torch.device("cpu"))
    assert seam.sum_norm(lambda x, residual=None: x) is None
    assert seam.sum_norm(RMSNorm(HIDDEN + 8)) is None and seam.sum_norm(RMSNorm(HIDDEN, dtype=torch.bfloat16)) is None
    assert seam.sum_norm(RMSNorm(HIDDEN)) is seam.sum_norm(RMSNorm(HIDDEN))
    assert Seam.make(ParallelSpec(), HIDDEN, torch.float32, torch.device("cpu")) is None
    assert Seam.make(parallel, HIDDEN, torch.float32, torch.device("cpu")) is None
    assert Seam.make(ParallelSpec.grid(4, 0, attn_dp=2), HIDDEN, torch.float32, torch.device("cpu")) is None
    with pytest.raises(ArgumentError, match="seam"):
        norm = RMSNorm(HIDDEN)
        LayerCommunicator(
            ParallelSpec(), input_layernorm=norm, post_attention_layernorm=norm, seam=Axis(),  # type: ignore[arg-type]
        )  # fmt: skip
