"""A trial: MXFP4 experts by ``wgmma``, codes and tokens on their way through rings in shared memory (Gluon).

A warp's 16 bytes a lane of the swizzled weights are, decoded, just the registers that ``wgmma`` takes as its left
operand: nothing is exchanged between lanes. Tokens lie row by row in the order of the alignment's slots; both kinds of
bytes are copied asynchronously, STAGES - 1 steps of 64 columns ahead: codes and scales before the wait, too.

    program = (block of TOKENS slots of one expert, R * W tiles of 16 rows);  W warps, every four one ``wgmma``
"""

# Inside a Gluon kernel tuples grow in unrolled loops.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, has-type, var-annotated"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# As in the shipped kernels: a code's bits times its scale's make a bf16 number that is 2^64 too small.
_FOLD = 64
UNFOLD = gl.constexpr(2.0**_FOLD)


def _decoding() -> tuple[gl.constexpr, gl.constexpr]:
    """Return the instructions that make the left operand of four k16 steps of four words, and their constraints.

    Result 4·(q % 2) + 2·h + b: of q // 2 = 0 and 1 two values (c) each; so a register is one of the operand's.
    """
    lines = [".reg .b32 u, v, m0, m1;", ".reg .b16 low, high;"]
    for q in range(4):
        word = f"${16 + q}"
        first, second, third, fourth = (f"${2 * (4 * (q % 2) + i) + q // 2}" for i in (0, 1, 2, 3))
        if q % 2 == 0:
            lines += [
                f"prmt.b32 u, $20, 0, {0x4140 + 0x202 * (q // 2):#x};",
                f"mad.lo.u32 u, u, 128, {(126 - _FOLD) * 0x00800080:#x};",
                "mov.b32 {low, high}, u;",
                "mov.b32 m0, {low, low};",
                "mov.b32 m1, {high, high};",
            ]
        lines += [
            f"and.b32 {first}, {word}, 0x81C081C0;",
            f"shl.b32 u, {word}, 3;",
            f"and.b32 {second}, u, 0x81C081C0;",
            f"shl.b32 u, {word}, 6;",
            f"and.b32 {third}, u, 0x81C081C0;",
            f"and.b32 u, {word}, 0x2C002C00;",
            "mul.hi.u32 u, u, 0x22000000;",
            f"shl.b32 v, {word}, 1;",
            "and.b32 v, v, 0x80008000;",
            f"lop3.b32 {fourth}, u, 0x01C001C0, v, 0xEA;",
            *(f"mul.bf16x2 {a}, {a}, m{i % 2};" for i, a in enumerate((first, second, third, fourth))),
        ]
    text = "{\n" + "\n".join(lines) + "\n}"
    return gl.constexpr(text), gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 8))


_DECODE, _OPERANDS = _decoding()


@gluon.constexpr_function
def lanes_of(warps):
    """Return how words ``[4·W, 2, 16]``, (w f), o, (t q), lie in lanes: as in memory, and as in the left operand."""
    return gl.BlockedLayout([1, 1, 4], [4, 2, 4], [warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def tokens_by(warps):
    """Return how rows of 64 columns are copied: 16 bytes a lane, whole lines."""
    return gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def rows_by(warps):
    """Return how sums ``[16·W, TOKENS]`` are stored: eight rows a lane."""
    return gl.BlockedLayout([8, 1], [2 * warps, 16 // warps], [1, warps], [0, 1])


@gluon.constexpr_function
def halves_by(warps):
    """Return how the inner columns of :func:`rows_by` lie: half as many rows."""
    return gl.BlockedLayout([4, 1], [2 * warps, 16 // warps], [1, warps], [0, 1])


@gluon.jit
def _decoded(word, scale, W: gl.constexpr, LAYOUT: gl.constexpr):
    """Return bf16 ``[16·W, 64]`` as left operand of words ``[4·W, 2, 16]``: (w f), o, (t q)."""
    found = gl.inline_asm_elementwise(
        _DECODE, _OPERANDS, [word, scale],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True, pack=4,
    )  # fmt: skip
    # Joined: the last dimensions are b, h and q % 2; of a word's four values the last two are q // 2 and c.
    first = gl.join(gl.join(found[0], found[1]), gl.join(found[2], found[3]))  # b' = second join: [.., b, h]
    second = gl.join(gl.join(found[4], found[5]), gl.join(found[6], found[7]))
    both = gl.reshape(gl.join(first, second), [W, 4, 2, 4, 2, 2, 2, 2, 2])  # w f o t s c b h p
    rows = gl.permute(both, (0, 6, 1, 2, 4, 8, 7, 3, 5))  # w b f o | s p h t c
    return gl.convert_layout(gl.reshape(rows, [16 * W, 64]), LAYOUT, assert_trivial=True)


@gluon.jit
def _places(w_ptr, s_ptr, first, LAST: gl.constexpr, LENGTH: gl.constexpr, R: gl.constexpr, W: gl.constexpr):
    """Return where codes and scales begin, of R times one tile a warp."""
    lanes: gl.constexpr = lanes_of(W)
    row = gl.arange(0, W * 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, lanes)))[:, None, None]
    odd = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, lanes)))[None, :, None]
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, lanes)))[None, None, :]
    words = ()
    scales = ()
    for r in gl.static_range(R):
        tile = gl.minimum(first + r * W + row // 4, LAST)
        words = words + (w_ptr + (tile * 4 + row % 4) * ((LENGTH + 127) // 128 * 64) + odd * 16 + word,)
        place = (tile // 16 * 8 + tile % 8) * ((LENGTH + 63) // 64 * 16) + tile // 8 % 2 * 8
        scales = scales + (s_ptr + place + row % 4 * 2 + odd,)
    return words, scales


@gluon.jit
def ask(
    words, scales, word_ring, scale_ring, here: gl.constexpr, step, inside, R: gl.constexpr, SPAN: gl.constexpr
):  # fmt: skip
    """Ask for the codes and scales of SPAN steps, if they are inside."""
    for j in gl.static_range(SPAN):
        for r in gl.static_range(R):
            to = word_ring[(here * SPAN + j) * R + r]
            async_copy.async_copy_global_to_shared(to, words[r] + (step + j) * 32, mask=inside)
            to = scale_ring[(here * SPAN + j) * R + r]
            async_copy.async_copy_global_to_shared(to, scales[r] + (step + j) * 16, mask=inside)


@gluon.jit
def _turn(
    words, scales, tokens, word_ring, scale_ring, x_ring, accs, real, step, here: gl.constexpr, then: gl.constexpr,
    STEPS: gl.constexpr, R: gl.constexpr, W: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr,
    FENCE: gl.constexpr,
):  # fmt: skip
    """Add the products of SPAN steps; ask for what is STAGES - 1 turns ahead, into the buffers of the turn before."""
    lanes: gl.constexpr = lanes_of(W)
    left: gl.constexpr = gl.DotOperandLayout(0, accs[0].type.layout, 2)
    async_copy.wait_group(STAGES - 2)
    if FENCE:
        hopper.fence_async_shared()
    ahead = step + (STAGES - 1) * SPAN
    inside = ahead < STEPS
    ask(words, scales, word_ring, scale_ring, then, ahead, inside, R, SPAN)
    for j in gl.static_range(SPAN):
        to = x_ring[then * SPAN + j]
        async_copy.async_copy_global_to_shared(to, tokens + (ahead + j) * 64, mask=real & inside)
    async_copy.commit_group()
    held = None
    for j in gl.static_range(SPAN):
        added = ()
        for r in gl.static_range(R):
            word = word_ring[(here * SPAN + j) * R + r].load(lanes)
            scale = scale_ring[(here * SPAN + j) * R + r].load(lanes)
            a = _decoded(word, scale, W, left)
            acc = hopper.warpgroup_mma(a, x_ring[here * SPAN + j].permute((1, 0)), accs[r], is_async=True)
            if j + r > 0:
                # While this product runs the one before ends: its codes' registers are the next one's.
                acc = hopper.warpgroup_mma_wait(1, deps=[acc, held])[0]
            held = a
            added = added + (acc,)
        accs = added
    found = ()
    for r in gl.static_range(R):
        found = found + (hopper.warpgroup_mma_wait(0, deps=[accs[r], held])[0],)
    return found


@gluon.jit
def product(
    x_ptr, w_ptr, s_ptr, row, real, first, LAST: gl.constexpr, LENGTH: gl.constexpr, TOKENS: gl.constexpr,
    R: gl.constexpr, W: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr, FENCE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Return sums ``[16·W, TOKENS]``, R of them, over LENGTH columns.

    ``row``: which rows of x; ``real``: which of them are read, the others' sums are anything. Buffers of a ring are
    memory of their own each: where they are parts of one, every copy waits for all warps.
    """
    STEPS: gl.constexpr = (LENGTH + 63) // 64
    gl.static_assert(STEPS % (SPAN * STAGES) == 0, "whole turns of the ring")
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, TOKENS, 16])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    word_ring = ()
    scale_ring = ()
    x_ring = ()
    for _ in gl.static_range(STAGES * SPAN * R):
        word_ring = word_ring + (gl.allocate_shared_memory(gl.int32, [W * 4, 2, 16], flat),)
        scale_ring = scale_ring + (gl.allocate_shared_memory(gl.int32, [W * 4, 2, 1], flat),)
    for _ in gl.static_range(STAGES * SPAN):
        x_ring = x_ring + (gl.allocate_shared_memory(gl.bfloat16, [TOKENS, 64], gl.NVMMASharedLayout(128, 16, 2)),)
    words, scales = _places(w_ptr, s_ptr, first, LAST, LENGTH, R, W)
    tokens = x_ptr + row * (STEPS * 64) + gl.arange(0, 64, layout=gl.SliceLayout(0, tokens_by(W)))[None, :]
    for turn in gl.static_range(STAGES - 1):
        ask(words, scales, word_ring, scale_ring, turn, turn * SPAN, None, R, SPAN)
        async_copy.commit_group()
    wait(PDL)
    for turn in gl.static_range(STAGES - 1):
        for j in gl.static_range(SPAN):
            to = x_ring[turn * SPAN + j]
            async_copy.async_copy_global_to_shared(to, tokens + (turn * SPAN + j) * 64, mask=real)
        async_copy.commit_group()
    accs = ()
    for _ in gl.static_range(R):
        accs = accs + (gl.zeros([16 * W, TOKENS], gl.float32, mma),)
    for start in range(0, STEPS, STAGES * SPAN):
        for here in gl.static_range(STAGES):
            accs = _turn(
                words, scales, tokens, word_ring, scale_ring, x_ring, accs, real, start + here * SPAN, here,
                (here + STAGES - 1) % STAGES, STEPS, R, W, SPAN, STAGES, FENCE,
            )  # fmt: skip
    async_copy.wait_group(0)
    return accs


@gluon.jit
def wait(PDL: gl.constexpr):
    """Wait for the kernels in front, then let the next one begin."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@gluon.jit
def store_inner(
    sums, bias_ptr, out_ptr, sorted_ptr, slot, tile, num_pairs, alpha, limit, INNER: gl.constexpr, W: gl.constexpr,
    TOKENS: gl.constexpr, FRAGMENTS: gl.constexpr,
):  # fmt: skip
    """Apply bias and activation to W tiles of gate and up rows, in turns, and store them: as rows or as fragments."""
    half: gl.constexpr = halves_by(W)
    at = slot + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, half))[None, :]
    there = gl.load(sorted_ptr + at) < num_pairs
    column = tile * 8 + gl.arange(0, 8 * W, layout=gl.SliceLayout(1, half))[:, None]
    both = gl.convert_layout(sums, rows_by(W)) * UNFOLD
    gate, up = gl.split(gl.permute(gl.reshape(both, [8 * W, 2, TOKENS]), (0, 2, 1)))
    gate, up = gl.convert_layout(gate, half, assert_trivial=True), gl.convert_layout(up, half, assert_trivial=True)
    gate += gl.load(bias_ptr + column * 2, mask=column < INNER, other=0.0)
    up += gl.load(bias_ptr + column * 2 + 1, mask=column < INNER, other=0.0)
    gate = gl.minimum(gate, limit)
    up = gl.minimum(gl.maximum(up, -limit), limit) + 1.0
    inner = gate / (1.0 + gl.exp(-gate * alpha)) * up
    if FRAGMENTS:
        place = at // 8 * ((INNER + 63) // 64 * 512) + at % 8 * 32 + column // 32 * 256
        place += column % 8 // 2 * 8 + column // 8 % 4 * 2 + column % 2
    else:
        place = at * ((INNER + 63) // 64 * 64) + column
    gl.store(out_ptr + place, inner.to(gl.bfloat16), mask=there & (column < INNER))


@gluon.jit
def store_pairs(
    sums, bias_ptr, weights_ptr, out_ptr, sorted_ptr, slot, tile, num_pairs, HIDDEN: gl.constexpr, W: gl.constexpr,
    TOKENS: gl.constexpr,
):  # fmt: skip
    """Add the bias to W tiles of down rows, weigh, store rows of pairs."""
    rows: gl.constexpr = rows_by(W)
    pair = gl.load(sorted_ptr + slot + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, rows)))[None, :]
    weight = gl.load(weights_ptr + pair, mask=pair < num_pairs, other=0.0)
    row = tile * 16 + gl.arange(0, 16 * W, layout=gl.SliceLayout(1, rows))[:, None]
    bias = gl.load(bias_ptr + row, mask=row < HIDDEN, other=0.0)
    weighed = (gl.convert_layout(sums, rows) * UNFOLD + bias) * weight
    gl.store(out_ptr + pair.to(gl.int64) * HIDDEN + row, weighed, mask=(pair < num_pairs) & (row < HIDDEN))


@gluon.jit
def wgmma_gate_up_kernel(
    x_ptr, w_ptr, ws_ptr, bias_ptr, out_ptr, sorted_ptr, expert_ptr, total_ptr, num_pairs, alpha, limit,
    HIDDEN: gl.constexpr, INNER: gl.constexpr, TOKENS: gl.constexpr, R: gl.constexpr, W: gl.constexpr,
    SPAN: gl.constexpr, STAGES: gl.constexpr, FENCE: gl.constexpr, PER_TOKEN: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply a block's tokens by R·W tiles of gate and up rows of one expert, apply the activation.

    PER_TOKEN 0: x has a row for each slot, written by the kernel in front, in front of which the alignment ended.
    Else the alignment is the kernel in front, and rows are gathered here.
    """
    TILES: gl.constexpr = (2 * INNER + 16 * R * W - 1) // (16 * R * W)
    LAST: gl.constexpr = (2 * INNER + 15) // 16 - 1
    block, first = gl.program_id(0) // TILES, gl.program_id(0) % TILES * (R * W)
    if PER_TOKEN:
        wait(PDL)
    if block * TOKENS >= gl.load(total_ptr):
        if not PER_TOKEN:
            wait(PDL)
        return
    expert = gl.load(expert_ptr + block).to(gl.int64)
    w_ptr += expert * ((2 * INNER + 63) // 64 * 16 * ((HIDDEN + 127) // 128 * 64))
    ws_ptr += expert * ((2 * INNER + 255) // 256 * 2 * ((HIDDEN + 63) // 64 * 64))
    slot = block * TOKENS
    token = slot + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, tokens_by(W)))
    pair = gl.load(sorted_ptr + token)
    row = pair // PER_TOKEN if PER_TOKEN else token
    sums = product(
        x_ptr, w_ptr, ws_ptr, row[:, None], (pair < num_pairs)[:, None], first, LAST, HIDDEN, TOKENS, R, W, SPAN,
        STAGES, FENCE, PDL and not PER_TOKEN,
    )  # fmt: skip
    for r in gl.static_range(R):
        store_inner(
            sums[r], bias_ptr + expert * 2 * INNER, out_ptr, sorted_ptr, slot, first + r * W, num_pairs, alpha, limit,
            INNER, W, TOKENS, False,
        )  # fmt: skip


@gluon.jit
def wgmma_down_kernel(
    a_ptr, w_ptr, ws_ptr, bias_ptr, weights_ptr, out_ptr, sorted_ptr, expert_ptr, total_ptr, num_pairs,
    HIDDEN: gl.constexpr, INNER: gl.constexpr, TOKENS: gl.constexpr, R: gl.constexpr, W: gl.constexpr,
    SPAN: gl.constexpr, STAGES: gl.constexpr, FENCE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply a block's inner rows by R·W tiles of down rows, add the bias, weigh; fp32 rows of pairs."""
    TILES: gl.constexpr = (HIDDEN + 16 * R * W - 1) // (16 * R * W)
    LAST: gl.constexpr = (HIDDEN + 15) // 16 - 1
    block, first = gl.program_id(0) // TILES, gl.program_id(0) % TILES * (R * W)
    if block * TOKENS >= gl.load(total_ptr):
        wait(PDL)
        return
    expert = gl.load(expert_ptr + block).to(gl.int64)
    w_ptr += expert * ((HIDDEN + 63) // 64 * 16 * ((INNER + 127) // 128 * 64))
    ws_ptr += expert * ((HIDDEN + 255) // 256 * 2 * ((INNER + 63) // 64 * 64))
    slot = block * TOKENS
    token = slot + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, tokens_by(W)))
    real = gl.load(sorted_ptr + token) < num_pairs
    sums = product(
        a_ptr, w_ptr, ws_ptr, token[:, None], real[:, None], first, LAST, INNER, TOKENS, R, W, SPAN, STAGES, FENCE, PDL
    )  # fmt: skip
    for r in gl.static_range(R):
        store_pairs(
            sums[r], bias_ptr + expert * HIDDEN, weights_ptr, out_ptr, sorted_ptr, slot, first + r * W, num_pairs,
            HIDDEN, W, TOKENS,
        )  # fmt: skip


@gluon.jit
def slots_kernel(
    x_ptr, sorted_ptr, total_ptr, out_ptr, num_pairs, PER_TOKEN: gl.constexpr, WIDTH: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """Write the token of a slot of the alignment as a row; nothing for an empty slot."""
    slot = gl.program_id(0)
    column = gl.arange(0, 4096, layout=gl.BlockedLayout([8], [32], [4], [0]))
    wait(PDL)
    if slot >= gl.load(total_ptr):
        return
    pair = gl.load(sorted_ptr + slot)
    if pair >= num_pairs:
        return
    x = gl.load(x_ptr + pair // PER_TOKEN * WIDTH + column, mask=column < WIDTH)
    gl.store(out_ptr + slot * ((WIDTH + 63) // 64 * 64) + column, x, mask=column < WIDTH)
