"""MLA's decode over an e4m3 cache by the kernel in Gluon: one new token a request, few heads or many.

Requests are cut by the plan of :mod:`fastlayers.attention.mla.launch_config`, and parts added up by the kernel of
:mod:`fastlayers.attention.mla.triton`: by that one's own launches all of it runs in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import torch

from fastlayers import env
from fastlayers.attention.meta import AttentionMeta
from fastlayers.attention.mla.config import NAME, MLAConfig, empty_decode
from fastlayers.attention.mla.gluon import KEYS, ROWS, STAGES, VALUE_WARPS, heads_kernel
from fastlayers.attention.mla.launch_config import (
    NOMINAL_SM_COUNT,
    SPLIT_ROWS,
    LaunchConfig,
    decode_launch,
    reduce_tile,
)
from fastlayers.attention.mla.triton import LOG2_E, _decode_kernel
from fastlayers.attention.mla.triton_reduce import reduce_launch
from fastlayers.device import as_device
from fastlayers.errors import ArgumentError, check_keys
from fastlayers.integers import cdiv
from fastlayers.operators import operator
from fastlayers.triton_lang import dependent_launch

# Programs a multiprocessor that parts aim at, the usual first: it holds one at a time. Where lengths differ, two in
# turn end sooner than one; where they do not, the second costs what a program costs besides its rows.
PER_SM = (2, 1, 4)
# The twin's: heads of a program, its warps and stages.
TWIN_ROWS, TWIN_WARPS, TWIN_STAGES = 16, 8, 2


def _plan(cfg_of: tuple[int, torch.dtype, int], requests: int, max_seq_len: int, per_sm: int) -> tuple[int, ...]:
    """Return a launch's blocks of heads, parts: usual, at most, and by whose lengths, and the fewest rows of a part."""
    heads, dtype, page = cfg_of
    knobs = ROWS.value, KEYS.value, VALUE_WARPS, STAGES.value, per_sm
    sm_count = as_device("cuda").sm_count if torch.cuda.is_available() else NOMINAL_SM_COUNT
    config, *found = decode_launch(heads, requests, 1, max_seq_len, dtype, torch.float8_e4m3fn, page, knobs, sm_count)
    assert isinstance(config, LaunchConfig)
    return (*found, config.split_rows)


@lru_cache(maxsize=4096)
def _launches(
    shape: tuple[int, ...], rank: int, strides: tuple[int, ...], page: int, scale: float, max_seq_len: int,
    dtype: torch.dtype, per_sm: int, twin: bool, device: torch.device,
) -> tuple[int, bool, Callable[..., None], Callable[..., None]]:  # fmt: skip
    """Return the most parts of a request, whether lengths settle them, what launches the attention, and what adds up.

    The former takes queries, cache, page table, starts, lengths, the tokens' first rows, positions, output, LSE, parts.
    """
    (requests, heads, width), launch = shape, dependent_launch(device)
    q_token, q_head, of_page, of_row, of_table = strides
    blocks, wanted, splits, block, least = _plan((heads, dtype, page), requests, max_seq_len, per_sm)
    rows, blocks = requests * heads, cdiv(heads, TWIN_ROWS) if twin else blocks
    # Parts by length: each request may have one more than it would have of the mean length.
    grid = (requests * (wanted + 1) * blocks, 1) if block else (requests * blocks, splits)
    sizes = {"HEADS": heads, "PAGE": page, "DIRECT": splits == 1, "REQUESTS": block, "LEAST": least} | launch
    numbers = scale * LOG2_E, splits, wanted, requests, rows
    if twin:
        attend = _decode_kernel.at(
            grid, *strides, *numbers, **sizes, RANK=rank, ROPE=width - rank, ROW_BLOCKS=blocks, SINGLE=True,
            CAUSAL=False, TREE=False, AHEAD=True, BLOCK_M=TWIN_ROWS, BLOCK_N=KEYS.value, num_warps=TWIN_WARPS,
            num_stages=TWIN_STAGES,
        )  # fmt: skip

        def decode(*given: torch.Tensor) -> None:
            q, cache, table, starts, lens, cu, positions, *out = given
            attend(q, cache, table, starts, cu, positions, lens, positions, *out)
    else:
        if of_page % 4 or of_row % 4:
            raise ArgumentError(NAME, "cache", f"strides {of_page}, {of_row}", "rows that begin at multiples of four")
        attend = heads_kernel.at(
            grid, q_token, q_head, of_page // 4, of_row // 4, of_table, *numbers, **sizes, num_warps=VALUE_WARPS
        )  # fmt: skip

        def decode(*given: torch.Tensor) -> None:
            q, cache, table, starts, lens, _, _, *out = given
            attend(q, cache, table, starts, lens, *out)

    return splits, block > 0, decode, reduce_launch(rows, rank, wanted, splits, block > 0, device)


@operator("mla_gluon_decode", empty_decode)
def _decode(
    q: torch.Tensor, cache: torch.Tensor, page_table: torch.Tensor, starts: torch.Tensor, seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor, positions: torch.Tensor, rank: int, scale: float, max_seq_len: int, per_sm: int,
    twin: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    o, lse = empty_decode(q, rank)
    splits, by_length, decode, reduce = _launches(
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
    decode(q, cache, page_table, starts, seq_lens, cu_seqlens_q, positions, partial, partial_lse, parts)
    if splits > 1:
        reduce(partial, partial_lse, parts, o, lse)
    return o, lse


class GluonMLA:
    """Decode only. Capture-safe: grids and most parts come from host bounds, lengths are read on the device.

    Attributes
    ----------
    twin : bool
        Whether Triton's kernel with the same parts and tiles computes instead: in its interpreter, and for tests.
    """

    def __init__(self, cfg: MLAConfig, config: Mapping[str, int] | None = None) -> None:
        if config is not None:
            check_keys("mla", "config of the Gluon backend", config, ("per_sm",))
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
            raise ArgumentError(NAME, "meta", "a step of several new tokens a request", "one each for backend 'gluon'")
        o, lse = _decode(
            q, cache, meta.page_table, meta.starts, meta.seq_lens, meta.cu_seqlens_q, meta.positions, self.rank,
            self.scale, meta.max_seq_len, self.per_sm, self.twin,
        )  # fmt: skip
        return o, lse

    def kernels_of(self, requests: int, max_query_len: int, max_seq_len: int) -> tuple[tuple[int, ...], tuple[()]]:
        """Return what of a step over latents is compiled into kernels; it does not change back with the length."""
        cfg = self.cfg
        rounded = max_seq_len - max_seq_len % SPLIT_ROWS
        plan = _plan((cfg.num_heads, cfg.dtype, cfg.page_size), requests, rounded, self.per_sm)
        _, usual, splits, block, _ = plan
        return (reduce_tile(usual, cfg.kv_lora_rank).block if splits > 1 else 0, block), ()
