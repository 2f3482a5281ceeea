"""One call for every linear: :func:`linear` returns the class that the number format asks for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastlayers.comm.parallel import REPLICATED, Shard
from fastlayers.errors import ArgumentError, check_kind
from fastlayers.linear.base import LinearBase
from fastlayers.quant.spec import NONE, QuantSpec


def linear(
    in_features: int,
    out_features: int | Sequence[int],
    bias: bool = False,
    *,
    quant: QuantSpec = NONE,
    shard: Shard = REPLICATED,
    names: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> LinearBase:
    """Return the linear layer for one module's number format.

    Parameters
    ----------
    in_features : int
    out_features : int or sequence of int
        Several sizes make a fused linear, whose ``names`` must be given.
    bias : bool
    quant : QuantSpec
        The format of *this* module, so usually ``spec.for_module(name)``.
    shard : Shard
    names : sequence of str, optional
        Checkpoint names of the parts, relative to the module.
    device, dtype
        ``dtype`` is that of inputs, outputs and unquantised weights; default: torch's default dtype.
    backend : str

    Returns
    -------
    LinearBase
        ``Linear``, ``FP8BlockLinear``, ``Int8Linear`` or ``FP8ScaledLinear``.

    Examples
    --------
    >>> import fastlayers as fl
    >>> type(fl.linear(256, 128)).__name__
    'Linear'
    >>> type(fl.linear(256, 128, quant=fl.QuantSpec("fp8_block"))).__name__
    'FP8BlockLinear'
    """
    check_kind("linear", QuantSpec, quant=quant)
    dtype = dtype or torch.get_default_dtype()
    if quant.format == "none":
        from fastlayers.linear.dense.layer import Linear

        return Linear(
            in_features,
            out_features,
            bias,
            shard=shard,
            names=names,
            device=device,
            dtype=dtype,
            backend=backend,
        )
    if quant.format == "fp8_block":
        from fastlayers.linear.fp8_block.layer import FP8BlockLinear

        return FP8BlockLinear(
            in_features, out_features, bias, block_size=quant.block_size, scale_fmt=quant.scale_fmt,
            shard=shard, names=names, device=device, dtype=dtype, backend=backend,
        )  # fmt: skip
    if quant.format == "int8":
        from fastlayers.linear.int8.layer import Int8Linear

        return Int8Linear(
            in_features,
            out_features,
            bias,
            shard=shard,
            names=names,
            device=device,
            dtype=dtype,
            backend=backend,
        )
    if quant.format in ("fp8_tensor", "fp8_channel"):
        from fastlayers.linear.fp8_scaled.layer import FP8ScaledLinear

        return FP8ScaledLinear(
            in_features, out_features, bias, weight_scale=quant.format.removeprefix("fp8_"),
            activation_scale=quant.activation_scale, scale_names=quant.scale_names,
            shard=shard, names=names, device=device, dtype=dtype, backend=backend,
        )  # fmt: skip
    known = "'none', 'fp8_block', 'int8', 'fp8_tensor' or 'fp8_channel'"
    raise ArgumentError("linear", "quant.format", repr(quant.format), known)
