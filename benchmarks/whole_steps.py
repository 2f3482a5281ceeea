"""Time the options of a model's products and attention in whole decode steps: ``python benchmarks/whole_steps.py``.

A call by itself does not say what it costs in a step: a product that starts early takes room from the attention in
front of it. For each ``--rows``: the step is captured with the installed choices and, one exchanged at a time, with
what the tuned tables hold as nearly as fast there; replayed by turns; the best exchange is kept, and so on, until none
gains. One JSON line a layer and count of rows: what each option takes more a call (``us_more``) than the one that was
chosen, the others being chosen, too. ``tools/tuned_tables.py summarise`` makes ladders of these rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from generate import MODELS, randomize

from fastlayers import tuning
from fastlayers.attention.meta import AttentionBatch
from fastlayers.device import Device, as_device
from fastlayers.linear.split_rows import LEAVE, is_marked
from fastlayers.registry import registry
from fastlayers.registry.choice import Ladder
from fastlayers.runtime.gc_pause import gc_pause
from fastlayers.runtime.graphs import CudaGraphs, EagerRuntime
from fastlayers.tuning.provenance import provenance
from fastlayers.tuning.samples import Option
from fastlayers.tuning.staleness import kernel_hash
from fastlayers_models.auto import family_of
from fastlayers_models.generate import Generator

BEGIN = time.perf_counter()
SMALL = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, vocab_size=96,
)  # fmt: skip
# What is tried: times of one call within NEAR of the best, MOST a token count; what is tried on: steps within CLOSE.
NEAR, MOST, CLOSE, FEW = 1.15, 6, 1.008, 3
# An exchange is kept that gains so much of a step: captures of the same kernels differ by half of it.
GAIN = 0.003
INTERPRETED = ("cpu", "triton")


def fixed(impl: Any, choice: Any) -> Ladder:
    """Return one implementation for all counts, in place of what was chosen."""
    return Ladder(replace(choice, rungs=choice.rungs[-1:]), (impl,))


@dataclass
class Place:
    """The modules of one shape, a call each in a step; of attention its core in decode."""

    layer: str
    cfg: Any
    modules: list[Any]
    installed: Option = field(default_factory=lambda: Option(""))
    options: list[Option] = field(default_factory=list)
    # Whether a norm behind it may add its splits.
    leaves: bool = False

    @property
    def key(self) -> str:
        """The key of its table."""
        return str(tuning.key_of(self.cfg))

    def build(self, option: Option) -> Any:
        """Return what computes by an option."""
        target = registry(self.layer).named(option.backend).load()
        return target(self.cfg, dict(option.config)) if option.config else target(self.cfg)

    def use(self, option: Option | None) -> None:
        """Compute by an option from the next capture on; ``None``: as installed."""
        impl = None if option is None else self.build(option)
        for module in self.modules:
            if self.layer == "linear":
                kept = module.__dict__.setdefault("kept_ladder", module.ladder)
                module.ladder = kept if impl is None else fixed(impl, kept.choice)
            else:
                kept = module.__dict__.setdefault("kept_ladders", dict(module._ladders))
                given = {} if impl is None else {("decode", self.cfg.context): fixed(impl, module.decode_choice)}
                module._ladders = {**kept, **given}


def places_of(model: Any, context: int) -> list[Place]:
    """Return the products of a model by shape, and its attention."""
    layers = model.decoder.layers
    found: dict[str, Place] = {}
    normed = {linear for layer in layers for linear in read_by_norms(layer)}
    for module in [m for layer in layers for m in layer.modules()] + [model.lm_head]:
        if getattr(getattr(module, "choice", None), "layer", "") == "linear":
            place = found.setdefault(str(module.cfg), Place("linear", module.cfg, []))
            place.modules.append(module)
            place.leaves |= module in normed
    attention: dict[str, Place] = {}
    for layer in layers:  # some have windows, some have not
        cfg = replace(layer.self_attn.decode_choice.cfg, context=context)
        attention.setdefault(str(cfg), Place("gqa", cfg, [])).modules.append(layer.self_attn)
    return [*found.values(), *attention.values()]


def read_by_norms(layer: Any) -> Iterator[Any]:
    """Yield the linears of a layer whose splits a norm may add."""
    for module, name in ((layer.self_attn, "o_proj"), (getattr(layer, layer.MLP), "down_proj")):
        if is_marked(module):
            yield getattr(module, name)


def leaving(options: Sequence[Option], rules: Mapping[str, Mapping[str, Any]]) -> Iterator[Option]:
    """Yield those options that split, with their splits left to the norm behind them."""
    for option in options:
        config = dict(option.config) or dict(rules.get(option.backend, {}))
        if config.get("SPLITS", 1) > 1:
            yield Option(option.backend, tuple(sorted((config | {LEAVE: 1}).items())))


def near_options(place: Place, rows: int, device: Device) -> list[Option]:
    """Return what is worth exchanging: the backends' own rules, and what a table holds as nearly as fast."""
    able = {row.name: row for row in registry(place.layer).ranked if row.why_not(place.cfg, device) is None}
    # On a CPU, where this is only tried out, interpreted kernels, too.
    usual = [row.name for row in able.values() if device.type in row.auto_on or (device.type, row.name) == INTERPRETED]
    found = {Option(name): None for name in usual}
    rules = {}
    for name in usual:
        candidates = getattr(able[name].load(), "candidates", None)
        rules[name] = candidates(place.cfg, rows)[0] if candidates is not None else {}
    path = tuning.find(place.layer, place.key, device)
    measured = tuning.read_whole(path, place.layer, device).get("measured", []) if path is not None else []
    counts = sorted({row["tokens"] for row in measured})
    # At these many or the next fewer, and at the next more: one tile for more rows may be as good.
    for count in dict.fromkeys((*[n for n in counts if n <= rows][-1:], *[n for n in counts if n > rows][:1])):
        here = sorted((r for r in measured if r["tokens"] == count and r["backend"] in usual), key=lambda r: r["us"])
        for row in [r for r in here if r["us"] <= NEAR * here[0]["us"]][:MOST]:
            if row.get("config") and row["config"] != rules[row["backend"]]:
                found[Option.of(row)] = None
    vector = (("VECTOR", 1),)
    options = [option for option in found if rows <= 4 or not set(vector) & set(option.config)]
    return [*options, *(leaving([place.installed, *options], rules) if place.leaves else ())]


def offer(places: Sequence[Place], rows: int, device: Device) -> None:
    """Set what is installed, and what is tried, at so many rows."""
    for place in places:
        choice = place.modules[0].choice if place.layer == "linear" else _decode_choice(place)
        rung = choice.rung_for(rows)
        place.installed = Option(rung.backend.name, tuple(sorted(dict(rung.config or ()).items())))
        place.options = list(dict.fromkeys([place.installed, *near_options(place, rows, device)]))


def compile_products(places: Sequence[Place], rows: int, device: Device) -> None:
    """Call each product by each of its options once, in threads."""
    jobs: list[Callable[[], Any]] = []
    for place in (place for place in places if place.layer == "linear"):
        module = place.modules[0]
        x = torch.zeros(rows, place.cfg.in_features, dtype=place.cfg.dtype, device=module.weight.device)
        jobs += [partial(place.build(option), x, module.weight, module.bias) for option in place.options]
    with torch.inference_mode(), ThreadPoolExecutor(8 if device.type == "cuda" else 1) as pool:
        list(pool.map(lambda job: job(), jobs))


def _decode_choice(place: Place) -> Any:
    usual = place.modules[0].decode_choice
    return registry("gqa").choose_phases(place.cfg, ("decode",), usual.device, usual.requested)[0]


class Rows:
    """Captured decode steps of so many rows."""

    def __init__(self, generator: Generator, places: Sequence[Place], rows: int, context: int, turns: int) -> None:
        self.generator, self.places, self.rows, self.context, self.turns = generator, places, rows, context, turns
        self.cuda = generator.model.device.type == "cuda"

    def times(self, variants: Mapping[Any, Mapping[int, Option]], turns: int) -> dict[Any, float]:
        """Return median microseconds of a step with each variant: by place what it exchanges."""
        runtime = None if self.cuda else EagerRuntime()
        step, graphs = self.generator.step, CudaGraphs(runtime=runtime, warm_ups=1, freeze=False)
        with gc_pause(True):  # one for all of them
            for name, exchanged in variants.items():
                for index, place in enumerate(self.places):
                    place.use(exchanged.get(index))
                graphs.capture(name, step._captured(self.rows, "greedy"))
        for place in self.places:
            place.use(None)
        each = -(-(self.context + 1) // self.generator.pool.page_size)
        pages = [list(range(1 + i * each, 1 + (i + 1) * each)) for i in range(self.rows)]
        step._plan("decode", AttentionBatch((1,) * self.rows, (self.context,) * self.rows, pages), self.rows)
        step.count.fill_(self.rows)
        took: dict[Any, list[float]] = {name: [] for name in variants}
        for turn in range(turns + 1):
            for name in list(variants)[:: 1 if turn % 2 else -1]:
                us = self._replay(graphs, name)
                took[name] += [us] if turn else []
        graphs.clear()
        return {name: statistics.median(us) for name, us in took.items()}

    def _replay(self, graphs: CudaGraphs, name: Any, replays: int = 5) -> float:
        if not self.cuda:
            begin = time.perf_counter()
            graphs.replay(name)
            return (time.perf_counter() - begin) * 1e6
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graphs.replay(name)
        a.record()
        for _ in range(replays):
            graphs.replay(name)
        b.record()
        b.synchronize()
        return a.elapsed_time(b) * 1e3 / replays

    def search(self, end: float) -> Iterator[dict[str, Any]]:
        """Exchange one choice after the other while a step gains; yield the rows of the result."""
        chosen: dict[int, Option] = {}
        alive = [(i, o) for i, place in enumerate(self.places) for o in place.options]
        for number in itertools.count():
            now = {i: chosen.get(i, place.installed) for i, place in enumerate(self.places)}
            tried = {(i, o): chosen | {i: o} for i, o in alive if o != now[i]}
            turns = self.turns if number else max(1, self.turns // 3)  # most are far off
            found = self.times({"base": chosen, **tried, "again": chosen}, turns)
            base = statistics.mean((found.pop("base"), again := found.pop("again")))
            head = {"rows": self.rows, "round": number, "base_us": round(base, 1), "again_us": round(again, 1)}
            index, option = min(found, key=lambda name: found[name], default=(0, now[0]))
            gain = base - found.get((index, option), base)
            yield head | {"best": [self.places[index].key, str(option)], "gain_us": round(gain, 1)}
            if gain < GAIN * base or time.perf_counter() > end:
                break
            # What was installed is tried again as long as something else is chosen.
            alive = self._alive(alive, found, base)
            chosen[index] = option
        yield from self._told(now, found, base)
        both = self.times({"installed": {}, "chosen": chosen}, self.turns)
        yield {"rows": self.rows, **{f"{name}_us": round(us, 1) for name, us in both.items()}}

    def _alive(
        self, alive: Sequence[tuple[int, Option]], found: Mapping[tuple[int, Option], float], base: float
    ) -> list[tuple[int, Option]]:
        """Return what is tried again: of each place the FEW best, and what was installed and may be so again."""
        kept = []
        for index, place in enumerate(self.places):
            here = sorted((o for i, o in alive if i == index), key=lambda option: found.get((index, option), base))
            near = [option for option in here if found.get((index, option), base) < CLOSE * base]
            kept += [(index, option) for option in dict.fromkeys([*near[:FEW], place.installed])]
        return kept

    def _told(
        self, now: Mapping[int, Option], found: Mapping[tuple[int, Option], float], base: float
    ) -> Iterator[dict[str, Any]]:
        for index, place in enumerate(self.places):
            calls, more = len(place.modules), {now[index]: 0.0}
            more |= {option: (us - base) / calls for (i, option), us in found.items() if i == index}
            rows = [_row(option, us) for option, us in more.items()]
            kernels = {
                name: kernel_hash(registry(place.layer).named(name).target) for name in {o.backend for o in more}
            }
            head = {"rows": self.rows, "layer": place.layer, "key": place.key, "calls": calls}
            yield head | {"options": rows, "kernels": dict(sorted(kernels.items()))}


def _row(option: Option, more: float) -> dict[str, Any]:
    row = {"backend": option.backend, "us_more": round(more, 3)}
    return row | ({"config": dict(option.config)} if option.config else {})


@torch.inference_mode()
def bench(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of a model."""
    where = "cuda" if torch.cuda.is_available() and not options.small else "cpu"
    config = MODELS[options.model] | (SMALL if options.small else {})
    family: Any = family_of(config)
    model = family(family.config_class.from_hf(config), dtype=torch.bfloat16, device=where).eval()
    randomize(model)
    most, context = max(options.rows), 576 if not options.small else 20
    length = 1024 if not options.small else 64
    graphs = None if where == "cuda" else CudaGraphs(runtime=EagerRuntime())
    generator = Generator(model, max_batch=most, max_length=length, graphs=graphs)
    places = places_of(model, 1024)
    for number, rows in enumerate(options.rows):
        now = time.perf_counter()
        if now - BEGIN > 0.9 * options.seconds:
            yield {"model": options.model, "left_out": list(options.rows[number:])}
            return
        offer(places, rows, as_device(where))
        compile_products(places, rows, as_device(where))
        each = Rows(generator, places, rows, context, options.turns)
        for row in each.search(now + (options.seconds - (now - BEGIN)) / (len(options.rows) - number)):
            yield {"model": options.model} | row
        torch.cuda.empty_cache()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen3_8b", choices=tuple(MODELS))
    parser.add_argument("--rows", type=int, nargs="*", default=[32, 8, 4, 2, 16])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=190)
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU, to try this program out")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = str(as_device("cuda" if torch.cuda.is_available() and not options.small else "cpu"))
    head = {"command": "python " + " ".join(sys.argv), **provenance(), "torch": torch.__version__, "device": device}
    lines: list[dict[str, Any]] = [head]
    for row in itertools.chain([head], bench(options)):
        lines += [row] if row is not head else []
        print(json.dumps(row), flush=True)
        if options.out:  # whatever ends the run, what was measured stays
            options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
