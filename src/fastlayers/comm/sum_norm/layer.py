"""Sum over ranks, residual added, RMSNorm: what lies between two blocks of a model whose weights are split.

    n = ranks of the axis, T = rows (equal on all ranks), H = hidden_size
    s[T,H]  = Σ over ranks of x[T,H]            (fp32, in rank order, rounded once to the model's dtype)
    h[T,H]  = s[T,H] + residual[T,H]            (rounded; without a residual h = s)
    y[T,H]  = RMSNorm(h)                        (rounding as the family's, see RMSNorm)

Spread, for many rows: every rank adds and norms p = T / n of them, and keeps h of these alone
    h[p,H]  = rows rank·p … of s, plus residual[p,H];   y[T,H] = RMSNorm(h) of all ranks, in rank order

NCCL rounds otherwise from three ranks on: it adds in the model's dtype. With two ranks both give the same bits, apart
from the sign of zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from fastlayers.comm.parallel import Axis
from fastlayers.comm.rank_layer import MNNVL, RankConfig, RankLayer, rank_registry, refuse_package
from fastlayers.device import Device
from fastlayers.errors import check_choice, check_plain, check_tensor
from fastlayers.layer import Layer
from fastlayers.norm.rms_norm.layer import ROUNDINGS
from fastlayers.registry import Backend


@dataclass(frozen=True)
class SumNormConfig(RankConfig):
    """What a backend must know: besides the rows, the norm."""

    eps: float = 1e-6
    rounding: str = "cast_then_scale"
    spread: bool = False

    layer, within = "SumNorm", ("triton_symm_mem", "flashinfer")

    @property
    def operator(self) -> str:  # type: ignore[override]
        """Of a workspace: what sums few rows on every rank, or many rows each on one."""
        return "exchange" if self.spread else "push"

    @property
    def way(self) -> str:  # type: ignore[override]
        """Whose ladder serves."""
        return "spread" if self.spread else ""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("SumNorm", "rounding", self.rounding, ROUNDINGS)
        check_plain("SumNorm", "float >= 0", eps=self.eps)


_refuse_ranks = refuse_package("flashinfer", (2, 4, 8))


def _refuse_flashinfer(cfg: SumNormConfig, device: Device) -> str | None:
    if cfg.rounding == "cast_then_scale":
        return "rounds once, after the weight; this model rounds before it"
    if cfg.spread:
        return "leaves the residual whole; these rows are spread"
    if cfg.dtype == torch.float32:
        return "fp32: its workspace has two bytes for each value of many rows; bf16 and fp16 only"
    return _refuse_ranks(cfg, device)


SUM_NORM = rank_registry(
    "sum_norm", "SumNorm", {"multimem": "multicast is off on this fabric", "mnnvl": MNNVL},
    Backend(
        "flashinfer", "fastlayers.comm.sum_norm.flashinfer:FlashInferSumNorm",
        ("flashinfer.comm:create_allreduce_fusion_workspace", "flashinfer.comm:allreduce_fusion"),
        _refuse_flashinfer, (),
        note="builds its kernels for two minutes where they are not built; waits for ever for a rank that is lost",
    ),
)  # fmt: skip


class SumNorm(RankLayer):
    """Sum over the ranks of an axis, residual, RMSNorm: one launch where ranks can address each other's memory.

    Parameters
    ----------
    axis : Axis
        With a process group.
    hidden_size, eps, rounding
        As of the :class:`~fastlayers.RMSNorm` whose weight is given to each call.
    spread : bool
        ``residual`` and ``h`` are this rank's T / n rows only; T is a multiple of the ranks. ``y`` may be a view of the
        workspace, which holds until its next exchange.
    workspace : Workspace, optional
        Of the same axis, hidden size and dtype. Without: NCCL's or Gloo's all-reduce, then the norm.
    device, dtype
        Of the rows.
    backend : str
        ``"auto"``, a name, or a ladder over rows.

    Notes
    -----
    Every rank of the axis makes the same calls with the same number of rows. Capture-safe; allocates its outputs;
    ``x`` may be overwritten. Source: one-shot all-reduce fused with norm as in TensorRT-LLM and FlashInfer; protocol
    after NCCL's LL.
    """

    rows, config = SUM_NORM, SumNormConfig

    def __init__(
        self,
        axis: Axis,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        rounding: str = "cast_then_scale",
        spread: bool = False,
        workspace: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
    ) -> None:
        Layer.__init__(self)
        cfg = SumNormConfig(axis, hidden_size, eps=eps, rounding=rounding, spread=spread)
        self.connect(cfg, workspace, device, dtype, backend)
        # Of how many ranks each has rows of its own.
        self.parts = axis.size if spread else 1

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, codes: str | None = None
    ) -> tuple[Any, torch.Tensor]:
        """Return ``(y, h)``.

        Parameters
        ----------
        x : Tensor ``[T, H]``
            Partial sums; may be overwritten.
        residual : Tensor ``[T, H]``, optional
            Equal on all ranks; where they are spread, the own rows ``[T / n, H]``.
        weight : Tensor ``[H]``
            Of the norm.
        codes : str, optional
            A layout of scales. Then ``y`` may be a :class:`~fastlayers.quant.coded_rows.CodedRows`, with the bits
            that the rows have when they are quantised where they are read: a launch less, and of rows that are
            spread about half the bytes cross.
        """
        if not self.trusted:
            size, dtype = self.cfg.hidden_size, self.cfg.dtype
            self.check_rows(x)
            check_tensor("SumNorm", "weight", weight, shape=(size,), dtype=dtype, device=x.device)
            if residual is not None:
                check_tensor(
                    "SumNorm", "residual", residual, shape=(x.shape[0] // self.parts, size), dtype=dtype,
                    device=x.device, last_dim_contiguous=True,
                )  # fmt: skip
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            self.refuse_grad(x=x, residual=residual, weight=weight)
        self.check_order(x)
        impl = self.ladder.pick(x.shape[0] // self.parts)
        y, h = impl(x, residual, weight) if codes is None else impl(x, residual, weight, codes=codes)
        return y, h
