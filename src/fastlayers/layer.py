"""The thin base of every layer module: holds what was chosen and shows it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastlayers.registry import Choice, Ladder, Registry


class Layer(nn.Module):
    """A module whose computation is done by backends of one registry.

    ``choice`` and ``ladder`` are set once, by :meth:`choose` in the constructor. ``forward`` of a subclass only
    picks the rung and calls it.
    """

    choice: Choice
    ladder: Ladder

    def choose(self, registry: Registry, cfg: Any, device: torch.device | str | None, backend: str) -> None:
        """Choose and build the backend for ``cfg`` on ``device`` (``None``: torch's default device)."""
        self.cfg = cfg
        self.choice = registry.choose(cfg, device, backend)
        self.ladder = self.choice.build()

    def finalize(self) -> None:
        """Let the backend pack the loaded weights; idempotent, zero-copy where layouts agree."""

    def extra_repr(self) -> str:
        """Return the configuration and the chosen backend."""
        return f"{self.cfg}, backend={self.choice.name}" if hasattr(self, "choice") else ""


def finalize(model: nn.Module) -> nn.Module:
    """Call :meth:`Layer.finalize` on every layer of ``model``, one at a time, and return the model."""
    for module in model.modules():
        if isinstance(module, Layer):
            module.finalize()
    return model
