"""Launch parameters of the Triton kernels, timed on this GPU: block sizes, warps, stages, pages, splits.

    python -m benchmarks.gpu_tune [--only "attention decode"] [--compile I N]

    group     one kernel of one released geometry, at one size
    variant   its parameters; the first is what weft takes by itself

        ## delta recurrent 256: first 298.5 us
              277.2  (width=32, warps=1, stages=1)   gap 0.0025
                                     the largest difference from the first, over its largest number

A time is the median of replays of a graph, so the host does not count. Each variant computes the same numbers
and is compared: a compiler may be wrong about some tiles. A variant that ends the GPU's context ends the run,
with its name; ``--without`` leaves its group out. ``--compile 0 8`` to ``7 8``, side by side, fill Triton's
cache first: compiling takes a second or two for each variant.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_parts import tensors_of
from benchmarks.kernels import cases_of
from weft.families import read_architecture
from weft.planning.geometries import find_geometry
from weft.tensor import gpu
from weft.tensor.gpu.launch import Blocks
from weft_tools.bench.kernels import Bench, Case

CONTEXT = 2048
LONG = (1024, 8192)
QWEN, NEMOTRON, LFM2, EXPERTS = "Qwen3.5-4B", "Nemotron-H-8B", "LFM2-1.2B", "Qwen3.5-35B-A3B"


@dataclass(frozen=True)
class Group:
    """``apply(variant)`` has the process launch with it; None is what weft takes."""

    name: str
    geometry: str
    op: str
    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    apply: Callable[[Any], None]
    variants: tuple[Any, ...]
    form: str = ""
    """Of the weights: the case has it in its name."""

    def case(self) -> Case:
        torch.manual_seed(0)
        geometry = find_geometry(self.geometry)
        assert geometry is not None
        bench = Bench(torch.device("cuda"), torch.bfloat16, self.rows, self.tokens, CONTEXT)
        cases = cases_of(read_architecture(geometry.config), bench, (self.op,))
        return next(case for case in cases if f"{self.form} " in case.name)


def groups() -> Iterator[Group]:
    from weft.tensor.kernels import causal_conv, delta_rule, mamba2, moe, paged_attention, quantized_linear

    def blocks(module: Any, name: str) -> Callable[[Any], None]:
        own = getattr(module, name)
        return lambda variant: setattr(module, name, variant or own)

    def sizes(*each: tuple[int, int, int]) -> tuple[Blocks | None, ...]:
        return (None, *(Blocks(width, warps=warps, stages=stages) for width, warps, stages in each))

    one_row = sizes((32, 4, 1), (16, 1, 1), (16, 2, 1), (32, 2, 1), (64, 4, 1), (64, 8, 1))
    for rows in (16, 64, 256):
        yield Group(f"delta recurrent {rows}", QWEN, "delta", (rows,), (), blocks(delta_rule, "RECURRENT"), one_row)
        yield Group(f"mamba2 recurrent {rows}", NEMOTRON, "mamba2", (rows,), (), blocks(mamba2, "RECURRENT"), one_row)
        yield from _attention_decodes(paged_attention, rows)
        experts = partial(_function, moe, "product_blocks", moe.product_blocks)
        yield Group(
            f"experts {rows}",
            EXPERTS,
            "experts",
            (rows,),
            (),
            experts,
            sizes((32, 4, 4), (64, 4, 3), (64, 4, 4), (64, 8, 3), (128, 4, 3), (128, 8, 3)),
        )
        for form in ("int8", "int4", "fp8"):
            yield Group(
                f"product {form} {rows}",
                QWEN,
                "products",
                (rows,),
                (),
                partial(_function, quantized_linear, "blocks_of", quantized_linear.blocks_of),
                _product_sizes(rows),
                form,
            )
    for tokens in LONG:
        yield Group(
            f"delta chunks {tokens}",
            QWEN,
            "delta",
            (),
            (tokens,),
            blocks(delta_rule, "CHUNKS"),
            sizes((16, 4, 1), (16, 4, 3), (32, 4, 1), (32, 4, 2)),
        )
        yield Group(
            f"delta prepare {tokens}",
            QWEN,
            "delta",
            (),
            (tokens,),
            blocks(delta_rule, "PREPARE_HEADS"),
            sizes((64, 2, 1), (64, 8, 1)),
        )
        yield Group(
            f"conv {tokens}",
            QWEN,
            "conv",
            (),
            (tokens,),
            blocks(causal_conv, "TOKENS"),
            sizes((64, 8, 1), (128, 8, 1), (32, 4, 1), (32, 2, 1)),
        )
        for name, own in (("states", mamba2.states_blocks), ("outputs", mamba2.outputs_blocks)):
            yield Group(
                f"mamba2 {name} {tokens}",
                NEMOTRON,
                "mamba2",
                (),
                (tokens,),
                partial(_function, mamba2, f"{name}_blocks", own),
                sizes((32, 4, 1), (32, 4, 2), (64, 4, 1), (64, 8, 1))
                if name == "states"
                else sizes((64, 4, 2), (64, 8, 1)),
            )
        yield from _attention_prompts(paged_attention, tokens)


def _function(module: Any, name: str, own: Callable[..., Any], variant: Any) -> None:
    """The function ``name`` returns ``variant``, whatever it is asked."""
    setattr(module, name, own if variant is None else lambda *of, **more: variant)


def _product_sizes(rows: int) -> tuple[Any, ...]:
    """(rows of a tile, its columns with warps and stages, columns of x at once) of a product with codes."""
    tile = 16 if rows <= 16 else 64
    each = ((32, 4, 3), (32, 4, 5), (64, 4, 3), (64, 4, 4), (64, 8, 3), (128, 8, 3))
    sized = [(Blocks(width, warps=warps, stages=stages), depth) for width, warps, stages in each for depth in (64, 128)]
    return (None, *((tile, blocks, depth) for blocks, depth in sized))


def _attention_decodes(paged: Any, rows: int) -> Iterator[Group]:
    """Variants (pages, warps, stages, least tokens of a split)."""
    own_blocks, own_splits = paged.decode_blocks, paged.split_tokens

    def apply(variant: tuple[int, int, int, int] | None) -> None:
        paged.decode_blocks, paged.split_tokens = own_blocks, own_splits
        if variant is not None:
            pages, warps, stages, split = variant
            paged.split_tokens = lambda *of: split
            paged.decode_blocks = lambda *of: {"PAGES": pages, "ROWS": 16, "num_warps": warps, "num_stages": stages}

    for geometry, dim in ((QWEN, 256), (NEMOTRON, 128), (LFM2, 64)):
        each = [
            (pages, 4, stages, split)
            for pages in (2, 4, 8)
            for stages in (2, 3)
            for split in (128, 256, 512)
            if pages * dim <= 1024
        ]
        yield Group(f"attention decode {dim} {rows}", geometry, "attention", (rows,), (), apply, (None, *each))


def _attention_prompts(paged: Any, tokens: int) -> Iterator[Group]:
    """Variants (heads, pages, warps, stages)."""
    own = paged.prefill_blocks

    def apply(variant: tuple[int, int, int, int] | None) -> None:
        paged.prefill_blocks = own
        if variant is not None:
            heads, pages, warps, stages = variant
            paged.prefill_blocks = lambda *of: {
                "TOKENS": 64,
                "TILE_HEADS": heads,
                "PAGES": pages,
                "num_warps": warps,
                "num_stages": stages,
            }

    for geometry, dim in ((QWEN, 256), (NEMOTRON, 128), (LFM2, 64)):
        each = [(1, 4, 4, 2), (1, 4, 8, 2), (2, 2, 8, 2), (2, 2, 8, 3), (2, 4, 8, 2), (2, 4, 8, 3)]
        yield Group(f"attention prompt {dim} {tokens}", geometry, "attention", (), (tokens,), apply, (None, *each))


def timed(group: Group) -> list[tuple[float, str, float]]:
    """(microseconds, variant, gap) of each that runs, the first first."""
    from triton.testing import do_bench_cudagraph

    first, rows = None, []
    for variant in group.variants:
        group.apply(variant)
        try:
            case = group.case()
            found = case.call()
            [output] = tensors_of(found)[:1]
            output = output.float().clone()
            torch.cuda.synchronize()
            first = output if first is None else first
            gap = float((output - first).abs().max() / first.abs().max())
            time_us = do_bench_cudagraph(case.call, rep=8, return_mode="median") * 1e3
            rows.append((time_us, str(variant), gap))
        except Exception as error:  # it does not fit, say
            print(f"   {group.name} {variant}: {str(error)[:90]}", flush=True)
            if "illegal" in str(error):
                sys.exit(f"{group.name} {variant} ended the GPU's context")
    group.apply(None)
    return rows


def compile_part(chosen: Sequence[Group], part: int, parts: int) -> None:
    every = [(group, variant) for group in chosen for variant in group.variants]
    for group, variant in every[part::parts]:
        group.apply(variant)
        try:
            group.case().call()
        except Exception as error:  # the timing says so again
            print(f"{group.name} {variant}: {str(error)[:90]}", flush=True)
        group.apply(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="groups with this in their name")
    parser.add_argument("--without", default="no group", help="none with this in its name")
    parser.add_argument("--compile", type=int, nargs=2, metavar=("I", "N"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU")
    gpu.choose("triton")
    chosen = [one for one in groups() if args.only in one.name and args.without not in one.name]
    with torch.inference_mode():
        if args.compile:
            compile_part(chosen, *args.compile)
            return
        for group in chosen:
            rows = timed(group)
            print(f"## {group.name}: first {rows[0][0]:.1f} us" if rows else f"## {group.name}: none ran")
            for time_us, variant, gap in sorted(rows):
                print(f"   {time_us:10.1f}  {variant.removeprefix('Blocks')}   gap {gap:.2g}", flush=True)


if __name__ == "__main__":
    main()
