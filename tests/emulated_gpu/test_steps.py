"""A day of steps: requests of every kind come and go by a seed, and nothing is reported.

Values are not computed here (``Card.values``): what comes home is zeros. All else is there: each launch,
copy, wait and event of a step, the memory, the graphs, and the order of all that is no launch of Triton. The
suites beside this one compute.

Preemptions, compression and loads do not come about by themselves here. They are forced, and counted.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.emulated_gpu import emulated
from tests.emulated_gpu.engines import started
from tests.emulated_gpu.sample import ALL, sample
from tests.fixtures.checkpoints import checkpoint
from tests.fixtures.drafters import AnswerDrafter
from tests.support.forced_compression import compress_all, plan_small_states
from tests.support.refused_growth import refuse_growth
from weft.engine.stats import EngineStats
from weft.request import Request, SamplingParams
from weft.schedule.tier_values import NO_TIER

STEPS = 3_400 if ALL else 200
COMPRESSED = "hybrid, little memory, compressed"
MACHINES: dict[str, tuple[str, dict[str, Any]]] = {
    "hybrid": ("qwen3_5", {}),
    COMPRESSED: ("qwen3_5", {"memory": "2MiB", "exact": False, "compress_kv": "int8"}),
    "attention, without graphs": ("qwen3", {"cuda_graphs": "off", "memory": "2MiB"}),
}
COUNTS: dict[str, Callable[[EngineStats], int]] = {
    "preemptions": lambda stats: stats.preemptions,
    "prefixes that were loaded": lambda stats: stats.memory.cache.loaded,
    "prefixes that were stored": lambda stats: (stats.store or NO_TIER).store.puts,
    "states in 8 bits that were restored": lambda stats: stats.memory.cache.restored,
    "pages in 8 bits that were restored": lambda stats: stats.memory.cache.restored_pages,
}


def rare(machine: str, stats: EngineStats) -> list[str]:
    """What a day should have had, and had less often than once in 200 steps."""
    return [
        name
        for name, count in COUNTS.items()
        if (machine == COMPRESSED or "8 bits" not in name) and count(stats) < STEPS // 200
    ]


def asked(chance: random.Random, prefixes: list[list[int]], name: str) -> Request:
    prompt = [
        *chance.choice(prefixes)[: chance.randrange(1, 130)],
        *(chance.randrange(3, 500) for _ in range(chance.randrange(40))),
    ]
    sampling: dict[str, Any] = {"temperature": 0.0}
    if chance.random() < 0.5:
        sampling = {
            "temperature": 1.0,
            "top_k": chance.choice([0, 20]),
            "top_p": chance.choice([1.0, 0.9]),
            "seed": chance.randrange(99),
            "logprobs": chance.choice([None, 3]),
            "frequency_penalty": chance.choice([0.0, 0.5]),
        }
    return Request(
        request_id=name,
        prompt_tokens=prompt,
        sampling=SamplingParams(max_tokens=chance.randrange(1, 40), ignore_eos=True, **sampling),
    )


@pytest.mark.parametrize("machine", sample(MACHINES, 1))
def test_seeded_steps_report_nothing(machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, more = MACHINES[machine]
    chance = random.Random(31)
    prefixes = [[chance.randrange(3, 500) for _ in range(130)] for _ in range(4)]
    drafter = AnswerDrafter("random", dict.fromkeys(range(STEPS), [0] * 40), 512)
    checkpoint(family)
    if machine == COMPRESSED:
        plan_small_states(monkeypatch)
        compress_all(monkeypatch)
    with emulated(seed=31) as card, started(card, family, drafter=drafter, store=str(tmp_path), **more) as engine:
        core, steps, live = engine.core, 0, 0
        card.values = False
        assert len(rare(machine, core.stats())) >= 3, "the control: a day without them fails"
        refuse_growth(monkeypatch, lambda: core.scheduler.running)
        while steps < STEPS:
            if core.live_count < 8 and chance.random() < 0.3:
                core.submit(asked(chance, prefixes, f"request-{live}"))
                live += 1
            if live and chance.random() < 0.02:
                core.cancel(f"request-{chance.randrange(live)}")
            if chance.random() < 0.02:
                core.flush_cache()  # what is needed again comes from the store
            if core.has_work:
                core.step()
                steps += 1
            assert core.failure is None, core.failure
            assert not card.reports, (steps, [str(report) for report in card.reports])
        stats = core.stats()
    assert live > STEPS // 30, stats
    assert not rare(machine, stats), stats
    assert drafter.drafted
    assert card.replays > 0 or more.get("cuda_graphs") == "off"
