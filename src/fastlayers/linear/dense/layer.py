"""Linear layer in the model's own dtype.

K = in_features, N = out_features (on this rank)
y[..., N] = x[..., K] · weight[N, K]ᵀ + bias[N]       (fp32 sum, rounded once to out_dtype)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fastlayers.comm.parallel import REPLICATED, Shard
from fastlayers.device import Device, as_device
from fastlayers.errors import check_choice, check_positive
from fastlayers.linear.base import LinearBase, check_source, frozen
from fastlayers.quant.bf12 import NO_MEMORY, TOO_MANY, BF12Weights, pack_bf12, why_not_bf12
from fastlayers.quant.coded_rows import watched
from fastlayers.registry import REPEATS, Backend, Registry, reference_backend, triton_backend

if TYPE_CHECKING:
    from fastlayers.linear.split_rows import SplitRows

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class LinearConfig:
    """What a backend must know: sizes on this rank, ``dtype`` of weight and input, output's ``out_dtype``."""

    in_features: int
    out_features: int
    bias: bool = False
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_positive("Linear", in_features=self.in_features, out_features=self.out_features)
        # float64 is for tests of a whole model; only torch and the reference take it.
        check_choice("Linear", "dtype", self.dtype, (*DTYPES, torch.float64))
        check_choice("Linear", "out_dtype", self.out_dtype, (None, self.dtype, torch.float32))

    @property
    def y_dtype(self) -> torch.dtype:
        """The output's dtype."""
        return self.out_dtype or self.dtype

    def tuning_key(self) -> str:
        """Return the shape key of tuned tables."""
        dtypes = "_".join(str(d).removeprefix("torch.") for d in (self.dtype, self.y_dtype))
        return f"N={self.out_features},K={self.in_features},{dtypes}"


def _triton_refuse(cfg: LinearConfig, device: Device) -> str | None:
    return None if cfg.dtype in DTYPES else f"dtype {cfg.dtype} is not one of float32, float16, bfloat16"


def _sgl_kernel_refuse(cfg: LinearConfig, device: Device) -> str | None:
    if (why := device.refuses_all_but(9)) is not None:
        return why
    if (cfg.out_features, cfg.in_features, cfg.dtype, cfg.y_dtype) != (2112, 7168, torch.bfloat16, torch.bfloat16):
        return "dsv3_fused_a_gemm is for a bfloat16 weight of 2112 x 7168 only"
    return None


def _wgmma_refuse(cfg: LinearConfig, device: Device) -> str | None:
    if cfg.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype {cfg.dtype} is not one of float16, bfloat16"
    if device.capability not in (None, (9, 0)):
        return f"needs sm_90, this is {device.sm}"
    return f"{cfg.in_features} input features are no multiple of 64" if cfg.in_features % 64 else None


_SGL_KERNEL_NEEDS = ("sgl_kernel", "torch.ops:sgl_kernel.dsv3_fused_a_gemm")
_HERE = "fastlayers.linear.dense"
LINEAR = Registry(
    "linear",
    [
        # On CUDA, torch means cuBLAS, which is the right choice for a plain GEMM; on one stream it repeats its bits.
        Backend("torch", f"{_HERE}.torch:TorchLinear", auto_on=("cpu", "cuda"), repeats_on=REPEATS),
        triton_backend(f"{_HERE}.triton:TritonLinear", _triton_refuse),
        replace(triton_backend(f"{_HERE}.triton_wgmma:WgmmaLinear", _wgmma_refuse), name="wgmma"),
        Backend("sgl_kernel", f"{_HERE}.sgl_kernel:SglKernelLinear", _SGL_KERNEL_NEEDS, _sgl_kernel_refuse),
        reference_backend(f"{_HERE}.reference:ReferenceLinear"),
    ],
    cases=f"{_HERE}.cases",
)


class Linear(LinearBase):
    """``y = x · weightᵀ + bias``, possibly several checkpoint tensors fused along the output.

    Parameters
    ----------
    in_features, out_features, shard, names
        As of :class:`~fastlayers.linear.base.LinearBase`: several sizes make one GEMM of several checkpoint tensors.
    bias : bool
    device, dtype
        Of the parameters; ``dtype`` is also that of the input.
    backend : str
        ``"auto"``, a name, or a ladder.
    out_dtype : torch.dtype, optional
        ``torch.float32`` keeps the fp32 sum (logits); default: ``dtype``.

    Notes
    -----
    Parameters: ``weight`` ``[local_out, local_in]``, ``bias`` ``[local_out]``; zeros until loaded.
    Capture-safe; allocates its output. Gradients are right with the backends ``torch`` and ``reference``; a backward
    pass through another one raises.

    Examples
    --------
    >>> import torch, fastlayers as fl
    >>> qkv = fl.Linear(4, [4, 2, 2], names=["../q_proj", "../k_proj", "../v_proj"])
    >>> _ = qkv.weight.fill_(0.5)
    >>> q, k, v = qkv(torch.ones(3, 4)).split(qkv.part_sizes, -1)
    >>> q.shape, v[0].tolist()
    (torch.Size([3, 4]), [2.0, 2.0])
    """

    registry = LINEAR

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        bias: bool = False,
        *,
        shard: Shard = REPLICATED,
        names: Sequence[str] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, shard, names)
        dtype = dtype or torch.get_default_dtype()
        self.build(LinearConfig(self.local_in, self.local_out, bias, dtype, out_dtype), device, backend, dtype)

    @classmethod
    def from_linear(cls, source: nn.Linear, *, backend: str = "auto") -> Linear:
        """Return a layer that shares the parameters of an ``nn.Linear`` or a :class:`Linear`.

        No copy is made of contiguous ones.
        """
        check_source(cls.__name__, source)
        weight, bias = source.weight, source.bias
        made = cls(
            weight.shape[1], weight.shape[0], bias is not None,
            device="meta", dtype=weight.dtype,
            # Replaced below: meta tensors cost nothing, and say nothing about the device.
            backend="reference",
        )  # fmt: skip
        made.choose(LINEAR, made.cfg, weight.device, backend)
        made.weight = frozen(weight)
        if bias is not None:
            made.bias = frozen(bias)
        return made

    def splits(self, x: torch.Tensor) -> SplitRows | None:
        """Return ``y`` ``[T, N]`` with its splits not added; ``None``: there are none, or they are not left.

        For whoever holds this layer and the norm that reads ``y`` (:meth:`RMSNorm.joining`): nothing is checked. Splits
        are left where the backend of so many rows was given ``LEAVE`` in its configuration. A hook that looks at what
        goes in or out of this layer sees rows; then, and in a class of somebody else's, it is ``None``.

        Parameters
        ----------
        x : Tensor ``[T, K]``
        """
        if type(self) is not Linear or watched(self):
            return None
        splits = getattr(self.ladder.single or self.ladder.pick(x.shape[0]), "splits", None)
        found: SplitRows | None = None
        if splits is not None:
            found = splits(x, *self.operands(), self.bias if self.adds_bias else None)
        return found

    def store_bf12(self, packed: dict[Any, BF12Weights | None] | None = None) -> str:
        """Keep a copy of the weight in 12 bits a number, which serves one token; return why not (``""``: done).

        See :func:`fastlayers.store_bf12`. ``packed``: what was made of other layers' weights, by where they lie; this
        one's is added. A weight that lies in the same place is not packed again.
        """
        cfg, weight = self.cfg, self._parameters.get("weight")
        if self.serving_one_token is not None:
            self.weights_changed()  # a captured step may read the copy
        if weight is None:
            return "the weight is computed, pruned or parametrized"
        if why := LINEAR.named("triton").why_not(cfg, as_device(weight.device)) or why_not_bf12(weight):
            return why
        packed, place = {} if packed is None else packed, (weight.data_ptr(), weight.shape)
        if place not in packed:
            try:
                packed[place] = pack_bf12(weight)
            except (torch.OutOfMemoryError, MemoryError):
                return NO_MEMORY
        if (copy := packed[place]) is None:
            return TOO_MANY
        bf12 = import_module("fastlayers.linear.dense.triton_bf12").BF12Linear(copy, cfg.y_dtype)
        self.serve_one_token(bf12, weight)
        return ""
