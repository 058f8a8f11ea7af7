"""Loads, stores and casts of Triton's interpreter for the common case: one number, or all of one shape.

    load    interpreter  mask and ``other`` broadcast to new types, ``other`` filled and cast, a builder
            here         the call on memory; what stands for masked numbers is made once for each shape
    cast    here         ``numpy.astype`` between numbers that numpy has; the same dtype stays as it is

Other cases are left to the interpreter: other shapes, bool memory, bfloat16 and eight-bit floats of casts,
and every fault. The numbers are its own: ``test_quick_interpreter.py`` compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from tests.gpu.quick_operators import FLOATS, INTS, _made

core: Any = tl.core
private: Any = interpreter
_filled: dict[tuple[Any, ...], Any] = {}
"""What loads leave where their mask is off, by shape and number; and masks that are on everywhere."""
_VOID = core.void


def _on_everywhere(shape: tuple[int, ...]) -> Any:
    mask = _filled.get(shape)
    if mask is None:
        mask = _filled[shape] = np.ones(shape, np.bool_)
        mask.flags.writeable = False
    return mask


def _mask_of(ptr: Any, mask: Any) -> Any:
    """The bits of a mask; None where it has another shape or dtype."""
    shape = ptr.handle.data.shape
    if mask is None:
        return _on_everywhere(shape)
    if type(mask) is not core.tensor or not mask.type.is_block():
        return None
    data = mask.handle.data
    return data if data.dtype == np.bool_ and data.shape == shape else None


def _is_quick(ptr: Any) -> bool:
    kind = ptr.type
    return kind.is_block() and kind.scalar.is_ptr() and kind.scalar.element_ty.name != "int1"


def load(slow: Callable[..., Any]) -> Callable[..., Any]:
    def quick(ptr: Any, mask: Any, other: Any, *how: Any) -> Any:
        if mask is None and other is None and ptr.type.is_ptr() and ptr.type.element_ty.name != "int1":
            return _one_number(ptr)
        if not _is_quick(ptr) or (mask is None and other is not None):
            return slow(ptr, mask, other, *how)
        on = _mask_of(ptr, mask)
        if on is None or (other is not None and other.type.is_block() and other.type.shape != ptr.type.shape):
            return slow(ptr, mask, other, *how)
        element, shape = ptr.type.scalar.element_ty, on.shape
        if other is None:
            key: tuple[Any, ...] = (shape, element.name)
        elif not other.type.is_block():
            key = (shape, element.name, other.dtype.name, other.handle.data.tobytes())
        else:
            other = private.interpreter_semantic.cast(other, element).handle.data
            key = ()
        if key:
            known = _filled.get(key)
            if known is None:
                known = _filled[key] = _default(ptr, other, element)
            other = known
        data = private._interpreter.load(ptr.handle.data, on, other, private._get_np_dtype(element))
        return _made(data, element, ptr.type.with_element_ty(element))

    return quick


def _one_number(ptr: Any) -> Any:
    element, shape = ptr.type.element_ty, ptr.handle.data.shape
    key = (shape, element.name)
    if key not in _filled:
        _filled[key] = _default(ptr, None, element)
    data = private._interpreter.load(
        ptr.handle.data, _on_everywhere(shape), _filled[key], private._get_np_dtype(element)
    )
    return _made(data, element, element)


def _default(ptr: Any, other: Any, element: Any) -> Any:
    """As the interpreter makes it. Nobody writes into it."""
    semantic = private.interpreter_semantic
    made = (
        np.zeros(ptr.handle.data.shape, private._get_np_dtype(element))
        if other is None
        else semantic.cast(semantic.broadcast_impl_value(ptr, other)[1], element).handle.data
    )
    made.flags.writeable = False
    return made


def store(slow: Callable[..., Any]) -> Callable[..., Any]:
    def quick(ptr: Any, value: Any, mask: Any, *how: Any) -> Any:
        if (
            not _is_quick(ptr)
            or ptr.type.scalar.is_const()
            or not value.type.is_block()
            or value.handle.data.shape != ptr.handle.data.shape
        ):
            return slow(ptr, value, mask, *how)
        on = _mask_of(ptr, mask)
        if on is None:
            return slow(ptr, value, mask, *how)
        value = private.interpreter_semantic.cast(value, ptr.type.scalar.element_ty)
        private._interpreter.store(ptr.handle.data, value.handle.data, on)
        return core.tensor(None, _VOID)

    return quick


def cast(slow: Callable[..., Any]) -> Callable[..., Any]:
    numbers = FLOATS | INTS

    def quick(value: Any, wanted: Any, *how: Any, **named: Any) -> Any:
        have, want = value.type.scalar, wanted.scalar
        if have is want:
            return value
        if (
            how
            or any(one is not None for one in named.values())
            or have.name not in numbers
            or want.name not in numbers
            or (have.name == "fp16" and want.name != "fp32")
        ):
            return slow(value, wanted, *how, **named)
        handle = value.handle
        return _made(
            handle.data.astype(private._get_np_dtype(want)),
            want,
            value.type.with_element_ty(want) if value.type.is_block() else want,
        )

    return quick
