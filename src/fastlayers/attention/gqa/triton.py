"""Grouped-query attention in Triton: one kernel for decode and extend, plus the reduction of split keys.

A tile holds BLOCK_M rows, one row a (token, query head) pair of one request and one key head, so that a group
of query heads fills the matrix units even at decode. Where tiles are too few for the GPU, each request's keys
are split over several programs, whose results a second kernel adds up in fixed order. Grids and splits depend
on the host bounds in the metadata only.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from fastlayers.attention.gqa.core import GQAConfig
from fastlayers.attention.meta import AttentionMeta
from fastlayers.operators import operator
from fastlayers.testing.compile_check import KernelBuild
from fastlayers.triton_lang import cast, dot

# Four programs a multiprocessor of a large GPU; a constant, so that results do not depend on the GPU.
TARGET_PROGRAMS = 528
MIN_SPLIT, MAX_SPLITS = 128, 64
LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2.0))


@triton.jit
def _scores(q, k, at, place, start, high, scale, softcap, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr):
    """Return masked scores times log2(e): rows ``at`` against keys at ``place``."""
    s = dot(q, k) * scale
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1)
        s = softcap * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E / softcap)) + 1.0))
    seen = (place[None, :] <= at[:, None]) & (place[None, :] >= start) & (place[None, :] < high)
    if WINDOW > 0:
        seen = seen & (at[:, None] - place[None, :] < WINDOW)
    return tl.where(seen, s * LOG2E, -float("inf"))


@triton.jit
def _add_sink(acc, m, l, sink):
    """Add exp(sink) to the denominator; ``m`` and ``sink`` are base 2."""
    m_new = tl.maximum(m, sink)
    shift = tl.where(m_new == -float("inf"), 0.0, m_new)
    keep = tl.exp2(m - shift)
    return acc * keep[:, None], m_new, l * keep + tl.exp2(sink - shift)


@triton.jit
def _gqa_kernel(
    q_ptr, k_ptr, v_ptr, sinks_ptr, o_ptr, lse_ptr, table_ptr, lens_ptr, starts_ptr, cu_ptr,
    q_token, q_head, table_row, scale, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # Long tiles (late rows see more keys) start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, split = tl.program_id(1) // SPLITS, tl.program_id(1) % SPLITS
    request = tl.program_id(2).to(tl.int64)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    first_token = tl.load(cu_ptr + request)
    queries = tl.load(cu_ptr + request + 1) - first_token
    if tile * BLOCK_M >= queries * GROUP:
        return
    length, start = tl.load(lens_ptr + request), tl.load(starts_ptr + request)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < queries * GROUP
    head = kv_head * GROUP + row % GROUP
    token = (first_token + row // GROUP).to(tl.int64)
    at = length - queries + row // GROUP
    column = tl.arange(0, BLOCK_D)
    wide = column < HEAD_DIM
    q = tl.load(
        q_ptr + token[:, None] * q_token + head[:, None] * q_head + column[None, :],
        mask=inside[:, None] & wide[None, :], other=0.0,
    )  # fmt: skip
    # Keys that some row of the tile sees: [low, high); this split's part of them in whole blocks.
    first_at = length - queries + (tile * BLOCK_M) // GROUP
    high = tl.minimum(length, length - queries + (tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1)
    low = tl.maximum(start, 0)
    if WINDOW > 0:
        low = tl.maximum(low, first_at - WINDOW + 1)
    low = low // BLOCK_N * BLOCK_N
    part = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), BLOCK_N), SPLITS) * BLOCK_N
    low = low + split * part
    high = tl.minimum(high, low + part)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for begin in range(low, high, BLOCK_N):
        place = begin + tl.arange(0, BLOCK_N)
        valid = place < high
        page = tl.load(table_ptr + request * table_row + place // PAGE, mask=valid, other=0).to(tl.int64)
        offset = ((page * PAGE + place % PAGE) * KV_HEADS + kv_head) * HEAD_DIM
        k = tl.load(
            k_ptr + offset[None, :] + column[:, None], mask=valid[None, :] & wide[:, None], other=0.0
        ).to(q.dtype)  # fmt: skip
        s = _scores(q, k, at, place, start, high, scale, softcap, WINDOW, SOFTCAP)
        m_new = tl.maximum(m, tl.max(s, axis=1))
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        keep, p = tl.exp2(m - shift), tl.exp2(s - shift[:, None])
        v = tl.load(
            v_ptr + offset[:, None] + column[None, :], mask=valid[:, None] & wide[None, :], other=0.0
        ).to(q.dtype)  # fmt: skip
        l = l * keep + tl.sum(p, axis=1)
        acc = acc * keep[:, None] + dot(cast(p, q.dtype), v)
        m = m_new
    if SPLITS == 1 and SINKS:
        sink = tl.load(sinks_ptr + head, mask=inside, other=0.0) * LOG2E
        acc, m, l = _add_sink(acc, m, l, sink)
    some = l > 0
    total = tl.where(some, l, 1.0)
    lse = tl.where(some, (tl.where(some, m, 0.0) + tl.log2(total)) * LN2, -float("inf"))
    o = acc / total[:, None]
    # [T, Hq, SPLITS]: with one split this is the result itself.
    target = (token * HEADS + head) * SPLITS + split
    tl.store(lse_ptr + target, lse, mask=inside)
    tl.store(
        o_ptr + target[:, None] * HEAD_DIM + column[None, :], cast(o, o_ptr.dtype.element_ty),
        mask=inside[:, None] & wide[None, :],
    )  # fmt: skip


@triton.jit
def _reduce_kernel(
    part_ptr, part_lse_ptr, sinks_ptr, o_ptr, lse_ptr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SINKS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    split, column = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    part_lse = tl.load(part_lse_ptr + row * SPLITS + split, mask=split < SPLITS, other=-float("inf"))
    m = tl.max(part_lse, axis=0)
    if SINKS:
        sink = tl.load(sinks_ptr + row % HEADS)
        m = tl.maximum(m, sink)
    shift = tl.where(m == -float("inf"), 0.0, m)
    weight = tl.exp(part_lse - shift)
    total = tl.sum(weight, axis=0)
    if SINKS:
        # Once, here: the parts know nothing of the sink.
        total += tl.exp(sink - shift)
    some = total > 0
    divisor = tl.where(some, total, 1.0)
    part = tl.load(
        part_ptr + (row * SPLITS + split[:, None]) * HEAD_DIM + column[None, :],
        mask=(split < SPLITS)[:, None] & (column < HEAD_DIM)[None, :], other=0.0,
    )  # fmt: skip
    o = tl.sum(part * weight[:, None], axis=0) / divisor
    tl.store(lse_ptr + row, tl.where(some, shift + tl.log(divisor), -float("inf")))
    tl.store(o_ptr + row * HEAD_DIM + column, cast(o, o_ptr.dtype.element_ty), mask=column < HEAD_DIM)


def _tile(max_query_len: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the block sizes for queries of at most this length."""
    rows = max(16, triton.next_power_of_2(max(1, max_query_len) * (heads // kv_heads)))
    block_d = max(16, triton.next_power_of_2(head_dim))
    if dtype == torch.float32:
        # fp32 products run outside the matrix units, out of registers: larger tiles spill.
        return {"BLOCK_M": min(rows, 32 if head_dim <= 128 else 16), "BLOCK_N": 16, "BLOCK_D": block_d}
    if head_dim > 128:
        return {"BLOCK_M": min(rows, 64), "BLOCK_N": 32, "BLOCK_D": block_d}
    return {"BLOCK_M": min(rows, 128), "BLOCK_N": 64, "BLOCK_D": block_d}


def _options(tile: dict[str, int]) -> dict[str, int]:
    many = tile["BLOCK_M"] >= 128 or tile["BLOCK_N"] == 16
    return {"num_warps": 8 if many else 4, "num_stages": 3 if tile["BLOCK_D"] <= 64 else 2}


def _num_splits(programs: int, max_keys: int) -> int:
    """Return how many programs share one tile's keys; from host bounds, so fixed under capture.

    A power of two, so that few variants of the kernel are compiled.
    """
    wanted = max(1, min(TARGET_PROGRAMS // max(1, programs), -(-max_keys // MIN_SPLIT), MAX_SPLITS))
    return 1 << (wanted.bit_length() - 1)


_ARGUMENTS = (
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor? sinks, Tensor page_table, Tensor seq_lens, "
    "Tensor starts, Tensor cu_seqlens_q, int page_size, int max_query_len, int max_seq_len, float scale, "
    "int window, float softcap"
)


def _fake(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sinks: torch.Tensor | None,
    page_table: torch.Tensor, seq_lens: torch.Tensor, starts: torch.Tensor, cu_seqlens_q: torch.Tensor,
    page_size: int, max_query_len: int, max_seq_len: int, scale: float, window: int, softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@operator(f"gqa({_ARGUMENTS}) -> (Tensor, Tensor)", _fake)
def _gqa(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sinks: torch.Tensor | None,
    page_table: torch.Tensor, seq_lens: torch.Tensor, starts: torch.Tensor, cu_seqlens_q: torch.Tensor,
    page_size: int, max_query_len: int, max_seq_len: int, scale: float, window: int, softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    (tokens, heads, head_dim), kv_heads, requests = q.shape, k_cache.shape[2], seq_lens.shape[0]
    o, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)
    if not tokens or not requests:
        return o, lse
    tile = _tile(max_query_len, heads, kv_heads, head_dim, q.dtype)
    tiles = triton.cdiv(max_query_len * (heads // kv_heads), tile["BLOCK_M"])
    keys = min(max_seq_len, window + max_query_len - 1) if window else max_seq_len
    splits = _num_splits(tiles * kv_heads * requests, keys)
    part, part_lse = o, lse
    if splits > 1:
        part = q.new_empty(tokens, heads, splits, head_dim, dtype=torch.float32)
        part_lse = q.new_empty(tokens, heads, splits, dtype=torch.float32)
    _gqa_kernel[(tiles, kv_heads * splits, requests)](
        q, k_cache, v_cache, q if sinks is None else sinks, part, part_lse,
        page_table, seq_lens, starts, cu_seqlens_q, q.stride(0), q.stride(1), page_table.stride(0),
        scale, softcap,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, PAGE=page_size, WINDOW=window,
        SOFTCAP=softcap > 0, SINKS=sinks is not None, SPLITS=splits, **tile, **_options(tile),
    )  # fmt: skip
    if splits > 1:
        _reduce_kernel[(tokens * heads,)](
            part, part_lse, q if sinks is None else sinks, o, lse,
            HEADS=heads, HEAD_DIM=head_dim, SINKS=sinks is not None, SPLITS=splits,
            BLOCK_S=triton.next_power_of_2(splits), BLOCK_D=tile["BLOCK_D"], num_warps=4,
        )  # fmt: skip
    return o, lse


class TritonGQA:
    """Flash-style tiles over the pages themselves: keys and values are read once a tile, never gathered."""

    def __init__(self, cfg: GQAConfig) -> None:
        self.cfg = cfg

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMeta,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(o, lse)``, both new contiguous tensors."""
        cfg = self.cfg
        result: tuple[torch.Tensor, torch.Tensor] = _gqa(
            q, k_cache, v_cache, sinks, meta.page_table, meta.seq_lens, meta.starts, meta.cu_seqlens_q,
            meta.page_size, meta.max_query_len, meta.max_seq_len,
            cfg.softmax_scale, cfg.window or 0, cfg.softcap or 0.0,
        )  # fmt: skip
        return result


def _build(
    name: str, heads: int, kv_heads: int, dim: int, max_query_len: int, splits: int,
    dtype: str = "bf16", cache: str = "", window: int = 0, sinks: bool = False, softcap: bool = False, page: int = 64,
) -> KernelBuild:  # fmt: skip
    torch_dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
    tile = _tile(max_query_len, heads, kv_heads, dim, torch_dtype)
    return KernelBuild(
        f"gqa_{name}",
        _gqa_kernel,
        {
            "q_ptr": f"*{dtype}", **dict.fromkeys(("k_ptr", "v_ptr"), f"*{cache or dtype}"),
            "sinks_ptr": "*fp32",
            "o_ptr": "*fp32" if splits > 1 else f"*{dtype}", "lse_ptr": "*fp32",
            **dict.fromkeys(("table_ptr", "lens_ptr", "starts_ptr", "cu_ptr"), "*i32"),
            **dict.fromkeys(("q_token", "q_head", "table_row"), "i64"), "scale": "fp32", "softcap": "fp32",
        },
        {
            "HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": dim, "PAGE": page, "WINDOW": window,
            "SOFTCAP": softcap, "SINKS": sinks, "SPLITS": splits, **tile,
        },
        **_options(tile),
    )  # fmt: skip


COMPILE = [
    _build("qwen3_8b_decode", 32, 8, 128, 1, 8),
    _build("qwen3_8b_prefill", 32, 8, 128, 2048, 1),
    _build("qwen3_8b_prefill_fp8", 32, 8, 128, 2048, 1, cache="fp8e4nv"),
    _build("qwen3_8b_decode_fp8", 32, 8, 128, 1, 8, cache="fp8e4nv"),
    _build("gpt_oss_decode", 64, 8, 64, 1, 2, window=128, sinks=True),
    _build("gpt_oss_prefill", 64, 8, 64, 2048, 1, window=128, sinks=True),
    _build("qwen3_next_prefill", 16, 2, 256, 2048, 1),
    _build("gemma2_prefill", 16, 8, 256, 2048, 1, window=4096, softcap=True),
    _build("llama_fp32_prefill", 32, 8, 128, 2048, 1, dtype="fp32"),
    _build("llama_fp32_decode", 32, 8, 128, 1, 8, dtype="fp32"),
    _build("fp32_256", 16, 2, 256, 2048, 1, dtype="fp32"),
    _build("page_1_decode", 32, 8, 128, 1, 8, page=1),
    KernelBuild(
        "gqa_reduce_128",
        _reduce_kernel,
        {
            **dict.fromkeys(("part_ptr", "part_lse_ptr", "sinks_ptr", "lse_ptr"), "*fp32"), "o_ptr": "*bf16",
        },
        {"HEADS": 32, "HEAD_DIM": 128, "SINKS": True, "SPLITS": 64, "BLOCK_S": 64, "BLOCK_D": 128},
        num_warps=4,
    ),
]  # fmt: skip
