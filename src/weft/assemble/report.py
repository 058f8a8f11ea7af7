"""What the engine says of itself at its start: the layers, the weights, and the table of its memory."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from weft.info import MemoryRow
from weft.memory.frames.plan import ArenaPlan
from weft.spec import ModelSpec
from weft.units import format_bytes, pages_for

if TYPE_CHECKING:
    from weft.models.loading import LoadedModel


_RATE_BYTES_MIN = 256 << 20


def read_in_words(loaded: LoadedModel) -> str:
    """``1.2 GiB read and packed in 0.8 s, 1.5 GiB/s``. Small models have no rate: their seconds are the first
    use of the kernels, not reading."""
    words = f"{format_bytes(loaded.read_bytes)} read and packed in {loaded.read_s:.1f} s"
    if loaded.read_bytes < _RATE_BYTES_MIN:
        return words
    return f"{words}, {format_bytes(int(loaded.read_bytes / max(loaded.read_s, 1e-9)))}/s"


def layers_in_words(spec: ModelSpec) -> str:
    kinds = Counter(layer.kind for layer in spec.layers)
    return ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in kinds.items())


def memory_table(spec: ModelSpec, loaded: LoadedModel, arena: ArenaPlan,
                  max_model_len: int) -> list[MemoryRow]:
    kv_token_bytes = spec.kv_bytes_per_token(arena.kv_dtype)
    longest = pages_for(max_model_len) * arena.page_bytes + arena.slot_bytes
    kinds = " or ".join(f"{count} {noun}{'s' if count > 1 else ''}" for count, noun in
                        ((arena.pages_per_frame, "KV page"), (arena.slots_per_frame, "state")) if count)
    compressed = []
    if arena.compressed_pages:
        compressed.append(MemoryRow("a compressed state", arena.compressed_bytes,
                                    f"in {arena.compressed_pages} KV pages, 8 bits"))
    if arena.compressed_kv_bytes:
        compressed.append(MemoryRow("a token's compressed KV", arena.compressed_kv_bytes // arena.page_tokens,
                                    f"{arena.compressed_kv_dtype}, while no sequence reads it"))
    return [
        MemoryRow("weights", loaded.weights_bytes, f"{loaded.weights_form}; {read_in_words(loaded)}"),
        MemoryRow("arena", arena.arena_bytes,
                  f"{arena.frame_count} frames of {format_bytes(arena.frame_bytes)}, each {kinds}"),
        MemoryRow("a token's KV", kv_token_bytes,
                  f"{len(spec.attention_layers)} attention layers, {arena.kv_dtype}"),
        MemoryRow("a sequence's state", arena.slot_bytes,
                  f"{len(spec.recurrent_layers)} recurrent layers, {spec.state_dtype}"),
        *compressed,
        MemoryRow("longest sequence", longest, f"{max_model_len} tokens"),
    ]
