"""Time speculation with scripted acceptance: ``python benchmarks/speculation.py [MODEL] [--out FILE]``.

The server's engine on random weights, ticked by hand, no HTTP. Drafts cost nothing and each is right with ``--rate``,
whatever the model draws there: the verifier's hook. For each ``--batch``: milliseconds per token and request without
drafts and with ``--k`` of them, by turns, medians of three. Then one verifying step of k + 1 tokens against one decode
step of one token, both on the clock and back to back (``--trees``: also of a tree of so many tokens), and with
``--kernels N`` those N of each that take longest. One JSON line a row; the first line describes the run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rows import command

from fastlayers.device import as_device
from fastlayers.tuning.provenance import provenance
from fastlayers_models.step import StepKey
from fastlayers_server.engine.config import EngineConfig
from fastlayers_server.engine.loop import Engine
from fastlayers_server.engine.metrics import Metrics
from fastlayers_server.engine.protocol import FromEngine, Sampling, StepOut, Submit, pack_ids
from fastlayers_server.engine.request import Chunk, Request, TickPlan, TickResult
from fastlayers_server.engine.speculation import Lookups, Speculation
from fastlayers_server.engine.startup import build
from fastlayers_server.engine.step import GREEDY, RIGHT, TREE, VERIFY


class Scripted(Speculation):
    """Drafts of any token, right by the dice: the engine's drafts and the verifier's script in one."""

    def __init__(self, k: int, rate: float) -> None:
        super().__init__(Lookups(), k, Metrics())
        self.k, self.rate, self.random = k, rate, torch.Generator().manual_seed(0)
        self.steps = self.tokens = 0

    def __call__(self, chunk: Chunk) -> list[int]:
        dice = torch.rand(len(chunk.ids) - 1, generator=self.random).tolist()
        return [RIGHT if value < self.rate else -1 for value in dice]

    def wanted(self, running: int) -> bool:
        """Draft whenever somebody runs."""
        return running > 0

    def prepare(self) -> None:
        """Nothing is made beforehand."""

    def draft(self, request: Request, limit: int) -> Sequence[int]:
        """Return the last token again and again."""
        return request.tokens[-1:] * min(self.k, limit)

    def observe(self, plan: TickPlan, result: TickResult, seconds: float) -> None:
        """Count steps that verify, and what they gave."""
        self.steps += len(plan.verify)
        self.tokens += sum(map(len, result.tokens[len(result.tokens) - len(plan.verify) :])) if plan.verify else 0


def ms_per_token(parts: Engine, drafts: Scripted | None, batch: int, prompt: int, new: int) -> float:
    """Serve so many requests at once and return milliseconds per token of each, between first and last tokens."""
    at: list[tuple[float, int, bool]] = []  # when, how many tokens, and whether somebody ended

    def deliver(message: FromEngine) -> None:
        if isinstance(message, StepOut):
            outputs = message.outputs
            at.append((time.perf_counter(), sum(len(o.ids) for o in outputs), any(o.finish for o in outputs)))

    engine = Engine(parts.scheduler, parts.executor, deliver, overlap=parts.overlap, drafts=drafts)
    parts.executor.extending.scripted = drafts  # type: ignore[attr-defined]
    parts.scheduler.cache.flush()
    assert parts.info is not None
    vocab = parts.info.vocab_size
    for rid in range(1, batch + 1):
        ids = torch.randint(3, vocab, (prompt,), generator=torch.Generator().manual_seed(rid)).tolist()
        engine.post(Submit(rid, pack_ids(ids), Sampling(temperature=0.0), new, ignore_eos=True))
    engine.tick()
    while not parts.scheduler.idle or engine._pending is not None:
        engine.tick()
    # From when all have their first token to when the first request ends: the batch is whole in between.
    told, begin = 0, 0
    while told < batch:
        told, begin = told + at[begin][1], begin + 1
    end = next(place for place, entry in enumerate(at) if entry[2])
    count = sum(tokens for _, tokens, _ in at[begin : end + 1])
    return 1000 * batch * (at[end][0] - at[begin - 1][0]) / count


def steps(parts: Engine, k: int, context: int, tree: bool = False) -> dict[str, Callable[[], Any]]:
    """Return a step of k + 1 tokens to verify and one that decodes one token, of a request of so many tokens.

    In a ``tree`` each token is behind the one of half its place. By turns drafts differ, so that they are sent.
    """
    executor: Any = parts.executor
    request = Request(Submit(0, b"", Sampling(temperature=0.0)), 0, [5] * context, frozenset(), 0)
    pages = (context + k) // executor.config.page_size + 1
    request.slot = 1
    executor.decoding.pages[1, :pages] = range(1, pages + 1)
    parents = [-1, *(place // 2 for place in range(k))] if tree else ()
    turns = itertools.cycle([Chunk(request, context, [token] * (k + 1), k + 1, parents) for token in (5, 6)])
    if tree:  # the engine captures chains or trees
        executor.extending.verify_each = max(executor.extending.verify_each, k + 1)
        sizes = [size for size in executor.extending.extend_buckets.tokens if size > k]
        executor.extending.capture_extends([StepKey("extend", size, 1, TREE) for size in sizes[:1]])
    return {
        "verify": lambda: executor.extending.extend_chunks([next(turns)], VERIFY),
        "decode": lambda: executor.decoding.decode([request], [context], GREEDY),
    }


@torch.inference_mode()
def steps_ms(parts: Engine, k: int, context: int, tree: bool = False) -> dict[str, float]:
    """Return milliseconds of both :func:`steps`."""

    def timed(call: Callable[[], Any], rounds: int = 40) -> tuple[float, float]:
        took = []
        for _ in range(rounds + 5):
            _wait()
            begin = time.perf_counter()
            call()
            _wait()
            took.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        for _ in range(rounds):
            call()
        _wait()
        return 1000 * statistics.median(took[5:]), 1000 * (time.perf_counter() - begin) / rounds

    verify, decode = (timed(step) for step in steps(parts, k, context, tree).values())
    return {
        "verify_ms": verify[0], "verify_row_ms": verify[1], "decode_ms": decode[0], "decode_row_ms": decode[1],
        "ratio": verify[0] / decode[0], "ratio_in_a_row": verify[1] / decode[1],
    }  # fmt: skip


@torch.inference_mode()
def kernels_us(parts: Engine, k: int, context: int, most: int) -> dict[str, list[tuple[str, int, float]]]:
    """Return of both :func:`steps` the kernels that take longest: name, launches and microseconds a step."""
    found, rounds = {}, 8
    activity = torch.profiler.ProfilerActivity
    kind = activity.CUDA if torch.cuda.is_available() else activity.CPU
    for name, step in steps(parts, k, context).items():
        step()
        _wait()
        with torch.profiler.profile(activities=[kind]) as profiler:
            for _ in range(rounds):
                step()
            _wait()
        device = kind == activity.CUDA
        took = [(e.self_device_time_total if device else e.self_cpu_time_total, e) for e in profiler.key_averages()]
        rows = sorted(((e.key[:60], e.count // rounds, us / rounds) for us, e in took), key=lambda row: -row[2])
        found[name] = [("all", sum(count for _, count, _ in rows), sum(us for *_, us in rows)), *rows[:most]]
    return found


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="Qwen/Qwen3-8B")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--rate", type=float, default=0.7)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--trees", type=int, nargs="*", default=[])
    parser.add_argument("--kernels", type=int, default=0)
    parser.add_argument("--out", default=None)
    arguments = parser.parse_args()
    config = EngineConfig(
        model=arguments.model, load_format="dummy", max_model_len=4096, max_running_requests=max(arguments.batch),
        speculative_algorithm="ngram", speculative_max_k=arguments.k, no_freeze_gc=True,
    )  # fmt: skip
    parts = build(config, lambda phase: None)

    rows: list[str] = []

    def say(row: dict[str, Any]) -> None:
        rows.append(json.dumps(row))
        print(rows[-1], flush=True)

    device = as_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    run = vars(arguments) | {"command": command(), "device": str(device), "torch": torch.__version__}
    say({"run": run | provenance()})
    for batch in arguments.batch:
        scripted = Scripted(arguments.k, arguments.rate)
        without, with_drafts = [], []
        for _ in range(3):
            without.append(ms_per_token(parts, None, batch, arguments.prompt, arguments.new))
            with_drafts.append(ms_per_token(parts, scripted, batch, arguments.prompt, arguments.new))
        before, after = statistics.median(without), statistics.median(with_drafts)
        say({
            "batch": batch, "ms_per_token": before, "with_drafts": after, "ratio": after / before,
            "tokens_per_step": scripted.tokens / max(1, scripted.steps), "all": [without, with_drafts],
        })  # fmt: skip
    for context in (arguments.prompt, 2048):
        say({"context": context} | steps_ms(parts, arguments.k, context))
    for size in arguments.trees:
        say({"context": 2048, "tree": size} | steps_ms(parts, size - 1, 2048, tree=True))
    _, uncaptured = parts.executor.graph_counts()  # type: ignore[attr-defined]
    say({"uncaptured": uncaptured})
    if arguments.kernels:
        say({"context": 2048, "kernels": kernels_us(parts, arguments.k, 2048, arguments.kernels)})
    if arguments.out:
        Path(arguments.out).write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
