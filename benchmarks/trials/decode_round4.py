"""Whole decode steps with one thing exchanged, fourth round: ``python benchmarks/trials/decode_round4.py --out FILE``.

Each model has its real widths, all layers and random weights. For one row and for many: the step is captured as it is
and with each exchange of ``decode_round4_variants.py``; bits or errors are checked against the base; all are replayed
by turns. At the end what gained, together. One JSON line a result, appended as it comes: ``gain_us`` beside what was
``predicted_us``. What fails is a line as well. ``--tiny``: small models, on a CPU in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

BEGIN = time.perf_counter()
TINY_BACKENDS = ("linear", "gqa", "rotary_kv_write", "router", "fused_moe", "rms_norm", "silu_mul")
if "--tiny" in sys.argv:  # before anything of Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["FASTLAYERS_BACKEND"] = ",".join(f"{layer}=triton" for layer in TINY_BACKENDS)

import torch  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1]))
from generate import MODELS, randomize  # noqa: E402
from trials import decode_round4_variants as exchanges  # noqa: E402
from trials.decode_round4_variants import TOLERANCE, VARIANTS, Variant, applied  # noqa: E402
from whole_steps import Fixed, Place, places_of  # noqa: E402

import fastlayers as fl  # noqa: E402
from fastlayers.attention.meta import AttentionBatch  # noqa: E402
from fastlayers.moe.fused_moe.triton.mxfp4_hopper import TritonSwizzledFusedMoE  # noqa: E402
from fastlayers.runtime.graphs import CudaGraphs, EagerRuntime  # noqa: E402
from fastlayers.tuning.bench import describe_run  # noqa: E402
from fastlayers_models.auto import family_of  # noqa: E402
from fastlayers_models.generate import Generator  # noqa: E402

Row = dict[str, Any]
TINY = dict(
    hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    head_dim=32, vocab_size=96, moe_intermediate_size=32, num_experts=4, num_local_experts=4, num_experts_per_tok=2,
    sliding_window=8,
)  # fmt: skip
# Rows of the step of many, tokens that requests have, of one row and of many; of the small models.
MANY, CONTEXTS = 32, (200, 576)
TINY_MANY, TINY_CONTEXTS = 5, (20, 12)
# Captured at a time, beside the base; what is gained by chance, of a step.
CHUNK, CHANCE = 7, 0.001
# Logits that are so far apart are of other weights or inputs: experts that nearly tie may be others, not most of them.
ANOTHER_STEP = 0.5
EXPECTED_SECONDS = 150.0


class DeviceLost(RuntimeError):
    """A variant left the GPU in a state in which nothing runs any more."""


def tiny_rule(rows: int, n: int, k: int, dtype: torch.dtype) -> dict[str, int]:
    """Return small tiles, of many rows with splits; without more of x than a tile has."""
    if rows == 1:
        return exchanges.vector(16, 32, 4, 1)
    return exchanges.tile(16, 32, 16, 2, splits=2)


def interpreted() -> AbstractContextManager[Any]:
    """Make many rows of a small model take the ways that 32 rows of a large one do."""
    stack = ExitStack()
    stack.enter_context(mock.patch.object(exchanges.dense, "rule", tiny_rule))
    stack.enter_context(mock.patch.object(exchanges.router, "MAX_LOGIT_TOKENS", TINY_MANY - 1))
    return stack


def swizzled(model: Any) -> None:
    """Let small MXFP4 experts be those of a Hopper GPU, which a CPU's registry does not offer."""
    for module in model.modules():
        if isinstance(module, fl.FusedMoE) and module.cfg.quant == "mxfp4":
            core = TritonSwizzledFusedMoE(module.cfg)
            module.ladder, module.packed = Fixed(core, module.choice), core.pack(module.weights())


class Steps:
    """The captured decode steps of a model."""

    def __init__(self, name: str, tiny: bool) -> None:
        self.name, self.tiny, self.cuda = name, tiny, not tiny
        config = MODELS[name] | (TINY if tiny else {})
        if tiny and name == exchanges.OSS:  # with a window and without
            config["num_hidden_layers"] = 2
        family: Any = family_of(config)
        device = "cpu" if tiny else "cuda"
        model = family(family.config_class.from_hf(config), dtype=torch.bfloat16, device=device).eval()
        torch.manual_seed(4)
        randomize(model)
        if tiny:
            swizzled(model)
        self.many = TINY_MANY if tiny else MANY
        self.graphs = CudaGraphs(runtime=EagerRuntime() if tiny else None, warm_ups=1, freeze=False)
        self.generator = Generator(model, max_batch=self.many, max_length=64 if tiny else 1024, graphs=self.graphs)
        self.model, self.step, self.layers = model, self.generator.step, model.decoder.layers
        for cache in self.step.caches:
            for tensor in (cache.keys, cache.values):
                if tensor is not None:
                    tensor.normal_(0.0, 0.5)
        self.places: list[Place] = places_of(model, 1024)
        self.tokens = torch.randint(0, config["vocab_size"], (self.many,)).to(self.step.table.tokens)

    def module(self, path: str) -> Any:
        """Return a module of the first layer, or of the model; ``"router"``: wherever the layer has it."""
        layer = self.layers[0]
        if path == "router":
            return next(module for module in layer.modules() if isinstance(module, fl.TopKRouter))
        return (self.model if path == "lm_head" else layer).get_submodule(path)

    def place(self, path: str) -> Place:
        """Return all linears of one's shape."""
        module = self.module(path)
        return next(place for place in self.places if any(module is each for each in place.modules))

    def rows_of(self, many: bool) -> int:
        """Return how many requests a step has."""
        return self.many if many else 1

    def function(self, many: bool) -> Callable[[], torch.Tensor]:
        """Return a step that begins with the same tokens each time and returns its logits."""
        rows, seen = self.rows_of(many), list[torch.Tensor]()
        run, sampler, table = self.step._captured(rows, "greedy"), self.generator.step.sampler, self.step.table.tokens

        def noting(logits: torch.Tensor, *given: Any) -> torch.Tensor:
            seen[:] = [logits]
            drawn: torch.Tensor = sampler(logits, *given)
            return drawn

        def once() -> torch.Tensor:
            table[:rows].copy_(self.tokens[:rows])
            with mock.patch.object(self.step, "sampler", noting):
                run()
            return seen[0]

        return once

    def begin(self, many: bool) -> None:
        """Plan the step that is replayed: requests of the same length, pages of their own."""
        rows, context = self.rows_of(many), (TINY_CONTEXTS if self.tiny else CONTEXTS)[many]
        each = -(-(context + 1) // self.generator.pool.page_size)
        pages = [list(range(1 + i * each, 1 + (i + 1) * each)) for i in range(rows)]
        self.step._plan("decode", AttentionBatch((1,) * rows, (context,) * rows, pages), rows)
        self.step.count.fill_(rows)

    def synchronize(self) -> None:
        """Wait; raises where the GPU is lost."""
        if self.cuda:
            torch.cuda.synchronize()

    def replay_us(self, name: str, replays: int) -> float:
        """Return microseconds of a replay."""
        if not self.cuda:
            begin = time.perf_counter()
            self.graphs.replay(name)
            return (time.perf_counter() - begin) * 1e6
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.graphs.replay(name)
        a.record()
        for _ in range(replays):
            self.graphs.replay(name)
        b.record()
        b.synchronize()
        return a.elapsed_time(b) * 1e3 / replays


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return how far one is from the other, of the other's norm; infinite where it is no number."""
    found, wanted = found.float(), wanted.float()
    distance = float((found - wanted).norm() / wanted.norm())
    return round(distance, 6) if distance == distance else float("inf")


def probed(steps: Steps, variants: Sequence[Variant], many: bool) -> dict[str, Any]:
    """Compare the parts whose bits may differ with the base's, on equal inputs; raises where they are too far off."""
    told: dict[str, Any] = {}
    for path in dict.fromkeys(variant.probe for variant in variants if variant.probe):
        module = steps.module(path)
        x = torch.randn(steps.rows_of(many), steps.model.config.hidden_size, dtype=torch.bfloat16).to(
            steps.tokens.device
        )
        exchanges.forget()
        wanted = module(x)
        with applied(steps, variants):
            found = module(x)
        if path == "router":  # at near ties another expert is as good: its weight is the same
            told["other_ids"] = int((found[1] != wanted[1]).sum())
            found, wanted = found[0], wanted[0]
        told["probe_apart"] = distance = apart(found, wanted)
        if not distance <= TOLERANCE:
            raise ValueError(f"{path} is {distance} off, {TOLERANCE} is allowed")
    return told


class Chunk:
    """Steps that are captured at the same time: the base and some exchanges."""

    def __init__(self, steps: Steps, many: bool) -> None:
        self.steps, self.many = steps, many
        self.functions: dict[str, tuple[tuple[Variant, ...], Callable[[], torch.Tensor]]] = {}
        self.told: dict[str, Row] = {}
        self.logits = torch.empty(0)  # the base's, once the step is planned

    def capture(self, name: str, variants: Sequence[Variant]) -> None:
        """Capture a step with these exchanges, after their parts have been compared."""
        steps = self.steps
        told = probed(steps, variants, self.many)
        with applied(steps, variants):
            run = steps.function(self.many)
            steps.graphs.capture(name, run)
            if missing := {call for variant in variants for call in variant.calls} - exchanges.CALLED:
                raise ValueError(f"nothing calls {sorted(missing)} in this step")
        self.functions[name] = tuple(variants), run
        self.told[name] = told

    def compare(self, name: str) -> None:
        """Compare a step's logits with a second replay's, and the base's; raises where they are no logits of this step.

        Bits that were promised and are others do not end it: its time may be worth knowing all the same.
        """
        steps, told, (variants, _) = self.steps, self.told[name], self.functions[name]
        wanted = self.logits
        found = steps.graphs.replay(name).clone()
        told["replays_equal"] = torch.equal(found, steps.graphs.replay(name))
        told["equal_to_base"], told["apart"] = torch.equal(found, wanted), apart(found, wanted)
        steps.synchronize()
        if not told["replays_equal"]:
            raise ValueError("a second replay has other bits")
        if not told["apart"] <= ANOTHER_STEP:
            raise ValueError(f"the logits are {told['apart']} from the base's")
        if not told["equal_to_base"] and all(variant.equal for variant in variants):
            told["promised_equal"] = True

    def eager(self, name: str) -> bool:
        """Return whether the same step without a graph has the same bits."""
        variants, run = self.functions[name]
        found = self.steps.graphs.replay(name).clone()
        with applied(self.steps, variants):
            return torch.equal(found, run())

    def times(self, turns: int) -> dict[str, list[float]]:
        """Return microseconds of every turn, the first of which does not count."""
        names, took = list(self.functions), {name: list[float]() for name in self.functions}
        cuda = self.steps.cuda
        replays = max(3, min(10, round(50_000 / self.steps.replay_us("base", 1)))) if cuda else 1
        for turn in range(1 - cuda, turns + 1):
            for name in names[:: 1 if turn % 2 else -1]:
                us = self.steps.replay_us(name, replays)
                took[name] += [us] if turn else []
        return took

    def close(self) -> None:
        """Free the graphs."""
        self.steps.graphs.clear()
        exchanges.KEPT.clear()


def gained(took: Mapping[str, Sequence[float]], name: str) -> Row:
    """Return a step's median, half the distance of its quartiles, and what it gains on the base."""
    us = statistics.median(took[name])
    low, _, high = statistics.quantiles(took[name], n=4) if len(took[name]) > 1 else (us, us, us)
    gain = statistics.median(took["base"]) - us
    return {"us": round(us, 1), "spread_us": round((high - low) / 2, 1), "gain_us": round(gain, 1)}


def timeline(events: Sequence[tuple[float, float, str]]) -> list[tuple[str, int, float, float]]:
    """Return of each kernel, in order of first launch: its count, and means of its time and of its end behind the last.

    ``events``: begin, length and name. Launches that overlap the next one's begin take no time of their own: what
    counts is from end to end.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    end = None
    for begin, length, name in sorted(events):
        behind = begin + length - end if end is not None else length
        found.setdefault(name[:60], []).append((length, max(0.0, behind)))
        end = max(end or 0.0, begin + length)
    return [
        (name, len(each), *(round(statistics.mean(column), 2) for column in zip(*each, strict=True)))
        for name, each in found.items()
    ]


def layer(events: Sequence[tuple[float, float, str]], first: str, layers: int = 2) -> list[tuple[float, float, str]]:
    """Return begin, time and name of what is launched in some layers in the middle, each of which has one ``first``."""
    ordered = sorted(events)
    begins = [i for i, (_, _, name) in enumerate(ordered) if first in name]
    middle = max(0, len(begins) // 2 - layers)
    if len(begins) <= middle + layers:
        return []
    found = ordered[begins[middle] : begins[middle + layers]]
    return [(round(begin - found[0][0], 2), round(us, 2), name[:60]) for begin, us, name in found]


def profile(steps: Steps, name: str) -> Row:
    """Return the timeline of a replay, and two layers of it."""
    steps.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        steps.graphs.replay(name)
        steps.synchronize()
    events = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    told = [(float(e.time_range.start), float(e.time_range.elapsed_us()), e.name) for e in events]
    return {"timeline": timeline(told), "layers": layer(told, "rotary_kv_write")}


class Trial:
    """All exchanges of one model's step of so many rows."""

    def __init__(self, steps: Steps, many: bool, options: argparse.Namespace) -> None:
        self.steps, self.many, self.options = steps, many, options
        self.head: Row = {"model": steps.name, "rows": steps.rows_of(many)}
        self.wanted = [
            v for v in VARIANTS
            if v.many == many and steps.name in v.predicted and v.name not in options.skip
            and (not options.variants or v.name in options.variants)
        ]  # fmt: skip
        self.best: dict[str, tuple[float, Variant]] = {}

    def attempt(self, name: str, work: Callable[[], Any]) -> str:
        """Do something and return why it failed; raises only where the GPU is lost."""
        try:
            work()
        except Exception as error:  # whatever a kernel under trial does: the others are to be timed
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        else:
            return ""
        try:
            self.steps.synchronize()
        except Exception as error:
            raise DeviceLost(name) from error
        return said

    def rows(self, end: float) -> Iterator[Row]:
        """Yield the results, until there is no time left."""
        for begin in range(0, len(self.wanted), CHUNK):
            if time.perf_counter() > end:
                yield self.head | {"left_out": [v.name for v in self.wanted[begin:]]}
                break
            variants = self.wanted[begin : begin + CHUNK]
            yield from self.chunk({v.name: (v,) for v in variants}, first=not begin)
        together = [variant for _, variant in self.best.values()]
        if len(together) > 1 and time.perf_counter() < end:
            name = " + ".join(variant.name for variant in together)
            yield from self.chunk({name: tuple(together)}, eager=True)

    def chunk(self, named: Mapping[str, Sequence[Variant]], first: bool = False, eager: bool = False) -> Iterator[Row]:
        """Capture, compare and time some exchanges beside the base."""
        chunk, failed = Chunk(self.steps, self.many), dict[str, str]()
        now = time.perf_counter()
        chunk.capture("base", ())
        for name, variants in named.items():
            if said := self.attempt(name, lambda name=name, variants=variants: chunk.capture(name, variants)):  # type: ignore[misc]
                failed[name] = said
        captured = round(time.perf_counter() - now, 1)
        self.steps.begin(self.many)
        chunk.logits = self.steps.graphs.replay("base").clone()
        for name in [name for name in chunk.functions if name != "base"]:
            if said := self.attempt(name, lambda name=name: chunk.compare(name)):  # type: ignore[misc]
                failed[name] = said
                del chunk.functions[name]
        if first and self.steps.cuda:
            yield self.head | {"variant": "base"} | profile(self.steps, "base")
        took = chunk.times(self.options.turns)
        told = {"variant": "base", "captured_s": captured, "eager_equal": chunk.eager("base")}
        yield self.head | told | gained(took, "base")
        for name, variants in named.items():
            yield self.row(chunk, took, name, variants, failed.get(name, ""), eager)
        chunk.close()

    def row(
        self, chunk: Chunk, took: Mapping[str, Sequence[float]], name: str, variants: Sequence[Variant], said: str,
        eager: bool,
    ) -> Row:  # fmt: skip
        """Return what came of one exchange, and remember it if it is the best of its group."""
        predicted = [variant.predicted[self.steps.name] for variant in variants]
        row = self.head | {"variant": name, "group": [v.group for v in variants], "predicted_us": predicted}
        row |= chunk.told.get(name, {})
        if said:
            return row | {"failed": said}
        found = gained(took, name)
        row |= found
        if eager:
            return row | {"eager_equal": chunk.eager(name)}
        least = max(2 * found["spread_us"], CHANCE * found["us"])
        (variant,) = variants
        if "promised_equal" not in row and found["gain_us"] > max(
            least, self.best.get(variant.group, (0.0, variant))[0]
        ):
            self.best[variant.group] = found["gain_us"], variant
        return row


@torch.inference_mode()
def bench(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of all models; each has what is left of the time, shared with those behind it."""
    parts = len(options.models) * len(options.rows)
    for name in options.models:
        steps = Steps(name, options.tiny)
        yield {"model": name, "built_s": round(time.perf_counter() - BEGIN, 1)}
        with interpreted() if options.tiny else nullcontext():
            for many in [rows != "1" for rows in options.rows]:
                now = time.perf_counter()
                end = now + (BEGIN + options.budget - now) / parts
                parts -= 1
                yield from Trial(steps, many, options).rows(end)
        del steps
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def again(arguments: Sequence[str], options: argparse.Namespace, model: str, variant: str) -> list[str]:
    """Return the command line that goes on behind a variant that lost the GPU: from its model on, without it."""
    left = options.models[options.models.index(model) :]
    budget = options.budget - (time.perf_counter() - BEGIN)
    kept = ["--rows", *options.rows, "--turns", str(options.turns), "--out", str(options.out)]
    kept += ["--variants", *options.variants] if options.variants else []
    skip = ["--skip", *options.skip, variant]
    return [*arguments, "--models", *left, "--budget", f"{budget:.0f}", *kept, *skip]


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=tuple(MODELS))
    parser.add_argument("--rows", nargs="+", default=["1", "many"], choices=("1", "many"))
    parser.add_argument("--variants", nargs="*", default=[], metavar="NAME", help="only these")
    parser.add_argument("--skip", nargs="*", default=[], metavar="NAME", help="not these")
    parser.add_argument("--budget", type=float, default=EXPECTED_SECONDS, help="seconds for all, from the start on")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--tiny", action="store_true", help="small models in Triton's interpreter")
    parser.add_argument("--out", type=Path, help="JSON lines, appended")
    options = parser.parse_args(arguments)
    if unknown := {*options.variants, *options.skip} - {variant.name for variant in VARIANTS}:
        parser.error(f"no variants {sorted(unknown)}; there are {[variant.name for variant in VARIANTS]}")
    return options


def main() -> None:
    """Run the command line."""
    options, model = parsed(sys.argv[1:]), ""

    def say(row: Row) -> None:
        print(json.dumps(row, ensure_ascii=False), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")

    say(describe_run(torch.device("cpu" if options.tiny else "cuda")) | {"run": "decode steps, fourth round"})
    try:
        for row in bench(options):
            model = row.get("model", model)
            say(row)
    except DeviceLost as lost:
        say({"model": model, "variant": str(lost), "failed": f"the GPU is lost: {lost.__cause__}"[:300]})
        sys.stdout.flush()
        os.execv(sys.executable, again([sys.executable, __file__], options, model, str(lost)))


if __name__ == "__main__":
    main()
