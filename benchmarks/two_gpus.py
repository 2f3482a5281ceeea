"""Several GPUs of one host: ``torchrun --nproc-per-node 2 benchmarks/two_gpus.py rows|models|start [--out FILE]``.

``rows``: the operators over symmetric memory against NCCL: equal results, equal bits on all ranks, thousands of replays
with random delays, then microseconds a call in a captured chain whose calls depend on each other.
``models``: decode of models with real dimensions and random weights, split over the ranks (without torchrun: one).
``start``: seconds of each phase until a new process has made its workspace and its first sum, kernels cached or not.
One JSON line a row, printed by rank 0; times are of the slower rank. A part that fails prints its traceback, and the
next one runs.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import shlex
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
from fastlayers.comm.fabric import Workspace, agree
from fastlayers.comm.parallel import ParallelSpec
from fastlayers.comm.symmetric import Phases
from fastlayers.tuning.provenance import provenance
from fastlayers_server.known_models import DEEPSEEK_V3
from fastlayers_server.random_models import fill_random

# Tokens of the longest prompt of a prefill.
PREFILLED = 2048
# Of requests together: new tokens, and the first of them that are not timed.
NEW, SETTLED = 56, 8
# Eight of its layers with experts.
SLICE = DEEPSEEK_V3 | {"num_hidden_layers": 8, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}


class Run:
    """One rank of this run: its spec, and where its rows go."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.lines = options, []  # type: ignore[var-annotated]
        self.rank, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(self.device)
        self.parallel, self.phases = ParallelSpec(), Phases()
        torch.zeros(1, device=self.device)
        self.phases.end("CUDA context")
        if self.size > 1:
            env.disable_multicast()
            dist.init_process_group("nccl", device_id=self.device)
            self.phases.end("process group")
            mesh = dist.device_mesh.init_device_mesh("cuda", (self.size,))
            self.parallel = ParallelSpec.from_mesh(mesh, attn_dp=options.dp, ep=options.ep)
            self.phases.end("mesh")

    def say(self, **row: Any) -> None:
        """Print one row."""
        if self.rank == 0:
            signals = sys.modules.get("fastlayers.comm.triton_signals")
            if signals is not None and not signals.EARLY:
                row["early"] = False
            self.lines.append(row)
            print(json.dumps(row), flush=True)

    def early(self, early: bool) -> None:
        """Say whether kernels between ranks start early from here on."""
        from fastlayers.comm import triton_signals

        triton_signals.EARLY = early

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


@torch.inference_mode()
def decode(run: Run, name: str, backend: str, wanted: dict[int, Any]) -> None:
    """Time decode of one model; ``backend``: of the seam (``""``: what is chosen)."""
    sys.path.insert(0, str(Path(__file__).parent))
    import profiles
    from generate import MODELS, Weights, decode_key, prompts_of, randomize, time_decode

    from fastlayers.attention.buckets import ExtendBuckets
    from fastlayers_models.auto import family_of
    from fastlayers_models.generate import Generator

    run.early(backend != "late")
    if backend not in ("", "late"):
        os.environ["FASTLAYERS_BACKEND"] = f"sum_norm={backend},all_reduce={backend}"
    else:
        os.environ.pop("FASTLAYERS_BACKEND", None)
    begin = time.perf_counter()
    config = (MODELS | {"deepseek_v3_slice": SLICE})[name]
    config = config | ({"num_hidden_layers": run.options.layers} if run.options.layers else {})
    family: Any = family_of(config)
    model = family(
        family.config_class.from_hf(config), parallel=run.parallel, dtype=torch.bfloat16, device=run.device
    ).eval()
    weights = Weights.of(model)
    torch.manual_seed(0)  # what all ranks hold is equal
    if name == "deepseek_v3_slice":
        fill_random(model)
        fl.finalize(model)
    else:
        randomize(model)
    if run.options.requests:
        return time_together(run, name, model)
    batches, room = run.options.batches, room_left()
    length = max(run.options.prompt + 192, PREFILLED + 1) if run.options.prefill else run.options.prompt + 192
    generator = Generator(
        model, max_batch=max(*batches, 4), max_length=length, extend_buckets=ExtendBuckets((), ()), cuda_graph=True
    )
    generator.capture([n for n in generator.step.buckets if n in batches])
    torch.cuda.synchronize()
    built = time.perf_counter() - begin
    seam = model.seam
    for batch in run.options.batches:
        row = time_decode(generator, weights, batch, run.options.prompt, 48, 2)
        tokens = generator.generate(
            prompts_of(batch, run.options.prompt, model.config.vocab_size), max_new_tokens=16, eos_ids=()
        )
        everywhere = [tokens] * run.size
        if run.size > 1:
            dist.all_gather_object(everywhere, tokens)
        first = wanted.setdefault(batch, tokens)
        if run.options.profile:
            assert generator.step.graphs is not None
            profiled = profiles.of_replays(partial(generator.step.graphs.replay, decode_key(generator, batch)))
            run.say(what="profile", model=name, ranks=run.size, rank=run.rank, batch=batch, **profiled)
        run.say(
            what="decode", model=name, ranks=run.size,
            seam=seam.sum_norm(model.decoder.layers[0].input_layernorm).choice.name if seam is not None else "",
            built_s=round(built, 1), **cache_room(model, room),
            **(row | {"tpot_ms": round(run.slower(row["tpot_ms"]), 3)}),
            same_tokens_on_all_ranks=everywhere == [tokens] * run.size, same_tokens_as_first=first == tokens,
            workspace_s=round(seam.workspace.seconds, 3) if seam is not None and seam.workspace else None,
            late=seam.workspace.arena.failed() if seam is not None and seam.workspace.arena is not None else None,
            **({"early": True} if run.size > 1 and backend == "" else {}),
        )  # fmt: skip
    for tokens in run.options.prefill:
        run.say(what="prefill", model=name, ranks=run.size, seam=backend, **prefill(run, generator, tokens))
    generator.close()


def prefill(run: Run, generator: Any, tokens: int) -> dict[str, Any]:
    """Return milliseconds until the first tokens of prompts that make one step, spread over ranks and whole."""
    from generate import prompts_of

    model = generator.model
    prompts = prompts_of(max(1, tokens // PREFILLED), min(tokens, PREFILLED), model.config.vocab_size)
    spread, outputs, found = model.spread_rows, [], {}
    kinds = [("whole", range(0), False), ("spread", spread, False)]
    # Of FP8 models: what their products read crosses ranks as codes and scales.
    fp8 = any(isinstance(module, fl.FP8BlockLinear) for module in model.modules())
    for kind, rows, codes in (*kinds, *([("spread_fp8", spread, True)] if fp8 else [])):
        model.spread_rows = rows
        if model.seam is not None:
            model.seam.codes = codes
        times = []
        for _ in range(6):  # the first compiles
            torch.cuda.synchronize()
            begin = time.perf_counter()
            outputs.append(generator.generate(prompts, max_new_tokens=1, eos_ids=()))
            times.append(time.perf_counter() - begin)
        found[f"{kind}_ms"] = round(run.slower(statistics.median(times[1:])) * 1e3, 2)
    return {"tokens": tokens, "spread_rows": str(spread), **found, "same_tokens": all(o == outputs[0] for o in outputs)}


@torch.inference_mode()
def start(run: Run) -> None:
    """Make a workspace in a process that has run one kernel, sum once, and make another.

    That kernel is of whatever a model runs first: Triton reads its own library of 400 MB once, to know what is cached.
    """
    hidden, before = 7168, Phases()
    import triton

    before.end("Triton imported")
    triton.runtime.cache.triton_key()
    before.end("Triton's key")
    fl.RMSNorm(hidden, device=run.device, dtype=torch.bfloat16)(torch.zeros(1, hidden, device=run.device).bfloat16())
    torch.cuda.synchronize()
    before.end("first kernel")
    agree(run.parallel.tp, {"ready": 1})
    before.end("first exchange of objects")
    run.say(what="before", **{name: round(run.slower(seconds), 3) for name, seconds in before.items()})
    for turn in ("first", "second"):
        made = Workspace.make(run.parallel.tp, hidden, torch.bfloat16, run.device, share=run.options.share)
        assert made.push is not None, made.fabric.refusal
        calls = Phases()
        x, weight = (torch.zeros(n, hidden, device=run.device, dtype=torch.bfloat16) for n in (8, 1))
        torch.cuda.synchronize()
        calls.end("inputs")
        made.push(x, None, weight[0], 1e-6)
        torch.cuda.synchronize()
        calls.end("first sum")
        if made.exchange is not None:
            made.exchange.scatter_gather(x, None, weight[0], 1e-6)
            torch.cuda.synchronize()
            calls.end("first exchange")
        found = {name: round(run.slower(seconds), 3) for name, seconds in (*made.phases.items(), *calls.items())}
        run.say(what="workspace", turn=turn, seconds=round(run.slower(made.seconds), 3), **found)
    run.say(what="joined", **{name: round(run.slower(seconds), 3) for name, seconds in run.phases.items()})


def room_left() -> int:
    """Return the bytes of this GPU that nothing holds but 6 GiB for graphs and the largest steps."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] - (6 << 30)


def cache_room(model: Any, room: int, groups: int = 1) -> dict[str, int]:
    """Return how many tokens all ranks together can cache: every group caches other requests."""
    spec = fl.kv_cache_spec(model, page_size=model.page_size, dtype=model.kv_dtype)
    return {
        "cache_bytes_of_a_token": spec.bytes_per_token, "cache_tokens": groups * max(0, room) // spec.bytes_per_token
    }  # fmt: skip


def time_together(run: Run, name: str, model: Any) -> None:
    """Time generation of so many requests in all, whole and in two halves; greedy tokens of all ways are compared."""
    import profiles
    from generate import prompts_of

    from fastlayers.attention.buckets import ExtendBuckets
    from fastlayers_models.generate import Generator

    options, room, groups = run.options, room_left(), run.options.dp
    first: dict[int, Any] = {}
    for overlap in options.overlap:
        generator = Generator(
            model, max_batch=max(options.requests) // groups, max_length=options.prompt + 192, overlap=overlap,
            extend_buckets=ExtendBuckets((), ()), cuda_graph=True,
        )  # fmt: skip
        for requests in options.requests:
            prompts = prompts_of(requests, options.prompt, model.config.vocab_size)
            short = [prompt[:32] for prompt in prompts]
            generator.generate(short, max_new_tokens=4, eos_ids=())  # compiles, captures
            tokens, times = streamed(generator, prompts, requests // groups)
            tpot = run.slower((times[-1] - times[SETTLED]) / (len(times) - 1 - SETTLED) * 1e3)
            wanted = first.setdefault(requests, tokens)
            run.say(
                what="decode_groups", model=name, ranks=run.size, dp=groups, ep=options.ep, requests=requests,
                **({"overlap": overlap} if len(options.overlap) > 1 else {}), prompt=options.prompt,
                tpot_ms=round(tpot, 3), tokens_per_s=round(requests / tpot * 1e3, 1),
                prompts_ms=round(run.slower(times[0]) * 1e3, 1), **cache_room(model, room, groups),
                same_tokens_as_first=run.all_true(wanted == tokens),
                replays=generator.step.graphs.replays if generator.step.graphs is not None else 0,
            )  # fmt: skip
            if options.profile and generator.step.graphs is not None:
                graphs = generator.step.graphs
                # The last step's, which all ranks call, with what it left in its inputs.
                profiled = profiles.of_replays(partial(graphs.replay, next(reversed(graphs._graphs))))
                run.say(
                    what="profile", model=name, ranks=run.size, rank=run.rank, dp=groups, requests=requests, **profiled
                )  # fmt: skip
        generator.close()
        del generator
        gc.collect()


def streamed(generator: Any, prompts: list[list[int]], own: int) -> tuple[list[list[int]], list[float]]:
    """Return the own group's tokens, step by step, and when each step's were there, from now on."""
    steps: list[list[int]] = []
    times = []
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for index, token in enumerate(generator.stream(prompts, max_new_tokens=NEW, eos_ids=())):
        if index % own == 0:
            steps.append([])
        steps[-1].append(token.id)
        if index % own == own - 1:
            times.append(time.perf_counter() - begin)
    return steps, times


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", choices=("rows", "models", "start"))
    parser.add_argument("--models", nargs="*", default=["qwen3_8b", "qwen3_30b_a3b"])
    parser.add_argument("--replays", type=int, default=2000)
    parser.add_argument("--ways", action="store_true", help="also time other launch configurations")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--peer", action="store_true", help="rows: only FlashInfer's fused sum and norm beside ours")
    parser.add_argument("--late", action="store_true", help="rows: also with kernels that wait for those in front")
    parser.add_argument(
        "--seams",
        nargs="*",
        default=["nccl", ""],
        help="backends; '': what is chosen; late: without early starts",
    )
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--dp", type=int, default=1, help="attention groups")
    parser.add_argument("--ep", type=int, default=1, help="groups that split the experts")
    parser.add_argument("--prefill", type=int, nargs="*", default=[], help="models: also prompts of so many tokens")
    parser.add_argument("--requests", type=int, nargs="*", default=[], help="models: only so many in all, together")
    parser.add_argument("--overlap", nargs="*", default=["off"], help="requests together: halves that take turns")
    parser.add_argument("--profile", action="store_true", help="models: also what the first rank's steps are made of")
    parser.add_argument("--share", type=int, default=0, help="start: rows of one rank in an exchange; 0: none is made")
    parser.add_argument("--layers", type=int, help="fewer decoder layers, to try things out")
    parser.add_argument("--seconds", type=float, default=60.0, help="most for one model and backend")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    run = Run(options)
    given = sys.argv[: sys.argv.index("--out")] if "--out" in sys.argv else sys.argv
    run.say(
        command=shlex.join(given), **provenance(), torch=torch.__version__, nccl=str(torch.cuda.nccl.version()),
        ranks=run.size, device=torch.cuda.get_device_name(run.device),
    )  # fmt: skip
    if options.parts == "start":
        run.part("start", partial(start, run), options.seconds)
    elif options.parts == "rows":
        from two_gpus_rows import rows

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
