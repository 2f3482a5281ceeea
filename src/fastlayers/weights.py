"""How layers tell the loader which checkpoint tensor goes where: :class:`Slot` and :func:`slots`.

A layer with weights defines ``slots()``, which yields ``(name, Slot)``. A name is relative to the module;
``"../x"`` is relative to its parent, so that one fused parameter can be fed by several checkpoint tensors::

    q_a_proj.weight  ─┐
                      ├─►  qkv_a_proj.weight[0:1536], [1536:2112]
    kv_a_proj….weight ┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from fastlayers.errors import CheckpointError

# The first number that rounds to infinity in fp16.
FP16_OVERFLOWS = 65520.0


def too_large(values: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the largest finite magnitude of ``values`` if fp16, being ``dtype``, makes it infinite; otherwise 0."""
    if dtype != torch.float16 or values.dtype == torch.float16 or values.is_complex():
        return 0.0
    if values.is_meta or not values.numel():
        return 0.0
    if not values.is_floating_point():
        values = values.double()
    largest = float(values.detach().abs().masked_fill(~values.isfinite(), 0).max())
    return largest if largest >= FP16_OVERFLOWS else 0.0


def wrong_scale(values: torch.Tensor) -> str | None:
    """Return what is wrong with numbers that codes are multiplied by; zero is the scale of codes that are zero."""
    return None if bool(values.float().isfinite().all()) else "a scale is NaN or infinite; accepted: finite numbers"


def wrong_exponent(values: torch.Tensor) -> str | None:
    """Return what is wrong with scales in e8m0: 255 is its NaN, and our kernels would read it as 2^128."""
    return "a scale is 255, e8m0's NaN; accepted: 0 to 254" if bool((values == 255).any()) else None


def wrong_divisor(values: torch.Tensor) -> str | None:
    """Return what is wrong with numbers that inputs are divided by."""
    if (wrong := wrong_scale(values)) is not None:
        return wrong
    return None if bool((values.float() > 0).all()) else "an input's scale is not above 0; accepted: positive numbers"


@dataclass(frozen=True)
class Slot:
    """Where one checkpoint tensor (or this rank's part of it) goes.

    Parameters
    ----------
    dest : Tensor
        View into a parameter, written in place.
    shape : tuple[int, ...]
        Shape of the whole tensor in the checkpoint; anything else is an error.
    index : tuple[slice, ...]
        What this rank reads of it (``()``: everything).
    convert : callable or None
        Applied to the read part before the copy; a ``CheckpointError`` of its own is raised with the tensor's name.
    optional : bool
        Absence in the checkpoint is no error.
    wrong : callable or None
        Returns what is wrong with the values, or ``None``; :func:`wrong_scale`, say.
    """

    dest: torch.Tensor
    shape: tuple[int, ...]
    index: tuple[slice, ...] = ()
    convert: Callable[[torch.Tensor], torch.Tensor] | None = None
    optional: bool = False
    wrong: Callable[[torch.Tensor], str | None] | None = None

    def fill(self, name: str, part: torch.Tensor) -> None:
        """Copy ``part`` (already sliced by ``index``) into ``dest``.

        Raises
        ------
        CheckpointError
            The shape or dtype does not fit, a finite value would become infinite in fp16, the values are ``wrong``, or
            ``convert`` raised one; the tensor is named. e4m3 goes into e4m3 only: a quantised tensor is never cast to
            a wider one without its scales.
        """
        try:
            value = self.convert(part) if self.convert is not None else part
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from error
        if tuple(value.shape) != tuple(self.dest.shape):
            raise CheckpointError(f"{name}: shape {tuple(value.shape)} does not fit {tuple(self.dest.shape)}")
        quantised = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)
        if (value.dtype in quantised or self.dest.dtype in quantised) and value.dtype != self.dest.dtype:
            raise CheckpointError(f"{name}: dtype {value.dtype} in the checkpoint, {self.dest.dtype} in the model")
        if largest := too_large(value, self.dest.dtype):
            raise CheckpointError(f"{name}: up to {largest:.6g} in the checkpoint, which float16 cannot hold")
        if self.wrong is not None and not value.is_meta and (words := self.wrong(value)) is not None:
            raise CheckpointError(f"{name}: {words}")
        self.dest.copy_(value)


def scale_slot(dest: torch.Tensor, rows: int, read: slice) -> Slot:
    """Return the slot of one scale a row of a weight, stored as ``[N]``, or ``[N, 1]`` as compressed-tensors writes it.

    ``rows``: of the whole weight, of which this rank reads ``read`` into ``dest``.
    """
    return Slot(dest, (rows,), (read,), convert=lambda scale: scale.reshape(-1), wrong=wrong_scale)


def slots(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Slot]]:
    """Yield ``(checkpoint name, slot)`` for every weight of ``module`` and its children.

    A module that has ``slots()`` speaks for its own parameters; children are always walked as well.
    """
    listed = getattr(module, "slots", None)
    if listed is not None:
        for name, slot in listed():
            yield _join(prefix, name), slot
    for child_name, child in module.named_children():
        yield from slots(child, f"{prefix}.{child_name}" if prefix else child_name)


def _join(prefix: str, name: str) -> str:
    parts = prefix.split(".") if prefix else []
    while name.startswith("../"):
        if not parts:
            raise CheckpointError(f"slot name {name!r} climbs above the model")
        parts, name = parts[:-1], name[3:]
    return ".".join([*parts, name])
