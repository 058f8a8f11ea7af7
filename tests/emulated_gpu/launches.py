"""Launches of Triton kernels: by its interpreter, on the card's memory, when the stream comes to them.

A tensor of the host is refused, as Triton's launcher does. The first launch of a specialisation compiles: the
types of the arguments, which integers are 1 or multiples of 16, which addresses are aligned, constants, warps
and stages. Triton's own binder says so, for an H100.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

from tests.emulated_gpu.tensors import DeviceTensor, card
from tests.emulated_gpu.trace import IllegalAccessError, Trace, WatchedMemory

GRID_MAX = (2**31 - 1, 65_535, 65_535)
BY_ADDRESS = frozenset({"weft.tensor.kernels.adapters"})
"""Modules whose kernels read what the addresses in a table say: anything that is allocated when they run."""
H100 = GPUTarget("cuda", 90, 32)


class _OnTheCard(GridExecutor):
    """Without the copies of whole storages to the host and back."""

    def _init_args_hst(self, args_dev: Any, kwargs: Any) -> Any:
        return args_dev, kwargs

    def _restore_args_dev(self, *_: Any) -> None:
        pass


@functools.cache
def _binder(kernel: InterpretedFunction[Any]) -> Callable[..., Any]:
    compiled = JITFunction(kernel.fn, **kernel.kwargs)
    return create_function_from_signature(compiled.signature, compiled.params, make_backend(H100))


def run(kernel: InterpretedFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """``InterpretedFunction.run``."""
    name = kernel.fn.__name__
    for at, value in enumerate([*args, *kwargs.values()]):
        if isinstance(value, torch.Tensor) and not isinstance(value, DeviceTensor):
            raise ValueError(f"Pointer argument (at {at}) cannot be accessed from Triton (cpu tensor?)")
    one = card()
    one.refuse_other_card(f"{name} is launched")
    bound, specialization, options = _binder(kernel)(*args, **kwargs)
    one.compile((kernel.fn, str(specialization), str(sorted(options.items()))), name, ahead=warmup)
    if warmup:  # it is only compiled
        return
    one.launches += 1
    if one.own_capture() is None:
        one.launched[name] += 1
    tensors = [value for value in [*args, *kwargs.values()] if isinstance(value, DeviceTensor)]
    allocations = [span for span in (value.storage.span for value in tensors) if span[0] < span[1]]
    values = [value.mem if isinstance(value, DeviceTensor) else value for value in args]
    named = {key: value.mem if isinstance(value, DeviceTensor) else value for key, value in kwargs.items()}
    dims = tuple(grid(bound) if callable(grid) else grid)
    if not all(0 < count <= most for count, most in zip(dims, GRID_MAX, strict=False)):
        raise RuntimeError(f"Triton Error [CUDA]: invalid argument (a grid of {dims} for {name})")

    def compute() -> Any:
        spans = allocations
        if kernel.fn.__module__ in BY_ADDRESS:
            # A block may lie in an argument of a graph, whose memory other recordings use too.
            spans = spans + [
                (block.address, block.address + block.size)
                for block in one.allocator.taken
                if not any(first <= block.address < end for first, end in allocations)
            ]
        memory, trace = watched(), Trace(name, spans)
        memory.current = trace
        try:
            _OnTheCard(kernel.rewrite(), kernel.arg_names, dims, kernel.pre_run_hooks)(*values, **named)
        except interpreter.InterpreterError as error:
            if isinstance(error.__cause__, IllegalAccessError):
                one.report("bounds", str(error.__cause__))
                raise error.__cause__ from None
            raise
        finally:
            memory.current = None
        return trace.spans()

    one.enqueue(name, compute, (), (), tensors)


def watched() -> WatchedMemory:
    memory = interpreter._interpreter  # type: ignore[attr-defined]
    assert isinstance(memory, WatchedMemory)
    return memory
