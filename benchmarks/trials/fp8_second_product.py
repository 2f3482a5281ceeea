"""Try the experts' second product over strips: ``python benchmarks/trials/fp8_second_product.py --out FILE`` on a GPU.

    --check       every variant on small sizes against today's kernel, interpreted on the CPU (TRITON_INTERPRET=1)
    --compile     what each variant takes when it is compiled for sm_90; needs no GPU

One rank of eight of DeepSeek-V3: 257 experts of 256 columns, FP8 in blocks, top 8 of 256 and the shared one, at random.
A program of today's kernel multiplies its pairs by one tile of outputs, K being two steps. A program of
:func:`strip_kernel` keeps its pairs' codes and scales and goes over several tiles in one pipelined loop, so that the
next weights are under way while a tile is multiplied and stored: the same products, scaled and added in the same
order. ``slabs``: both that and the sum over experts for some columns of all pairs, then for the next, whose pair rows
lie where the last ones lay: L2 holds them.

One JSON line a variant, the most promising first, each by turns with today's kernel over the weights of several
layers: ``same`` says whether its rows (or sums) have the bits of today's. What is predicted:
``benchmarks/notes/fused_moe_triton.md``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton.language as tl

from fastlayers.integers import cdiv
from fastlayers.moe.align.layer import num_blocks
from fastlayers.moe.align.triton import align
from fastlayers.moe.fused_moe.triton.grouped_gemm import along_pairs, down_kernel, product_of, program_tile
from fastlayers.moe.fused_moe.triton.reduce import launch_reduce
from fastlayers.runtime.launch import kernel
from fastlayers.testing.compile_check import KernelBuild, compile_for
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, release_dependents
from fastlayers.tuning.clock import Timed, clock_for

sys.path.insert(0, str(Path(__file__).parents[1]))
from rows import Rows, arguments, finish

INNER, GROUP, FACTOR = 256, 128, 2.5


@kernel(do_not_specialize=("num_pairs", "tiles_m", "first"))
def strip_kernel(
    a_ptr, as_ptr, w_ptr, ws_ptr, weights_ptr, out_ptr, sorted_ptr, expert_ptr, total_ptr,
    num_pairs, tiles_m, D, first, strips, out_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, BAND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply the pairs' 256 codes by TILES tiles of outputs, weigh; fp32 rows of pairs, columns from ``first`` on."""
    tile_m, strip = program_tile(tiles_m, strips, BAND)
    # The launch in front of the one in front has written these.
    total = tl.load(total_ptr)
    expert = tl.load(expert_ptr + tile_m).to(tl.int64)
    pair = tl.load(sorted_ptr + tile_m * BLOCK_M + tl.arange(0, BLOCK_M))
    await_inputs(PDL)
    release_dependents(PDL)
    if tile_m * BLOCK_M >= total:
        return
    real = pair < num_pairs
    row = tl.where(real, pair, 0).to(tl.int64)
    inside = strip * (TILES * BLOCK_N)
    begin = first + inside
    depth = tl.arange(0, 128)
    w_rows = w_ptr + expert * D * 256 + (begin + tl.arange(0, BLOCK_N))[None, :] * 256 + depth[:, None]
    w_scales = ws_ptr + expert * (D // 128) * 2
    a_rows = a_ptr + row[:, None] * 256 + depth[None, :]
    a0 = tl.load(a_rows, mask=real[:, None], other=0.0)
    a1 = tl.load(a_rows + 128, mask=real[:, None], other=0.0)
    s0 = tl.load(as_ptr + row * 2)
    s1 = tl.load(as_ptr + row * 2 + 1)
    weight = tl.load(weights_ptr + row)
    out = out_ptr + row[:, None] * out_stride + (inside + tl.arange(0, BLOCK_N))[None, :]
    SWAP: tl.constexpr = BLOCK_M < 64
    SHAPE: tl.constexpr = [BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N]
    t0 = tl.load(w_scales + begin // 128 * 2)
    t1 = tl.load(w_scales + begin // 128 * 2 + 1)
    for tile in range(0, TILES):
        w0 = tl.load(w_rows + tile * (BLOCK_N * 256))
        w1 = tl.load(w_rows + tile * (BLOCK_N * 256) + 128)
        # A tile ahead: nothing waits for a scale.
        following = w_scales + (begin + tl.minimum(tile + 1, TILES - 1) * BLOCK_N) // 128 * 2
        next0 = tl.load(following)
        next1 = tl.load(following + 1)
        acc = tl.zeros(SHAPE, tl.float32)
        acc += product_of(a0, w0, tl.zeros(SHAPE, tl.float32), SWAP) * along_pairs(s0 * t0, SWAP)
        acc += product_of(a1, w1, tl.zeros(SHAPE, tl.float32), SWAP) * along_pairs(s1 * t1, SWAP)
        if SWAP:
            acc = tl.trans(acc)
        tl.store(out + tile * BLOCK_N, acc * weight[:, None], mask=real[:, None])
        t0, t1 = next0, next1


@kernel(do_not_specialize=("tokens", "first"))
def slab_sum_kernel(
    partial_ptr, ids_ptr, y_ptr, tokens, D, num_experts, first, factor,
    PER_TOKEN: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add a token's valid pairs in order, rows of WIDTH columns, apply the factor once, round once."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, WIDTH)[None, :]
    await_inputs(PDL)
    release_dependents(PDL)
    total = tl.zeros([BLOCK_T, WIDTH], tl.float32)
    for j in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + j
        expert = tl.load(ids_ptr + pair, mask=token < tokens, other=-1)
        valid = (expert >= 0) & (expert < num_experts)
        total += tl.load(partial_ptr + pair[:, None] * WIDTH + column, mask=valid[:, None], other=0.0)
    y = y_ptr + token[:, None] * D + first + column
    tl.store(y, cast(total * factor, y_ptr.dtype.element_ty), mask=(token < tokens)[:, None])


@dataclass(frozen=True)
class Variant:
    """``tiles`` 0: today's kernel. ``slab``: columns that are multiplied and summed before the next; 0: all."""

    m: int
    n: int
    tiles: int
    warps: int
    stages: int
    band: int
    slab: int = 0
    registers: int | None = None

    @property
    def name(self) -> str:
        """How rows call it."""
        kind = f"{self.tiles} tiles" if self.tiles else "today"
        slab = f", slabs of {self.slab}" if self.slab else ""
        most = f", {self.registers} registers" if self.registers else ""
        return f"{kind} {self.m}x{self.n}, {self.warps} warps, {self.stages} stages, band {self.band}{slab}{most}"

    @property
    def options(self) -> dict[str, int]:
        """Options of a launch."""
        given = {"num_warps": self.warps, "num_stages": self.stages}
        return given | ({"maxnreg": self.registers} if self.registers else {})


# Today's by the rule, and what is tried beside it, the most promising first.
FEW, MANY = Variant(16, 128, 0, 4, 3, 1), Variant(64, 128, 0, 4, 4, 8)
OF_FEW = (
    Variant(16, 64, 8, 4, 4, 1), Variant(16, 128, 4, 4, 3, 1), Variant(16, 64, 4, 4, 4, 1),
    Variant(16, 128, 8, 4, 3, 1), Variant(16, 128, 0, 4, 2, 1), Variant(16, 64, 8, 4, 3, 1),
    Variant(16, 128, 4, 4, 2, 1), Variant(16, 64, 16, 4, 5, 1), Variant(16, 128, 4, 8, 3, 1),
)  # fmt: skip
OF_MANY = (
    Variant(64, 64, 8, 8, 2, 8), Variant(64, 64, 8, 4, 2, 8), Variant(64, 64, 0, 4, 3, 8), Variant(64, 128, 0, 8, 3, 8),
    Variant(64, 128, 8, 8, 2, 8, registers=128), Variant(64, 64, 8, 8, 3, 8), Variant(64, 32, 16, 4, 3, 8),
    Variant(128, 64, 8, 8, 2, 4, registers=128),
)  # fmt: skip
SUMMED = (
    Variant(64, 64, 4, 8, 2, 8, slab=256), Variant(64, 64, 2, 8, 2, 8, slab=128), Variant(64, 64, 8, 8, 2, 8, slab=512),
    Variant(128, 64, 4, 8, 2, 4, slab=256, registers=128),
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """A layer of so many experts and columns, how many layers, how many tokens, and how often all is timed."""

    experts: int = 256
    top_k: int = 8
    hidden: int = 7168
    layers: int = 4
    few: tuple[int, ...] = (64, 128)
    many: int = 4096
    rounds: int = 30


SMALL = Sizes(4, 2, 1024, 2, (3, 20), 40, 1)


class Weights:
    """Codes and scales of several layers."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        self.sizes, self.device = sizes, device
        shape = sizes.experts + 1, sizes.hidden, INNER
        self.codes = [codes_of(shape, device) for _ in range(sizes.layers)]
        blocks = sizes.experts + 1, sizes.hidden // GROUP, INNER // GROUP
        self.scales = [torch.rand(blocks, device=device) + 0.5 for _ in range(sizes.layers)]


def codes_of(shape: tuple[int, ...], device: str) -> torch.Tensor:
    """Return codes; on a CPU small integers, whose sums are exact in whatever order the interpreter adds."""
    if device == "cpu":
        return torch.randint(-4, 5, shape).float().to(torch.float8_e4m3fn)
    return torch.randn(shape, device=device, dtype=torch.float16).to(torch.float8_e4m3fn)


class Point:
    """Tokens with their experts, and calls over all layers."""

    def __init__(self, weights: Weights, tokens: int) -> None:
        sizes, device = weights.sizes, weights.device
        self.weights, self.sizes, self.tokens = weights, sizes, tokens
        routed = torch.rand(tokens, sizes.experts, device=device).topk(sizes.top_k).indices
        shared = torch.full((tokens, 1), sizes.experts, device=device)
        self.ids = torch.cat([routed, shared], 1).to(torch.int32)
        self.pairs = self.ids.numel()
        self.mix = torch.rand(tokens, sizes.top_k + 1, device=device)
        self.codes = codes_of((self.pairs, INNER), device)
        self.scales = torch.rand(self.pairs, INNER // GROUP, device=device) + 0.5
        self.rows = torch.empty(self.pairs, sizes.hidden, device=device)
        self.y = torch.empty(tokens, sizes.hidden, device=device, dtype=torch.bfloat16)
        self.early = dependent_launch(self.codes.device)
        self.aligned: dict[int, tuple[torch.Tensor, ...]] = {}

    def blocks(self, m: int) -> tuple[torch.Tensor, ...]:
        """Return the pairs by their experts, in blocks of ``m``."""
        return self.aligned.setdefault(m, align(self.ids, self.sizes.experts + 1, m))

    def product(self, how: Variant) -> Callable[[int], None]:
        """Return what writes the pair rows of a layer."""
        hidden, weights, aligned = self.sizes.hidden, self.weights, self.blocks(how.m)
        blocks = num_blocks(self.pairs, self.sizes.experts + 1, how.m)
        more: dict[str, Any] = {**how.options, **self.early}
        if how.tiles == 0:
            launch = down_kernel.at(
                (blocks * cdiv(hidden, how.n),), self.pairs, blocks, hidden, INNER, INNER, QUANT=1, WIDE=False,
                HAS_BIAS=False, EVEN_K=True, BLOCK_M=how.m, BLOCK_N=how.n, BLOCK_K=GROUP, BAND=how.band, **more,
            )  # fmt: skip

            def today(layer: int) -> None:
                w, s = weights.codes[layer], weights.scales[layer]
                launch(self.codes, self.scales, w, s, self.mix, self.mix, self.rows, *aligned)

            return today
        launch = self.strips(how, 0, hidden)
        return lambda layer: launch(*self.operands(layer), self.rows, *aligned)

    def operands(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return what a strip reads."""
        return self.codes, self.scales, self.weights.codes[layer], self.weights.scales[layer], self.mix

    def strips(self, how: Variant, first: int, width: int) -> Callable[..., None]:
        """Return a launch for so many columns."""
        blocks, strips = num_blocks(self.pairs, self.sizes.experts + 1, how.m), width // (how.n * how.tiles)
        assert strips * how.n * how.tiles == width
        launch: Callable[..., None] = strip_kernel.at(
            (blocks * strips,), self.pairs, blocks, self.sizes.hidden, first, strips, width, BLOCK_M=how.m,
            BLOCK_N=how.n, TILES=how.tiles, BAND=how.band, **how.options, **self.early,
        )  # fmt: skip
        return launch

    def summed(self, how: Variant) -> Callable[[int], None]:
        """Return what writes the sums over experts of a layer."""
        hidden, per_token, experts = self.sizes.hidden, self.sizes.top_k + 1, self.sizes.experts + 1
        if how.slab == 0:
            product = self.product(how)
            add = launch_reduce(self.tokens, hidden, per_token, experts, FACTOR, 1, self.rows.device)

            def apart(layer: int) -> None:
                product(layer)
                add(self.rows, self.ids, self.y)

            return apart
        firsts, aligned = range(0, hidden, how.slab), self.blocks(how.m)
        multiply = [self.strips(how, first, how.slab) for first in firsts]
        sums = [
            slab_sum_kernel.at(
                (cdiv(self.tokens, 4),), self.tokens, hidden, experts, first, FACTOR, PER_TOKEN=per_token,
                WIDTH=how.slab, BLOCK_T=4, num_warps=4, **self.early,
            ) for first in firsts
        ]  # fmt: skip

        def slabs(layer: int) -> None:
            for product, add in zip(multiply, sums, strict=True):
                product(*self.operands(layer), self.rows, *aligned)
                add(self.rows, self.ids, self.y)

        return slabs

    def over_layers(self, call: Callable[[int], None]) -> Callable[[], None]:
        """Return a call for all layers: weights of one are gone from L2 when its turn comes again."""

        def calls() -> None:
            for layer in range(self.sizes.layers):
                call(layer)

        return calls


def points(weights: Weights) -> Iterator[tuple[Point, bool, Variant, tuple[Variant, ...]]]:
    """Yield tokens, whether sums are timed, too, today's kernel and what stands beside it."""
    sizes = weights.sizes
    for tokens in sizes.few:
        yield Point(weights, tokens), False, FEW, OF_FEW
    prompt = Point(weights, sizes.many)
    yield prompt, True, MANY, SUMMED[:2]
    yield prompt, False, MANY, OF_MANY
    yield prompt, True, MANY, SUMMED[2:]


def run(rows: Rows, weights: Weights, device: str, timed: bool) -> list[dict[str, Any]]:
    """Check and time all variants; return the rows of those with other bits."""
    clock, bad = clock_for(device, cold=False), list[dict[str, Any]]()
    for point, sums, usual, variants in points(weights):
        of, written = (point.summed, point.y) if sums else (point.product, point.rows)
        what = {"tokens": point.tokens, "what": "second product and sum" if sums else "second product"}
        if rows.late(**what):
            continue
        today, last = of(usual), point.sizes.layers - 1
        today(last)
        wanted, ready = written.clone(), dict[str, Timed]()
        if timed:
            ready["today"] = clock.prepare(point.over_layers(today))
        for how in variants:
            if rows.late(**what, variant=how.name):
                continue
            call = of(how)
            written.fill_(float("nan"))
            call(last)
            row = {**what, "variant": how.name, "same": torch.equal(written, wanted), **asdict(how)}
            if timed:
                ready["now"] = clock.prepare(point.over_layers(call))
                # A prompt's calls are long: fewer turns tell them apart.
                turns = point.sizes.rounds if point.tokens < 1024 else max(1, point.sizes.rounds // 3)
                for name, timing in clock.measure(ready, turns).items():
                    each = point.sizes.layers
                    row |= {
                        f"{name}_us": round(timing.us / each, 2),
                        f"{name}_spread": round(timing.spread_us / each, 2),
                    }
            rows.put(row)
            bad += [] if row["same"] else [row]
    return bad


def build_of(how: Variant, hidden: int = 7168) -> KernelBuild:
    """Return how a variant is compiled."""
    pointers = {
        "a_ptr": "*fp8e4nv", "as_ptr": "*fp32", "w_ptr": "*fp8e4nv", "ws_ptr": "*fp32", "weights_ptr": "*fp32",
        "out_ptr": "*fp32", "sorted_ptr": "*i32", "expert_ptr": "*i32", "total_ptr": "*i32", "num_pairs": "i32",
        "tiles_m": "i32", "D": "i32",
    }  # fmt: skip
    tile = {"BLOCK_M": how.m, "BLOCK_N": how.n, "BAND": how.band, "PDL": True}
    if how.tiles == 0:
        given = tile | {"QUANT": 1, "WIDE": False, "HAS_BIAS": False, "EVEN_K": True, "BLOCK_K": GROUP}
        signature = pointers | {"bias_ptr": "*fp32", "I": "i32", "a_stride": "i32"}
        sizes = "D", "I", "a_stride"
        return KernelBuild(
            how.name, down_kernel, signature, given, how.warps, how.stages, sizes, registers=how.registers
        )  # fmt: skip
    signature, given = pointers | {"first": "i32", "out_stride": "i32"}, tile | {"TILES": how.tiles}
    width, aligned = how.slab or hidden, ["D", "out_stride"]
    strips = width // (how.n * how.tiles)
    signature |= {} if strips == 1 else {"strips": "i32"}
    given |= {"strips": 1} if strips == 1 else {}
    aligned += ["strips"] if strips % 16 == 0 else []
    return KernelBuild(
        how.name, strip_kernel, signature, given, how.warps, how.stages, tuple(aligned), registers=how.registers
    )  # fmt: skip


def compiled(how: Variant) -> dict[str, Any]:
    """Return what a variant takes on sm_90, and how many bytes of weights a multiprocessor has under way at most."""
    report = compile_for(build_of(how))
    registers = -(-report.registers // 8) * 8
    places = min(65536 // (registers * 32 * how.warps), 2048 // (32 * how.warps), 228 // (report.shared / 1024 + 1))
    # Today's loop is of two steps of 128 columns, all of which are asked for at once where there is room for both.
    ahead = min(how.stages - 1, how.tiles) * INNER if how.tiles else min(how.stages - 1, 2) * GROUP
    return {
        "variant": how.name, "registers": report.registers, "spills": report.spills, "shared": report.shared,
        "programs": int(places), "under_way_kb": round(int(places) * ahead * how.n / 1024, 1),
    }  # fmt: skip


@torch.inference_mode()
def main() -> None:
    """Compile, check, or check and time."""
    parser = arguments(__doc__, 50.0)
    parser.add_argument("--check", action="store_true", help="only bits, on small sizes and on the CPU")
    parser.add_argument("--compile", action="store_true", help="only what the variants take; needs no GPU")
    options = parser.parse_args()
    if options.compile:
        for how in (FEW, *OF_FEW, MANY, *OF_MANY, *SUMMED):
            print(json.dumps(compiled(how)), flush=True)
        return
    small = options.small or options.check
    options.device = "cpu" if options.check else options.device
    torch.manual_seed(0)
    rows = Rows(options)
    weights = Weights(SMALL if small else Sizes(), options.device)
    finish(run(rows, weights, options.device, not options.check))


if __name__ == "__main__":
    main()
