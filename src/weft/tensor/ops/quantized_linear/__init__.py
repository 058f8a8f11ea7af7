"""A product with weights in int8 or int4: ``y = x W^T + bias``."""

from __future__ import annotations

import torch

from weft.tensor import gpu
from weft.tensor.ops.quantized_linear import byte_inputs, cpu, native
from weft.tensor.weights.quantized import QuantizedWeight


def quantized_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None,
                     ) -> torch.Tensor:
    """``x`` [..., columns] -> [..., rows] in the dtype of ``x``; ``bias`` float32 [rows].

    The C++ kernels round x to int8, with a scale per 32 columns, unless ``weight.exact`` is set or the CPU
    has no byte products. torch and Triton never round x. Where x is rounded, a row of x gives the same bits
    whatever rows are beside it. With ``weight.byte_inputs`` x is rounded everywhere, by parts of 128 columns,
    and the bits are the same on every machine.

    Source: Dettmers et al., 2022 (products of rounded rows); the groups of 32 are those of ggml's q8_0.
    """
    if weight.byte_inputs and gpu.fits(x, weight.codes):
        from weft.tensor.kernels import byte_inputs as byte_kernels

        return byte_kernels.quantized_linear(x, weight, bias)
    if weight.byte_inputs and not native.supported(x, weight):
        return byte_inputs.quantized_linear(x, weight, bias)
    if gpu.fits(x, weight.codes):
        from weft.tensor.kernels import quantized_linear as triton

        return triton.quantized_linear(x, weight, bias)
    if native.supported(x, weight):
        return native.quantized_linear(x, weight, bias)
    return cpu.quantized_linear(x, weight, bias)
