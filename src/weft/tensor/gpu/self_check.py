"""Check at the start: each kernel of a model next to torch's operators, once, on small numbers.

    op(x, state) --+-- Triton   on x, state            -> y,  state
                   '-- torch    on copies of the same  -> y', state'      y and y', state and state' must agree

A compiler, a driver or a GPU that computes wrong numbers says nothing: Triton 3.6 made wrong addresses for one geometry
of Mamba-2, and only its tests noticed. The check passes the largest number through ``SHARE_MAX``: kernels and operators
round differently, and wrong addresses give other numbers altogether. Ops whose torch form cannot compute a call are
left out, and so are all further ones once ``seconds`` are over.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from weft.tensor import gpu
from weft.tensor.inputs import Runs
from weft.tensor.op import UNFIT, Op

SHARE_MAX = 0.05
"""Largest difference, as a share of the largest number of torch's operators."""
_log = logging.getLogger("weft")


class KernelCheck:
    """A ``weft.tensor.op.Check``. ``differences``: a phrase for each op whose kernel differs."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.differences: list[str] = []
        self.checked: set[str] = set()
        self._known: set[Any] = set()
        self._clock, self._end_s = clock, clock() + seconds

    def __call__(self, op: Op[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = (op.torch.__name__, *map(_kind, args), *(_kind(value) for value in kwargs.values()))
        if call in self._known or self._clock() > self._end_s:
            return op.triton(*args, **kwargs)
        self._known.add(call)
        before, copies = [_copy(arg) for arg in args], [_copy(arg) for arg in args]
        named = {name: _copy(value) for name, value in kwargs.items()}
        out = op.triton(*args, **kwargs)
        if out is UNFIT:
            return out
        try:
            with gpu.unused():
                expected = op.torch(*copies, **named)
        except (RuntimeError, TypeError) as error:
            _log.debug("%s has no check: %s", op.torch.__name__, error)
            return out
        shares = [_share(x, y) for x, y in zip(_floats([out]), _floats([expected]), strict=True)]
        for arg, copy, old in zip(_floats(args), _floats(copies), _floats(before), strict=True):
            written = (copy != old) | (arg != old)
            shares.append(_share(arg[written], copy[written]))
        self.checked.add(op.torch.__name__)
        worst = max(shares, default=0.0)
        if worst > SHARE_MAX:
            self.differences.append(f"{op.torch.__name__} by {worst:.2g} of its largest number")
        return out


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.ndim
    return value.decode_count > 0 if isinstance(value, Runs) else type(value)


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return replace(value, memo={}) if isinstance(value, Runs) else value


def _floats(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors of floating-point numbers among ``values``, and inside of their tuples, in float32."""
    for value in values:
        if isinstance(value, tuple | list):
            yield from _floats(value)
        elif isinstance(value, torch.Tensor) and value.is_floating_point():
            yield value.float()


def _share(x: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference over the largest expected number; infinity where only one of both is finite."""
    finite = expected.isfinite()
    if not bool((x.isfinite() == finite).all()):
        return float("inf")
    x, expected = x[finite], expected[finite]
    if not len(x):
        return 0.0
    return float((x - expected).abs().max() / expected.abs().max().clamp(min=1e-20))
