"""The quick operators of the interpreter give its own numbers, dtypes and types, and its own faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from tests.gpu import quick_interpreter, quick_memory
from tests.gpu.quick_operators import quick_members, where
from weft.tensor.gpu.products import unit_lower_inverse

RAW: dict[str, Callable[..., Any]] = {name: getattr(tl.core.tensor, name) for name in quick_members()}
DTYPES = {
    tl.float32: np.float32,
    tl.float16: np.float16,
    tl.int32: np.int32,
    tl.uint8: np.uint8,
    tl.int1: np.bool_,
    tl.bfloat16: np.uint16,
}
SHAPES: tuple[tuple[int, ...], ...] = ((), (4,), (4, 1), (2, 4))
NUMBERS = (0, 3, -1, 0.0, -0.0, 0.1, float("inf"), True)


@triton.jit
def a_kernel(x):  # it has the language in its globals
    tl.store(x, 1)


@pytest.fixture
def launch() -> Iterator[Any]:
    """As inside of a launch. Gives the interpreter's semantic."""
    scope = interpreter._patch_lang(a_kernel.fn)  # type: ignore[attr-defined]
    yield interpreter.interpreter_semantic  # type: ignore[attr-defined]
    scope.restore()


def value(dtype: Any, shape: tuple[int, ...], seed: int = 0) -> Any:
    data = np.random.default_rng(seed).integers(1, 100, shape or (1,)).astype(DTYPES[dtype])
    return tl.core.tensor(TensorHandle(data, dtype), tl.core.block_type(dtype, list(shape)) if shape else dtype)


def seen(function: Callable[..., Any], *sides: Any) -> tuple[Any, ...]:
    """What came of it, to the bit; or which fault."""
    try:
        with np.errstate(all="ignore"):
            made = function(*sides)
    except Exception as error:
        return (type(error).__name__,)
    return (
        made.handle.data.tobytes(),
        made.handle.data.dtype,
        made.handle.data.shape,
        made.handle.dtype,
        made.type,
        made.dtype,
        made.shape,
        made.numel.value,
    )


@pytest.mark.parametrize("name", [name for name in RAW if name != "__getitem__"])
def test_an_operator_gives_what_the_interpreter_gives(launch: Any, name: str) -> None:
    asked = []

    def slow(*sides: Any) -> Any:
        asked.append(sides)
        return RAW[name](*sides, _semantic=launch)

    quick = quick_members()[name](slow)
    compared = 0
    for dtype, shape in product(DTYPES, SHAPES):
        left = value(dtype, shape)
        others = [value(other, wide, 1) for other, wide in product(DTYPES, SHAPES)]
        for other in (*NUMBERS, tl.constexpr(2), *others):
            asked.clear()
            said, first = seen(slow, left, other), seen(quick, left, other)
            assert said == first == seen(quick, left, other), (dtype, shape, other)
            compared += len(asked) == 1
    assert compared > 20, "the interpreter was asked each time: nothing is quick"


def test_numbers_and_constants_are_the_interpreters(launch: Any) -> None:
    for number in (*NUMBERS, 2**31, 1e-300, tl.constexpr(2)):
        said = seen(lambda one: type(launch).to_tensor(launch, one), number)
        assert said == seen(launch.to_tensor, number) == seen(launch.to_tensor, number), number
    for one in (*NUMBERS, None, "x"):
        assert tl.core._unwrap_if_constexpr(tl.constexpr(one)) is one  # type: ignore[attr-defined]
        assert tl.core._unwrap_if_constexpr([one, tl.constexpr(one)]) == [one, one]  # type: ignore[attr-defined]


def test_addresses_indices_and_choices_are_the_interpreters(launch: Any) -> None:
    for shape, wide in product(SHAPES, SHAPES):
        kind = tl.core.pointer_type(tl.float32)
        data = np.arange(10_000, 10_000 + max(1, int(np.prod(shape))), dtype=np.uint64).reshape(shape or (1,))
        address = tl.core.tensor(TensorHandle(data, kind), tl.core.block_type(kind, list(shape)) if shape else kind)
        add = quick_members()["__add__"](lambda *sides: RAW["__add__"](*sides, _semantic=launch))
        for offset in (value(tl.int32, wide), value(tl.uint8, wide), 4):
            said = seen(lambda *sides: RAW["__add__"](*sides, _semantic=launch), address, offset)
            assert said == seen(add, address, offset) == seen(add, address, offset)
        chosen = where(lambda *sides: type(launch).where(launch, *sides))
        for x, y in (
            (value(tl.float32, shape), value(tl.float32, wide, 1)),
            (value(tl.int32, shape), 0),
            (0.5, value(tl.float32, shape)),
            (value(tl.float32, shape), value(tl.int32, wide)),
        ):
            for condition in (value(tl.int1, wide), value(tl.int1, ())):
                said = seen(lambda *sides: type(launch).where(launch, *sides), condition, x, y)
                assert said == seen(chosen, condition, x, y) == seen(chosen, condition, x, y)
    index = quick_members()["__getitem__"](lambda *sides: RAW["__getitem__"](*sides, _semantic=launch))
    whole = slice(None)
    asked = ((None, whole), (whole, None), (whole, None, whole), (None,), (whole, whole, whole), (0,))
    for shape in SHAPES:
        for slices in asked:
            said = seen(lambda *sides: RAW["__getitem__"](*sides, _semantic=launch), value(tl.int32, shape), slices)
            again = [seen(index, value(tl.int32, shape), slices) for _ in range(2)]
            assert again == [said, said], (shape, slices)


def test_a_cast_gives_what_the_interpreter_gives(launch: Any) -> None:
    asked = []

    def slow(*sides: Any) -> Any:
        asked.append(sides)
        return type(launch).cast(launch, *sides)

    quick = quick_memory.cast(slow)
    for dtype, wanted, shape in product(DTYPES, DTYPES, SHAPES):
        one = value(dtype, shape)
        assert seen(slow, one, wanted) == seen(quick, one, wanted), (dtype, wanted)
    assert len(asked) < 1.8 * len(DTYPES) ** 2 * len(SHAPES), "nothing is quick"


def test_loads_and_stores_are_the_interpreters(launch: Any) -> None:
    policy, stores = type("Policy", (), {"_to_ir": lambda self, builder: None})(), 0
    for dtype, shape, wide in product(DTYPES, SHAPES, SHAPES):
        size = max(1, int(np.prod(shape)))
        held = [value(dtype, (size,), seed).handle.data.copy() for seed in (3, 3)]
        kind = tl.core.pointer_type(dtype)

        def pointers(memory: Any, kind: Any = kind, shape: tuple[int, ...] = shape) -> Any:
            at = memory.ctypes.data + memory.itemsize * np.arange(memory.size, dtype=np.uint64)
            return tl.core.tensor(
                TensorHandle(at.reshape(shape or (1,)), kind), tl.core.block_type(kind, list(shape)) if shape else kind
            )

        half = value(tl.int32, wide, 2)
        half = type(launch).less_than(launch, half, launch.to_tensor(50))
        others = (None, launch.to_tensor(0.0), launch.to_tensor(7), value(dtype, wide, 5), value(tl.float32, wide))
        for mask, other in product((None, half), others):
            calls = [
                (ways[0], ways[1], pointers(memory))
                for ways, memory in zip(((type(launch).load, type(launch).store), _quick_of(launch)), held, strict=True)
            ]
            said = [seen(function, launch, ptr, mask, other, policy, False) for function, _, ptr in calls]
            assert said[0] == said[1], (dtype, shape, wide)
            for stored in (value(dtype, wide, 9), value(tl.float32, shape, 8)):
                faults = [fault(function, launch, ptr, stored, mask, policy) for _, function, ptr in calls]
                assert faults[0] == faults[1]
                assert held[0].tobytes() == held[1].tobytes(), (dtype, shape, wide)
                stores += not faults[0]
    assert stores > 100


def fault(function: Callable[..., Any], *sides: Any) -> str:
    """Its name, or nothing."""
    try:
        function(*sides)
    except Exception as error:
        return type(error).__name__
    return ""


def _quick_of(launch: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Load and store, with the semantic first as the interpreter's own have it."""
    load = quick_memory.load(lambda *sides: type(launch).load(launch, *sides))
    store = quick_memory.store(lambda *sides: type(launch).store(launch, *sides))
    return lambda _, *sides: load(*sides), lambda _, *sides: store(*sides)


def test_inverses_that_are_remembered_are_the_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of zeros of both signs, which are computed once, and of other numbers, which are computed each time."""
    plain: Any = unit_lower_inverse.rewriter.rewrite_ast()  # type: ignore[attr-defined]
    computed = []

    def counted(a: Any, SIZE: Any) -> Any:
        computed.append(a)
        return plain(a, SIZE)

    monkeypatch.setattr(interpreter.InterpretedFunction, "rewritten_fn", {unit_lower_inverse.fn: counted})
    quick_interpreter.remember_inverses()
    numbers = value(tl.float32, (16, 16)).handle.data / 100
    zeros = np.zeros((16, 16), np.float32)
    scope = interpreter._patch_lang(unit_lower_inverse.fn)  # type: ignore[attr-defined]
    for data in (zeros, -zeros, numbers, 2 * numbers, numbers):
        of = core_tensor(data)
        said, first = seen(plain, of, tl.constexpr(16)), seen(unit_lower_inverse, of, tl.constexpr(16))
        assert said == first == seen(unit_lower_inverse, of, tl.constexpr(16))
    scope.restore()
    assert len(computed) == 2 + 3 * 2


def core_tensor(data: Any) -> Any:
    return tl.core.tensor(TensorHandle(data, tl.float32), tl.core.block_type(tl.float32, list(data.shape)))
