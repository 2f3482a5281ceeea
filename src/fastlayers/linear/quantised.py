"""What linears with quantised weights share: configuration, parameters, and how they take a checkpoint's tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from fastlayers.errors import ArgumentError, check_choice, check_positive, check_tensor
from fastlayers.linear.base import LinearBase, frozen
from fastlayers.weights import too_large

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class QuantisedLinearConfig:
    """What every backend must know: sizes on this rank, and ``dtype`` of x, y and bias."""

    # The class that errors name.
    layer: ClassVar[str]

    in_features: int
    out_features: int
    bias: bool = False
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        check_positive(self.layer, in_features=self.in_features, out_features=self.out_features)
        check_choice(self.layer, "dtype", self.dtype, DTYPES)

    @property
    def scales(self) -> tuple[int, ...]:
        """Shape of the weight's scales: one an output channel, unless a format says otherwise."""
        return (self.out_features,)

    def tuning_key(self) -> str:
        """Return the shape key of tuned tables."""
        return f"N={self.out_features},K={self.in_features}"


class QuantisedLinear(LinearBase):
    """A linear whose weight is codes, with fp32 scales beside them.

    Parameters
    ----------
    in_features, out_features, shard, names
        As of :class:`~fastlayers.linear.base.LinearBase`.
    bias : bool
    device
        Of the parameters.
    dtype : torch.dtype
        Of inputs, outputs and bias: bf16, fp16 or fp32.
    backend : str
        ``"auto"``, a name, or a ladder.

    Notes
    -----
    Codes are zeros and scales ones until loaded. Capture-safe; allocates its output.
    For inference only: it raises where an input or a parameter requires a gradient.
    """

    # Codes instead of weights: what autograd would record has nothing to do with the product.
    quantised = True
    scale_name: ClassVar[str] = "weight_scale"
    weight_scale: nn.Parameter

    @classmethod
    def check_stored(
        cls, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> tuple[int, int]:
        """Return ``(N, K)`` of a checkpoint's ``weight [N, K]``; raise unless it is of ``dtype`` and the bias fits."""
        check_tensor(cls.__name__, "weight", weight, shape=(None, None), dtype=dtype)
        check_tensor(cls.__name__, cls.scale_name, scale)
        if bias is not None:
            check_tensor(cls.__name__, "bias", bias, shape=(weight.shape[0],))
        return weight.shape[0], weight.shape[1]

    def take(self, backend: str, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Hold a checkpoint's tensors instead of meta ones, shared where dtype and layout agree.

        The layer was made with meta tensors, which cost nothing and say nothing about the device, and with the
        backend ``"reference"``; it is chosen here, for the weight's device.
        """
        self.choose(self.registry, self.cfg, weight.device, backend)
        self.weight = frozen(weight.contiguous())
        if bias is not None:
            if largest := too_large(bias, self.fixed_dtype):
                raise ArgumentError(self.kind, "bias", f"up to {largest:.6g}", "values that float16 can hold")
            self.bias = frozen(bias.to(weight.device, self.fixed_dtype).contiguous())
        setattr(self, self.scale_name, frozen(scale.to(weight.device, torch.float32).contiguous()))

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weight ``[local_out, local_in]`` that codes and scales stand for, rounded once to ``dtype``."""
        raise TypeError(f"{self.kind} does not say how to dequantise")

    def operands(self) -> tuple[torch.Tensor | None, ...]:
        """Return the weight and its scales."""
        return self.weight, getattr(self, self.scale_name)
