"""The experts' second product of FP8 in blocks over strips of outputs.

    rows[pair] = weight[pair] * (codes of a[pair] @ w2[expert of pair]^T)    fp32    programs: blocks of pairs × strips

:func:`~fastlayers.moe.fused_moe.triton.grouped_gemm.down_kernel` has a program for each tile of outputs. Where experts
have few columns, as those of one rank of eight, its loop over them ends after two steps: before it and behind it the
program waits, for the first weights and for its stores. Here a program keeps its pairs' codes and scales, and goes over
TILES tiles of outputs in one loop, in which the next tiles' weights are under way while one is multiplied and stored.
The same products are scaled and added in the same order: the bits are those of that kernel. What it gains is in
benchmarks/notes/fused_moe_triton.md.
"""

from __future__ import annotations

import triton.language as tl

from fastlayers.moe.fused_moe.triton.grouped_gemm import along_pairs, product_of, program_tile
from fastlayers.moe.fused_moe.weights import GROUP
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, release_dependents

_GROUP = tl.constexpr(GROUP)


@kernel(do_not_specialize=("num_pairs", "tiles_m"))
def strip_kernel(
    a_ptr, as_ptr, w_ptr, ws_ptr, weights_ptr, out_ptr, sorted_ptr, expert_ptr, total_ptr,
    num_pairs, tiles_m, D,
    WIDE: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
    BAND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply the pairs' GROUPS groups of codes by TILES tiles of BLOCK_N outputs, and weigh; fp32 rows of pairs.

    D is a multiple of ``BLOCK_N * TILES`` and of a group, BLOCK_N a divisor of a group.
    """
    I: tl.constexpr = GROUPS * _GROUP
    tile_m, strip = program_tile(tiles_m, D // (BLOCK_N * TILES), BAND)
    # Aligned by a launch in front of the one in front, which has waited for it.
    total = tl.load(total_ptr)
    expert = tl.load(expert_ptr + tile_m).to(tl.int64)
    pair = tl.load(sorted_ptr + tile_m * BLOCK_M + tl.arange(0, BLOCK_M))
    await_inputs(PDL)
    release_dependents(PDL)
    if tile_m * BLOCK_M >= total:
        return
    real = pair < num_pairs
    # A slot without a pair takes pair 0's scales, which may be dropped and never written: it is masked below.
    row = tl.where(real, pair, 0).to(tl.int64)
    begin = strip * (BLOCK_N * TILES)
    depth = tl.arange(0, _GROUP)
    w_rows = w_ptr + expert * D * I + (begin + tl.arange(0, BLOCK_N))[None, :] * I + depth[:, None]
    w_scales = ws_ptr + expert * (D // _GROUP) * GROUPS
    a_rows = a_ptr + row[:, None] * I + depth[None, :]
    codes, scales, current = (), (), ()
    for group in tl.static_range(GROUPS):
        codes = codes + (tl.load(a_rows + group * _GROUP, mask=real[:, None], other=0.0),)  # type: ignore[assignment]
        scales = scales + (tl.load(as_ptr + row * GROUPS + group),)  # type: ignore[assignment]
        current = current + (tl.load(w_scales + begin // _GROUP * GROUPS + group),)  # type: ignore[assignment]
    weight = tl.load(weights_ptr + row)
    out = out_ptr + row[:, None] * D + (begin + tl.arange(0, BLOCK_N))[None, :]
    SWAP: tl.constexpr = BLOCK_M < 64 and BLOCK_N >= 64
    SHAPE: tl.constexpr = [BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N]
    for tile in range(0, TILES):
        w, following = (), ()
        # A tile ahead: nothing waits for a scale.
        ahead = w_scales + (begin + tl.minimum(tile + 1, TILES - 1) * BLOCK_N) // _GROUP * GROUPS
        for group in tl.static_range(GROUPS):
            w = w + (tl.load(w_rows + tile * (BLOCK_N * I) + group * _GROUP),)  # type: ignore[assignment]
            following = following + (tl.load(ahead + group),)  # type: ignore[assignment]
        acc = tl.zeros(SHAPE, tl.float32)
        for group in tl.static_range(GROUPS):
            if WIDE:
                product = product_of(
                    codes[group].to(tl.bfloat16), w[group].to(tl.bfloat16), tl.zeros(SHAPE, tl.float32), SWAP
                )
            else:
                product = product_of(codes[group], w[group], tl.zeros(SHAPE, tl.float32), SWAP)
            acc += product * along_pairs(scales[group] * current[group], SWAP)
        if SWAP:
            acc = tl.trans(acc)
        tl.store(out + tile * BLOCK_N, acc * weight[:, None], mask=real[:, None])
        current = following
