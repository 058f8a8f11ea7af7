"""Rows in 4 bits: against the naive twin, the bound on what is lost, and pages of an arena that go there and
back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ops.test_plain_ops import noise
from tests.support import naive_ops
from weft.memory.arena_work import CompressKv, KvForm
from weft.memory.frames.plan import ArenaPlan, plan_arena
from weft.memory.values import NodeId
from weft.runner.arena import DeviceArena
from weft.spec import DTypeName, ModelSpec, attention, mamba1
from weft.tensor.few_bits import decode_nibbles, encode_nibbles
from weft.units import PAGE_TOKENS, PageId, ceil_div

SHAPES = [(3, 2, 4, 8), (2, 5, 16), (1, 2), (4, 2)]


def coded(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty(*wide.shape[:-1], wide.shape[-1] // 2, dtype=torch.uint8)
    bounds = torch.empty(*wide.shape[:-1], 2, dtype=torch.bfloat16)
    encode_nibbles(wide, codes, bounds)
    return codes, bounds


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_bounds_equal_their_formula(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    wide = noise(*shape).to(dtype)
    codes, bounds = coded(wide)
    want_codes, want_bounds = torch.empty_like(codes), torch.empty_like(bounds)
    naive_ops.encode_nibbles(wide, want_codes, want_bounds)
    assert torch.equal(bounds, want_bounds)
    low_apart = ((codes % 16).int() - (want_codes % 16).int()).abs().max()
    high_apart = ((codes // 16).int() - (want_codes // 16).int()).abs().max()
    assert max(low_apart, high_apart) <= 1, "a tie may fall either way"
    torch.testing.assert_close(
        decode_nibbles(codes, bounds, torch.float32),
        naive_ops.decode_nibbles(codes, bounds, torch.float32),
        rtol=1e-5,
        atol=1e-6,
    )


def test_no_number_is_off_by_more_than_half_a_step_and_what_the_bounds_are_rounded_by() -> None:
    """Whatever the rows are: equal numbers, tiny, huge, far from zero, with one that dwarfs the others."""
    wide = noise(6, 32)
    wide[0] = 3.0
    wide[1] *= 1e-30
    wide[2] *= 1e30
    wide[3] += 100
    wide[4, 5] = 1e4
    codes, bounds = coded(wide)
    off = (decode_nibbles(codes, bounds, torch.float32) - wide).abs()
    rounded = wide.abs().amax(dim=-1) * 2**-7
    assert (off.amax(dim=-1) <= bounds[:, 1].float() * 0.51 + rounded).all()
    assert off[0].max() == 0
    assert off[3].max() < 1, "a channel far from zero keeps its steps"


def kv_plan(dtype: DTypeName) -> ArenaPlan:
    spec = ModelSpec("tests", 32, 64, 512, dtype, (attention(2, 16), mamba1(64, 16, 4), attention(1, 32)))
    return plan_arena(spec, 300_000, compress=True, compress_kv="int4")


def records_of(plan: ArenaPlan, pages: tuple[int, ...]) -> np.ndarray:
    form = KvForm(plan.page_bytes, plan.compressed_kv_bytes)
    compressed_count = ceil_div(len(pages) * form.record_bytes, form.page_bytes)
    return CompressKv(NodeId(1), tuple(map(PageId, pages)), compressed_count, form).ids


def parts_of(arena: DeviceArena) -> list[torch.Tensor]:
    return [part for cache in arena.layer_caches(3) for part in (cache.k, cache.v) if part is not None]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_pages_come_back_from_where_they_were_compressed_as_their_rows_say(dtype: DTypeName) -> None:
    """Each channel of K and each token of V comes back as it does alone; pages outside the group stay
    as they are."""
    plan = kv_plan(dtype)
    arena = DeviceArena(plan, torch.device("cpu"))
    arena.buffer.zero_()
    for part in parts_of(arena):
        part.copy_(noise(*part.shape))
    was = [part.clone() for part in parts_of(arena)]
    pages = (3, 0, 5, 1, 7)
    records = records_of(plan, pages)
    arena.compress_kv(records)
    assert not torch.equal(parts_of(arena)[0][3], was[0][3])
    arena.restore_kv(records[::-1].copy())
    other = [page for page in range(plan.page_count) if page not in pages]
    for number, (now, before) in enumerate(zip(parts_of(arena), was, strict=True)):
        assert torch.equal(now[other], before[other])
        is_k = number % 2 == 0
        rows = _rows(before, is_k)[list(pages)]
        expected = decode_nibbles(*coded(rows), rows.dtype)
        assert torch.equal(_rows(now, is_k)[list(pages)], expected)
        assert not torch.equal(expected, rows)


def _rows(block: torch.Tensor, is_k: bool) -> torch.Tensor:
    """K [P, H, D, 16] of [P, H, D/pack, 16, pack]; V [P, H, 16, D] of [P, H, 16/pack, D, pack]."""
    count, heads, first, second, pack = block.shape
    assert (second if is_k else first * pack) == PAGE_TOKENS
    return block.transpose(-1, -2).reshape(count, heads, first * pack, second)
