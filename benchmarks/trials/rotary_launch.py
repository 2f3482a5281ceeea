"""Try how rotations of a few tokens are launched: ``python benchmarks/trials/rotary_launch.py --out FILE`` on a GPU.

    --check       every launch on small sizes against today's, interpreted on the CPU (TRITON_INTERPRET=1)
    --compile     what each launch takes when it is compiled for sm_90; needs no GPU
    --peer        FlashInfer's rotation by turns with the best of them; its first use compiles for most of a minute
    --few         only early launches of few tokens: heads and warps before and now, others, and orders of the code

Heads and warps of a program, and when it starts: ``early``, as today, before the kernel in front has ended; ``plain``,
behind its end, while the kernel behind may still start early; ``apart``, neither. Orders of the code: see ``EDITS``.
Alone behind a kernel that releases nothing, and in chains of norms and rotations, where an early start is for
something. One JSON line a launch, all of a point by turns: ``same`` says whether its outputs have the bits of the
first one's. What is predicted, and what decides: ``benchmarks/notes/small_ops.md``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import fastlayers as fl
from fastlayers.integers import next_power_of_2
from fastlayers.registry.spec import Case, spec_of
from fastlayers.rotary import triton as rotary_triton
from fastlayers.rotary.layer import RotaryConfig
from fastlayers.testing.compile_check import KernelBuild, compile_for
from fastlayers.tuning.clock import Timed, clock_for
from fastlayers.tuning.sweep import case_at, inputs_of

sys.path.insert(0, str(Path(__file__).parents[1]))
from performance import small_ops
from rows import Rows, arguments, finish
from small_peers import small_peers

WAYS = ("early", "plain", "apart")
ROUNDS, PEER_ROUNDS = 40, 100
FEW = 64
CHAIN = "norm, rotary, norm, rotary"
# Compiles FlashInfer's kernel in a process of its own, while ours are timed.
BUILD = """
import torch, flashinfer.rope as rope
x, table = torch.zeros(1, 1, 64, dtype=torch.bfloat16, device="cuda"), torch.zeros(1, 64, device="cuda")
rope.apply_rope_with_cos_sin_cache(torch.zeros(1, dtype=torch.int64, device="cuda"), x[0], x[0], 64, table)
"""


TEXTS = tempfile.TemporaryDirectory()
RELEASE = "    release_dependents(PDL)\n"
# The compiler moves no load over a release, and a second release changes nothing: so all loads that wait for nothing
# are under way before the position is looked at. By itself it puts those of q behind that in most launches.
FENCED = (
    ("    a, b = _load_pairs", "    position = tl.load(positions_ptr + token)\n    a, b = _load_pairs"),
    ("        position = tl.load(positions_ptr + token).to(tl.int64)", "        position = positions_ptr.to(tl.int64)"),
    ("        cos_ptr, sin_ptr, positions_ptr, token, max_position, axis_stride,\n        HALF",
     "        cos_ptr, sin_ptr, position, token, max_position, axis_stride,\n        HALF"),
    ("    # After the loads that wait for nothing.\n", RELEASE),
    ("    return a.to(tl.float32), b.to(tl.float32)", "    return a, b"),
    ("    if TILE:\n", "    a, b = a.to(tl.float32), b.to(tl.float32)\n    if TILE:\n"),
)  # fmt: skip
# What of the kernel's text is replaced by what, in order.
EDITS: dict[str, tuple[tuple[str, str], ...]] = {
    "no release": ((RELEASE, ""),),
    "loads first": FENCED,
    "released behind loads": ((RELEASE, ""), *FENCED),
}


@cache
def edited(order: str) -> Any:
    """Return the kernel with its code in another order."""
    text = Path(rotary_triton.__file__).read_text().split("def _program(")[0]
    for old, new in EDITS[order]:
        if text.count(old) != 1:
            raise ValueError(f"{order}: the kernel's text has {text.count(old)} times {old!r}")
        text = text.replace(old, new)
    # Triton reads a kernel's source from its file.
    path = Path(TEXTS.name) / f"{order.replace(' ', '_')}.py"
    path.write_text(text)
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module._rotary_kernel


@dataclass(frozen=True)
class Launch:
    """Heads and warps of a program (0: as the library chooses), when it starts, and the order of its code."""

    heads: int = 0
    warps: int = 0
    way: str = "early"
    order: str = ""
    before: bool = False  # whether it is what the library took before

    @property
    def name(self) -> str:
        """How rows call it."""
        shape = f"{self.heads}x{self.warps}" if self.heads else "now"
        return f"{'before: ' if self.before else ''}{shape} {self.way}{', ' if self.order else ''}{self.order}"

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Rotate so."""
        usual, few = rotary_triton.dependent_launch, rotary_triton.FEW_TOKENS

        def given(tokens: int, heads: int, angles_each: int) -> tuple[int, int, bool]:
            # More than a few tokens had their angles through shared memory.
            return self.heads, self.warps, angles_each >= 32 * self.warps and not (self.before and tokens > few)

        def launched(device: torch.device) -> dict[str, bool]:
            # A kernel that was not launched early waits for nothing, and may release the next one all the same.
            return {"PDL": usual(device)["PDL"] and self.way != "apart"} if self.way != "early" else usual(device)

        with (
            mock.patch.object(rotary_triton, "_program", given if self.heads else rotary_triton._program),
            mock.patch.object(rotary_triton, "dependent_launch", launched),
            mock.patch.object(
                rotary_triton, "_rotary_kernel", edited(self.order) if self.order else rotary_triton._rotary_kernel
            ),
        ):
            yield


TODAY = Launch()
# By tokens, at most so many.
SHAPES = {
    1: ((4, 1), (8, 1), (16, 4)), 16: ((8, 1), (16, 4), (32, 8)), 64: ((8, 2), (16, 4), (32, 8), (64, 16)),
    4096: ((64, 2), (64, 4), (64, 8), (32, 4)),
}  # fmt: skip


# The same of early launches alone, of many heads and of fewer: `--few`.
EARLY_OF_MANY = {
    1: ((4, 1), (16, 2), (16, 4)), 16: ((16, 2), (16, 4), (32, 8)), 128: ((8, 1), (16, 4), (64, 16)),
    256: ((8, 1), (16, 4), (32, 8)),
}  # fmt: skip
EARLY_OF_FEWER = (8, 1), (16, 4), (32, 8)


def early_launches(tokens: int, heads: int) -> list[Launch]:
    """Return early launches of few tokens, before's and today's first."""
    before = Launch(8 if tokens <= rotary_triton.FEW_TOKENS else 32, 2, before=True)
    many = heads >= rotary_triton.MANY_HEADS
    shapes = next(found for most, found in EARLY_OF_MANY.items() if tokens <= most) if many else EARLY_OF_FEWER
    orders = () if tokens > FEW else tuple(EDITS)
    return [before, TODAY, *(Launch(*shape) for shape in shapes), *(Launch(order=order) for order in orders)]


def launches(tokens: int) -> list[Launch]:
    """Return what is tried with so many tokens, today's first."""
    shapes = next(found for most, found in SHAPES.items() if tokens <= most)
    ways = ("plain", "early") if tokens == FEW else ("plain",)
    return [*(Launch(way=way) for way in WAYS), *(Launch(*shape, way) for way in ways for shape in shapes)]


@dataclass
class Point:
    """A call, what it returns, and what is tried of it."""

    what: dict[str, Any]
    call: Callable[[], Any]
    results: Callable[[], dict[str, torch.Tensor]]
    tried: list[Launch]
    peer: Callable[[], Any] | None = None


def alone(
    model: str, cfg: RotaryConfig, tokens: int, small: bool, device: str, few: bool = False, beside: bool = False
) -> Point:
    """Return a rotation as ``performance.py`` times it."""
    spec, count = spec_of("rotary"), tokens if not small else 2 if tokens <= FEW else 17
    case = case_at("rotary", cfg, count)
    case = Case(case.name, cfg, dict(case.shape) | ({"max_position": 64} if small else {}), small=False)
    inputs, impl = inputs_of("rotary", case, device), rotary_triton.TritonRotary(cfg)
    peers = small_peers("rotary", cfg) if beside else {}
    peer = partial(spec.timed, peers["flashinfer"](cfg), inputs, None) if "flashinfer" in peers else None
    what = {"op": "rotary", "model": model, "tokens": tokens, "heads": list(case.shape["heads"])}
    tried = early_launches(tokens, sum(case.shape["heads"])) if few else launches(tokens)
    return Point(what, partial(spec.timed, impl, inputs, None), partial(spec.run, impl, inputs, None), tried, peer)


def chain(model: str, cfg: RotaryConfig, heads: tuple[int, int], tokens: int, small: bool, device: str) -> Point:
    """Return norms and rotations in turns: what a dependent launch is for."""
    norm = fl.RMSNorm(cfg.head_dim, 1e-6, device=device, dtype=torch.bfloat16, backend="triton")
    norm.weight.data.fill_(1.0)
    rope, count = rotary_triton.TritonRotary(cfg), 2 if small else tokens
    table = torch.linspace(-1, 1, 64 * cfg.rotary_dim // 2, device=device).view(64, -1)
    q, k = (torch.randn(count, each, cfg.head_dim, device=device).bfloat16() for each in heads)
    positions = torch.arange(count, device=device) % 64

    def call() -> dict[str, torch.Tensor]:
        turned, keys = q, k
        with torch.inference_mode():
            for _ in range(2):
                turned, found = rope(norm(turned), keys, table, table, positions)
                keys = keys if found is None else found
        return {"q": turned, "k": keys}

    tried = [Launch(way=way) for way in WAYS]
    return Point({"op": CHAIN, "model": model, "tokens": tokens, "heads": list(heads)}, call, call, tried)


def points(small: bool, device: str) -> Iterator[partial[Point]]:
    """Yield what is timed, the most wanted first."""
    table = [
        (item.model, item.cfg, count) for item in small_ops() if item.layer == "rotary" for count in item.tokens
    ]  # fmt: skip
    for model, cfg, tokens in sorted(table, key=lambda point: point[2]):
        if tokens <= FEW:
            yield partial(alone, model, cfg, tokens, small, device)
    for heads, cfg, tokens in (
        ((128, 1), RotaryConfig(64, 64), 1), ((32, 8), RotaryConfig(128, 128), 16), ((64, 8), RotaryConfig(64, 64), 16),
    ):  # fmt: skip
        yield partial(chain, f"{heads[0]} and {heads[1]} heads", cfg, heads, tokens, small, device)
    for model, cfg, tokens in table:
        if tokens == 4096:
            yield partial(alone, model, cfg, tokens, small, device)


def few_points(small: bool, device: str) -> Iterator[partial[Point]]:
    """Yield the points of ``--few``: those of few tokens, then DeepSeek-V3's at the edge where eight warps end."""
    table = [made.args for made in points(small, device) if made.func is alone and made.args[2] <= FEW]
    (many,) = {(model, cfg) for model, cfg, tokens, *_ in table if tokens == FEW}
    for model, cfg, tokens in (*(args[:3] for args in table), (*many, rotary_triton.SOME_TOKENS), (*many, 256)):
        yield partial(alone, model, cfg, tokens, small, device, few=True)


def ended(build: subprocess.Popen[bytes], rows: Rows, few: bool) -> bool:
    """Return whether FlashInfer's kernel was compiled; the short run waits for it no longer than it may take."""
    try:
        return build.wait(max(1.0, rows.end - time.monotonic()) if few else None) == 0
    except subprocess.TimeoutExpired:
        build.kill()
        rows.put({"beside": "flashinfer", "left_out": "it was not compiled in time"})
        return False


def run(rows: Rows, small: bool, device: str, timed: bool, peer: bool, few: bool = False) -> list[dict[str, Any]]:
    """Check and time all launches; return the rows of those with other bits."""
    clock, bad, beside = clock_for(device), list[dict[str, Any]](), list[tuple[Point, dict[str, Timed]]]()
    build = subprocess.Popen([sys.executable, "-c", BUILD]) if peer else None
    for made in few_points(small, device) if few else points(small, device):
        if rows.late(point=str(made.args[:3])):
            continue
        point = made(beside=peer) if made.func is alone else made()
        wanted, found = dict[str, torch.Tensor](), list[dict[str, Any]]()
        ready = dict[str, Timed]()
        for how in point.tried:
            with how.taken():
                results = {key: x.clone() for key, x in point.results().items()}
                wanted = wanted or results
                same = all(torch.equal(results[key], x) for key, x in wanted.items())
                found.append({**point.what, "launch": how.name, "same": same})
                if timed:
                    ready[how.name] = clock.prepare(point.call)
        times = clock.measure(ready, ROUNDS) if timed else {}
        for row in found:
            if timed:
                timing = times[row["launch"]]
                row |= {"us": round(timing.us, 2), "spread_us": round(timing.spread_us, 2)}
            rows.put(row)
            bad += [] if row["same"] else [row]
        if build is not None and point.peer is not None and timed:
            known = [name for name in ready if name.startswith(("now", "before")) and "," not in name]
            best = sorted((name for name in ready if name not in known), key=lambda name: times[name].us)[:2]
            beside.append((point, {name: call for name, call in ready.items() if name in known or name in best}))
    if build is not None and ended(build, rows, few):
        for point, ready in beside:
            assert point.peer is not None
            turns = clock.measure(ready | {"flashinfer": clock.prepare(point.peer)}, ROUNDS if few else PEER_ROUNDS)
            for name, timing in turns.items():
                rows.put(
                    {**point.what, "beside": "flashinfer", "launch": name, "us": round(timing.us, 2),
                     "spread_us": round(timing.spread_us, 2)}
                )  # fmt: skip
    return bad


def build_of(cfg: RotaryConfig, heads: int, warps: int) -> KernelBuild:
    """Return how a launch is compiled that starts early."""
    names = "q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr"
    strides = "q_token_stride", "q_head_stride", "k_token_stride", "k_head_stride"
    signature = dict.fromkeys(names, "*bf16") | {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "positions_ptr": "*i64"}
    signature |= dict.fromkeys(("max_position", "axis_stride", "q_heads", "k_heads", *strides), "i32")
    half = cfg.rotary_dim // 2
    given = {
        "HALF": half, "DIM": cfg.head_dim, "IN": cfg.interleaved_in, "OUT": cfg.interleaved_out, "SECTION_T": 0,
        "SECTION_H": 0, "SECTION_W": 0, "ALTERNATE": False, "HEADS": heads, "BLOCKS": 3, "REST": 0,
        "BLOCK": next_power_of_2(half), "TILE": next_power_of_2(half) >= 32 * warps, "PDL": True,
    }  # fmt: skip
    name = f"{cfg.head_dim} {heads}x{warps}"
    return KernelBuild(name, rotary_triton._rotary_kernel, signature, given, warps, aligned=strides)


def main() -> None:
    """Compile, check, or check and time."""
    parser = arguments(__doc__, 40.0)
    parser.add_argument("--check", action="store_true", help="only bits, on small sizes and on the CPU")
    parser.add_argument("--compile", action="store_true", help="only what the launches take; needs no GPU")
    parser.add_argument("--peer", action="store_true", help="beside FlashInfer, too")
    parser.add_argument("--few", action="store_true", help="only early launches of few tokens, before's and now's")
    options = parser.parse_args()
    if options.compile:
        every = (*SHAPES.values(), *EARLY_OF_MANY.values(), EARLY_OF_FEWER)
        shapes = sorted({(8, 2), (32, 2), *(shape for each in every for shape in each)})
        for cfg in (RotaryConfig(64, 64, True), RotaryConfig(64, 64), RotaryConfig(128, 128)):
            for shape in shapes:
                report = compile_for(build_of(cfg, *shape))
                print(json.dumps({"launch": report.name, "registers": report.registers, "spills": report.spills,
                                  "shared": report.shared}), flush=True)  # fmt: skip
        return
    options.device = "cpu" if options.check else options.device
    torch.manual_seed(0)
    rows, small = Rows(options), options.small or options.check
    timed = not options.check
    finish(run(rows, small, options.device, timed, options.peer and timed, options.few))


if __name__ == "__main__":
    main()
