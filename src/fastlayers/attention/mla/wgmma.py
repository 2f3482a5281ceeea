"""MLA's decode of few heads on Hopper's wide matrix units: heads are the columns of both products.

    program = a part of one request's cached rows, all of its heads; 64 cached rows a tile
      score [64, heads] = latents [64, L+R] · queriesᵀ         left operand: the tile where copies put it
      acc   [L, heads] += latentsᵀ [L, 64] · weights [64, heads]   left operand: the same tile, read across

A wgmma has 64 rows at least, of which 16 heads would fill a quarter; so turned it has no row too many, needs no
registers for its left operand, and leaves them to the sums. With 16 heads a tile takes 2,000 clocks of some 4,000 in
which memory brings the next: the kernel in Gluon (:mod:`fastlayers.attention.mla.gluon_columns`) asks for it while it
multiplies. The one in Triton, which asks only then, runs in the interpreter, and computes the same bits. Requests are
cut, and their parts added up, as in :mod:`fastlayers.attention.mla.triton`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import torch
import triton.language as tl

from fastlayers import env
from fastlayers.attention.meta import AttentionMeta
from fastlayers.attention.mla.config import NAME, MLAConfig, empty_decode
from fastlayers.attention.mla.gluon_columns import gluon_columns_kernel
from fastlayers.attention.mla.launch_config import NOMINAL_SM_COUNT, SPLIT_ROWS, decode_launch, reduce_tile
from fastlayers.attention.mla.triton import LOG2_E, LOWEST, _natural_lse, _part_of
from fastlayers.attention.mla.triton_reduce import or_one, reduce_launch
from fastlayers.device import as_device
from fastlayers.errors import ArgumentError, check_keys
from fastlayers.operators import operator
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, dot, release_dependents

# Heads of a program, cached rows a tile, warps, tiles in shared memory (of 73 KiB).
ROWS, KEYS, WARPS, STAGES = 16, 64, 4, 2
# Programs a multiprocessor that parts aim at, the usual first: it holds one at a time.
PER_SM = (1, 2, 4)


@kernel(do_not_specialize=("table_stride", "splits", "wanted", "requests", "num_rows"))
def columns_kernel(
    q_ptr, cache_ptr, table_ptr, starts_ptr, lens_ptr, o_ptr, lse_ptr, parts_ptr, q_stride_t, q_stride_h, page_stride,
    row_stride, table_stride, scale, splits, wanted, requests, num_rows, HEADS: tl.constexpr, RANK: tl.constexpr,
    ROPE: tl.constexpr, PAGE: tl.constexpr, DIRECT: tl.constexpr, REQUESTS: tl.constexpr, LEAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Every request has one new token; a page holds whole tiles.

    ``REQUESTS``: a power of two that holds all requests, whose keys are shared out by their lengths; or 0.
    """
    await_inputs(PDL)
    release_dependents(PDL)
    if REQUESTS:
        request, split, part, parts = _part_of(
            tl.program_id(0), lens_ptr, starts_ptr, requests, wanted, splits, REQUESTS, BLOCK_N, LEAST
        )
        if request >= requests:
            return
    else:
        request, split = tl.program_id(0), tl.program_id(1)
    token, row = request.to(tl.int64), tl.arange(0, BLOCK_M)
    real = row < HEADS
    if REQUESTS:
        tl.store(parts_ptr + token * HEADS + row, parts, mask=real & (split == 0))
    start, end = tl.load(starts_ptr + request), tl.load(lens_ptr + request)
    low, high = start // BLOCK_N * BLOCK_N, end
    if not DIRECT:
        if not REQUESTS:
            part = tl.cdiv(tl.cdiv(tl.maximum(end - low, 0), splits), BLOCK_N) * BLOCK_N
        low += split * part
        high = tl.minimum(low + part, end)
    latent_column, rope_column, column = tl.arange(0, RANK), tl.arange(0, ROPE), tl.arange(0, BLOCK_N)
    q_row = (q_ptr + token * q_stride_t + row * q_stride_h)[:, None]
    q_latent = tl.trans(tl.load(q_row + latent_column[None, :], mask=real[:, None], other=0.0))
    q_rope = tl.trans(tl.load(q_row + RANK + rope_column[None, :], mask=real[:, None], other=0.0))
    highest = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([RANK, BLOCK_M], tl.float32)
    table = table_ptr + token * table_stride
    latent_at = column[:, None] * row_stride + latent_column[None, :]
    rope_at = column[:, None] * row_stride + RANK + rope_column[None, :]
    page = tl.load(table + low // PAGE, mask=low < high, other=0)
    for n in range(low, high, BLOCK_N):
        key = n + column
        # Rows outside the request are never read: a stale page may hold NaN, and 0 · NaN is NaN.
        inside = ((key < high) & (key >= start))[:, None]
        tile = cache_ptr + page.to(tl.int64) * page_stride + (n % PAGE) * row_stride
        page = tl.load(table + (n + BLOCK_N) // PAGE, mask=n + BLOCK_N < high, other=0)
        latent = tl.load(tile + latent_at, mask=inside, other=0.0)
        rope = tl.load(tile + rope_at, mask=inside, other=0.0)
        score = dot(latent, q_latent, tl.zeros([BLOCK_N, BLOCK_M], tl.float32))
        score = dot(rope, q_rope, score) * scale
        score = tl.where(inside, score, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(score, axis=0))
        weight = tl.exp2(score - new_highest[None, :])
        decay = tl.exp2(highest - new_highest)
        total = total * decay + tl.sum(weight, axis=0)
        acc = dot(tl.trans(latent), cast(weight, latent.dtype), acc * decay[None, :])
        highest = new_highest
    base = token * HEADS
    if not DIRECT:
        base += split.to(tl.int64) * num_rows
    tl.store(lse_ptr + base + row, _natural_lse(highest, total), mask=real)
    if DIRECT or low < high:
        o = cast(acc * (1.0 / or_one(total))[None, :], o_ptr.dtype.element_ty)
        tl.store(o_ptr + base * RANK + row[None, :] * RANK + latent_column[:, None], o, mask=real[None, :])


def _plan(cfg_of: tuple[int, torch.dtype, int], requests: int, max_seq_len: int, per_sm: int) -> tuple[int, ...]:
    """Return a launch's parts of a request: usual, at most, and by whose lengths, and the fewest rows of a part."""
    heads, dtype, page = cfg_of
    sm_count = as_device("cuda").sm_count if torch.cuda.is_available() else NOMINAL_SM_COUNT
    tiles = ROWS, KEYS, WARPS, STAGES, per_sm
    config, _, *found = decode_launch(heads, requests, 1, max_seq_len, dtype, dtype, page, tiles, sm_count)
    return (*found, config.split_rows)


@lru_cache(maxsize=4096)
def _launches(
    shape: tuple[int, ...], rank: int, strides: tuple[int, ...], page: int, scale: float, max_seq_len: int,
    dtype: torch.dtype, per_sm: int, twin: bool, device: torch.device,
) -> tuple[int, bool, Callable[..., None], Callable[..., None]]:  # fmt: skip
    """Return the most parts of a request, whether lengths settle them, what launches the attention, what adds up."""
    (requests, heads, width), launch = shape, dependent_launch(device)
    wanted, splits, block, least = _plan((heads, dtype, page), requests, max_seq_len, per_sm)
    rows = requests * heads
    # Parts by length: each request may have one more than it would have of the mean length.
    grid = (requests * (wanted + 1), 1) if block else (requests, splits)
    numbers = *strides, scale * LOG2_E, splits, wanted, requests, rows
    sizes = {"HEADS": heads, "PAGE": page, "DIRECT": splits == 1, "REQUESTS": block, "LEAST": least}
    tiles = {"BLOCK_M": ROWS, "BLOCK_N": KEYS, "num_warps": WARPS} | launch
    if twin:
        attend = columns_kernel.at(
            grid, *numbers, **sizes, RANK=rank, ROPE=width - rank, **tiles, num_stages=STAGES
        )  # fmt: skip
    else:
        attend = gluon_columns_kernel.at(grid, *numbers, **sizes, **tiles)
    return splits, block > 0, attend, reduce_launch(rows, rank, wanted, splits, block > 0, device)


@operator("mla_wgmma_decode", empty_decode)
def _decode(
    q: torch.Tensor, cache: torch.Tensor, page_table: torch.Tensor, starts: torch.Tensor, seq_lens: torch.Tensor,
    rank: int, scale: float, max_seq_len: int, per_sm: int, twin: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    o, lse = empty_decode(q, rank)
    splits, by_length, attend, reduce = _launches(
        q.shape, rank, (*q.stride()[:2], *cache.stride()[:2], page_table.stride()[0]), cache.shape[1], scale,
        # No part ends within so many rows, so that the longest request may be rounded down.
        max_seq_len - max_seq_len % SPLIT_ROWS, q.dtype, per_sm, twin, q.device,
    )  # fmt: skip
    partial, partial_lse, parts = o, lse, seq_lens
    if splits > 1:
        partial = q.new_empty(splits, *o.shape, dtype=torch.float32)
        partial_lse = q.new_empty(splits, *lse.shape, dtype=torch.float32)
    if by_length:
        parts = q.new_empty(*lse.shape, dtype=torch.int32)
    attend(q, cache, page_table, starts, seq_lens, partial, partial_lse, parts)
    if splits > 1:
        reduce(partial, partial_lse, parts, o, lse)
    return o, lse


class WgmmaMLA:
    """Decode only. Capture-safe: grids and most parts come from host bounds, lengths are read on the device.

    Attributes
    ----------
    twin : bool
        Whether Triton's kernel with the same tiles computes instead: in its interpreter, and for tests.
    """

    def __init__(self, cfg: MLAConfig, config: Mapping[str, int] | None = None) -> None:
        if config is not None:
            check_keys("mla", "config of the wgmma backend", config, ("per_sm",))
        self.cfg, self.rank, self.scale = cfg, cfg.kv_lora_rank, cfg.softmax_scale
        self.per_sm = PER_SM[0] if config is None else config["per_sm"]
        self.twin = env.triton_interpret()

    @staticmethod
    def candidates(cfg: MLAConfig, num_tokens: int) -> list[dict[str, int]]:
        """Return the configurations that a tuner tries, the usual first."""
        return [{"per_sm": count} for count in PER_SM]

    def decode(self, q: torch.Tensor, cache: torch.Tensor, meta: AttentionMeta) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(o [T,H,L] of q's dtype, lse [T,H] fp32)``.

        Raises
        ------
        ArgumentError
            A request brings other than one new token: a layer takes another backend for such steps.
        """
        if q.shape[0] == 0:
            return empty_decode(q, self.rank)
        if not meta.is_decode:
            raise ArgumentError(NAME, "meta", "a step of several new tokens a request", "one each for backend 'wgmma'")
        o, lse = _decode(
            q, cache, meta.page_table, meta.starts, meta.seq_lens, self.rank, self.scale, meta.max_seq_len, self.per_sm,
            self.twin,
        )  # fmt: skip
        return o, lse

    def kernels_of(self, requests: int, max_query_len: int, max_seq_len: int) -> tuple[tuple[int, ...], tuple[()]]:
        """Return what of a step over latents is compiled into kernels; it does not change back with the length."""
        cfg = self.cfg
        rounded = max_seq_len - max_seq_len % SPLIT_ROWS
        usual, splits, block, _ = _plan((cfg.num_heads, cfg.dtype, cfg.page_size), requests, rounded, self.per_sm)
        return (reduce_tile(usual, cfg.kv_lora_rank).block if splits > 1 else 0, block), ()
