"""Batched matrix product, one weight per head: what MLA's absorbed weights need. Operands may be views.

    H = heads, T = tokens, K = in_features, N = out_features;  x[H,T,K], weight[H,N,K] -> y[H,T,N]

    "none"       y = round( x · weightᵀ )                                      weight in dtype
    "fp8_tensor" sx = max(1e-10, max |x|) / 448                                one scale for the call
                 y = round( (e4m3(x / sx) · weightᵀ) · sx · weight_scale[h] )  weight e4m3, weight_scale fp32 [H]
    "fp8_block"  sx[h,t,kb] = max(1e-12, max over 128 features of |x|) / 448   one scale per token and block
                 y = round( Σ over kb of (e4m3(x / sx) · weightᵀ) · sx · weight_scale[h, n // 128, kb] )
                 weight e4m3, weight_scale fp32 [H, ceil(N/128), ceil(K/128)]

Sums are fp32, rounded once. No operand is copied: x is quantised in the product's own kernel, ``weight`` may be
transposed, ``out`` may be a part of a larger tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd import forward_ad

from fastlayers.device import Device
from fastlayers.errors import ArgumentError, check_choice, check_positive, check_tensor, describe
from fastlayers.layer import Layer
from fastlayers.linear.fp8_scaled.layer import needs_fp8_dot
from fastlayers.quant.block_quant import BLOCK, E4M3, check_scale_grid
from fastlayers.registry import (
    TRITON_NEEDS,
    Backend,
    Registry,
    not_multiple,
    reference_backend,
    torch_backend,
    triton_backend,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMATS = ("none", "fp8_tensor", "fp8_block")
GROUP = 128
BLOCK_EPS = 1e-12


@dataclass(frozen=True)
class BmmConfig:
    """What a backend must know: sizes, ``format`` of the weights, ``dtype`` of x and y."""

    heads: int
    in_features: int
    out_features: int
    format: str = "none"
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        check_positive("Bmm", heads=self.heads, in_features=self.in_features, out_features=self.out_features)
        check_choice("Bmm", "format", self.format, FORMATS)
        check_choice("Bmm", "dtype", self.dtype, DTYPES)

    @property
    def weight_dtype(self) -> torch.dtype:
        """Dtype of the weight."""
        return self.dtype if self.format == "none" else E4M3

    def tuning_key(self) -> str:
        """Return the shape key of tuned tables."""
        return f"H={self.heads},N={self.out_features},K={self.in_features},{self.format}"


def _refuse(cfg: BmmConfig, device: object) -> str | None:
    return None if cfg.format == "none" else needs_fp8_dot(cfg, device)  # type: ignore[arg-type]


def _refuse_packages(cfg: BmmConfig, device: Device) -> str | None:
    if (why := device.refuses_all_but(9)) is not None:
        return why
    if cfg.format != "fp8_tensor":
        return f"format {cfg.format!r} is not 'fp8_tensor'"
    if cfg.dtype == torch.float32:
        return "it writes float16 or bfloat16"
    return not_multiple(cfg, in_features=16, out_features=16)


def _refuse_deep_gemm(cfg: BmmConfig, device: Device) -> str | None:
    if (why := device.refuses_all_but(9)) is not None:
        return why
    if cfg.format != "fp8_block":
        return f"format {cfg.format!r} is not 'fp8_block'"
    if cfg.dtype != torch.bfloat16:
        return "it writes bfloat16"
    return not_multiple(cfg, in_features=GROUP, out_features=64)


_HERE = "fastlayers.linear.bmm"
# In other words: their product takes one scale for the whole weight, and operands next to each other.
_ROUNDS = "rounds twice where each head has a scale, and copies views"
BMM = Registry(
    "bmm",
    [
        triton_backend(f"{_HERE}.triton:TritonBmm", _refuse),
        Backend(
            "sgl_kernel", f"{_HERE}.packages:SglKernelBmm", ("sgl_kernel:bmm_fp8", *TRITON_NEEDS), _refuse_packages, (),
            note=_ROUNDS,
        ),
        Backend(
            "flashinfer", f"{_HERE}.packages:FlashInferBmm", ("flashinfer:bmm_fp8", *TRITON_NEEDS), _refuse_packages,
            (), note=_ROUNDS,
        ),
        Backend(
            "deep_gemm", f"{_HERE}.packages:DeepGemmBmm",
            ("deep_gemm:fp8_m_grouped_gemm_nt_masked", *TRITON_NEEDS), _refuse_deep_gemm, (),
            note="copies views, and tokens into whole tiles",
        ),
        torch_backend(f"{_HERE}.torch:TorchBmm"),
        reference_backend(f"{_HERE}.reference:ReferenceBmm"),
    ],
    cases=f"{_HERE}.cases",
)  # fmt: skip


class Bmm(Layer):
    """``x[H,T,K] · weight[H,N,K]ᵀ`` with weights in bf16 or FP8; holds no weights.

    Parameters
    ----------
    heads, in_features, out_features : int
    format : str
        ``"none"``, ``"fp8_tensor"`` or ``"fp8_block"``; see the file's head.
    dtype : torch.dtype
        Of x and y: bf16, fp16 or fp32.
    device, backend
        Where it will run; ``"auto"``, a name, or a ladder.

    Notes
    -----
    Source: the FP8 products of SGLang's absorbed MLA, without their padding of T and transposed scales, which belong to
    one kernel. Capture-safe; allocates its output unless ``out`` is given.
    Gradients are right without FP8 and ``out``, with the backends ``torch`` and ``reference``; elsewhere it raises.

    Examples
    --------
    >>> import torch
    >>> from fastlayers.linear.bmm.layer import Bmm
    >>> tokens = torch.ones(5, 2, 4)                     # [T, H, K]
    >>> out = torch.zeros(5, 2, 3 + 1)                   # the last column belongs to somebody else
    >>> layer, weight = Bmm(2, 4, 3, dtype=torch.float32), torch.ones(2, 3, 4)
    >>> _ = layer(tokens.transpose(0, 1), weight, out=out[..., :3].transpose(0, 1))
    >>> out[4, 1].tolist()
    [4.0, 4.0, 4.0, 0.0]
    """

    def __init__(
        self,
        heads: int,
        in_features: int,
        out_features: int,
        *,
        format: str = "none",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.choose(BMM, BmmConfig(heads, in_features, out_features, format, dtype), device, backend)

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply.

        Parameters
        ----------
        x : Tensor ``[H, T, K]``
            Any strides of H and T; features next to each other.
        weight : Tensor ``[H, N, K]``
            Any strides.
        weight_scale : Tensor, optional
            ``fp8_tensor``: fp32, one number or ``[H]``; ``fp8_block``: fp32 ``[H, ceil(N/128), ceil(K/128)]``, any
            strides.
        out : Tensor ``[H, T, N]``, optional
            Mutated and returned; any strides of H and T, features next to each other.

        Returns
        -------
        Tensor ``[H, T, N]``

        Raises
        ------
        ArgumentError
            Another shape or dtype, or scales that the format does not have.
        """
        cfg = self.cfg
        sizes = (cfg.heads, None, cfg.in_features)
        check_tensor("Bmm", "x", x, shape=sizes, dtype=cfg.dtype, last_dim_contiguous=True)
        shape = (cfg.heads, cfg.out_features, cfg.in_features)
        check_tensor("Bmm", "weight", weight, shape=shape, dtype=cfg.weight_dtype, device=x.device)
        scale = self._scale(weight, weight_scale)
        if out is not None:
            wanted = (cfg.heads, x.shape[1], cfg.out_features)
            check_tensor("Bmm", "out", out, shape=wanted, dtype=cfg.dtype, device=x.device, last_dim_contiguous=True)
        core = self.ladder.pick(x.shape[1])
        if (torch.is_grad_enabled() or forward_ad._current_level >= 0) and (
            cfg.format != "none" or out is not None or getattr(core, "writes", False)
        ):
            self.refuse_grad(x=x, weight=weight, weight_scale=scale, out=out)
        y: torch.Tensor = core(x, weight, scale, out)
        return y

    def _scale(self, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor | None:
        cfg = self.cfg
        if scale is None:
            if cfg.format != "none":
                raise ArgumentError("Bmm", "weight_scale", f"None with {cfg.format}", "the weight's scales, fp32")
            return None
        if cfg.format == "none":
            raise ArgumentError("Bmm", "weight_scale", f"{describe(scale)} with weights that have no scales", "None")
        check_tensor("Bmm", "weight_scale", scale, dtype=torch.float32, device=weight.device)
        if cfg.format == "fp8_block":
            check_scale_grid("Bmm", "weight_scale", scale, weight, BLOCK)
            return scale
        if scale.numel() != 1 and tuple(scale.shape) != (cfg.heads,):
            raise ArgumentError("Bmm", "weight_scale", describe(scale), f"one number or [{cfg.heads}]")
        return scale.reshape(-1).expand(cfg.heads)
