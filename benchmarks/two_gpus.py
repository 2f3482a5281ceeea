"""Several GPUs of one host: ``torchrun --nproc-per-node 2 benchmarks/two_gpus.py rows|models [options] [--out FILE]``.

``rows``: the operators over symmetric memory against NCCL: equal results, equal bits on all ranks, thousands of replays
with random delays, then microseconds a call in a captured chain whose calls depend on each other.
``models``: decode of models with real dimensions and random weights, split over the ranks (without torchrun: one).
One JSON line a row, printed by rank 0; times are of the slower rank. A part that fails prints its traceback, and the
next one runs.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fastlayers as fl
from fastlayers import env
from fastlayers.comm.collectives import collectives
from fastlayers.comm.fabric import Workspace, survey
from fastlayers.comm.parallel import ParallelSpec
from fastlayers.comm.symmetric import SymmArena
from fastlayers.comm.triton_exchange import Exchange
from fastlayers.tuning.provenance import provenance

HIDDEN = 7168
CHAIN = 20


class Run:
    """One rank of this run: its spec, and where its rows go."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.lines = options, []  # type: ignore[var-annotated]
        self.rank, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(self.device)
        self.parallel = ParallelSpec()
        if self.size > 1:
            env.disable_multicast()
            dist.init_process_group("nccl", device_id=self.device)
            mesh = dist.device_mesh.init_device_mesh("cuda", (self.size,))
            self.parallel = ParallelSpec.from_mesh(mesh, attn_dp=options.dp, ep=options.ep)

    def say(self, **row: Any) -> None:
        """Print one row."""
        if self.rank == 0:
            self.lines.append(row)
            print(json.dumps(row), flush=True)

    def part(self, name: str, function: Callable[[], None], seconds: float) -> None:
        """Run one part; what it raises is printed, and one that hangs ends this process with all stacks."""
        begin = time.perf_counter()
        faulthandler.dump_traceback_later(seconds, exit=True)
        try:
            function()
            torch.cuda.synchronize()
        except Exception:
            print(json.dumps({"part": name, "rank": self.rank, "error": traceback.format_exc()}), flush=True)
        faulthandler.cancel_dump_traceback_later()
        self.say(part=name, seconds=round(time.perf_counter() - begin, 2))

    def slower(self, value: float) -> float:
        """Return the largest of the ranks' values."""
        if self.size == 1:
            return value
        found = torch.tensor([value], device=self.device, dtype=torch.float64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return float(found)

    def same_everywhere(self, x: torch.Tensor) -> bool:
        """Return whether all ranks hold the same bits."""
        words = x.contiguous().view(torch.uint8)
        first = words.clone()
        dist.broadcast(first, 0)
        return self.slower(float(not torch.equal(first, words))) == 0.0

    def all_true(self, value: bool) -> bool:
        """Return whether it holds on all ranks."""
        return self.slower(float(not value)) == 0.0


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


def microseconds(run: Run, function: Callable[[], Any], calls: int, repeats: int = 15) -> float:
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

    def __init__(self, run: Run, hidden: int = HIDDEN) -> None:
        self.run, self.axis, self.device, self.hidden = run, run.parallel.tp, run.device, hidden
        self.over = collectives(self.axis)
        self.norm = fl.RMSNorm(hidden, device=self.device, dtype=torch.bfloat16)
        torch.manual_seed(0)
        self.norm.weight.copy_(1 + 0.1 * torch.randn(hidden, device=self.device))
        self.workspace: Any = None

    def start(self) -> None:
        """Make the workspace: for pushes alone, then with inboxes of 16,384 rows."""
        begin = time.perf_counter()
        import fastlayers.comm.symmetric
        import fastlayers.comm.triton_exchange  # noqa: F401

        imported = time.perf_counter() - begin
        begin = time.perf_counter()
        survey(self.axis, self.device)
        self.run.say(
            what="before", import_seconds=round(imported, 3), survey_seconds=round(time.perf_counter() - begin, 3)
        )
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
            equal = torch.equal(own, wanted), torch.equal(whole, gathered)
            residual = self.draw(rows, 7, own=False)
            mine = residual[self.axis.rank * share : (self.axis.rank + 1) * share]
            y, h = move.scatter_gather(x, mine, self.norm.weight, 1e-6)
            wanted_y, wanted_h = self.theirs(x.clone(), residual)
            mine_h = wanted_h[self.axis.rank * share : (self.axis.rank + 1) * share]
            self.run.say(
                what="exchange", rows=rows, scatter=self.run.all_true(equal[0]), gather=self.run.all_true(equal[1]),
                seam=self.run.all_true(torch.equal(y, wanted_y) and torch.equal(h, mine_h)),
                late=self.workspace.arena.failed(),
            )  # fmt: skip

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
            graphs.append((*captured(chain), wanted))
        order, own = random.Random(3), random.Random(10 + self.axis.rank)
        wrong = torch.zeros(1, dtype=torch.int64, device=self.device)
        replays = self.run.options.replays
        for _ in range(replays):
            graph, (y, h), (wanted_y, wanted_h) = graphs[order.randrange(3)]
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
            kept = push.warps, push.programs, push.ahead
            found["sum_norm_us"] = self.time_sums("sum_norm", rows)
            ways = [(w, *kept[1:]) for w in (kept[0] // 2, 2 * kept[0])]
            if rows > 132:
                ways = [(kept[0], programs, ahead) for programs in (132, 264) for ahead in (1, 2, 8)]
            for way in ways if self.run.options.ways else ():
                push.warps, push.programs, push.ahead = way
                found["sum_norm_us_{}_warps_{}_programs_{}_ahead".format(*way)] = self.time_sums("sum_norm", rows)
            push.warps, push.programs, push.ahead = kept
            self.run.say(
                what="sum_norm_time", rows=rows, hidden=self.hidden, **found, late=self.workspace.arena.failed()
            )

    def time_sums(self, name: str, rows: int) -> float:
        """Return microseconds of one call in a chain whose calls depend on each other."""
        x, residual = self.draw(rows, 1), self.draw(rows, 2, own=False)
        steps = {"nccl_norm": self.theirs, "sum_norm": self.ours, "norm": self.normed}

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

    def normed(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add and norm, with no sum: what a step of one GPU has in this place."""
        found: tuple[torch.Tensor, torch.Tensor] = self.norm(x, residual)
        return found

    def timed_exchange(self) -> None:
        """Time reduce-scatter and all-gather of many rows, and the seam by them."""
        for rows in (256, 1024, 2048, 16384):
            found = self.time_exchange(self.workspace.exchange, rows)
            self.run.say(what="exchange_time", rows=rows, hidden=self.hidden, **found)
        if not self.run.options.ways:
            return
        for programs in (128, 264):
            nbytes = Exchange.nbytes_for(self.axis.size, self.hidden, torch.bfloat16, 8192, programs)
            arena = SymmArena(self.axis, nbytes, self.device, 10.0)
            move = Exchange(arena, self.hidden, torch.bfloat16, 8192, programs)
            arena.ready()
            for chunk in (4, 8, 16):
                move.chunk = chunk
                found = self.time_exchange(move, 16384, False)
                self.run.say(what="exchange_way", programs=programs, chunk=chunk, rows=16384, **found)

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
            "scatter_norm_gather_us": lambda: move.scatter_gather(x, residual, self.norm.weight, 1e-6),
        }
        found: dict[str, Any] = {}
        for name, way in ways.items():
            if theirs or not name.startswith("nccl"):
                found[name] = microseconds(self.run, partial(several, way, calls), calls, 7)
        return found | {"late": move.arena.failed()}

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


def rows(run: Run) -> None:
    """Run the parts about rows."""
    parts = Rows(run)
    run.part("workspace", parts.start, 30)
    run.part("correct", parts.correct, 25)
    run.part("sum_norm_time", parts.timed, 30)
    run.part("replays", parts.replayed, 20 + run.options.replays / 2000)
    run.part("exchanged", parts.exchanged, 20)
    run.part("exchange_time", parts.timed_exchange, 25)
    run.part("lost_rank", parts.lost, 15)
    for hidden in (4096, 2048):
        smaller = Rows(run, hidden)
        run.part(f"workspace {hidden}", smaller.start, 20)
        run.part(f"sum_norm_time {hidden}", smaller.timed, 20)


@torch.inference_mode()
def decode(run: Run, name: str, backend: str, wanted: dict[int, Any]) -> None:
    """Time decode of one model; ``backend``: of the seam (``""``: what is chosen)."""
    sys.path.insert(0, str(Path(__file__).parent))
    from generate import MODELS, Weights, prompts_of, randomize, time_decode  # type: ignore[import-not-found]

    from fastlayers.attention.buckets import ExtendBuckets
    from fastlayers_models.auto import family_of
    from fastlayers_models.generate import Generator

    if backend:
        os.environ["FASTLAYERS_BACKEND"] = f"sum_norm={backend},all_reduce={backend}"
    else:
        os.environ.pop("FASTLAYERS_BACKEND", None)
    begin = time.perf_counter()
    config = MODELS[name] | ({"num_hidden_layers": run.options.layers} if run.options.layers else {})
    family: Any = family_of(config)
    model = family(
        family.config_class.from_hf(config), parallel=run.parallel, dtype=torch.bfloat16, device=run.device
    ).eval()
    weights = Weights.of(model)
    torch.manual_seed(0)  # what all ranks hold is equal
    randomize(model)
    if run.options.dp > 1:
        return time_groups(run, name, model)
    batches = run.options.batches
    generator = Generator(
        model, max_batch=max(batches), max_length=256, extend_buckets=ExtendBuckets((), ()), cuda_graph=True
    )
    generator.capture([n for n in generator.step.buckets if n in batches])
    torch.cuda.synchronize()
    built = time.perf_counter() - begin
    seam = model.seam
    for batch in run.options.batches:
        row = time_decode(generator, weights, batch, 64, 48, 2)
        tokens = generator.generate(prompts_of(batch, 64, model.config.vocab_size), max_new_tokens=16, eos_ids=())
        everywhere = [tokens] * run.size
        if run.size > 1:
            dist.all_gather_object(everywhere, tokens)
        first = wanted.setdefault(batch, tokens)
        run.say(
            what="decode", model=name, ranks=run.size,
            seam=seam.sum_norm(model.decoder.layers[0].input_layernorm).choice.name if seam is not None else "",
            built_s=round(built, 1), **(row | {"tpot_ms": round(run.slower(row["tpot_ms"]), 3)}),
            same_tokens_on_all_ranks=everywhere == [tokens] * run.size, same_tokens_as_first=first == tokens,
            workspace_s=round(seam.workspace.seconds, 3) if seam is not None and seam.workspace else None,
            late=seam.workspace.arena.failed() if seam is not None and seam.workspace.arena is not None else None,
        )  # fmt: skip
    generator.close()


def time_groups(run: Run, name: str, model: Any) -> None:
    """Time generation of 64 requests a group, all groups together."""
    from generate import prompts_of

    from fastlayers_models.generate import Generator

    generator = Generator(model, max_batch=64, max_length=256, cuda_graph=True)
    spec = fl.kv_cache_spec(model, page_size=model.page_size, dtype=model.kv_dtype)
    for requests in (run.options.dp, 64 * run.options.dp):
        prompts = prompts_of(requests, 64, model.config.vocab_size)
        generator.generate(prompts, max_new_tokens=4, eos_ids=())
        times = []
        for new in (8, 56):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            tokens = generator.generate(prompts, max_new_tokens=new, eos_ids=())
            times.append(time.perf_counter() - begin)
        everywhere: list[Any] = [None] * run.size
        dist.all_gather_object(everywhere, tokens)
        tpot = run.slower((times[1] - times[0]) / 48 * 1e3)
        run.say(
            what="decode_groups", model=name, ranks=run.size, dp=run.options.dp, ep=run.options.ep, requests=requests,
            tpot_ms=round(tpot, 3), tokens_per_s=round(requests / tpot * 1e3, 1),
            cache_bytes_of_a_token=spec.bytes_per_token, same_tokens_on_all_ranks=everywhere == [tokens] * run.size,
            replays=generator.step.graphs.replays if generator.step.graphs is not None else 0,
        )  # fmt: skip
    generator.close()


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", choices=("rows", "models"))
    parser.add_argument("--models", nargs="*", default=["qwen3_8b", "qwen3_30b_a3b"])
    parser.add_argument("--replays", type=int, default=2000)
    parser.add_argument("--ways", action="store_true", help="also time other launch configurations")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--seams", nargs="*", default=["nccl", ""], help="backends to compare; '': what is chosen")
    parser.add_argument("--dp", type=int, default=1, help="attention groups")
    parser.add_argument("--ep", type=int, default=1, help="groups that split the experts")
    parser.add_argument("--layers", type=int, help="fewer decoder layers, to try things out")
    parser.add_argument("--seconds", type=float, default=60.0, help="most for one model and backend")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    run = Run(options)
    given = sys.argv[: sys.argv.index("--out")] if "--out" in sys.argv else sys.argv
    run.say(
        command=" ".join(given), **provenance(), torch=torch.__version__, nccl=str(torch.cuda.nccl.version()),
        ranks=run.size, device=torch.cuda.get_device_name(run.device),
    )  # fmt: skip
    if options.parts == "rows":
        with torch.inference_mode():
            rows(run)
    else:
        for name in options.models:
            wanted: dict[int, Any] = {}
            for backend in options.seams if run.size > 1 and options.dp == 1 else ("",):
                run.part(f"{name} {backend}", partial(decode, run, name, backend, wanted), options.seconds)
                torch.cuda.empty_cache()
    if options.out and run.rank == 0:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in run.lines))
    gc.collect()
    if run.size > 1:
        faulthandler.dump_traceback_later(15, exit=True)
        dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
