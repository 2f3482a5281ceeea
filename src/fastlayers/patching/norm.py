"""RMSNorm of Hugging Face modules, on the backends of ``rms_norm``."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.norm.rms_norm.layer import RMS_NORM, RMSNormConfig
from fastlayers.patching.classes import FastModule, count
from fastlayers.registry import Ladder


class FastRMSNorm(FastModule):
    """``weight * x_hat.to(dtype)``: Llama, Qwen, DeepSeek."""

    _fl_rounding = "cast_then_scale"
    _fl_baked = ("variance_epsilon",)

    _fl_core: Ladder
    weight: torch.Tensor
    _parameters: dict[str, Any]
    variance_epsilon: float

    def _fl_choose(self) -> None:
        cfg = RMSNormConfig(self.weight.shape[0], self._fl_epsilon(), self._fl_rounding, self.weight.dtype)
        self._fl_core = RMS_NORM.choose(cfg, self.weight.device, self._fl_backend).build()

    def _fl_epsilon(self) -> float:
        return float(self.variance_epsilon)

    def _fl_implementation(self) -> str:
        return f"rms_norm={self._fl_core.choice.name}"

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        if not self._fl_usable(hidden_states):
            original: torch.Tensor = super().forward(hidden_states)  # type: ignore[misc]
            return original
        count(self._fl_hits)
        core: Any = self._fl_core.single or self._fl_core.pick(hidden_states.numel() // hidden_states.shape[-1])
        y: torch.Tensor = core(hidden_states, self._parameters["weight"].contiguous(), None)[0]
        return y

    def _fl_other(self, x: torch.Tensor) -> str:
        weight = self._parameters.get("weight")
        if weight is None:
            return "the weight was replaced"
        return "" if x.dtype == weight.dtype and x.stride(-1) == 1 else f"input of {x.dtype}, or strided"

    def _fl_add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the norm of ``x + residual`` and the sum, or ``None`` where this is not one operation."""
        if x.dtype != residual.dtype or residual.stride(-1) != 1 or not self._fl_usable(x):
            return None
        count(self._fl_hits)
        core: Any = self._fl_core.pick(x.numel() // x.shape[-1])
        y, total = core(x, self.weight.contiguous(), residual)
        return y, total


class FastScaleThenCastRMSNorm(FastRMSNorm):
    """``(weight * x_hat).to(dtype)``: GPT-OSS."""

    _fl_rounding = "scale_then_cast"
