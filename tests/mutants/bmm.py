"""Planted bugs of ``bmm``."""

from __future__ import annotations

import torch

from fastlayers.linear.bmm.torch import TorchBmm

Optional = torch.Tensor | None


class _HalfScale(TorchBmm):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, scale: Optional, out: Optional = None) -> torch.Tensor:
        return super().__call__(x, weight, None if scale is None else scale * 0.5, out)


class _NextHeadsWeight(TorchBmm):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, scale: Optional, out: Optional = None) -> torch.Tensor:
        return super().__call__(x, weight.roll(1, 0), scale, out)


class _NextHeadsScale(TorchBmm):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, scale: Optional, out: Optional = None) -> torch.Tensor:
        return super().__call__(x, weight, None if scale is None else scale.roll(1, 0), out)


class _TransposedBlocks(TorchBmm):
    """Takes the scale of block (k, n) for that of block (n, k)."""

    def per_block(self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
        flat = weight_scale.transpose(1, 2).reshape(weight_scale.shape)
        return super().per_block(x, weight, flat)


class _StridesIgnored(TorchBmm):
    """Reads a transposed weight as if it were contiguous."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, scale: Optional, out: Optional = None) -> torch.Tensor:
        if not weight.is_contiguous():
            weight = weight.transpose(1, 2).reshape(weight.shape)
        return super().__call__(x, weight, scale, out)


class _OutNotWritten(TorchBmm):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, scale: Optional, out: Optional = None) -> torch.Tensor:
        y = super().__call__(x, weight, scale, None)
        return y if out is None else out


class _WritesBeside(TorchBmm):
    """Treats ``out`` as contiguous, so rows run into what lies beside it."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, scale: Optional, out: Optional = None) -> torch.Tensor:
        y = super().__call__(x, weight, scale, out)
        if out is not None and not out.is_contiguous() and out.shape[1]:
            heads, tokens, features = out.shape
            wider = out.as_strided((heads, tokens, features + 1), out.stride(), out.storage_offset())
            wider[..., features] = 0.0
        return y


class _ScalePerToken(TorchBmm):
    """One scale per token instead of one for the call: better numbers, another function."""

    def per_tensor(self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
        rows = [
            super(_ScalePerToken, self).per_tensor(x[:, t : t + 1], weight, weight_scale) for t in range(x.shape[1])
        ]
        return torch.cat(rows, 1) if rows else super().per_tensor(x, weight, weight_scale)


MUTANTS = {
    "half_scale": _HalfScale,
    "next_heads_weight": _NextHeadsWeight,
    "next_heads_scale": _NextHeadsScale,
    "transposed_blocks": _TransposedBlocks,
    "strides_ignored": _StridesIgnored,
    "out_not_written": _OutNotWritten,
    "writes_beside": _WritesBeside,
    "scale_per_token": _ScalePerToken,
}
