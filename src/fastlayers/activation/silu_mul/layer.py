"""Gated activation of an MLP: SiLU of the gate times the up projection.

    T = tokens, I = size
    x[T, 2I]  = gate[T, I] | up[T, I]
    y[T, I]   = silu(gate).to(dtype) · up          silu(g) = g / (1 + e^-g) in fp32

Two roundings, one after silu and one after the product, as in every Hugging Face MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastlayers.device import Device
from fastlayers.errors import check_float, check_positive, check_tensor, dtype_name
from fastlayers.layer import Layer
from fastlayers.registry import Backend, Registry, reference_backend, torch_backend, triton_backend

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class SiluMulConfig:
    """What a backend must know: ``size``, the width of one half on this rank, and the ``dtype`` if it is fixed."""

    size: int
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_positive("SiluAndMul", size=self.size)
        check_float("SiluAndMul", dtype=self.dtype)

    def tuning_key(self) -> str | None:
        """Return the shape key of tuned tables."""
        return f"I={self.size},{dtype_name(self.dtype)}" if self.dtype is not None else None


def empty_output(x: torch.Tensor) -> torch.Tensor:
    """Return ``y`` ``[..., size]`` without values: what kernels write into, and the fake of their operators."""
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _package_refuses(cfg: SiluMulConfig, device: Device) -> str | None:
    return device.refuses_16_bit_vectors(cfg.dtype, cfg.size)


_ONCE = "rounds once, after the product"
_HERE = "fastlayers.activation.silu_mul"
SILU_MUL = Registry(
    "silu_mul",
    [
        triton_backend(f"{_HERE}.triton:TritonSiluMul"),
        # By name: their one rounding differs from what Hugging Face's MLPs give.
        Backend(
            "sgl_kernel",
            f"{_HERE}.sgl_kernel:SglKernelSiluMul",
            ("sgl_kernel", "torch.ops:sgl_kernel.silu_and_mul"),
            _package_refuses,
            (),
            note=_ONCE,
        ),
        Backend(
            "flashinfer",
            f"{_HERE}.flashinfer:FlashInferSiluMul",
            ("flashinfer:silu_and_mul",),
            _package_refuses,
            (),
            note=_ONCE,
        ),
        torch_backend(f"{_HERE}.torch:TorchSiluMul"),
        reference_backend(f"{_HERE}.reference:ReferenceSiluMul"),
    ],
    cases=f"{_HERE}.cases",
)


class SiluAndMul(Layer):
    """``silu(gate) · up`` of a fused gate-and-up projection.

    Parameters
    ----------
    size : int
        Width of the output; the input has twice that.
    device
        Where it will run.
    dtype : torch.dtype, optional
        Of inputs, where it is known: some backends take 16-bit inputs only. Default: any of fp32, fp16, bf16.
    backend : str
        ``"auto"``, a name, or a ladder.

    Notes
    -----
    Source: Shazeer 2020 (SwiGLU). Capture-safe; allocates its output.
    Gradients are right with the backends ``torch`` and ``reference``; a backward pass through another one raises.

    Examples
    --------
    >>> import torch, fastlayers as fl
    >>> act = fl.SiluAndMul(2)
    >>> [round(v, 4) for v in act(torch.tensor([[1.0, -1.0, 2.0, 4.0]]))[0].tolist()]
    [1.4621, -1.0758]
    """

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.choose(SILU_MUL, SiluMulConfig(size, dtype), device, backend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``y`` ``[..., I]`` for ``x`` ``[..., 2I]`` (fp32, fp16 or bf16; rows may be strided)."""
        if not self.trusted:
            self._check(x)
        y: torch.Tensor = (self.ladder.single or self.ladder.pick(x.numel() // (2 * self.cfg.size)))(x)
        return y

    def _check(self, x: torch.Tensor) -> None:
        wanted = DTYPES if self.cfg.dtype is None else self.cfg.dtype
        check_tensor("SiluAndMul", "x", x, dtype=wanted, device=self.device_type, last_dim_contiguous=True)
        check_tensor("SiluAndMul", "x", x, shape=(*x.shape[:-1], 2 * self.cfg.size))
