"""Whatever makes the host wait for a device, noticed on a machine that has none.

Two nets: one for calls of tensors' methods from Python (``tolist``, ``numpy``, ``bool()``: on a CPU tensor
they go by no operator), one for operators that end in a wait or in a copy from memory that is not pinned (a
scalar taken home, indices of a mask, a tensor made of a list). The ways by which a step's inputs go over and
its tokens come home are let through, and so is Triton's interpreter, which is the device here.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ASKING = frozenset(
    {
        "tolist",
        "item",
        "numpy",
        "cpu",
        "nonzero",
        "unique",
        "bincount",
        "masked_select",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__array__",
        "is_nonzero",
        "equal",
        "allclose",
    }
)
OPERATORS = (
    "aten.lift_fresh",
    "aten.nonzero",
    "aten._local_scalar_dense",
    "aten.masked_select",
    "aten.bincount",
    "aten._unique",
    "aten.equal",
    "aten.is_nonzero",
)
VIEWS = (("/runner/transfers.py", "states"), ("/runner/transfers.py", "pages"))
"""Functions that take views of pinned memory."""
LET_THROUGH = ("/triton/runtime/", "/runner/staging.py", "/runner/readback.py", "/tests/oracle/serving.py")


class _Python(TorchFunctionMode):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ASKING:
            self._note(name)
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith(OPERATORS):
            self._note(name)
        if name.startswith("aten.index") and any(
            isinstance(one, torch.Tensor) and one.dtype == torch.bool
            for one in (args[1] if isinstance(args[1], list | tuple) else ())
        ):
            self._note(f"{name} by a mask")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def noticed(found: list[str]) -> Iterator[None]:
    """Inside, each wait is added to ``found``, with the place that asked for it."""
    outside = sys._getframe(2)  # whose ``with`` this is

    def note(name: str) -> None:
        frame, place = sys._getframe(2), ""
        while frame is not None and frame is not outside:
            path = frame.f_code.co_filename
            if any(one in path for one in LET_THROUGH):
                return
            if any(file in path and frame.f_code.co_name == function for file, function in VIEWS):
                return
            if not place and "/weft/" in path:
                place = f"{path.rpartition('/weft/')[2]}:{frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        found.append(f"{name} {place}".rstrip())

    from_numpy = torch.from_numpy

    def noted(array: Any) -> torch.Tensor:
        note("from_numpy")
        return from_numpy(array)

    torch.from_numpy = noted  # type: ignore[assignment]
    try:
        with _Python(note), _Operators(note):
            yield
    finally:
        torch.from_numpy = from_numpy
