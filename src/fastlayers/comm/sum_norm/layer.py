"""Sum over ranks, residual added, RMSNorm: what lies between two blocks of a model whose weights are split.

    n = ranks of the axis, T = rows (equal on all ranks), H = hidden_size
    s[T,H]  = Σ over ranks of x[T,H]            (fp32, in rank order, rounded once to the model's dtype)
    h[T,H]  = s[T,H] + residual[T,H]            (rounded; without a residual h = s)
    y[T,H]  = RMSNorm(h)                        (rounding as the family's, see RMSNorm)

NCCL rounds otherwise from three ranks on: it adds in the model's dtype. With two ranks both give the same bits, apart
from the sign of zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fastlayers.comm.parallel import Axis
from fastlayers.device import Device
from fastlayers.env import triton_interpret
from fastlayers.errors import check_choice, check_kind, check_plain, check_positive, check_tensor
from fastlayers.layer import Layer
from fastlayers.norm.rms_norm.layer import ROUNDINGS
from fastlayers.registry import Backend, Registry, reference_backend
from fastlayers.registry.choice import Choice, Rung


@dataclass(frozen=True)
class SumNormConfig:
    """What a backend must know.

    ``slots``: rows that the workspace's push was made for. ``refusal``: why there is none. ``workspace`` is the
    :class:`~fastlayers.comm.fabric.Workspace` itself.
    """

    axis: Axis
    hidden_size: int
    eps: float = 1e-6
    rounding: str = "cast_then_scale"
    dtype: torch.dtype = torch.bfloat16
    slots: int = 0
    refusal: str | None = None
    workspace: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_kind("SumNorm", Axis, axis=self.axis)
        check_positive("SumNorm", hidden_size=self.hidden_size)
        check_choice("SumNorm", "rounding", self.rounding, ROUNDINGS)
        check_plain("SumNorm", "float >= 0", eps=self.eps)


def refuse_nccl(cfg: Any, device: Device) -> str | None:
    """Refuse an axis whose group is not NCCL's."""
    if device.type != "cuda":
        return f"NCCL needs a CUDA device, this is {device}"
    return None if _backend_of(cfg.axis) == "nccl" else "axis.group has no NCCL"


def refuse_gloo(cfg: Any, device: Device) -> str | None:
    """Refuse what is not on a CPU."""
    return None if device.type == "cpu" else "gloo carries CPU tensors"


def refuse_symmetric(cfg: Any, device: Device) -> str | None:
    """Refuse an axis whose ranks cannot address each other's memory, or for which no workspace was made."""
    if device.type != "cuda" and not (device.type == "cpu" and triton_interpret()):
        return f"needs a CUDA device (or TRITON_INTERPRET=1 for tests), this is {device}"
    if device.capability is not None and device.capability < (9, 0):
        return f"needs sm_90 or newer, this is {device.sm}"
    if cfg.refusal is not None:
        return str(cfg.refusal)
    if cfg.hidden_size % 8:
        return f"rows of {cfg.hidden_size} values; a multiple of 8"
    return None if cfg.slots else "no symmetric workspace was made for this axis"


def _backend_of(axis: Axis) -> str:
    import torch.distributed as dist

    if not isinstance(axis.group, dist.ProcessGroup):
        return ""
    return "nccl" if "nccl" in str(dist.get_backend_config(axis.group)) else "gloo"


def never(reason: str) -> Any:
    """Return the predicate of a guard row."""
    return lambda cfg, device: reason


_HERE = "fastlayers.comm.sum_norm"
SYMMETRIC_NEEDS = ("triton:jit", "triton.language:atomic_xchg")
SUM_NORM = Registry(
    "sum_norm",
    [
        Backend("triton_symm_mem", f"{_HERE}.triton_symm_mem:TritonSumNorm", SYMMETRIC_NEEDS, refuse_symmetric),
        Backend("nccl", f"{_HERE}.collective:CollectiveSumNorm", (), refuse_nccl),
        Backend("gloo", f"{_HERE}.collective:CollectiveSumNorm", (), refuse_gloo, ("cpu",)),
        Backend(
            "flashinfer", f"{_HERE}.collective:CollectiveSumNorm", ("flashinfer:norm",),
            never("rounds once, after the weight, and sums twice; its workspace takes two minutes to make"), (),
        ),
        Backend(
            "multimem", f"{_HERE}.collective:CollectiveSumNorm", (), never("multicast is off on this fabric"), (),
        ),
        reference_backend(f"{_HERE}.reference:ReferenceSumNorm"),
    ],
    cases=f"{_HERE}.cases",
)  # fmt: skip


def with_limit(choice: Choice, registry: Registry) -> Choice:
    """Return an automatic choice with the rows beyond the workspace's slots given to the next backend."""
    if choice.requested != "auto" or choice.name != "triton_symm_mem":
        return choice
    nccl = registry.named("nccl")
    if nccl.why_not(choice.cfg, choice.device) is not None:
        return choice
    return replace(
        choice, rungs=(Rung(choice.cfg.slots, choice.rungs[0].backend), Rung(None, nccl)),
        evidence=f"rank; the workspace was made for {choice.cfg.slots} rows",
    )  # fmt: skip


class SumNorm(Layer):
    """Sum over the ranks of an axis, residual, RMSNorm: one launch where ranks can address each other's memory.

    Parameters
    ----------
    axis : Axis
        With a process group.
    hidden_size, eps, rounding
        As of the :class:`~fastlayers.RMSNorm` whose weight is given to each call.
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

    def __init__(
        self,
        axis: Axis,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        rounding: str = "cast_then_scale",
        workspace: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        cfg = SumNormConfig(
            axis, hidden_size, eps, rounding, dtype or torch.get_default_dtype(),
            workspace.slots if workspace is not None else 0,
            workspace.fabric.refusal if workspace is not None else None, workspace,
        )  # fmt: skip
        self.choose(SUM_NORM, cfg, device, backend)
        limited = with_limit(self.choice, SUM_NORM)
        if limited is not self.choice:
            self.choice, self.ladder = limited, limited.build()

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(y, h)``.

        Parameters
        ----------
        x : Tensor ``[T, H]``
            Partial sums; may be overwritten.
        residual : Tensor ``[T, H]``, optional
            Equal on all ranks.
        weight : Tensor ``[H]``
            Of the norm.
        """
        if not self.trusted:
            size, dtype = self.cfg.hidden_size, self.cfg.dtype
            check_tensor("SumNorm", "x", x, shape=(None, size), dtype=dtype, last_dim_contiguous=True)
            check_tensor("SumNorm", "weight", weight, shape=(size,), dtype=dtype, device=x.device)
            if residual is not None:
                check_tensor(
                    "SumNorm", "residual", residual, shape=tuple(x.shape), dtype=dtype, device=x.device,
                    last_dim_contiguous=True,
                )  # fmt: skip
        y, h = self.ladder.pick(x.shape[0])(x, residual, weight)
        return y, h
