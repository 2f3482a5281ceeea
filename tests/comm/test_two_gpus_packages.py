"""Sums between ranks by packages on two real GPUs: sgl_kernel's and FlashInfer's beside NCCL's, captured and eager."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch

from fastlayers.comm.all_reduce.layer import AllReduce
from fastlayers.comm.collectives import collectives
from fastlayers.comm.fabric import Workspace
from fastlayers.comm.sum_norm.layer import SumNorm
from fastlayers.device import package
from fastlayers.errors import ArgumentError
from fastlayers.norm.rms_norm.layer import RMSNorm
from fastlayers.testing.world import Rank, world


def lacks(name: str) -> Any:
    why = package(name, load=False).reason
    return pytest.mark.skipif(why is not None, reason=str(why))


pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
BF16, SLOTS = torch.bfloat16, 1000


def draw(rank: Rank, count: int, hidden: int, seed: int, own: bool = True) -> torch.Tensor:
    generator = torch.Generator(rank.device).manual_seed(1000 * seed + (1 + rank.rank) * own)
    return torch.randn(count, hidden, generator=generator, device=rank.device).to(BF16)


def workspace(rank: Rank, hidden: int) -> Workspace:
    made = Workspace.make(rank.spec().tp, hidden, BF16, rank.device, rows=SLOTS, deadline_s=10.0)
    assert made.push is not None, made.fabric.refusal
    return made


def replayed(rank: Rank, calls: list[Any], wanted: list[Any], replays: int) -> int:
    """Count wrong results of calls that are captured, replayed and made eagerly in any order, ranks held up."""
    graphs, stream = [], torch.cuda.Stream()
    torch.cuda.synchronize()  # calls follow one another on one stream
    for call in calls:
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            found = call()
        graphs.append((graph, found))
    order, own = random.Random(3), random.Random(10 + rank.rank)
    wrong = torch.zeros((), dtype=torch.int64, device=rank.device)
    with torch.cuda.stream(stream):
        for _ in range(replays):
            which = order.randrange(len(calls))
            graph, found = graphs[which]
            if own.random() < 0.5:
                torch.cuda._sleep(own.randrange(400_000))
            if order.random() < 0.7:
                graph.replay()
            else:
                found = calls[which]()
            wrong += torch.stack([(a != b).any() for a, b in zip(found, wanted[which], strict=True)]).any()
    torch.cuda.synchronize()
    return int(wrong)


@torch.inference_mode()
def sums(rank: Rank) -> list[str]:
    axis, over, hidden, wrong = rank.spec().tp, collectives(rank.spec().tp), 4096, []
    made = workspace(rank, hidden)
    layers = [
        AllReduce(axis, hidden, workspace=made, device=rank.device, dtype=BF16, backend="sgl_kernel") for _ in "ab"
    ]
    for turn, count in enumerate((1, 7, 64, 256, 1000, 1024, 0)):
        x = draw(rank, count, hidden, turn)
        if not torch.equal(layers[turn % 2](x), over.all_reduce_(x.clone())):  # two terms have one sum
            wrong.append(f"{count} rows")
    if rank.rank == 0:  # before anything is launched
        with pytest.raises(ArgumentError, match="at most 1024, which are 8 MB"):
            layers[0](draw(rank, 1025, hidden, 0))
    inputs = [draw(rank, count, hidden, 50 + count) for count in (1, 64, 8)]
    wanted = [(over.all_reduce_(x.clone()),) for x in inputs]
    count = replayed(rank, [lambda x=x: (layers[0](x),) for x in inputs], wanted, 2000)
    return wrong + ([f"{count} of 2000 replays"] if count else [])


@lacks("sgl_kernel")
def test_sgl_kernel_sums_as_nccl_does() -> None:
    assert world(2, "nccl").run(sums) == [[], []]


@torch.inference_mode()
def norms(rank: Rank, hidden: int, rounding: str) -> list[str]:
    axis, over, wrong, made = rank.spec().tp, collectives(rank.spec().tp), [], workspace(rank, hidden)
    options: dict[str, Any] = {"rounding": rounding, "device": rank.device, "dtype": BF16}
    layer = SumNorm(axis, hidden, 1e-5, workspace=made, backend="flashinfer", **options)
    norm = RMSNorm(hidden, 1e-5, backend="triton", **options)  # ours: packages' own norms do not round the sum
    norm.weight.copy_(1 + 0.1 * draw(rank, 1, hidden, 99, own=False)[0])
    weight = norm.weight
    for count in (1, 2, 7, 64, 255, 1000):
        x = draw(rank, count, hidden, count)
        for residual in (draw(rank, count, hidden, 7, own=False), None):
            y, h = layer(x, residual, weight)
            total = over.all_reduce_(x.clone())
            wanted_y, wanted_h = norm(total, residual) if residual is not None else (norm(total), total)
            first = y.clone()
            torch.distributed.broadcast(first, 0)
            # The norm is rounded once, from sums in another order: a last place apart at most.
            near = ((y.float() - wanted_y.float()).abs() <= 2**-7 * wanted_y.float().abs() + 1e-6).all()
            if not (torch.equal(h, wanted_h) and bool(near) and torch.equal(first, y)):
                wrong.append(f"{count} rows of {hidden}, {rounding}, {'no ' * (residual is None)}residual")
    pairs = [(draw(rank, n, hidden, 50 + n), draw(rank, n, hidden, 60, own=False)) for n in (1, 64, 8)]
    calls = [lambda x=x, r=r: layer(x, r, weight) for x, r in pairs]
    count = replayed(rank, calls, [call() for call in calls], 2000)
    return wrong + ([f"{count} of 2000 replays"] if count else [])


@lacks("flashinfer")
@pytest.mark.parametrize(
    ("hidden", "rounding"), [(7168, "scale_then_cast"), (2880, "scale_then_cast"), (2048, "one_plus")]
)
def test_flashinfer_sums_and_norms_as_nccl_and_our_norm_do(hidden: int, rounding: str) -> None:
    assert world(2, "nccl").run(norms, hidden, rounding, timeout=300.0) == [[], []]  # the first builds it


@torch.inference_mode()
def made_again(rank: Rank, backend: str, times: int) -> int:
    """Return the bytes of this GPU that workspaces of a package left behind when they were made and let go so often."""
    free = 0
    for turn in range(times):
        made, x = workspace(rank, 2048), draw(rank, 4, 2048, turn)
        options: dict[str, Any] = {"workspace": made, "device": rank.device, "dtype": BF16, "backend": backend}
        if backend == "sgl_kernel":
            layer: Any = AllReduce(rank.spec().tp, 2048, **options)
            layer(x)
        else:
            layer = SumNorm(rank.spec().tp, 2048, rounding="one_plus", **options)
            layer(x, None, x[0])
        torch.cuda.synchronize()
        torch.distributed.barrier()  # nobody lets go of what another one still stores to
        del made, layer, options
        gc.collect()
        torch.cuda.empty_cache()
        if turn == 4:  # what is kept for good is there
            free = torch.cuda.mem_get_info()[0]
    return free - torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("backend", [pytest.param(name, marks=lacks(name)) for name in ("sgl_kernel", "flashinfer")])
def test_workspaces_of_packages_leave_no_memory_behind(backend: str) -> None:
    for left in world(2, "nccl").run(made_again, backend, 25, timeout=300.0):
        assert left < 16 << 20
