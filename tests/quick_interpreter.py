"""Triton's interpreter without what it does again and again: a quarter of its time in this suite, the same results.

For each call of a device function it wraps all of ``triton.language``, which the launch did already, and finds what to
wrap among all members; for each tensor it makes its type anew, with its name, and an object for each of its sizes; for
each look at a dtype a table. Sums, differences and products of 32 bits it computes once more in 64 bits and compares,
for an assertion that only debugging makes; of equal shapes it finds out at length that none must be broadcast.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import triton
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter


def hasten() -> None:
    """Have the interpreter keep these things, if it is of the version whose source was read."""
    if triton.__version__.split(".")[:2] != ["3", "6"]:
        return
    interpreter._patch_lang = _wrapped_once(interpreter._patch_lang)
    interpreter._patch_builtin = _wrap
    interpreter._get_np_dtype = _kept_dtype(interpreter._get_np_dtype)
    core._type_for_tuple_values = _kept_type(core._type_for_tuple_values)
    core._unwrap_if_constexpr = _unwrapped(core._unwrap_if_constexpr)
    core.block_type.__init__ = _make_block_type
    core.pointer_type.__hash__ = core.dtype.__hash__
    core.block_type.with_element_ty = lambda self, scalar: _block_of_sizes(scalar, *self.shape.values)
    core.tensor.__init__ = _make_tensor
    semantic = interpreter.TritonSemantic
    semantic.broadcast_impl_value = _broadcast_if_they_differ(semantic.broadcast_impl_value)
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter.InterpreterBuilder.get_block_ty = lambda self, scalar, shape: _block_type(scalar, shape)


def _wrapped_once(wrap: Any) -> Any:
    def patch_lang(fn: Any) -> Any:
        modules = [each for each in fn.__globals__.values() if each is tl or each is core]
        if modules and not any(core.is_builtin(module.load) for module in modules):
            return interpreter._LangPatchScope()
        return wrap(fn)

    return patch_lang


_builtins: dict[Any, list[str]] = {}


def _wrap(package: Any, builder: Any, scope: Any) -> None:
    if package not in _builtins:
        _builtins[package] = [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]
    for name in _builtins[package]:
        if core.is_builtin(member := getattr(package, name)):
            interpreter._patch_attr(package, name, member, builder, scope)


def _kept_dtype(right: Any) -> Any:
    known: dict[str, Any] = {}

    def get_np_dtype(kind: Any) -> Any:
        scalar = kind.element_ty if isinstance(kind, tl.block_type) else kind
        if isinstance(scalar, tl.pointer_type):
            return right(kind)
        if scalar.name not in known:
            known[scalar.name] = right(scalar)
        return known[scalar.name]

    return get_np_dtype


def _kept_type(right: Any) -> Any:
    @lru_cache(maxsize=4096)
    def of_sizes(*sizes: int) -> Any:
        return right(sizes)

    def type_for_tuple_values(values: Any, fields: Any = None) -> Any:
        if fields is None:
            sizes = [value.value if type(value) is tl.constexpr else value for value in values]
            if all(type(size) is int for size in sizes):
                return of_sizes(*sizes)
        return right(values, fields)

    return type_for_tuple_values


@lru_cache(maxsize=4096)
def _sizes(*sizes: int) -> tuple[tl.tuple, tl.constexpr]:
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def _make_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _sizes(*type.shape.values) if type.is_block() else _sizes()


def _broadcast_if_they_differ(right: Any) -> Any:
    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        alike = a.shape.values == b.shape.values if a.is_block() and b.is_block() else a.is_block() == b.is_block()
        return (lhs, rhs) if alike else right(self, lhs, rhs)

    return broadcast_impl_value


_PLAIN = {int, bool, float, str, type(None), tl.dtype, tl.block_type, tl.pointer_type, tl.tensor}


def _unwrapped(right: Any) -> Any:
    def unwrap_if_constexpr(value: Any) -> Any:
        kind = type(value)
        return value if kind in _PLAIN else value.value if kind is tl.constexpr else right(value)

    return unwrap_if_constexpr


_right_block_type = tl.block_type.__init__


@lru_cache(maxsize=4096)
def _block_sizes(*sizes: int) -> tuple[tl.tuple, int, str]:
    made = object.__new__(tl.block_type)
    _right_block_type(made, tl.int32, [*sizes])
    return made.shape, made.numel, str(made.shape)


def _make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    self.element_ty = element_ty
    self.shape, self.numel, sizes = _block_sizes(*[core._unwrap_if_constexpr(size) for size in shape])
    self.name = f"<{sizes}, {element_ty}>"


@lru_cache(maxsize=4096)
def _block_of_sizes(scalar: tl.dtype, *sizes: int) -> tl.block_type:
    return tl.block_type(scalar, [*sizes])


def _block_type(scalar: Any, shape: Any) -> tl.block_type:
    return _block_of_sizes(scalar, *[core._unwrap_if_constexpr(size) for size in shape])
