"""What is taken is of use: the promise of frames, on published geometries (benchmarks/useful_bytes.py)."""

from __future__ import annotations

import pytest

from benchmarks.useful_bytes import MODELS, churned, cost_over_exact, new, stuck
from weft.memory.frames.plan import plan_arena

FRAMES = {"LFM2-1.2B": 800}
"""Of the arenas below; its frames are small and many."""


def memory_of(name: str, frames: int) -> int:
    spec, memory_bytes = MODELS[name]
    return FRAMES.get(name, frames) * plan_arena(spec, memory_bytes).frame_bytes


@pytest.mark.parametrize("tokens", [128, 2048, 32_768, 262_144])
@pytest.mark.parametrize("name", list(MODELS))
def test_memory_that_is_full_is_over_98_percent_useful(name: str, tokens: int) -> None:
    spec, memory_bytes = MODELS[name]
    full = new(spec, memory_bytes if tokens > 2048 else memory_of(name, 150), tokens)
    assert full.lengths
    assert full.useful_share_of_taken > 0.98
    full.fill_up(tokens)
    assert full.useful_share > 0.98, "of the whole arena, frames that are left over among it"


@pytest.mark.parametrize("tokens", [128, 2048])
@pytest.mark.parametrize("name", list(MODELS))
def test_it_is_so_again_when_sequences_of_all_lengths_have_come_and_gone(name: str, tokens: int) -> None:
    spec, _ = MODELS[name]
    full = churned(spec, memory_of(name, 150), tokens, rounds=5)
    assert full.useful_share > 0.98
    assert full.moved_share < 0.01, "and that costs few copies"


def test_without_moving_anything_it_would_not_be() -> None:
    spec, _ = MODELS["Jamba-1.5-mini"]
    assert stuck(spec, memory_of("Jamba-1.5-mini", 150), 128, rounds=5).useful_share < 0.95


@pytest.mark.parametrize("name", list(MODELS))
def test_a_request_of_100_tokens_costs_at_most_2_percent_over_its_exact_bytes(name: str) -> None:
    """Or the rest of its last page, where the state weighs next to nothing: 112 tokens for 100 are 12 % of
    LFM2's KV. To the page it is exact there too."""
    spec, memory_bytes = MODELS[name]
    assert cost_over_exact(spec, memory_bytes, 112 if name == "LFM2-1.2B" else 100) < 0.02
