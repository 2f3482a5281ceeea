"""Which kernels of sgl_kernel and flashinfer are timed beside which small operator, and what they refuse.

The kernels themselves, and what is and is not timed: :mod:`small_kernels`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastlayers.activation.silu_mul.layer import SiluMulConfig
from fastlayers.activation.silu_mul_quant.layer import SiluMulQuantConfig
from fastlayers.attention.kv_write.layer import KVWriteConfig
from fastlayers.attention.mla_kv_write.layer import MLAKVWriteConfig
from fastlayers.attention.rotary_kv_write.layer import RotaryKVWriteConfig
from fastlayers.device import Device, as_device
from fastlayers.moe.router.layer import RouterConfig
from fastlayers.norm.rms_norm.layer import RMSNormConfig
from fastlayers.registry import Backend, registry
from fastlayers.rotary.layer import RotaryConfig

sys.path.insert(0, str(Path(__file__).parent))
from small_kernels import (
    FlashInferKVWrite,
    FlashInferMergeState,
    FlashInferMLAKVWrite,
    FlashInferRMSNorm,
    FlashInferRotary,
    FlashInferRotaryKVWrite,
    FlashInferRouter,
    FlashInferSampler,
    FlashInferSiluMul,
    FlashInferTopKTopP,
    SglMergeState,
    SglMoEAlign,
    SglRMSNorm,
    SglRotary,
    SglRouter,
    SglSiluMulQuant,
    writes_of,
)

BF16 = torch.bfloat16


def _refuse_cuda(cfg: Any, device: Device) -> str | None:
    return device.refuses_16_bit_vectors(BF16, 8)


def _refuse_activation(cfg: SiluMulConfig, device: Device) -> str | None:
    return device.refuses_16_bit_vectors(cfg.dtype, cfg.size)


def _refuse_norm(cfg: RMSNormConfig, device: Device) -> str | None:
    return device.refuses_16_bit_vectors(cfg.dtype, cfg.hidden_size)


def _refuse_quant(cfg: SiluMulQuantConfig, device: Device) -> str | None:
    if cfg.scale_fmt != "float" or cfg.size % cfg.group_size:
        return f"{cfg.scale_fmt} scales of {cfg.size} values in groups of {cfg.group_size}; float and whole groups run"
    return _refuse_cuda(cfg, device)


def _refuse_rotary(cfg: RotaryConfig, device: Device) -> str | None:
    if cfg.mrope_section or (cfg.interleaved_out and not cfg.interleaved_in):
        return "one position a token, and pairs that stay pairs"
    if cfg.head_dim not in (64, 128, 256):
        return f"head_dim {cfg.head_dim} is not one of 64, 128, 256"
    return _refuse_cuda(cfg, device)


def _refuse_rotary_write(cfg: RotaryKVWriteConfig, device: Device) -> str | None:
    if cfg.qk_norm is not None:
        return "has no norm of queries and keys"
    pairing = (cfg.interleaved_in, cfg.interleaved_out)
    why = _refuse_rotary(RotaryConfig(cfg.head_dim, cfg.rotary_dim, *pairing), device)
    if why is not None:
        return why
    if cfg.latent:
        return _refuse_mla_write(MLAKVWriteConfig(cfg.v_head_dim, cfg.head_dim, cfg.kv_dtype), device)
    return _refuse_write(writes_of(cfg), device)


def _refuse_write(cfg: KVWriteConfig, device: Device) -> str | None:
    if cfg.kv_dtype != BF16 or cfg.head_dim != cfg.v_head_dim:
        return f"{cfg.kv_dtype}, heads of {cfg.head_dim} and {cfg.v_head_dim}; bf16 and equal heads run"
    return _refuse_cuda(cfg, device)


def _refuse_mla_write(cfg: MLAKVWriteConfig, device: Device) -> str | None:
    if (cfg.kv_dtype, cfg.kv_lora_rank, cfg.rope_dim) != (BF16, 512, 64):
        return f"rows of {cfg.kv_lora_rank} + {cfg.rope_dim} in {cfg.kv_dtype}; 512 + 64 in bf16 run"
    return _refuse_cuda(cfg, device)


def _refuse_v3_router(cfg: RouterConfig, device: Device) -> str | None:
    v3 = cfg.scoring == "sigmoid" and cfg.correction_bias and cfg.renormalize and cfg.weights_dtype is None
    if not v3 or cfg.group_score != "top2_sum" or cfg.masked_score != "-inf":
        return "runs DeepSeek-V3's routing only"
    most = (cfg.group_size, cfg.group_size * cfg.topk_groups) if cfg.num_groups > 1 else (0, 0)
    if cfg.top_k > 8 or cfg.num_experts > 384 or most[0] > 32 or most[1] > 128:
        return "at most 8 of 384 experts, 32 in a group, 128 in the groups that stay"
    return _refuse_cuda(cfg, device)


def _refuse_plain_router(cfg: RouterConfig, device: Device) -> str | None:
    if cfg.grouped or cfg.factor != 1.0 or cfg.weights_dtype is not None:
        return "has no groups, no factor and no rounding of weights"
    if cfg.correction_bias and cfg.scoring != "sigmoid":
        return "adds a bias before the softmax"
    return _refuse_cuda(cfg, device)


def _sgl(
    target: Callable[..., Any], operator: str, refuse: Callable[[Any, Device], str | None], name: str = "sgl_kernel"
) -> Backend:
    return Backend(name, target, ("sgl_kernel", f"torch.ops:sgl_kernel.{operator}"), refuse, ())


def _flashinfer(
    target: Callable[..., Any], function: str, refuse: Callable[[Any, Device], str | None], name: str = "flashinfer"
) -> Backend:
    return Backend(name, target, (f"flashinfer{function}",), refuse, ())


def _on_hopper(refuse: Callable[[Any, Device], str | None]) -> Callable[[Any, Device], str | None]:
    """Return what else refuses cards before those that launch dependently."""

    def refuses(cfg: Any, device: Device) -> str | None:
        old = device.capability is None or device.capability < (9, 0)
        return f"needs sm_90, this is {device.sm}" if old else refuse(cfg, device)

    return refuses


def _pdl(
    target: Callable[..., Any], function: str, refuse: Callable[[Any, Device], str | None], name: str = "flashinfer"
) -> Backend:
    """Return the row of a kernel that is launched dependently on the one before it."""
    return _flashinfer(target, function, _on_hopper(refuse), f"{name}, PDL")


# Rows that are registered under a package's plain name have another one here.
PEERS: dict[str, tuple[Backend, ...]] = {
    "rms_norm": (
        _sgl(SglRMSNorm, "fused_add_rmsnorm", _refuse_norm, "sgl_kernel in place"),
        _sgl(
            partial(SglRMSNorm, pdl=True), "fused_add_rmsnorm", _on_hopper(_refuse_norm), "sgl_kernel in place, PDL"
        ),
        _flashinfer(FlashInferRMSNorm, ":fused_add_rmsnorm", _refuse_norm, "flashinfer in place"),
        _pdl(partial(FlashInferRMSNorm, pdl=True), ":fused_add_rmsnorm", _refuse_norm, "flashinfer in place"),
    ),
    # Rows that "auto" never takes: benchmarks leave them out.
    "silu_mul": (
        *(registry("silu_mul").named(name) for name in ("sgl_kernel", "flashinfer")),
        _pdl(FlashInferSiluMul, ":silu_and_mul", _refuse_activation),
    ),
    "silu_mul_quant": (
        _sgl(SglSiluMulQuant, "sgl_per_token_group_quant_8bit_v2", _refuse_quant, "sgl_kernel (2 launches)"),
    ),
    "rotary": (
        _sgl(SglRotary, "rotary_embedding", _refuse_rotary, "sgl_kernel in place"),
        _flashinfer(FlashInferRotary, ".rope:apply_rope_with_cos_sin_cache", _refuse_rotary),
    ),
    "rotary_kv_write": (
        _flashinfer(
            FlashInferRotaryKVWrite, ".rope:apply_rope_with_cos_sin_cache", _refuse_rotary_write,
            "flashinfer (2 launches)",
        ),
    ),
    "kv_write": (_flashinfer(FlashInferKVWrite, ".page:append_paged_kv_cache", _refuse_write),),
    "mla_kv_write": (_flashinfer(FlashInferMLAKVWrite, ".page:append_paged_mla_kv_cache", _refuse_mla_write),),
    "merge_state": (
        _sgl(SglMergeState, "merge_state_v2", _refuse_cuda),
        _flashinfer(FlashInferMergeState, ".cascade:merge_state", _refuse_cuda),
    ),
    "router": (
        _sgl(SglRouter, "topk_softmax", _refuse_plain_router),
        _flashinfer(FlashInferRouter, ".fused_moe:fused_topk_deepseek", _refuse_v3_router),
        _pdl(partial(FlashInferRouter, pdl=True), ".fused_moe:fused_topk_deepseek", _refuse_v3_router),
    ),
    "moe_align": (_sgl(SglMoEAlign, "moe_align_block_size", _refuse_cuda),),
    "sampler": (
        _flashinfer(FlashInferSampler, ".sampling:min_p_sampling_from_probs", _refuse_cuda, "flashinfer (4 launches)"),
        _pdl(
            partial(FlashInferSampler, pdl=True), ".sampling:min_p_sampling_from_probs", _refuse_cuda,
            "flashinfer (4 launches)",
        ),
        _flashinfer(
            FlashInferTopKTopP, ".sampling:top_k_top_p_sampling_from_probs", _refuse_cuda, "flashinfer (no min-p)"
        ),
    ),
}  # fmt: skip


def small_peers(layer: str, cfg: Any, device: Device | None = None) -> dict[str, Callable[[Any], Any]]:
    """Return the peers of a small operator that run ``cfg`` on ``device`` (default: this machine's), by name."""
    where = device or as_device("cuda" if torch.cuda.is_available() else "cpu")
    return {row.name: row.load() for row in PEERS.get(layer, ()) if row.why_not(cfg, where) is None}
