"""The parts of ``two_gpus.py rows``: operators over symmetric memory against NCCL, their results, bits and times."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import fastlayers as fl
from fastlayers.comm.board import Board
from fastlayers.comm.collectives import collectives
from fastlayers.comm.expert_exchange.cases import experts_of
from fastlayers.comm.expert_exchange.collective import CollectiveExpertExchange
from fastlayers.comm.expert_exchange.layer import ExpertExchangeConfig
from fastlayers.comm.fabric import Workspace
from fastlayers.comm.sum_norm.layer import SumNorm
from fastlayers.comm.symmetric import SymmArena
from fastlayers.comm.triton_exchange import Exchange
from fastlayers.comm.triton_tokens import TokenExchange
from fastlayers.quant.group_quant.layer import quantize_groups

HIDDEN = 7168
CHAIN = 20


def captured(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return a graph of the function and what it returned, after two runs on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = function()
    return graph, outputs


def microseconds(run: Any, function: Callable[[], Any], calls: int, repeats: int = 15) -> float:
    """Return the slower rank's median microseconds of one of ``calls`` calls that the function makes, replayed."""
    graph, kept = captured(function)
    times = []
    for _ in range(repeats):
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # the ranks meet in here, not in what is timed
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    del kept
    return round(run.slower(statistics.median(times)), 2)


class Rows:
    """The parts about rows."""

    def __init__(self, run: Any, hidden: int = HIDDEN) -> None:
        self.run, self.axis, self.device, self.hidden = run, run.parallel.tp, run.device, hidden
        self.over = collectives(self.axis)
        self.norm = fl.RMSNorm(hidden, device=self.device, dtype=torch.bfloat16)
        torch.manual_seed(0)
        self.norm.weight.copy_(1 + 0.1 * torch.randn(hidden, device=self.device))
        self.workspace: Any = None

    def start(self) -> None:
        """Make the workspace: for pushes alone, then with inboxes of 16,384 rows."""
        for share in (0, 8192):
            torch.cuda.synchronize()
            dist.barrier()
            begin = time.perf_counter()
            made = Workspace.make(
                self.axis, self.hidden, torch.bfloat16, self.device, rows=1024, share=share, deadline_s=10.0
            )
            torch.cuda.synchronize()
            took = time.perf_counter() - begin
            self.workspace = made
            assert made.push is not None and made.arena is not None, made.fabric.refusal
            x = self.draw(1, 0)
            begin = time.perf_counter()
            made.push(x, None, self.norm.weight, 1e-6)
            torch.cuda.synchronize()
            self.run.say(
                what="workspace", share=share, seconds=round(self.run.slower(took), 3),
                first_call_seconds=round(self.run.slower(time.perf_counter() - begin), 3),
                refusal=made.fabric.refusal, gib=round(made.arena.buffer.numel() / 2**30, 3),
            )  # fmt: skip

    def draw(self, rows: int, seed: int, own: bool = True) -> torch.Tensor:
        """Return rows that differ from rank to rank (``own``), or equal ones."""
        torch.manual_seed(1000 * seed + (self.axis.rank + 1 if own else 0))
        return torch.randn(rows, self.hidden, device=self.device).to(torch.bfloat16)

    def ours(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = self.workspace.push(x, residual, self.norm.weight, 1e-6)
        return found

    def theirs(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.over.all_reduce_(x)
        if residual is None:
            return self.norm(total), total
        found: tuple[torch.Tensor, torch.Tensor] = self.norm(total, residual)
        return found

    def correct(self) -> None:
        """Compare with NCCL and our norm, bit by bit; and the ranks with each other."""
        for rows in (1, 2, 16, 63, 64, 129, 256, 1000, 1024):
            x, residual = self.draw(rows, rows), self.draw(rows, rows + 1, own=False)
            y, h = self.ours(x, residual)
            wanted_y, wanted_h = self.theirs(x.clone(), residual)
            plain = self.workspace.push(x)[1]
            self.run.say(
                what="sum_norm", rows=rows, equal_to_nccl=self.run.all_true(
                    torch.equal(y, wanted_y) and torch.equal(h, wanted_h)),
                sum_equal=self.run.all_true(torch.equal(plain, self.over.all_reduce_(x.clone()))),
                same_on_all_ranks=self.run.same_everywhere(y) and self.run.same_everywhere(h),
                late=self.workspace.arena.failed(),
            )  # fmt: skip

    def exchanged(self) -> None:
        """Compare the exchange of many rows with NCCL's."""
        move = self.workspace.exchange
        for rows in (2, 258, 2048, 16384):
            x, share = self.draw(rows, rows), rows // self.axis.size
            _, own = move.scatter(x)
            wanted = self.over.reduce_scatter(x)
            whole, _ = move.gather(own)
            gathered = self.over.all_gather(own)
            equal = (
                torch.equal(own, wanted),
                torch.equal(whole, gathered),
            )  # views of the outbox hold until the next call
            fp8 = rows // self.axis.size <= move.slots and all(
                torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
                for layout in ("row", "col_tma4")
                for a, b in zip(
                    move.gather_quantised(own, layout=layout)[0], quantize_groups(gathered, scale_layout=layout),
                    strict=True,
                )
            )  # fmt: skip
            residual = self.draw(rows, 7, own=False)
            mine = residual[self.axis.rank * share : (self.axis.rank + 1) * share]
            y, h = move.scatter_gather(x, mine, self.norm.weight, 1e-6)
            wanted_y, wanted_h = self.theirs(x.clone(), residual)
            mine_h = wanted_h[self.axis.rank * share : (self.axis.rank + 1) * share]
            self.run.say(
                what="exchange", rows=rows, scatter=self.run.all_true(equal[0]), gather=self.run.all_true(equal[1]),
                gather_fp8=self.run.all_true(fp8),
                seam=self.run.all_true(torch.equal(y, wanted_y) and torch.equal(h, mine_h)),
                seam_fp8=self.run.all_true(self.seam_as_codes(x, mine, wanted_y)), late=self.workspace.arena.failed(),
            )  # fmt: skip

    def seam_as_codes(self, x: torch.Tensor, residual: torch.Tensor, wanted: torch.Tensor) -> bool:
        """Return whether the seam's codes and scales are those of its rows."""
        equal = True
        for layout in ("row", "col_tma4"):
            way = partial(self.workspace.exchange.scatter_gather, x, residual, self.norm.weight, 1e-6, codes=layout)
            found, both = way()[0], quantize_groups(wanted, scale_layout=layout)
            for a, b in zip((found.codes, found.scales), both, strict=True):
                equal &= torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        return equal

    def replayed(self) -> None:
        """Replay three buckets in random order, a random rank held up, and count results that are not as before."""
        graphs = []
        for rows in (1, 64, 8):
            x, residual = self.draw(rows, rows), self.draw(rows, 3, own=False)

            def chain(x: torch.Tensor = x, residual: torch.Tensor = residual) -> tuple[torch.Tensor, torch.Tensor]:
                y, h = self.ours(x, residual)
                for _ in range(2):
                    y, h = self.ours(y, h)
                return y, h

            wanted = self.theirs(x.clone(), residual)
            for _ in range(2):
                wanted = self.theirs(wanted[0].clone(), wanted[1])
            graphs.append((*captured(chain), wanted, chain))  # which keeps its inputs where the graph reads them
        order, own = random.Random(3), random.Random(10 + self.axis.rank)
        wrong = torch.zeros(1, dtype=torch.int64, device=self.device)
        replays = self.run.options.replays
        for _ in range(replays):
            graph, (y, h), (wanted_y, wanted_h), _ = graphs[order.randrange(3)]
            if own.random() < 0.5:
                torch.cuda._sleep(own.randrange(400_000))  # up to some 200 µs
            graph.replay()
            wrong += (y != wanted_y).any() | (h != wanted_h).any()
            if own.random() < 0.2:
                torch.cuda._sleep(own.randrange(400_000))
        self.run.say(
            what="replays", replays=replays, calls=3 * replays, wrong=int(self.run.slower(float(wrong))),
            late=self.workspace.arena.failed(),
        )  # fmt: skip

    def timed(self) -> None:
        """Time sum_norm and all_reduce against NCCL."""
        full = self.hidden == HIDDEN
        for rows in (1, 16, 64, 256, 1024) if full else (1, 64):
            found = {f"{name}_us": self.time_sums(name, rows) for name in ("nccl_norm", "norm", "nccl_sum", "sum")}
            push = self.workspace.push
            kept = push.warps, push.programs
            found["sum_norm_us"] = self.time_sums("sum_norm", rows)
            found["sum_norm_fp8_us"] = self.time_sums("sum_norm_fp8", rows)
            ways = [(kept[0] // 2, 132), (2 * kept[0], 132)] if rows <= 132 else [(kept[0], 264)]
            for push.warps, push.programs in ways if self.run.options.ways else ():
                name = f"sum_norm_us_{push.warps}_warps_{push.programs}_programs"
                found[name] = self.time_sums("sum_norm", rows)
            push.warps, push.programs = kept
            self.run.say(
                what="sum_norm_time", rows=rows, hidden=self.hidden, **found, late=self.workspace.arena.failed()
            )

    def time_sums(self, name: str, rows: int) -> float:
        """Return microseconds of one call in a chain whose calls depend on each other."""
        x, residual = self.draw(rows, 1), self.draw(rows, 2, own=False)
        steps = {"nccl_norm": self.theirs, "sum_norm": self.ours, "norm": self.normed, "sum_norm_fp8": self.coded}

        def chain() -> Any:
            """Norm and residual of one call go into the next."""
            y, h = x, residual
            for _ in range(CHAIN):
                y, h = steps[name](y, h)
            return y, h

        def sums() -> Any:
            """Zeros stay zeros, however often they are added up."""
            total = torch.zeros_like(x)
            for _ in range(CHAIN):
                total = self.over.all_reduce_(total) if name == "nccl_sum" else self.workspace.push(total)[1]
            return total

        return microseconds(self.run, chain if name in steps else sums, CHAIN)

    def coded(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Leave codes and scales behind the norm; the next call sums what this one has summed."""
        _, h = self.workspace.push(x, residual, self.norm.weight, 1e-6, codes="col_tma4")
        return h, residual

    def normed(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add and norm, with no sum: what a step of one GPU has in this place."""
        found: tuple[torch.Tensor, torch.Tensor] = self.norm(x, residual)
        return found

    def timed_exchange(self) -> None:
        """Time reduce-scatter and all-gather of many rows, and the seam by them."""
        for rows in (16, 64, 256, 1024, 2048, 16384):
            found = self.time_exchange(self.workspace.exchange, rows)
            self.run.say(what="exchange_time", rows=rows, hidden=self.hidden, **found)
        if not self.run.options.ways:
            return
        for programs, chunk in ((264, 4), (264, 2), (264, 1), (396, 2)):
            nbytes = Exchange.nbytes_for(self.axis.size, self.hidden, torch.bfloat16, 8192, programs)
            arena = SymmArena(self.axis, nbytes, self.device, 10.0)
            move = Exchange(arena, self.hidden, torch.bfloat16, 8192, programs)
            move.chunk = chunk
            arena.ready()
            for rows in (16, 64, 256, 1024, 2048, 16384):
                found = self.time_exchange(move, rows, False)
                self.run.say(what="exchange_way", programs=programs, chunk=chunk, rows=rows, **found)

    def time_exchange(self, move: Any, rows: int, theirs: bool = True) -> dict[str, Any]:
        """Return microseconds of each way to exchange so many rows."""
        calls = 4
        x, own = self.draw(rows, 1), self.draw(rows // self.axis.size, 2)
        residual = self.draw(rows // self.axis.size, 4)
        ways: dict[str, Callable[[], Any]] = {
            "nccl_scatter_us": lambda: self.over.reduce_scatter(x),
            "scatter_us": lambda: move.scatter(x),
            "nccl_gather_us": lambda: self.over.all_gather(own),
            "gather_us": lambda: move.gather(own),
            "gather_fp8_us": lambda: move.gather_quantised(own, layout="col_tma4"),
            "gather_fp8_rows_us": lambda: move.gather_quantised(own),
            "norm_gather_fp8_us": lambda: move.gather_quantised(own, residual, self.norm.weight, 1e-6),
            "norm_gather_fp8_columns_us": lambda: move.gather_quantised(
                own, residual, self.norm.weight, 1e-6, layout="col_tma4"
            ),
            "scatter_norm_gather_us": lambda: move.scatter_gather(x, residual, self.norm.weight, 1e-6),
            "scatter_norm_gather_fp8_us": lambda: move.scatter_gather(
                x, residual, self.norm.weight, 1e-6, codes="col_tma4"
            ),
        }
        found: dict[str, Any] = {}
        for name, way in ways.items():
            if theirs or not name.startswith("nccl"):
                found[name] = microseconds(self.run, partial(several, way, calls), calls, 7)
        return found | {"late": move.arena.failed()}

    def tokens(self) -> None:
        """Compare the exchange of tokens with all-gather and reduce-scatter, bit by bit, and time both."""
        experts, top_k, most = 256, 8, 512
        arena = SymmArena(
            self.axis, TokenExchange.nbytes_for(self.axis.size, self.hidden, top_k, torch.bfloat16, most),
            self.device, 10.0,
        )  # fmt: skip
        move = TokenExchange(arena, self.hidden, experts, top_k, torch.bfloat16, most)
        arena.ready()
        config = ExpertExchangeConfig(self.axis, self.hidden, torch.bfloat16, num_experts=experts, top_k=top_k)
        theirs, local = CollectiveExpertExchange(config), experts // self.axis.size
        for count, route in ((0, "any"), (1, "any"), (64, "first"), (64, "none"), (128, "any"), (512, "any")):
            x, scores = self.draw(count, 1), torch.rand(count, experts, device=self.device)
            if route == "first":
                scores[:, local:] = -1.0
            ids = scores.topk(top_k, -1).indices.int() if route != "none" else scores[:, :top_k].int() - 1
            weights = torch.rand(count, top_k, device=self.device)
            found = []
            for way in (move, theirs):
                rows, mine, theirs_weights = way.dispatch(x, ids, weights)
                made = experts_of(self.axis.rank, local, rows, mine, theirs_weights)
                found.append((mine.clone(), way.combine(made, mine, ids)))
            times = {}
            if count >= 128:
                mine = found[0][0]
                ways: dict[str, Callable[[], Any]] = {
                    "dispatch_us": lambda x=x, ids=ids, w=weights: move.dispatch(x, ids, w),  # type: ignore[misc]
                    "nccl_dispatch_us": lambda x=x, ids=ids, w=weights: theirs.dispatch(x, ids, w),  # type: ignore[misc]
                    "combine_us": lambda p=made, m=mine, ids=ids: move.combine(p, m, ids),  # type: ignore[misc]
                    "nccl_combine_us": lambda p=made, m=mine, ids=ids: theirs.combine(p, m, ids),  # type: ignore[misc]
                }  # fmt: skip
                times = {name: microseconds(self.run, partial(several, way, 4), 4, 7) for name, way in ways.items()}
            self.run.say(
                what="tokens", tokens=count, route=route, **times,
                ids_equal=self.run.all_true(torch.equal(found[0][0], found[1][0])),
                sums_equal=self.run.all_true(torch.equal(found[0][1], found[1][1])), late=arena.failed(),
            )  # fmt: skip

    def hosts(self) -> None:
        """Time what groups tell each other before a step: by memory that processes share, and over the device."""
        board = Board.make(self.axis, 60.0)
        assert board is not None
        mine = torch.zeros(1, 4, dtype=torch.int64, device=self.device)
        ways = {"board": lambda: board.exchange(bytes(32)), "nccl": lambda: self.over.all_gather(mine).tolist()}
        found = {}
        for name, way in ways.items():
            times = []
            for _ in range(2000):
                begin = time.perf_counter()
                way()
                times.append((time.perf_counter() - begin) * 1e6)
            times.sort()
            for share, label in ((0.5, "median"), (0.99, "p99")):
                found[f"{name}_{label}_us"] = round(self.run.slower(times[int(share * len(times))]), 1)
        self.run.say(what="host_exchange", ranks=self.axis.size, **found)

    def peer(self) -> None:
        """Time FlashInfer's sum, residual and norm in one kernel beside ours, after a look at what both return.

        The norm is one that FlashInfer rounds as its family does: behind the weight.
        """
        begin = time.perf_counter()
        made: dict[str, Any] = {"workspace": self.workspace, "device": self.device, "dtype": torch.bfloat16}
        rows = {
            name: SumNorm(self.axis, self.hidden, 1e-6, rounding="scale_then_cast", backend=name, **made)
            for name in ("flashinfer", "triton_symm_mem")
        }
        norm = fl.RMSNorm(
            self.hidden, 1e-6, rounding="scale_then_cast", device=self.device, dtype=torch.bfloat16, backend="triton"
        )
        norm.weight.copy_(self.norm.weight)
        rows["flashinfer"](self.draw(1, 0), self.draw(1, 1, own=False), self.norm.weight)
        torch.cuda.synchronize()
        self.run.say(what="peer_start", seconds=round(self.run.slower(time.perf_counter() - begin), 2))
        for count in (1, 16, 64, 256, 1024):
            x, residual = self.draw(count, 1), self.draw(count, 2, own=False)
            wanted = norm(self.over.all_reduce_(x.clone()), residual)
            times, right, error = {}, {}, {}
            for name in rows:
                y, h = rows[name](x.clone(), residual, self.norm.weight)
                # One rounding to bf16 of nearly equal numbers: a last place apart at most.
                far = (y.float() - wanted[0].float()).abs() / (wanted[0].float().abs() + 1e-6)
                error[name] = round(self.run.slower(float(far.max())), 5)
                same = self.run.same_everywhere(y)  # of all ranks, whatever each of them has found
                good = same and torch.equal(h, wanted[1]) and float(far.max()) <= 2**-7

                def chain(layer: SumNorm = rows[name], x: torch.Tensor = x, h: torch.Tensor = residual) -> Any:
                    """Norm and residual of one call go into the next."""
                    for _ in range(CHAIN):
                        x, h = layer(x, h, self.norm.weight)
                    return x, h

                times[name] = microseconds(self.run, chain, CHAIN)
                right[name] = self.run.all_true(good and bool(torch.stack(chain()).isfinite().all()))
            self.run.say(
                what="peer_time", peer="flashinfer", rows=count, hidden=self.hidden, flashinfer_us=times["flashinfer"],
                sum_norm_us=times["triton_symm_mem"], right=right["flashinfer"], ours_right=right["triton_symm_mem"],
                flashinfer_error=error["flashinfer"], sum_norm_error=error["triton_symm_mem"],
            )  # fmt: skip

    def lost(self) -> None:
        """Let one rank stay away: the other ends after the deadline, names it, and then waits no more."""
        made = Workspace.make(self.axis, self.hidden, torch.bfloat16, self.device, rows=8, deadline_s=0.5)
        assert made.push is not None and made.arena is not None
        seconds = []
        if self.axis.rank == 0:
            for _ in range(2):
                begin = time.perf_counter()
                y, h = made.push(self.draw(4, 1), None, self.norm.weight, 1e-6)
                torch.cuda.synchronize()
                seconds.append(round(time.perf_counter() - begin, 4))
            self.run.say(
                what="lost_rank", seconds=seconds, named=made.arena.failed(),
                poisoned=bool(y.isnan().all()) and bool(h.isnan().all()),
            )  # fmt: skip
        dist.barrier()


def several(way: Callable[[], Any], calls: int) -> list[Any]:
    """Return what so many calls return."""
    return [way() for _ in range(calls)]


def rows(run: Any) -> None:
    """Run the parts about rows."""
    parts = Rows(run)
    run.part("workspace", parts.start, 30)
    if run.options.peer:
        run.part("peer", parts.peer, 160)  # it is built first
        return
    run.part("correct", parts.correct, 25)
    run.part("sum_norm_time", parts.timed, 30)
    run.part("replays", parts.replayed, 20 + run.options.replays / 2000)
    run.part("exchanged", parts.exchanged, 20)
    run.part("exchange_time", parts.timed_exchange, 25)
    run.part("tokens", parts.tokens, 20)
    if run.options.late:
        run.early(False)
        for part in (parts.correct, parts.timed, parts.replayed, parts.exchanged, parts.timed_exchange, parts.tokens):
            run.part(f"{part.__name__} late", part, 25 + run.options.replays / 2000)
        run.early(True)
    run.part("host_exchange", parts.hosts, 15)
    run.part("lost_rank", parts.lost, 15)
    for hidden in (4096, 2048):
        smaller = Rows(run, hidden)
        run.part(f"workspace {hidden}", smaller.start, 20)
        run.part(f"sum_norm_time {hidden}", smaller.timed, 20)
