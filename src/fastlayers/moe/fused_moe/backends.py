"""The experts' backends: what each can run, and what it needs.

Weight layouts: all but ``triton_kernels`` read the checkpoint's, and share a ladder with Triton.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fastlayers.device import Device
from fastlayers.errors import dtype_name
from fastlayers.moe.fused_moe import cutlass_schedules
from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.weights import GROUP
from fastlayers.quant.weight_only_config import WEIGHT_ONLY
from fastlayers.registry import (
    REPEATS,
    TRITON_NEEDS,
    Backend,
    Registry,
    blackwell_guard,
    hopper_guard,
    not_multiple,
    reference_backend,
    torch_backend,
    triton_backend,
)


def _name(cfg: FusedMoEConfig) -> str:
    return "(unknown)" if cfg.dtype is None else dtype_name(cfg.dtype)


def _deep_gemm(cfg: FusedMoEConfig, device: Device) -> str | None:
    return device.refuses_all_but(9) or _not_fp8_or_bf16(cfg)


def _not_fp8_or_bf16(cfg: FusedMoEConfig) -> str | None:
    if cfg.quant not in ("none", "fp8_block"):
        return f"quant {cfg.quant!r} is not one of 'none', 'fp8_block'"
    if cfg.quant == "none":
        return _not_bf16(cfg, 64)
    if cfg.dtype not in (None, torch.bfloat16):
        return f"dtype {_name(cfg)} is not bfloat16"
    return _not_multiple(cfg, GROUP)


def _not_multiple(cfg: FusedMoEConfig, of: int) -> str | None:
    return not_multiple(cfg, hidden_size=of, intermediate_size=of)


def _not_bf16(cfg: FusedMoEConfig, of: int) -> str | None:
    if cfg.quant != "none":
        return f"quant {cfg.quant!r} is not 'none'"
    if cfg.dtype != torch.bfloat16:
        return f"dtype {_name(cfg)} is not bfloat16"
    return _not_multiple(cfg, of)


def _deep_gemm_masked(cfg: FusedMoEConfig, device: Device) -> str | None:
    if cfg.quant != "fp8_block":
        return f"quant {cfg.quant!r} is not 'fp8_block'"
    return _deep_gemm(cfg, device)


def _trtllm_refuses(cfg: FusedMoEConfig) -> str | None:
    return None if cfg.quant == "fp8_block" else f"quant {cfg.quant!r} is not 'fp8_block'"


def _flashinfer_cutlass(cfg: FusedMoEConfig, device: Device) -> str | None:
    """Refuse what the sm_90 alternative of TensorRT-LLM's experts does not take: the same format, silu, no biases."""
    if (why := device.refuses_all_but(9)) is not None:
        return why
    return "it has no shared experts" if cfg.num_shared else _fp8_silu(cfg, device)


def _fp8_silu(cfg: FusedMoEConfig, device: Device) -> str | None:
    if cfg.quant == "fp8_block" and cfg.activation != "silu":
        return f"activation {cfg.activation!r} is not 'silu'"
    if cfg.quant == "fp8_block" and cfg.bias:
        return "experts have biases"
    return _deep_gemm_masked(cfg, device)


def _torch_grouped(cfg: FusedMoEConfig, device: Device) -> str | None:
    return device.refuses_all_but(9) or _not_bf16(cfg, 8)


def _triton_kernels(cfg: FusedMoEConfig, device: Device) -> str | None:
    return _not_oai_mxfp4(cfg) or device.refuses_all_but(9) or _not_multiple(cfg, 64)


def _triton_swizzled(cfg: FusedMoEConfig, device: Device) -> str | None:
    if device.capability is not None and device.capability < (9, 0):
        return f"needs sm_90 or newer, this is {device.sm}"
    return _not_oai_mxfp4(cfg)


def _about_swizzled(cfg: FusedMoEConfig, device: Device) -> str:
    from fastlayers.moe.fused_moe.triton.mxfp4 import plans

    return plans.about(cfg, device)


def _not_oai_mxfp4(cfg: FusedMoEConfig) -> str | None:
    if cfg.quant != "mxfp4":
        return f"quant {cfg.quant!r} is not 'mxfp4'"
    if cfg.dtype != torch.bfloat16:
        return f"dtype {_name(cfg)} is not bfloat16"
    if cfg.activation != "swiglu_oai" or not cfg.interleaved:
        return "its activation is the clamped SwiGLU over interleaved rows"
    return None


def _triton(cfg: FusedMoEConfig, device: Device) -> str | None:
    if cfg.quant == "mxfp4" and device.capability is not None and device.capability < (9, 0):
        return f"MXFP4 codes are decoded by instructions of sm_90, this is {device.sm}"
    return device.refuses_e4m3("e4m3 dots") if cfg.quant == "fp8_block" else None


def _about_triton(cfg: FusedMoEConfig, device: Device) -> str:
    return f"{cfg.quant}: not measured on a GPU yet" if cfg.quant in WEIGHT_ONLY else ""


_HERE = "fastlayers.moe.fused_moe"
# In other words: an inner value near the border of two codes may take the other one.
_ROUNDS = "rounds the first product to bf16 before it is quantised"
_TILES = (
    "deep_gemm:_C.get_mk_alignment_for_contiguous_layout",
    "deep_gemm:_C.set_mk_alignment_for_contiguous_layout",
)
# Ahead of our own kernels for what it serves, MXFP4: 1.8 to 5.9 times as fast when it was measured.
TRITON_KERNELS = Backend(
    "triton_kernels",
    f"{_HERE}.packages.openai_triton_kernels:TritonKernelsFusedMoE",
    (
        "triton_kernels.matmul_ogs:matmul_ogs",
        "triton_kernels.swiglu:swiglu_fn",
        "triton_kernels.tensor:make_ragged_tensor_metadata",
        "triton_kernels.tensor_details.layout:HopperMXValueLayout.swizzle_data",
        *TRITON_NEEDS,
    ),
    _triton_kernels,
    weight_layout="triton_kernels",
    repeats_on=REPEATS,
)
# Our own kernels over the same layout, for few tokens: a ladder takes both.
TRITON_SWIZZLED = replace(
    triton_backend(f"{_HERE}.triton.mxfp4.hopper:TritonSwizzledFusedMoE", _triton_swizzled, "triton_kernels"),
    name="triton_swizzled",
    about=_about_swizzled,
)
PACKAGES = [
    Backend(
        "deep_gemm",
        f"{_HERE}.packages.deep_gemm:DeepGemmFusedMoE",
        (
            "deep_gemm:m_grouped_fp8_gemm_nt_contiguous",
            "deep_gemm:m_grouped_bf16_gemm_nt_contiguous",
            *_TILES,
            *TRITON_NEEDS,
        ),
        _deep_gemm,
        note=_ROUNDS,
    ),
    Backend(
        "sgl_kernel",
        f"{_HERE}.packages.sgl_kernel:SglKernelFusedMoE",
        ("sgl_kernel", "torch.ops:sgl_kernel.es_fp8_blockwise_scaled_grouped_mm", *TRITON_NEEDS),
        _fp8_silu,
        note=_ROUNDS,
        about=cutlass_schedules.about,
    ),
    Backend(
        "deep_gemm_masked",
        f"{_HERE}.packages.deep_gemm:DeepGemmMaskedFusedMoE",
        ("deep_gemm:fp8_m_grouped_gemm_nt_masked", *_TILES, *TRITON_NEEDS),
        _deep_gemm_masked,
        note=_ROUNDS,
    ),
    Backend(
        "deep_gemm_gathered",
        f"{_HERE}.packages.deep_gemm_gathered:DeepGemmGatheredFusedMoE",
        ("deep_gemm:m_grouped_fp8_gemm_nt_contiguous", *_TILES, *TRITON_NEEDS),
        _fp8_silu,
    ),
    Backend(
        "torch_grouped",
        f"{_HERE}.torch_grouped:TorchGroupedFusedMoE",
        ("torch.nn.functional:grouped_mm", *TRITON_NEEDS),
        _torch_grouped,
        repeats_on=REPEATS,
    ),
    # CUTLASS's experts, as FlashInfer has them for sm_90 alone: [up; gate] rows, routed outside.
    hopper_guard("flashinfer_cutlass", ("flashinfer.fused_moe:cutlass_fused_moe",), _flashinfer_cutlass),
    # TensorRT-LLM's experts, as FlashInfer has them.
    blackwell_guard("trtllm_gen", ("flashinfer.fused_moe:trtllm_fp8_block_scale_moe",), _trtllm_refuses),
]
FUSED_MOE = Registry(
    "fused_moe",
    [
        TRITON_KERNELS,
        replace(triton_backend(f"{_HERE}.triton.backend:TritonFusedMoE", _triton), about=_about_triton),
        TRITON_SWIZZLED,
        *PACKAGES,
        torch_backend(f"{_HERE}.torch:TorchFusedMoE"),
        reference_backend(f"{_HERE}.reference:ReferenceFusedMoE"),
    ],
    cases=f"{_HERE}.cases",
)
