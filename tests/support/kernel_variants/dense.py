"""Variants of norms, products and experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.support.kernel_variants.compilation import TYPES, Compilation, compilation_of
from weft.models.blocks.adapted import LOW_WIDTH
from weft.tensor.adapter_rows import BLOCK_ROWS
from weft.tensor.gpu.launch import Blocks
from weft.tensor.gpu.pages import FP8_BITS, FP8_HARDWARE, FP8_HARDWARE_OLDEST
from weft.tensor.gpu.quantized import FORMS, form
from weft.tensor.kernels import adapters, moe
from weft.tensor.kernels import byte_inputs as w8a8
from weft.tensor.kernels import elementwise as elements
from weft.tensor.kernels import expert_choice as choice
from weft.tensor.kernels import norm as norms
from weft.tensor.kernels import quantized_linear as linear
from weft.tensor.ops.moe import ChoiceRule
from weft.tensor.weights.quantized import PART


def of_norm() -> list[Compilation]:
    variants = []
    for dim, group, gated in ((4096, 4096, False), (128, 128, True), (4096, 1024, True)):
        rows, block, warps = norms.sizes(group)
        constants: dict[str, Any] = {
            "DIM": dim,
            "GROUP": group,
            "BLOCK": block,
            "ROWS": rows,
            "PLUS_ONE": not gated,
            "GATE_FIRST": dim != group,
        }
        signature = {
            "x": "*bf16",
            "x_row": "i32",
            "x_head": "i32",
            "gate": "*bf16",
            "gate_row": "i32",
            "gate_head": "i32",
            "weight": "*bf16",
            "eps": "fp32",
            "out": "*bf16",
            "units": "i32",
            "heads": "i32",
        }
        if not gated:
            constants |= {"gate": None}
        variants.append(
            Compilation(
                f"rms_norm {dim} by {group}",
                norms._norm,
                signature | dict.fromkeys(constants, "constexpr"),
                constants,
                warps,
            )
        )
    _, block, warps = norms.sizes(5120)
    constants = {"DIM": 5120, "BLOCK": block, "SCALED": True, "PLUS_ONE": True}
    signature = {
        "x": "*bf16",
        "x_row": "i32",
        "y": "*bf16",
        "y_row": "i32",
        "scale": "fp32",
        "weight": "*bf16",
        "eps": "fp32",
        "out": "*bf16",
    }
    variants.append(
        Compilation("add_norm 5120", norms._add, signature | dict.fromkeys(constants, "constexpr"), constants, warps)
    )
    return variants


def of_elementwise() -> list[Compilation]:
    silu = {"gate_up": "*bf16", "row_stride": "i32", "width": "i32", "out": "*bf16", "BLOCK": "constexpr"}
    constants = {"HEADS": 16, "ROTARY": 64, "D": 256, "BLOCK_D": 256, "TOKENS": elements.TOKENS}
    signature = {
        "q": "*bf16",
        "q_token": "i32",
        "q_head": "i32",
        "k": "*bf16",
        "k_token": "i32",
        "k_head": "i32",
        "cos": "*fp32",
        "sin": "*fp32",
        "table_stride": "i32",
        "q_out": "*bf16",
        "k_out": "*bf16",
        "tokens": "i32",
        "kv_heads": "i32",
    }
    sums = {"parts": "*bf16", "count": "i32", "out": "*bf16", "PARTS": "constexpr", "BLOCK": "constexpr"}
    return [
        Compilation("silu_mul", elements._silu_mul, silu, {"LIMIT": 0.0, "BLOCK": elements.BLOCK}),
        Compilation("sum of ranks", elements._sum_in_order, sums, {"PARTS": 4, "BLOCK": elements.BLOCK}),
        Compilation("rotary 256", elements._rotary, signature | dict.fromkeys(constants, "constexpr"), constants),
    ]


def of_quantized_linear() -> list[Compilation]:
    """Return the variants for a square matrix of 4096, for a decode and two sizes of prefill."""
    variants = []
    for name, dtype in TYPES.items():
        pointers = FORMS | {"x": dtype, "out": dtype, "scales": "*fp16", "bias": "*fp32"}
        for bits, group in ((8, 128), (4, 32)):
            variants.append(
                compilation_of(
                    f"quantized linear int{bits} to {str(name).removeprefix('torch.')}",
                    linear._dense,
                    pointers,
                    form(bits, 4096, 4096, group) | {"BN": linear.DENSE.width, "BK": linear._DENSE_COLUMNS},
                    linear.DENSE,
                )
            )
        for bits, group in ((8, 128), (4, 32)):
            variants += _linear_products(
                f"int{bits} {str(name).removeprefix('torch.')}", pointers, form(bits, 4096, 4096, group)
            )
        variants.append(
            compilation_of(
                f"quantized linear add {str(name).removeprefix('torch.')}",
                linear._add,
                {"partials": "*fp32", "bias": "*fp32", "out": dtype},
                {"SPLITS": 8, "BIAS": True, "BN": linear.ADD.width},
                linear.ADD,
            )
        )
    return variants + _linear_of_fp8()


def _linear_products(
    called: str, pointers: dict[str, str], stored: dict[str, Any], *, rounded: bool = False
) -> list[Compilation]:
    """Return the variants for a square matrix of 4096 with few, some and many rows of x; the first is split."""
    variants = []
    for rows in (16, 256, 1000):
        block_rows, blocks, depth = linear.blocks_of(rows, float32=pointers["x"] == "*fp32")
        splits = linear.splits_of(rows, 4096, 4096)
        out = {"x_scales": "*fp32" if rounded else pointers["x"]}
        out |= {"out": "*fp32"} if splits.count > 1 else {}
        variants.append(
            compilation_of(
                f"quantized linear {called} {rows} rows",
                linear._product,
                pointers | out,
                {
                    "COLUMNS": 4096,
                    "BIAS": splits.count == 1,
                    **stored,
                    "SPLITS": splits.count,
                    "DEPTH": splits.depth,
                    "ROUNDED": rounded,
                    "BM": block_rows,
                    "BN": blocks.width,
                    "BK": depth,
                },
                blocks,
            )
        )
    return variants


def _linear_of_fp8() -> list[Compilation]:
    """Return the variants that convert by hardware, and by bits on older GPUs, with scales of tiles and of rows."""
    variants = []
    pointers = FORMS | {"x": "*bf16", "out": "*bf16", "scales": "*fp32", "bias": "*fp32"}
    for fp8, lanes, called in (
        (FP8_HARDWARE, 1, "fp8"),
        (FP8_BITS, 1, "fp8 by bits"),
        (FP8_BITS, 16, "fp8 of rows by bits"),
    ):
        stored = form(8, 4096, 4096, 128, fp8=fp8, lanes=lanes)
        listed = [
            compilation_of(
                f"quantized linear {called} to bfloat16",
                linear._dense,
                pointers,
                stored | {"BN": linear.DENSE.width, "BK": linear._DENSE_COLUMNS},
                linear.DENSE,
            )
        ]
        listed += _linear_products(f"{called} bfloat16", pointers, stored)
        if fp8 == FP8_HARDWARE:
            listed += _linear_products("fp8 x fp8", pointers | {"x": "*u8"}, stored, rounded=True)
            sizes = {name: stored[name] for name in ("GROUP", "GROUPS", "TILES", "LINES", "LANES")}
            listed.append(
                compilation_of(
                    "fp8 by plain rows",
                    linear._plain,
                    {"codes": "*u8", "scales": "*fp32", "out": "*u8", "out_scales": "*fp32"},
                    sizes | {"BN": linear.DENSE.width, "BK": PART},
                    linear.DENSE,
                )
            )
        variants += [replace(one, oldest=FP8_HARDWARE_OLDEST) if fp8 == FP8_HARDWARE else one for one in listed]
    return variants


def of_byte_inputs() -> list[Compilation]:
    """Return the variants for a square matrix of 4096."""
    variants = []
    pointers = {"codes": "*u8", "x": "*i8", "x_scales": "*fp32", "scales": "*fp16", "bias": "*fp32"}
    for name, dtype in TYPES.items():
        short = str(name).removeprefix("torch.")
        variants.append(
            compilation_of(
                f"w8a8 round {short}",
                w8a8._round,
                {"x": dtype, "codes": "*i8", "scales": "*fp32"},
                {"COLUMNS": 4096, "PLACES": PART, "FP8": False},
                w8a8.ROUND,
            )
        )
        variants.append(
            compilation_of(
                f"fp8 round {short}",
                w8a8._round,
                {"x": dtype, "codes": "*u8", "scales": "*fp32"},
                {"COLUMNS": 4096, "PLACES": PART, "FP8": True},
                w8a8.ROUND,
            )
        )
        for rows in (16, 64):
            block_rows, blocks = w8a8.blocks_of(rows)
            variants.append(
                compilation_of(
                    f"w8a8 product {short} {rows} rows",
                    w8a8._product,
                    pointers | {"out": dtype},
                    {
                        "BIAS": True,
                        "GROUP": 128,
                        "GROUPS": 32,
                        "TILES": 256,
                        "LINES": 128,
                        "PLACES": PART,
                        "BM": block_rows,
                        "BN": blocks.width,
                    },
                    blocks,
                )
            )
    return variants


def _moe_of_fp8(
    called: str, pointers: dict[str, str], constants: dict[str, Any], stored: tuple[int, int], blocks: Blocks
) -> list[Compilation]:
    """Return the variants that convert by hardware, and by bits on older GPUs."""
    by_bits, by_hardware = (
        compilation_of(
            f"{called} fp8{end}",
            moe._product,
            pointers | FORMS | {"weight": "*u8", "scales": "*fp32"},
            constants | form(8, *stored, 128, fp8=fp8, lanes=1),
            blocks,
        )
        for end, fp8 in ((" by bits", FP8_BITS), ("", FP8_HARDWARE))
    )
    return [by_bits, replace(by_hardware, oldest=FP8_HARDWARE_OLDEST)]


def of_moe() -> list[Compilation]:
    """Return the variants for decode and prefill of 128 experts of 768, 8 of them chosen, over 2048 channels."""
    aligned = {"ids": "*i64", "counts": "*i32", "order": "*i32", "tiles": "*i32"}
    shape = {"BINS": 1024, "PART": moe.ALIGN.width, "BLOCK": moe.ALIGN.width}
    variants = [compilation_of("moe count", moe._count, aligned, shape, moe.ALIGN)]
    variants += [
        compilation_of(
            f"moe align{few}",
            moe._align,
            aligned,
            shape | more | {"EXPERTS": 512, "BM": 16, "ROWS": moe.RANKED},
            moe.ALIGN,
        )
        for few, more in (("", {}), (" few", {"counts": None, "PART": moe.RANKED}))
    ]
    tables = {"order": "*i32", "tiles": "*i32", "ids": "*i64", "weights": "*fp32"}
    for name, dtype in TYPES.items():
        pointers = tables | dict.fromkeys(("x", "weight", "out", "pair_out"), dtype)
        short = str(name).removeprefix("torch.")
        for rows in (16, 128):
            for down in (False, True):
                blocks = moe.product_blocks(rows, down)
                depth = 768 if down else 2048
                constants = {
                    "COLUMNS": 2048 if down else 768,
                    "DEPTH": depth,
                    "CHOICES": 8,
                    "GATED": not down,
                    "ACTIVATION": "silu" if rows == 16 else "situ",
                    "LIMIT": 0.0,
                    "GATE_CAP": 4.0,
                    "UP_CAP": 25.0,
                    "DOWN": down,
                    "bias": None,
                    "BM": rows,
                    "BN": blocks.width,
                    "BK": moe.depth_of(name.itemsize),
                    "SPLITS": 1,
                    "PART": depth,
                }
                called = f"moe {'down' if down else 'up'} {short} {rows} rows"
                plain = pointers | dict.fromkeys(("scales", "zeros"), dtype)
                variants.append(compilation_of(called, moe._product, plain, constants | moe.VALUES, blocks))
                stored = (2048, 768) if down else (2 * 768, 2048)
                variants += [
                    compilation_of(
                        f"{called} int{bits}",
                        moe._product,
                        pointers | FORMS | {"weight": "*u8", "scales": "*fp16"},
                        constants | form(bits, *stored, group),
                        blocks,
                    )
                    for bits, group in ((8, 128), (4, 32))
                ]
                if name == torch.bfloat16:
                    variants += _moe_of_fp8(called, pointers, constants, stored, blocks)
        variants.append(
            compilation_of(
                f"moe combine {short}",
                moe._combine,
                pointers | {"shared": dtype, "gate": dtype},
                {"COLUMNS": 2048, "CHOICES": 8, "BN": moe.COMBINE.width},
                moe.COMBINE,
            )
        )
        variants.append(
            compilation_of(
                f"add gated {short}",
                moe._add_gated,
                dict.fromkeys(("y", "x", "gate", "out"), dtype),
                {"D": 2048, "BD": moe.SHARED_EXPERT.width},
                moe.SHARED_EXPERT,
            )
        )
    return variants + _moe_of_splits()


def _moe_of_splits() -> list[Compilation]:
    """Return the variants for a step of few tokens with an eighth of experts of 768: 96 results over 2048 channels."""
    blocks = moe.product_blocks(moe.TILE_ROWS_MIN, down=False)
    splits = moe.up_splits(1, moe.TILE_ROWS_MIN, 8, 96, 2048, moe.depth_of(2))
    shape = {
        "COLUMNS": 96,
        "GATED": True,
        "ACTIVATION": "clamped_swiglu",
        "LIMIT": 7.0,
        "GATE_CAP": 0.0,
        "UP_CAP": 0.0,
        "SPLITS": splits.count,
        "BM": moe.TILE_ROWS_MIN,
    }
    constants = shape | {
        "DEPTH": 2048,
        "PART": splits.depth,
        "CHOICES": 8,
        "DOWN": False,
        "BN": blocks.width,
        "BK": moe.depth_of(2),
    }
    pointers = {"x": "*bf16", "out": "*fp32", "order": "*i32", "tiles": "*i32", "partials": "*fp32", "bias": "*fp32"}
    plain = pointers | dict.fromkeys(("weight", "scales", "zeros"), "*bf16")
    return [
        compilation_of("moe up bfloat16 split", moe._product, plain, constants | moe.VALUES, blocks),
        compilation_of(
            "moe up bfloat16 split int4",
            moe._product,
            pointers | FORMS | {"weight": "*u8", "scales": "*fp16"},
            constants | form(4, 192, 2048, 32),
            blocks,
        ),
        compilation_of(
            "moe add bfloat16", moe._add, pointers | {"out": "*bf16"}, shape | {"BN": moe.ADD.width}, moe.ADD
        ),
    ]


def of_expert_choice() -> list[Compilation]:
    tables = {"bias": "*fp32", "positions": "*i64", "ids": "*i64"}
    rules = {
        "softmax": ChoiceRule(8, True),
        "softmax over all": ChoiceRule(10, False),
        "groups": ChoiceRule(8, True, "sigmoid", groups=8, groups_chosen=4),
    }
    variants = []
    for name, rule in rules.items():
        constants = choice._constants(rule, 256) | ({"bias": None} if rule.scoring == "softmax" else {})
        variants += [
            compilation_of(
                f"choose experts {name} {dtype[1:]}",
                choice._choose,
                tables | {"scores": dtype, "weights": dtype},
                constants,
                choice.WARP,
                ("scale", "normalizer_eps"),
            )
            for dtype in TYPES.values()
        ]
    return variants


def of_adapters() -> list[Compilation]:
    variants = []
    sizes = {"LOW": LOW_WIDTH, "FIELDS": adapters.FIELDS, "BM": BLOCK_ROWS, "BR": adapters.RANKS}
    tables = dict.fromkeys(("order", "places", "table"), "*i64")
    for name, dtype in TYPES.items():
        pointers = tables | dict.fromkeys(("x", "y", "low"), dtype)
        short = str(name).removeprefix("torch.")
        variants += [
            compilation_of(
                f"adapters down {short}",
                adapters._down,
                pointers,
                sizes | {"COLUMNS": 4096, "BK": adapters.DOWN.width},
                adapters.DOWN,
            ),
            compilation_of(
                f"adapters up {short}", adapters._up, pointers, sizes | {"BN": adapters.UP.width}, adapters.UP
            ),
        ]
    return variants
