"""Grouped-query attention in Triton where each request brings one token: two kernels, whatever the lengths are.

A request's keys are cut into blocks. The blocks of all requests, one after the other, are dealt out evenly over a
fixed number of programs for each key head, so that one long request among short ones keeps every multiprocessor
busy, and the grid under capture does not depend on lengths. A program's share may cover parts of several requests; a
part that is not a whole request is stored in fp32, and the second kernel adds a request's parts in fixed order.

The parts of all requests have distinct numbers: program + request, because from one part to the next one of the two
grows by one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastlayers.attention.gqa.triton_softmax import LN2, LOG2E, add_sink, attend
from fastlayers.operators import operator
from fastlayers.testing.compile_check import KernelBuild
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, release_dependents

# One and two programs a multiprocessor of an H200; constants, so that results do not depend on the GPU. With few
# requests of wide heads one program each keeps memory busy, and there are fewer parts to add up; so in a window, where
# a program gets whole requests. Narrow heads bring half the bytes an iteration: they need two.
FEW_PROGRAMS, PROGRAMS, FEW_TILES = 132, 264, 256
MAX_REQUESTS = 1024  # their lengths are one vector in every program


@triton.jit
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, sinks_ptr, o_ptr, lse_ptr, part_ptr, part_lse_ptr, parts_ptr, table_ptr, lens_ptr, starts_ptr,
    q_token, q_head, table_row, requests, scale, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, PROGRAMS: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head, program = tl.program_id(0), tl.program_id(1)
    row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + row
    inside, wide = row < GROUP, column < HEAD_DIM
    b = tl.arange(0, BLOCK_B)
    await_inputs(PDL)
    release_dependents(PDL)
    # Each request's first block, and where its blocks end among everybody's. A request always has one.
    length_of = tl.load(lens_ptr + b, mask=b < requests, other=0)
    start_of = tl.load(starts_ptr + b, mask=b < requests, other=0)
    low_of = tl.maximum(start_of, 0)
    if WINDOW > 0:
        low_of = tl.maximum(low_of, length_of - WINDOW)
    first_of = low_of // BLOCK_N
    blocks_of = tl.where(b < requests, tl.maximum(tl.cdiv(length_of, BLOCK_N) - first_of, 1), 0)
    end_of = tl.cumsum(blocks_of, axis=0)
    total = tl.sum(blocks_of, axis=0)
    share = tl.cdiv(total, PROGRAMS)
    begin = program * share
    stop = tl.minimum(begin + share, total)
    first_request = tl.sum(tl.where(end_of <= begin, 1, 0), axis=0)
    last_request = tl.sum(tl.where(end_of < stop, 1, 0), axis=0)
    if begin >= stop:
        last_request = first_request - 1
    for request in range(first_request, last_request + 1):
        mine = b == request
        length = tl.sum(tl.where(mine, length_of, 0), axis=0)
        start = tl.sum(tl.where(mine, start_of, 0), axis=0)
        end = tl.sum(tl.where(mine, end_of, 0), axis=0)
        base = end - tl.sum(tl.where(mine, blocks_of, 0), axis=0)
        first = tl.sum(tl.where(mine, first_of, 0), axis=0)
        low = (first + tl.maximum(begin, base) - base) * BLOCK_N
        high = tl.minimum((first + tl.minimum(stop, end) - base) * BLOCK_N, length)
        wide_request = tl.cast(request, tl.int64)
        q = tl.load(
            q_ptr + wide_request * q_token + head[:, None] * q_head + column[None, :],
            mask=inside[:, None] & wide[None, :], other=0.0,
        )  # fmt: skip
        at = tl.zeros([BLOCK_M], tl.int32) + (length - 1)
        m = tl.full([BLOCK_M], -float("inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        acc, m, l = attend(
            acc, m, l, q, k_ptr, v_ptr, table_ptr + wide_request * table_row, kv_head, at, start, high, scale, softcap,
            column, low, high, 0, 0,
            KV_HEADS, HEAD_DIM, PAGE, WINDOW, SOFTCAP, True, BLOCK_N,
        )  # fmt: skip
        whole = (begin <= base) & (end <= stop)
        if whole:
            if SINKS:
                acc, m, l = add_sink(acc, m, l, tl.load(sinks_ptr + head, mask=inside, other=0.0) * LOG2E)
        some = l > 0
        divisor = tl.where(some, l, 1.0)
        lse = tl.where(some, (tl.where(some, m, 0.0) + tl.log2(divisor)) * LN2, -float("inf"))
        o = acc / divisor[:, None]
        store = inside[:, None] & wide[None, :]
        if whole:
            target = wide_request * HEADS + head
            tl.store(lse_ptr + target, lse, mask=inside)
            tl.store(o_ptr + target[:, None] * HEAD_DIM + column[None, :], cast(o, o_ptr.dtype.element_ty), mask=store)
        else:
            target = (program + wide_request) * HEADS + head
            tl.store(part_lse_ptr + target, lse, mask=inside)
            tl.store(part_ptr + target[:, None] * HEAD_DIM + column[None, :], o, mask=store)
        if (begin <= base) & (kv_head == 0):
            # For the second kernel: how many programs share this request, and the number of its first part.
            tl.store(parts_ptr + 2 * request, (end - 1) // share - program + 1)
            tl.store(parts_ptr + 2 * request + 1, program + request)


@triton.jit
def _combine_kernel(
    part_ptr, part_lse_ptr, parts_ptr, sinks_ptr, o_ptr, lse_ptr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SINKS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK_D)
    await_inputs(PDL)
    release_dependents(PDL)
    count = tl.load(parts_ptr + 2 * request)
    first = tl.load(parts_ptr + 2 * request + 1).to(tl.int64)
    if count > 1:
        m, l = -float("inf"), 0.0
        if SINKS:
            # Once, here: the parts know nothing of the sink.
            m, l = tl.load(sinks_ptr + head).to(tl.float32), 1.0
        acc = tl.zeros([BLOCK_D], tl.float32)
        for begin in range(0, count, BLOCK_S):
            part = begin + tl.arange(0, BLOCK_S)
            index = (first + part) * HEADS + head
            lse = tl.load(part_lse_ptr + index, mask=part < count, other=-float("inf"))
            o = tl.load(
                part_ptr + index[:, None] * HEAD_DIM + column[None, :],
                mask=(part < count)[:, None] & (column < HEAD_DIM)[None, :], other=0.0,
            )  # fmt: skip
            m_new = tl.maximum(m, tl.max(lse, axis=0))
            shift = tl.where(m_new == -float("inf"), 0.0, m_new)
            weight = tl.exp(lse - shift)
            keep = tl.exp(m - shift)
            l = l * keep + tl.sum(weight, axis=0)
            acc = acc * keep + tl.sum(o * weight[:, None], axis=0)
            m = m_new
        some = l > 0
        divisor = tl.where(some, l, 1.0)
        target = request * HEADS + head
        tl.store(lse_ptr + target, tl.where(some, tl.where(some, m, 0.0) + tl.log(divisor), -float("inf")))
        o = cast(acc / divisor, o_ptr.dtype.element_ty)
        tl.store(o_ptr + target * HEAD_DIM + column, o, mask=column < HEAD_DIM)


def decode_config(tiles: int, head_dim: int, windowed: bool, dtype: torch.dtype) -> dict[str, int]:
    """Return the block size, programs, warps and stages for this many requests × key heads, without a tuned table."""
    programs = FEW_PROGRAMS if tiles < FEW_TILES and (windowed or head_dim > 64) else PROGRAMS
    if dtype == torch.float32:
        return {"BLOCK_N": 16, "PROGRAMS": programs, "num_warps": 4, "num_stages": 2}
    block = 64 if head_dim <= 128 else 32
    return {"BLOCK_N": block, "PROGRAMS": programs, "num_warps": 4, "num_stages": 7}


def _blocks(group: int, head_dim: int, requests: int) -> dict[str, int]:
    power = triton.next_power_of_2
    return {"BLOCK_B": power(requests), "BLOCK_M": max(16, power(group)), "BLOCK_D": max(16, power(head_dim))}


def serves(requests: int, group: int, dtype: torch.dtype) -> bool:
    """Return whether these kernels fit: wide groups of fp32 heads would not fit the registers."""
    return requests <= MAX_REQUESTS and group <= (16 if dtype == torch.float32 else 64)


def _fake(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sinks: torch.Tensor | None,
    page_table: torch.Tensor, seq_lens: torch.Tensor, starts: torch.Tensor, page_size: int, max_seq_len: int,
    scale: float, window: int, softcap: float, block_n: int, programs: int, warps: int, stages: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@operator(
    "gqa_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? sinks, Tensor page_table, Tensor seq_lens, "
    "Tensor starts, int page_size, int max_seq_len, float scale, int window, float softcap, int block_n, "
    "int programs, int warps, int stages) -> (Tensor, Tensor)",
    _fake,
)
def gqa_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sinks: torch.Tensor | None,
    page_table: torch.Tensor, seq_lens: torch.Tensor, starts: torch.Tensor, page_size: int, max_seq_len: int,
    scale: float, window: int, softcap: float, block_n: int, programs: int, warps: int, stages: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attend one token of each request; ``(o, lse)``."""
    (requests, heads, head_dim), kv_heads = q.shape, k_cache.shape[2]
    o, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)
    if not requests:
        return o, lse
    keys = min(max_seq_len, window + block_n) if window else max_seq_len
    # A power of two times the heads' share, so that few variants of the kernel are compiled.
    most = triton.next_power_of_2(requests * triton.cdiv(keys, block_n))
    programs = max(1, min(programs // kv_heads, most))
    numbers = requests + programs
    part = q.new_empty(numbers, heads, head_dim, dtype=torch.float32)
    part_lse = q.new_empty(numbers, heads, dtype=torch.float32)
    parts = q.new_empty(requests, 2, dtype=torch.int32)
    blocks, launch = _blocks(heads // kv_heads, head_dim, requests), dependent_launch(q)
    logits = q if sinks is None else sinks
    _decode_kernel[(kv_heads, programs)](
        q, k_cache, v_cache, logits, o, lse, part, part_lse, parts, page_table, seq_lens, starts,
        q.stride(0), q.stride(1), page_table.stride(0), requests, scale, softcap,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, PAGE=page_size, WINDOW=window, SOFTCAP=softcap > 0,
        SINKS=sinks is not None, PROGRAMS=programs, BLOCK_N=block_n, **blocks, **launch,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if programs > 1:
        # As many parts at once as an average request has: with few requests all of them.
        at_once = min(64, triton.next_power_of_2(triton.cdiv(programs, requests) + 1))
        _combine_kernel[(requests, heads)](
            part, part_lse, parts, logits, o, lse,
            HEADS=heads, HEAD_DIM=head_dim, SINKS=sinks is not None,
            BLOCK_S=at_once, BLOCK_D=blocks["BLOCK_D"], **launch, num_warps=4 if at_once >= 32 else 2,
        )  # fmt: skip
    return o, lse


def _build(
    name: str, heads: int, kv_heads: int, dim: int, requests: int, dtype: str = "bf16", cache: str = "",
    window: int = 0, sinks: bool = False, softcap: bool = False, page: int = 64,
) -> KernelBuild:  # fmt: skip
    config = decode_config(requests * kv_heads, dim, window > 0, torch.float32 if dtype == "fp32" else torch.bfloat16)
    return KernelBuild(
        f"gqa_decode_{name}",
        _decode_kernel,
        {
            "q_ptr": f"*{dtype}", **dict.fromkeys(("k_ptr", "v_ptr"), f"*{cache or dtype}"), "o_ptr": f"*{dtype}",
            **dict.fromkeys(("sinks_ptr", "lse_ptr", "part_ptr", "part_lse_ptr"), "*fp32"),
            **dict.fromkeys(("parts_ptr", "table_ptr", "lens_ptr", "starts_ptr"), "*i32"),
            **dict.fromkeys(("q_token", "q_head", "table_row"), "i64"), "requests": "i32",
            "scale": "fp32", "softcap": "fp32",
        },
        {
            "HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": dim, "PAGE": page, "WINDOW": window, "SOFTCAP": softcap,
            "SINKS": sinks, "PROGRAMS": config["PROGRAMS"] // kv_heads, "BLOCK_N": config["BLOCK_N"], "PDL": True,
            **_blocks(heads // kv_heads, dim, requests),
        },
        num_warps=config["num_warps"], num_stages=config["num_stages"], aligned=("q_token", "q_head"),
    )  # fmt: skip


COMPILE = [
    _build("qwen3_8b", 32, 8, 128, 1),
    _build("qwen3_8b_128", 32, 8, 128, 128),
    _build("qwen3_30b_32", 32, 4, 128, 32),
    _build("qwen3_8b_fp8", 32, 8, 128, 16, cache="fp8e4nv"),
    _build("qwen3_8b_fp32", 32, 8, 128, 16, dtype="fp32"),
    _build("gpt_oss_window", 64, 8, 64, 32, window=128, sinks=True),
    _build("gpt_oss", 64, 8, 64, 1, sinks=True),
    _build("gemma2", 16, 8, 256, 16, window=4096, softcap=True),
    _build("qwen3_next_fp32", 16, 2, 256, 16, dtype="fp32"),
    _build("page_16", 32, 8, 128, 16, page=16),
    _build("page_1", 32, 8, 128, 1, page=1),
    *(
        KernelBuild(
            f"gqa_combine_{at_once}",
            _combine_kernel,
            {
                **dict.fromkeys(("part_ptr", "part_lse_ptr", "sinks_ptr", "lse_ptr"), "*fp32"),
                "parts_ptr": "*i32", "o_ptr": "*bf16",
            },
            {"HEADS": 32, "HEAD_DIM": dim, "SINKS": True, "BLOCK_S": at_once, "BLOCK_D": dim, "PDL": True},
            num_warps=warps,
        )
        for at_once, dim, warps in ((2, 128, 2), (64, 128, 4), (64, 256, 4))
    ),
]  # fmt: skip
