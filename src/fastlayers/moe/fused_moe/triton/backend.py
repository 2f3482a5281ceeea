"""The experts in Triton: align, quantise, gate·up with the activation, down with the routing weight, reduce.

Grids depend on shapes only; programs beyond the blocks in use return at once. Partial sums are fp32 rows of
pairs, added per token in a fixed order: one rounding, no atomics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import torch

from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.moe.align.triton import align
from fastlayers.moe.fused_moe import launch_config
from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.experts_operator import ExpertsBackend, experts_operator
from fastlayers.moe.fused_moe.launch_config import MAX_TOKENS, LaunchConfig, plan_for, plan_of
from fastlayers.moe.fused_moe.token_chunks import token_chunks
from fastlayers.moe.fused_moe.triton import grouped_gemm
from fastlayers.moe.fused_moe.triton.mxfp4_gemm import mxfp4_experts
from fastlayers.moe.fused_moe.triton.pair_gemm import pair_experts
from fastlayers.moe.fused_moe.triton.pair_vector import vector_experts
from fastlayers.moe.fused_moe.triton.reduce import reduce
from fastlayers.moe.fused_moe.weights import EPS, FORMATS, GROUP, MoEWeights
from fastlayers.triton_lang import dependent_launch

CODES = {"fp8_block": torch.float8_e4m3fn, "int8": torch.int8}


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


def _quantize(
    x: torch.Tensor, ids: torch.Tensor | None, experts: int, quant: str, ue8m0: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes ``[R, K]`` and scales ``[R, groups]``; with ``ids`` (one a row) dropped rows are skipped."""
    rows, width = x.shape
    fp8 = quant == "fp8_block"
    block = GROUP if fp8 else next_power_of_2(width)
    groups = cdiv(width, block)
    q = x.new_empty(rows, width, dtype=CODES[quant])
    s = x.new_empty(rows, groups, dtype=torch.float32)
    parts, warps = _parts(rows * groups, block)
    grouped_gemm.quantize_rows_kernel[(cdiv(rows * groups, parts),)](
        x, x if ids is None else ids, q, s, rows * groups, groups, x.stride(0), q.stride(0), width, experts, EPS,
        SKIP=ids is not None, MAX=448.0 if fp8 else 127.0, UE8M0=ue8m0, INT8=not fp8, PARTS=parts, BLOCK=block,
        num_warps=warps, **dependent_launch(x.device),
    )  # fmt: skip
    return q, s


def _parts(count: int, block: int) -> tuple[int, int]:
    """Return (groups a program takes, its warps): many small programs if few groups."""
    if block > GROUP:
        return 1, max(1, min(8, block // 512))
    return (1, 1) if count <= 512 else (4, 1) if count <= 8192 else (16, 4)


@lru_cache(maxsize=4096)
def _launch_gate_up(
    pairs: int, blocks: int, hidden: int, inner: int, x_stride: int, out_stride: int, per_token: int, quant: str,
    fused: bool, ue8m0: bool, wide: bool, oai: bool, alpha: float, limit: float, bias: bool, interleaved: bool,
    numbers: tuple[int, ...], device: torch.device,
) -> Callable[..., None]:  # fmt: skip
    plan = plan_of(numbers)
    tile = plan.first
    return grouped_gemm.gate_up_kernel.at(
        (blocks * cdiv(inner, tile.n),), pairs, blocks, hidden, inner, x_stride, out_stride, alpha, limit, EPS,
        PER_TOKEN=per_token, QUANT=FORMATS.index(quant), QUANT_OUT=fused, UE8M0=ue8m0, WIDE=wide, OAI=oai,
        HAS_BIAS=bias, INTERLEAVED=interleaved, EVEN_K=hidden % tile.k == 0, BLOCK_M=tile.m, BLOCK_N=tile.n,
        BLOCK_K=tile.k, BAND=plan.band, num_warps=tile.warps, num_stages=tile.stages, **dependent_launch(device),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _launch_down(
    pairs: int, blocks: int, hidden: int, inner: int, stride: int, quant: str, wide: bool, bias: bool,
    numbers: tuple[int, ...], device: torch.device,
) -> Callable[..., None]:  # fmt: skip
    plan = plan_of(numbers)
    tile = plan.second
    return grouped_gemm.down_kernel.at(
        (blocks * cdiv(hidden, tile.n),), pairs, blocks, hidden, inner, stride,
        QUANT=FORMATS.index(quant), WIDE=wide, HAS_BIAS=bias, EVEN_K=inner % tile.k == 0, BLOCK_M=tile.m,
        BLOCK_N=tile.n, BLOCK_K=tile.k, BAND=plan.band, num_warps=tile.warps, num_stages=tile.stages,
        **dependent_launch(device),
    )  # fmt: skip


def _gate_up(
    x: torch.Tensor, scale: torch.Tensor, packed: MoEWeights, ids: torch.Tensor, aligned: tuple[torch.Tensor, ...],
    numbers: tuple[int, ...], cfg: FusedMoEConfig, wide: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the inner rows of all pairs and their scales (a dummy if not quantised)."""
    sorted_ids, expert_ids, total = aligned
    (experts, rows, hidden), (tokens, per_token), quant = packed.w13.shape, ids.shape, cfg.quant
    inner, blocks, pairs, bias = rows // 2, expert_ids.shape[0], tokens * per_token, packed.w13_bias
    fused, ue8m0 = quant == "fp8_block" and plan_of(numbers).first.n == GROUP, cfg.scale_fmt == "ue8m0"
    out_scale = scale
    if fused:
        out = x.new_empty(pairs, inner, dtype=CODES[quant])
        out_scale = x.new_empty(pairs, cdiv(inner, GROUP), dtype=torch.float32)
    else:
        # fp32 until it is quantised, so that the codes are those of the exact sums.
        out = x.new_empty(pairs, inner) if quant == "none" else x.new_empty(pairs, inner, dtype=torch.float32)
    launch = _launch_gate_up(
        pairs, blocks, hidden, inner, x.stride()[0], inner, per_token, quant, fused, ue8m0, wide,
        cfg.activation == "swiglu_oai", cfg.alpha, cfg.limit, bias is not None, cfg.interleaved, numbers, x.device,
    )  # fmt: skip
    launch(
        x, scale, packed.w13, scale if packed.w13_scale is None else packed.w13_scale, scale if bias is None else bias,
        out, out_scale, sorted_ids, expert_ids, total,
    )  # fmt: skip
    if quant != "none" and not fused:
        return _quantize(out, ids, experts, quant, ue8m0)
    return out, out_scale


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
    wide = x.dtype == torch.float32
    values, scale = (x, weights) if quant == "none" else _quantize(x, None, experts, quant, ue8m0)
    if plan.first.m == 0:
        vector_experts(x, weights, ids, packed, y, plan, oai, cfg.alpha, cfg.limit, factor, cfg.interleaved)
        return
    if plan.by_pair:
        pair_experts(
            values, scale, weights, ids, packed, y, cfg.num_shared, plan, quant, ue8m0, oai, cfg.alpha, cfg.limit,
            factor, cfg.interleaved,
        )  # fmt: skip
        return
    aligned = align(ids, experts, plan.first.m)
    inner_rows, inner_scale = _gate_up(values, scale, packed, ids, aligned, numbers, cfg, wide)
    pairs, bias = inner_rows.shape[0], packed.w2_bias
    partial = x.new_empty(pairs, hidden, dtype=torch.float32)
    launch = _launch_down(
        pairs, aligned[1].shape[0], hidden, inner, inner_rows.stride()[0], quant, wide, bias is not None, numbers,
        x.device,
    )  # fmt: skip
    launch(
        inner_rows, inner_scale, packed.w2, weights if packed.w2_scale is None else packed.w2_scale,
        weights if bias is None else bias, weights, partial, *aligned,
    )  # fmt: skip
    reduce(partial, ids, y, experts, factor)


@experts_operator("fused_moe")
def _fused_moe(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, packed: MoEWeights, cfg: FusedMoEConfig,
    numbers: list[int],
) -> torch.Tensor:  # fmt: skip
    y = x.new_empty(*x.shape)
    how = tuple(numbers)
    shared = 0 if cfg.num_shared == 0 or plan_of(how).by_pair else cfg.num_shared
    weights, ids = _extend(topk_weights, topk_ids, cfg.num_experts, shared, cfg.scaling_factor)
    for part in token_chunks(x, weights, ids, y, MAX_TOKENS):
        _chunk(*part, how, packed, cfg)
    return y


class TritonFusedMoE(ExpertsBackend):
    """One operator of 3 to 5 launches for few tokens, of 4 to 7 for more.

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
        # Of the plan, or of the rule's plan for so many tokens.
        self._numbers: dict[tuple[int, bool], list[int]] = {}

    @staticmethod
    def candidates(cfg: FusedMoEConfig, num_tokens: int) -> list[dict[str, int]]:
        """Return the configurations to measure for ``num_tokens`` tokens, the rule's own first."""
        return launch_config.candidates(cfg, num_tokens)

    def __call__(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, packed: MoEWeights
    ) -> torch.Tensor:
        """Return ``y`` ``[T,D]`` in the dtype of ``x``, a new tensor."""
        key = x.shape[0], x.dtype == torch.float32
        numbers = self._numbers.get(key)
        if numbers is None:
            numbers = self._numbers[key] = self._plan(*key).numbers()
        return self.compute(x, topk_weights, topk_ids, packed, numbers)

    def _plan(self, tokens: int, wide: bool) -> LaunchConfig:
        if self.plan is None or (wide and self.cfg.quant in ("none", "mxfp4")):
            return plan_for(tokens, self.cfg, wide)
        return self.plan
