"""GatherRows in one launch over symmetric memory: :class:`fastlayers.comm.triton_exchange.Exchange`."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.comm.gather_rows.layer import GatherRowsConfig
from fastlayers.quant.coded_rows import CodedRows


class TritonGatherRows:
    """Each rank stores its rows, normed and quantised if that is asked for, at all others."""

    def __init__(self, cfg: GatherRowsConfig) -> None:
        self.cfg, self.exchange = cfg, cfg.made()

    def __call__(self, x: torch.Tensor, *, codes: str | None = None, part: int = 0) -> Any:
        """Return views of the outbox: rows, or codes and scales."""
        if codes is not None:
            return CodedRows(*self.exchange.gather_quantised(x, layout=codes, part=part)[0])
        if self.cfg.payload == "plain":
            return self.exchange.gather(x, part=part)[0]
        return self.exchange.gather_quantised(x, layout=self.cfg.scale_layout, part=part)[0]

    def normed(
        self, norm: Any, x: torch.Tensor, residual: torch.Tensor | None, *, codes: str | None = None, part: int = 0
    ) -> tuple[Any, torch.Tensor]:
        """Return views of the outbox, and a new tensor (``x`` without a residual)."""
        given = x, residual, norm.weight, norm.cfg.eps, norm.cfg.rounding
        if codes is None:
            found: tuple[Any, torch.Tensor] = self.exchange.gather(*given, part=part)
            return found
        coded, h = self.exchange.gather_quantised(*given, layout=codes, part=part)
        return CodedRows(*coded), h
