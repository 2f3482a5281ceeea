"""Operators of ``torch.ops.fastlayers``: what torch.compile and everything else that looks on sees of a kernel.

Kernel backends wrap one launch sequence each; torch backends need no operator, the compiler traces through them. Where
nobody looks on, the function itself is called: a call of ``torch.library`` costs more than many kernels take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastlayers.errors import ArgumentError

_library = torch.library.Library("fastlayers", "FRAGMENT")

_local_keys = torch._C._dispatch_tls_local_include_set
_function_modes = torch._C._len_torch_function_stack
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))


def _quiet_keys() -> frozenset[int]:
    """Return what torch's dispatcher adds to every call of this thread where nothing was entered: two sets of keys."""
    with torch.inference_mode(False):
        ordinary = _local_keys().raw_repr()
    with torch.inference_mode():
        return frozenset((ordinary, _local_keys().raw_repr()))


_QUIET = _quiet_keys()


class Operator:
    """A function and the operator of ``torch.ops.fastlayers`` that stands for it; made by :func:`operator`.

    Called directly unless something would miss it: a compiler, ``torch.jit.trace``, a dispatch or function mode (fake
    tensors, ``make_fx``, a device context), a level of ``torch.func``, a tensor subclass, or an argument that needs a
    gradient. Asked at each call (half a microsecond), so that what starts between two layers counts, too.

    Attributes
    ----------
    function : callable
    overload : torch._ops.OpOverload
    """

    def __init__(self, function: Callable[..., Any], overload: Any) -> None:
        self.function, self.overload = function, overload
        arguments = overload._schema.arguments
        self._tensors = tuple(i for i, a in enumerate(arguments) if str(a.type) in ("Tensor", "Optional[Tensor]"))
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    def __call__(self, *arguments: Any) -> Any:
        """Call the function, or the operator where somebody looks on."""
        if torch.compiler.is_dynamo_compiling() or _local_keys().raw_repr() not in _QUIET or _function_modes():
            return self.overload(*arguments)
        for i in self._tensors:
            given = arguments[i]
            if type(given) not in _PLAIN or (given is not None and given.requires_grad and torch.is_grad_enabled()):
                return self.overload(*arguments)
        return self.function(*arguments)


def operator(
    name: str, fake: Callable[..., Any], writes: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Operator]:
    """Register the decorated function as ``torch.ops.fastlayers.<name>`` and return its :class:`Operator`.

    Parameters
    ----------
    name : str
        The operator's schema follows from the function's annotations; all arguments are given by position.
    fake : callable
        Same signature; returns empty tensors of the right shape, dtype and stride. For operators that return
        nothing: a function that does nothing.
    writes : sequence of str
        The arguments that the function writes into.

    Notes
    -----
    Inference only: a backward pass through it raises :class:`ArgumentError`, unless it writes into its arguments, where
    the layer must look itself.
    """

    def register(function: Callable[..., Any]) -> Operator:
        _library.define(name + torch.library.infer_schema(function, mutates_args=writes))
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fastlayers::{name}", fake, lib=_library)

        def backward(ctx: Any, *gradients: Any) -> Any:
            """Say that there is none; otherwise what lies before would be left without a gradient, silently."""
            accepted = "no gradient: this kernel is for inference; backend='torch' has one where the layer says so"
            raise ArgumentError(f"fastlayers::{name}", "gradient", "asked for", accepted)

        if not getattr(torch.ops.fastlayers, name).default._schema.is_mutable:
            torch.library.register_autograd(f"fastlayers::{name}", backward, lib=_library)
        return Operator(function, getattr(torch.ops.fastlayers, name).default)

    return register


def nothing(*args: Any) -> None:
    """The fake of an operator that only writes into its arguments."""


def like_x(x: torch.Tensor, *rest: object) -> torch.Tensor:
    """The fake of an operator whose result is a contiguous tensor of its first argument's shape and dtype."""
    return x.new_empty(x.shape)


@operator("count", nothing, writes=("counter",))
def count(counter: torch.Tensor) -> None:
    """Add one to ``counter`` (int64 ``[1]`` on the host) each time the surrounding code really runs.

    An operator, not a Python integer on the module: module integers trip torch.compile's recompile limit, and
    the compiler may not drop an operator that writes.
    """
    counter.add_(1)
