"""States that are compressed in 8 bits: logits within a bound that is far above rounding, and no bit changed
where none is.

Every snapshot is compressed as soon as possible, so each hit on one is restored from 8 bits. Memory is full
of NaN, and so is each page and slot that becomes free (see ``serving``): a piece that is not read, or read
from elsewhere, shows. Negative controls: scales that are wrong, a restoring that is left out. The models are
random: what a bound on logits means for answers is measured on trained ones, in ``test_compressed_skill``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.fixtures.checkpoints import asked
from tests.oracle.serving import Answer, Serving, loaded
from tests.oracle.test_engine_prefix_cache import SHORT, cold, gap, text, warm
from tests.support.forced_compression import compress_states
from weft.request import SamplingParams
from weft.runner import compressed as compression
from weft.runner.arena import DeviceArena
from weft.schedule.plan import StepPlan
from weft.schedule.plan_builder import PlanBuilder
from weft.tensor import gpu

FAMILIES = asked("qwen3_5", "granite")
"""A gated delta rule, and Mamba-2."""
TOLERANCE = 0.02
"""Of the largest logit, in the first step after a hit. What is measured is printed with ``-rP``."""
ONE = SamplingParams(temperature=0.0, max_tokens=1)


@pytest.fixture
def everything_is_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    compress_states(monkeypatch)


def conversation(family: str, serving: Serving, turns: int = 5) -> list[tuple[Answer, list[int]]]:
    """Each turn goes on from the state that the one before left, in the middle of a page."""
    prompt, found = text(3, 90), []
    for turn in range(turns):
        [answer] = serving.run([prompt], ONE)
        found.append((answer, prompt))
        prompt = prompt + text(100 + turn, 25 + 7 * turn)
        serving.run([text(500 + turn, 4)], SHORT)  # some steps in which what was left is compressed
    return found


def restored(serving: Serving) -> int:
    return serving.core.memory.usage().cache.restored


@pytest.mark.parametrize("family", FAMILIES)
def test_states_from_eight_bits_change_logits_a_little(family: str, everything_is_compressed: None) -> None:
    serving = warm(family, compress=True)
    gaps = []
    for answer, prompt in conversation(family, serving):
        gaps.append(gap(answer, cold(family, prompt, ONE)))
    print(family, "gaps by turn, each on from the one before:", [f"{one:.1e}" for one in gaps])
    assert restored(serving) >= 4
    assert max(gaps) < TOLERANCE
    # Windows stay as they are; a model without accumulators loses nothing.
    if any(part.dtype == "float32" for layer in loaded(family).spec.layers for part in layer.state):
        assert max(gaps) > 1e-5, "above rounding, or nothing was compressed"
    usage = serving.core.memory.usage()
    assert usage.states_compressed >= 5
    assert usage.cache.compressed == sum(len(plan.arena_work.state_compressions) for plan in serving.plans)


@pytest.mark.parametrize("family", FAMILIES)
def test_where_there_is_room_nothing_is_compressed_and_no_bit_differs(family: str) -> None:
    """Compression is allowed, and is not for a cache that has memory to spare."""
    exact, compression_allowed = warm(family), warm(family, compress=True)
    assert compression_allowed.arena.compressed_pages
    assert not exact.arena.compressed_pages
    for (left, _), (right, _) in zip(
        conversation(family, exact), conversation(family, compression_allowed), strict=True
    ):
        assert left.cached_tokens == right.cached_tokens
        assert torch.equal(left.logits, right.logits)
    assert compression_allowed.core.memory.usage().cache.compressed == 0


def by_torch(arena: DeviceArena, *args: Any, compress: Any = DeviceArena._compress, **options: Any) -> None:
    """On a GPU kernels do it, and have the scales in registers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "fits", lambda *tensors: False)
        compress(arena, *args, **options)


def with_other_scales(patch: pytest.MonkeyPatch) -> None:
    """Each row has that of the next one."""
    encode = compression.encode_state

    def encoding(state_XN: torch.Tensor, codes_XN: torch.Tensor, scales_X: torch.Tensor) -> None:
        encode(state_XN, codes_XN, scales_X)
        scales_X.copy_(scales_X.roll(1, dims=-1))

    patch.setattr(compression, "encode_state", encoding)
    patch.setattr(DeviceArena, "_compress", by_torch)


def without_restoring(patch: pytest.MonkeyPatch) -> None:
    seal = PlanBuilder.seal
    patch.setattr(PlanBuilder, "seal", lambda *args: without_restores(seal(*args)))


def without_restores(plan: StepPlan) -> StepPlan:
    return replace(plan, arena_work=replace(plan.arena_work, state_restores=()))


@pytest.mark.parametrize("broken", [with_other_scales, without_restoring], ids=lambda broken: broken.__name__)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_state_that_is_restored_wrongly_is_noticed(
    family: str,
    broken: Callable[[pytest.MonkeyPatch], None],
    everything_is_compressed: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken(monkeypatch)
    gaps = [
        gap(answer, cold(family, prompt, ONE))
        for answer, prompt in conversation(family, warm(family, compress=True), 3)
    ]
    assert max(gaps) > 2 * TOLERANCE
