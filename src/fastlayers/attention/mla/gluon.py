"""MLA's decode over an e4m3 cache in exact fp16, four kinds of work at once in warps of their own (Gluon, sm_90).

    program = (part of a request's cached rows, 64 of its heads), alone on its multiprocessor
      convert  4 warps   codes from memory into registers a tile ahead, to fp16, into a ring of tiles in shared memory
      score    4 warps   queries in fp16 once; each tile's products with them, softmax, weights into shared memory
      value    8 warps   64 x 512 sums in fp32, half of the latent columns a warp group: rescale, add weights · latents

Who reads a tile next is told by barriers in shared memory. e4m3 is fp16 exactly; queries are multiples of a power of
two of their row, softmax weights of 2^-14, as in :mod:`fastlayers.attention.mla.triton`, whose kernel with tiles of 64
cached rows does the same sums in the same order of tiles: that is what runs in Triton's interpreter, which knows no
Gluon. Requests are cut and their parts added up as there.
"""

# ruff: noqa: RUF005
# Inside a Gluon kernel tuples grow in unrolled loops.
# mypy: disable-error-code="assignment, has-type, var-annotated"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, release_dependents

# Widths of a cached row's two pieces, and the heads of a program.
RANK, ROPE, ROWS = gl.constexpr(512), gl.constexpr(64), gl.constexpr(64)
# Cached rows a tile, tiles in the ring; registers a thread that scores or converts has, of 512 threads.
KEYS, STAGES = gl.constexpr(64), gl.constexpr(2)
VALUE_WARPS, SCORE_REGISTERS, CONVERT_REGISTERS = 8, gl.constexpr(72), gl.constexpr(120)
LOWEST = gl.constexpr(-1e30)
LN_2 = gl.constexpr(0.6931471805599453)
QUERY_UNIT = gl.constexpr(2.0**-14)
WEIGHT_UNIT = gl.constexpr(2.0**14)
SMALLEST = gl.constexpr(2.0**-100)
# More than all parts of a launch.
PARTS = gl.constexpr(1 << 16)
# Four codes of a word, two and two.
CONVERT = gl.constexpr(
    "{.reg .b16 low, high; .reg .b32 first, last; mov.b32 {low, high}, $4;"
    " cvt.rn.f16x2.e4m3x2 first, low; cvt.rn.f16x2.e4m3x2 last, high;"
    " mov.b32 {$0, $1}, first; mov.b32 {$2, $3}, last;}"
)


@gluon.constexpr_function
def lengths_by(requests, warps):
    """Return how lengths of so many requests lie: all of them in each warp, so that sums cross none."""
    return gl.BlockedLayout([requests // 32], [32], [warps], [0])


@gluon.jit
def _added(a, b):
    return a + b


@gluon.jit
def part_of(
    slot, lens_ptr, starts_ptr, requests, wanted, splits, REQUESTS: gl.constexpr, BLOCK_N: gl.constexpr,
    LEAST: gl.constexpr,
):  # fmt: skip
    """Return whose part a program computes, as ``fastlayers.attention.mla.triton._part_of`` does, line by line."""
    every = gl.arange(0, REQUESTS, layout=lengths_by(REQUESTS, gl.num_warps()))
    real = every < requests
    first = gl.load(starts_ptr + every, mask=real, other=0) // BLOCK_N * BLOCK_N
    keys = gl.where(real, gl.maximum(gl.load(lens_ptr + every, mask=real, other=0) - first, 1), 0)
    usual = gl.maximum(gl.cdiv(gl.sum(keys, axis=0), requests * wanted), LEAST)
    part = gl.cdiv(gl.maximum(gl.cdiv(keys, splits), usual), BLOCK_N) * BLOCK_N
    parts = gl.cdiv(keys, part)
    last = gl.associative_scan(parts, 0, _added)
    before = gl.max(gl.where(last <= slot, (every + 1) * PARTS + last, 0), axis=0)
    request, gone = before // PARTS, before % PARTS
    known = request < requests
    first = gl.load(starts_ptr + request, mask=known, other=0) // BLOCK_N * BLOCK_N
    keys = gl.maximum(gl.load(lens_ptr + request, mask=known, other=0) - first, 1)
    part = gl.cdiv(gl.maximum(gl.cdiv(keys, splits), usual), BLOCK_N) * BLOCK_N
    return request, slot - gone, part, gl.cdiv(keys, part)


@gluon.jit
def _halves(words):
    """Return fp16 ``[KEYS, 64]`` of words ``[KEYS, 16]`` of four codes each."""
    v = gl.inline_asm_elementwise(
        CONVERT, "=h,=h,=h,=h,r", [words], dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=1
    )
    return gl.reshape(gl.join(gl.join(v[0], v[2]), gl.join(v[1], v[3])), [KEYS, 64])


@gluon.jit
def _places(cache_ptr, page, key, page_stride, row_stride, word, PAGE: gl.constexpr):
    """Return where each key's first words lie."""
    rows = cache_ptr + page.to(gl.int64) * page_stride + (key % PAGE) * row_stride
    return rows[:, None] + word


@gluon.jit
def _convert(
    cache_ptr, table, low, high, page_stride, row_stride, latents, ropes, full, empty, PAGE: gl.constexpr
):  # fmt: skip
    """Bring codes from memory, a tile in registers while the one before is converted, piece by piece of 64 columns."""
    by: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    row = gl.arange(0, KEYS, layout=gl.SliceLayout(1, by))
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, by))[None, :]
    key = low + row
    page = gl.load(table + key // PAGE, mask=key < high, other=0)
    places = _places(cache_ptr, page, key, page_stride, row_stride, word, PAGE)
    raw = ()
    # Rows outside the request are never read: a stale page may hold NaN, and 0 · NaN is NaN.
    for s in gl.static_range(9):
        raw = raw + (gl.load(places + s * 16, mask=(key < high)[:, None], other=0),)
    key += KEYS
    page = gl.load(table + key // PAGE, mask=key < high, other=0)
    for tile in range(gl.cdiv(high - low, KEYS)):
        places = _places(cache_ptr, page, key, page_stride, row_stride, word, PAGE)
        inside = (key < high)[:, None]
        key += KEYS
        page = gl.load(table + key // PAGE, mask=key < high, other=0)
        here = tile % STAGES
        mbarrier.wait(empty.index(here), (tile // STAGES & 1) ^ 1)
        latent, rope = latents.index(here), ropes.index(here)
        coming = ()
        for s in gl.static_range(9):
            # The words' registers are at once those of the next tile's.
            values = _halves(raw[s])
            if s < 8:
                latent.slice(s * 64, 64, dim=1).store(values)
            else:
                rope.store(values)
            coming = coming + (gl.load(places + s * 16, mask=inside, other=0),)
        hopper.fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(full.index(here), count=1)
        raw = coming


@gluon.jit
def _queries(q, q_stride, rows, q_latent, q_rope, BY: gl.constexpr):
    """Write 64 rows of queries as fp16 and return what each row is multiples of: a power of two."""
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, BY))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, BY))
    places = q + row[:, None] * q_stride + column[None, :]
    real = (row < rows)[:, None]
    largest = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, BY))
    # Half as much at a time as below: what all warps have asked for at once is in registers.
    half = q + row[:, None] * q_stride + gl.arange(0, 32, layout=gl.SliceLayout(0, BY))[None, :]
    for s in gl.static_range(18):
        part = gl.load(half + s * 32, mask=real, other=0.0).to(gl.float32)
        largest = gl.maximum(largest, gl.max(gl.abs(part), axis=1))
    # The power of two at or below it: its bits without the mantissa.
    bits = gl.maximum(largest, SMALLEST).to(gl.int32, bitcast=True) & 0x7F800000
    unit = bits.to(gl.float32, bitcast=True) * QUERY_UNIT
    times = (1.0 / unit)[:, None]
    # Read again behind a barrier: held, they would spill.
    gl.thread_barrier()
    for s in gl.static_range(9):
        values = (gl.load(places + s * 64, mask=real, other=0.0).to(gl.float32) * times).to(gl.float16)
        if s < 8:
            q_latent.slice(s * 64, 64, dim=1).store(values)
        else:
            q_rope.store(values)
    return unit


@gluon.jit
def _or_one(total):
    """Return the softmax denominator, 1 for rows that saw nothing (their numerator is 0)."""
    return gl.where(total > 0.0, total, 1.0)


@gluon.jit
def _score(
    q, q_stride, rows, lse_ptr, scale, length, q_latent, q_rope, latents, ropes, weights, decays, full, weights_full,
    weights_empty,
):  # fmt: skip
    """Multiply queries by each tile's rows; hand on softmax weights of the products, and how far earlier sums decay."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    BY: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    unit = _queries(q, q_stride, rows, q_latent, q_rope, BY)
    hopper.fence_async_shared()
    gl.thread_barrier()
    factor = gl.convert_layout(unit, gl.SliceLayout(1, MMA)) * scale
    highest = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, MMA))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, MMA))
    tiles = gl.cdiv(length, KEYS)
    for tile in range(tiles):
        here = tile % STAGES
        mbarrier.wait(full.index(here), tile // STAGES & 1)
        nothing = gl.zeros([ROWS, KEYS], gl.float32, MMA)
        score = hopper.warpgroup_mma(
            q_latent, latents.index(here).permute((1, 0)), nothing, use_acc=False, is_async=True
        )  # fmt: skip
        score = hopper.warpgroup_mma(q_rope, ropes.index(here).permute((1, 0)), score, is_async=True)
        score = hopper.warpgroup_mma_wait(0, deps=[score]) * factor[:, None]
        left = length - tile * KEYS
        if left < KEYS:
            key = gl.arange(0, KEYS, layout=gl.SliceLayout(0, MMA))[None, :]
            score = gl.where(key < left, score, LOWEST * 2.0)
        new = gl.maximum(highest, gl.max(score, axis=1))
        weight = gl.exp2(score - new[:, None])
        decay = gl.exp2(highest - new)
        total = total * decay + gl.sum(weight, axis=1)
        highest = new
        mbarrier.wait(weights_empty, (tile & 1) ^ 1)
        weights.store((weight * WEIGHT_UNIT).to(gl.float16))
        decays.store(decay)
        hopper.fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(weights_full, count=1)
    # The last message: by what the sums are divided.
    mbarrier.wait(weights_empty, (tiles & 1) ^ 1)
    decays.store(1.0 / (_or_one(total) * WEIGHT_UNIT))
    gl.thread_barrier()
    mbarrier.arrive(weights_full, count=1)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
    lse = gl.where(total > 0.0, (highest + gl.log2(_or_one(total))) * LN_2, float("-inf"))
    gl.store(lse_ptr + row, lse, mask=row < rows)


@gluon.jit
def _value(o_ptr, rows, length, latents, weights, decays, full, empty, weights_full, weights_empty):
    """Add weights times latents, and write the sums."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 128, 16])
    acc = gl.zeros([ROWS, RANK], gl.float32, MMA)
    tiles = gl.cdiv(length, KEYS)
    for tile in range(tiles):
        here = tile % STAGES
        mbarrier.wait(full.index(here), tile // STAGES & 1)
        mbarrier.wait(weights_full, tile & 1)
        acc = acc * decays.load(gl.SliceLayout(1, MMA))[:, None]
        coming = hopper.warpgroup_mma(weights, latents.index(here), acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(0, deps=[coming])
        gl.thread_barrier()
        mbarrier.arrive(weights_empty, count=1)
        mbarrier.arrive(empty.index(here), count=1)
    mbarrier.wait(weights_full, tiles & 1)
    acc = acc * decays.load(gl.SliceLayout(1, MMA))[:, None]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))[:, None]
    column = gl.arange(0, RANK, layout=gl.SliceLayout(0, MMA))[None, :]
    gl.store(o_ptr + row * RANK + column, acc.to(o_ptr.dtype.element_ty), mask=row < rows)


@kernel(do_not_specialize=("table_stride", "splits", "wanted", "requests", "num_rows"), jit=gluon.jit)
def heads_kernel(
    q_ptr, cache_ptr, table_ptr, starts_ptr, lens_ptr, o_ptr, lse_ptr, parts_ptr, q_stride_t, q_stride_h, page_stride,
    row_stride, table_stride, scale, splits, wanted, requests, num_rows, HEADS: gl.constexpr, PAGE: gl.constexpr,
    DIRECT: gl.constexpr, REQUESTS: gl.constexpr, LEAST: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Every request has one new token. ``page_stride``, ``row_stride``: in words of four codes.

    ``REQUESTS``: a power of two that holds all requests, whose keys are shared out by their lengths; or 0.
    """
    BLOCKS: gl.constexpr = (HEADS + ROWS - 1) // ROWS
    await_inputs(PDL)
    release_dependents(PDL)
    slot, block = gl.program_id(0) // BLOCKS, gl.program_id(0) % BLOCKS
    rows = HEADS - block * ROWS
    if REQUESTS:
        request, split, part, parts = part_of(
            slot, lens_ptr, starts_ptr, requests, wanted, splits, REQUESTS, KEYS, LEAST
        )
        if request >= requests:
            return
        if split == 0:
            row = gl.arange(0, ROWS, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
            gl.store(parts_ptr + request.to(gl.int64) * HEADS + block * ROWS + row, parts, mask=row < rows)
    else:
        request, split = slot, gl.program_id(1)
    low, high = gl.load(starts_ptr + request), gl.load(lens_ptr + request)
    if not DIRECT:
        if not REQUESTS:
            part = gl.cdiv(gl.cdiv(gl.maximum(high - low, 0), splits), KEYS) * KEYS
        low += split * part
        high = gl.minimum(low + part, high)
    length = gl.maximum(high - low, 0)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_latent = gl.allocate_shared_memory(gl.float16, [ROWS, RANK], swizzled)
    q_rope = gl.allocate_shared_memory(gl.float16, [ROWS, ROPE], swizzled)
    latents = gl.allocate_shared_memory(gl.float16, [STAGES, KEYS, RANK], swizzled)
    ropes = gl.allocate_shared_memory(gl.float16, [STAGES, KEYS, ROPE], swizzled)
    weights = gl.allocate_shared_memory(gl.float16, [ROWS, KEYS], swizzled)
    decays = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    weights_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    weights_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    mbarrier.init(weights_full, count=1)
    mbarrier.init(weights_empty, count=1)
    gl.thread_barrier()
    first = request.to(gl.int64) * HEADS + block * ROWS
    if not DIRECT:
        first_out = first + split.to(gl.int64) * num_rows
    else:
        first_out = first
    q = q_ptr + request.to(gl.int64) * q_stride_t + block * ROWS * q_stride_h
    words = cache_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    table = table_ptr + request.to(gl.int64) * table_stride
    gl.warp_specialize(
        [
            (_value, (
                o_ptr + first_out * RANK, rows, length, latents, weights, decays, full, empty, weights_full,
                weights_empty,
            )),
            (_score, (
                q, q_stride_h, rows, lse_ptr + first_out, scale, length, q_latent, q_rope, latents, ropes, weights,
                decays, full, weights_full, weights_empty,
            )),
            (_convert, (
                words, table, low, high, page_stride, row_stride, latents, ropes, full, empty, PAGE,
            )),
        ],
        [4, 4], [SCORE_REGISTERS, CONVERT_REGISTERS],
    )  # fmt: skip
