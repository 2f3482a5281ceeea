"""Try kernels for MXFP4 experts: ``python benchmarks/trials/mxfp4_experts.py --out FILE`` on a GPU of sm_90.

Every candidate is first checked against the fp32 oracle in a process of its own, all at once: what fails, crashes or
hangs there is left out, and compiling takes all cores. Those that are right then take turns with the shipped backends
in this process, by the clock of :mod:`fastlayers.tuning.clock`. One JSON line a row. Without a GPU:
``--compile`` builds each candidate for sm_90 and says what it takes, and fails where registers are spilled.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastlayers.moe.align.layer import num_blocks
from fastlayers.moe.align.triton import align
from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.reference import ReferenceFusedMoE
from fastlayers.moe.fused_moe.swizzle import SwizzledWeights
from fastlayers.moe.fused_moe.triton.mxfp4_rows import gather_kernel
from fastlayers.moe.fused_moe.triton.reduce import reduce
from fastlayers.moe.fused_moe.weights import MoEWeights
from fastlayers.registry import registry
from fastlayers.testing.compile_check import _ptxas_report
from fastlayers.tuning.bench import describe_run
from fastlayers.tuning.clock import CudaClock
from fastlayers.tuning.sweep import case_at, inputs_of

sys.path.insert(0, str(Path(__file__).parents[1]))
from trials import mxfp4_ring, mxfp4_wgmma

GPT_OSS = FusedMoEConfig(2880, 2880, 32, 4, quant="mxfp4", activation="swiglu_oai", bias=True, interleaved=True)
TOKENS = (32, 64, 128, 256)
# What is asked first, in case that time runs out.
ORDER = (128, 32, 64, 256)
SHIPPED = ("triton_swizzled", "triton_kernels")
# Relative to the oracle: the shipped kernels are at 2.3e-3 (bf16 between the products, bf16 at the end).
MOST_ERROR = 4e-3


@dataclass(frozen=True)
class Candidate:
    """Kernels and their sizes: tiles a warp, warps, steps of a turn, turns in the ring; registers a thread at most.

    ``block``: slots of a block at 32, 64, 128 and 256 tokens. ``direct``: the first product gathers its rows.
    ``fence``: between copies and ``wgmma``, which Triton's own pipelines do without behind copies of this kind.
    """

    kind: str
    tiles: int
    warps: int
    block: tuple[int, int, int, int]
    registers: int | None = None
    span: int = 1
    stages: int = 5
    direct: bool = False
    fence: bool = False

    def constants(self, block: int) -> dict[str, int]:
        """Return the constants that both products of a block have."""
        found = {"TOKENS": block, "R": self.tiles, "W": self.warps, "STAGES": self.stages}
        return found | ({"SPAN": self.span, "FENCE": int(self.fence)} if self.kind == "wgmma" else {})

    def options(self) -> dict[str, int]:
        """Return the launch options of both products."""
        return {"num_warps": self.warps} | ({} if self.registers is None else {"maxnreg": self.registers})

    def products(self) -> tuple[Any, Any]:
        """Return both products."""
        if self.kind == "wgmma":
            return mxfp4_wgmma.wgmma_gate_up_kernel, mxfp4_wgmma.wgmma_down_kernel
        return mxfp4_ring.ring_gate_up_kernel, mxfp4_ring.ring_down_kernel

    def block_for(self, tokens: int) -> int:
        """Return the slots of a block."""
        return self.block[sum(tokens > limit for limit in TOKENS[:-1])]


_WIDE, _NARROW = (16, 16, 32, 32), (8, 16, 32, 32)
CANDIDATES = {
    "wgmma 2x4": Candidate("wgmma", 2, 4, (16, 16, 32, 64)),
    "wgmma 2x4 fence": Candidate("wgmma", 2, 4, _WIDE, fence=True),
    "wgmma 2x4 direct": Candidate("wgmma", 2, 4, _WIDE, direct=True),
    "wgmma 3x4": Candidate("wgmma", 3, 4, _WIDE),
    "wgmma 2x8": Candidate("wgmma", 2, 8, _WIDE),
    "wgmma 1x8": Candidate("wgmma", 1, 8, _WIDE, registers=64),
    "wgmma 1x8 high": Candidate("wgmma", 1, 8, (32, 32, 64, 64), registers=80),
    "wgmma 1x8 span 3": Candidate("wgmma", 1, 8, _WIDE, span=3, stages=3),
    "ring 2x4": Candidate("ring", 2, 4, _NARROW),
    "ring 3x4": Candidate("ring", 3, 4, _NARROW),
    "ring 1x8": Candidate("ring", 1, 8, _NARROW, registers=64),
}


class TrialExperts:
    """A candidate, called like a backend."""

    def __init__(self, cfg: FusedMoEConfig, candidate: Candidate) -> None:
        self.cfg, self.candidate = cfg, candidate

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: SwizzledWeights
    ) -> torch.Tensor:
        """Return ``y``."""
        cfg, how, pairs = self.cfg, self.candidate, ids.numel()
        block = how.block_for(x.shape[0])
        hidden, inner, dependent = cfg.hidden_size, cfg.intermediate_size, {"PDL": True, "launch_pdl": True}
        first, second = how.products()
        blocks = num_blocks(pairs, cfg.num_experts, block)
        which = align(ids, cfg.num_experts, block)
        rows = x.new_empty(blocks * block, hidden)
        between = x.new_empty(blocks * block, inner)
        partial_sums = x.new_empty(pairs, hidden, dtype=torch.float32)
        y = torch.empty_like(x)
        constants = {"HIDDEN": hidden, "INNER": inner} | how.constants(block) | how.options() | dependent
        more: dict[str, int] = {}
        if how.kind == "ring":
            gather_kernel[(blocks * block,)](
                x, which[0], which[2], rows, x.stride(0), hidden, pairs, PER_TOKEN=cfg.top_k, BLOCK=4096, num_warps=4,
                **dependent,
            )  # fmt: skip
            rows, words = rows.view(torch.int32), between.view(torch.int32)
        else:
            words = between
            more = {"PER_TOKEN": cfg.top_k if how.direct else 0}
            if not how.direct:
                mxfp4_wgmma.slots_kernel[(blocks * block,)](
                    x, which[0], which[2], rows, pairs, PER_TOKEN=cfg.top_k, WIDTH=hidden, num_warps=4, **dependent
                )  # fmt: skip
        w13, w2, s13, s2 = packed.rows
        assert packed.w13_bias is not None and packed.w2_bias is not None
        height = 16 * how.tiles * how.warps
        first[(blocks * -(-2 * inner // height),)](
            x if how.direct else rows, w13, s13.view(torch.int32), packed.w13_bias, between, *which, pairs, cfg.alpha,
            cfg.limit, **constants, **more,
        )  # fmt: skip
        second[(blocks * -(-hidden // height),)](
            words, w2, s2.view(torch.int32), packed.w2_bias, weights, partial_sums, *which, pairs, **constants
        )  # fmt: skip
        reduce(partial_sums, ids, y, cfg.num_experts, cfg.scaling_factor)
        return y


# ---- without a GPU ---------------------------------------------------------------------------------------------

_TYPES = {"bias_ptr": "*fp32", "weights_ptr": "*fp32", "num_pairs": "i32", "alpha": "fp32", "limit": "fp32"}


def _signature(kernel: Any, second: bool, kind: str, constants: dict[str, int]) -> dict[str, str]:
    rows = "*i32" if kind == "ring" else "*bf16"
    types = _TYPES | {"x_ptr": rows, "a_ptr": rows, "out_ptr": "*fp32" if second else "*bf16"}
    return {
        name: "constexpr" if name in constants else types.get(name, "*i32")
        for name in kernel.arg_names
    }  # fmt: skip


def compiled(candidate: Candidate, block: int, second: bool, cfg: FusedMoEConfig = GPT_OSS) -> Any:
    """Return one of a candidate's products, compiled for sm_90."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = candidate.products()[second]
    constants = {"HIDDEN": cfg.hidden_size, "INNER": cfg.intermediate_size, "PDL": True} | candidate.constants(block)
    if candidate.kind == "wgmma" and not second:
        constants["PER_TOKEN"] = cfg.top_k if candidate.direct else 0
    signature = _signature(kernel, second, candidate.kind, constants)
    places = {name: (kernel.arg_names.index(name),) for name in kernel.arg_names}
    aligned = {places[name]: [["tt.divisibility", 16]] for name, kind in signature.items() if kind.startswith("*")}
    source = GluonASTSource(kernel, signature, {places[name]: value for name, value in constants.items()}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=candidate.options())


def report(name: str, block: int, second: bool) -> dict[str, Any]:
    """Return what one of a candidate's products takes of an SM."""
    made = compiled(CANDIDATES[name], block, second)
    registers, spills = _ptxas_report(made.asm["ptx"], 90)
    threads, shared = 32 * CANDIDATES[name].warps, int(made.metadata.shared)
    fit = min(65536 // (threads * -(-registers // 8) * 8), (227 << 10) // (shared + 1024), 2048 // threads)
    return {
        "compiled": name, "product": "down" if second else "gate_up", "block": block, "registers": registers,
        "spills": spills, "shared": shared, "programs_an_sm": fit,
    }  # fmt: skip


# ---- on the GPU ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """Inputs of the largest token count, of which each takes the first so many, and what the oracle says of them."""

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    packed: SwizzledWeights
    expected: torch.Tensor

    def calls(self, made: Any) -> Iterator[tuple[int, Callable[[], torch.Tensor]]]:
        """Yield token counts and calls."""
        for tokens in TOKENS:
            yield tokens, partial(made, self.x[:tokens], self.weights[:tokens], self.ids[:tokens], self.packed)

    def error(self, tokens: int, y: torch.Tensor) -> float:
        """Return the distance from the oracle, relative to its size; infinite where anything is no number."""
        wanted = self.expected[:tokens]
        if not bool(y.isfinite().all()):
            return float("inf")
        return float((y.float() - wanted).norm() / wanted.norm())


def drawn() -> Drawn:
    """Draw weights and tokens, pack, ask the oracle."""
    inputs = inputs_of("fused_moe", case_at("fused_moe", GPT_OSS, TOKENS[-1]), "cuda")
    names = ("w13", "w2", "w13_scale", "w2_scale", "w13_bias", "w2_bias")
    weights = MoEWeights(*(inputs[name] for name in names))
    x, topk, ids = inputs["x"], inputs["topk_weights"], inputs["topk_ids"]
    packed = registry("fused_moe").named("triton_swizzled").load()(GPT_OSS).pack(weights)
    return Drawn(x, topk, ids, packed, ReferenceFusedMoE(GPT_OSS)(x, topk, ids, weights))


@torch.inference_mode()
def check(name: str) -> list[dict[str, Any]]:
    """Return a row a token count: the error, and whether a second call gives the same bits."""
    inputs = drawn()
    calls = list(inputs.calls(TrialExperts(GPT_OSS, CANDIDATES[name])))
    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(torch.inference_mode()(call)) for _, call in calls]:
            done.result()
    rows = []
    for tokens, call in calls:
        torch.cuda.synchronize()
        # What is freed here is what the next call's memory holds: no number.
        torch.full((256 << 20,), float("nan"), device="cuda")
        y, again = call(), call()
        error, same = inputs.error(tokens, y), torch.equal(y, again)
        right = same and error < MOST_ERROR
        rows.append({"candidate": name, "tokens": tokens, "error": error, "same_bits": same, "right": right})
    return rows


def checked(names: list[str], seconds: float) -> Iterator[dict[str, Any]]:
    """Yield the rows of :func:`check` of each, a process each, all at once; one with an error for those that fail."""
    command = [sys.executable, __file__, "--check"]
    children = {
        name: subprocess.Popen([*command, name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for name in names
    }
    end = time.monotonic() + seconds
    for name, child in children.items():
        try:
            out, said = child.communicate(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            yield {"candidate": name, "right": False, "failed": f"not ready after {seconds:.0f} s"}
            continue
        if child.returncode != 0:
            last = (said.strip().splitlines() or ["no word"])[-1]
            yield {"candidate": name, "right": False, "failed": f"exit {child.returncode}: {last[:300]}"}
        for line in out.splitlines() if child.returncode == 0 else ():
            yield json.loads(line)


@torch.inference_mode()
def timed(right: dict[str, set[int]], rounds: int) -> Iterator[dict[str, Any]]:
    """Yield the microseconds of the shipped backends and of the candidates that are right, by turns."""
    inputs, clock = drawn(), CudaClock("cuda")
    for tokens in ORDER:
        ready = {}
        for name in (*SHIPPED, *(name for name in CANDIDATES if tokens in right.get(name, ()))):
            try:
                if name in SHIPPED:
                    made = registry("fused_moe").named(name).load()(GPT_OSS)
                else:
                    made = TrialExperts(GPT_OSS, CANDIDATES[name])
                call = dict(inputs.calls(made))[tokens]
                error = inputs.error(tokens, call())
                ready[name] = (clock.prepare(call), error)
            except Exception as found:
                if "CUDA error" in str(found):  # everything after it would fail as well
                    raise
                yield {"tokens": tokens, "name": name, "failed": f"{type(found).__name__}: {found}"[:300]}
        times = clock.measure({name: call for name, (call, _) in ready.items()}, rounds)
        for name, timing in times.items():
            yield {
                "tokens": tokens, "name": name, "us": round(timing.us, 2), "spread": round(timing.spread_us, 2),
                "error": ready[name][1],
            }  # fmt: skip


def main() -> None:
    """Check, then time; or compile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON lines")
    parser.add_argument("--only", nargs="+", choices=tuple(CANDIDATES), default=list(CANDIDATES), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=45.0, help="for all checks")
    parser.add_argument("--compile", action="store_true", help="for sm_90, without a GPU")
    parser.add_argument("--check", choices=tuple(CANDIDATES), metavar="NAME", help="one candidate, in this process")
    options = parser.parse_args()
    if options.check:
        for row in check(options.check):
            print(json.dumps(row))
        return
    lines: list[dict[str, Any]] = []

    def say(row: dict[str, Any]) -> None:
        lines.append(row)
        print(json.dumps(row), flush=True)
        if options.out:
            options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))

    if options.compile:
        builds = [(n, b, s) for n in options.only for b in sorted(set(CANDIDATES[n].block)) for s in (False, True)]
        for build in builds:
            say(report(*build))
        raise SystemExit(any(row["spills"] for row in lines))
    if not torch.cuda.is_available():
        parser.error("no GPU here; --compile needs none")
    begin = time.monotonic()
    say(describe_run(torch.device("cuda")) | {"run": "mxfp4 experts, trial", "shape": GPT_OSS.tuning_key()})
    right: dict[str, set[int]] = {}
    for row in checked(options.only, options.seconds):
        say(row)
        if row["right"]:
            right.setdefault(row["candidate"], set()).add(row["tokens"])
    say({"checks_seconds": round(time.monotonic() - begin, 1)})
    for row in timed(right, options.rounds):
        say(row)
    say({"seconds": round(time.monotonic() - begin, 1)})


if __name__ == "__main__":
    main()
