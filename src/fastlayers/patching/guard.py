"""One guard: whether a patched module still is what it was patched as. Everything that it covers:

    code        methods of the class and functions of its module that the original's ``forward`` calls
                (``_fl_relies``), ``nn.Module.__call__``, and ``forward`` of children's classes
    children    whose work is done here without a call (``_fl_bypassed``): the object, its class, a ``forward`` or
                hooks of its own
    instance    methods that were overridden on it, and numbers that backends were chosen by (``_fl_baked``)
    everyone    hooks on all modules, and whatever records or transforms what runs: functorch, ``torch.jit.trace``,
                ``make_fx``, dispatch modes, exports
    weights     that lie in one buffer: the objects and their addresses (``packing``)

Where it does not hold, the original's code runs, and the report says why. What Hugging Face's registries give for a
name is looked up at each call, as the original does. While torch.compile traces, the same list is read attribute by
attribute, so that the compiler guards on it and compiles again when something changes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from operator import attrgetter, contains, getitem
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS: tuple[Any, ...] = tuple(getattr(torch_module, f"_global{name}") for name in _HOOKS)
_CALL = nn.Module.__call__
Code = tuple[tuple[Any, str, Any], ...]


def foreign(function: Any) -> str:
    """Return the module whose code ``function`` or something that it wraps is, unless that is transformers or torch."""
    while function is not None:
        home = getattr(function, "__globals__", {}).get("__name__", type(function).__name__)
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
    if "forward" in part.__dict__:
        return False
    return not (part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks)


_dispatch_modes, _interpreter, _tracing = (
    torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state,
)  # fmt: skip


def recorded() -> bool:
    """Return whether something records or transforms what runs: the original's code is what it should see."""
    transformed = _dispatch_modes() or _interpreter() is not None or _tracing() is not None
    return bool(transformed) or forward_ad._current_level >= 0


# The code of classes as transformers wrote it, kept when it is first seen: a later replacement differs from it.
_KNOWN_CODE: dict[tuple[type, tuple[str, ...]], Code] = {}


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
    """

    def __init__(
        self, module: nn.Module, code: Code, children: Mapping[str, tuple[type, ...]], baked: tuple[str, ...] = (),
        why: str = "",
    ) -> None:  # fmt: skip
        parts = {name: part for name in children if (part := getattr(module, name, None)) is not None}
        for name, part in parts.items():
            if type(part) not in children[name] or not untouched(part) or foreign(type(part).forward):
                why = why or f"{name} is not a plain {children[name][0].__name__}"
        classes = dict.fromkeys(type(part) for part in parts.values())
        self._code: Code = (*code, *((cls, "forward", cls.forward) for cls in classes))
        self._children = tuple((name, type(part)) for name, part in parts.items())
        self._parts, self._types = [*parts.values()], [type(part) for part in parts.values()]
        # Hooks on all modules, and on these children.
        self._empty = (*_GLOBAL_HOOKS, *(part.__dict__[name] for part in parts.values() for name in _HOOKS))
        self._baked = tuple((name, getattr(module, name)) for name in baked if hasattr(module, name))
        self._methods = tuple(name for owner, name, _ in code if isinstance(owner, type) and name != "forward")
        self._why = why
        # Entries of namespaces that must stay, and names that must not come to stand before them. Nothing of these
        # leads back to the module: whoever lets go of it is rid of it.
        held: list[tuple[Any, ...]] = [(module._modules, name, part) for name, part in parts.items()]
        free: list[tuple[Any, str]] = [(part.__dict__, "forward") for part in parts.values()]
        for owner, name, value in self._code:
            line = owner.__mro__ if isinstance(owner, type) else (owner,)
            place = next((i for i, each in enumerate(line) if name in vars(each)), 0)
            held.append((vars(line[place]), name, value))
            free += [(vars(each), name) for each in line[:place]]
        self._spaces, self._keys, self._values = ([entry[place] for entry in held] for place in range(3))
        self._free_spaces, self._free_names = ([entry[place] for entry in free] for place in range(2))
        self._id = id(module)
        # What an attrgetter gives: of one name the value, of several a tuple.
        self._read = attrgetter(*(name for name, _ in self._baked)) if self._baked else type
        self._numbers: Any = self._read(module)

    def holds(self, module: Any) -> bool:
        """Return whether everything is as it was."""
        if torch.compiler.is_compiling():
            return not self._why and self._traced(module)
        return not self._why and self._unhooked() and self._same(module)

    def stands(self, module: Any) -> bool:
        """Return in eager code whether :meth:`holds` is true and nothing is :func:`recorded`."""
        if _dispatch_modes() or _interpreter() is not None or _tracing() is not None or forward_ad._current_level >= 0:
            return False
        quiet = nn.Module.__call__ is _CALL and not any(self._empty)
        return quiet and not self._why and self._same(module)

    def _unhooked(self) -> bool:
        """Return whether there are no hooks on all modules or on these children, and modules are called as ever."""
        return nn.Module.__call__ is _CALL and not any(self._empty)

    def _same(self, module: Any) -> bool:
        """Return whether the module (no replica of it) and its children are as they were, but for hooks."""
        for name in self._methods:
            if name in module.__dict__:
                return False
        try:
            return (
                id(module) == self._id
                and self._read(module) == self._numbers
                and True not in map(contains, self._free_spaces, self._free_names)
                and [*map(getitem, self._spaces, self._keys)] == self._values
                and [*map(type, self._parts)] == self._types
            )
        except (KeyError, AttributeError):  # deleted
            return False

    def _traced(self, module: Any) -> bool:
        if nn.Module.__call__ is not _CALL:
            return False
        for owner, name, value in self._code:
            if getattr(owner, name) is not value:
                return False
        for hooks in _GLOBAL_HOOKS:
            if len(hooks) > 0:
                return False
        for name, cls in self._children:
            part = getattr(module, name)
            if type(part) is not cls or not untouched(part):
                return False
        for name, value in self._baked:
            if getattr(module, name) != value:
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
        if nn.Module.__call__ is not _CALL:
            return "Module.__call__ was replaced"
        if any(_GLOBAL_HOOKS):
            return "hooks are registered on all modules"
        for name, cls in self._children:
            part = getattr(module, name, None)
            if type(part) is not cls or not untouched(part):
                return f"{name} was replaced or hooked"
        return "the module's attributes were changed"
