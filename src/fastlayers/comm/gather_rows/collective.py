"""GatherRows over the axis' process group: NCCL or Gloo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastlayers.comm.collectives import collectives
from fastlayers.comm.gather_rows.layer import GatherRowsConfig
from fastlayers.comm.layouts import normed
from fastlayers.quant.coded_rows import CodedRows, empty_codes
from fastlayers.quant.group_quant.layer import GROUP_QUANT, GroupQuantConfig, empty_scales
from fastlayers.registry import Ladder


class CollectiveGatherRows:
    """Allocates the result; quantises before it gathers, by what the registry of that layer chooses."""

    def __init__(self, cfg: GatherRowsConfig) -> None:
        self.cfg, self.over = cfg, collectives(cfg.axis)
        self._quants: dict[tuple[str, str], Ladder] = {}

    def __call__(self, x: torch.Tensor, sizes: Sequence[int] | None = None, *, codes: str | None = None) -> Any:
        """Return a new tensor, or codes and scales; ``sizes``: rows of each rank, where they are not equal."""
        if codes is not None:
            return CodedRows(*self._coded(*self._quantised(x, codes), codes, sizes))
        if self.cfg.payload == "plain":
            return self._gather(x, sizes)
        layout = self.cfg.scale_layout
        return self._coded(*self._quantised(x, layout), layout, sizes)

    def normed(
        self, norm: Any, x: torch.Tensor, residual: torch.Tensor | None, sizes: Sequence[int] | None = None, *,
        codes: str | None = None,
    ) -> tuple[Any, torch.Tensor]:  # fmt: skip
        """Return the rows of all ranks behind residual and norm, and the own sum; the norm may write codes itself."""
        written = norm.coded(x, residual, codes) if codes is not None and x.shape[0] else None
        if written is None:
            y, h = normed(norm, x, residual)
            return self(y, sizes, codes=codes), h
        own, h = written
        return CodedRows(*self._coded(own.codes, own.scales, codes, sizes)), x if h is None else h

    def _quantised(self, x: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
        if not x.shape[0]:  # nothing is launched
            codes, scales = empty_codes(x, layout)
            return codes, scales
        key = x.device.type, layout
        quant = self._quants.get(key)
        if quant is None:
            quant = self._quants[key] = GROUP_QUANT.choose(GroupQuantConfig(scale_layout=layout), x.device).build()
        codes, scales = quant.pick(x.shape[0])(x)
        return codes, scales

    def _coded(
        self, codes: torch.Tensor, scales: torch.Tensor, layout: str | None, sizes: Sequence[int] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes and scales of all ranks, the scales in the memory of ``layout``."""
        # As bytes: not every backend carries e4m3.
        codes = self._gather(codes.view(torch.uint8), sizes).view(codes.dtype)
        scales = self._gather(scales.contiguous(), sizes)
        found = empty_scales(codes, scales.shape[0], scales.shape[1], layout or "row")
        return codes, found.copy_(scales)

    def _gather(self, x: torch.Tensor, sizes: Sequence[int] | None) -> torch.Tensor:
        return self.over.all_gather(x) if sizes is None else self.over.all_gather_variable(x, sizes)
