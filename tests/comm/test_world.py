"""Everything that needs real processes: collectives and the communicator over Gloo, and the harness itself.

On a machine with GPUs the same runs over NCCL (``-m multigpu``; started by plain pytest, one process per GPU).
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlayers.comm.collectives import collectives, gather_logits, reduce_embedding
from fastlayers.comm.communicator import LayerCommunicator
from fastlayers.errors import ArgumentError
from fastlayers.testing.comm_check import COMM_CASES, CommCase, check_communicator
from fastlayers.testing.world import Rank, World, WorldError, simulate, world

MANY = [case for case in COMM_CASES if case.size > 1]


def run(kind: str, size: int, function: Any, *args: Any) -> list[Any]:
    """Run on threads, on Gloo processes or on NCCL processes."""
    if kind == "threads":
        return simulate(size, function, *args)
    return world(size, kind).run(function, *args)


def nccl(size: int) -> Any:
    few = torch.cuda.device_count() < size
    return [pytest.mark.multigpu, pytest.mark.skipif(few, reason=f"needs {size} CUDA devices")]


WORLDS = [
    *[pytest.param(kind, size, id=f"{kind}{size}") for kind in ("threads", "gloo") for size in (2, 4)],
    *[pytest.param("nccl", size, id=f"nccl{size}", marks=nccl(size)) for size in (2, 4)],
]


@pytest.mark.parametrize("case", MANY, ids=lambda case: case.name)
def test_communicator_over_gloo(case: CommCase) -> None:
    assert world(case.size).run(check_communicator, LayerCommunicator, case) == [None] * case.size


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=nccl(case.size)) for case in MANY])
def test_communicator_over_nccl(case: CommCase) -> None:
    assert world(case.size, "nccl").run(check_communicator, LayerCommunicator, case) == [None] * case.size


def sum_and_process(rank: Rank) -> tuple[float, int]:
    """Sum over a group of the job's, and say which process this is."""
    group = collectives(rank.spec(attn_dp=2).attn_dp)
    return float(group.all_reduce_(torch.ones(1))), os.getpid()


def test_a_pool_that_rests_keeps_its_processes_and_no_thread_of_gloos() -> None:
    def threads() -> list[str]:
        names: list[str] = []
        for task in (task for _, process in before for task in Path(f"/proc/{process}/task").glob("*/comm")):
            with suppress(OSError):  # it has ended since it was listed
                names.append(task.read_text())
        return names

    pool = World(2)  # of which no job has kept a group
    try:
        before = pool.run(sum_and_process)
        assert any("gloo" in name for name in threads())
        pool.rest()
        pool.rest()
        deadline = time.monotonic() + 30
        while any("gloo" in name for name in threads()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not any("gloo" in name for name in threads())
        assert pool.run(sum_and_process) == before
        assert [total for total, _ in before] == [2.0, 2.0]
    finally:
        pool.close()


def rows_of(rank: int, rows: int) -> torch.Tensor:
    """Rows of which each value names its rank, row and column."""
    return torch.arange(rows * 3, dtype=torch.float32).view(rows, 3) + 100 * (rank + 1)


def equal_sizes(rank: Rank) -> dict[str, torch.Tensor]:
    ops = collectives(rank.spec().tp)
    x = rows_of(rank.rank, rank.size).to(rank.device)
    strided = torch.stack([x, x], -1)[..., 0]
    results = {
        "reduce_scatter": ops.reduce_scatter(strided),
        "all_gather": ops.all_gather(strided),
        "last": gather_logits(x, ops),
        "own": ops.own_slice(x).clone(),
        "untouched": x.clone(),
        "all_reduce": ops.all_reduce_(x),
        "embedding": reduce_embedding(rows_of(rank.rank, 2).to(rank.device), ops),
        "none": ops.all_reduce_(x.new_empty(0, 3)),
    }
    return {name: value.cpu() for name, value in results.items()}


@pytest.mark.parametrize(("kind", "size"), WORLDS)
def test_collectives_of_equal_sizes(kind: str, size: int) -> None:
    inputs = [rows_of(rank, size) for rank in range(size)]
    total = torch.stack(inputs).sum(0)
    for rank, given in enumerate(run(kind, size, equal_sizes)):
        wanted = {
            "reduce_scatter": total[rank : rank + 1],
            "all_gather": torch.cat(inputs),
            "last": torch.cat(inputs, dim=1),
            "own": inputs[rank][rank : rank + 1],
            "untouched": inputs[rank],
            "all_reduce": total,
            "embedding": torch.stack([rows_of(r, 2) for r in range(size)]).sum(0),
            "none": torch.empty(0, 3),
        }
        for name, value in wanted.items():  # sums of small integers: exact in every order
            torch.testing.assert_close(given[name], value, rtol=0, atol=0, msg=name)


def ragged(rank: Rank, sizes: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ops = collectives(rank.spec().tp)
    own, everything = rows_of(rank.rank, sizes[rank.rank]), rows_of(rank.rank, sum(sizes))
    gathered = ops.all_gather_variable(own.to(rank.device), sizes)
    scattered = ops.reduce_scatter_variable(everything.to(rank.device), sizes)
    mine = own.to(rank.device) if sizes[rank.rank] else None
    start = sum(sizes[: rank.rank])
    by_sum = ops.gather_by_sum(mine, own.to(rank.device), sum(sizes), start)
    return gathered.cpu(), scattered.cpu(), by_sum.cpu()


@pytest.mark.parametrize(("kind", "size"), WORLDS)
def test_collectives_of_unequal_sizes(kind: str, size: int) -> None:
    for four in ((3, 0, 1, 5), (0, 2, 0, 0), (2, 2, 2, 2), (0, 0, 0, 0)):
        sizes = four[:size]
        whole = torch.cat([rows_of(rank, sizes[rank]) for rank in range(size)])
        total = torch.stack([rows_of(rank, sum(sizes)) for rank in range(size)]).sum(0)
        for rank, (gathered, scattered, by_sum) in enumerate(run(kind, size, ragged, sizes)):
            start = sum(sizes[:rank])
            assert torch.equal(gathered, whole), sizes
            assert torch.equal(by_sum, whole), sizes
            assert torch.equal(scattered, total[start : start + sizes[rank]]), sizes


def wrong_arguments(rank: Rank) -> list[str]:
    ops, messages = collectives(rank.spec().tp), []
    calls: list[Any] = [
        lambda: ops.reduce_scatter(torch.ones(3, 2)),
        lambda: ops.all_gather_variable(torch.ones(2, 2), (1, 1)),
        lambda: ops.reduce_scatter_variable(torch.ones(3, 2), (1, 1)),
        lambda: ops.all_gather_variable(torch.ones(1, 2), (1, 1, 1)),
    ]
    for call in calls:
        try:
            call()
        except ArgumentError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_rows_that_do_not_fit_raise_on_every_rank_before_any_call(kind: str) -> None:
    for messages in run(kind, 2, wrong_arguments):
        assert len(messages) == 4
        assert messages[0] == "reduce_scatter: rows is 3; accepted: a multiple of 2 ranks"
        assert "2 rows with sizes (1, 1)" in messages[1]


def toy_partial_sums(rank: Rank, attn_dp: int, extend: bool) -> list[float]:
    """An MLP of which each rank's output is one: what comes out counts how often it was summed."""
    from fastlayers.comm.layouts import Hidden
    from fastlayers.comm.padding import StepTokens

    spec = rank.spec(attn_dp=attn_dp)
    step = StepTokens.plan([2, 1, 3, 1][:attn_dp], attn_tp=spec.attn_tp.size, extend=extend)

    def norm(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, torch.zeros_like(residual)

    comm = LayerCommunicator(spec, input_layernorm=norm, post_attention_layernorm=norm, is_last=True)
    zeros = torch.zeros(step.rows[spec.attn_dp.rank], 2)
    given = {to: key for key, to in comm.table.items()}
    full = next(to for to in given if to.place == "full")
    out = comm.postprocess(
        Hidden(torch.ones(step.full_rows, 2), zeros, full).partial(torch.ones(step.full_rows, 2), "tp"), step
    )
    return comm.finish(out, None, step).flatten().tolist()


@pytest.mark.parametrize("extend", [False, True])
@pytest.mark.parametrize("attn_dp", [1, 2, 4])
def test_partial_sums_are_summed_exactly_once(attn_dp: int, extend: bool) -> None:
    for counts in run("gloo", 4, toy_partial_sums, attn_dp, extend):
        assert counts and set(counts) == {4.0}


def both_orders(rank: Rank, extend: bool) -> list[torch.Tensor]:
    """prepare_mlp of partial sums (gather first), and of the same values summed before (norm first)."""
    from fastlayers.comm.layouts import Hidden, Layout
    from fastlayers.comm.padding import StepTokens
    from fastlayers.norm.rms_norm.layer import RMSNorm

    spec = rank.spec(attn_dp=2)
    step = StepTokens.plan([1, 4], attn_tp=2, extend=extend)
    norm = RMSNorm(8, backend="torch")
    comm = LayerCommunicator(spec, input_layernorm=norm, post_attention_layernorm=norm)
    rows = step.rows[spec.attn_dp.rank]
    draws = torch.Generator().manual_seed(spec.attn_dp.rank)
    parts, residual = torch.randn(2, rows, 8, generator=draws), torch.randn(rows, 8, generator=draws)
    hidden = Hidden(parts[0], residual, Layout("attn_full", None, "attn_full"))
    results: list[torch.Tensor] = []
    for given in (hidden.partial(parts[spec.attn_tp.rank], "attn_tp"), hidden.complete(parts.sum(0))):
        out = comm.prepare_mlp(given, step)
        assert out.residual is not None
        results += [out.tensor, out.residual]
    return results


@pytest.mark.parametrize("extend", [False, True])
def test_norm_before_gather_equals_gather_before_norm(extend: bool) -> None:
    results = run("gloo", 4, both_orders, extend)
    for tensor, residual, other_tensor, other_residual in results:
        assert tensor.shape[0] == (6 if extend else 8)
        torch.testing.assert_close(tensor, other_tensor, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(residual, other_residual, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(results[0][0], other[0]) for other in results), "ranks disagree about the full rows"


def bf16_sum(rank: Rank) -> torch.Tensor:
    return collectives(rank.spec().tp).all_reduce_(torch.full((2, 2), 1.5, dtype=torch.bfloat16))


def test_bf16_goes_through_gloo() -> None:
    for result in run("gloo", 2, bf16_sum):
        assert result.dtype == torch.bfloat16 and torch.equal(result.float(), torch.full((2, 2), 3.0))


# ---- the harness ---------------------------------------------------------------------------------------------


def one_rank_raises(rank: Rank) -> None:
    if rank.rank == 1:
        raise ValueError("planted")
    collectives(rank.spec().tp).all_reduce_(torch.ones(2))


def one_rank_sleeps(rank: Rank) -> None:
    if rank.rank == 0:
        time.sleep(60)


def whoami(rank: Rank) -> tuple[int, int, int]:
    return rank.rank, rank.size, torch.get_num_threads()


def different_calls(rank: Rank) -> None:
    ops = collectives(rank.spec().tp)
    if rank.rank:
        ops.all_gather(torch.ones(2, 2))
    else:
        ops.all_reduce_(torch.ones(2, 2))


def test_failures_name_the_rank_and_the_next_job_runs() -> None:
    with pytest.raises(WorldError, match=r"rank 1 of 2: (?s:.*)ValueError: planted"):
        world(2).run(one_rank_raises)
    assert world(2).run(whoami) == [(0, 2, 1), (1, 2, 1)]
    with pytest.raises(WorldError, match=r"rank 0 of 2: no answer within 0\.5 s"):
        world(2).run(one_rank_sleeps, timeout=0.5)
    with pytest.raises(WorldError, match="cannot be sent"):
        world(2).run(lambda rank: rank)


def test_threads_notice_ranks_that_differ() -> None:
    with pytest.raises(WorldError, match="rank 1 of 2: ValueError: planted"):
        simulate(2, one_rank_raises)
    with pytest.raises(WorldError, match="different calls"):
        simulate(2, different_calls)
