"""Many comparisons as one function of Python, written for how many there are, as ``dataclasses`` writes its methods.

A patched module asks some thirty small questions at each call: is this entry still that object, is this table empty.
In a loop or through ``map`` each takes 50 to 80 ns, in a line of its own, of names that are bound beforehand, 10 to 25
(``benchmarks/guard_cost.py``). Modules that ask alike share the compiled lines.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace as fx
from torch.nn.modules import module as torch_module
from torch.utils._device import DeviceContext

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS: tuple[Any, ...] = tuple(getattr(torch_module, f"_global{name}") for name in HOOKS)
CALL, CALL_IMPL = nn.Module.__call__, nn.Module._call_impl
# Asking for the address of a lazily copied tensor would copy it; torch before 2.12 has no other way to ask.
ADDRESS = "const_data_ptr" if hasattr(torch.Tensor, "const_data_ptr") else "data_ptr"

# An expression with places for the values that it is about. ``module`` is what the whole question is about, ``own``
# what it has of its own.
Question = tuple[str, tuple[Any, ...]]
Answer = Callable[[Any], bool]

_QUIET = """(
    modes() or interpreter() is not None or tracing() or forward_ad._current_level >= 0 or fx._is_fx_tracing_flag
    or (functions() and observed())
)"""
_SOURCE = """
def make({values}):
    def same(module):
        try:
            own = module.__dict__
            return {questions} and {trained}
        except (KeyError, AttributeError):  # deleted
            return False

    def stands(module):
        try:
            own = module.__dict__
            return not {quiet} and {questions}
        except (KeyError, AttributeError):
            return False

    return same, stands
"""


def observed() -> bool:
    """Return whether a function mode is on, other than a device context."""
    for place in range(torch._C._len_torch_function_stack()):
        if type(torch._C._get_function_stack_at(place)) is not DeviceContext:
            return True
    return False


def own_forward(part: Any) -> bool:
    """Return whether ``part.forward`` is its class's; accelerate leaves that on the instance when its hooks go."""
    found: Any = part.__dict__.get("forward")
    cls: Any = type(part)
    return found is None or (type(found) is MethodType and found.__self__ is part and found.__func__ is cls.forward)


_SPACE: dict[str, Any] = {
    "modes": torch._C._len_torch_dispatch_stack, "interpreter": torch._C._functorch.peek_interpreter_stack,
    "tracing": torch._C._is_tracing, "forward_ad": forward_ad, "fx": fx, "Module": nn.Module, "CALL": CALL,
    "CALL_IMPL": CALL_IMPL, "functions": torch._C._len_torch_function_stack, "observed": observed,
    "own_forward": own_forward,
    **{f"hooks{i}": hooks for i, hooks in enumerate(GLOBAL_HOOKS)},
}  # fmt: skip
_EVERYONE = ["not hooks0", "not hooks1", "Module.__call__ is CALL", "Module._call_impl is CALL_IMPL"]
# Where nothing is differentiated, hooks of the way back never run.
_TRAINED = ["not hooks2", "not hooks3"]

recorded: Callable[[], bool] = eval(f"lambda: bool{_QUIET}", _SPACE)
recorded.__doc__ = """Return whether something records or transforms what runs: it should see the original's code."""


def written(questions: Sequence[Question], trained: Sequence[Question] = ()) -> tuple[Answer, Answer]:
    """Return two functions of a module.

    Whether there are no hooks on all modules, modules are called as ever, and all ``questions`` are true of it; and
    whether, besides, nothing is :func:`recorded`. Only the first one asks what is ``trained``: the second is for
    calls of which nobody wants gradients.
    """
    values: dict[int, tuple[str, Any]] = {}
    texts = []
    for always, asked in ((_EVERYONE, questions), (_TRAINED, trained)):
        lines = dict.fromkeys(always)  # what is asked twice is written once
        for form, bound in asked:
            names = [values.setdefault(id(value), (f"v{len(values)}", value))[0] for value in bound]
            lines[form.format(*names)] = None
        texts.append(" and ".join(lines))
    make = _compiled(", ".join(name for name, _ in values.values()), *texts)
    return make(*(value for _, value in values.values()))


def never(module: Any) -> bool:
    """Return ``False``: the answer where it is known beforehand."""
    return False


@functools.cache
def _compiled(values: str, questions: str, trained: str) -> Callable[..., tuple[Answer, Answer]]:
    space = {**_SPACE}
    exec(_SOURCE.format(values=values, questions=questions, trained=trained, quiet=_QUIET), space)
    made: Callable[..., tuple[Answer, Answer]] = space["make"]
    return made
