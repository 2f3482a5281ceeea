"""Rows of all ranks, on every rank.

    n = ranks of the axis, p = rows of each rank (equal), H = hidden_size
    y[n·p,H] = x of rank 0, of rank 1, …

Behind residual and norm, where rows are normed by whoever owns them:
    h[p,H] = x[p,H] + residual[p,H] (rounded);   y[n·p,H] = RMSNorm(h) of rank 0, of rank 1, …

With payload "fp8_128", or in a call that asks for codes, each rank quantises its rows before they are sent (1.03 bytes
a value on the way instead of 2):
    q[n·p,H], s[n·p,H/128] = codes and scales of y as GroupQuant makes them, bit by bit

Rows of unequal numbers take the group's own way (NCCL, Gloo), by sizes that the host knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from fastlayers.comm.parallel import Axis
from fastlayers.comm.rank_layer import RankConfig, RankLayer, rank_registry
from fastlayers.errors import ArgumentError, check_choice, check_tensor
from fastlayers.layer import Layer
from fastlayers.quant.group_quant.layer import SCALE_LAYOUTS, GroupQuantConfig

# What a call is to other ranks, by the codes that it asks for: all must send alike.
_SENT = {None: None} | {layout: f"GatherRows of codes, scales by {layout}" for layout in SCALE_LAYOUTS}


@dataclass(frozen=True)
class GatherRowsConfig(RankConfig):
    """What a backend must know; ``slots``: most rows of one rank that the workspace was made for."""

    payload: str = "plain"
    scale_layout: str = "row"

    layer, operator = "GatherRows", "exchange"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("GatherRows", "payload", self.payload, ("plain", "fp8_128"))
        check_choice("GatherRows", "scale_layout", self.scale_layout, SCALE_LAYOUTS)
        if self.payload == "fp8_128" and self.hidden_size % 128:
            raise ArgumentError("GatherRows", "hidden_size", self.hidden_size, "a multiple of 128 with fp8_128")

    @property
    def way(self) -> str:  # type: ignore[override]
        """Whose ladder serves."""
        return "" if self.payload == "plain" else self.payload

    @property
    def quant(self) -> GroupQuantConfig:
        """How rows are quantised with ``payload="fp8_128"``."""
        return GroupQuantConfig(scale_layout=self.scale_layout)


GATHER_ROWS = rank_registry(
    "gather_rows", "GatherRows",
    {
        "copy_engine": "for schedules that hide a gather behind products, which lose within one host",
        "nvfp4": "an FP4 payload is for FP4 products, of which sm_90 has none: there it is payload='fp8_128'",
    },
)  # fmt: skip


class GatherRows(RankLayer):
    """Gather rows from the ranks of an axis.

    Parameters
    ----------
    axis, hidden_size, workspace, device, dtype, backend
        As of :class:`~fastlayers.comm.rank_layer.RankLayer`; the workspace is one that was made with a ``share``.
    payload : str
        ``"plain"``, or ``"fp8_128"``: each rank quantises its rows before they are sent.
    scale_layout : str
        Of the scales in memory, as of :class:`~fastlayers.quant.group_quant.layer.GroupQuant`.

    Notes
    -----
    Every rank of the axis makes the same calls with the same numbers of rows, ranks without rows too. Capture-safe.
    Over symmetric memory the result is a view of the workspace: it holds until the workspace's next exchange.
    Rows, codes and what lies behind a norm take one ladder, that of rows.
    """

    rows, config = GATHER_ROWS, GatherRowsConfig

    def __init__(
        self,
        axis: Axis,
        hidden_size: int,
        *,
        payload: str = "plain",
        scale_layout: str = "row",
        workspace: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
    ) -> None:
        Layer.__init__(self)
        cfg = GatherRowsConfig(axis, hidden_size, payload=payload, scale_layout=scale_layout)
        self.connect(cfg, workspace, device, dtype, backend)
        self.ragged: Any = GATHER_ROWS.named("nccl").load()(self.cfg)

    def forward(self, x: torch.Tensor, sizes: Sequence[int] | None = None, codes: str | None = None) -> Any:
        """Return the rows of all ranks, in rank order; with ``payload="fp8_128"`` their codes and scales.

        Parameters
        ----------
        x : Tensor ``[p, H]``
        sizes : sequence of int, optional
            Rows of each rank, where they are not equal.
        codes : str, optional
            A layout of scales. Then the rows come as :class:`~fastlayers.quant.coded_rows.CodedRows`, with the bits
            that they have when they are quantised behind the gather.
        """
        if not self.trusted:
            self.check_rows(x)
            self._check_codes(codes)
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            self.refuse_grad(x=x)
        if sizes is not None and len(set(sizes)) > 1:
            return self.ragged(x, sizes, codes=codes)
        self.check_order(x)
        impl = self.ladder.pick(x.shape[0])
        return impl(x) if codes is None else impl(x, codes=codes)

    def normed(
        self, norm: Any, x: torch.Tensor, residual: torch.Tensor | None, sizes: Sequence[int] | None = None,
        codes: str | None = None,
    ) -> tuple[Any, torch.Tensor]:  # fmt: skip
        """Return ``(y, h)``: own rows with the residual added, ``h``, and their norm gathered from all ranks.

        Parameters
        ----------
        norm : RMSNorm
            Of the same hidden size and dtype. Over symmetric memory its weight alone is read: a hook sees nothing.
        x : Tensor ``[p, H]``
        residual : Tensor ``[p, H]``, optional
            Without, ``h`` is ``x``.
        sizes, codes
            As of the call.
        """
        if not self.trusted:
            self.check_rows(x)
            self._check_codes(codes)
            size, dtype = self.cfg.hidden_size, self.cfg.dtype
            check_tensor("GatherRows", "norm.weight", norm.weight, shape=(size,), dtype=dtype, device=x.device)
            if residual is not None:
                check_tensor(
                    "GatherRows", "residual", residual, shape=tuple(x.shape), dtype=dtype, device=x.device,
                    last_dim_contiguous=True,
                )  # fmt: skip
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            self.refuse_grad(x=x, residual=residual, weight=norm.weight)
        if sizes is not None and len(set(sizes)) > 1:
            ragged: tuple[Any, torch.Tensor] = self.ragged.normed(norm, x, residual, sizes, codes=codes)
            return ragged
        self.check_order(x)
        found: tuple[Any, torch.Tensor] = self.ladder.pick(x.shape[0]).normed(norm, x, residual, codes=codes)
        return found

    def _check_codes(self, codes: str | None) -> None:
        if codes is not None:
            check_choice("GatherRows", "codes", codes, SCALE_LAYOUTS)
            if self.cfg.hidden_size % 128:
                size = self.cfg.hidden_size
                raise ArgumentError("GatherRows", "codes", codes, f"None: {size} is no multiple of 128")
