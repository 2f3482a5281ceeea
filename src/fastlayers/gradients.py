"""Whether somebody asks for a derivative of what is computed: backward, forward, or at a level of torch.func.

    asked for by                                     seen as
    tensor.requires_grad, torch.func.grad, vjp …     ``requires_grad`` of the tensor, or of one that it wraps
    forward_ad.dual_level, torch.func.jvp …          a tangent of the tensor, or of one that it wraps

Each transform of torch.func wraps its inputs once more, so ``grad(vmap(f))`` gives ``f`` a batch around the tensor
that asks. ``torch.no_grad`` ends backward derivatives only; forward ones go on in it.

Layers ask ``torch.is_grad_enabled() or forward_ad._current_level >= 0`` themselves, the usual answer being no, and
call :func:`refuse` only then. The level is the process's: another thread's makes this one look, and find nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch._C import _functorch
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad

from fastlayers.errors import ArgumentError

BACKWARD, FORWARD = "a tensor that requires a gradient", "a tensor with a tangent (a forward-mode gradient)"


def _wrapped(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield ``tensor``, what it is a wrapper of, what that wraps, …"""
    yield tensor
    while not torch.compiler.is_compiling() and _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
        yield tensor


def has_tangent(tensor: torch.Tensor) -> bool:
    """Return whether forward-mode AD would go on from ``tensor``."""
    if forward_ad._current_level < 0:
        return False
    # A compiler knows no tangents: it breaks its graph here, or says that it may not.
    return _looks_for_tangents(tensor) if torch.compiler.is_compiling() else _tangent_of(tensor)


def _tangent_of(tensor: torch.Tensor) -> bool:
    if not torch._C._is_fwd_grad_enabled():
        return False
    # A batch has none by itself, but what it wraps may have one.
    found = (each for each in _wrapped(tensor) if not _functorch.is_batchedtensor(each))
    return any(forward_ad.unpack_dual(each).tangent is not None for each in found)


# As torch.compiler.disable, but the compiler is not imported before it is used.
_looks_for_tangents = _disable_dynamo(_tangent_of)


def asked(tensor: torch.Tensor) -> str:
    """Return :data:`BACKWARD`, :data:`FORWARD`, or ``""`` where nobody asks for a derivative by ``tensor``."""
    if torch.is_grad_enabled() and any(each.requires_grad for each in _wrapped(tensor)):
        return BACKWARD
    return FORWARD if has_tangent(tensor) else ""


def transformed(tensor: torch.Tensor) -> str:
    """Return the same for what goes past an ``autograd.Function``: forward-mode AD, and levels of torch.func."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        levels = (each for each in _wrapped(tensor) if _functorch.is_gradtrackingtensor(each))
        if any(each.requires_grad for each in levels):
            return BACKWARD
    return FORWARD if has_tangent(tensor) else ""


def refuse(layer: str, tensors: Iterable[tuple[str, torch.Tensor | None]], accepted: str = "") -> None:
    """Raise :class:`ArgumentError` for the first of ``tensors``, given with their names, that a derivative is asked by.

    Parameters
    ----------
    layer : str
    tensors : iterable of (name, tensor or None)
    accepted : str
        What would have been; by default that none is needed, as of a layer for inference.
    """
    for name, tensor in tensors:
        if tensor is not None and (given := asked(tensor)):
            usual = "tensors that need no gradient (this layer is for inference), or torch.no_grad()"
            if given == FORWARD:
                usual = "tensors without a tangent (this layer is for inference), unpacked before"
            raise ArgumentError(layer, name, given, accepted or usual)
