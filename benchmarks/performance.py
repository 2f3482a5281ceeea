"""The figures of docs/performance.md, part by part: ``python benchmarks/performance.py --part fp8_linear``.

A part takes less than ten minutes on a fresh machine with one Hopper GPU. It appends to one file of JSON lines; run
again, it goes on with what is missing (``--minutes`` ends a run early, ``--force`` begins anew). Parts that are
programs of their own are run as such, and what they print as JSON lines is kept.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from fastlayers.attention.context_buckets import context_of
from fastlayers.device import DESCRIBED
from fastlayers.linear.bmm.layer import BmmConfig
from fastlayers.linear.dense.layer import LinearConfig
from fastlayers.linear.fp8_scaled.layer import FP8ScaledLinearConfig
from fastlayers.linear.int8.layer import Int8LinearConfig
from fastlayers.linear.weight_only.layer import WeightOnlyLinearConfig
from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.registry import registry
from fastlayers.registry.spec import Case
from fastlayers.runtime import precompile
from fastlayers.testing.spec import spec_of
from fastlayers.tuning.bench import auto_option, chosen_options, describe_run, rows_of
from fastlayers.tuning.clock import Clock, clock_for
from fastlayers.tuning.samples import Option
from fastlayers.tuning.search import Bench
from fastlayers.tuning.staleness import packages_of
from fastlayers.tuning.sweep import case_at, inputs_of
from fastlayers_server.known_models import KNOWN, LayerShape, shapes_of

sys.path.insert(0, str(Path(__file__).parent))
from peers import peers

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "performance"
TOKENS = (1, 16, 64, 128, 256, 1024, 4096, 8192)
BUCKETS = (1, 16, 17, 64, 65, 256, 257, 4096)  # both sides of the edges of CUTLASS's
SMALL_TOKENS = (1, 16, 64, 512, 4096, 16384)
DEEPSEEK, QWEN8, QWEN30, OSS = "deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b"
H200 = DESCRIBED["H200"]
SMALL = (
    "rms_norm", "silu_mul", "silu_mul_quant", "group_quant", "rotary", "rotary_kv_write", "kv_write", "mla_kv_write",
    "merge_state", "router", "moe_align", "sampler",
)  # fmt: skip


# Their operands are gigabytes.
LARGE = frozenset({"mla", "gqa", "fused_moe"})
# Small operators that do little else than move data: a copy of as many bytes is timed beside them.
MOVERS = frozenset(SMALL) - {"router", "moe_align", "sampler"}


@dataclass(frozen=True)
class Item:
    """One shape of a layer at some token counts (attention: requests), for a model."""

    model: str
    layer: str
    cfg: Any
    tokens: tuple[int, ...]
    contexts: tuple[int, ...] = (4096,)
    against: tuple[str, ...] = ()  # only these backends, and auto
    ragged: bool = False  # decode: lengths drawn around the context
    candidates: bool = False  # also what the tuner tries

    def points(self) -> Iterator[tuple[str, int, int]]:
        """Yield a key, the token count and the context of every point."""
        for context in self.contexts:
            for count in self.tokens:
                drawn = " ragged" if self.ragged else ""
                yield f"{self.model} {self.layer} {self.cfg} T={count} C={context}{drawn}", count, context

    def case(self, count: int, context: int) -> Case:
        """Return the case of a point."""
        case = case_at(self.layer, self.cfg, count, context)
        if not self.ragged:
            return case
        lengths = drawn_lengths(count, context)
        latent = "seq_lens" in case.shape  # counts the new token
        given = {"seq_lens": lengths} if latent else {"prefix_lens": tuple(length - 1 for length in lengths)}
        return replace(case, shape=dict(case.shape) | given)


def drawn_lengths(count: int, mean: int) -> tuple[int, ...]:
    """Return log-normal lengths with this mean, the same each time: most are shorter, a few several times longer."""
    draw, sigma = random.Random(count), 0.8
    found = (round(draw.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)) for _ in range(count))
    return tuple(min(max(length, 1), 8 * mean) for length in found)


def ragged(model: str, layer: str, cfg: Any, tokens: tuple[int, ...], mean: int = 4096) -> list[Item]:
    """Return decode steps of drawn lengths: an item a batch, with the class of contexts of its longest request."""
    return [
        Item(model, layer, replace(cfg, context=context_of(max(drawn_lengths(count, mean)))), (count,), (mean,),
             ragged=True)
        for count in tokens
    ]  # fmt: skip


def drawn() -> list[Item]:
    """Decode steps of drawn lengths with all that the tuner tries: ``tools/drawn_lengths.py`` makes ladders of them."""
    items, bf16, e4m3 = [], torch.bfloat16, torch.float8_e4m3fn
    shapes = (
        *((name, 1, "gqa", bf16) for name in (OSS, QWEN8, QWEN30)),
        *((DEEPSEEK, tp, "mla", kv) for tp in (8, 1) for kv in (bf16, e4m3)),
    )  # fmt: skip
    for name, tp, layer, kv in shapes:
        for cfg in layers_of(name, tp, layer):
            if cfg.phase == "decode" and getattr(cfg, "window", None) is None:
                for mean in (4096, 16384):
                    items += ragged(f"{name} tp{tp}", layer, replace(cfg, kv_dtype=kv), (16, 64), mean)
    return [replace(item, candidates=True) for item in items]


@lru_cache
def _shapes(model: str, tp: int) -> list[LayerShape]:
    return shapes_of(KNOWN[model], tp)


def layers_of(model: str, tp: int, layer: str) -> list[Any]:
    """Return the configurations that ``layer`` has in a model on one of ``tp`` ranks."""
    return [shape.cfg for shape in _shapes(model, tp) if shape.layer == layer]


def fp8_linear() -> list[Item]:
    """Weights of DeepSeek-V3 (a TP8 slice, then whole) and Qwen3-30B-A3B."""
    found: dict[str, Item] = {}
    for model, tp in ((DEEPSEEK, 8), (DEEPSEEK, 1), (f"{QWEN30}-FP8", 1)):
        for cfg in layers_of(model, tp, "fp8_linear"):
            found.setdefault(cfg.tuning_key(), Item(f"{model} tp{tp}", "fp8_linear", cfg, TOKENS))
    return list(found.values())


def fused_moe() -> list[Item]:
    """The experts of every known model with experts; GPT-OSS's at 32 tokens, too, for which the page has a target."""
    return [
        Item(f"{model} tp{tp}", "fused_moe", cfg, tuple(sorted({*TOKENS, 32})) if model == OSS else TOKENS)
        for model, tp in ((QWEN30, 1), (f"{QWEN30}-FP8", 1), (DEEPSEEK, 8), (OSS, 1), (DEEPSEEK, 1))
        for cfg in layers_of(model, tp, "fused_moe")
    ]


def mla() -> list[Item]:
    """Decode with 16 and 128 heads, bf16 and FP8 cache, equal and drawn lengths, other pages; ragged prefill."""
    items, e4m3 = [], torch.float8_e4m3fn
    for tp in (8, 1):
        model = f"{DEEPSEEK} tp{tp}"
        for cfg in layers_of(DEEPSEEK, tp, "mla"):
            if cfg.phase != "decode":
                items.append(Item(model, "mla", cfg, (512, 2048, 8192)))
                continue
            for kv in (torch.bfloat16, e4m3):
                for context in (1024, 4096, 16384, 65536):
                    own = replace(cfg, kv_dtype=kv, context=context_of(context))
                    batches = (1, 16, 64, 128) if context < 65536 else (1, 16)
                    items.append(Item(model, "mla", own, batches, (context,)))
                items += ragged(model, "mla", replace(cfg, kv_dtype=kv), (16, 64))
            if tp == 8:
                near = replace(cfg, context=context_of(4096))
                items += [Item(model, "mla", replace(near, page_size=page), (16, 64)) for page in (1, 16)]
                items.append(Item(model, "mla", replace(near, kv_dtype=e4m3, fp8_math=True), (64, 128)))
    return items


def gqa() -> list[Item]:
    """Decode and prefill without sinks (Qwen3) and with them (GPT-OSS), FP8 caches, drawn lengths, other pages."""
    items = []
    for name in (QWEN8, QWEN30, OSS):
        model = f"{name} tp1"
        for cfg in layers_of(name, 1, "gqa"):
            if cfg.phase != "decode":
                items.append(Item(model, "gqa", cfg, (512, 2048, 8192)))
                continue
            # What lies before a window is not read, however long the request.
            for context in (1024, 4096, 16384) if cfg.window is None else (4096,):
                own = replace(cfg, context=context_of(context))
                items.append(Item(model, "gqa", own, (1, 16, 64, 128), (context,)))
            if name == QWEN8:  # fewer query heads a key head, where a threshold would leave the tensor cores
                for group in (1, 2):
                    own = replace(cfg, num_kv_heads=cfg.num_heads // group, context=context_of(4096))
                    items.append(Item(f"{group} a key head", "gqa", own, (1, 32)))
            if name != QWEN30 and cfg.window is None:
                near = replace(cfg, context=context_of(4096))
                items.append(Item(model, "gqa", replace(near, kv_dtype=torch.float8_e4m3fn), (1, 16, 64)))
                items += ragged(model, "gqa", cfg, (16, 64))
                items += [Item(model, "gqa", replace(near, page_size=page), (64,)) for page in (1, 16)]
    return items


def small_ops() -> list[Item]:
    """Every small operator at that of its real shapes which most backends take; fewer counts at the models' others."""
    items = []
    for layer in SMALL:
        shapes: dict[Any, str] = {}
        for model in (DEEPSEEK, OSS, QWEN8, QWEN30):
            for cfg in layers_of(model, 1, layer):
                shapes.setdefault(cfg, f"{model} tp1")
        others = [case.cfg for case in spec_of(layer).cases if not case.small]
        if shapes or others:
            tokens = (1, 16, 64, 256) if layer == "sampler" else SMALL_TOKENS
            cfg = max(
                [*shapes, *others], key=lambda cfg: sum(b.refusal(cfg, H200) is None for b in registry(layer).ranked)
            )
            items.append(Item("real shape", layer, cfg, tokens))
            items += [Item(shapes[other], layer, other, (16, 4096)) for other in shapes if other != cfg]
    return items


def products() -> list[Item]:
    """Products by token and channel, MLA's absorbed products, and experts at an edge, against packages."""
    against = ("triton", "sgl_kernel")
    items = [
        Item("rows", "int8_linear", Int8LinearConfig(3072, 2048), (1, 16, 128, 4096), (0,), against),
        Item("rows", "fp8_scaled_linear", FP8ScaledLinearConfig(4096, 6144), BUCKETS, (0,), against),
        Item("rows", "fp8_scaled_linear", FP8ScaledLinearConfig(12288, 4096), (1, 1024), (0,), against),
        Item("rows", "int8_linear", Int8LinearConfig(4096, 21888), (1, 4096), (0,), against),
    ]
    for kind in ("none", "fp8_block", "fp8_tensor"):
        names = ("triton", "deep_gemm") if kind == "fp8_block" else ("triton", "torch", "sgl_kernel")
        for k, n in ((128, 512), (512, 128)):
            items.append(Item("128 heads", "bmm", BmmConfig(128, k, n, kind), (1, 64), (0,), names))
    # Around 2,048 rows CUTLASS's experts take another schedule; top 1: a row a token.
    cfg, edge = FusedMoEConfig(7168, 256, 16, 1, quant="fp8_block", dtype=torch.bfloat16), (2047, 2048, 2049)
    return [*items, Item("top 1", "fused_moe", cfg, edge, (0,), ("torch", *against))]


def weight_only() -> list[Item]:
    """Weights alone of 4 and 8 bits, linears' and experts', beside bf16."""
    formats = (("w4a16", 128, True), ("w4a16", 32, False), ("w8a16", 0, False), ("fp8_w8a16", 0, False))
    bf16, items = torch.bfloat16, []
    # Each count is kernels of its own, which take longer to compile than to time: of bytes the ends and the middle.
    counts = {"w4a16": (1, 4, 16, 64, 512), "w8a16": (1, 16, 512), "fp8_w8a16": (1, 16, 512)}
    for k, n in ((4096, 6144), (12288, 4096), (4096, 24576)):
        name, dense = f"K={k},N={n}", LinearConfig(k, n, False, bf16, None)
        items.append(Item(name, "linear", dense, counts["w4a16"], (0,), ("triton",)))
        for format in formats:
            cfg = WeightOnlyLinearConfig(k, n, False, bf16, *format)
            items.append(Item(name, "weight_only_linear", cfg, counts[format[0]], (0,), ("triton",)))
    experts = FusedMoEConfig(2048, 768, 128, 8, dtype=bf16)
    for each in (experts, replace(experts, quant="w4a16", group_size=128)):
        items.append(Item("experts", "fused_moe", each, (1, 16, 64, 512), (0,), ("triton",)))
    return items


MEASURED: dict[str, Callable[[], list[Item]]] = {
    "fp8_linear": fp8_linear, "fused_moe": fused_moe, "mla": mla, "gqa": gqa, "small_ops": small_ops,
    "products": products, "weight_only": weight_only, "drawn": drawn,
}  # fmt: skip
# Programs of their own, below this folder: part -> commands.
_FIRST = ["generate.py", "qwen3_30b_a3b", "--repeats", "1"]
PROGRAMS: dict[str, list[list[str]]] = {
    "patch_qwen3_30b": [["patch_gpu.py", "--model", "qwen3_30b", "--batch", "1", "16"]],
    "patch_qwen3_8b": [["patch_gpu.py", "--model", "qwen3_8b", "--batch", "1"]],
    "generate": [["generate.py"]],
    "capture": [["generate.py", "qwen3_30b_a3b", "--repeats", "1", "--capture", "--objects", "5000000"]],
    # The first of two runs fills the kernel caches.
    "first_token": [_FIRST, _FIRST],
}  # fmt: skip
PARTS = (*MEASURED, *PROGRAMS)


class Record:
    """The result file of a part: rows that were measured stay, whatever interrupts the run."""

    def __init__(self, path: Path, header: dict[str, Any], force: bool) -> None:
        self.path = path
        lines = [] if force or not path.is_file() else path.read_text().splitlines()
        self.rows = [row for row in map(_parsed, lines) if row is not None]
        self.done = {row["key"] for row in self.rows if row.get("last")}
        # Rows of a point that was not finished are measured again.
        self.rows = [row for row in self.rows if "key" not in row or row["key"] in self.done]
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows.append({"run": header})
        path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Append the rows of one point; the last one is marked, so that half a point does not count as one."""
        marked = [row | ({"last": True} if index == len(rows) - 1 else {}) for index, row in enumerate(rows)]
        with self.path.open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in marked))


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(line)
    except ValueError:  # the line that was being written when the run was interrupted
        return None
    return found


def compile_ahead(points: Sequence[tuple[Item, str, int, int]], place: torch.device, clock: Clock) -> None:
    """Call our kernels once at many points, where operands of several fit: compiled side by side, not one by one."""

    def first(bench: Bench, option: Option, case: Case) -> None:
        with bench.noting(option):  # what fails here fails again where it is told
            impl, inputs = bench.row(option).load()(bench.cfg), inputs_of(bench.layer, case, place)
            bench.spec.timed(impl, inputs, bench.spec.prepare(impl, inputs))

    jobs = []
    for item, key, count, context in points:
        bench = Bench(item.layer, item.cfg, place, clock)
        options = [] if item.layer in LARGE else [auto_option(bench, count), *chosen_options(bench, item.against)]
        for option in dict.fromkeys(options):
            if packages_of(bench.row(option)) == ("triton",):
                call = partial(first, bench, option, item.case(count, context))
                jobs.append(precompile.Job(key, count, "triton", call))
    precompile.run(jobs, lambda label: None)


def measure(items: list[Item], record: Record, clock: Clock, place: torch.device, until: float) -> int:
    """Measure what the record lacks until the clock says stop; return how many points are left."""
    points = [(item, *point) for item in items for point in item.points()]
    missing = [point for point in points if point[1] not in record.done]
    if time.monotonic() < until:
        compile_ahead(missing, place, clock)
    benches: dict[int, Bench] = {}
    for index, (item, key, count, context) in enumerate(missing):
        if time.monotonic() > until:
            return len(missing) - index
        other = peers(item.layer, item.cfg)
        bench = benches.setdefault(id(item), Bench(item.layer, item.cfg, place, clock, peers=other))
        begin = time.monotonic()
        case = item.case(count, context)
        also = bench.options(count) if item.candidates else ()
        found = rows_of(bench, case, count, against=item.against, also=also, copy=item.layer in MOVERS)
        failed = {str(option): why for option, why in bench.failed.items()}
        about = {"key": key, "model": item.model, "cfg": repr(item.cfg), "context": context, "failed": failed}
        about |= {"ragged": True} if item.ragged else {}
        record.add([row | about for row in found])
        best = ", ".join(f"{row['backend']}{'*' * row['auto']} {row['us']:.1f}" for row in found)
        print(f"[{index + 1}/{len(missing)}] {key}: {best} ({time.monotonic() - begin:.1f} s)", flush=True)
    return 0


def run_program(part: str, record: Record, more: list[str], about: dict[str, str]) -> int:
    """Run a part's own programs and keep the JSON lines they print, with ``about``; return how many failed."""
    failed = 0
    for number, (program, *arguments) in enumerate(PROGRAMS[part]):
        command = [sys.executable, os.path.relpath(HERE / program), *arguments, *more]  # results name it
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                row = _parsed(line)
                if isinstance(row, dict):
                    record.add([row | {"part": part, "number": number} | (about if "commit" in row else {})])
        failed += process.returncode != 0
    return failed


def main(given: Sequence[str] | None = None) -> None:
    """Run one part or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=(*PARTS, "all"), required=True)
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the result files")
    parser.add_argument("--minutes", type=float, default=9.0, help="of each measured part; then run again")
    parser.add_argument("--force", action="store_true", help="forget what was measured before")
    only = "only keys (model, layer, cfg) in which this regular expression is found"
    parser.add_argument("--only", type=re.compile, default="", help=only)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the driver out")
    parser.add_argument("--commit", default="", help="the commit that results name; default: ask git")
    parser.add_argument("program", nargs="*", help="arguments of a part's own program, after --")
    options = parser.parse_args(given)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no usable NVIDIA GPU, and figures of a CPU are no figures; to try the driver out: --device cpu")
    place = torch.device(options.device)
    left, about = 0, {"commit": options.commit} if options.commit else {}
    for part in PARTS if options.part == "all" else (options.part,):
        record = Record(options.out / f"{part}.jsonl", describe_run(place) | about, options.force)
        if part in MEASURED:
            items = [item for item in MEASURED[part]() if options.only.search(f"{item.model} {item.layer} {item.cfg}")]
            until = time.monotonic() + 60 * options.minutes
            clock = clock_for(place)
            left += measure(items, record, clock, place, until)
        else:
            left += run_program(part, record, options.program, about)
    if left:
        print(f"{left} points or programs are left; run the same command again", file=sys.stderr)
    raise SystemExit(1 if left else 0)


if __name__ == "__main__":
    main()
