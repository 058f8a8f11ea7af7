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
from triton.runtime.interpreter import GridExecutor, InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

from tests.emulated_gpu.streams import Span
from tests.emulated_gpu.tensors import DeviceTensor, card
from tests.emulated_gpu.touched import Touched, is_wide

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
    bound, specialization, options = _binder(kernel)(*args, **kwargs)
    one.compile((kernel.fn, str(specialization), str(sorted(options.items()))), name)
    one.launches += 1
    every = [value.mem for value in [*args, *kwargs.values()] if isinstance(value, DeviceTensor)]
    values = [value.mem if isinstance(value, DeviceTensor) else value for value in args]
    named = {key: value.mem if isinstance(value, DeviceTensor) else value for key, value in kwargs.items()}
    dims = grid(bound) if callable(grid) else grid

    small = [memory for memory in every if not is_wide(memory)]

    def compute() -> tuple[list[Span], list[Span]]:
        touched = Touched([memory for memory in every if is_wide(memory)])
        with touched.watched():
            execute = _OnTheCard(kernel.rewrite(), kernel.arg_names, tuple(dims), kernel.pre_run_hooks)
            execute(*values, **named)
        return touched.spans(writes=False), touched.spans(writes=True)

    one.enqueue(name, compute, small, small)
