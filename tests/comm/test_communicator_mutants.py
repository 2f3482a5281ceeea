"""Planted bugs in the communicator go through the same check as the real one, and each is caught."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fastlayers.comm.communicator import LayerCommunicator, RankOps
from fastlayers.comm.layouts import Hidden
from fastlayers.comm.padding import StepTokens
from fastlayers.testing.comm_check import COMM_CASES, check_communicator
from fastlayers.testing.world import WorldError, simulate

Tensor = torch.Tensor
CASES = {case.name: case for case in COMM_CASES}


def check_transition(communicator: type[LayerCommunicator], name: str) -> None:
    """Raise WorldError unless all ranks of the case compute what one process computes."""
    simulate(CASES[name].size, check_communicator, communicator, CASES[name])


class SkippedReduce(RankOps):
    def reduce_(self, x: Tensor, axis: str | None) -> Tensor:
        return x


class DoubleReduce(RankOps):
    def reduce_(self, x: Tensor, axis: str | None) -> Tensor:
        return super().reduce_(super().reduce_(x, axis), axis)


class SkippedSum(RankOps):
    def postprocess_sum(self, x: Tensor, step: StepTokens) -> Tensor:
        return self.own_group(x, step)


class DoubleSum(RankOps):
    def postprocess_sum(self, x: Tensor, step: StepTokens) -> Tensor:
        return super().postprocess_sum(self.tp.all_reduce_(x), step)


class DividedSum(RankOps):
    def postprocess_sum(self, x: Tensor, step: StepTokens) -> Tensor:
        return super().postprocess_sum(x, step) / self.attn_dp.size


class WrongSlice(RankOps):
    def own_group(self, x: Tensor, step: StepTokens) -> Tensor:
        rows = step.rows[self.attn_dp.rank]
        return x[step.full_rows - rows :] if self.attn_dp.rank == 0 else x[:rows]


class ResidualOnEveryRank(RankOps):
    def add_residual_once(self, x: Tensor, residual: Tensor) -> Tensor:
        return x + residual


class NobodyAddsResidual(RankOps):
    def add_residual_once(self, x: Tensor, residual: Tensor) -> Tensor:
        return x


class EveryRankFills(RankOps):
    def gather_replicate(self, x: Tensor, step: StepTokens, codes: str | None = None) -> Tensor:
        return self.tp.gather_by_sum(x, x, step.full_rows, step.offsets[self.attn_dp.rank])


class OffsetsOfRealTokens(RankOps):
    def gather_partial(self, x: Tensor, step: StepTokens) -> Tensor:
        start = sum(step.real[: self.attn_dp.rank])
        return self.tp.gather_by_sum(x, x, step.full_rows, start)


class IdleRankStaysOut(RankOps):
    def gather_replicate(self, x: Tensor, step: StepTokens, codes: str | None = None) -> Tensor:
        if x.shape[0] == 0:
            return x.new_zeros(step.full_rows, x.shape[1])
        return super().gather_replicate(x, step, codes)


class StaleResidual(LayerCommunicator):
    def prepare_mlp(self, hidden: Hidden, step: StepTokens | None = None) -> Hidden:
        return replace(super().prepare_mlp(hidden, step), residual=hidden.residual)


def _with(ops: type[RankOps]) -> type[LayerCommunicator]:
    return type(ops.__name__, (LayerCommunicator,), {"rank_ops": ops})


MUTANTS = [
    (_with(SkippedReduce), "tp2"),
    (_with(DoubleReduce), "tp2"),
    (_with(SkippedSum), "dp2_max_len"),
    (_with(SkippedSum), "dp2_tp2_sum_len"),
    (_with(DoubleSum), "dp2_max_len"),
    (_with(DoubleSum), "dp2_tp2_sum_len"),
    (_with(DividedSum), "dp2_sum_len"),
    (_with(WrongSlice), "dp2_tp2_max_len"),
    (_with(WrongSlice), "dp2_sum_len"),
    (_with(ResidualOnEveryRank), "dp2_tp2_max_len"),
    (_with(ResidualOnEveryRank), "dp2_tp2_sum_len"),
    (_with(NobodyAddsResidual), "dp2_tp2_sum_len"),
    (_with(EveryRankFills), "dp2_tp2_whole_sum_len"),
    (_with(OffsetsOfRealTokens), "dp2_tp2_max_len"),
    (_with(IdleRankStaysOut), "dp2_idle_sum_len"),
    (StaleResidual, "single"),
    (StaleResidual, "dp2_tp2_sum_len"),
]


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_real_one_passes_on_threads(name: str) -> None:
    assert simulate(CASES[name].size, check_communicator, LayerCommunicator, CASES[name]) == [None] * CASES[name].size


@pytest.mark.parametrize(("mutant", "name"), MUTANTS, ids=lambda v: v if isinstance(v, str) else v.__name__)
def test_planted_bug_is_caught(mutant: type[LayerCommunicator], name: str) -> None:
    with pytest.raises(WorldError, match=r"AssertionError|different calls|BrokenBarrier"):
        check_transition(mutant, name)
