"""Loads `kernels.c`, and gives its two loops a backward pass.

Two things eat the time of a hybrid model that is trained with torch on one core: the depthwise
convolution (stock grouped conv1d is several times slower than the matmuls around it) and the inverse
of many small triangular matrices. Both are a few lines of C, compiled at first use with the system
compiler and called through ctypes, so training needs no build system. The torch twins below each
function say what it computes; they are used where there is no compiler, and by the tests as oracle.

`torch.compile` was rejected: its code was no faster than the plain path here, and it compiles anew for
every sequence length of the curriculum.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SOURCE = Path(__file__).with_name("kernels.c")
COMPILE_FLAGS = ["-O3", "-march=native", "-ffast-math", "-fPIC"]
NORM_EPS = 1e-6


def keep_freed_memory() -> None:
    """Stops glibc from giving freed blocks back: the page faults would cost more than the maths."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError):
        return


_float32_kernels = False


def round_in_kernels(enabled: bool) -> None:
    """With True, float32 training uses the kernels too, which compute these two loops in bfloat16.

    Off by default: a float32 model is then exact.
    """
    global _float32_kernels
    _float32_kernels = enabled


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where there is no compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or os.environ.get("TRAIN_WITHOUT_NATIVE"):
        return None
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join(COMPILE_FLAGS).encode()).hexdigest()[:16]
    target = Path(tempfile.gettempdir()) / f"train_kernels_{os.getuid()}_{key}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory() as folder:
            made, shared = Path(folder) / "kernels.o", Path(folder) / "kernels.so"
            # Linked without -ffast-math: with it, loading this would flush denormals in the whole process.
            subprocess.run([compiler, *COMPILE_FLAGS, "-c", SOURCE, "-o", made], check=True)
            subprocess.run([compiler, "-shared", made, "-o", shared, "-lmvec", "-lm"], check=True)
            shutil.copy(shared, target.with_suffix(f".{os.getpid()}"))
            target.with_suffix(f".{os.getpid()}").rename(target)
    return ctypes.CDLL(str(target))


def _address(tensor: Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


class _ConvHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BLC: Tensor, weight_4C: Tensor, normed: int, scaled: int, head: int, scale: float
    ) -> Tensor:
        native = library()
        assert native is not None
        x_BLC, weight_4C = x_BLC.contiguous(), weight_4C.contiguous()
        out = torch.empty_like(x_BLC)
        ctx.sizes = (*x_BLC.shape, normed, scaled, head)
        ctx.scale = scale
        ctx.save_for_backward(x_BLC, weight_4C)
        native.conv_forward(_address(x_BLC), _address(weight_4C), _address(out), *ctx.sizes, ctypes.c_float(scale))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        native = library()
        assert native is not None
        x_BLC, weight_4C = ctx.saved_tensors
        grad, dx, dw = grads[0].contiguous(), torch.empty_like(x_BLC), torch.empty_like(weight_4C)
        native.conv_backward(
            _address(x_BLC), _address(weight_4C), _address(grad), _address(dx), _address(dw),
            *ctx.sizes, ctypes.c_float(ctx.scale),
        )  # fmt: skip
        return dx, dw, None, None, None, None


def conv_heads_torch(x_BLC: Tensor, weight_4C: Tensor, normed: int, scaled: int, head: int, scale: float) -> Tensor:
    """The same as `conv_heads` in plain torch."""
    x, length = x_BLC.float(), x_BLC.shape[1]
    padded = F.pad(x, (0, 0, 3, 0))
    activated = F.silu(sum(weight_4C[tap] * padded[:, tap : tap + length] for tap in range(4)))
    heads = activated[..., :normed].unflatten(-1, (-1, head))
    heads = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + NORM_EPS)
    heads = heads.flatten(-2)
    parts = [heads[..., :scaled] * scale, heads[..., scaled:], activated[..., normed:]]
    return torch.cat(parts, -1).to(x_BLC.dtype)


def conv_heads(x_BLC: Tensor, weight_4C: Tensor, normed: int, scaled: int, head: int, scale: float) -> Tensor:
    """Causal depthwise convolution, silu, l2 norm of the first `normed` channels per head of `head`."""
    if library() is not None and _float32_kernels and x_BLC.dtype == torch.float32:
        rounded: Tensor = _ConvHeads.apply(x_BLC.bfloat16(), weight_4C, normed, scaled, head, scale)
        return rounded.float()
    if library() is None or x_BLC.dtype != torch.bfloat16:
        return conv_heads_torch(x_BLC, weight_4C, normed, scaled, head, scale)
    return _ConvHeads.apply(x_BLC, weight_4C, normed, scaled, head, scale)


class _UnitLowerInverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a_MCC: Tensor) -> Tensor:
        native = library()
        assert native is not None
        a_MCC = a_MCC.contiguous()
        out = torch.empty_like(a_MCC)
        native.unit_lower_inverse(_address(a_MCC), _address(out), a_MCC.shape[0], a_MCC.shape[1])
        inverse = out.bfloat16()
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        turned = inverse.transpose(1, 2)
        return -torch.bmm(torch.bmm(turned, grads[0].bfloat16()), turned).float()


def unit_lower_inverse(a_MCC: Tensor, *, exact: bool = False) -> Tensor:
    """(I + A)^-1 of strictly lower triangular A; in bf16 unless `exact`."""
    if exact and library() is not None and _float32_kernels:
        rounded: Tensor = _UnitLowerInverse.apply(a_MCC).float()
        return rounded
    if exact or library() is None:
        eye = torch.eye(a_MCC.shape[-1], dtype=a_MCC.dtype).expand_as(a_MCC)
        inverse = torch.linalg.solve_triangular(a_MCC, eye, upper=False, unitriangular=True)
        return inverse if exact else inverse.bfloat16()
    return _UnitLowerInverse.apply(a_MCC)
