"""States in 8 bits: against the naive twin, the bound on what is lost, and through slots and pages of an
arena."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ops.test_plain_ops import noise
from tests.support import naive_ops
from tests.support.arena_fills import fill_frames, fill_slots
from weft.memory.frames.plan import plan_arena, with_compression
from weft.runner.arena import NAN_BYTE, DeviceArena
from weft.spec import ModelSpec, attention, gated_delta, mamba1, mamba2
from weft.tensor.few_bits import decode_state, encode_state

SHAPES = [(3, 2, 4, 8), (2, 5, 16), (1, 1), (4, 1)]


def coded(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = torch.empty(state.shape, dtype=torch.int8), torch.empty(state.shape[:-1])
    encode_state(state, codes, scales)
    return codes, scales


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_scales_equal_their_formula(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    state = noise(*shape).to(dtype)
    codes, scales = coded(state)
    want_codes, want_scales = torch.empty_like(codes), torch.empty_like(scales)
    naive_ops.encode_state(state, want_codes, want_scales)
    torch.testing.assert_close(scales, want_scales, rtol=1e-6, atol=0)
    assert (codes.int() - want_codes.int()).abs().max() <= 1, "a tie may fall either way"
    torch.testing.assert_close(
        decode_state(codes, scales, dtype),
        naive_ops.decode_state(codes, scales, dtype),
        rtol=1e-6 if dtype == torch.float32 else 1e-2,
        atol=0,
    )


def test_no_number_is_off_by_more_than_half_a_scale_of_its_row() -> None:
    """Whatever the rows are: of zeros, tiny, huge, with one number that dwarfs the others."""
    state = noise(6, 32)
    state[0] = 0
    state[1] *= 1e-30
    state[2] *= 1e30
    state[3, 5] = 1e4
    codes, scales = coded(state)
    off = (decode_state(codes, scales, torch.float32) - state).abs()
    assert (off <= scales.unsqueeze(-1) * 0.5001).all()
    assert (codes.int().abs().amax(dim=-1) == torch.tensor([0, 127, 127, 127, 127, 127])).all()


def spec(*layers: object) -> ModelSpec:
    return ModelSpec("tests", 32, 64, 512, "bfloat16", (attention(1, 16), *layers))  # type: ignore[arg-type]


MODELS = {
    "gated delta": spec(gated_delta(2, 4, 16, 16, 4)),
    "mamba2": spec(mamba2(4, 16, 1, 32, 4)),
    "mamba1": spec(mamba1(64, 16, 4)),
}


def states_of(arena: DeviceArena, slot: int) -> dict[str, torch.Tensor]:
    return {name: part[slot].clone() for cache in arena.layer_caches(2) for name, part in cache.state.items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_state_comes_back_from_pages_that_lie_anywhere(name: str) -> None:
    """Two at once, into pages in no order, in an arena full of NaN; windows to the bit."""
    plan = with_compression(plan_arena(MODELS[name], 300_000), MODELS[name])
    arena = DeviceArena(plan, torch.device("cpu"))
    fill_frames(arena, range(plan.frame_count), NAN_BYTE)
    slots = [0, 1]
    for cache in arena.layer_caches(2):
        for part in cache.state.values():
            part[slots] = noise(2, *part.shape[1:]).to(part.dtype)
    before = [states_of(arena, slot) for slot in slots]
    each = plan.compressed_pages
    pages = np.arange(plan.page_count - 2 * each, plan.page_count, dtype=np.int32)[::-1].reshape(2, each)
    state_compressions = np.concatenate([np.array([slots], np.int32).T, pages], axis=1)
    arena.compress(state_compressions)
    fill_slots(arena, slots, NAN_BYTE)
    arena.restore(state_compressions)
    for slot, states in zip(slots, before, strict=True):
        found = states_of(arena, slot)
        assert torch.equal(found["conv"], states["conv"])
        off = (found["recurrent"] - states["recurrent"]).abs().amax(dim=-1)
        assert (off <= states["recurrent"].abs().amax(dim=-1) / 253).all()
        assert (off > 0).any()
    assert each > 1
    arena.restore(np.concatenate([state_compressions[:, :1], pages[:, ::-1]], axis=1))
    swapped = states_of(arena, 0)
    assert not torch.equal(swapped["recurrent"], found["recurrent"]), "pieces in another order go unnoticed"
