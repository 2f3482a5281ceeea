"""Try how rotations of a few tokens are launched: ``python benchmarks/trials/rotary_launch.py --out FILE`` on a GPU.

    --check       every launch on small sizes against today's, interpreted on the CPU (TRITON_INTERPRET=1)
    --compile     what each launch takes when it is compiled for sm_90; needs no GPU
    --peer        FlashInfer's rotation by turns with the best of them; its first use compiles for most of a minute

Heads and warps of a program, and when it starts: ``early``, as today, before the kernel in front has ended; ``plain``,
behind its end, while the kernel behind may still start early; ``apart``, neither. Alone behind a kernel that releases
nothing, and in chains of norms and rotations, where an early start is for something. One JSON line a launch, all of a
point by turns: ``same`` says whether its outputs have the bits of today's. What is predicted, and what decides:
``benchmarks/notes/small_ops.md``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
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


@dataclass(frozen=True)
class Launch:
    """Heads and warps of a program (0: as the library chooses), and when it starts."""

    heads: int = 0
    warps: int = 0
    way: str = "early"

    @property
    def name(self) -> str:
        """How rows call it."""
        return f"{f'{self.heads}x{self.warps}' if self.heads else 'now'} {self.way}"

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Rotate so."""
        usual = rotary_triton.dependent_launch

        def given(tokens: int, angles_each: int) -> tuple[int, int, bool]:
            return self.heads, self.warps, angles_each >= 32 * self.warps

        def launched(device: torch.device) -> dict[str, bool]:
            # A kernel that was not launched early waits for nothing, and may release the next one all the same.
            return {"PDL": usual(device)["PDL"] and self.way != "apart"} if self.way != "early" else usual(device)

        with (
            mock.patch.object(rotary_triton, "_program", given if self.heads else rotary_triton._program),
            mock.patch.object(rotary_triton, "dependent_launch", launched),
        ):
            yield


TODAY = Launch()
# By tokens, at most so many.
SHAPES = {
    1: ((4, 1), (8, 1), (16, 4)), 16: ((8, 1), (16, 4), (32, 8)), 64: ((8, 2), (16, 4), (32, 8), (64, 16)),
    4096: ((64, 2), (64, 4), (64, 8), (32, 4)),
}  # fmt: skip


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


def alone(model: str, cfg: RotaryConfig, tokens: int, small: bool, device: str, beside: bool = False) -> Point:
    """Return a rotation as ``performance.py`` times it."""
    spec, count = spec_of("rotary"), tokens if not small else 2 if tokens <= FEW else 17
    case = case_at("rotary", cfg, count)
    case = Case(case.name, cfg, dict(case.shape) | ({"max_position": 64} if small else {}), small=False)
    inputs, impl = inputs_of("rotary", case, device), rotary_triton.TritonRotary(cfg)
    peers = small_peers("rotary", cfg) if beside else {}
    peer = partial(spec.timed, peers["flashinfer"](cfg), inputs, None) if "flashinfer" in peers else None
    what = {"op": "rotary", "model": model, "tokens": tokens, "heads": list(case.shape["heads"])}
    return Point(
        what, partial(spec.timed, impl, inputs, None), partial(spec.run, impl, inputs, None), launches(tokens), peer
    )  # fmt: skip


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


def run(rows: Rows, small: bool, device: str, timed: bool, peer: bool) -> list[dict[str, Any]]:
    """Check and time all launches; return the rows of those with other bits."""
    clock, bad, beside = clock_for(device), list[dict[str, Any]](), list[tuple[Point, dict[str, Timed]]]()
    build = subprocess.Popen([sys.executable, "-c", BUILD]) if peer else None
    for made in points(small, device):
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
            best = sorted((name for name in ready if not name.startswith("now")), key=lambda name: times[name].us)[:2]
            beside.append((point, {name: call for name, call in ready.items() if name in best or "now" in name}))
    if build is not None and build.wait() == 0:
        for point, ready in beside:
            assert point.peer is not None
            turns = clock.measure(ready | {"flashinfer": clock.prepare(point.peer)}, PEER_ROUNDS)
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
    options = parser.parse_args()
    if options.compile:
        shapes = sorted({(8, 2), (32, 2), *(shape for each in SHAPES.values() for shape in each)})
        for cfg in (RotaryConfig(64, 64, True), RotaryConfig(64, 64), RotaryConfig(128, 128)):
            for shape in shapes:
                report = compile_for(build_of(cfg, *shape))
                print(json.dumps({"launch": report.name, "registers": report.registers, "spills": report.spills,
                                  "shared": report.shared}), flush=True)  # fmt: skip
        return
    options.device = "cpu" if options.check else options.device
    torch.manual_seed(0)
    rows, small = Rows(options), options.small or options.check
    finish(run(rows, small, options.device, not options.check, options.peer and not options.check))


if __name__ == "__main__":
    main()
