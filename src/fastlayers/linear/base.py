"""What all linears share: local sizes under sharding, fused parts, and checkpoint slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd import forward_ad

from fastlayers.comm.parallel import REPLICATED, Shard
from fastlayers.errors import (
    ArgumentError,
    check_choice,
    check_kind,
    check_names,
    check_positive,
    describe,
)
from fastlayers.layer import Layer
from fastlayers.memory import allocate
from fastlayers.registry import Registry
from fastlayers.weights import Slot


def frozen(values: torch.Tensor) -> nn.Parameter:
    """Return a parameter without gradient that shares ``values``."""
    return nn.Parameter(values.detach(), requires_grad=False)


def check_source(layer: str, source: object) -> None:
    """Raise :class:`ArgumentError` unless ``source`` is a module like ``nn.Linear``."""
    parts = getattr(source, "weight", None), getattr(source, "bias", None)
    if not (isinstance(source, nn.Module) and isinstance(parts[0], torch.Tensor)):
        raise ArgumentError(layer, "source", describe(source), "a module with a weight, as nn.Linear has")
    if parts[0].dim() != 2 or not parts[0].numel():
        accepted = "[out_features, in_features], one of each or more"
        raise ArgumentError(layer, "source.weight", f"of shape {list(parts[0].shape)}", accepted)


class LinearBase(Layer):
    """A linear whose output may be several checkpoint tensors fused along the output features.

    Parameters
    ----------
    in_features : int
        Of the whole layer (before sharding).
    out_features : int or sequence of int
        Of the whole layer; several sizes make a fused linear of that many parts.
    shard : Shard
        ``column``: every part is split along its output; ``row``: the input is split, and the output is a
        partial sum that the communicator reduces (only rank 0 of the axis adds the bias).
    names : sequence of str, optional
        Checkpoint names of the parts relative to this module, e.g.
        ``("../q_a_proj", "../kv_a_proj_with_mqa")``. Default: this module's own name (one part).

    Attributes
    ----------
    local_in, local_out : int
        Sizes on this rank.
    part_sizes : list[int]
        Sizes of the parts on this rank: ``linear(x).split(linear.part_sizes, -1)``.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    registry: ClassVar[Registry]
    quantised = False
    # What checkpoints, and the layer, call the scales of the weight, if it has some.
    scale_name: ClassVar[str] = ""

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        shard: Shard = REPLICATED,
        names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.kind = type(self).__name__
        if not isinstance(out_features, Integral | Sequence) or isinstance(out_features, str):
            accepted = "a positive integer, or one for each fused part"
            raise ArgumentError(self.kind, "out_features", describe(out_features), accepted)
        given: list[Any] = [out_features] if isinstance(out_features, Integral) else list(out_features)
        check_positive(
            self.kind,
            in_features=in_features,
            **{f"out_features[{i}]": n for i, n in enumerate(given)},
        )
        # Whatever kind of integers they were.
        in_features, self.full_parts = int(in_features), [int(size) for size in given]
        check_kind(self.kind, Shard, shard=shard)
        check_choice(self.kind, "shard.kind", shard.kind, ("replicated", "column", "row"))
        if names is None and len(self.full_parts) > 1:
            raise ArgumentError(
                self.kind, "names", None, f"{len(self.full_parts)} checkpoint names for the fused parts"
            )
        check_names(self.kind, names, len(self.full_parts))
        self.in_features, self.out_features = in_features, sum(self.full_parts)
        self.shard, self.names = shard, tuple(names) if names is not None else None
        axis = shard.axis
        self.row_slice = (
            axis.part(in_features, f"{self.kind} in_features") if shard.kind == "row" else slice(0, in_features)
        )
        self.column_slices = [
            axis.part(n, f"{self.kind} out_features") if shard.kind == "column" else slice(0, n)
            for n in self.full_parts
        ]
        self.part_sizes = [s.stop - s.start for s in self.column_slices]
        self.local_in = self.row_slice.stop - self.row_slice.start
        self.local_out = sum(self.part_sizes)
        self.adds_bias = not (shard.kind == "row" and axis.rank > 0)

    @property
    def fixed_dtype(self) -> torch.dtype:
        """The dtype of inputs, outputs and unquantised weights."""
        dtype: torch.dtype = self.cfg.dtype
        return dtype

    def parts(self) -> Iterator[tuple[str, int, slice, slice]]:
        """Yield per part: name prefix (``""`` or ``"../x."``), full rows, slice read here, local rows."""
        start = 0
        for index, (full, read) in enumerate(zip(self.full_parts, self.column_slices, strict=True)):
            size = read.stop - read.start
            prefix = f"{self.names[index]}." if self.names is not None else ""
            yield prefix, full, read, slice(start, start + size)
            start += size

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """Yield the checkpoint tensors of every part: ``weight``, its scales if it has some, and ``bias``.

        Every rank holds the bias, also where it is not added, so that no checkpoint tensor is left over.
        """
        for index, (prefix, full, read, local) in enumerate(self.parts()):
            yield f"{prefix}weight", Slot(self.weight[local], (full, self.in_features), (read, self.row_slice))
            for name, slot in self.scale_slots(index, full, read, local):
                yield f"{prefix}{name}", slot
        if self.bias is not None:
            for prefix, full, read, local in self.parts():
                yield f"{prefix}bias", Slot(self.bias[local], (full,), (read,))

    def scale_slots(self, index: int, full: int, read: slice, local: slice) -> Iterator[tuple[str, Slot]]:
        """Yield the checkpoint tensors that go with the weight of one part; see :meth:`parts`."""
        yield from ()

    def build(
        self, cfg: Any, device: torch.device | str | None, backend: str, stored: torch.dtype, width: int | None = None
    ) -> None:
        """Choose the backend for ``cfg``; set the weight to zeros, its scales to ones, the bias to zeros or ``None``.

        The weight is of ``stored`` and, where it is packed, of ``width`` columns.
        """
        self.choose(self.registry, cfg, device, backend)
        shape = self.local_out, self.local_in if width is None else width
        self.weight = frozen(allocate(self.kind, "weight", shape, stored, device))
        self.bias = frozen(allocate(self.kind, "bias", shape[:1], cfg.dtype, device)) if cfg.bias else None
        if name := self.scale_name:
            setattr(self, name, frozen(allocate(self.kind, name, cfg.scales, torch.float32, device, 1)))

    def operands(self) -> tuple[torch.Tensor | None, ...]:
        """Return what a backend takes between ``x`` and the bias."""
        try:
            return (self._parameters["weight"],)
        except KeyError:  # pruned or parametrized: torch computes it
            return (self.weight,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``y`` ``[..., local_out]`` for ``x`` ``[..., local_in]`` of ``dtype``.

        ``y`` is of ``dtype`` too, or of ``out_dtype`` for a layer that has one.

        Raises
        ------
        ArgumentError
            ``x`` has another dtype, last dimension or device; or ``x`` or a parameter of a quantised linear requires
            a gradient.
        """
        if not self.trusted:
            self.check_input(x, self.cfg.dtype, self.weight.device)
        if self.quantised and (torch.is_grad_enabled() or forward_ad._current_level >= 0):
            self.refuse_grad(x=x)
        impl = self.ladder.single or self.ladder.pick(x.numel() // self.local_in)
        bias = self._parameters.get("bias") if self.adds_bias else None
        if bias is None and self.adds_bias:  # there is none, or torch computes it, see operands()
            bias = self.bias
        y: torch.Tensor = impl(x, *self.operands(), bias)
        return y

    def check_input(self, x: torch.Tensor, dtype: torch.dtype, device: torch.device | None = None) -> None:
        """Raise :class:`ArgumentError` unless ``x`` is ``[..., local_in]`` of ``dtype`` on ``device``."""
        good = isinstance(x, torch.Tensor) and x.dtype == dtype and x.dim() >= 1 and x.shape[-1] == self.local_in
        if not good or (device is not None and x.device != device):
            wanted = f"{str(dtype).removeprefix('torch.')}[..., {self.local_in}]"
            raise ArgumentError(self.kind, "x", describe(x), wanted + (f" on {device}" if device is not None else ""))
