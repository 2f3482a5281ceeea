"""Triton's interpreter without what it does again and again: half of its time in this suite, the same results.

For each call of a device function it wraps all of ``triton.language``, which the launch did already, and finds what to
wrap among all members; for each tensor it makes its type anew, with its name; for each look at a dtype a table.
"""

from __future__ import annotations

import inspect
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
    core.block_type.with_element_ty = lambda self, scalar: _block_type(scalar, self.shape)
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
def _block_of_sizes(scalar: tl.dtype, *sizes: int) -> tl.block_type:
    return tl.block_type(scalar, [*sizes])


def _block_type(scalar: Any, shape: Any) -> tl.block_type:
    if type(scalar) is tl.dtype and all(type(size) is int for size in shape):
        return _block_of_sizes(scalar, *shape)
    return tl.block_type(scalar, shape)
