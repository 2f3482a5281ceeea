"""One guard: whether a patched module still is what it was patched as. Everything that it covers:

    code        methods of the class and functions of its module that the original's ``forward`` calls
                (``_fl_relies``), ``nn.Module.__call__``, and ``forward`` of children's classes
    children    whose work is done here without a call (``_fl_bypassed``): the object, its class, a ``forward`` or
                hooks of its own
    instance    methods that were overridden on it, numbers that backends were chosen by (``_fl_baked``), and the
                shapes of weights that they were chosen by (``_fl_shaped``)
    torch       functions of ``torch.nn.functional`` that the original calls (``_fl_functions``): profilers,
                calibrators and packages of attention kernels put their own in the place
    everyone    hooks on all modules, and whatever records or transforms what runs: functorch, ``torch.jit.trace``,
                ``torch.fx``, dispatch and function modes (a device context changes nothing), exports
    weights     that lie in one buffer: the objects and their addresses (``packing``)

Where it does not hold, the original's code runs (``FastModule._fl_usable`` asks), and the report says why. What Hugging
Face's registries give for a name is looked up at each call, as the original does. While torch.compile traces, the same
list is read attribute by attribute, so that the compiler guards on it and compiles again when something changes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fastlayers.patching.comparison import (
    ADDRESS,
    CALL,
    CALL_IMPL,
    GLOBAL_HOOKS,
    HOOKS,
    Answer,
    Question,
    never,
    observed,
    own_forward,
    written,
)

Code = tuple[tuple[Any, str, Any], ...]


def foreign(function: Any) -> str:
    """Return the module whose code ``function`` or something that it wraps is, unless that is transformers or torch."""
    while function is not None:
        home = getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", None)
        home = home or type(function).__name__
        if home.partition(".")[0] not in ("transformers", "torch"):
            return str(home)
        function = getattr(function, "__wrapped__", None)
    return ""


def code_of(cls: type, names: Iterable[str]) -> Code:
    """Return owner, name and function for those of ``names`` that ``cls`` has, or else the module that it is from."""
    found = []
    for name in names:
        owner: Any = cls if hasattr(cls, name) else sys.modules.get(cls.__module__)
        if hasattr(owner, name):
            found.append((owner, name, getattr(owner, name)))
    return tuple(found)


def replaced_code(code: Code) -> str:
    """Return in words which of this code is neither transformers' nor torch's, or ""."""
    for owner, name, function in code:
        if home := foreign(function):
            return f"{owner.__name__}.{name} is code of {home}"
    return ""


def untouched(part: Any) -> bool:
    """Return whether nobody hooked this module or replaced its ``forward`` on the instance."""
    if torch.compiler.is_compiling():
        part.forward  # noqa: B018  what the compiler looks up is what it guards on
    if "forward" in part.__dict__ and not own_forward(part):
        return False
    return not (part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks)


# The code of classes as transformers wrote it, kept when it is first seen: a later replacement differs from it.
_KNOWN_CODE: dict[tuple[type, tuple[str, ...]], Code] = {}


# torch's functions as they were when this was read.
_FUNCTIONS = {
    name: getattr(F, name) for name in ("linear", "silu", "softmax", "dropout", "scaled_dot_product_attention")
}


def functions(names: Iterable[str]) -> Code:
    """Return owner, name and function for these of ``torch.nn.functional``."""
    return tuple((F, name, _FUNCTIONS[name]) for name in names)


def known_code(cls: type, names: tuple[str, ...]) -> tuple[Code, str]:
    """Return what :func:`code_of` gave when all of it was transformers' own, and what is wrong with it now."""
    found = _KNOWN_CODE.get((cls, names))
    if found is None:
        found = code_of(cls, names)
        if why := replaced_code(found):
            return found, why
        _KNOWN_CODE[cls, names] = found
    return found, ""


class Guard:
    """Whether a module and some of its children are as they were when this was made.

    Parameters
    ----------
    module : nn.Module
    code : tuple
        Of :func:`known_code`.
    children : mapping
        Name -> the classes that it may have. Missing ones, and those that are ``None``, do not count.
    baked : tuple[str, ...]
        Attributes that must keep their values.
    why : str
        What is wrong already.
    shaped : tuple[str, ...]
        Parameters that must keep their shapes.
    weights : sequence
        Modules and names of their parameters: tensors that must stay what they are and look at the same memory.
    """

    def __init__(
        self, module: nn.Module, code: Code, children: Mapping[str, tuple[type, ...]], baked: tuple[str, ...] = (),
        why: str = "", weights: Sequence[tuple[nn.Module, str]] = (), shaped: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        parts = {name: part for name in children if (part := getattr(module, name, None)) is not None}
        for name, part in parts.items():
            if type(part) not in children[name] or not untouched(part) or foreign(type(part).forward):
                why = why or f"{name} is not a plain {children[name][0].__name__}"
        classes = dict.fromkeys(type(part) for part in parts.values())
        self._code: Code = (*code, *((cls, "forward", cls.forward) for cls in classes))
        self._children = tuple((name, type(part)) for name, part in parts.items())
        self._baked = tuple((name, getattr(module, name)) for name in baked if hasattr(module, name))
        held = {name: module._parameters.get(name) for name in shaped}
        self._shaped = tuple((name, weight.shape) for name, weight in held.items() if weight is not None)
        self._methods = tuple(name for owner, name, _ in code if isinstance(owner, type) and name != "forward")
        self._why = why
        self._questions = [] if why else self._asked(module, parts, weights)
        trained = [(f"not {{}}[{hooks!r}]", (part.__dict__,)) for part in parts.values() for hooks in HOOKS[2:]]
        self.same, self.stands = (never, never) if why else written(self._questions, trained)

    def _asked(
        self, module: nn.Module, parts: Mapping[str, nn.Module], weights: Sequence[tuple[nn.Module, str]]
    ) -> list[Question]:
        """Return what eager code asks, in the order in which it is likely to differ.

        Nothing of it leads back to the module: whoever lets go of it is rid of it. A replica of the module or a copy
        that shares this guard has another table of children.
        """
        asked: list[Question] = [("own['_modules'] is {}", (module._modules,))]
        for name, value in self._baked:
            asked.append((f"own[{name!r}] == {{}}" if name in module.__dict__ else f"module.{name} == {{}}", (value,)))
        asked += [] if self._baked else [("type(module) is {}", (type(module),))]
        for name, shape in self._shaped:
            # A product with x settles a matrix's shape but for its size, and the second of two stacks' of matrices.
            form, value = "shape", shape
            if len(shape) < 3 or name != self._shaped[0][0]:
                form, value = "nbytes", module.get_parameter(name).nbytes
            asked.append((f"{{}}[{name!r}].{form} == {{}}", (module._parameters, value)))
        asked += [(f"{name!r} not in own", ()) for name in self._methods]
        for name, part in parts.items():
            asked += [(f"{{}}[{name!r}] is {{}}", (module._modules, part)), ("type({}) is {}", (part, type(part)))]
            # The tables may be replaced, too.
            asked += [(f"not {{}}[{hooks!r}]", (part.__dict__,)) for hooks in HOOKS[:2]]
            asked.append(("('forward' not in {} or own_forward({}))", (part.__dict__, part)))
        asked += [(f"{{}}.{name} is {{}}", (owner, value)) for owner, name, value in self._code]
        for part, name in weights:
            table = part._parameters
            held = table[name]
            asked.append(("{}['_parameters'] is {}", (part.__dict__, table)))
            asked.append((f"{{}}[{name!r}] is {{}}", (table, held)))
            if held is None:
                continue  # a bias that somebody adds
            asked.append((f"{{}}.{ADDRESS}() == {{}}", (held, held.data_ptr())))
            # What else might change where a tensor lies: its first rows may have been taken, and a square one may
            # have been transposed. One that leaves no product does not count, as rows without their biases.
            if name == "bias" or table.get("bias") is None:
                asked.append(("{}.nbytes == {}", (held, held.nbytes)))
            if held.dim() > 1 and held.shape[0] == held.shape[1]:
                asked.append(("{}.is_contiguous()", (held,)))
        return asked

    def joined(self, other: Guard) -> Answer:
        """Return what :attr:`stands` of this guard and of ``other`` answer together, asked at once."""
        return never if self._why or other._why else written([*self._questions, *other._questions])[1]

    def holds(self, module: Any) -> bool:
        """Return whether everything is as it was."""
        if torch.compiler.is_compiling():
            return not self._why and self._traced(module)
        return self.same(module)

    def _traced(self, module: Any) -> bool:
        if nn.Module.__call__ is not CALL or nn.Module._call_impl is not CALL_IMPL or observed():
            return False
        for owner, name, value in self._code:
            if getattr(owner, name) is not value:
                return False
        for hooks in GLOBAL_HOOKS:
            if len(hooks) > 0:
                return False
        for name, cls in self._children:
            part = getattr(module, name)
            if type(part) is not cls or not untouched(part):
                return False
        for name, value in self._baked:
            if getattr(module, name) != value:
                return False
        for name, shape in self._shaped:
            weight = module._parameters.get(name)
            if weight is None or weight.shape != shape:
                return False
        for name in self._methods:
            getattr(module, name)  # what the compiler looks up is what it guards on
            if name in module.__dict__:
                return False
        return True

    def why(self, module: Any) -> str:
        """Return in words what is not as it was, or ""."""
        if self._why or self.holds(module):
            return self._why
        for owner, name, value in self._code:
            if getattr(owner, name, None) is not value:
                return f"{owner.__name__}.{name} was replaced"
        if nn.Module.__call__ is not CALL or nn.Module._call_impl is not CALL_IMPL:
            return "Module.__call__ was replaced"
        if any(GLOBAL_HOOKS):
            return "hooks are registered on all modules"
        for name, cls in self._children:
            part = getattr(module, name, None)
            if type(part) is not cls or not untouched(part):
                return f"{name} was replaced or hooked"
        for name, shape in self._shaped:
            if getattr(module._parameters.get(name), "shape", None) != shape:
                return "the weights were replaced"
        return "the module's attributes were changed"
