"""Rows of numbers, each by itself: activations, the gated one of SwiGLU, softmax, rotary positions
(csrc/elementwise.hpp, csrc/softmax.hpp)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F

from weft.tensor import native
from weft.tensor.fused_block import FusedBlock, FusedLayer
from weft.tensor.op import UNFIT, Unfit, op
from weft.tensor.ops.linear import Weight, weight_product
from weft.tensor.weights.quantized import TILE_ROWS

Activation = Literal["silu", "gelu", "relu", "relu2", "clamped_swiglu", "gelu_tanh", "xielu", "situ"]
"""Names of activations in an ``Architecture``."""
Caps = tuple[float, float]
"""Caps of ``situ``, on the linear factor of the gate and on up; 0: none."""
_VECTORS = 64
"""Numbers: a multiple of the count that torch's loops compute at a time, on any CPU's vectors."""
_BLOCKS_ROWS = 32
"""Rows of x of a pair of blocks, up to which a matrix unit reads a weight as one stream (csrc/matrix_pieces.hpp)."""
_SERIAL = 1 << 14
"""Numbers, too few for torch to divide them among threads."""


def each(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return ``function`` of every number of ``x``, whose bits do not depend on how many there are.

    On a CPU torch computes full vectors by one routine and the rest of a tensor by another, whose last bit may differ.
    Here every number is in a full vector. For functions such as a sigmoid, of gates and routers: a row of a decode
    then has the bits of that row in a prompt.
    """
    if not x.is_cpu:
        return function(x)
    count = x.numel()
    if count % _VECTORS == 0 and count <= _SERIAL:
        return function(x.contiguous())
    flat = F.pad(x.reshape(-1), (0, -count % _VECTORS))
    pieces = [function(flat[first : first + _SERIAL]) for first in range(0, len(flat), _SERIAL)]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[:count].view(x.shape)


@op()
def activate(x: torch.Tensor, name: Activation, *, spent: bool = False) -> torch.Tensor:
    """Return the activation of ``x``, elementwise in its dtype: silu, gelu (the exact one by erf, or by tanh), relu
    or its square. ``spent``: the result may use the memory of ``x``.
    """
    if name == "silu":
        return each(F.silu, x)
    if name == "gelu":
        return each(F.gelu, x)
    if name == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if name == "relu":
        return F.relu(x)
    assert name == "relu2", f"{name} is of two inputs"
    return F.relu(x).square()


@activate.in_cpp
def _activate(x: torch.Tensor, name: Activation, *, spent: bool = False) -> torch.Tensor | Unfit:
    if not (name == "gelu_tanh" and native.fits(x) and x.is_contiguous()):
        return UNFIT
    out = x if spent else torch.empty_like(x)
    native.extension().gelu_tanh(x.data_ptr(), x.numel(), native.DTYPES[x.dtype], out.data_ptr())
    return out


def situ(gate: torch.Tensor, up: torch.Tensor, caps: Caps) -> torch.Tensor:
    """Return cap(gate) sigmoid(gate) cap(up), cap(x) = c tanh(x / c), computed in float32, in the dtype of ``gate``.

    Source: transformers ``Inkling2SoftcappedSwiGLU``; mlx-lm's ``SiTU`` (Kimi K3).
    """
    wide, wide_up = gate.float(), up.float()
    gated = capped(wide, caps[0]) * each(torch.sigmoid, wide)
    return (gated * capped(wide_up, caps[1])).to(gate.dtype)


def capped(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Return cap x tanh(x / cap); ``x`` for a ``cap`` of 0."""
    return each(torch.tanh, x / cap) * cap if cap else x


XIELU_BETA, XIELU_EPS = 0.5, -1e-6


def xielu(x: torch.Tensor, positive: float, negative: float) -> torch.Tensor:
    """Return, in the dtype of ``x``, positive x^2 + b x above 0, negative (exp(x) - 1 - x) + b x below, b =
    XIELU_BETA.

    Source: Huang, "Deriving activation functions using integration" (2024); transformers ``XIELUActivation``."""
    wide = x.float()
    below = (each(torch.expm1, wide.clamp_max(XIELU_EPS)) - wide) * negative
    return (torch.where(wide > 0, wide.square() * positive, below) + XIELU_BETA * wide).to(x.dtype)


@op()
def softmax_(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the softmax of ``scale`` > 0 times ``x`` over its last dim, in float32; ``x`` holds it then."""
    return x.copy_((x.float() * scale).softmax(-1))


@softmax_.in_cpp
def _softmax_(x: torch.Tensor, scale: float) -> torch.Tensor | Unfit:
    columns = x.shape[-1]
    if not (native.fits(x) and x.is_contiguous() and 0 < columns <= native.SOFTMAX_COLUMNS_MAX):
        return UNFIT
    native.extension().softmax(x.data_ptr(), x.numel() // columns, columns, scale, native.DTYPES[x.dtype])
    return x


@op("weft.tensor.kernels.elementwise")
def sum_in_order(parts: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``parts`` [N, ...] over N, in their dtype: numbers are added in float32, first part first."""
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)


@op("weft.tensor.kernels.elementwise")
def silu_mul(gate_up_TJ: torch.Tensor, limit: float = 0.0) -> torch.Tensor:
    """Return ``silu(gate) * up`` [T, I] of ``gate_up_TJ`` [T, 2 I], the gate's columns first, same dtype; silu is
    rounded to it before the product. ``limit``: ``families.architecture.Dense``.

    Source: Shazeer, "GLU variants improve transformer" (2020).
    """
    # The activation is stored before the product, as torch does: one bit of bfloat16 would differ.
    gate, up = within(gate_up_TJ.chunk(2, dim=-1), limit)
    return F.silu(gate) * up


def within(parts: Sequence[torch.Tensor], limit: float) -> Sequence[torch.Tensor]:
    """Return ``parts``, gate and up, with the gate at most ``limit`` and up within it on both sides; 0: any."""
    gate, up = parts
    return (gate.clamp(max=limit), up.clamp(-limit, limit)) if limit else parts


@silu_mul.in_cpp
def _silu_mul(gate_up_TJ: torch.Tensor, limit: float = 0.0) -> torch.Tensor | Unfit:
    if limit or not (
        native.fits(gate_up_TJ)
        and gate_up_TJ.ndim == 2
        and gate_up_TJ.stride(1) == 1
        and gate_up_TJ.shape[1] % (2 * native.LANES) == 0
    ):
        return UNFIT
    tokens, both = gate_up_TJ.shape
    out = torch.empty((tokens, both // 2), dtype=gate_up_TJ.dtype)
    native.extension().silu_mul(
        gate_up_TJ.data_ptr(), gate_up_TJ.stride(0), tokens, both // 2, native.DTYPES[gate_up_TJ.dtype], out.data_ptr()
    )
    return out


@op()
def gated_linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Return silu(gate) * up [T, I] of the product of ``x`` [T, columns] and the weight, whose rows are those of the
    gate and of up; the bits of ``silu_mul(weight_product(x, weight))``.
    """
    return silu_mul(weight_product(x, weight))


@gated_linear.in_cpp
def _gated_linear(x: torch.Tensor, weight: Weight) -> torch.Tensor | Unfit:
    rows, columns = x.shape
    if rows <= _BLOCKS_ROWS or x.dtype != torch.bfloat16 or weight.rows % (4 * TILE_ROWS):
        return UNFIT
    if not (weight.gates and weight.fits(x)) or native.matrix_unit() == "none" or x.stride(1) != 1:
        return UNFIT
    assert weight.columns == columns
    out = torch.empty((rows, weight.rows // 2), dtype=x.dtype)
    native.extension().linear(
        x.data_ptr(), x.stride(0), native.DTYPES[x.dtype], rows, weight.native(), 0, False, out.data_ptr(), True
    )
    return out


def staged(fused: FusedBlock, x_TD: torch.Tensor) -> FusedLayer | None:
    """Return the same layer for the fused decoder (``weft.models.fused_decoder``)."""
    if fused.bound(x_TD) is None or fused.second.columns % native.LANES:
        return None
    return FusedLayer(fused, 0)


@op("weft.tensor.kernels.elementwise")
def rotary(
    q_THD: torch.Tensor, k_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first ``rotary_dim`` dims of every head; the rest passes through (partial rotary).

    ``q_THD`` [T, heads, D] and ``k_THD`` [T, kv_heads, D] of any float dtype; ``cos_TD``, ``sin_TD``
    [T, rotary_dim] float32 or the model's dtype; rotary_dim <= D and even. Dim i of the first half is paired
    with dim i of the second half. Returns new tensors of the inputs' dtypes; the product is float32.

    Source: RoPE (Su et al., 2021) in the half-split order of GPT-NeoX, as transformers applies it.
    """
    half = cos_TD.shape[-1] // 2
    # Both halves of the tables carry the same angles.
    cos_T1R, sin_T1R = cos_TD[:, None, :half].float(), sin_TD[:, None, :half].float()
    return _rotate(q_THD, cos_T1R, sin_T1R), _rotate(k_THD, cos_T1R, sin_T1R)


def _rotate(x_THD: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor) -> torch.Tensor:
    half = cos_T1R.shape[-1]
    out = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    first, second = x_THD[..., :half].float(), x_THD[..., half : 2 * half].float()
    out[..., :half] = torch.addcmul(first * cos_T1R, second, sin_T1R, value=-1)
    out[..., half : 2 * half] = torch.addcmul(second * cos_T1R, first, sin_T1R)
    if 2 * half < x_THD.shape[-1]:
        out[..., 2 * half :] = x_THD[..., 2 * half :]
    return out


@rotary.in_cpp
def _rotary(
    q_THD: torch.Tensor, k_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | Unfit:
    if not (
        native.fits(q_THD, k_THD) and cos_TD.dtype == torch.float32 and q_THD.stride(-1) == 1 and k_THD.stride(-1) == 1
    ):
        return UNFIT
    q_out, k_out = torch.empty(q_THD.shape, dtype=q_THD.dtype), torch.empty(k_THD.shape, dtype=k_THD.dtype)
    native.extension().rotary(
        native.rows_of(q_THD),
        native.rows_of(k_THD),
        *native.angles_of(cos_TD, sin_TD),
        q_THD.shape[0],
        q_THD.shape[1],
        k_THD.shape[1],
        q_THD.shape[2],
        cos_TD.shape[1],
        q_out.data_ptr(),
        k_out.data_ptr(),
    )
    return q_out, k_out
