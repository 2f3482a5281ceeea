"""Try what moves rows around the grouped products of a prompt: ``python benchmarks/trials/prompt_rows.py --out FILE``.

    --check       every way on small sizes against the library's, interpreted on the CPU (TRITON_INTERPRET=1)
    --compile     what each way of scattering takes when it is compiled for sm_90; needs no GPU
    --op OP       only one of those below

Of FP8 experts of 4,096 tokens: rows to the order of experts (``scatter``), and norms that write codes (``norm``). Of
these and fewer tokens, of FP8 and of bf16 experts, the activation between the products (``activate``) by pairs and by
blocks of rows: from how many tokens on are blocks ahead? One JSON line a way, all of a point by turns, first the
library's: ``same`` says whether a way's outputs have its bits. What was predicted and came:
``benchmarks/notes/tp8_layer.md``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton.language as tl

from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.triton import activation
from fastlayers.moe.fused_moe.triton.permute import COLUMN_SCALES, WIDTH, Rows, empty_scales, place, scatter
from fastlayers.moe.fused_moe.weights import EPS, GROUP
from fastlayers.norm.rms_norm import coded
from fastlayers.quant.coded_rows import empty_codes
from fastlayers.quant.group_quant.triton import quantize_tile
from fastlayers.runtime.launch import kernel
from fastlayers.testing.compile_check import KernelBuild, compile_for
from fastlayers.triton_lang import dependent_launch
from fastlayers.tuning.clock import clock_for

sys.path.insert(0, str(Path(__file__).parents[1]))
from rows import Rows as Lines
from rows import arguments, finish

ROUNDS, ALIGN, TOKENS = 60, 128, 4096
Outputs = dict[str, torch.Tensor]


@kernel
def ahead_kernel(
    x_ptr, row_ptr, q_ptr, s_ptr, x_stride, width, groups, s_stride, eps,
    PAIRS: tl.constexpr, AHEAD: tl.constexpr, NARROW: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Quantise GROUPS groups of a token for all its pairs; AHEAD: their rows are asked for before its values."""
    token = tl.program_id(0).to(tl.int64)
    rows = ()
    for j in tl.static_range(PAIRS if AHEAD else 0):
        rows = rows + (tl.load(row_ptr + token * PAIRS + j).to(tl.int64),)  # type: ignore[assignment]  # noqa: RUF005
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = column < width
    x = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0)
    codes, scale = quantize_tile(x.to(tl.float32), eps, 448.0, False, False, NARROW)
    for j in tl.static_range(PAIRS):
        row = rows[j] if AHEAD else tl.load(row_ptr + token * PAIRS + j).to(tl.int64)
        if row >= 0:
            tl.store(q_ptr + row * width + column, codes, mask=inside)
            tl.store(s_ptr + group * s_stride + row, scale, mask=group < groups)


@dataclass(frozen=True)
class Experts:
    """Experts of a model: routed and shared ones, chosen of a token, sizes."""

    name: str
    experts: int
    shared: int
    top_k: int
    hidden: int
    inner: int

    @property
    def pairs(self) -> int:
        """Rows of a token."""
        return self.top_k + self.shared


MODELS = Experts("DeepSeek-V3 tp8", 256, 1, 8, 7168, 256), Experts("Qwen3-30B-A3B", 128, 0, 8, 2048, 768)
SMALL = Experts("small", 6, 1, 2, 384, 256), Experts("smaller", 4, 0, 2, 256, 128)
# Groups and warps of a program of rows, whether the places come first, and whether one correction is saved.
SCATTERS = (
    (8, 4, True, False), (8, 4, False, True), (8, 4, True, True), (8, 2, True, True), (16, 4, True, True),
    (4, 2, True, True),
)  # fmt: skip
# Tokens of activations, the most wanted first: around those from which the library takes blocks.
ACTIVATED = TOKENS, 1024, 512, 2048, 256, 64
# Columns of a row, those between rows, whether there is a sum, and warps; the first are the library's.
NORMS = ((1536, 2112, False, (4, 1, 2)), (7168, 7168, True, (16, 8, 4)))


def used(rows: Rows, found: tuple[torch.Tensor, torch.Tensor]) -> Outputs:
    """Return the rows that some pair has, in the order of pairs."""
    codes, scales = found
    row = rows.row_of[rows.row_of >= 0].long()
    return {"codes": codes.view(torch.uint8)[row], "scales": scales[row]}


def by_rows(x: torch.Tensor, rows: Rows, model: Experts, way: tuple[int, int, bool, bool]) -> tuple[Any, Any]:
    """Scatter by :func:`ahead_kernel`."""
    each, warps, ahead, narrow = way
    groups = cdiv(model.hidden, GROUP)
    q = x.new_empty(rows.total, model.hidden, dtype=torch.float8_e4m3fn)
    s, stride = empty_scales(rows, groups, COLUMN_SCALES)
    ahead_kernel[(x.shape[0], cdiv(groups, each))](
        x, rows.row_of, q, s, x.stride(0), model.hidden, groups, stride, EPS,
        PAIRS=model.pairs, AHEAD=ahead, NARROW=narrow, GROUPS=each, num_warps=warps,
    )  # fmt: skip
    return q, s


def normed(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, warps: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norm rows to codes with so many warps each."""
    (count, hidden), (codes, scales) = x.shape, empty_codes(x, "columns")
    other, summed = (x, codes) if residual is None else (residual, x.new_empty(x.shape))
    coded._coded_norm_kernel.at(
        (count,), x.stride(0), other.stride(0), *scales.stride(), hidden, 1e-6, ROUNDING=0,
        HAS_RESIDUAL=residual is not None, BLOCK=max(128, next_power_of_2(hidden)), num_warps=warps,
        **dependent_launch(x.device),
    )(x, other, weight, codes, scales, summed)  # fmt: skip
    return codes, scales, summed


@dataclass
class Point:
    """Ways to do one thing, the library's first: what they are called, what runs them, and what they return."""

    what: dict[str, Any]
    ways: Mapping[str, Callable[[], Any]]
    outputs: Callable[[Any], Outputs]


def placed(model: Experts, tokens: int, device: str) -> tuple[torch.Tensor, Rows]:
    """Return experts of so many tokens, and the rows of their pairs."""
    scores = torch.rand(tokens, model.experts, device=device)
    ids = scores.topk(model.top_k, dim=1).indices.int().contiguous()
    return ids, place(ids, model.experts, model.shared, align=ALIGN)


def activated(model: Experts, tokens: int, quant: str, device: str) -> Point:
    """Return both ways of the activation, first the one that the library takes."""
    ids, rows = placed(model, tokens, device)
    h = torch.randn(rows.total, 2 * model.inner, device=device).bfloat16()
    cfg = FusedMoEConfig(
        hidden_size=model.hidden, intermediate_size=model.inner, num_experts=model.experts, top_k=model.top_k,
        num_shared=model.shared, quant=quant,
    )  # fmt: skip
    ways = {
        "pairs": partial(activation.by_pairs, h, ids, None, rows, cfg, COLUMN_SCALES),
        "blocks": partial(activation.by_blocks, h, None, rows, cfg, COLUMN_SCALES),
    }
    taken = ("pairs", "blocks")[activation.takes_blocks(rows, has_bias=False, quantised=quant == "fp8_block")]
    what = {"op": "activate", "model": model.name, "tokens": tokens, "quant": quant, "taken": taken}
    return Point(what, {taken: ways[taken]} | ways, partial(used, rows))


def points(device: str, small: bool) -> Iterator[Point]:
    """Yield what is tried."""
    count = 17 if small else TOKENS
    for model in SMALL if small else MODELS:
        _, rows = placed(model, count, device)
        x = torch.randn(count, model.hidden, device=device).bfloat16()
        tried = {
            f"{each} x {warps}{', places first' * ahead}{', narrow' * narrow}":
                partial(by_rows, x, rows, model, (each, warps, ahead, narrow))
            for each, warps, ahead, narrow in SCATTERS
        }  # fmt: skip
        now = partial(scatter, x, rows, "fp8_block", False, COLUMN_SCALES)
        what = {"model": model.name, "tokens": count}
        yield Point({"op": "scatter", **what}, {"now": now, **tried}, partial(used, rows))
        for tokens in (count,) if small else ACTIVATED:
            yield activated(model, tokens, "fp8_block", device)
        yield activated(model, count, "none", device)
    for hidden, stride, summed, all_warps in NORMS[: 1 if small else None]:
        x = torch.randn(count, stride, device=device).bfloat16()[:, :hidden]
        residual = torch.randn(count, hidden, device=device).bfloat16() if summed else None
        weight = torch.rand(hidden, device=device).bfloat16()
        norms = {f"{warps} warps": partial(normed, x, weight, residual, warps) for warps in all_warps}
        what = {"op": "norm", "columns": hidden, "tokens": count}
        yield Point(what, norms, lambda found: {"codes": found[0].view(torch.uint8), "scales": found[1]})


def run(lines: Lines, device: str, small: bool, timed: bool, only: str | None) -> list[dict[str, Any]]:
    """Check and time all ways of all operations, or of one; return the rows of those with other bits."""
    clock, bad = clock_for(device), list[dict[str, Any]]()
    for point in points(device, small):
        if only not in (None, point.what["op"]) or lines.late(**point.what):
            continue
        wanted, found, ready = dict[str, torch.Tensor](), list[dict[str, Any]](), {}
        for name, call in point.ways.items():
            results = point.outputs(call())
            wanted = wanted or results
            same = all(torch.equal(results[key], x) for key, x in wanted.items())
            found.append({**point.what, "way": name, "same": same})
            if timed:
                ready[name] = clock.prepare(call)
        times = clock.measure(ready, ROUNDS) if timed else {}
        for row in found:
            if timed:
                timing = times[row["way"]]
                row |= {"us": round(timing.us, 2), "spread_us": round(timing.spread_us, 2)}
            lines.put(row)
            bad += [] if row["same"] else [row]
    return bad


def builds() -> Iterator[KernelBuild]:
    """Yield how each way of scattering is compiled for DeepSeek-V3's sizes."""
    sizes = dict.fromkeys(("x_stride", "width", "groups", "s_stride"), "i32")
    deepseek = MODELS[0]
    for each, warps, ahead, narrow in SCATTERS:
        signature = {"x_ptr": "*bf16", "row_ptr": "*i32", "q_ptr": "*fp8e4nv", "s_ptr": "*fp32", "eps": "fp32", **sizes}
        given = {"PAIRS": deepseek.pairs, "AHEAD": ahead, "NARROW": narrow, "GROUPS": each}
        yield KernelBuild(
            f"scatter {each} x {warps} {ahead} {narrow}", ahead_kernel, signature, given, warps,
            aligned=("x_stride", "width", "s_stride"),
        )  # fmt: skip


def main() -> None:
    """Compile, check, or check and time."""
    parser = arguments(__doc__, 60.0)
    parser.add_argument("--check", action="store_true", help="only bits, on small sizes and on the CPU")
    parser.add_argument("--compile", action="store_true", help="only what the ways take; needs no GPU")
    parser.add_argument("--op", choices=("scatter", "activate", "norm"), help="only this")
    options = parser.parse_args()
    if options.compile:
        for report in map(compile_for, builds()):
            print(json.dumps({"way": report.name, "registers": report.registers, "spills": report.spills}), flush=True)
        return
    options.device = "cpu" if options.check else options.device
    torch.manual_seed(0)
    small = options.small or options.check
    finish(run(Lines(options), options.device, small, not options.check, options.op))


if __name__ == "__main__":
    main()
