"""Linear layer with int8 weights and activations (W8A8), symmetric.

    K = in_features, N = out_features (on this rank)
    sx[...]     = max(1e-10, max over K of |x[..., K]|) / 127        one scale per token, fp32
    qx[..., K]  = round(x / sx)                                      int8, to nearest even
    a[..., N]   = Σ over K of qx[..., k] · weight[n, k]              int32, exact
    y[..., N]   = round( a · sx · weight_scale[n] + bias[n] )        fp32, rounded once to dtype

A token with NaN or infinity gets scale NaN and codes 0, so its whole row of y is NaN.
Stored: weight int8 [N, K], weight_scale fp32 [N] (one per output channel), bias [N] in dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fastlayers.comm.parallel import REPLICATED, Shard
from fastlayers.device import Device
from fastlayers.errors import ArgumentError, check_tensor, describe
from fastlayers.linear.base import check_source
from fastlayers.linear.quantised import QuantisedLinear, QuantisedLinearConfig
from fastlayers.linear.sgl_scaled_gemm import refuses
from fastlayers.registry import TRITON_NEEDS, Backend, Registry, reference_backend, torch_backend, triton_backend
from fastlayers.weights import Slot, scale_slot

LARGEST = 127.0
EPS = 1e-10
# The int32 sum cannot overflow below this many products of 127 · 127 (128 · 127 for weights with -128).
MAX_IN_FEATURES = (2**31 - 1) // (128 * 127)


@dataclass(frozen=True)
class Int8LinearConfig(QuantisedLinearConfig):
    """What a backend must know: sizes on this rank, and ``dtype`` of x, y and bias."""

    layer = "Int8Linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.in_features > MAX_IN_FEATURES:
            accepted = f"at most {MAX_IN_FEATURES}: sums must fit int32"
            raise ArgumentError(self.layer, "in_features", self.in_features, accepted)


def _refuse_sgl_kernel(cfg: Int8LinearConfig, device: Device) -> str | None:
    return refuses(cfg, device, 8)


_HERE = "fastlayers.linear.int8"
INT8_LINEAR = Registry(
    "int8_linear",
    [
        # Ahead of ours: at every size that was timed it was not slower (benchmarks/results/products_h200.jsonl).
        Backend(
            "sgl_kernel",
            f"{_HERE}.sgl_kernel:SglKernelInt8Linear",
            ("sgl_kernel", "torch.ops:sgl_kernel.int8_scaled_mm", *TRITON_NEEDS),
            _refuse_sgl_kernel,
        ),
        triton_backend(f"{_HERE}.triton:TritonInt8Linear"),
        torch_backend(f"{_HERE}.torch:TorchInt8Linear"),
        reference_backend(f"{_HERE}.reference:ReferenceInt8Linear"),
    ],
    cases=f"{_HERE}.cases",
)


def quantize_channel_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight ``[N, K]`` to int8 with one scale per output channel.

    Returns
    -------
    (Tensor, Tensor)
        int8 ``[N, K]`` within ±127, and fp32 scales ``[N]`` (absmax / 127; 1 for an all-zero channel).
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ArgumentError("quantize_channel_weight", "weight", describe(weight), "a floating tensor [N, K]")
    wide = weight.float()
    absmax = wide.abs().amax(-1)
    scale = (absmax.clamp_min(1e-30) / absmax.new_full((), LARGEST)).masked_fill(absmax == 0, 1.0)
    codes = (wide / scale[:, None]).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
    return codes, scale


class Int8Linear(QuantisedLinear):
    """Linear with int8 weights (a scale per output channel) and activations quantised per token.

    Parameters
    ----------
    in_features, out_features, bias, names, device, dtype, backend
        As of every :class:`~fastlayers.linear.quantised.QuantisedLinear`.
    shard : Shard
        A row shard quantises each rank's part of a token with its own scale.

    Notes
    -----
    Parameters: ``weight`` int8 ``[local_out, local_in]`` (zeros until loaded), ``weight_scale`` fp32
    ``[local_out]`` (ones until loaded), ``bias``. Source: Dettmers et al. 2022 (vector-wise quantisation).

    Examples
    --------
    >>> import torch, fastlayers as fl
    >>> dense = fl.Linear(64, 32, bias=True)
    >>> _ = dense.weight.copy_(torch.randn(32, 64))
    >>> layer, x = fl.Int8Linear.from_linear(dense), torch.randn(3, 64)
    >>> layer.weight.dtype, bool((layer(x) - dense(x)).norm() < 0.02 * dense(x).norm())
    (torch.int8, True)
    """

    registry = INT8_LINEAR

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        bias: bool = False,
        *,
        shard: Shard = REPLICATED,
        names: Sequence[str] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        backend: str = "auto",
    ) -> None:
        super().__init__(in_features, out_features, shard, names)
        self.build(Int8LinearConfig(self.local_in, self.local_out, bias, dtype), device, backend, torch.int8)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return ``weight · weight_scale`` ``[local_out, local_in]``, rounded once to ``dtype``."""
        return (self.weight.float() * self.weight_scale[:, None]).to(dtype)

    def scale_slots(self, index: int, full: int, read: slice, local: slice) -> Iterator[tuple[str, Slot]]:
        """Yield ``weight_scale`` ``[N]`` or ``[N, 1]``."""
        yield "weight_scale", scale_slot(self.weight_scale[local], full, read)

    @classmethod
    def from_linear(cls, source: nn.Linear, *, backend: str = "auto") -> Int8Linear:
        """Return a layer with the weight of an ``nn.Linear`` or :class:`Linear`, quantised by channels."""
        check_source(cls.__name__, source)
        weight, scale = quantize_channel_weight(source.weight.detach())
        return cls.from_checkpoint(weight, scale, source.bias, dtype=source.weight.dtype, backend=backend)

    @classmethod
    def from_checkpoint(
        cls,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        backend: str = "auto",
    ) -> Int8Linear:
        """Return a layer over int8 ``weight`` ``[N, K]`` and ``weight_scale`` ``[N]`` or ``[N, 1]``.

        Tensors are shared where dtype and layout agree.

        Raises
        ------
        ArgumentError
            Another dtype or shape.
        """
        n, k = cls.check_stored(weight, weight_scale, bias, torch.int8)
        if weight_scale.dim() == 2:
            check_tensor(cls.__name__, "weight_scale", weight_scale, shape=(n, 1))
        else:
            check_tensor(cls.__name__, "weight_scale", weight_scale, shape=(n,))
        made = cls(k, n, bias is not None, device="meta", dtype=dtype, backend="reference")
        made.take(backend, weight, weight_scale.reshape(n), bias)
        return made
