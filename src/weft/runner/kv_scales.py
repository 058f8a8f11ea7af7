"""Head scales for fp8 KV, from the checkpoint or measured on the model.

    checkpoint     k_scale, v_scale of a layer (a number for all heads, or one for each)
    measured       one prefill of PROBE_TOKENS tokens over float32 pages; the largest |k| and |v| of each head
                   is 1 / HEADROOM of fp8's largest number

A scale is a power of two (see ``tensor.few_bits``). The probe needs no data: a fixed rule picks its tokens from the
vocabulary, so a model has the same scales in every process on one machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch

from weft.spec import LayerSpec, ModelSpec
from weft.tensor import gpu
from weft.tensor.inputs import LayerCache, Runs, StepInputs
from weft.tensor.layout import DTYPES, k_block_shape, unpack_k, unpack_v, v_block_shape
from weft.units import pages_for

PROBE_TOKENS = 256
FP8_MAX = 448.0
HEADROOM = 8.0
SCALE_MIN, SCALE_MAX = 2.0**-10, 2.0**10
"""Bounds of a scale: beyond them a query times a scale could leave float16."""


class Model(Protocol):
    """A model of ``weft.models``."""

    @property
    def spec(self) -> ModelSpec: ...

    def forward(self, inputs: StepInputs, caches: list[LayerCache]) -> torch.Tensor:
        """Return hidden [T, D] of the step's tokens, [X, D] if ``inputs.output_rows`` names rows; writes KV and states
        through ``caches``.
        """

    def logits(self, hidden_XD: torch.Tensor, out_XV: torch.Tensor | None = None) -> torch.Tensor:
        """Return float32 [X, vocab]. A caller may give ``out_XV`` as memory for them; a model may ignore it."""


Scales = dict[int, torch.Tensor]
"""Layer -> float32 [K and V, kv_heads], powers of two; one row if a layer has no values of its own."""


def head_scales(
    model: Model, from_checkpoint: Mapping[int, torch.Tensor], device: torch.device | None = None
) -> Scales:
    """Return the scales of every layer of ``model`` that keeps keys. ``from_checkpoint``: as Scales, any positive
    numbers; ``device``: the model's device, the CPU by default. The scales are on the CPU.
    """
    layers = [i for i, layer in enumerate(model.spec.layers) if layer.cached_heads]
    scales = {i: _power_of_two(scale) for i, scale in from_checkpoint.items() if i in layers}
    if len(scales) < len(layers):
        largest = _measured(model, device)
        scales = {i: _power_of_two(most * HEADROOM / FP8_MAX) for i, most in largest.items()} | scales
    return scales


def _power_of_two(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` rounded up to powers of two; 1 for a head of zeros."""
    exact = torch.where((x > 0) & x.isfinite(), x.double(), 1.0)
    return exact.log2().ceil().exp2().clamp(SCALE_MIN, SCALE_MAX).float()


@torch.inference_mode()
def _measured(model: Model, device: torch.device | None) -> Scales:
    """Return the largest |k| and |v| of each head of each layer over the probe."""
    spec, count = model.spec, min(PROBE_TOKENS, model.spec.max_positions)
    caches = [_wide_cache(i, layer, spec, device) for i, layer in enumerate(spec.layers)]
    model.forward(one_prompt(count, spec.vocab_size, device), caches)
    return {i: _largest(cache).cpu() for i, cache in enumerate(caches) if spec.layers[i].cached_heads}


def one_prompt(count: int, vocab_size: int, device: torch.device | None = None, *, first_page: int = 0) -> StepInputs:
    """Return the inputs of a step that computes ``count`` tokens of one new sequence, in pages from ``first_page`` on
    and in slot 0: tokens from all over the vocabulary.
    """
    tokens_T = torch.arange(count, dtype=torch.int64, device=device) * _stride(vocab_size) % vocab_size
    pages = range(first_page, first_page + pages_for(count))
    page_table_RP = torch.tensor([list(pages)], dtype=torch.int32, device=device)
    nothing = torch.zeros(1, dtype=torch.int64, device=device)
    runs = Runs(
        offsets=[0],
        starts=[0],
        lengths=[count],
        slots=[0],
        fresh=[True],
        decode_count=0,
        starts_R=nothing,
        slots_R=nothing,
        context_R=nothing + count,
        page_table_RP=page_table_RP,
        padded=True,
    )
    return StepInputs(tokens_T, torch.arange(count, device=device), runs)


def _stride(vocab_size: int) -> int:
    """Return a stride that visits the complete vocabulary: about 0.618 of its size, and prime to that."""
    step = max(1, int(vocab_size * 0.618))
    while math.gcd(step, vocab_size) > 1:
        step += 1
    return step


def _wide_cache(index: int, layer: LayerSpec, spec: ModelSpec, device: torch.device | None) -> LayerCache:
    """Return zeros for one sequence: pages and rings in float32, other states as they are."""
    cache, pages = LayerCache(layer=index), pages_for(PROBE_TOKENS)
    heads, dim, layout = layer.kv_heads, layer.head_dim, gpu.page_layout(device or torch.device("cpu"))
    if heads:
        cache.k = torch.zeros(pages, *k_block_shape(heads, dim, torch.float32, layout), device=device)
        if layer.has_values:
            cache.v = torch.zeros(pages, *v_block_shape(heads, dim, torch.float32, layout), device=device)
    for part in layer.state:
        # Like the pages: the probe sees keys and values before any rounding.
        dtype = torch.float32 if part.name == "window" else DTYPES[part.dtype_in(spec.dtype)]
        cache.state[part.name] = torch.zeros(1, *part.shape, dtype=dtype, device=device)
    return cache


def _largest(cache: LayerCache) -> torch.Tensor:
    rings = [ring_S2HWD[0].abs().amax(dim=(2, 3)) for name, ring_S2HWD in cache.state.items() if name == "window"]
    parts = [] if cache.k is None else [unpack_k(cache.k)]
    parts += [] if cache.v is None else [unpack_v(cache.v)]
    pages = [torch.stack([x_THD.abs().amax(dim=(0, 2)) for x_THD in parts])] if parts else []
    return torch.stack([*rings, *pages]).amax(0)  # a layer with both has one scale for them
