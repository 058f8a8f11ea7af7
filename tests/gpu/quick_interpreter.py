"""Triton's interpreter without the work that it repeats: half of the time for the same numbers.

A launch replaces the functions of ``triton.language`` by those of the interpreter, and puts them back at its
end. The interpreter replaces them again in every call of a function inside the kernel, thousands of times a
launch. It builds its table of dtypes at each lookup, and the type and the shape of each value anew. Here all
of it happens once.
"""

from __future__ import annotations

import math
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

from tests.gpu import quick_memory, quick_operators
from weft.tensor.gpu import products

FITS = hasattr(getattr(interpreter, "interpreter_semantic", None), "to_tensor_type")
"""Whether the interpreter is that of these lines: that of Triton 3.6 is another one."""


def install() -> None:
    """For this process, where it ``FITS``. Idempotent."""
    private: Any = interpreter
    if not FITS:
        return
    patch, dtype_of = private._patch_lang, private._get_np_dtype
    if hasattr(patch, "of_launch"):
        return
    of_launch: set[tuple[Any, ...]] = set()
    languages_of: dict[int, tuple[Any, ...]] = {}
    changes_of: dict[tuple[Any, ...], list[tuple[Any, str, Any]]] = {}

    def patched_once(fn: Any) -> Any:
        languages = languages_of.get(id(fn.__globals__))  # of a module, which stays
        if languages is None:
            languages = languages_of[id(fn.__globals__)] = tuple(
                one for one in (tl, tl.core) if any(value is one for value in fn.__globals__.values())
            )
        if languages in of_launch:
            return None  # a call inside a launch, which does not look at the answer
        if languages not in changes_of:
            scope = patch(fn)
            _quicken(scope)
            changes_of[languages] = [(owner, name, getattr(owner, name)) for owner, name, _ in scope._changes]
        else:
            scope = private._LangPatchScope()
            for owner, name, member in changes_of[languages]:
                scope.set_attr(owner, name, member)
        restore = scope.restore

        def restored() -> None:
            of_launch.clear()
            restore()

        of_launch.add(languages)
        scope.restore = restored
        return scope

    patched_once.of_launch = of_launch  # type: ignore[attr-defined]
    private._patch_lang = patched_once
    _quicken_arguments()
    private._patch_attr = _patch_attr
    _quicken_broadcasts()
    numpy_dtypes: dict[str, Any] = {}

    def remembered(dtype: Any) -> Any:
        number = dtype.scalar
        if number.is_ptr():
            return dtype_of(dtype)
        if number.name not in numpy_dtypes:
            numpy_dtypes[number.name] = dtype_of(number)
        return numpy_dtypes[number.name]

    private._get_np_dtype = remembered
    # It computes in 64 bits what nobody reads without ``debug``.
    private.interpreter_builder.options = private.InterpreterOptions(sanitize_overflow=False)
    _intern_types()
    remember_inverses()


def remember_inverses() -> None:
    """Keep the inverse of zeros: recorded steps are padded with chunks without tokens, and the inverse is most of what
    such a chunk takes. Bytes are compared, because zeros have signs."""
    rewritten: Any = interpreter.InterpretedFunction.rewritten_fn
    inverse: Any = products.unit_lower_inverse
    solve = inverse.rewrite()
    if hasattr(solve, "of_zeros"):
        return
    of_zeros: dict[tuple[Any, ...], Any] = {}

    def remembered(a: Any, SIZE: Any) -> Any:
        data = a.handle.data
        if data.any():
            return solve(a, SIZE)
        key = (id(a.type), data.tobytes(), int(SIZE))
        if key not in of_zeros:
            of_zeros[key] = solve(a, SIZE)
            of_zeros[key].handle.data.flags.writeable = False
        return of_zeros[key]

    remembered.of_zeros = of_zeros  # type: ignore[attr-defined]
    rewritten[inverse.fn] = remembered


def _patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """A member of the language takes its semantic from the launch. Without the check that it has one."""
    raw = member.__wrapped__ if member.__code__ is tl.core.program_id.__code__ else member
    semantic = interpreter.interpreter_semantic

    def called(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return raw(*args, **kwargs)

    scope.set_attr(owner, name, called)


def _quicken(scope: Any) -> None:
    for name, maker in quick_operators.quick_members().items():
        scope.set_attr(tl.core.tensor, name, maker(getattr(tl.core.tensor, name)))


def _quicken_arguments() -> None:
    """Constants of the language, numbers beside tensors and hints for caches: at each call of a member."""
    core: Any = tl.core
    semantic: Any = interpreter.interpreter_semantic
    unwrap, policy_of, to_tensor = core._unwrap_if_constexpr, core._normalize_cache_policy, semantic.to_tensor
    plain = frozenset({type(None), bool, int, float, str, core.tensor})
    no_hints = policy_of(None, "", "")
    numbers: dict[tuple[Any, ...], Any] = {}

    def unwrapped(one: Any) -> Any:
        if type(one) is core.constexpr:
            return one.value
        return one if type(one) in plain else unwrap(one)

    def policy(*hints: Any) -> Any:
        return no_hints if hints == (None, "", "") else policy_of(*hints)

    def tensor(one: Any, check_type: bool = True) -> Any:
        if type(one) is core.tensor:
            return one
        if type(one) not in (int, float):
            return to_tensor(one, check_type)
        key = (type(one), one or str(one))  # of -0.0 and 0.0
        if key not in numbers:
            numbers[key] = to_tensor(one)
        return numbers[key]

    core._unwrap_if_constexpr, core._normalize_cache_policy, semantic.to_tensor = unwrapped, policy, tensor


def _quicken_broadcasts() -> None:
    semantic: Any = interpreter.interpreter_semantic
    broadcast = semantic.broadcast_impl_value

    def quick(one: Any, other: Any) -> Any:
        return (one, other) if one.type is other.type else broadcast(one, other)

    semantic.broadcast_impl_value = quick
    semantic.where = quick_operators.where(semantic.where)
    semantic.cast = quick_memory.cast(semantic.cast)
    semantic.load = quick_memory.load(semantic.load)
    semantic.store = quick_memory.store(semantic.store)


def _intern_types() -> None:
    """One ``block_type`` for each element and shape, with what a ``tensor`` of it has."""
    core: Any = tl.core
    types: dict[tuple[Any, ...], Any] = {}
    init = core.block_type.__init__

    def new(cls: Any, element_ty: Any, shape: Any) -> Any:
        key = (
            type(element_ty),
            element_ty.name,
            getattr(element_ty, "const", None),
            *(one.value if isinstance(one, core.constexpr) else one for one in shape),
        )
        made = types.get(key)
        if made is None:
            made = object.__new__(cls)
            init(made, element_ty, shape)
            made.of_tensor = (*_numbers(core, made.shape), made.scalar)
            types[key] = made
        return made

    scalar = _numbers(core, ())

    def init_tensor(tensor: Any, handle: Any, type: Any) -> None:
        tensor.handle, tensor.type = handle, type
        if type.is_block():
            tensor.numel, tensor.shape, tensor.dtype = type.of_tensor
        else:
            tensor.numel, tensor.shape = scalar
            tensor.dtype = type.scalar

    core.block_type.__new__ = new
    core.block_type.__init__ = lambda *_: None
    with_element = core.block_type.with_element_ty

    def of_element(block: Any, element: Any) -> Any:
        known = block.__dict__.setdefault("of_elements", {})  # an entry keeps its element, and so the id
        made = known.get(id(element))
        if made is None:
            made = with_element(block, element)
            if element.is_ptr():
                return made  # made anew for each argument of a launch
            known[id(element)] = made, element
            return made
        return made[0]

    core.block_type.with_element_ty = of_element
    core.tensor.__init__ = init_tensor
    equal = core.tuple.__eq__

    def compare(one: Any, other: Any) -> Any:
        if type(other) is list and all(type(value) is int for value in other):  # a shape
            return core.constexpr(one.values == other)
        return equal(one, other)

    core.tuple.__eq__ = compare


def _numbers(core: Any, shape: Any) -> tuple[Any, Any]:
    """Count and lengths, as constants of Triton."""
    return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(one) for one in shape])
