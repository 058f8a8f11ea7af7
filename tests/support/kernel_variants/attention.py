"""Variants of the kernels over pages and rings."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from tests.support.kernel_variants.compilation import (
    PDL,
    PLACE_SIGNATURE,
    TRITON_TYPES,
    Compilation,
    by_choice,
    compilation_of,
    page_signature,
)
from weft.tensor.gpu import decode_kernels as listing
from weft.tensor.gpu.launch import STEP_TABLES, Blocks
from weft.tensor.gpu.pages import FP8_BITS, block_dim, product_of
from weft.tensor.gpu.softmax import COMBINED_AT_ONCE, combine
from weft.tensor.kernels import attention_layer as fused
from weft.tensor.kernels import latent_attention as latent
from weft.tensor.kernels import paged_attention as paged
from weft.tensor.kernels import window_attention as ring
from weft.tensor.kernels import write_kv as writing
from weft.tensor.kernels.write_kv import TILE_TOKENS


def of_paged_attention() -> list[Compilation]:
    # All window sizes compile alike.
    variants = [_paged_of_shape(torch.bfloat16, 0, dim, window) for dim, window in ((64, 2), (128, 0), (256, 0))]
    variants += [_paged_of_shape(torch.float8_e4m3fn, FP8_BITS, dim, 0) for dim in (128, 256)]
    variants += [_paged_of_shape(torch.int8, 0, 80, 0)]
    return list(itertools.chain(*variants))


def _paged_of_shape(page: torch.dtype, fp8: int, dim: int, window: int) -> list[Compilation]:
    query = torch.float32 if page == torch.float32 else torch.bfloat16
    kind = "*fp32" if query == torch.float32 else "*bf16"
    product, precision = product_of(query, page)
    pages, constants = page_signature(page)
    gates = {
        "gate": kind,
        "gate_stride": "i32",
        "head_gate": "constexpr",
        "head_gate_stride": "i32",
        "value_scale": "constexpr",
        "sinks": "*fp32" if dim == 64 else "constexpr",
    }
    common = {
        "q": kind,
        "q_token": "i32",
        "q_head": "i32",
        **pages,
        "table": "*i32",
        "table_stride": "i32",
        "qk_scale": "fp32",
        "out": kind,
        **gates,
        "profiles": kind if window else "constexpr",
    }
    shape = {
        "HEADS": 16,
        "GROUP": 4,
        "WINDOW": window,
        "D": dim,
        "BLOCK_D": block_dim(dim),
        "FP8": fp8,
        "PRODUCT": product,
        "PRECISION": precision,
        "EXTENT": 1024 if window else 0,
        "SINKS": 16 if window else 0,
    }
    constants |= {} if window else {"profiles": None}
    constants |= {"head_gate": None, "value_scale": None} | ({} if dim == 64 else {"sinks": None})
    split_args = {"context": "*i64", "partial": "*fp32", "logs": "*fp32", "splits": "i32"}
    listed = split_args | {"items": "*i32"}
    chunks = {
        "starts": "*i64",
        "offsets": "*i32",
        "chunk_run": "*i32",
        "chunk_first": "*i32",
        "chunk_tokens": "*i32",
        "chunk_count": "i32",
    }
    name = f"{str(page).removeprefix('torch.')} {dim}"
    cuts = {"SPLITS_MAX": 32, "SPLIT_PAGES": paged.split_tokens(4, dim) // 16}
    variants = [
        _paged_compilation(
            f"decode {name}", paged._decode, {**common, **listed}, {**constants, **shape, **cuts}, blocks, only
        )
        for blocks, only in by_choice(lambda capability: paged.decode_blocks(dim, page.itemsize, 4, capability))
    ]
    variants += [
        _paged_compilation(
            f"prefill {name}", paged._prefill, {**common, **chunks}, {**constants, **shape}, blocks, only
        )
        for blocks, only in by_choice(
            lambda capability: paged.prefill_blocks(dim, page.itemsize, 4, product, capability)
        )
    ]
    if page == torch.bfloat16:
        used = {key: shape[key] for key in ("HEADS", "GROUP", "WINDOW", "D", "BLOCK_D", "SINKS")}
        variants.append(
            _paged_compilation(
                f"combine {name}",
                combine,
                {"out": kind, **gates, **split_args},
                {
                    "head_gate": None,
                    "value_scale": None,
                    **({} if dim == 64 else {"sinks": None}),
                    **used,
                    "PAGES": paged.decode_blocks(dim, page.itemsize, 4, 90)["PAGES"],
                    **cuts,
                    "AT_ONCE": COMBINED_AT_ONCE,
                },
                {"num_warps": 2, "num_stages": 2},
            )
        )
    return variants


def _paged_compilation(
    name: str,
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    blocks: dict[str, Any],
    only: frozenset[int] | None = None,
) -> Compilation:
    options = {key: blocks[key] for key in ("num_warps", "num_stages")}
    constants = {**constants, **{key: value for key, value in blocks.items() if key not in options}}
    types = signature | dict.fromkeys((*constants, PDL), "constexpr")
    return Compilation(
        f"paged_attention {name}",
        kernel,
        {argument: types[argument] for argument in kernel.arg_names},
        constants,
        **options,
        only=only,
    )


def of_latent_attention() -> list[Compilation]:
    product, precision = product_of(torch.bfloat16, torch.bfloat16)
    main, rest = latent.kv_splits_of_row(576, 512)
    pages = {"cache": "*" + TRITON_TYPES[torch.bfloat16], "stride": "i32", "scales": "constexpr", "scale_stride": "i32"}
    common = {
        "q": "*bf16",
        "q_token": "i32",
        "q_head": "i32",
        **pages,
        "table": "*i32",
        "table_stride": "i32",
        "qk_scale": "fp32",
        "out": "*bf16",
    }
    shape = {
        "scales": None,
        "HEADS": 32,
        "D": 576,
        "VALUE": 512,
        "MAIN": main,
        "REST": rest,
        "FP8": 0,
        "PRODUCT": product,
        "PRECISION": precision,
    }
    split_args = {"context": "*i64", "items": "*i32", "partial": "*fp32", "logs": "*fp32", "splits": "i32"}
    chunks = {"starts": "*i64"} | dict.fromkeys(("offsets", "chunk_run", "chunk_first", "chunk_tokens"), "*i32")
    variants = []
    for name, kernel, signature, tile_constants in (
        (
            "decode",
            latent._decode,
            {**common, **split_args},
            {"SPLITS_MAX": 64, "SPLIT_PAGES": 8, "TILE_HEADS": latent.HEADS_AT_ONCE},
        ),
        (
            "prefill",
            latent._prefill,
            {**common, **chunks, "chunk_count": "i32"},
            {"TOKENS": latent.queries_of(main, product)},
        ),
    ):
        for small in (False, True):
            blocks = latent.blocks_of(main, product, small)
            constants = {**shape, **tile_constants, "PAGES": blocks["PAGES"]}
            variants.append(
                Compilation(
                    f"latent_attention {name} 576",
                    kernel,
                    signature | dict.fromkeys(constants, "constexpr"),
                    constants,
                    blocks["num_warps"],
                    blocks["num_stages"],
                    small_shared=small,
                )
            )
    return variants


def of_window_attention() -> list[Compilation]:
    return [
        variant for dtype, dim in ((torch.bfloat16, 128), (torch.bfloat16, 256)) for variant in _ring_of(dtype, dim)
    ]


def _ring_of(dtype: torch.dtype, dim: int) -> list[Compilation]:
    product, precision = product_of(torch.bfloat16, dtype)
    queries = {
        "q": "*bf16",
        "q_token": "i32",
        "q_head": "i32",
        "qk_scale": "fp32",
        "out": "*bf16",
        "sinks": "*fp32" if dim == 128 else "constexpr",
        "profiles": "*bf16" if dim == 128 else "constexpr",
    }
    common = {
        "k": "*bf16",
        "k_token": "i32",
        "k_head": "i32",
        "v": "*bf16",
        "v_token": "i32",
        "v_head": "i32",
        "ring": "*" + TRITON_TYPES[dtype],
        "slot_stride": "i64",
        "starts": "*i64",
        "slots": "*i64",
        "fresh": "*i32",
    }
    tables = dict.fromkeys(STEP_TABLES[STEP_TABLES.index("offsets") :], "*i32")
    shape: dict[str, Any] = {"KV_HEADS": 4, "WINDOW": 512, "D": dim, "BLOCK_D": dim, "FP8": 0}
    sizes = {"HEADS": 16, "GROUP": 4, "PRODUCT": product, "PRECISION": precision, "EXTENT": 512 if dim == 128 else 0}
    sizes["SINKS"] = sizes["EXTENT"] and 16
    variants = []
    attend = [(small, ring.attend_blocks(dim, dtype.itemsize, 4, product, small)) for small in (False, True)]
    for name, kernel, signature, small, blocks in (
        ("decode", ring._decode, {**queries, **common}, None, sizes | ring.decode_blocks(dim, dtype.itemsize, 4)),
        *(("attend", ring._attend, {**queries, **common, **tables}, small, sizes | blocks) for small, blocks in attend),
        (
            "update",
            ring._update,
            {**common, **tables, "decode_count": "i32"},
            None,
            {"PLACES": ring.UPDATE_BLOCK, "num_warps": 4, "num_stages": 2},
        ),
    ):
        options = {key: blocks.pop(key) for key in ("num_warps", "num_stages")}
        constants = {**shape, **blocks}
        if dim != 128 and "sinks" in kernel.arg_names:
            constants |= {"sinks": None, "profiles": None}
        used = {key: value for key, value in signature.items() if key in kernel.arg_names}
        variants.append(
            Compilation(
                f"window_attention {name} {dim}",
                kernel,
                used | dict.fromkeys(constants, "constexpr"),
                constants,
                small_shared=small,
                **options,
            )
        )
    return variants


def of_attention_layer() -> list[Compilation]:
    variants = []
    for dtype, dim, normal in ((torch.bfloat16, 128, True), (torch.float8_e4m3fn, 256, False)):
        pages, constants = page_signature(dtype)
        scale = "constexpr" if normal else "*bf16"
        signature = {
            "q": "*bf16",
            "q_row": "i32",
            "k": "*bf16",
            "k_row": "i32",
            "v": "*bf16",
            "v_row": "i32",
            "q_norm": "*bf16",
            "k_norm": "*bf16",
            "eps": "fp32",
            "cos": "*fp32",
            "sin": "*fp32",
            "angle_stride": "i32",
            "key_scale": scale,
            "value_scale": scale,
            "q_out": "*bf16",
            **pages,
            **PLACE_SIGNATURE,
        }
        constants |= {
            "HEADS": 16,
            "GROUP": 4,
            "PLUS_ONE": True,
            "ROTARY": 64,
            "D": dim,
            "BLOCK_D": dim,
            "FP8": not normal,
            "TOKENS": TILE_TOKENS,
        }
        constants |= {"key_scale": None, "value_scale": None} if normal else {}
        signature |= dict.fromkeys(constants, "constexpr")
        variants.append(Compilation(f"attention_layer {dtype} {dim}", fused._place, signature, constants))
    return variants


def of_write_kv() -> list[Compilation]:
    variants = []
    for dtype, dim in ((torch.bfloat16, 64), (torch.float8_e4m3fn, 128), (torch.int8, 256)):
        pages, constants = page_signature(dtype)
        strides = dict.fromkeys(("k_token", "k_head", "v_token", "v_head"), "i32")
        constants |= {"D": dim, "BLOCK_D": dim, "FP8": dtype == torch.float8_e4m3fn, "TOKENS": writing.TILE_TOKENS}
        signature = {"k": "*bf16", "v": "*bf16", **strides, **pages, **PLACE_SIGNATURE}
        signature |= dict.fromkeys(constants, "constexpr")
        variants.append(Compilation(f"write_kv {dtype} {dim}", writing._write, signature, constants))
    return variants


def of_decode_kernels() -> list[Compilation]:
    return [
        compilation_of(
            "decode items",
            listing._items,
            {"context": "*i64", "items": "*i32"},
            {"WINDOW": 0, "SPLITS_MAX": 64, "PAGES": 4, "SPLIT_PAGES": 8, "BLOCK": listing.ROWS_AT_ONCE},
            Blocks(1),
        )
    ]
