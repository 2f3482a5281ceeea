"""SwiGLU MLPs: gate and up as one product, the activation on the backends of ``silu_mul``."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from fastlayers.activation.silu_mul.layer import SILU_MUL, SiluMulConfig
from fastlayers.activation.silu_mul.torch import TorchSiluMul
from fastlayers.patching.classes import count, differentiated
from fastlayers.patching.matching import SILU, bare
from fastlayers.patching.packing import PackedModule
from fastlayers.registry import Ladder


class FastMLP(PackedModule):
    """``down(silu(gate(x)) * up(x))``."""

    _fl_bypassed = {"act_fn": SILU}  # noqa: RUF012
    _fl_functions = ("linear", "silu")
    _fl_core: Ladder
    _modules: dict[str, Any]
    gate_proj: Any
    up_proj: Any
    down_proj: Any

    def _fl_parts(self) -> tuple[str, ...]:
        return "gate_proj", "up_proj"

    def _fl_choose(self) -> None:
        weights = [getattr(linear, "weight", None) for linear in (self.gate_proj, self.down_proj)]
        if not all(isinstance(each, torch.Tensor) for each in weights) or not hasattr(self.gate_proj, "out_features"):
            return  # somebody's wrappers: what was chosen before stays
        weight: Any = weights[1]
        # Behind quantised weights the activations' dtype is not known here.
        cfg = SiluMulConfig(self.gate_proj.out_features, weight.dtype if weight.element_size() > 1 else None)
        self._fl_core = SILU_MUL.choose(cfg, weight.device, self._fl_backend).build()

    def _fl_implementation(self) -> str:
        packed = "gate+up, " if self._fl_together() else ""
        return f"{packed}silu_mul={self._fl_core.choice.name}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the MLP's output, of ``x``'s shape and dtype."""
        ready = self._fl_ready(x)
        if not ready:
            original: torch.Tensor = super().forward(x)  # type: ignore[misc]
            return original
        count(self._fl_hits)
        gate_up = self._fl_fused(x, ready)
        if gate_up is None:
            gate, up = self.gate_proj(x), self.up_proj(x)
            if isinstance(self._fl_core.single, TorchSiluMul) or differentiated(gate, up):
                apart: torch.Tensor = self._modules["down_proj"](F.silu(gate) * up)
                return apart
            gate_up = torch.cat((gate, up), dim=-1)
        rows = gate_up.flatten(0, -2) if gate_up.ndim > 1 else gate_up[None]
        y = (self._fl_core.single or self._fl_core.pick(rows.shape[0]))(rows)
        down: torch.Tensor = self._modules["down_proj"](y.view(*x.shape[:-1], y.shape[-1]))
        return down

    def _fl_step(self, x: torch.Tensor, step: Any) -> torch.Tensor:
        """Return the same in a step on pages."""
        if not self._fl_usable(x):
            return self(x)  # type: ignore[operator]
        count(self._fl_hits)
        rows = self._fl_side_by_side(x, step).view(step.rows, -1)
        y = self._fl_core.pick(step.rows)(rows)
        down: torch.Tensor = step.apply(self.down_proj, y.view(*x.shape[:-1], y.shape[-1]))
        return down


def stepped(mlp: Any, x: torch.Tensor, step: Any) -> torch.Tensor | None:
    """Return what calling ``mlp`` would, by its step; ``None`` where that is not the same, or it has none."""
    found: torch.Tensor | None = mlp._fl_step(x, step) if isinstance(mlp, FastMLP) and bare(mlp) else None
    return found
