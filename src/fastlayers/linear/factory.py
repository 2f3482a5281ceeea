"""One call for every linear: :func:`linear` returns the class that the number format asks for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastlayers.comm.parallel import REPLICATED, Shard
from fastlayers.errors import ArgumentError, check_kind
from fastlayers.linear.base import LinearBase
from fastlayers.quant.spec import NONE, QuantSpec


def _none(quant: QuantSpec) -> dict[str, Any]:
    return {}


def _block(quant: QuantSpec) -> dict[str, Any]:
    return {"block_size": quant.block_size, "scale_fmt": quant.scale_fmt}


def _scaled(quant: QuantSpec) -> dict[str, Any]:
    scale = quant.format.removeprefix("fp8_")
    return {"weight_scale": scale, "activation_scale": quant.activation_scale, "scale_names": quant.scale_names}


def _weight_only(quant: QuantSpec) -> dict[str, Any]:
    names = ("format", "group_size", "zero_point", "act_order", "layout")
    return {name: getattr(quant, name) for name in names}


_WEIGHT_ONLY = ("fastlayers.linear.weight_only.layer:WeightOnlyLinear", _weight_only)
# Format -> its class, imported when it is made, and what that takes of a QuantSpec.
MADE_OF: dict[str, tuple[str, Callable[[QuantSpec], dict[str, Any]]]] = {
    "none": ("fastlayers.linear.dense.layer:Linear", _none),
    "fp8_block": ("fastlayers.linear.fp8_block.layer:FP8BlockLinear", _block),
    "int8": ("fastlayers.linear.int8.layer:Int8Linear", _none),
    "fp8_tensor": ("fastlayers.linear.fp8_scaled.layer:FP8ScaledLinear", _scaled),
    "fp8_channel": ("fastlayers.linear.fp8_scaled.layer:FP8ScaledLinear", _scaled),
    "w4a16": _WEIGHT_ONLY,
    "w8a16": _WEIGHT_ONLY,
    "fp8_w8a16": _WEIGHT_ONLY,
}


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
        ``Linear``, ``FP8BlockLinear``, ``Int8Linear``, ``FP8ScaledLinear`` or ``WeightOnlyLinear``.

    Examples
    --------
    >>> import fastlayers as fl
    >>> type(fl.linear(256, 128)).__name__
    'Linear'
    >>> type(fl.linear(256, 128, quant=fl.QuantSpec("fp8_block"))).__name__
    'FP8BlockLinear'
    """
    check_kind("linear", QuantSpec, quant=quant)
    if quant.format not in MADE_OF:
        known = "'none', 'fp8_block', 'int8', 'fp8_tensor', 'fp8_channel', 'w4a16', 'w8a16' or 'fp8_w8a16'"
        raise ArgumentError("linear", "quant.format", repr(quant.format), known)
    target, options = MADE_OF[quant.format]
    module, _, name = target.partition(":")
    layer: LinearBase = getattr(importlib.import_module(module), name)(
        in_features, out_features, bias, shard=shard, names=names, device=device,
        dtype=dtype or torch.get_default_dtype(), backend=backend, **options(quant),
    )  # fmt: skip
    return layer
