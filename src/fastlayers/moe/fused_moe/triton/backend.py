"""The experts in Triton: align, quantise, gate·up with the activation, down with the routing weight, reduce.

Grids depend on shapes only; programs beyond the blocks in use return at once. Partial sums are fp32 rows of
pairs, added per token in a fixed order: one rounding, no atomics.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

import torch

from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.moe.align.layer import num_blocks
from fastlayers.moe.align.triton import FEW, align, launch_few
from fastlayers.moe.fused_moe import launch_config
from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.experts_operator import ExpertsBackend, experts_operator
from fastlayers.moe.fused_moe.launch_config import (
    MAX_TOKENS,
    LaunchConfig,
    plan_for,
    plan_of,
    takes_strips,
    takes_vectors,
)
from fastlayers.moe.fused_moe.token_chunks import token_chunks
from fastlayers.moe.fused_moe.triton import grouped_gemm
from fastlayers.moe.fused_moe.triton.mxfp4.gemm import mxfp4_experts
from fastlayers.moe.fused_moe.triton.packed_gemm import packed_experts
from fastlayers.moe.fused_moe.triton.packed_vector import packed_vector_experts
from fastlayers.moe.fused_moe.triton.pair_gemm import pair_experts
from fastlayers.moe.fused_moe.triton.pair_vector import vector_experts
from fastlayers.moe.fused_moe.triton.pair_vector_fp8 import fp8_vector_experts
from fastlayers.moe.fused_moe.triton.quantize import CODES, quantize
from fastlayers.moe.fused_moe.triton.reduce import launch_reduce, reduce
from fastlayers.moe.fused_moe.triton.strip_gemm import strip_kernel
from fastlayers.moe.fused_moe.weights import EPS, FORMATS, GROUP, PLAIN_INPUTS, MoEWeights
from fastlayers.quant.weight_only_config import WEIGHT_ONLY
from fastlayers.runtime.launch import side_by_side
from fastlayers.triton_lang import dependent_launch


def _extend(
    weights: torch.Tensor, ids: torch.Tensor, experts: int, shared: int, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and ids with the shared experts appended."""
    tokens, top_k = ids.shape
    if shared == 0 or tokens == 0:
        return weights, ids
    out_weights = ids.new_empty(tokens, top_k + shared, dtype=torch.float32)
    out_ids = ids.new_empty(tokens, top_k + shared, dtype=torch.int32)
    grouped_gemm.append_shared_kernel[(cdiv(tokens, 32),)](
        weights.contiguous(), ids.contiguous(), out_weights, out_ids, tokens, 1.0 / factor,
        EXPERTS=experts, TOP_K=top_k, SHARED=shared, BLOCK_T=32, BLOCK_K=next_power_of_2(top_k + shared),
        num_warps=1, **dependent_launch(weights.device),
    )  # fmt: skip
    return out_weights, out_ids


class _Launches(NamedTuple):
    """What computes tokens of one shape, and the memory that lies between its launches.

    ``fused``: the first product quantises. Many pairs are aligned by themselves: then ``align`` is ``None``, and both
    products are given the alignment last.
    """

    size: int
    fused: bool
    align: Callable[..., None] | None
    gate_up: Callable[..., None]
    down: Callable[..., None]
    reduce: Callable[..., None]


@lru_cache(maxsize=4096)
def _launches(
    tokens: int, per_token: int, experts: int, hidden: int, inner: int, x_stride: int, dtype: torch.dtype, quant: str,
    ue8m0: bool, oai: bool, alpha: float, limit: float, interleaved: bool, bias1: bool, bias2: bool, factor: float,
    numbers: tuple[int, ...], device: torch.device,
) -> _Launches:  # fmt: skip
    plan, pairs, launch, wide = plan_of(numbers), tokens * per_token, dependent_launch(device), dtype == torch.float32
    first, second, fused = plan.first, plan.second, quant == "fp8_block" and plan.first.n == GROUP
    blocks, plain = num_blocks(pairs, experts, first.m), quant == "none"
    few, i32 = pairs <= FEW, torch.int32
    # What is quantised by a launch of its own lies elsewhere, and is gone before the second product.
    size, (rows, scales, partial, *aligned) = side_by_side(
        (pairs * inner if plain or fused else 0, dtype if plain else CODES[quant]),
        (pairs * cdiv(inner, GROUP) if fused else 0, torch.float32),
        (pairs * hidden, torch.float32),
        *(((blocks * first.m, i32), (blocks, i32), (1, i32)) if few else ()),
    )
    shared = {"QUANT": FORMATS.index(quant), "WIDE": wide, "BLOCK_M": first.m, "BAND": plan.band} | launch
    last = tuple(zip((7, 8, 9), aligned, strict=False))
    gate_up = grouped_gemm.gate_up_kernel.at(
        (blocks * cdiv(inner, first.n),), pairs, blocks, hidden, inner, x_stride, inner, alpha, limit, EPS,
        parts=(*(((5, rows), (6, scales)) if fused else ((5, rows),) if plain else ()), *last),
        PER_TOKEN=per_token, QUANT_OUT=fused, UE8M0=ue8m0, OAI=oai, HAS_BIAS=bias1, INTERLEAVED=interleaved,
        EVEN_K=hidden % first.k == 0, BLOCK_N=first.n, BLOCK_K=first.k, num_warps=first.warps,
        num_stages=first.stages, **shared,
    )  # fmt: skip
    between = ((0, rows), (1, scales)) if fused else ((0, rows),) if plain else ()
    tile = {"BLOCK_N": second.n, "num_warps": second.warps, "num_stages": second.stages}
    if plan.strip > 1:  # the kernel has no bias, and no place for it
        last = tuple((place - 1, each) for place, each in last)
        down = strip_kernel.at(
            (blocks * (hidden // (second.n * plan.strip)),), pairs, blocks, hidden,
            parts=(*between, (5, partial), *last), WIDE=wide, GROUPS=inner // GROUP, BLOCK_M=first.m,
            TILES=plan.strip, BAND=plan.band, **tile, **launch,
        )  # fmt: skip
    else:
        down = grouped_gemm.down_kernel.at(
            (blocks * cdiv(hidden, second.n),), pairs, blocks, hidden, inner, inner,
            parts=(*between, (6, partial), *last), HAS_BIAS=bias2, EVEN_K=inner % second.k == 0, BLOCK_K=second.k,
            **tile, **shared,
        )  # fmt: skip
    places = tuple(zip((1, 2, 3), aligned, strict=False))
    return _Launches(
        size, fused, launch_few(pairs, experts, first.m, device, places) if few else None, gate_up, down,
        launch_reduce(tokens, hidden, per_token, experts, factor, 1, device, ((0, partial),)),
    )  # fmt: skip


def _chunk(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, y: torch.Tensor, numbers: tuple[int, ...],
    packed: MoEWeights, cfg: FusedMoEConfig,
) -> None:  # fmt: skip
    """Compute ``y`` for at most MAX_TOKENS tokens; ``ids`` include shared experts, unless each pair is by itself."""
    (experts, hidden, inner), quant, plan = packed.w2.shape[:3], cfg.quant, plan_of(numbers)
    oai, factor, ue8m0 = cfg.activation == "swiglu_oai", cfg.scaling_factor, cfg.scale_fmt == "ue8m0"
    if quant == "mxfp4":
        partial = mxfp4_experts(x, weights, ids, packed, plan, oai, cfg.alpha, cfg.limit, cfg.interleaved)
        reduce(partial, ids, y, experts, factor, plan.splits)
        return
    if plan.first.m == 0 and quant == "w4a16":
        packed_vector_experts(x, weights, ids, packed, y, plan, cfg)
        return
    if quant in WEIGHT_ONLY:
        reduce(packed_experts(x, weights, ids, packed, plan, cfg), ids, y, experts, factor, plan.splits)
        return
    if plan.first.m == 0 and quant == "fp8_block":
        fp8_vector_experts(
            x, weights, ids, packed, y, cfg.num_shared, plan, ue8m0, oai, cfg.alpha, cfg.limit, factor
        )  # fmt: skip
        return
    if plan.first.m == 0:
        vector_experts(x, weights, ids, packed, y, plan, oai, cfg.alpha, cfg.limit, factor, cfg.interleaved)
        return
    values, scale = (x, weights) if quant == "none" else quantize(x, None, experts, quant, ue8m0)
    if plan.by_pair:
        pair_experts(
            values, scale, weights, ids, packed, y, cfg.num_shared, plan, quant, ue8m0, oai, cfg.alpha, cfg.limit,
            factor, cfg.interleaved,
        )  # fmt: skip
        return
    how = _launches_of(x, values.stride()[0], ids, packed, cfg, numbers)
    if quant == "none":
        _run(how, plan.first.m, x, weights, ids, y, packed)
        return
    memory = x.new_empty(how.size, dtype=torch.uint8)
    aligned = _aligned(how, memory, ids, experts, plan.first.m)
    # fp32 until it is quantised, so that the codes are those of the exact sums.
    rows = () if how.fused else (x.new_empty(ids.numel(), inner, dtype=torch.float32),)
    how.gate_up(
        memory, values, scale, packed.w13, packed.w13_scale, scale if packed.w13_bias is None else packed.w13_bias,
        *rows, *(() if how.fused else (scale,)), *aligned,
    )  # fmt: skip
    between = quantize(*rows, ids, experts, quant, ue8m0) if rows else ()
    bias2 = () if plan.strip > 1 else (weights if packed.w2_bias is None else packed.w2_bias,)
    how.down(memory, *between, packed.w2, packed.w2_scale, *bias2, weights, *aligned)
    how.reduce(memory, ids, y)


def _launches_of(
    x: torch.Tensor, stride: int, ids: torch.Tensor, packed: MoEWeights, cfg: FusedMoEConfig, numbers: tuple[int, ...]
) -> _Launches:
    """Return what computes ``x``, whose rows, or codes, are so far apart."""
    return _launches(
        *ids.shape, *packed.w2.shape[:3], stride, x.dtype, cfg.quant, cfg.scale_fmt == "ue8m0",
        cfg.activation == "swiglu_oai", cfg.alpha, cfg.limit, cfg.interleaved, packed.w13_bias is not None,
        packed.w2_bias is not None, cfg.scaling_factor, numbers, x.device,
    )  # fmt: skip


def _aligned(
    how: _Launches, memory: torch.Tensor, ids: torch.Tensor, experts: int, block: int
) -> tuple[torch.Tensor, ...]:
    """Align the pairs, and return the alignment where it is no part of the memory."""
    if how.align is None:
        return align(ids, experts, block)
    how.align(memory, ids)
    return ()


def _run(
    how: _Launches, block: int, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, y: torch.Tensor,
    packed: MoEWeights,
) -> None:  # fmt: skip
    """Compute ``y`` for tokens whose activations are not quantised."""
    memory, bias1, bias2 = x.new_empty(how.size, dtype=torch.uint8), packed.w13_bias, packed.w2_bias
    aligned = _aligned(how, memory, ids, packed.w2.shape[0], block)
    # Whatever tensor stands where there is none.
    how.gate_up(memory, x, weights, packed.w13, weights, weights if bias1 is None else bias1, weights, *aligned)
    how.down(memory, weights, packed.w2, weights, weights if bias2 is None else bias2, weights, *aligned)
    how.reduce(memory, ids, y)


@experts_operator("fused_moe")
def _fused_moe(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, packed: MoEWeights, cfg: FusedMoEConfig,
    numbers: list[int],
) -> torch.Tensor:  # fmt: skip
    y = x.new_empty(*x.shape)
    how = tuple(numbers)
    # Kernels of single pairs find shared experts themselves, but for packed weights.
    alone = plan_of(how).by_pair and cfg.quant not in WEIGHT_ONLY
    shared = 0 if alone else cfg.num_shared
    weights, ids = _extend(topk_weights, topk_ids, cfg.num_experts, shared, cfg.scaling_factor)
    for part in token_chunks(x, weights, ids, y, MAX_TOKENS):
        _chunk(*part, how, packed, cfg)
    return y


class TritonFusedMoE(ExpertsBackend):
    """One operator of 2 to 5 launches for few tokens, of 4 to 7 for more.

    Parameters
    ----------
    cfg : FusedMoEConfig
    config : mapping, optional
        What :meth:`candidates` gives; without it tiles depend on the number of tokens by a rule.
    """

    experts = _fused_moe

    def __init__(self, cfg: FusedMoEConfig, config: Mapping[str, int] | None = None) -> None:
        super().__init__(cfg)
        self.plan = None if config is None else LaunchConfig.of(config)

    @staticmethod
    def candidates(cfg: FusedMoEConfig, num_tokens: int) -> list[dict[str, int]]:
        """Return the configurations to measure for ``num_tokens`` tokens, the rule's own first."""
        return launch_config.candidates(cfg, num_tokens)

    @staticmethod
    def fits(cfg: FusedMoEConfig, config: Mapping[str, int]) -> bool:
        """Return whether a configuration, maybe of another shape's table, is one for this shape."""
        strip, tile = config.get("strip", 1), config.get("n2", GROUP)
        whole = strip == 1 or (GROUP % tile == 0 and takes_strips(cfg, strip * tile))
        return whole and (config.get("m") != 0 or takes_vectors(cfg))

    @staticmethod
    def token_counts(cfg: FusedMoEConfig, most: int) -> list[int]:
        """Return token counts with which the last chunk is of each size class: it runs by the plan of all tokens."""
        powers = [1 << power for power in range(max(0, min(MAX_TOKENS, most - MAX_TOKENS)).bit_length())]
        return [MAX_TOKENS + power for power in powers]

    def numbers_for(self, x: torch.Tensor) -> list[int]:
        """Return the plan of so many tokens."""
        return self._plan(x.shape[0], x.dtype == torch.float32).numbers()

    def bound(self, x: torch.Tensor, topk_ids: torch.Tensor, packed: MoEWeights) -> Callable[..., None] | None:
        """Return what computes a chunk of plain experts whose pairs are aligned."""
        numbers = tuple(self.numbers_for(x))
        plan = plan_of(numbers)
        if plan.by_pair or self.cfg.quant != "none" or self.cfg.num_shared:
            return None
        return functools.partial(
            _run, _launches_of(x, x.stride()[0], topk_ids, packed, self.cfg, numbers), plan.first.m
        )

    def _plan(self, tokens: int, wide: bool) -> LaunchConfig:
        if self.plan is None or (wide and self.cfg.quant in PLAIN_INPUTS):
            return plan_for(tokens, self.cfg, wide)
        return self.plan
