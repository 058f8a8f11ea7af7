"""Scales have the same bits on every device: none is divided by a number of Python.

Of such a number a GPU takes the reciprocal and multiplies: the last bit differs at times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.test_plain_ops import noise
from weft.tensor.few_bits import encode_nibbles, encode_state
from weft.tensor.weights.rounded import rounded
from weft_tools.quantize.quantized_copy import _rounded

ROWS = noise(4, 256)
ENCODERS: dict[str, Callable[[], Any]] = {
    "int8 weights": lambda: rounded(ROWS, 8),
    "int4 weights": lambda: rounded(ROWS, 4),
    **{
        f"a copy in {form}": lambda form=form: _rounded(ROWS, form, torch.bfloat16)  # type: ignore[misc]
        for form in ("w8a8", "int8", "int4")
    },
    "states": lambda: encode_state(ROWS, torch.empty(4, 256, dtype=torch.int8), torch.empty(4)),
    "nibbles": lambda: encode_nibbles(
        ROWS, torch.empty(4, 128, dtype=torch.uint8), torch.empty(4, 2, dtype=torch.bfloat16)
    ),
}


class Divisions(TorchDispatchMode):
    """``divisors``: those that were numbers of Python."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.divisors: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith("aten.div") and not isinstance(args[1], torch.Tensor):
            self.divisors.append(args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ENCODERS)
def test_no_scale_is_divided_by_a_number_of_python(name: str) -> None:
    with Divisions() as divisions:
        ENCODERS[name]()
    assert not divisions.divisors


def test_the_control_such_a_division_is_seen_and_differs_in_a_bit() -> None:
    x = noise(4096)
    with Divisions() as divisions:
        x.div(127)
    assert divisions.divisors == [127]
    assert not torch.equal(x / torch.full_like(x, 127.0), x * (1 / torch.tensor(127.0)))
