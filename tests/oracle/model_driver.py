"""Drives a model without any engine: caches as plain tensors, steps from lists of runs.

Each sequence owns a slot and a row of pages, handed out in a scrambled order so that nothing works by
being contiguous. All memory starts as NaN: a model that reads what nobody wrote shows it at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from weft.models.decoder import CausalModel
from weft.spec import ModelSpec
from weft.tensor import gpu
from weft.tensor.inputs import LayerCache, Runs, StepInputs
from weft.tensor.layout import DTYPES, k_block_shape, v_block_shape
from weft.tensor.scratch import scratch
from weft.units import PAD, PAGE_TOKENS, pages_for

CPU = torch.device("cpu")


@dataclass
class Sequence:
    """``tokens`` computed so far; the slot and pages it writes."""

    slot: int
    pages: list[int]
    tokens: list[int] = field(default_factory=list)


class ModelDriver:
    """``sequences`` sequences of up to ``length`` tokens over one model."""

    def __init__(self, model: CausalModel, *, sequences: int, length: int) -> None:
        self.model = model
        per_row = pages_for(length)
        order = torch.randperm(sequences * per_row, generator=torch.Generator().manual_seed(0)).tolist()
        self.sequences = [
            Sequence(slot=sequences - 1 - i, pages=order[i * per_row : (i + 1) * per_row]) for i in range(sequences)
        ]
        self.device = model.embedding.device
        self.caches = nan_caches(model.spec, pages=sequences * per_row, slots=sequences, device=self.device)

    @torch.inference_mode()
    def step(self, *pieces: tuple[int, list[int]], pads: int = 0) -> list[torch.Tensor]:
        """Compute each (sequence index, its next tokens); decodes (one token, not the first) must come
        first. ``pads`` PAD rows follow the decodes. -> float32 [tokens, vocab] of each piece."""
        inputs = self._inputs(pieces, pads)
        scratch.device = self.device  # an engine in this thread may have left its own
        hidden = self.model.forward(inputs, self.caches)
        assert hidden.isfinite().all(), "an output that is not finite"
        logits = self.model.logits(hidden)
        decodes = inputs.runs.decode_count - pads
        kept = [r for r in range(inputs.runs.run_count) if not decodes <= r < decodes + pads]
        for index, tokens in pieces:
            self.sequences[index].tokens.extend(tokens)
        return [logits[inputs.runs.offsets[r] : inputs.runs.offsets[r] + inputs.runs.lengths[r]].cpu() for r in kept]

    def _inputs(self, pieces: tuple[tuple[int, list[int]], ...], pads: int) -> StepInputs:
        decodes = sum(len(tokens) == 1 and bool(self.sequences[i].tokens) for i, tokens in pieces)
        rows: list[tuple[int, int, list[int], list[int]]] = []  # slot, start, tokens, pages
        for index, tokens in pieces:
            owner = self.sequences[index]
            rows.append((owner.slot, len(owner.tokens), tokens, owner.pages))
        rows[decodes:decodes] = [(PAD, PAD, [0], [])] * pads
        lengths = [len(tokens) for _, _, tokens, _ in rows]
        starts = [start for _, start, _, _ in rows]
        offsets = [sum(lengths[:r]) for r in range(len(rows))]
        width = max((len(pages) for *_, pages in rows), default=1)
        table = torch.full((len(rows), width), PAD, dtype=torch.int32)
        for r, (_, start, tokens, pages) in enumerate(rows):
            used = pages[: pages_for(start + len(tokens))] if start != PAD else []
            table[r, : len(used)] = torch.tensor(used, dtype=torch.int32)
        runs = Runs(
            offsets=offsets,
            starts=starts,
            lengths=lengths,
            slots=[slot for slot, *_ in rows],
            fresh=[start == 0 for start in starts],
            decode_count=decodes + pads,
            starts_R=self._ids(starts),
            slots_R=self._ids([slot for slot, *_ in rows]),
            context_R=self._ids(
                [start + length if start != PAD else 0 for start, length in zip(starts, lengths, strict=True)]
            ),
            page_table_RP=table.to(self.device),
        )
        positions = [
            position
            for start, length in zip(starts, lengths, strict=True)
            for position in (range(start, start + length) if start != PAD else [PAD])
        ]
        return StepInputs(
            tokens_T=self._ids([t for _, _, tokens, _ in rows for t in tokens]),
            positions_T=self._ids(positions),
            runs=runs,
        )

    def _ids(self, ids: list[int]) -> torch.Tensor:
        return torch.tensor(ids, device=self.device)


def nan_caches(spec: ModelSpec, *, pages: int, slots: int, device: torch.device = CPU) -> list[LayerCache]:
    """Caches of all layers, filled with NaN."""
    dtype = DTYPES[spec.dtype]
    caches = []
    for layer in spec.layers:
        cache = LayerCache()
        if layer.kv_heads:
            k_shape, v_shape = (
                shape(layer.kv_heads, layer.head_dim, dtype, gpu.page_layout(device))
                for shape in (k_block_shape, v_block_shape)
            )
            cache.k = torch.full((pages, *k_shape), torch.nan, dtype=dtype, device=device)
            if layer.has_values:
                cache.v = torch.full((pages, *v_shape), torch.nan, dtype=dtype, device=device)
        for part in layer.state:
            cache.state[part.name] = torch.full(
                (slots, *part.shape), torch.nan, dtype=DTYPES[part.dtype_in(spec.dtype)], device=device
            )
        caches.append(cache)
    return caches


def page_of(sequence: Sequence, position: int) -> int:
    return sequence.pages[position // PAGE_TOKENS]
