"""Launches of Triton kernels, noted with what a GPU would compile for them, and mostly not computed.

A stand-in for the driver. Each launch is bound to its parameters by Triton's own code, for an H100: the types
of its arguments, which integers and addresses are multiples of 16, which integers are 1, its constants, its
warps and stages. Two launches with the same ``key`` share one compiled kernel; another key is a compilation.

Kernels compute nothing, and new memory is zeros in the meantime, so outputs are zeros. Only the kernel that
ends a choice of tokens has a result: the best token, so that a grammar's mask is obeyed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

import weft.tensor.gpu.ahead  # noqa: F401  its table of torch.empty must not be made while that is replaced

H100 = GPUTarget("cuda", 90, 32)


@dataclass(frozen=True)
class Launch:
    """``specialization``: of each argument, by its name; ``tensors``: by the argument's name."""

    kernel: str
    grid: tuple[int, ...]
    specialization: dict[str, Any]
    options: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @property
    def key(self) -> tuple[str, str, str]:
        return self.kernel, str(self.specialization), str(sorted(self.options.items()))


@functools.cache
def _binder(kernel: InterpretedFunction[Any]) -> tuple[Any, Callable[..., Any]]:
    compiled = JITFunction(kernel.fn, **kernel.kwargs)
    return compiled, create_function_from_signature(compiled.signature, compiled.params, make_backend(H100))


def _launch_of(kernel: InterpretedFunction[Any], grid: tuple[int, ...], args: Any, kwargs: Any) -> Launch:
    compiled, bind = _binder(kernel)
    bound, specialization, options = bind(*args, **kwargs)
    module = kernel.fn.__module__.removeprefix("weft.").removesuffix(".triton").rpartition(".")[2]
    by_argument = dict(zip([one.name for one in compiled.params], specialization, strict=True))
    return Launch(
        f"{module}.{kernel.fn.__name__}",
        grid,
        by_argument,
        options,
        {key: value for key, value in bound.items() if isinstance(value, torch.Tensor)},
    )


@contextlib.contextmanager
def recorded(note: Callable[[Launch], None], *, zeros: bool = True) -> Iterator[None]:
    """Inside, each launch is given to ``note``. ``zeros``: new memory is zeros; on the meta device there is
    none."""
    run, empty, empty_like = InterpretedFunction.run, torch.empty, torch.empty_like

    def noted(self: InterpretedFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launch = _launch_of(self, grid, args, kwargs)
        note(launch)
        if zeros and self.fn.__name__ == "_pick":
            launch.tensors["chosen"].copy_(launch.tensors["logits"].argmax(1))

    InterpretedFunction.run = noted
    if zeros:
        torch.empty, torch.empty_like = torch.zeros, torch.zeros_like
    try:
        yield
    finally:
        InterpretedFunction.run, torch.empty, torch.empty_like = run, empty, empty_like
