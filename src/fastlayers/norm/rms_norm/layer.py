"""RMSNorm, optionally with the residual added first.

    T = tokens, D = hidden_size
    r[T,D]  = x[T,D] + residual[T,D]            (rounded to the model's dtype; without residual r = x)
    n[T,D]  = r / sqrt(mean(r², over D) + eps)  (fp32)
    y[T,D]  = rounding(n, weight[D])

Families round in three places (``rounding``):

    "cast_then_scale"    weight * n.to(dtype)             Llama, Qwen, DeepSeek
    "scale_then_cast"    (weight * n).to(dtype)           GPT-OSS
    "one_plus"           ((1 + weight) * n).to(dtype)     Qwen3-Next, Gemma
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fastlayers.device import Device
from fastlayers.errors import check_choice, check_float, check_plain, check_positive, check_tensor, dtype_name
from fastlayers.layer import Layer
from fastlayers.memory import allocate
from fastlayers.quant.coded_rows import CodedRows, watched
from fastlayers.registry import Backend, Registry, reference_backend, torch_backend, triton_backend
from fastlayers.weights import Slot

if TYPE_CHECKING:
    from fastlayers.linear.split_rows import SplitRows

ROUNDINGS = ("cast_then_scale", "scale_then_cast", "one_plus")


@dataclass(frozen=True)
class RMSNormConfig:
    """What a backend must know; ``rounding``: see the file's head; ``dtype``: of weight and input, where it is known.

    Backends that take some dtypes only refuse where it is not.
    """

    hidden_size: int
    eps: float = 1e-6
    rounding: str = "cast_then_scale"
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_positive("RMSNorm", hidden_size=self.hidden_size)
        check_choice("RMSNorm", "rounding", self.rounding, ROUNDINGS)
        check_plain("RMSNorm", "float >= 0", eps=self.eps)

    def tuning_key(self) -> str | None:
        """Return the shape key of tuned tables."""
        return f"D={self.hidden_size},{self.rounding},{dtype_name(self.dtype)}" if self.dtype is not None else None


def empty_outputs(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, *rest: object
) -> list[torch.Tensor]:
    """Return ``[y]``, or ``[y, new_residual]``, without values: the fake of the backends' operators."""
    return [x.new_empty(*x.shape) for _ in range(1 if residual is None else 2)]


def _package_refuses(cfg: RMSNormConfig, device: Device) -> str | None:
    if cfg.rounding == "cast_then_scale":
        return "rounds once, after the weight; this model rounds before it"
    return device.refuses_16_bit_vectors(cfg.dtype, cfg.hidden_size)


_HERE = "fastlayers.norm.rms_norm"
RMS_NORM = Registry(
    "rms_norm",
    [
        triton_backend(f"{_HERE}.triton:TritonRMSNorm"),
        Backend(
            "sgl_kernel",
            f"{_HERE}.sgl_kernel:SglKernelRMSNorm",
            ("sgl_kernel", "torch.ops:sgl_kernel.rmsnorm"),
            _package_refuses,
        ),
        Backend("flashinfer", f"{_HERE}.flashinfer:FlashInferRMSNorm", ("flashinfer:rmsnorm",), _package_refuses),
        torch_backend(f"{_HERE}.torch:TorchRMSNorm"),
        reference_backend(f"{_HERE}.reference:ReferenceRMSNorm"),
    ],
    cases=f"{_HERE}.cases",
)


class RMSNorm(Layer):
    """Root-mean-square normalisation of the last dimension, with optional fused residual add.

    Parameters
    ----------
    hidden_size : int
    eps : float
    rounding : str
        ``"cast_then_scale"``, ``"scale_then_cast"`` or ``"one_plus"``.
    device, dtype
        Of the weight.
    backend : str
        ``"auto"``, a name, or a ladder.

    Notes
    -----
    Source: Zhang & Sennrich 2019; roundings as in the model families named. Capture-safe; allocates its outputs.
    Gradients are right with the backends ``torch`` and ``reference``; a backward pass through another one raises.

    Examples
    --------
    >>> import torch, fastlayers as fl
    >>> norm = fl.RMSNorm(4)
    >>> y, residual = norm(torch.ones(2, 4), torch.ones(2, 4))
    >>> residual[0].tolist(), [round(v, 4) for v in y[0].tolist()]
    ([2.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0])
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        rounding: str = "cast_then_scale",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_float("RMSNorm", dtype=dtype)
        self.choose(
            RMS_NORM, RMSNormConfig(hidden_size, eps, rounding, dtype or torch.get_default_dtype()), device, backend
        )
        weight = allocate("RMSNorm", "weight", (hidden_size,), dtype, device, 0 if rounding == "one_plus" else 1)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """Yield the checkpoint tensor ``weight``."""
        yield "weight", Slot(self.weight, (self.cfg.hidden_size,))

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Normalise ``x``.

        Parameters
        ----------
        x : Tensor ``[..., D]``
            Any leading dimensions; rows may be strided, the last dimension is contiguous.
        residual : Tensor ``[..., D]``, optional
            Same shape, dtype and device as ``x``; rows may be strided, the last dimension is contiguous.

        Returns
        -------
        Tensor, or (Tensor, Tensor)
            ``y``; with a residual also the new residual ``x + residual``. Both are new tensors.
        """
        held: Any = self._parameters
        size = self.cfg.hidden_size
        try:
            weight = held["weight"]
        except KeyError:  # pruned or parametrized: torch computes it
            weight = self.weight
        if not self.trusted:
            self._check(x, residual, weight)
        y, new_residual = (self.ladder.single or self.ladder.pick(x.numel() // size))(x, weight, residual)
        return y if residual is None else (y, new_residual)

    def coded(
        self, x: torch.Tensor, residual: torch.Tensor | None, layout: str
    ) -> tuple[CodedRows, torch.Tensor | None] | None:
        """Return ``y`` ``[T, D]`` quantised to e4m3 by 128 columns, and the new residual; ``None``: not in one launch.

        For whoever holds this layer and what reads ``y``: nothing is checked. The bits are those of the call and of
        :class:`~fastlayers.GroupQuant` behind it. A hook that looks at what goes in or out of this layer sees rows:
        then, in a class of somebody else's, and with a backend that writes rows only, it is ``None``.

        Parameters
        ----------
        x, residual : Tensor ``[T, D]``
            As of the call; ``D`` a multiple of 128.
        layout : str
            Of the scales, see ``codes_layout`` of :class:`~fastlayers.FP8BlockLinear`.
        """
        if type(self) is not RMSNorm or watched(self):
            return None
        impl = self.ladder.single or self.ladder.pick(x.shape[0])
        found: tuple[CodedRows, torch.Tensor | None] | None = None
        if hasattr(impl, "coded"):
            found = impl.coded(x, self.weight, residual, layout)
        return found

    def joining(self, rows: SplitRows, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the call with ``rows.joined()`` returns; in one launch where Triton's kernel is what computes it.

        For whoever holds this layer and the linear that left the splits: nothing is checked. The bits are those of the
        call. A hook that looks at what goes in or out of this layer sees rows.

        Parameters
        ----------
        rows : SplitRows ``[T, D]``
        residual : Tensor ``[T, D]``
        """
        found: tuple[torch.Tensor, torch.Tensor] | None = None
        if type(self) is RMSNorm and not watched(self):
            impl = self.ladder.single or self.ladder.pick(rows.shape[0])
            split_norm = import_module("fastlayers.norm.rms_norm.split").split_norm
            found = split_norm(self.cfg, impl, rows, self.weight, residual)
        return self(rows.joined(), residual) if found is None else found

    def _check(self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor) -> None:
        size = self.cfg.hidden_size
        check_tensor("RMSNorm", "x", x, dtype=weight.dtype, device=weight.device, last_dim_contiguous=True)
        check_tensor("RMSNorm", "x", x, shape=(*x.shape[:-1], size))
        if residual is not None:
            check_tensor(
                "RMSNorm", "residual", residual, shape=tuple(x.shape), dtype=x.dtype, device=x.device,
                last_dim_contiguous=True,
            )  # fmt: skip
