"""Operators of ``torch.ops.fastlayers``: what torch.compile and everything else that looks on sees of a kernel.

Kernel backends wrap one launch sequence each; torch backends need no operator, the compiler traces through them. Where
nobody looks on, the function itself is called: a call of ``torch.library`` costs more than many kernels take.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from fastlayers.errors import ArgumentError
from fastlayers.gradients import transformed

_library = torch.library.Library("fastlayers", "FRAGMENT")

_local_keys = torch._C._dispatch_tls_local_include_set
_function_modes = torch._C._len_torch_function_stack
_compiling = torch.compiler.is_dynamo_compiling
# What an operator may be given without a look at it, unless gradients are recorded; its schema knows no other types.
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None), int, float, bool, str, list, torch.dtype))


def _keys(inference: bool) -> int:
    """Return what torch's dispatcher adds to every call of this thread where nothing was entered: a set of keys."""
    with torch.inference_mode(inference):
        return int(_local_keys().raw_repr())


# Under torch.inference_mode nothing is recorded for a gradient.
_RECORDS = _keys(inference=False)
_QUIET = frozenset((_RECORDS, _keys(inference=True)))
_TORCH = "backend='torch' has one where the layer says so"


def _asks_gradient(tensors: Iterable[torch.Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)


class Operator:
    """A function and the operator of ``torch.ops.fastlayers`` that stands for it; made by :func:`operator`.

    Called directly unless something would miss it: a compiler, ``torch.jit.trace``, a dispatch or function mode (fake
    tensors, ``make_fx``, a device context), a level of ``torch.func`` or of forward-mode AD, a tensor subclass, or an
    argument that needs a gradient. Asked at each call (half a microsecond), so that what starts between two layers
    counts, too.

    Attributes
    ----------
    function : callable
    overload : torch._ops.OpOverload
    named, elsewhere : str
        What errors about derivatives call it, and where there is one.
    """

    def __init__(self, function: Callable[..., Any], overload: Any, layer: str = "", elsewhere: str = _TORCH) -> None:
        self.function, self.overload = function, overload
        self.named, self.elsewhere = f"{layer}, {overload._schema.name}" if layer else overload._schema.name, elsewhere
        arguments = overload._schema.arguments
        self._tensors = tuple(i for i, a in enumerate(arguments) if str(a.type) in ("Tensor", "Optional[Tensor]"))
        self._end = max(self._tensors, default=-1) + 1
        # What returns nothing has no derivative; caches are outside of all that.
        self._returns = bool(overload._schema.returns)
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    def __call__(self, *arguments: Any) -> Any:
        """Call the function, or the operator where somebody looks on."""
        if _compiling() or (keys := _local_keys().raw_repr()) not in _QUIET or _function_modes():
            return self._observed(arguments)
        if forward_ad._current_level >= 0:
            return self._observed(arguments)
        plain = _PLAIN.issuperset(map(type, arguments[: self._end]))
        if not plain or (keys == _RECORDS and _asks_gradient(arguments[i] for i in self._tensors)):
            return self.overload(*arguments)
        return self.function(*arguments)

    @staticmethod
    def unwatched(*arguments: torch.Tensor | None) -> bool:
        """Return whether a call with these tensors would be one of the function."""
        if _compiling() or (keys := _local_keys().raw_repr()) not in _QUIET or _function_modes():
            return False
        if forward_ad._current_level >= 0 or not _PLAIN.issuperset(map(type, arguments)):
            return False
        return keys != _RECORDS or not _asks_gradient(arguments)

    def _observed(self, arguments: tuple[Any, ...]) -> Any:
        """Call the operator; where torch would go on without its derivative, or with foreign words, raise."""
        for i in self._tensors if self._returns else ():
            if arguments[i] is not None and (given := transformed(arguments[i])):
                accepted = f"no gradient: this kernel is for inference; {self.elsewhere}"
                raise ArgumentError(self.named, self.overload._schema.arguments[i].name, given, accepted)
        return self.overload(*arguments)


def operator(
    name: str, fake: Callable[..., Any], writes: Sequence[str] = (), layer: str = "", elsewhere: str = _TORCH
) -> Callable[[Callable[..., Any]], Operator]:
    """Register the decorated function as ``torch.ops.fastlayers.<name>`` and return its :class:`Operator`.

    Parameters
    ----------
    name : str
        The operator's schema follows from the function's annotations; all arguments are given by position.
    fake : callable
        Returns empty tensors of the right shape, dtype and stride. Takes all arguments, or those that it names as the
        function does. For operators that return nothing: a function that does nothing.
    writes : sequence of str
        The arguments that the function writes into.
    layer : str
        Whose it is, for errors about gradients; none where several layers share it.
    elsewhere : str
        Where there is a gradient, for the same.

    Notes
    -----
    Inference only: a backward pass through it raises :class:`ArgumentError`, unless it writes into its arguments, where
    the layer must look itself. A tangent, or a level
    of ``torch.func`` that differentiates, raises before anything is computed, unless the operator returns nothing.
    """

    def register(function: Callable[..., Any]) -> Operator:
        _library.define(name + torch.library.infer_schema(function, mutates_args=writes))
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fastlayers::{name}", _of_all(fake, function), lib=_library)

        def backward(ctx: Any, *gradients: Any) -> Any:
            """Say that there is none; otherwise what lies before would be left without a gradient, silently."""
            wanted = zip(made.overload._schema.arguments, ctx.needs_input_grad, strict=False)
            names = ", ".join(argument.name for argument, needs in wanted if needs)
            accepted = f"no gradient: this kernel is for inference; {names} asked for one; {made.elsewhere}"
            raise ArgumentError(made.named, "gradient", "asked for", accepted)

        made = Operator(function, getattr(torch.ops.fastlayers, name).default, layer, elsewhere)
        if not made.overload._schema.is_mutable:
            torch.library.register_autograd(f"fastlayers::{name}", backward, lib=_library)
        return made

    return register


def _of_all(fake: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a fake that takes all arguments of ``function``, made of one that takes some of them by name."""
    wanted, given = (inspect.signature(each).parameters for each in (fake, function))
    if len(wanted) == len(given) or any(each.kind is each.VAR_POSITIONAL for each in wanted.values()):
        return fake
    places = [list(given).index(name) for name in wanted]
    return lambda *arguments: fake(*(arguments[place] for place in places))


def nothing(*args: Any) -> None:
    """The fake of an operator that only writes into its arguments."""


def like_x(x: torch.Tensor, *rest: object) -> torch.Tensor:
    """The fake of an operator whose result is a contiguous tensor of its first argument's shape and dtype."""
    return x.new_empty(*x.shape)


@operator("count", nothing, writes=("counter",))
def count(counter: torch.Tensor) -> None:
    """Add one to ``counter`` (int64 ``[1]`` on the host) each time the surrounding code really runs.

    An operator, not a Python integer on the module: module integers trip torch.compile's recompile limit, and
    the compiler may not drop an operator that writes.
    """
    counter.add_(1)
