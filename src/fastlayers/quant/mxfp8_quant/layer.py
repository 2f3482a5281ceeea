"""Quantisation of activations to MXFP8, padded to an alignment in the same pass.

    T = tokens, K = features, P = K rounded up to a multiple of alignment, G = P / 32
    x[T,K..P)   = 0                                       the tail, never read
    absmax[T,G] = max over the group of |x|
    byte[T,G]   = 127 + ceil(log2(absmax / 448)), at least 1;  0 for a group of zeros      (ue8m0, uint8)
    q[T,P]      = round(x / 2^(byte - 127))               e4m3, to nearest even
    x           ≈ q · 2^(byte - 127)

The scale is rounded up, so nothing saturates. All steps are exact or correctly rounded: every backend gives the same
bits, and the same as padding first and quantising then. The tail is zeros, its scales are byte 0 (2^-127), so whatever
a GEMM reads of it adds nothing. A group with NaN or infinity gets byte 255 (ue8m0's NaN) and codes 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd import forward_ad

from fastlayers.device import Device
from fastlayers.errors import ArgumentError, check_positive, check_tensor
from fastlayers.layer import Layer
from fastlayers.registry import Registry, reference_backend, torch_backend, triton_backend

GROUP = 32
LARGEST = 448.0
INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_NAME = "MXFP8Quant"


@dataclass(frozen=True)
class MXFP8QuantConfig:
    """What a backend must know: ``alignment``, a multiple of 32, to whose next multiple features are padded."""

    alignment: int = GROUP

    def __post_init__(self) -> None:
        check_positive(_NAME, alignment=self.alignment)
        if self.alignment % GROUP:
            raise ArgumentError(_NAME, "alignment", self.alignment, f"a multiple of {GROUP}")

    def padded(self, features: int) -> int:
        """Return ``features`` rounded up."""
        return -(-features // self.alignment) * self.alignment

    def tuning_key(self) -> str:
        """Return the shape key of tuned tables."""
        return f"alignment={self.alignment}"


def _refuse_triton(cfg: MXFP8QuantConfig, device: Device) -> str | None:
    return device.refuses_e4m3("e4m3 codes")


_HERE = "fastlayers.quant.mxfp8_quant"
MXFP8_QUANT = Registry(
    "mxfp8_quant",
    [
        triton_backend(f"{_HERE}.triton:TritonMXFP8Quant", _refuse_triton),
        torch_backend(f"{_HERE}.torch:TorchMXFP8Quant"),
        reference_backend(f"{_HERE}.reference:ReferenceMXFP8Quant"),
    ],
    cases=f"{_HERE}.cases",
)


class MXFP8Quant(Layer):
    """Pad activations and quantise them to MXFP8: e4m3 values, a power of two for every 32.

    Parameters
    ----------
    alignment : int
        Features are padded to its next multiple: 128 for GPT-OSS's 2880 on sm_90 (2944), 256 on sm_100 (3072).
    device
        Where the input will be.
    backend : str
        ``"auto"``, a name, or a ladder.

    Notes
    -----
    Source: OCP Microscaling Formats v1.0. No parameters. One launch: neither a padded
    copy of the input nor one of the output is made. Capture-safe; allocates its outputs.
    For inference only: it raises where an input or a parameter requires a gradient.

    Examples
    --------
    >>> import torch
    >>> from fastlayers.quant.mxfp8_quant.layer import MXFP8Quant
    >>> q, scales = MXFP8Quant(alignment=64)(torch.full((1, 32), 896.0))
    >>> q.shape, q[0, 0].item(), q[0, 63].item(), scales.tolist()
    (torch.Size([1, 64]), 448.0, 0.0, [[128, 0]])
    """

    def __init__(
        self, alignment: int = GROUP, *, device: torch.device | str | None = None, backend: str = "auto"
    ) -> None:
        super().__init__()
        self.choose(MXFP8_QUANT, MXFP8QuantConfig(alignment), device, backend)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantise ``x``.

        Parameters
        ----------
        x : Tensor ``[..., K]``
            bf16, fp16 or fp32; any K from 1. Rows may be strided.

        Returns
        -------
        (Tensor, Tensor)
            ``q`` e4m3 ``[..., P]`` and the scales' exponent bytes, uint8 ``[..., P / 32]``; both contiguous.

        Raises
        ------
        ArgumentError
            Another dtype, or no features.
        """
        check_tensor(_NAME, "x", x, dtype=INPUT_DTYPES, device=self.device_type)
        if x.dim() < 1 or x.shape[-1] == 0:
            raise ArgumentError(_NAME, "x", f"of shape {list(x.shape)}", "[..., K] with K at least 1")
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            self.refuse_grad(x=x)
        rows = x.reshape(-1, x.shape[-1])
        q, scales = self.ladder.pick(rows.shape[0])(rows)
        return q.view(*x.shape[:-1], q.shape[1]), scales.view(*x.shape[:-1], scales.shape[1])
