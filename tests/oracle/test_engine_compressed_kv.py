"""KV that is compressed in 8 bits or 4: logits within a bound that is far above rounding, and no bit changed
where none is.

All KV that nobody reads is compressed as soon as it can be, so each hit begins behind KV that comes back from
these. Memory is full of NaN, and so is each page and slot that becomes free (see ``serving``). Negative
controls: scales that are wrong, a restoring that is left out. The models are random; what a bound on logits
means for answers is measured on trained ones, in ``test_compressed_skill``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median

import pytest
import torch

from tests.fixtures.checkpoints import asked
from tests.oracle.serving import Serving, loaded
from tests.oracle.test_engine_compressed_state import ONE, conversation
from tests.oracle.test_engine_prefix_cache import cold, gap, warm
from tests.support.forced_compression import compress_kv
from weft.families.mixers.feed_forward import Experts
from weft.runner import compressed as packed_kv
from weft.schedule.plan import StepPlan
from weft.schedule.plan_builder import PlanBuilder
from weft.spec import COMPRESSED_KV_DTYPES, CompressedKvName

FAMILIES = asked("qwen3_5", "granite")
TOLERANCE = {"int8": 0.02, "int4": 0.1}
"""Of the largest logit, in the first step after a hit. What is measured is printed with ``-rP``."""


@pytest.fixture
def all_kv_is_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    compress_kv(monkeypatch)


def compressed_and_restored(serving: Serving) -> tuple[int, int]:
    counts = serving.core.memory.usage().cache
    return counts.compressed_pages, counts.restored_pages


@pytest.mark.parametrize("dtype", COMPRESSED_KV_DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_kv_from_fewer_bits_changes_logits_a_little(
    family: str, dtype: CompressedKvName, all_kv_is_compressed: None
) -> None:
    serving = warm(family, compress_kv=dtype)
    gaps = [gap(answer, cold(family, prompt, ONE)) for answer, prompt in conversation(family, serving)]
    print(family, dtype, "gaps by turn, each on from the one before:", [f"{one:.1e}" for one in gaps])
    compressed, restored = compressed_and_restored(serving)
    assert compressed >= 10
    assert restored >= 10
    assert max(gaps) > 1e-5, "above rounding, or nothing was compressed"
    # A router near a tie chooses another expert: then it is the middle turn that keeps the bound.
    routed = any(isinstance(feed, Experts) for feed in loaded(family).model.architecture.feed_forwards)
    assert (median(gaps[1:]) if routed else max(gaps)) < TOLERANCE[dtype]
    shape = serving.core.memory.cache_shape(lambda version: 0.0)
    assert sum(one.total.inexact for one in shape.salts) > 0


@pytest.mark.parametrize("dtype", COMPRESSED_KV_DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_where_there_is_room_no_kv_is_compressed_and_no_bit_differs(family: str, dtype: CompressedKvName) -> None:
    exact, compression_allowed = warm(family), warm(family, compress_kv=dtype)
    assert compression_allowed.arena.compressed_kv_bytes
    assert not exact.arena.compressed_kv_bytes
    for (left, _), (right, _) in zip(
        conversation(family, exact), conversation(family, compression_allowed), strict=True
    ):
        assert left.cached_tokens == right.cached_tokens
        assert torch.equal(left.logits, right.logits)
    assert compressed_and_restored(compression_allowed) == (0, 0)


def with_other_scales(patch: pytest.MonkeyPatch) -> None:
    """The largest scale is another one; each row of 4 bits is stretched."""
    decode = packed_kv.decode_state
    patch.setattr(
        packed_kv,
        "decode_state",
        lambda codes, scales, dtype: decode(codes, torch.where(scales == scales.amax(), 8 * scales, scales), dtype),
    )
    nibbles = packed_kv.decode_nibbles
    patch.setattr(
        packed_kv,
        "decode_nibbles",
        lambda codes, bounds, dtype: nibbles(codes, bounds * torch.tensor([1.0, 8.0], dtype=bounds.dtype), dtype),
    )


def without_restoring(patch: pytest.MonkeyPatch) -> None:
    seal = PlanBuilder.seal
    patch.setattr(PlanBuilder, "seal", lambda *args: without_restores(seal(*args)))


def without_restores(plan: StepPlan) -> StepPlan:
    return replace(plan, arena_work=replace(plan.arena_work, kv_restores=()))


@pytest.mark.parametrize("broken", [with_other_scales, without_restoring], ids=lambda broken: broken.__name__)
@pytest.mark.parametrize("dtype", COMPRESSED_KV_DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_kv_that_is_restored_wrongly_is_noticed(
    family: str,
    dtype: CompressedKvName,
    broken: Callable[[pytest.MonkeyPatch], None],
    all_kv_is_compressed: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken(monkeypatch)
    gaps = [
        gap(answer, cold(family, prompt, ONE))
        for answer, prompt in conversation(family, warm(family, compress_kv=dtype), 3)
    ]
    assert any(not one < TOLERANCE[dtype] for one in gaps), "NaN is not below it either"
