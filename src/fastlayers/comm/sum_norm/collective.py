"""SumNorm as two steps: the group's all-reduce (NCCL or Gloo), then the norm that the norm's registry chooses."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.comm.collectives import collectives
from fastlayers.comm.gather_rows.collective import CollectiveGatherRows
from fastlayers.comm.gather_rows.layer import GatherRowsConfig
from fastlayers.comm.sum_norm.layer import SumNormConfig
from fastlayers.norm.rms_norm.layer import RMS_NORM, RMSNormConfig
from fastlayers.quant.coded_rows import CodedRows


class CollectiveSumNorm:
    """Sums in the order and dtype of the group's backend; overwrites its input."""

    def __init__(self, cfg: SumNormConfig) -> None:
        self.cfg, self.spread, self.over = cfg, cfg.spread, collectives(cfg.axis)
        self._config = RMSNormConfig(cfg.hidden_size, cfg.eps, cfg.rounding, cfg.dtype)
        self._norms: dict[str, object] = {}
        self._gathers: dict[str, CollectiveGatherRows] = {}  # by the layout of scales

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, *, codes: str | None = None
    ) -> tuple[Any, torch.Tensor]:
        """Return ``(y, h)``."""
        total = self.over.reduce_scatter(x) if self.spread else self.over.all_reduce_(x)
        if not total.shape[0]:
            return x if self.spread else total, total if residual is None else residual
        norm = self._norms.get(x.device.type)
        if norm is None:
            norm = self._norms[x.device.type] = RMS_NORM.choose(self._config, x.device).build()
        y, h = norm.pick(x.shape[0])(total, weight, residual)  # type: ignore[attr-defined]
        h = total if h is None else h
        if codes is not None and self.spread:
            gather = self._gathers.get(codes)
            if gather is None:
                config = GatherRowsConfig(self.cfg.axis, self.cfg.hidden_size, payload="fp8_128", scale_layout=codes)
                gather = self._gathers[codes] = CollectiveGatherRows(config)
            return CodedRows(*gather(y)), h
        return self.over.all_gather(y) if self.spread else y, h
