"""Operators of Triton's interpreter for the common case: both sides have one dtype, numpy broadcasts them.

    a + b   interpreter  types, promotion, a broadcast of each side with a new type, a builder's call, checks
            here         the type that these two types gave before; ``np.add``

Sides of two dtypes are cast as the interpreter's own rule says, and added after that. Other cases are left to
the interpreter: bits of two dtypes, bfloat16 and eight-bit floats (which it keeps as
integers), and every fault. The numbers are its own: ``test_quick_interpreter.py`` compares them.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

core: Any = tl.core
private: Any = interpreter
FLOATS = frozenset({"fp32", "fp64", "fp16"})
WIDE_FLOATS = frozenset({"fp32", "fp64"})
INTS = frozenset({"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"})
OFFSETS = frozenset({"int32", "int64"})
ARITHMETIC: dict[str, tuple[Callable[..., Any], frozenset[str]]] = {
    "add": (np.add, FLOATS | INTS),
    "sub": (np.subtract, FLOATS | INTS),
    "mul": (np.multiply, FLOATS | INTS),
    "truediv": (np.divide, WIDE_FLOATS),
    "and": (np.bitwise_and, INTS | {"int1"}),
    "or": (np.bitwise_or, INTS | {"int1"}),
    "xor": (np.bitwise_xor, INTS | {"int1"}),
}
COMPARISONS: dict[str, tuple[Callable[..., Any], frozenset[str]]] = {
    "lt": (np.less, FLOATS | INTS),
    "le": (np.less_equal, FLOATS | INTS),
    "gt": (np.greater, FLOATS | INTS),
    "ge": (np.greater_equal, FLOATS | INTS),
    "eq": (np.equal, FLOATS | INTS),
    "ne": (np.not_equal, FLOATS | INTS),
}
_new_handle, _new_tensor = private.TensorHandle.__new__, core.tensor.__new__
_joined: dict[tuple[int, int], Any] = {}
"""By two types of one dtype: interned blocks and the dtypes of the language live as long as the process."""
_constants: dict[tuple[Any, ...], Any] = {}
_wider: dict[tuple[str, str, bool], Any] = {}


def quick_members() -> dict[str, Callable[..., Any]]:
    """Name of a member of ``tl.tensor`` -> maker: from the interpreter's member to the quick one."""
    makers: dict[str, Callable[..., Any]] = {"__getitem__": _indexed}
    for name, (function, dtypes) in ARITHMETIC.items():
        makers[f"__{name}__"] = partial(_binary, function=function, dtypes=dtypes, pointers=name == "add")
        if name in ("add", "sub", "mul", "truediv"):
            makers[f"__r{name}__"] = partial(_reversed, function=function, dtypes=dtypes)
    for name, (function, dtypes) in COMPARISONS.items():
        makers[f"__{name}__"] = partial(_binary, function=function, dtypes=dtypes, compares=True)
    return makers


def _made(data: Any, dtype: Any, type: Any) -> Any:
    """A tensor; ``dtype``: of its handle, which the interpreter leaves at that of the left side."""
    handle = _new_handle(private.TensorHandle)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    made = _new_tensor(core.tensor)
    core.tensor.__init__(made, handle, type)
    return made


def _join(one: Any, other: Any) -> Any:
    """The type of both, broadcast; None where the interpreter refuses."""
    if one is other:
        return one
    key = (id(one), id(other))
    if key not in _joined:
        blocks = [type for type in (one, other) if type.is_block()]
        try:
            shape = np.broadcast_shapes(*(tuple(int(n) for n in type.shape) for type in blocks))
        except ValueError:
            return None
        _joined[key] = core.block_type(one.scalar, list(shape))
    return _joined[key]


def _constant(dtype: Any, value: Any, div_or_mod: bool = False) -> Any:
    """The handle of a number beside a tensor of ``dtype``; None where it changes the dtype of the result."""
    key = (dtype.name, builtins.type(value), value or str(value), div_or_mod)
    if key not in _constants:
        semantic = private.interpreter_semantic
        kind = semantic.computation_type_impl(dtype, False, semantic.to_tensor_type(value), True, div_or_mod)
        _constants[key] = semantic._cast_to_computation_type(value, kind).handle if kind is dtype else None
    return _constants[key]


def _promoted(one: Any, other: Any, div_or_mod: bool) -> Any:
    """The dtype that both sides of an operation are cast to; None where the interpreter refuses."""
    key = (one.name, other.name, div_or_mod)
    if key not in _wider:
        known = {one.name, other.name} <= FLOATS | INTS
        _wider[key] = (
            private.interpreter_semantic.computation_type_impl(one, False, other, False, div_or_mod) if known else None
        )
    return _wider[key]


def _bool_of(type: Any) -> Any:
    return type.with_element_ty(tl.int1)


def _binary(
    slow: Callable[..., Any],
    function: Callable[..., Any],
    dtypes: frozenset[str],
    *,
    compares: bool = False,
    pointers: bool = False,
) -> Callable[..., Any]:
    divides = function is np.divide
    promotes = dtypes >= WIDE_FLOATS and not divides

    def quick(one: Any, other: Any) -> Any:
        dtype = one.dtype
        if dtype.name not in dtypes:
            if pointers and builtins.type(other) in (core.tensor, int) and dtype.is_ptr():
                return _moved(slow, one, private.interpreter_semantic.to_tensor(other))
            return slow(one, other)
        handle, type = one.handle, one.type
        if builtins.type(other) is core.constexpr:
            other = other.value
        if builtins.type(other) is core.tensor:
            right = other.handle
            if other.dtype is not dtype:
                wide = _promoted(dtype, other.dtype, divides) if promotes else None
                if wide is None or wide.name not in dtypes:
                    return slow(one, other)
                cast = private.interpreter_semantic.cast
                return quick(cast(one, wide), cast(other, wide))
            if right.data.dtype is not handle.data.dtype:
                return slow(one, other)
            type = _join(type, other.type)
            if type is None:
                return slow(one, other)
        elif builtins.type(other) in (int, float):
            right = _constant(dtype, other, divides)
            if right is None or right.data.dtype is not handle.data.dtype:
                return slow(one, other)
        else:
            return slow(one, other)
        if dtype is tl.int1 and handle.data.dtype != np.bool_:
            return slow(one, other)
        return _made(function(handle.data, right.data), handle.dtype.scalar, _bool_of(type) if compares else type)

    return quick


def _reversed(slow: Callable[..., Any], function: Callable[..., Any], dtypes: frozenset[str]) -> Callable[..., Any]:
    """A number on the left."""
    divides = function is np.divide

    def quick(one: Any, other: Any) -> Any:
        if one.dtype.name not in dtypes or builtins.type(other) not in (int, float):
            return slow(one, other)
        left = _constant(one.dtype, other, divides)
        if left is None or left.data.dtype is not one.handle.data.dtype:
            return slow(one, other)
        return _made(function(left.data, one.handle.data), left.dtype.scalar, one.type)

    return quick


def _moved(slow: Callable[..., Any], pointer: Any, offset: Any) -> Any:
    """Addresses and offsets. What types they give is kept with the type of the address."""
    known = pointer.type.__dict__.setdefault("sums", {})
    type = known.get(id(offset.type))
    if type is None or offset.dtype.name not in OFFSETS:
        made = slow(pointer, offset)
        if offset.dtype.name in OFFSETS:
            known[id(offset.type)] = made.type
        return made
    width = max(1, pointer.dtype.element_ty.primitive_bitwidth // 8)
    data = pointer.handle.data + width * offset.handle.data.astype(np.uint64)
    return _made(data, pointer.handle.dtype.scalar, type)


def _indexed(slow: Callable[..., Any]) -> Callable[..., Any]:
    """``x[:, None]``"""
    known: dict[tuple[Any, ...], Any] = {}
    whole = slice(None)

    def quick(one: Any, slices: Any) -> Any:
        if (
            builtins.type(slices) is not tuple
            or not one.type.is_block()
            or not all(part is None or (builtins.type(part) is slice and part == whole) for part in slices)
        ):
            return slow(one, slices)
        key = (id(one.type), *map(operator.not_, slices))
        type = known.get(key)
        if type is None:
            made = slow(one, slices)
            known[key] = made.type
            return made
        return _made(one.handle.data[slices], one.handle.dtype.scalar, type)

    return quick


def where(slow: Callable[..., Any]) -> Callable[..., Any]:
    """``tl.where`` of the interpreter's semantic."""

    def quick(condition: Any, x: Any, y: Any) -> Any:
        if builtins.type(condition) is not core.tensor or condition.dtype is not tl.int1:
            return slow(condition, x, y)
        of = x if builtins.type(x) is core.tensor else y
        if builtins.type(of) is not core.tensor or of.dtype.name not in FLOATS | INTS:
            return slow(condition, x, y)
        handles, type = [], of.type
        for side in (x, y):
            if builtins.type(side) is core.tensor:
                joined = _join(type, side.type) if side.dtype is of.dtype else None
                if joined is None:
                    return slow(condition, x, y)
                type = joined
                handles.append(side.handle)
            else:
                handle = _constant(of.dtype, side) if builtins.type(side) in (int, float) else None
                if handle is None:
                    return slow(condition, x, y)
                handles.append(handle)
        if handles[0].data.dtype is not handles[1].data.dtype:
            return slow(condition, x, y)
        joined = _join(condition.type, _bool_of(type)) if condition.type.is_block() else _bool_of(type)
        if joined is None:
            return slow(condition, x, y)
        return _made(
            np.where(condition.handle.data, handles[0].data, handles[1].data),
            handles[1].dtype.scalar,
            joined.with_element_ty(of.dtype),
        )

    return quick
