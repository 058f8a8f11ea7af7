"""Quantised checkpoints as their tools would write them, and the plain checkpoint of the same values.

    quantise(form)(name, matrix) -> (tensors under the form's names, the matrix those tensors mean)

Written from the formats' descriptions, element by element where that is the clearest, and not from weft's
readers: a mistake there must not be repeated here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import checkpoint, copy_checkpoint
from tests.unit.models.test_forms import experts_one_by_one

Tensors = dict[str, torch.Tensor]
Quantise = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Form:
    """``config``: quantization_config. ``scale``: how the name of a scale ends. ``held``: what the matrices
    are in memory."""

    config: dict[str, Any]
    quantise: Quantise
    scale: str
    held: str


def to_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[n, m] codes -> int32 [n, m * bits / 32], the first in the lowest bits."""
    each = 32 // bits
    words = torch.zeros(codes.shape[0], codes.shape[1] // each, dtype=torch.int64)
    for place in range(each):
        words |= codes[:, place::each].long() << (bits * place)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def grid(matrix: torch.Tensor, group: int, bits: int, *, symmetric: bool,
         ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """codes 0 .. 2^bits - 1, zeros and float16 scales of groups of neighbouring columns: [rows, groups]."""
    rows, columns = matrix.shape
    parts = matrix.view(rows, columns // group, group)
    most = (1 << bits) - 1
    if symmetric:
        scales = (parts.abs().amax(-1) / (most // 2)).half().float()
        zeros = torch.full_like(scales, most // 2 + 1)
    else:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scales = ((high - low) / most).half().float()
        zeros = (-low / scales).round().clamp(0, most)
    codes = ((parts / scales[..., None]).round() + zeros[..., None]).clamp(0, most)
    return codes.view(rows, columns), zeros, scales


def meant(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, of_column: torch.Tensor,
          ) -> torch.Tensor:
    return (codes - zeros[:, of_column]) * scales[:, of_column]


def groups_of(columns: int, group: int) -> torch.Tensor:
    return torch.arange(columns) // group


def fp8(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    high, wide = 48, 40     # no divisors of the sizes: the last blocks are cut
    rows, columns = matrix.shape
    scales = torch.zeros(-(-rows // high), -(-columns // wide))
    stored, values = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn), torch.zeros(rows, columns)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide))
            scales[i, j] = matrix[block].abs().max() / 448
            stored[block] = (matrix[block] / scales[i, j]).to(torch.float8_e4m3fn)
            values[block] = stored[block].float() * scales[i, j]
    return {name: stored, f"{name}_scale_inv": scales}, values


def int8_rows(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = (matrix.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (matrix / scales.float()).round().clamp(-128, 127)
    return {name: codes.to(torch.int8), f"{name}_scale": scales}, codes * scales.float()


def int8_groups(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, zeros, scales = grid(matrix, 32, 8, symmetric=False)
    tensors = {name: (codes - 128).to(torch.int8), f"{name}_scale": scales,
               f"{name}_zero_point": (zeros - 128).to(torch.int8)}
    return tensors, meant(codes, zeros, scales, groups_of(matrix.shape[1], 32))


def packed_int4(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, zeros, scales = grid(matrix, 32, 4, symmetric=True)
    tensors = {f"{name}_packed": to_words(codes, 4), f"{name}_scale": scales.half(),
               f"{name}_shape": torch.tensor(matrix.shape)}
    return tensors, meant(codes, zeros, scales, groups_of(matrix.shape[1], 32))


def packed_int4_zeros(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, zeros, scales = grid(matrix, 32, 4, symmetric=False)
    tensors = {f"{name}_packed": to_words(codes, 4), f"{name}_scale": scales.half(),
               f"{name}_zero_point": to_words(zeros.T, 4).T,
               f"{name}_shape": torch.tensor(matrix.shape)}
    return tensors, meant(codes, zeros, scales, groups_of(matrix.shape[1], 32))


def gptq(*, symmetric: bool, first_version: bool, ordered: bool = False, bits: int = 4) -> Quantise:
    def quantise(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        columns, group = matrix.shape[1], 32
        order = torch.arange(columns)
        if ordered:
            order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
        of_column = torch.empty(columns, dtype=torch.long)
        of_column[order] = groups_of(columns, group)
        codes_in_order, zeros, scales = grid(matrix[:, order], group, bits, symmetric=symmetric)
        codes = torch.empty_like(codes_in_order)
        codes[:, order] = codes_in_order
        stored = (zeros - 1) % (1 << bits) if first_version else zeros
        base = name.removesuffix("weight")
        tensors = {f"{base}qweight": to_words(codes, bits).T, f"{base}scales": scales.T.half(),
                   f"{base}qzeros": to_words(stored.T, bits), f"{base}g_idx": of_column.int()}
        return tensors, meant(codes, zeros, scales, of_column)
    return quantise


def awq(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, zeros, scales = grid(matrix, 32, 4, symmetric=False)

    def words(by_column: torch.Tensor) -> torch.Tensor:
        eights = by_column.view(by_column.shape[0], -1, 8)[..., list(AWQ_ORDER)]
        return to_words(eights.flatten(1), 4)

    base = name.removesuffix("weight")
    tensors = {f"{base}qweight": words(codes.T.contiguous()), f"{base}qzeros": words(zeros.T.contiguous()),
               f"{base}scales": scales.T.half()}
    return tensors, meant(codes, zeros, scales, groups_of(matrix.shape[1], 32))


def _compressed(form: str, bits: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}

FORMS: dict[str, Form] = {
    "fp8": Form({"quant_method": "fp8", "weight_block_size": [48, 40], "activation_scheme": "dynamic"}, fp8,
                "_scale_inv", "float32"),
    "int8_rows": Form(_compressed("int-quantized", 8), int8_rows, "_scale", "int8"),
    "int8_groups": Form(_compressed("int-quantized", 8), int8_groups, "_scale", "int8"),
    "packed_int4": Form(_compressed("pack-quantized", 4), packed_int4, "_scale", "int4"),
    "packed_int4_zeros": Form(_compressed("pack-quantized", 4), packed_int4_zeros, "_scale", "int4"),
    "gptq": Form(_GPTQ, gptq(symmetric=True, first_version=True), "scales", "int4"),
    "gptq_zeros": Form(_GPTQ | {"sym": False}, gptq(symmetric=False, first_version=True), "scales", "int4"),
    "gptq_v2": Form(_GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
                    gptq(symmetric=False, first_version=False), "scales", "int4"),
    "gptq_ordered": Form(_GPTQ | {"desc_act": True},
                         gptq(symmetric=True, first_version=True, ordered=True), "scales", "float32"),
    "gptq_8": Form(_GPTQ | {"bits": 8}, gptq(symmetric=True, first_version=True, bits=8), "scales", "int8"),
    "awq": Form({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
                awq, "scales", "int4"),
}


def is_converted(name: str, matrix: torch.Tensor) -> bool:
    """What such tools convert: matrices of linear layers, not embeddings, heads, routers or gates."""
    left = ("embed", "lm_head", "conv", "router", ".gate.", "shared_expert_gate", "in_proj_b", "in_proj_a")
    return (matrix.ndim == 2 and name.endswith(".weight") and not any(part in name for part in left)
            and matrix.shape[1] % 32 == 0 and matrix.shape[0] % 8 == 0)


def write(source: str, directory: Path, form: Form, *, spoil: Callable[[Tensors], None] | None = None,
          ) -> tuple[Path, Path]:
    """(the checkpoint ``source`` in ``form``, the same values in plain float32). ``spoil`` changes what the
    first holds."""
    quantised, plain = directory / "quantised", directory / "plain"
    copy_checkpoint(checkpoint(source), quantised, quantization_config=form.config)
    copy_checkpoint(checkpoint(source), plain)
    stored: Tensors = {}
    values: Tensors = {}
    tensors = experts_one_by_one(load_file(quantised / "model.safetensors"))
    for name, tensor in tensors.items():
        stored[name] = values[name] = tensor
        if is_converted(name, tensor):
            made, values[name] = form.quantise(name, tensor)
            del stored[name]
            stored |= made
    if spoil is not None:
        spoil(stored)
    for path, held in ((quantised, stored), (plain, values)):
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, path / "model.safetensors")
    assert json.loads((quantised / "config.json").read_text())["quantization_config"] == form.config
    return quantised, plain
