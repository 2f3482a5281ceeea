"""Planted bugs of the rotary embedding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fastlayers.rotary.layer import RotaryConfig
from fastlayers.rotary.torch import TorchRotary


class OffByOne(TorchRotary):
    """Turns by the previous position."""

    def __call__(self, q: Any, k: Any, cos: Any, sin: Any, positions: torch.Tensor) -> Any:
        return super().__call__(q, k, cos, sin, (positions - 1).clamp_min(0))


class WrongDirection(TorchRotary):
    """Turns the other way."""

    def __call__(self, q: Any, k: Any, cos: Any, sin: torch.Tensor, positions: Any) -> Any:
        return super().__call__(q, k, cos, -sin, positions)


class WrongPairing(TorchRotary):
    """Reads interleaved pairs as halves and the other way round."""

    def __init__(self, cfg: RotaryConfig) -> None:
        super().__init__(replace(cfg, interleaved_in=not cfg.interleaved_in))


class WrongOutputLayout(TorchRotary):
    """Writes what it read: forgets that DeepSeek-V3 de-interleaves."""

    def __init__(self, cfg: RotaryConfig) -> None:
        super().__init__(replace(cfg, interleaved_out=cfg.interleaved_in))


class KeyForgotten(TorchRotary):
    """Leaves the key as it was."""

    def __call__(self, q: Any, k: Any, cos: Any, sin: Any, positions: Any) -> Any:
        return super().__call__(q, None, cos, sin, positions)[0], None if k is None else k.clone()


class TimeAxisOnly(TorchRotary):
    """MRoPE that turns every frequency with the time axis."""

    def __init__(self, cfg: RotaryConfig) -> None:
        super().__init__(cfg)
        self.axes = [0] * len(self.axes)


class RestZeroed(TorchRotary):
    """Zeroes what lies behind rotary_dim instead of copying it."""

    def __call__(self, q: Any, k: Any, cos: Any, sin: Any, positions: Any) -> Any:
        q, k = super().__call__(q, k, cos, sin, positions)
        q[..., self.dim :] = 0
        return q, k


MUTANTS = {
    "off_by_one": OffByOne,
    "wrong_direction": WrongDirection,
    "wrong_pairing": WrongPairing,
    "wrong_output_layout": WrongOutputLayout,
    "key_forgotten": KeyForgotten,
    "time_axis_only": TimeAxisOnly,
    "rest_zeroed": RestZeroed,
}
