"""Every kernel beside torch, beside other libraries, and beside the machine's own ceiling, in one run.

    python -m benchmarks.kernels [--only GROUP ...] [the other flags of ``weft bench kernels``]

``weft bench kernels`` measures what the layers of a model compute. This adds what developers look at:

    small     norms, activations, rotary, writes of KV
    products  of weights in int4 and, on a GPU, in fp8; on Hopper inputs in fp8 too: torch's ``scaled_mm``
              from 1,024 rows on
    memory    zeroing of frames, copies of states and pages
    rivals    on a GPU, where installed: fla, FlashQLA and FlashInfer (gated delta rule), FlashInfer (attention)
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from weft.families.architecture import Architecture
from weft.families.mixers.attention import Attention
from weft.families.mixers.delta import GatedDelta
from weft.memory.frames.plan import plan_arena
from weft.runner.arena import DeviceArena
from weft.tensor.device import multiplies_fp8
from weft.tensor.ops.elementwise import rotary, silu_mul
from weft.tensor.ops.linear import weight_product
from weft.tensor.ops.norm import add_norm, rms_norm
from weft.tensor.ops.write_kv import write_kv
from weft.tensor.weights.quantized import PART, Codes, in_tiles
from weft.tensor.weights.rounded import rounded
from weft.units import PAGE_TOKENS, pages_for
from weft_tools.bench import kernels
from weft_tools.bench.kernels import Bench, Call, Case, pages_of, parts_of, size_of
from weft_tools.commands.bench_kernels import kernels_command

GROUPS = (*kernels.GROUPS, "small", "products", "memory")
ARENA_BYTES = 512 << 20
LIBRARY_ROWS = 1024
"""From so many on, torch's library multiplies."""
ITEMS_MAX = 16
"""Frames, states or pages of one call, if the arena has twice as many."""
_WORKSPACE_BYTES = 256 << 20


def cases_of(architecture: Architecture, bench: Bench, groups: tuple[str, ...]) -> Iterator[Case]:
    """Yields one case at a time, because all at once would not fit in memory. ``groups``: a subset of
    GROUPS."""
    yield from kernels.cases_of(architecture, bench, groups)
    if "small" in groups:
        yield from _small(architecture, bench)
    if "products" in groups:
        yield from _products(architecture, bench)
    if "memory" in groups:
        yield from memory_cases(architecture, bench)


def _small(architecture: Architecture, bench: Bench) -> Iterator[Case]:
    hidden = architecture.hidden_size
    width = next((getattr(feed, "width", 0) for feed in architecture.feed_forwards if feed), 0)
    attention = next(
        (part for mixer in architecture.mixers for part in parts_of(mixer) if isinstance(part, Attention)), None
    )
    for _, rows, tokens, before in bench.sizes():
        count = rows * tokens
        x, y, weight = bench.noise(count, hidden), bench.noise(count, hidden), bench.noise(hidden)
        yield Case(f"norm {count}", partial(rms_norm, x, weight, 1e-5), 2 * size_of(x))
        yield Case(f"add + norm {count}", partial(add_norm, x, y, weight, 1e-5), 4 * size_of(x))
        yield Case(f"gated norm {count}", partial(rms_norm, x, weight, 1e-5, gate=y), 3 * size_of(x))
        if width:
            gate_up = bench.noise(count, 2 * width)
            yield Case(f"silu x up {count}", partial(silu_mul, gate_up), 3 * size_of(gate_up) // 2)
        if attention is not None:
            yield from _around_attention(attention, bench, rows, tokens, before)


def _around_attention(of: Attention, bench: Bench, rows: int, tokens: int, before: int) -> Iterator[Case]:
    count, runs = rows * tokens, bench.runs(rows, tokens, before)
    q, k = bench.noise(count, of.heads, of.head_dim), bench.noise(count, of.kv_heads, of.head_dim)
    if of.rope is not None:
        angles = bench.uniform(count, of.rope.rotary_dim // 2).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        yield Case(f"rotary {count}", lambda: rotary(q, k, cos, sin), 2 * size_of(q, k))
    k_pages, v_pages = pages_of(bench, runs, of.kv_heads, of.head_dim)
    positions = (torch.arange(before, before + tokens).repeat(rows)).to(bench.device)
    yield Case(f"write k, v {count}", lambda: write_kv(k, k, k_pages, v_pages, positions, runs), 4 * size_of(k))


def _products(architecture: Architecture, bench: Bench) -> Iterator[Case]:
    """Of the attention's output: [hidden, hidden]."""
    width = architecture.hidden_size
    values = bench.noise(width, width) * width**-0.5
    weights = {"int4": in_tiles(rounded(values, 4))}
    if bench.device.type == "cuda":
        scales = bench.uniform(width, -(-width // PART)) + 0.5
        codes = Codes(8, values.to(torch.float8_e4m3fn).view(torch.uint8), scales, None, PART, fp8=True)
        weights["fp8"] = in_tiles(codes)
        if multiplies_fp8(bench.device):
            weights["fp8 x fp8"] = in_tiles(codes, byte_inputs=True)
    for count in dict.fromkeys((*(rows * tokens for _, rows, tokens, _ in bench.sizes()), LIBRARY_ROWS)):
        x = bench.noise(count, width)
        for form, weight in weights.items():
            yield Case(
                f"product {form} {count}",
                partial(weight_product, x, weight),
                2 * size_of(x) + size_of(weight.codes, weight.scales),
                2 * count * width**2,
            )


def memory_cases(architecture: Architecture, bench: Bench) -> Iterator[Case]:
    """The cases of an arena of ARENA_BYTES, all of them touched."""
    plan = plan_arena(architecture.spec(), ARENA_BYTES)
    arena = DeviceArena(plan, bench.device)
    arena.fill(range(plan.frame_count), plan.frame_bytes, 0)
    for count in dict.fromkeys((1, min(ITEMS_MAX, plan.frame_count))):
        yield Case(
            f"zero {count} x {plan.frame_bytes >> 10} KiB",
            partial(arena.fill, range(count), plan.frame_bytes, 0),
            count * plan.frame_bytes,
        )
    for what, copy, items, size in (
        ("state", arena.copy_slots, plan.slot_count, plan.slot_stride_bytes),
        ("page", arena.copy_pages, plan.page_count, plan.page_bytes),
    ):
        count = min(ITEMS_MAX, items // 2)
        if count:
            first = np.arange(count, dtype=np.int32)
            yield Case(
                f"copy {count} x {what} of {size >> 10} KiB", partial(copy, first, first + count), 2 * count * size
            )


def rivals_of(bench: Bench, of: object, rows: int, tokens: int, before: int, *tensors: torch.Tensor) -> dict[str, Call]:
    """For ``Bench.rivals``."""
    if isinstance(of, Attention):
        return attention_rivals(bench, of, rows, tokens, before)
    return delta_rivals(*tensors, rows=rows, tokens=tokens) if isinstance(of, GatedDelta) else {}


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def delta_rivals(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    *,
    rows: int,
    tokens: int,
) -> dict[str, Call]:
    """Chunked for prefill: fla, FlashQLA without its split by the batch, FlashInfer. For decodes fla's fused recurrent
    form. fla's chunked form needs as many key heads as value heads; they are repeated before the clock runs, and
    FlashInfer's q and k normalised, its decays made linear and its state turned."""
    if not q.is_cuda:
        return {}
    scale, state = q.shape[-1] ** -0.5, state.clone()
    shared = {"scale": scale, "output_final_state": True, "use_qk_l2norm_in_kernel": True}

    def shaped(*parts: torch.Tensor) -> list[torch.Tensor]:
        return [x.reshape(rows, tokens, *x.shape[1:]) for x in parts]

    repeated = [x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k)]
    function = "fused_recurrent_gated_delta_rule" if tokens == 1 else "chunk_gated_delta_rule"
    rivals = {
        "fla": of_library(
            "fla.ops.gated_delta_rule", function, *shaped(*repeated, v, g, beta), initial_state=state, **shared
        )
    }
    if tokens > 1:
        rivals["flash_qla"] = of_library(
            "flash_qla", function, *shaped(q, k, v, g, beta), initial_state=state, auto_cp=False, **shared
        )
        units = [torch.nn.functional.normalize(x.float(), dim=-1).to(x.dtype).contiguous() for x in (q, k)]
        rivals["flashinfer"] = of_library(
            "flashinfer.gdn_prefill",
            function,
            *units,
            v.contiguous(),
            g.exp().contiguous(),
            beta.float().contiguous(),
            scale,
            state.transpose(-1, -2).contiguous(),
            output_final_state=True,
            cu_seqlens=torch.arange(rows + 1, device=q.device) * tokens,
        )
    return {name: call for name, call in rivals.items() if installed(name)}


def of_library(module: str, function: str, *args: Any, **more: Any) -> Call:
    """A call of a library that is imported by the first one: what fails is then a refusal of this side."""
    return lambda: getattr(importlib.import_module(module), function)(*args, **more)


def attention_rivals(bench: Bench, of: Attention, rows: int, tokens: int, before: int) -> dict[str, Call]:
    """FlashInfer over pages of 16 tokens, without splits for prefill; and its prefill without pages."""
    if not (bench.device.type == "cuda" and installed("flashinfer")):
        return {}
    library: Any = importlib.import_module("flashinfer")
    width = pages_for(before + tokens)
    cache = bench.noise(rows * width, 2, PAGE_TOKENS, of.kv_heads, of.head_dim)
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=bench.device)
    first_pages = torch.arange(rows + 1, dtype=torch.int32, device=bench.device) * width
    pages = torch.randperm(rows * width).to(bench.device, torch.int32)
    in_last_page = torch.full((rows,), (before + tokens - 1) % PAGE_TOKENS + 1, dtype=torch.int32, device=bench.device)
    shared = {"q_data_type": bench.dtype, "kv_data_type": bench.dtype, "sm_scale": of.scale}
    table = (first_pages, pages, in_last_page)
    heads = (of.heads, of.kv_heads, of.head_dim, PAGE_TOKENS)
    q = bench.noise(rows * tokens, of.heads, of.head_dim)
    if tokens == 1:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(*table, *heads, **shared)
        return {"flashinfer": lambda: wrapper.run(q, cache)}
    k, v = (bench.noise(before + tokens, of.kv_heads, of.head_dim) for _ in range(2))
    paged = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    begins = torch.arange(rows + 1, dtype=torch.int32, device=bench.device) * tokens
    paged.plan(begins, *table, *heads, causal=True, disable_split_kv=True, **shared)
    return {
        "flashinfer": lambda: library.single_prefill_with_kv_cache(q, k, v, causal=True, sm_scale=of.scale),
        "flashinfer paged": lambda: paged.run(q, cache),
    }


command = kernels_command(GROUPS, cases_of, rivals_of)

if __name__ == "__main__":
    command(prog_name="python -m benchmarks.kernels")
