"""Instance class swap: a module becomes an instance of a subclass of its own class.

Names, ``state_dict``, hooks and ``isinstance`` stay as they were. A subclass is made once per (original, mixin)
and has no ``__init__`` of its own. All that we keep on a module are attributes with the prefix ``_fl_``. Whether a call
runs our code or the original's is decided in :meth:`FastModule._fl_usable`.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import nn

from fastlayers.errors import ArgumentError, NoBackendError
from fastlayers.operators import count as count_operator
from fastlayers.patching.comparison import own_forward, recorded
from fastlayers.patching.guard import Guard, code_of, functions, known_code, replaced_code

log = logging.getLogger(__name__)
PREFIX = "_fl_"
# What a copy makes anew from its own parameters.
_DERIVED = ("_fl_dense", "_fl_dense_of", "_fl_packed", "_fl_guard")
# Such calls are not counted: a counter would be recorded with them.
RECORDED = "recorded or transformed"


class Tally:
    """How often something ran: eager code counts in Python, programs of torch.compile by an operator.

    Attributes
    ----------
    eager : int
    traced : Tensor int64 ``[1]``
        On the host. The compiler looks at no Python integer, which it would compile for again and again.
    """

    __slots__ = ("eager", "traced")

    def __init__(self, eager: int = 0) -> None:
        self.eager = eager
        with torch.inference_mode(False):
            self.traced = torch.zeros(1, dtype=torch.int64, device="cpu")

    def __int__(self) -> int:
        return self.eager + int(self.traced)

    def __reduce__(self) -> tuple[Any, ...]:
        return Tally, (int(self),)


def count(tally: Tally) -> None:
    """Add one: the compiler sees the operator, eager code adds without its overhead."""
    if torch.compiler.is_dynamo_compiling():
        count_operator(tally.traced)
    else:
        tally.eager += 1


class FastModule:
    """Base of all mixins. ``forward`` runs our code if :meth:`_fl_usable`, else the original one."""

    # What the guard covers besides what it covers always; see ``guard``.
    _fl_relies: tuple[str, ...] = ("forward",)
    _fl_rewrapped: tuple[str, ...] = ()
    _fl_functions: tuple[str, ...] = ()
    _fl_bypassed: Mapping[str, tuple[type, ...]] = {}
    _fl_baked: tuple[str, ...] = ()
    _fl_shaped: tuple[str, ...] = ()
    # What is set on each patched instance.
    _fl_hits: Tally
    _fl_falls: Tally
    _fl_reasons: Counter[str]
    _fl_backend: str
    _fl_fuse: bool
    _fl_guard: Guard

    def _fl_choose(self) -> None:
        """Choose backends for the device and dtype that the parameters have now."""

    def _fl_pack(self, again: bool = False) -> int:
        """Move weights that are used together side by side; return the bytes moved.

        ``again``: they were replaced since the patch.
        """
        return 0

    def _fl_unpack(self) -> None:
        """Undo what :meth:`_fl_pack` did to the order of weights."""

    def _fl_implementation(self) -> str:
        """Return what runs, in a word or two."""
        return "torch"

    def _fl_watch(self, trusted: bool = False, why: str = "") -> None:
        """Make the guard; ``trusted``: of the code as it is, whoever wrote it; ``why``: what is wrong already."""
        original: Any = type(self)._fl_origin[0]  # type: ignore[attr-defined]
        names, module = tuple(name for name in self._fl_relies if name not in self._fl_rewrapped), cast(Any, self)
        code, replaced = (code_of(original, names), "") if trusted else known_code(original, names)
        torchs = functions(self._fl_functions)
        why = why or replaced or replaced_code(torchs)
        self._fl_guard = Guard(module, (*code, *torchs), self._fl_bypassed, self._fl_baked, why, (), self._fl_shaped)

    def _fl_refresh(self) -> None:
        if PREFIX + "hits" in self.__dict__:
            why = ""
            try:
                self._fl_choose()
            except (ArgumentError, NoBackendError) as error:
                # In the middle of .to(), say: whoever moves a model moves all of it, and gets the original's code.
                why = f"no backend for the weights as they are: {error}"
            self._fl_watch(why=why)
            self._fl_pack(again=True)

    def _fl_other(self, x: torch.Tensor) -> str:
        """Return why our code may not run on ``x``, besides what is so for every module, or ""."""
        return ""

    def _fl_unpaged(self) -> str:
        """Return why a captured step may not run this module, or ""."""
        return self._fl_guard.why(self)

    def __prepare_scriptable__(self) -> Any:
        """Return the original with the same weights: torch.jit.script reads a class instead of calling it."""
        original = type(self)._fl_origin[0]  # type: ignore[attr-defined]
        other = original.__new__(original)
        other.__dict__.update({key: value for key, value in self.__dict__.items() if not key.startswith(PREFIX)})
        other._modules = dict(other._modules)  # in which torch puts what children return here
        return other

    def _fl_why_not(self, x: torch.Tensor, *beside: Any) -> str:
        """Return why our code may not run, or ""; ``beside``: what else a caller may want gradients of."""
        return self._fl_aside(x, *beside) or self._fl_other(x)

    def _fl_aside(self, x: torch.Tensor, *beside: Any) -> str:
        """Return a reason unless: set up, not training, nobody wants gradients, the guard holds."""
        guard: Guard | None = self.__dict__.get("_fl_guard")
        if guard is None:
            return "not set up"
        # The flag itself: torch 2.11's compiler takes is_exporting() for true wherever it traces.
        if torch.compiler._is_exporting_flag if torch.compiler.is_compiling() else recorded():
            return RECORDED
        if x.is_meta:
            return "shapes alone are asked for"
        if self.training:  # type: ignore[attr-defined]
            return "training mode"
        if differentiated(x, *beside) or differentiated(*self.parameters()):  # type: ignore[attr-defined]
            return "gradients are wanted"
        if guard.holds(self):
            return ""
        return "something was replaced" if torch.compiler.is_compiling() else guard.why(self)

    def _fl_usable(self, x: torch.Tensor, *beside: Any) -> bool:
        """Return whether our code may run; counts a fallback otherwise. ``beside``: as for :meth:`_fl_why_not`."""
        guard: Guard | None = self.__dict__.get("_fl_guard")
        # What eager inference asks, in few calls; the long way finds and names everything else.
        slow = torch.compiler.is_dynamo_compiling() or guard is None or self.training or torch.is_grad_enabled()  # type: ignore[attr-defined]
        slow = slow or not guard.stands(self) or x.is_meta  # type: ignore[union-attr]
        why = self._fl_why_not(x, *beside) if slow else self._fl_other(x)
        if why:
            self._fl_fell(why)
        return not why

    def _fl_fell(self, why: str) -> None:
        """Count a call that runs the original's code."""
        if why == RECORDED or PREFIX + "guard" not in self.__dict__:
            return
        count(self._fl_falls)
        if not torch.compiler.is_compiling():
            self._fl_reasons[why] += 1

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # .to(), .half(), .cuda(): every parameter has a new storage afterwards.
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        self._fl_refresh()
        return result

    def __setstate__(self, state: Any) -> None:
        # deepcopy and pickle clone parameters one by one.
        super().__setstate__(state)  # type: ignore[misc]
        self._fl_refresh()

    def __copy__(self) -> Any:
        # Over the same parameters, as of any module: what is packed of them is the copy's, too, and nothing moves.
        other = _new(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        original, mixin = type(self)._fl_origin  # type: ignore[attr-defined]
        state = {key: value for key, value in self.__dict__.items() if key not in _DERIVED}
        if type(self) is fast_class(original, mixin):
            return _rebuild, (original, mixin), state
        return _new, (type(self),), state  # a class that somebody derived from ours


def differentiated(*given: Any) -> bool:
    """Return whether autograd records what is computed of these tensors: kernels know no gradient.

    Asked of arguments, and again of what hooks, wrappers or a cache put in their place on the way.
    """
    return torch.is_grad_enabled() and any(getattr(each, "requires_grad", False) for each in given)


@contextmanager
def storage_mode(parameter: torch.Tensor) -> Iterator[None]:
    """Make tensors that may become ``parameter.data``: inference tensors if it is one, else ordinary ones."""
    with torch.no_grad(), torch.inference_mode(parameter.is_inference()):
        yield


@functools.cache
def fast_class(original: type, mixin: type) -> type:
    """Return the subclass of ``original`` with ``mixin`` in front, the same object each time."""
    return type(
        f"Fast{original.__name__}",
        (mixin, original),
        {"__module__": original.__module__, "__doc__": mixin.__doc__, "_fl_origin": (original, mixin)},
    )


def _rebuild(original: Any, mixin: Any) -> Any:
    return _new(fast_class(original, mixin))


def _new(cls: Any) -> Any:
    return cls.__new__(cls)


def original_class(module: nn.Module) -> type:
    """Return the class that a module had before it was patched."""
    return type(module)._fl_origin[0] if isinstance(module, FastModule) else type(module)  # type: ignore[attr-defined]


def new_counters(module: nn.Module) -> None:
    """Give a module its counters, and the reasons of fallbacks."""
    fast: Any = module
    fast._fl_hits, fast._fl_falls, fast._fl_reasons = Tally(), Tally(), Counter()


def _rebind_hooked(module: nn.Module, cls: type) -> None:
    """Make the ``forward`` that accelerate's hook wraps the one of ``cls``."""
    held = module.__dict__.get("_old_forward")
    if "_hf_hook" in module.__dict__ and getattr(held, "__self__", None) is module:
        module.__dict__["_old_forward"] = MethodType(cls.forward, module)  # type: ignore[attr-defined]


def _refresh_after_load(module: Any, keys: Any) -> None:
    # load_state_dict(assign=True) puts new parameters in place.
    if isinstance(module, FastModule):
        module._fl_refresh()


def swap(module: nn.Module, mixin: type, backend: str, fuse: bool) -> int:
    """Make ``module`` an instance of the fast subclass; return the bytes of weights moved."""
    new_counters(module)
    fast, original, front = cast(Any, module), cast(Any, original_class(module)), cast(Any, mixin)
    fast._fl_backend, fast._fl_fuse = backend, fuse
    if own_forward(module):
        module.__dict__.pop("forward", None)  # it would hide the one of the new class
    module.__class__ = fast_class(original, front)
    _rebind_hooked(module, module.__class__)
    module.register_load_state_dict_post_hook(_refresh_after_load)
    fast._fl_choose()
    fast._fl_watch()
    return int(fast._fl_pack())


def unswap(module: nn.Module) -> None:
    """Restore the original class and drop everything of ours; works on copies of patched modules too.

    What others did in the meantime stays: a subclass of ours that somebody made (parametrizations, FSDP) becomes one
    of the original class, and a ``forward`` of ours that somebody left on the instance (accelerate) goes. Where
    somebody's own ``forward`` on the instance calls ours, or a method of such a subclass does so by our class's name,
    the class stays: not set up, it runs the original's code.
    """
    if isinstance(module, FastModule):
        module._fl_unpack()
        fast: Any = next(cls for cls in type(module).__mro__ if "_fl_origin" in cls.__dict__)
        original = fast._fl_origin[0]
        wrapped = "_hf_hook" not in module.__dict__ and _leads_to(module.__dict__.get("forward"), fast.forward)
        if wrapped or any(_names(cls, fast) for cls in type(module).__mro__ if cls is not fast):
            log.warning("unpatch: forward was wrapped on a %s: it runs the original's code", original.__name__)
        elif type(module) is fast:
            module.__class__ = original
        else:
            log.warning("unpatch: the class of a %s was changed to %s", original.__name__, type(module).__name__)
            module.__class__ = _rebased(type(module), fast, original)
        _rebind_hooked(module, original)
        if getattr(module.__dict__.get("forward"), "__func__", None) is fast.forward:
            del module.__dict__["forward"]
    hooks = module._load_state_dict_post_hooks
    for key in [key for key, hook in hooks.items() if hook is _refresh_after_load]:
        del hooks[key]
    for name in [name for name in module.__dict__ if name.startswith(PREFIX)]:
        delattr(module, name)


def _leads_to(found: Any, ours: Any, depth: int = 8) -> bool:
    """Return whether what somebody put on an instance wraps ``ours``: a closure, a partial, ``functools.wraps``."""
    if found is None or not depth:
        return False
    if getattr(found, "__func__", None) is ours:
        return depth < 8  # on the instance itself it is accelerate's, and goes
    cells = getattr(getattr(found, "__func__", found), "__closure__", None) or ()
    inner = [getattr(found, name, None) for name in ("__wrapped__", "__func__", "func")]
    inner += [
        *getattr(found, "args", ()),
        *(getattr(found, "__defaults__", None) or ()),
        *(cell.cell_contents for cell in cells if cell != CellType()),
    ]
    return any(
        callable(each) and not isinstance(each, nn.Module) and _leads_to(each, ours, depth - 1) for each in inner
    )


def _names(cls: type, fast: type) -> bool:
    """Return whether methods of a class that derives from ``fast`` call it by its name instead of ``super()``."""
    for function in cls.__dict__.values() if issubclass(cls, fast) else ():
        code = getattr(function, "__code__", None)
        held = [function.__globals__.get(name) for name in code.co_names] if code else []
        held += [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if cell != CellType()]
        if any(each is fast or each is fast.forward for each in held):  # type: ignore[attr-defined]
            return True
    return False


def _rebased(cls: type, fast: type, original: type) -> type:
    """Return ``cls`` with ``original`` in place of ``fast`` among its bases."""
    if cls is fast:
        return original
    bases = tuple(_rebased(base, fast, original) if issubclass(base, fast) else base for base in cls.__bases__)
    own = {key: value for key, value in cls.__dict__.items() if key not in ("__dict__", "__weakref__")}
    made = CellType()
    made.cell_contents = type(cls.__name__, bases, {key: _moved(value, made) for key, value in own.items()})
    found: type = made.cell_contents
    return found


def _moved(value: Any, cls: CellType) -> Any:
    """Return a function whose ``super()`` without arguments is that of another class; anything else as it is."""
    if not isinstance(value, FunctionType) or "__class__" not in value.__code__.co_freevars:
        return value
    names = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    closure = tuple(cls if name == "__class__" else cell for name, cell in names)
    other = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, closure)
    return functools.update_wrapper(other, value, assigned=(*functools.WRAPPER_ASSIGNMENTS, "__kwdefaults__"))
