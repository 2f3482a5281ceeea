"""MLA's decode with heads as columns, a tile on its way while the one before is multiplied (Gluon, sm_90).

    turn   the tile's copies are there
           score = latents · queriesᵀ          asked for, and the next tile's copies while it runs
           softmax weights into shared memory
           acc += latentsᵀ · weights

What it computes is what ``columns_kernel`` of :mod:`fastlayers.attention.mla.wgmma` does, bit by bit: Triton asks for
the next tile only when a turn ends, and for three tiles there is no room. That one runs in Triton's interpreter, which
knows no Gluon.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from fastlayers.attention.mla.gluon import LN_2, LOWEST, part_of
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, release_dependents

RANK, ROPE = gl.constexpr(512), gl.constexpr(64)


@gluon.jit
def _copy(latents, ropes, tile, latent_at, rope_at, first, start, high, BLOCK_N: gl.constexpr):
    """Ask for the tile of cached rows that begins at ``first``; what lies outside of the request becomes zeros."""
    key = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, latent_at.type.layout))
    async_copy.async_copy_global_to_shared(latents, tile + latent_at, mask=((key < high) & (key >= start))[:, None])
    key = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, rope_at.type.layout))
    async_copy.async_copy_global_to_shared(ropes, tile + rope_at, mask=((key < high) & (key >= start))[:, None])
    async_copy.commit_group()


@kernel(do_not_specialize=("table_stride", "splits", "wanted", "requests", "num_rows"), jit=gluon.jit)
def gluon_columns_kernel(
    q_ptr, cache_ptr, table_ptr, starts_ptr, lens_ptr, o_ptr, lse_ptr, parts_ptr, q_stride_t, q_stride_h, page_stride,
    row_stride, table_stride, scale, splits, wanted, requests, num_rows, HEADS: gl.constexpr, PAGE: gl.constexpr,
    DIRECT: gl.constexpr, REQUESTS: gl.constexpr, LEAST: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Every request has one new token; a page holds whole tiles; four warps.

    ``REQUESTS``: a power of two that holds all requests, whose keys are shared out by their lengths; or 0.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    dtype: gl.constexpr = cache_ptr.dtype.element_ty
    await_inputs(PDL)
    release_dependents(PDL)
    if REQUESTS:
        request, split, part, parts = part_of(
            gl.program_id(0), lens_ptr, starts_ptr, requests, wanted, splits, REQUESTS, BLOCK_N, LEAST
        )
        if request >= requests:
            return
    else:
        request, split = gl.program_id(0), gl.program_id(1)
    token = request.to(gl.int64)
    head = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, MMA))
    if REQUESTS:
        gl.store(parts_ptr + token * HEADS + head, parts, mask=(head < HEADS) & (split == 0))
    start, end = gl.load(starts_ptr + request), gl.load(lens_ptr + request)
    low, high = start // BLOCK_N * BLOCK_N, end
    if not DIRECT:
        if not REQUESTS:
            part = gl.cdiv(gl.cdiv(gl.maximum(end - low, 0), splits), BLOCK_N) * BLOCK_N
        low += split * part
        high = gl.minimum(low + part, end)

    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    latents = gl.allocate_shared_memory(dtype, [2, BLOCK_N, RANK], swizzled)
    ropes = gl.allocate_shared_memory(dtype, [2, BLOCK_N, ROPE], swizzled)
    weights = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], gl.NVMMASharedLayout(32, 16, 2))
    latent_at = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, WIDE))[:, None] * row_stride
    latent_at = latent_at + gl.arange(0, RANK, layout=gl.SliceLayout(0, WIDE))[None, :]
    rope_at = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, NARROW))[:, None] * row_stride
    rope_at = rope_at + (RANK + gl.arange(0, ROPE, layout=gl.SliceLayout(0, NARROW)))[None, :]
    table = table_ptr + token * table_stride
    page = gl.load(table + low // PAGE, mask=low < high, other=0)
    tile = cache_ptr + page.to(gl.int64) * page_stride + (low % PAGE) * row_stride
    _copy(latents.index(0), ropes.index(0), tile, latent_at, rope_at, low, start, high, BLOCK_N)
    page = gl.load(table + (low + BLOCK_N) // PAGE, mask=low + BLOCK_N < high, other=0)

    q = q_ptr + token * q_stride_t
    row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, WIDE))
    places = q + row[:, None] * q_stride_h + gl.arange(0, RANK, layout=gl.SliceLayout(0, WIDE))[None, :]
    q_latent = gl.allocate_shared_memory(
        dtype, [BLOCK_M, RANK], swizzled, gl.load(places, mask=(row < HEADS)[:, None], other=0.0)
    )
    row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, NARROW))
    places = q + row[:, None] * q_stride_h + (RANK + gl.arange(0, ROPE, layout=gl.SliceLayout(0, NARROW)))[None, :]
    q_rope = gl.allocate_shared_memory(
        dtype, [BLOCK_M, ROPE], swizzled, gl.load(places, mask=(row < HEADS)[:, None], other=0.0)
    )
    hopper.fence_async_shared()
    highest = gl.full([BLOCK_M], LOWEST, gl.float32, gl.SliceLayout(0, MMA))
    total = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(0, MMA))
    acc = gl.zeros([RANK, BLOCK_M], gl.float32, MMA)
    here = 0
    for n in range(low, high, BLOCK_N):
        async_copy.wait_group(0)
        # All threads' copies are there, and nobody reads the other tile any longer.
        gl.thread_barrier()
        nothing = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)
        score = hopper.warpgroup_mma(
            latents.index(here), q_latent.permute((1, 0)), nothing, use_acc=False, is_async=True
        )  # fmt: skip
        score = hopper.warpgroup_mma(ropes.index(here), q_rope.permute((1, 0)), score, is_async=True)
        then = n + BLOCK_N
        if then < high:
            tile = cache_ptr + page.to(gl.int64) * page_stride + (then % PAGE) * row_stride
            _copy(latents.index(1 - here), ropes.index(1 - here), tile, latent_at, rope_at, then, start, high, BLOCK_N)
        page = gl.load(table + (then + BLOCK_N) // PAGE, mask=then + BLOCK_N < high, other=0)
        score = hopper.warpgroup_mma_wait(0, deps=[score]) * scale
        key = n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, MMA))[:, None]
        score = gl.where((key < high) & (key >= start), score, float("-inf"))
        new_highest = gl.maximum(highest, gl.max(score, axis=0))
        weight = gl.exp2(score - new_highest[None, :])
        decay = gl.exp2(highest - new_highest)
        total = total * decay + gl.sum(weight, axis=0)
        highest = new_highest
        weights.store(weight.to(dtype))
        acc = acc * decay[None, :]
        hopper.fence_async_shared()
        gl.thread_barrier()
        acc = hopper.warpgroup_mma(latents.index(here).permute((1, 0)), weights, acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        here = 1 - here
    base = token * HEADS
    if not DIRECT:
        base += split.to(gl.int64) * num_rows
    real = head < HEADS
    safe = gl.where(total > 0.0, total, 1.0)
    lse = gl.where(total > 0.0, (highest + gl.log2(safe)) * LN_2, float("-inf"))
    gl.store(lse_ptr + base + head, lse, mask=real)
    if DIRECT or low < high:
        column = gl.arange(0, RANK, layout=gl.SliceLayout(1, MMA))[:, None]
        o = (acc * (1.0 / safe)[None, :]).to(o_ptr.dtype.element_ty)
        gl.store(o_ptr + base * RANK + head[None, :] * RANK + column, o, mask=real[None, :])
