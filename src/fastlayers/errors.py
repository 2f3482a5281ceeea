"""Every exception that fastlayers raises on purpose, and the checks that raise them.

A message names the layer, the argument, what was given and what is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


class FastlayersError(Exception):
    """Base class of all errors that fastlayers raises on purpose."""


class ArgumentError(FastlayersError, ValueError):
    """An argument of a layer is not one that the layer accepts.

    Parameters
    ----------
    layer, argument : str
        Where the problem is.
    given : object
        What was passed, in words or as a value.
    accepted : str
        What would have been accepted.
    """

    def __init__(self, layer: str, argument: str, given: object, accepted: str) -> None:
        self.layer, self.argument, self.given, self.accepted = layer, argument, given, accepted
        super().__init__(f"{layer}: {argument} is {given}; accepted: {accepted}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.layer, self.argument, self.given, self.accepted)


class NoBackendError(FastlayersError, RuntimeError):
    """No backend of a layer accepts this configuration on this device; every reason is listed."""

    def __init__(self, layer: str, cfg: object, device: object, asked: str, refused: Mapping[str, str]) -> None:
        self.layer, self.cfg, self.device, self.asked, self.refused = layer, cfg, device, asked, dict(refused)
        reasons = "\n".join(f"  {name}: {why}" for name, why in refused.items())
        super().__init__(f"{layer}: no backend for backend={asked!r} on {device} with {cfg}\n{reasons}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.layer, self.cfg, self.device, self.asked, self.refused)


class UnknownNameError(FastlayersError, LookupError):
    """A layer, backend or device name that is not registered; the known ones are listed."""


class EnvironmentVariableError(FastlayersError, ValueError):
    """An environment variable of ours does not follow its grammar."""


class CheckpointError(FastlayersError):
    """A checkpoint file is missing, truncated, corrupt, or its tensors do not fit the model."""


class UnknownModelError(FastlayersError, LookupError):
    """A model configuration names an architecture that is not implemented."""


class PatchError(FastlayersError, RuntimeError):
    """A Hugging Face model could not be patched as asked; the model is as it was before the call."""


class AllocatorOverflowError(FastlayersError, MemoryError):
    """A bump allocator or page pool has no room left for the named requester."""


class LayoutError(FastlayersError, ValueError):
    """Two layouts between which the communicator knows no transition."""


class CaptureError(FastlayersError, RuntimeError):
    """Something that must not happen inside a CUDA graph capture was asked for there."""


def describe(tensor: object) -> str:
    """Return a tensor's dtype, shape, stride and device as one short phrase (other objects: their repr)."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        return repr(tensor)
    dtype = dtype_name(tensor.dtype)
    layout = "" if tensor.is_contiguous() else f", stride {tuple(tensor.stride())}"
    return f"{dtype}{list(tensor.shape)}{layout} on {tensor.device}"


def check_tensor(
    layer: str,
    argument: str,
    tensor: object,
    *,
    shape: tuple[int | None, ...] | None = None,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    device: torch.device | None = None,
    last_dim_contiguous: bool = False,
    contiguous: bool = False,
) -> None:
    """Raise :class:`ArgumentError` unless ``tensor`` has this shape (``None`` = any), dtype, device and strides.

    ``last_dim_contiguous`` asks for at least one dimension, too: rows of numbers next to each other.

    Host-side only: reads no data, never synchronises, safe under capture.
    """
    import torch

    dtypes = dtype if isinstance(dtype, tuple) or dtype is None else (dtype,)
    good = isinstance(tensor, torch.Tensor)
    if good:
        assert isinstance(tensor, torch.Tensor)
        good = (
            (dtypes is None or tensor.dtype in dtypes)
            and (shape is None or _shape_fits(tuple(tensor.shape), shape))
            and (device is None or _same_device(tensor.device, device))
            and (not last_dim_contiguous or _rows_are_contiguous(tensor))
            and (not contiguous or tensor.is_contiguous())
        )
    if good:
        return
    # Words only on failure: torch.compile cannot print a symbolic size.
    wanted = []
    if dtypes is not None:
        wanted.append(" or ".join(map(dtype_name, dtypes)))
    if shape is not None:
        wanted.append("[" + ", ".join("*" if s is None else str(s) for s in shape) + "]")
    if device is not None:
        wanted.append(f"on {device}")
    if last_dim_contiguous:
        wanted.append("last stride 1")
    if contiguous:
        wanted.append("contiguous")
    raise ArgumentError(layer, argument, describe(tensor), " ".join(wanted) or "a tensor")


def _rows_are_contiguous(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 0 and (tensor.shape[-1] <= 1 or tensor.numel() == 0 or tensor.stride(-1) == 1)


def _shape_fits(given: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(given) == len(wanted) and all(w is None or g == w for g, w in zip(given, wanted, strict=True))


def _same_device(given: torch.device, wanted: torch.device) -> bool:
    return given.type == wanted.type and (wanted.index is None or given.index == wanted.index)


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def check_positive(layer: str, **values: int) -> None:
    """Raise :class:`ArgumentError` for the first of ``values`` that is not a positive integer."""
    for name, value in values.items():
        if not _is_positive(value):
            raise ArgumentError(layer, name, repr(value), "a positive integer")


def check_kind(layer: str, kind: type, **values: object) -> None:
    """Raise :class:`ArgumentError` for the first of ``values`` that is no ``kind``, one of our own classes."""
    for name, value in values.items():
        if not isinstance(value, kind):
            raise ArgumentError(layer, name, repr(value), f"a fastlayers.{kind.__name__}")


def check_pair(layer: str, argument: str, given: object) -> tuple[int, int]:
    """Return ``given`` as a tuple; raise :class:`ArgumentError` unless it is two positive integers."""
    if not isinstance(given, tuple | list) or len(given) != 2 or not all(map(_is_positive, given)):
        raise ArgumentError(layer, argument, repr(given), "two positive integers")
    return given[0], given[1]


def check_names(layer: str, names: object, count: int) -> None:
    """Raise :class:`ArgumentError` unless ``names`` is ``None`` or a sequence of ``count`` strings."""
    if names is None:
        return
    accepted = f"{count} checkpoint name{'s' * (count > 1)} in a tuple"
    if not isinstance(names, tuple | list) or len(names) != count or not all(isinstance(n, str) for n in names):
        raise ArgumentError(layer, "names", repr(names), accepted)


def check_float(layer: str, **values: object) -> None:
    """Raise :class:`ArgumentError` for the first of ``values`` that is neither ``None`` nor a floating-point dtype."""
    import torch

    accepted = (None, torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for name, value in values.items():
        check_choice(layer, name, value, accepted)


def check_number(layer: str, **values: object) -> None:
    """Raise :class:`ArgumentError` for the first of ``values`` that is neither ``None`` nor a number."""
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ArgumentError(layer, name, repr(value), "a number")


def check_choice(layer: str, argument: str, given: object, accepted: tuple[object, ...]) -> None:
    """Raise :class:`ArgumentError` unless ``given`` is one of ``accepted``."""
    if given not in accepted:
        raise ArgumentError(layer, argument, repr(given), "one of " + ", ".join(map(repr, accepted)))
