"""Sums and moves of rows over symmetric memory on real GPUs: equal to NCCL's, bit by bit, and equal on all ranks."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fastlayers.comm import fabric
from fastlayers.comm.all_reduce.layer import AllReduce
from fastlayers.comm.collectives import collectives
from fastlayers.comm.communicator import LayerCommunicator
from fastlayers.comm.expert_exchange.collective import CollectiveExpertExchange
from fastlayers.comm.expert_exchange.layer import ExpertExchangeConfig
from fastlayers.comm.fabric import Workspace
from fastlayers.comm.parallel import ParallelSpec
from fastlayers.comm.seam import Seam
from fastlayers.comm.symmetric import SymmArena
from fastlayers.comm.triton_tokens import TokenExchange
from fastlayers.norm.rms_norm.layer import RMSNorm
from fastlayers.quant.group_quant.layer import quantize_groups
from fastlayers.testing.comm_check import COMM_CASES, SPREAD_CASES, check_communicator
from fastlayers.testing.comm_check import HIDDEN as HIDDEN_OF_CASES
from fastlayers.testing.world import Rank, world

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
HIDDEN, EPS = 2048, 1e-6


def rows(rank: Rank, count: int, seed: int, own: bool = True) -> torch.Tensor:
    generator = torch.Generator(rank.device).manual_seed(1000 * seed + (1 + rank.rank) * own)
    return torch.randn(count, HIDDEN, generator=generator, device=rank.device).to(torch.bfloat16)


def norm_of(rank: Rank) -> RMSNorm:
    norm = RMSNorm(HIDDEN, EPS, device=rank.device, dtype=torch.bfloat16)
    norm.weight.copy_(1 + 0.1 * rows(rank, 1, 99, own=False)[0])
    return norm


@torch.inference_mode()
def compare(rank: Rank) -> list[str]:
    axis, over, norm = rank.spec().tp, collectives(rank.spec().tp), norm_of(rank)
    made = Workspace.make(axis, HIDDEN, torch.bfloat16, rank.device, rows=1000, share=8192, deadline_s=10.0)
    assert made.push is not None and made.exchange is not None and made.arena is not None, made.fabric.refusal
    wrong = []
    by_torch = AllReduce(axis, HIDDEN, device=rank.device, dtype=torch.bfloat16, backend="torch_symm_mem")
    for count in (1, 64, 1300):  # two terms have one sum, whoever adds them
        x = rows(rank, count, count)
        if not torch.equal(by_torch(x), over.all_reduce_(x.clone())):
            wrong.append(f"torch's sum of {count} rows")
    for count in (*range(1, 65), 96, 128, 129, 255, 256, 1000):
        x, residual = rows(rank, count, count), rows(rank, count, 7, own=False)
        y, h = made.push(x, residual, norm.weight, EPS)
        wanted_y, wanted_h = norm(over.all_reduce_(x.clone()), residual)
        first = y.clone()
        torch.distributed.broadcast(first, 0)
        if not (torch.equal(y, wanted_y) and torch.equal(h, wanted_h) and torch.equal(first, y)):
            wrong.append(f"sum_norm of {count} rows")
        coded = made.push(x, residual, norm.weight, EPS, codes="col_tma4")[0]
        codes, scales = quantize_groups(wanted_y, scale_layout="col_tma4")
        if not (
            torch.equal(coded.codes.view(torch.uint8), codes.view(torch.uint8)) and torch.equal(coded.scales, scales)
        ):
            wrong.append(f"sum_norm of {count} rows as codes")
    for count in (2, 258, 1400, 2048, 16384):
        x = rows(rank, count, count)
        own = made.exchange.scatter(x)[1]
        if not torch.equal(own, over.reduce_scatter(x)):
            wrong.append(f"scatter of {count} rows")
        if not torch.equal(made.exchange.gather(own)[0], over.all_gather(own)):
            wrong.append(f"gather of {count} rows")
        residual = rows(rank, count, 7, own=False)
        mine = slice(rank.rank * count // 2, (rank.rank + 1) * count // 2)
        y, h = made.exchange.scatter_gather(x, residual[mine], norm.weight, EPS)
        wanted_y, wanted_h = norm(over.all_reduce_(x.clone()), residual)
        if not (torch.equal(y, wanted_y) and torch.equal(h, wanted_h[mine])):
            wrong.append(f"spread sum_norm of {count} rows")
        for layout in ("col", "col_tma4"):
            coded = made.exchange.scatter_gather(x, residual[mine], norm.weight, EPS, codes=layout)[0]
            codes, scales = quantize_groups(wanted_y, scale_layout=layout)
            if not (
                torch.equal(coded.codes.view(torch.uint8), codes.view(torch.uint8))
                and torch.equal(coded.scales, scales)
            ):
                wrong.append(f"spread sum_norm of {count} rows as codes, {layout}")
    return wrong + ([f"rank {made.arena.failed()} was late"] if made.arena.failed() is not None else [])


def test_equal_to_nccl() -> None:
    assert world(2, "nccl").run(compare) == [[], []]


EXPERTS, TOP_K = 16, 4
ROUTES = ("any", "the first rank's", "the second rank's", "nobody's", "some of nobody's")


@torch.inference_mode()
def send(rank: Rank) -> list[str]:
    """Return where tokens that went to their experts over symmetric memory have other bits than rows of everybody."""
    axis, local = rank.spec(ep=2).ep, EXPERTS // 2
    nbytes = TokenExchange.nbytes_for(2, HIDDEN, TOP_K, torch.bfloat16, 64)
    arena = SymmArena(axis, nbytes, rank.device, 10.0)
    move = TokenExchange(arena, HIDDEN, EXPERTS, TOP_K, torch.bfloat16, 64)
    arena.ready()
    config = ExpertExchangeConfig(axis, HIDDEN, torch.bfloat16, num_experts=EXPERTS, top_k=TOP_K)
    theirs, wrong = CollectiveExpertExchange(config), []
    for count in (0, 1, 5, 64):
        for seed, route in enumerate(ROUTES):
            x = rows(rank, count, 100 * count + seed)
            scores = rows(rank, count, 7 + seed)[:, :EXPERTS].float()
            if "rank's" in route:
                scores[:, local:] += 100.0 if "second" in route else -100.0
            ids = scores.topk(TOP_K, -1).indices.int()
            if "nobody" in route:  # padding: all of it, or but for the first row of the first rank
                ids[int(route != "nobody's" and rank.rank == 0) :] = -1
            weights = rows(rank, count, 9 + seed)[:, :TOP_K].float().abs()
            found = []
            for way in (move, theirs):
                came, mine, gates = way.dispatch(x, ids, weights)
                scale = torch.where(mine >= 0, gates * (1 + mine + local * rank.rank), 0.0).sum(-1, keepdim=True)
                made = torch.where((mine >= 0).any(-1, keepdim=True), came * scale, 0.0).to(torch.bfloat16)
                found.append((mine.clone(), way.combine(made, mine, ids)))
            if not all(torch.equal(one, other) for one, other in zip(*found, strict=True)):
                wrong.append(f"{count} tokens, experts of {route}")
    return wrong + ([f"rank {arena.failed()} was late"] if arena.failed() is not None else [])


def test_tokens_to_experts_have_the_bits_of_rows_to_everybody() -> None:
    assert world(2, "nccl").run(send) == [[], []]


@torch.inference_mode()
def lanes(rank: Rank, rounds: int) -> tuple[int, list[int | None]]:
    """Count wrong sums of forty captured sizes in two workspaces on two streams, some eager, beside copies to peers."""
    axis, over, norm = rank.spec().tp, collectives(rank.spec().tp), norm_of(rank)
    made = [Workspace.make(axis, HIDDEN, torch.bfloat16, rank.device, rows=64, deadline_s=10.0) for _ in range(2)]
    streams, traffic = [torch.cuda.Stream() for _ in made], torch.cuda.Stream()
    graphs: list[list[Any]] = [[], []]
    for count in range(1, 41):
        lane = count % 2
        push = made[lane].push
        assert push is not None, made[lane].fabric.refusal
        x, residual = rows(rank, count, count), rows(rank, count, 3, own=False)
        wanted = norm(over.all_reduce_(x.clone()), residual)
        with torch.cuda.stream(streams[lane]):
            push(x, residual, norm.weight, EPS)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=streams[lane], capture_error_mode="thread_local"):
            found = push(x, residual, norm.weight, EPS)
        graphs[lane].append((graph, found, wanted, partial(push, x, residual, norm.weight, EPS)))
    here = torch.zeros(8 << 20, dtype=torch.uint8, device=rank.device)
    there = torch.zeros(8 << 20, dtype=torch.uint8, device=torch.device("cuda", 1 - rank.rank))
    torch.cuda.synchronize()
    torch.distributed.barrier()
    order, wrong = random.Random(5), torch.zeros(2, dtype=torch.int64, device=rank.device)
    for _ in range(rounds):
        with torch.cuda.stream(traffic):
            there.copy_(here, non_blocking=True)
        for lane, stream in enumerate(streams):
            graph, found, wanted, eager = order.choice(graphs[lane])
            captured = order.random() < 0.7
            with torch.cuda.stream(stream):
                if captured:
                    graph.replay()
                y, h = found if captured else eager()
                wrong[lane] += (y != wanted[0]).any() | (h != wanted[1]).any()
    torch.cuda.synchronize()
    return int(wrong.sum()), [each.arena.failed() for each in made if each.arena is not None]


def test_two_workspaces_at_once_captured_and_eager_beside_traffic() -> None:
    assert world(2, "nccl").run(lanes, 3000) == [(0, [None, None])] * 2


@torch.inference_mode()
def made_again(rank: Rank, times: int) -> int:
    """Return the bytes of this GPU that workspaces left behind when they were made and let go so often."""
    axis, free = rank.spec().tp, 0
    gc.freeze()  # what is there already is looked through a thousand times otherwise
    for turn in range(times):
        made = Workspace.make(axis, HIDDEN, torch.bfloat16, rank.device, rows=256, share=1024)
        assert made.push is not None, made.fabric.refusal
        made.push(rows(rank, 4, turn), None, None, EPS)
        torch.cuda.synchronize()
        torch.distributed.barrier()  # nobody lets go of what another one still stores to
        del made
        gc.collect()
        torch.cuda.empty_cache()
        if turn == 4:  # what is kept for good is there
            free = torch.cuda.mem_get_info()[0]
    gc.unfreeze()
    return free - torch.cuda.mem_get_info()[0]


def test_workspaces_leave_no_memory_behind() -> None:
    for left in world(2, "nccl").run(made_again, 1000):
        assert left < 64 << 20


class WithSeam(LayerCommunicator):
    """Every layer with a seam over ``tp``, all of them with one workspace."""

    seams: ClassVar[dict[int, Seam | None]] = {}

    def __init__(self, parallel: ParallelSpec, **options: Any) -> None:
        device = torch.device("cuda", parallel.tp.rank)
        if not self.seams:
            self.seams[0] = Seam.make(parallel, HIDDEN_OF_CASES, torch.float32, device)
        super().__init__(parallel, seam=self.seams[0], **options)
        assert self.seams[0] is not None and self.seams[0].spread_rows == range(1025, 8193)


@torch.inference_mode()
def communicate(rank: Rank, name: str) -> None:
    case = next(case for case in (*COMM_CASES, *SPREAD_CASES) if case.name == name)
    check_communicator(rank, WithSeam, case)


@pytest.mark.parametrize("name", ["tp2", "tp2_spread", "tp2_ep2_spread", "tp2_scattered_spread"])
def test_layers_with_a_seam(name: str) -> None:
    world(2, "nccl").run(communicate, name)


@torch.inference_mode()
def replay(rank: Rank, replays: int) -> int:
    axis, over, norm = rank.spec().tp, collectives(rank.spec().tp), norm_of(rank)
    made = Workspace.make(axis, HIDDEN, torch.bfloat16, rank.device, rows=64, deadline_s=10.0)
    push, graphs = made.push, []
    assert push is not None, made.fabric.refusal
    for count in (1, 64, 8):
        x, residual = rows(rank, count, count), rows(rank, count, 3, own=False)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            push(x, residual, norm.weight, EPS)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y, h = push(*push(x, residual, norm.weight, EPS), norm.weight, EPS)
        middle = norm(over.all_reduce_(x.clone()), residual)
        # Inputs stay where the graph reads them.
        graphs.append((graph, y, h, *norm(over.all_reduce_(middle[0].clone()), middle[1]), x, residual))
    order, own = random.Random(3), random.Random(10 + rank.rank)
    wrong = torch.zeros((), dtype=torch.int64, device=rank.device)
    for _ in range(replays):
        graph, y, h, wanted_y, wanted_h, *_ = graphs[order.randrange(3)]
        if own.random() < 0.5:
            torch.cuda._sleep(own.randrange(400_000))
        graph.replay()
        wrong += (y != wanted_y).any() | (h != wanted_h).any()
    return int(wrong)


def test_replays_in_any_order_with_ranks_held_up() -> None:
    assert world(2, "nccl").run(replay, 5000) == [0, 0]


@torch.inference_mode()
def killed(rank: Rank, folder: str, at: str) -> None:
    """Note what the first rank sees of sums in replays when the other is killed: between two of them, or in one."""
    axis, norm = rank.spec().tp, norm_of(rank)
    made = Workspace.make(axis, HIDDEN, torch.bfloat16, rank.device, rows=8, share=64, deadline_s=1.0)
    push, exchange, arena = made.push, made.exchange, made.arena
    assert push is not None and exchange is not None and arena is not None, made.fabric.refusal
    x, residual = rows(rank, 8, 1), rows(rank, 8, 3, own=False)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        exchange.scatter_gather(push(x, residual, norm.weight, EPS)[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = exchange.scatter_gather(push(x, residual, norm.weight, EPS)[0])[0]
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    good = not bool(y.isnan().any())
    if rank.rank == 1:
        if at == "replay":
            torch.cuda._sleep(10**9)
            graph.replay()  # behind the rest: it ends with this process
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    for _ in range(50):  # stores go to memory whose owner is gone
        graph.replay()
    late, seconds = arena.failed(), time.monotonic() - begin
    # The other rank's rows are those that came last; its own are sums with what did not come.
    told = {"good": good, "late": late, "poisoned": bool(y[:4].isnan().all()), "seconds": seconds}
    Path(folder, "seen").write_text(json.dumps(told))
    os.kill(os.getpid(), signal.SIGKILL)  # NCCL would wait for the other one


@pytest.mark.parametrize("at", ["between", "replay"])
def test_a_killed_rank_is_named_and_nothing_faults(at: str, tmp_path: Path) -> None:
    world(2, "nccl").run(killed, str(tmp_path), at, dying=[0, 1])
    seen = json.loads((tmp_path / "seen").read_text())
    assert seen["good"] and seen["late"] == 1 and seen["poisoned"]
    assert seen["seconds"] < 10.0  # one deadline, not one for each of a hundred launches


class Short(SymmArena):
    """An arena for which the second rank has no memory."""

    def _allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        return super()._allocate(nbytes if device.index == 0 else 1 << 42, device)


def no_memory(rank: Rank) -> list[str | None]:
    axis, found = rank.spec().tp, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fabric, "SymmArena", Short)
        found.append(Workspace.make(axis, HIDDEN, torch.bfloat16, rank.device).fabric.refusal)
    found.append(Workspace.make(axis, HIDDEN, torch.bfloat16, rank.device).fabric.refusal)
    return found


def test_a_rank_without_memory_has_all_refuse() -> None:
    for refusal, after in world(2, "nccl").run(no_memory):
        assert refusal is not None and refusal.startswith("rank 1 could not get") and after is None
