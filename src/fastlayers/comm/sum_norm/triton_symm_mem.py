"""SumNorm in one launch over symmetric memory: :class:`fastlayers.comm.triton_push.PushSum`."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.comm.sum_norm.layer import SumNormConfig


class TritonSumNorm:
    """Pushes rows to all ranks and adds up what arrives; up to as many rows as the workspace has slots."""

    def __init__(self, cfg: SumNormConfig) -> None:
        self.cfg, self.eps, self.rounding = cfg, cfg.eps, cfg.rounding
        self.push = cfg.made()

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, *, codes: str | None = None,
        part: int = 0,
    ) -> tuple[Any, torch.Tensor]:  # fmt: skip
        """Return ``(y, h)``, new tensors; of rows that are spread ``y`` is a view of the outbox."""
        if self.cfg.spread:
            found: tuple[Any, torch.Tensor] = self.push.scatter_gather(
                x, residual, weight, self.eps, self.rounding, codes=codes, part=part
            )
            return found
        self.cfg.check_slots(x.shape[0], self.push.slots)
        summed: tuple[Any, torch.Tensor] = self.push(
            x, residual, weight, self.eps, self.rounding, codes=codes, part=part
        )
        return summed
