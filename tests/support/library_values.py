"""Makes ``tests/fixtures/library_values``: matrices as libraries store them, and the values that they read back.

    python -m tests.support.library_values      where the libraries are: auto-round, bitsandbytes,
                                                compressed-tensors, nvidia-modelopt, torchao

Each file has the tensors of one matrix ``x.weight`` of 32 rows and 64 columns under the library's names, the
matrix that the library's own dequantiser makes of them as ``values``, and quantization_config as metadata.
Tests only read the files, and need none of the libraries.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

DIRECTORY = Path(__file__).resolve().parents[1] / "fixtures" / "library_values"
ROWS, COLUMNS = 32, 64
Made = tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor]


def matrix(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3))
    return (made * torch.logspace(-3, 1, ROWS)[:, None]).to(dtype)


def compressed(name: str, bits: int, group: int | None, **more: Any) -> Made:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    strategy = "channel" if group is None else "tensor_group" if "global" in more else "group"
    scale_dtype = {"scale_dtype": torch.uint8} if "mx" in name else {}
    args = QuantizationArgs(
        num_bits=bits, type="float", strategy=strategy, group_size=group, symmetric=True, **scale_dtype
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = matrix(torch.bfloat16)
    most = 6.0 if bits == 4 else 448.0
    scale = (weight.float().reshape(ROWS, -1, group or COLUMNS).abs().amax(-1) / most).clamp(min=1e-6)
    if "mx" in name:
        scale = 2.0 ** scale.log2().ceil()
    state: dict[str, torch.Tensor] = {"weight": weight}
    if "global" in more:
        state["weight_global_scale"] = torch.tensor([448 * 6 / float(weight.float().abs().max())])
        scale = (scale * state["weight_global_scale"]).to(torch.float8_e4m3fn)
    state["weight_scale"] = scale.to(torch.float32 if "global" in more else torch.bfloat16)
    compressor = BaseCompressor.get_value_from_registry(name)
    packed = compressor.compress(state, scheme)
    values = compressor.decompress(dict(packed), scheme)["weight"]
    settings = {"num_bits": bits, "type": "float", "strategy": strategy, "group_size": group}
    config = {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": {"weights": settings, "targets": ["Linear"]}},
    }
    return config, {f"x.{key}": tensor for key, tensor in packed.items()}, values


def modelopt_nvfp4() -> Made:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    weight = matrix()
    made, scales, one = NVFP4QTensor.quantize(weight, 16)
    values = made.dequantize(dtype=torch.float32, scale=scales, double_scale=one, block_sizes={-1: 16})
    stored = {"x.weight": made._quantized_data, "x.weight_scale": scales, "x.weight_scale_2": one}
    return {"quant_method": "modelopt", "quant_algo": "NVFP4"}, stored, values


def modelopt_fp8() -> Made:
    from modelopt.torch.quantization.qtensor import FP8QTensor

    weight = matrix()
    made, scale = FP8QTensor.quantize(weight)[:2]
    values = made.dequantize(dtype=torch.float32, scale=scale)
    return (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"x.weight": made._quantized_data, "x.weight_scale": scale.float().reshape(())},
        values,
    )


def bitsandbytes_four(kind: str, *, nested: bool) -> Made:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    packed, state = quantize_4bit(matrix(), blocksize=64, quant_type=kind, compress_statistics=nested)
    values = dequantize_4bit(packed, state)
    stored = {f"x.weight.{key}": tensor for key, tensor in state.as_dict(packed=True).items()}
    config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested,
    }
    return config, {"x.weight": packed, **stored}, values


def bitsandbytes_eight() -> Made:
    from bitsandbytes.functional import int8_vectorwise_dequant

    weight = matrix()
    most = weight.abs().amax(1)
    codes = (weight * (127 / most)[:, None]).round().to(torch.int8)
    stored = {"x.weight": codes, "x.SCB": most, "x.weight_format": torch.tensor(0, dtype=torch.uint8)}
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return config, stored, int8_vectorwise_dequant(codes, most)


def torch_ao(name: str) -> Made:
    from torchao import quantization as ao
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    config = {
        "int8": lambda: ao.Int8WeightOnlyConfig(),
        "float8": lambda: ao.Float8WeightOnlyConfig(),
        "int4": lambda: ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(32)),
    }[name]()
    layer = torch.nn.Sequential(torch.nn.Linear(COLUMNS, ROWS, bias=False))
    layer[0].weight = torch.nn.Parameter(matrix())
    ao.quantize_(layer, config)
    stored, _ = flatten_tensor_state_dict(layer.state_dict())
    kind = {"default": {"_type": type(config).__name__, "_data": {}}}
    return (
        {"quant_method": "torchao", "quant_type": kind},
        {f"x{key.removeprefix('0')}": tensor for key, tensor in stored.items()},
        layer[0].weight.dequantize(),
    )


def auto_round(packing: str, bits: int) -> Made:
    """Pack by the layers of auto-round for its two orders of GPTQ; a product reads their own tensors back."""
    if packing.endswith("gptq"):
        from auto_round_extension.torch.qlinear_torch_zp import QuantLinear
    else:
        from auto_round_extension.torch.qlinear_torch import QuantLinear
    weight = matrix(torch.float16)
    wide = weight.float().view(ROWS, -1, 32)
    scales = ((wide.amax(-1) - wide.amin(-1)) / (2**bits - 1)).half().float()
    zeros = (-wide.amin(-1) / scales).round().clamp(0, 2**bits - 1)
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight = torch.nn.Parameter(weight.float())
    packed = QuantLinear(bits, 32, COLUMNS, ROWS, False, weight_dtype=torch.float16)
    packed.device = "cpu"
    packed.pack(linear, scales, zeros, None)
    packed.post_init()
    values = packed(torch.eye(COLUMNS)).T.half()  # it dequantises to float16
    stored = {f"x.{key}": getattr(packed, key) for key in ("qweight", "qzeros", "scales")}
    config = {"quant_method": "auto-round", "packing_format": packing, "bits": bits, "group_size": 32, "sym": False}
    return config, stored, values


MAKERS = {
    "nvfp4-compressed": lambda: compressed("nvfp4-pack-quantized", 4, 16, **{"global": True}),
    "mxfp4-compressed": lambda: compressed("mxfp4-pack-quantized", 4, 32),
    "mxfp8-compressed": lambda: compressed("mxfp8-quantized", 8, 32),
    "fp8-compressed": lambda: compressed("float-quantized", 8, None),
    "nvfp4-modelopt": modelopt_nvfp4,
    "fp8-modelopt": modelopt_fp8,
    "nf4-bitsandbytes": lambda: bitsandbytes_four("nf4", nested=False),
    "nf4-nested-bitsandbytes": lambda: bitsandbytes_four("nf4", nested=True),
    "fp4-bitsandbytes": lambda: bitsandbytes_four("fp4", nested=False),
    "int8-bitsandbytes": bitsandbytes_eight,
    "int8-torchao": lambda: torch_ao("int8"),
    "int4-torchao": lambda: torch_ao("int4"),
    "float8-torchao": lambda: torch_ao("float8"),
    "int4-auto-round": lambda: auto_round("auto_round", 4),
    "int8-auto-round": lambda: auto_round("auto_round", 8),
    "gptq4-auto-round": lambda: auto_round("auto_round:auto_gptq", 4),
}


def main() -> None:
    for name, make in MAKERS.items():
        try:
            config, stored, values = make()
        except Exception as error:
            print(f"{name}: not made: {error!r}")
            continue
        tensors = {key: tensor.detach().clone().contiguous() for key, tensor in stored.items()}
        tensors["values"] = values.detach().float().contiguous()
        save_file(
            tensors,
            DIRECTORY / f"{name}.safetensors",
            metadata={"quantization_config": json.dumps(config), "dtype": str(values.dtype)},
        )
        print(f"{name}: {values.dtype}")


if __name__ == "__main__":
    main()
