"""What the cases of all linears share: how inputs are drawn, what a module is called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastlayers.moved import renamed
from fastlayers.registry.spec import zero_rows

__getattr__ = renamed(__name__, {"calling": "fastlayers.registry.spec.calling"})


def normal(device: torch.device, seed: int) -> Callable[..., torch.Tensor]:
    """Return ``random(*size)``, which draws normal values on the host, equal ones for equal seeds."""
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(device)

    return random


def token_rows(layer: Any, count: int) -> list[tuple[Any, ...]]:
    """Return the layer's arguments for so many tokens."""
    return [(zero_rows(layer, count, layer.local_in, layer.cfg.dtype),)]
