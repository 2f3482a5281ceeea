"""RMSNorm by sgl_kernel's compiled operators.

Called through ``torch.ops``: the package's Python wrappers hand over to FlashInfer where that is installed. The
fused pair works in place, so both of its inputs are copied first.
"""

from __future__ import annotations

import sgl_kernel  # noqa: F401  registers torch.ops.sgl_kernel
import torch

from fastlayers.norm.rms_norm.layer import RMSNormConfig
from fastlayers.operators import operator


def _fake(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float) -> list[torch.Tensor]:
    return [x.new_empty(x.shape) for _ in range(1 if residual is None else 2)]


def _register(name: str, plain: torch._ops.OpOverload, fused: torch._ops.OpOverload):
    @operator(f"{name}(Tensor x, Tensor weight, Tensor? residual, float eps) -> Tensor[]", _fake)
    def rms_norm(
        x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float
    ) -> list[torch.Tensor]:
        rows = x.reshape(-1, x.shape[-1])
        if residual is None:
            y = torch.empty_like(rows, memory_format=torch.contiguous_format)
            if rows.shape[0]:
                plain(y, rows, weight, eps, False)
            return [y.view(x.shape)]
        y = rows.clone(memory_format=torch.contiguous_format)
        summed = residual.reshape(rows.shape).clone(memory_format=torch.contiguous_format)
        if rows.shape[0]:
            fused(y, summed, weight, eps, False)
        return [y.view(x.shape), summed.view(x.shape)]

    return rms_norm


_OPS = torch.ops.sgl_kernel
_SCALED = _register("rms_norm_sgl_kernel", _OPS.rmsnorm.default, _OPS.fused_add_rmsnorm.default)
_ONE_PLUS = _register("rms_norm_sgl_kernel_one_plus", _OPS.gemma_rmsnorm.default, _OPS.gemma_fused_add_rmsnorm.default)


class SglKernelRMSNorm:
    """One launch without a residual; with one, two copies before it."""

    def __init__(self, cfg: RMSNormConfig) -> None:
        self.eps, self.operator = cfg.eps, _ONE_PLUS if cfg.rounding == "one_plus" else _SCALED

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``(y, new_residual)``, both new contiguous tensors of ``x``'s dtype."""
        y, *summed = self.operator(x, weight, residual, self.eps)
        return y, summed[0] if summed else None
