"""Variants of the runner's kernels: the arena, compressed rows, sampling."""

from __future__ import annotations

import triton.language as tl

from tests.support.kernel_variants.compilation import Compilation, compilation_of
from weft.runner import arena_kernels as arena
from weft.runner import compressed_kv_kernels as compressed
from weft.runner import sampling_kernels as sampling
from weft.units import PAGE_TOKENS


def of_arena_kernels() -> list[Compilation]:
    """Return the variants of a GPU: ids of 64 bits, accumulators in each dtype, rows of 16 and of 128."""
    filling = {"words": "*i64", "items": "*i64", "value": "i32", "item_words": "i32", "BLOCK": "constexpr"}
    kernels = [Compilation("fill", arena._fill_kernel, filling, {"BLOCK": arena.BLOCK_WORDS})]
    ids = {
        "sources": "*i64",
        "source_items": "*i64",
        "targets": "*i64",
        "target_items": "*i64",
        "item_words": "i32",
        "words": "i32",
    }
    ids |= dict.fromkeys(("FROM_SCRATCH", "TO_SCRATCH", "BLOCK"), "constexpr")
    kernels += [
        Compilation(
            f"copy from_scratch={in_} to_scratch={out}",
            arena._copy_kernel,
            ids,
            {"FROM_SCRATCH": in_, "TO_SCRATCH": out, "BLOCK": arena.BLOCK_WORDS},
        )
        for in_, out in ((False, False), (False, True), (True, False))
    ]
    compression = {
        "arena": "*u8",
        "states": "*i64",
        "states_stride": "i32",
        "pieces": "*i64",
        "page_bytes": "i32",
        "slot_bytes": "i32",
    }
    compression |= dict.fromkeys(("STATE", "UNIT", "UNIT_BYTES", "RESTORE", "ROWS", "COLUMNS"), "constexpr")
    for dtype, columns in (("float32", 128), ("bfloat16", 128), ("float16", 128), ("float32", 16)):
        for restore in (False, True):
            verb = "restore" if restore else "compress"
            kernels.append(
                Compilation(
                    f"{verb} {dtype} rows of {columns}",
                    arena._compress_kernel,
                    compression,
                    {
                        "STATE": arena._TL_TYPES[dtype],
                        "UNIT": tl.int32,
                        "UNIT_BYTES": 4,
                        "RESTORE": restore,
                        "ROWS": arena.PIECE_NUMBERS // columns,
                        "COLUMNS": columns,
                    },
                )
            )
    return kernels


def of_compressed_kv_kernels() -> list[Compilation]:
    """Return the variants of a GPU: compression from each dtype of KV, and restoring."""
    coding = {
        "arena": "*u8",
        "records": "*i64",
        "scratch": "*u8",
        "blocks": "*i64",
        "page_bytes": "i32",
        "record_bytes": "i32",
    }
    coding |= dict.fromkeys(("NUMBER", "TOKENS", "CHANNELS", "RESTORE"), "constexpr")
    nibbles = {name: kind for name, kind in coding.items() if name != "CHANNELS"}
    nibbles |= dict.fromkeys(("ROWS", "PAIRS", "AS_K"), "constexpr")
    placing = {
        "words": "*i64",
        "records": "*i64",
        "scratch": "*i64",
        "page_words": "i32",
        "record_words": "i32",
        "GATHER": "constexpr",
        "BLOCK": "constexpr",
    }
    kernels = []
    for restore in (False, True):
        verb = "restore" if restore else "compress"
        kernels.append(
            Compilation(
                f"{verb} kv, place",
                compressed._place_kernel,
                placing,
                {"GATHER": restore, "BLOCK": compressed.BLOCK_WORDS},
            )
        )
        for dtype, channels in (("bfloat16", 256), ("float16", 128), ("float32", 64)):
            kernels.append(
                Compilation(
                    f"{verb} kv of {dtype}, {channels} channels",
                    compressed._code_kernel,
                    coding,
                    {
                        "NUMBER": compressed._TL_TYPES[dtype],
                        "TOKENS": PAGE_TOKENS,
                        "CHANNELS": channels,
                        "RESTORE": restore,
                    },
                )
            )
            kernels += [
                Compilation(
                    f"{verb} {'k' if as_k else 'v'} of {dtype} in 4 bits, {channels} channels",
                    compressed._nibble_kernel,
                    nibbles,
                    {
                        "NUMBER": compressed._TL_TYPES[dtype],
                        "TOKENS": PAGE_TOKENS,
                        "AS_K": as_k,
                        **compressed.nibble_tile(channels, as_k=as_k),
                        "RESTORE": restore,
                    },
                )
                for as_k in (True, False)
            ]
    return kernels


def of_sampling_kernels() -> list[Compilation]:
    pointers = {
        "logits": "*fp32",
        "numbers": "*fp64",
        "part_best": "*fp32",
        "histograms": "*i64",
        "part_mass": "*i64",
        "chosen": "*i64",
    }
    unread = pointers | {"numbers": "*fp32", "histograms": "*fp32", "part_mass": "*fp32"}
    variants = []

    def add(name: str, kernel: object, types: dict[str, str], **constants: bool | int) -> None:
        parts = {} if kernel is sampling._part_best else {"PARTS_PADDED": 64}
        sizes = {"BLOCK": sampling.CHOOSE.width} | parts
        variants.append(compilation_of(name, kernel, types, constants | sizes, sampling.CHOOSE))

    for masked in (True, False):
        add("part best", sampling._part_best, pointers, MASKED=masked)
        add("pick greedy", sampling._pick, unread, DRAWS=False, TOP_K=False, TOP_P=False, MASKED=masked)
        add("histogram top-k", sampling._histogram, pointers, MASS=False, TOP_K=True, MASKED=masked)
        for top_k in (True, False):
            add("histogram top-p", sampling._histogram, pointers, MASS=True, TOP_K=top_k, MASKED=masked)
            for top_p in (True, False):
                add("part mass", sampling._part_mass, pointers, TOP_K=top_k, TOP_P=top_p, MASKED=masked)
                add("pick drawn", sampling._pick, pointers, DRAWS=True, TOP_K=top_k, TOP_P=top_p, MASKED=masked)
    return variants
