"""Hugging Face's ``FP8Linear`` (e4m3 weights in blocks) on the backends of ``fp8_linear``."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.device import as_device
from fastlayers.errors import FastlayersError
from fastlayers.linear.fp8_block.layer import FP8_LINEAR, FP8LinearConfig
from fastlayers.patching.classes import FastModule, count
from fastlayers.quant.block_quant import grid_of
from fastlayers.registry import Ladder


def why_not(module: Any) -> str | None:
    """Return why ``module`` cannot run on our FP8 linear, or ``None``."""
    if module.weight.element_size() != 1 or module.weight.dtype != torch.float8_e4m3fn:
        return f"quantized({module.weight.dtype})"
    if module.block_size is None or module.activation_scheme != "dynamic":
        return f"quantized(blocks {module.block_size}, {module.activation_scheme} activation scales)"
    if module.weight_scale_inv.dtype != torch.float32:
        return f"quantized(scales {module.weight_scale_inv.dtype})"
    grid = grid_of(module.out_features, module.in_features, tuple(module.block_size))
    if tuple(module.weight_scale_inv.shape) != grid:
        return f"ragged-block: scales {tuple(module.weight_scale_inv.shape)}, wanted {grid}"
    try:
        choose(module, torch.bfloat16, "auto")
    except FastlayersError as error:
        return f"device: {error}"
    return None


def choose(module: Any, dtype: torch.dtype, backend: str) -> Ladder:
    """Choose and build the backend for ``module`` and activations of ``dtype``."""
    cfg = FP8LinearConfig(
        module.in_features, module.out_features, module.bias is not None, dtype, tuple(module.block_size)
    )
    return FP8_LINEAR.choose(cfg, as_device(module.weight.device), backend).build()


class FastFP8Linear(FastModule):
    """Activations quantised 1×128 on the fly, like the original."""

    _fl_cores: dict[torch.dtype, Ladder]
    in_features: int
    weight: torch.Tensor
    weight_scale_inv: torch.Tensor
    bias: torch.Tensor | None

    def _fl_choose(self) -> None:
        floats = (torch.bfloat16, torch.float16, torch.float32)
        self._fl_cores = {dtype: choose(self, dtype, self._fl_backend) for dtype in floats}

    def _fl_implementation(self) -> str:
        return f"fp8_linear={self._fl_cores[torch.bfloat16].choice.name}"

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # the original's name
        """Return ``input @ weight^T + bias`` in ``input``'s dtype."""
        if not self._fl_usable(input):
            original: torch.Tensor = super().forward(input)  # type: ignore[misc]
            return original
        count(self._fl_hits)
        core: Any = self._fl_cores[input.dtype].pick(input.numel() // self.in_features)
        y: torch.Tensor = core(input, self.weight, self.weight_scale_inv, self.bias)
        return y
