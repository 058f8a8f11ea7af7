"""Ops: functions with three forms, and the choice of the form for a call.

    @op("weft.tensor.kernels.elementwise") Triton: a module with a function of the same name
    def silu_mul(x): ...                   torch: the definition, and the form for all other calls
    @silu_mul.in_cpp
    def _silu_mul(x): ...                  the C++ kernel: addresses, strides, one call

    silu_mul(x) --> Triton, if it reaches the device of x --> C++ --> torch

A form returns UNFIT for a call that it does not take: another dtype, a dim that is not a multiple of 16. It has then
changed nothing.

``recurrent_op`` is for an op with a state in slots. The shape letters of its parameters tell their kind: ``_T..``
has a row for each token, ``_S..`` a state for each slot. Its laws, for all such ops:

- The state is that of each run's slot before the run (zeros if ``fresh``), and is updated in place.
- Runs with slot PAD start from zeros and write nothing. A tap writes the state after ``offset`` tokens.
- Verify runs change no state; their inputs go into the log of the step.
- Decodes use the recurrence, prefills the chunked form, with chunks on the grid of CHUNK_TOKENS positions.
- A state that is not float32 is rounded after every token (``tensor.rounding``), of which ``layer`` is an input. Only
  Triton's chunked forms, in models of 16 bits, round after every chunk.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import cached_property, update_wrapper
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

import torch

from weft.tensor import gpu
from weft.tensor.rounding import by_token
from weft.tensor.state_rows import restored

P = ParamSpec("P")
R = TypeVar("R")


class Unfit(Enum):
    UNFIT = "this form does not take the call"


UNFIT = Unfit.UNFIT


class Check(Protocol):
    """A call of an op's Triton form, with a look at its results (``weft.tensor.gpu.self_check``)."""

    def __call__(self, op: Op[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


_check: Check | None = None


@contextlib.contextmanager
def checked(check: Check) -> Iterator[None]:
    """Inside, ``check`` calls the Triton forms of all ops."""
    global _check
    _check = check
    try:
        yield
    finally:
        _check = None


class Op(Generic[P, R]):
    """An op. ``torch``, ``native`` (C++) and ``triton`` are its forms."""

    def __init__(self, form: Callable[P, R], kernels: str | None) -> None:
        update_wrapper(self, form)
        self.torch, self._kernels = form, kernels
        self.native: Callable[P, R | Unfit] | None = None

    def in_cpp(self, form: Callable[P, R | Unfit]) -> Callable[P, R | Unfit]:
        """Register the C++ form, as a decorator."""
        self.native = form
        return form

    @cached_property
    def triton(self) -> Callable[P, R | Unfit]:
        assert self._kernels is not None, f"{self.torch.__name__} has no Triton kernels"
        form: Callable[P, R | Unfit] = getattr(importlib.import_module(self._kernels), self.torch.__name__)
        return form

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        # Triton's module is imported by the first call that may need it.
        if self._kernels is not None and _reached(args):
            out = self._by_triton(args, kwargs)
            if out is not UNFIT:
                return out
        if self.native is not None:
            out = self.native(*args, **kwargs)
            if out is not UNFIT:
                return out
        return self.torch(*args, **kwargs)

    def _by_triton(self, args: Any, kwargs: Any) -> R | Unfit:
        if _check is None:
            return self.triton(*args, **kwargs)
        return cast("R | Unfit", _check(self, args, kwargs))


class RecurrentOp(Op[P, R]):
    """An op with a state. Its parameters up to ``runs`` are given by position."""

    def __init__(self, form: Callable[P, R], kernels: str | None) -> None:
        super().__init__(form, kernels)
        names = list(inspect.signature(form).parameters)
        shapes = [name.rpartition("_")[2] for name in names]
        self._by_token = [index for index, shape in enumerate(shapes) if shape.isupper() and shape[0] == "T"]
        self._state = next(index for index, shape in enumerate(shapes) if shape.isupper() and shape[0] == "S")
        self._runs = names.index("runs")
        self._rounds = "layer" in names

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        runs: Any = args[self._runs]
        # Before the op writes: it consumes these inputs.
        if runs.log is not None:
            replay = self._with_other(self, args, kwargs, [*self._of_tokens(args), self._runs])
            runs.log.note(replay, *self._inputs(args))
        state: Any = args[self._state]
        if self._kernels is not None and _reached(args):
            # A kernel that writes every slot runs inside this context, which restores the states of verify runs.
            with restored(state, runs):
                out = self._by_triton(args, kwargs)
            if out is not UNFIT:
                return out
        if self.native is not None:
            out = self.native(*args, **kwargs)
            if out is not UNFIT:
                return out
        # The torch forms compute in float32 and round once per run: too seldom for a state in few bits.
        if self._rounds and state.dtype != torch.float32:
            step = self._with_other(self.torch, args, kwargs, [*self._of_tokens(args), self._state, self._runs])
            layer: Any = kwargs.get("layer", 0)
            return cast(R, by_token(step, self._inputs(args), state, runs, layer))
        return self.torch(*args, **kwargs)

    def _of_tokens(self, args: tuple[Any, ...]) -> list[int]:
        """Return the places of the inputs that have a row for each token; one that may be None is not among them."""
        return [index for index in self._by_token if index < len(args) and args[index] is not None]

    def _inputs(self, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(args[index] for index in self._of_tokens(args))

    @staticmethod
    def _with_other(
        form: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], places: Sequence[int]
    ) -> Callable[..., Any]:
        """Return ``form`` bound to the same arguments, except those at ``places``: the caller passes these."""
        # Arguments at `places` become None here: a log would keep the tensors of every layer through the step.
        others = [None if index in places else arg for index, arg in enumerate(args)]

        def call(*changed: Any) -> Any:
            arguments = others.copy()
            for index, arg in zip(places, changed, strict=True):
                arguments[index] = arg
            return form(*arguments, **kwargs)

        return call


def _reached(args: tuple[Any, ...]) -> bool:
    """Return whether Triton serves the device of the first argument, and all other tensors are there."""
    first = args[0]
    if first.is_cpu and not gpu.interpreting():  # first: a decode step on a CPU asks hundreds of times
        return False
    device = first.device
    return gpu.reaches(device) and all(x.device == device for x in args if isinstance(x, torch.Tensor))


def op(kernels: str | None = None) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Return a decorator of the torch form. ``kernels``: the module of the Triton form."""
    return lambda form: Op(form, kernels)


def recurrent_op(kernels: str | None = None) -> Callable[[Callable[P, R]], RecurrentOp[P, R]]:
    return lambda form: RecurrentOp(form, kernels)
