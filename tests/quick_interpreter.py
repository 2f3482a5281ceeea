"""Triton's interpreter without what it does again and again: half of its time in this suite, the same results.

For each call of a device function it wraps all of ``triton.language``, which the launch did already, and finds what to
wrap among all members; for each tensor it makes its type anew, with its name, and an object for each of its sizes; for
each look at a dtype a table. Sums, differences and products of 32 bits it computes once more in 64 bits and compares,
for an assertion that only debugging makes; of equal shapes it finds out at length that none must be broadcast, of equal
types that none is promoted, and of a number beside a tensor which type it would have alone.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter


def hasten() -> None:
    """Have the interpreter keep these things, if it is of the version whose source was read and does not yet."""
    if triton.__version__.split(".")[:2] != ["3", "6"] or interpreter._patch_attr is _patch_attr:
        return
    interpreter._patch_lang = _wrapped_once(interpreter._patch_lang)
    interpreter._patch_builtin = _wrap
    interpreter._patch_attr = _patch_attr
    interpreter.TensorHandle.__init__ = _make_handle
    interpreter._get_np_dtype = _kept_dtype(interpreter._get_np_dtype)
    core._type_for_tuple_values = _kept_type(core._type_for_tuple_values)
    core._unwrap_if_constexpr = _unwrapped(core._unwrap_if_constexpr)
    core.block_type.__init__ = _make_block_type
    core.pointer_type.__hash__ = core.dtype.__hash__
    core.dtype.__eq__ = _same(core.dtype.__eq__)
    core.block_type.__eq__ = _same(core.block_type.__eq__)
    core.block_type.with_element_ty = lambda self, scalar: _block_of_sizes(scalar, *self.shape.values)
    core.tensor.__init__ = _make_tensor
    semantic = interpreter.TritonSemantic
    semantic.broadcast_impl_value = _broadcast_if_they_differ(semantic.broadcast_impl_value)
    semantic.binary_op_type_checking_impl = _promote_if_they_differ(semantic.binary_op_type_checking_impl)
    semantic.cast = _cast_by_numpy(semantic.cast)
    semantic.scalar_constant = _constant(semantic.scalar_constant)
    semantic.to_tensor = _made_already(semantic.to_tensor)
    interpreter.InterpreterBuilder.create_splat = _splat(interpreter.InterpreterBuilder.create_splat)
    interpreter._convert_float = _looked_up(interpreter._convert_float)
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter.InterpreterBuilder.get_block_ty = lambda self, scalar, shape: _block_type(scalar, shape)


@lru_cache(maxsize=4096)
def _languages(fn: Any) -> list[Any]:
    return [each for each in fn.__globals__.values() if each is tl or each is core]


def _wrapped_once(wrap: Any) -> Any:
    def patch_lang(fn: Any) -> Any:
        modules = _languages(fn)
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


_BUILTIN = core.builtin(len).__code__  # of all that this decorator returns, which only looks whether _semantic is given


@cache
def _interpreted(member: Any, builder: Any) -> Any:
    call = member.__wrapped__ if getattr(member, "__code__", None) is _BUILTIN else member
    semantic = interpreter.TritonSemantic(builder)

    def interpreted(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return call(*args, **kwargs)

    return interpreted


def _patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    scope.set_attr(obj, name, _interpreted(member, builder))


def _make_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if type(dtype) is not tl.pointer_type and data.itemsize > 1 and data.itemsize * 8 > dtype.primitive_bitwidth:
        self.__post_init__()


def _same(right: Any) -> Any:
    return lambda self, other: self is other or right(self, other)


_INTS = {
    f"{sign}int{bits}": (0 if sign else -(2 ** (bits - 1)), 2 ** (bits if sign else bits - 1) - 1)
    for sign in ("", "u")
    for bits in (8, 16, 32, 64)
}
_FLOATS = {"fp16", "fp32", "fp64", "bf16"}
_ALIKE = {*_INTS, "fp32", "fp64"}  # stay what they are in a division, too
_ARRAYS = {name: np.dtype(name) for name in _INTS} | {f"fp{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)}


def _constant(right: Any) -> Any:
    def scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
        if type(dtype) is tl.dtype and (kind := _ARRAYS.get(dtype.name)) is not None:
            made = np.array([0 if value == 0 else value], dtype=kind)  # without the sign of a zero
            return tl.tensor(interpreter.TensorHandle(made, dtype), dtype)
        return right(self, value, dtype)

    return scalar_constant


def _made_already(right: Any) -> Any:
    def to_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
        return x if type(x) is tl.tensor else right(self, x, check_type)

    return to_tensor


def _takes(dtype: Any, number: Any, division: bool) -> bool:
    """Return whether a number beside a tensor of this type becomes one of the same type, for sure."""
    if type(number) is int and (span := _INTS.get(dtype.name)):
        return bool(span[0] <= number <= span[1])
    whole = type(number) is float or (type(number) is int and -(2**63) <= number < 2**64)
    return whole and dtype.name in (_ALIKE if division else _FLOATS) and dtype.name not in _INTS


def _promote_if_they_differ(right: Any) -> Any:
    def check(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        if type(lhs) is tl.tensor:
            a = lhs.dtype
            if type(rhs) is tl.tensor:
                b = rhs.dtype
                if a is b and type(a) is tl.dtype and (not div_or_mod or a.name in _ALIKE):
                    return self.broadcast_impl_value(lhs, rhs)
                if allow_lhs_ptr and type(a) is tl.pointer_type and b.name in _INTS:
                    return self.broadcast_impl_value(lhs, rhs)
            elif arithmetic_check and _takes(a, rhs, div_or_mod):
                return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, a))
        elif type(rhs) is tl.tensor and arithmetic_check and _takes(rhs.dtype, lhs, div_or_mod):
            return self.broadcast_impl_value(self.scalar_constant(lhs, rhs.dtype), rhs)
        return right(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return check


def _looked_up(right: Any) -> Any:
    """Of bf16's codes there are few enough to ask about each once; fp32 is cut to them, but for what is subnormal."""

    @lru_cache(maxsize=1)
    def wide() -> Any:
        return right(np.arange(2**16, dtype=np.uint16), tl.bfloat16, tl.float32, None).view(np.float32)

    def convert_float(data: Any, of: Any, to: Any, rounding: Any) -> Any:
        if of.name == "bf16" and to.name == "fp32" and rounding is None:
            return wide()[data]
        if of.name == "fp32" and to.name == "bf16" and rounding is None:
            codes = data.view(np.uint32)
            if not ((codes & 0x7FFFFFFF) - np.uint32(1) < 0x7FFFFF).any():
                return (codes >> 16).astype(np.uint16)
        return right(data, of, to, rounding)

    return convert_float


def _splat(right: Any) -> Any:
    def create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        if isinstance(arg.dtype, tl.block_type):
            return right(self, ret_ty, arg)
        made = np.empty(ret_ty.sizes, interpreter._get_np_dtype(arg.dtype))
        made[...] = arg.data
        return interpreter.TensorHandle(made, arg.dtype.scalar)

    return create_splat


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


_SCALAR = _sizes()


def _make_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.kept if type.is_block() else _SCALAR


def _joint(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the sizes that both are broadcast to, if that is as plain as it mostly is."""
    if len(a) != len(b) or any(m != n and m != 1 and n != 1 for m, n in zip(a, b, strict=True)):
        return None
    return (*[n if m == 1 else m for m, n in zip(a, b, strict=True)],)


def _broadcast_if_they_differ(right: Any) -> Any:
    def spread(self: Any, value: Any, sizes: tuple[int, ...]) -> Any:
        handle, kind = value.handle, _block_of_sizes(value.dtype, *sizes)
        if value.type.is_block():
            return tl.tensor(self.builder.create_broadcast(handle, sizes), kind)
        return tl.tensor(self.builder.create_splat(kind, handle), kind)

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if a.is_block():
            if not b.is_block():
                return lhs, spread(self, rhs, a.sizes)
            if a.sizes == b.sizes:
                return lhs, rhs
            sizes = _joint(a.sizes, b.sizes)
            if sizes is None:
                return right(self, lhs, rhs)
            return (
                lhs if sizes == a.sizes else spread(self, lhs, sizes),
                rhs if sizes == b.sizes else spread(self, rhs, sizes),
            )
        return (spread(self, lhs, b.sizes), rhs) if b.is_block() else (lhs, rhs)

    return broadcast_impl_value


def _cast_by_numpy(right: Any) -> Any:
    def cast(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        a, b = input.dtype, dst_ty.scalar
        if a is b:
            return input
        # Half precision becomes fp32 first, whatever it is to be.
        known = a.name in _ARRAYS and b.name in _ARRAYS and (a.name != "fp16" or b.name == "fp32")
        if a.name == b.name or not known or fp_downcast_rounding is not None:
            return right(self, input, dst_ty, fp_downcast_rounding)
        made = interpreter.TensorHandle(input.handle.data.astype(_ARRAYS[b.name]), b)
        return tl.tensor(made, _block_of_sizes(b, *input.type.sizes) if input.type.is_block() else b)

    return cast


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
    self.sizes = (*[core._unwrap_if_constexpr(size) for size in shape],)
    self.kept = _sizes(*self.sizes)
    self.shape, self.numel, name = _block_sizes(*self.sizes)
    self.name = f"<{name}, {element_ty}>"


@lru_cache(maxsize=4096)
def _block_of_sizes(scalar: tl.dtype, *sizes: int) -> tl.block_type:
    return tl.block_type(scalar, [*sizes])


def _block_type(scalar: Any, shape: Any) -> tl.block_type:
    return _block_of_sizes(scalar, *[core._unwrap_if_constexpr(size) for size in shape])
