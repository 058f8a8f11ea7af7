"""Loads and stores go beside the steps: decodes go on, nothing is read before it is there.

Faults 3, 4 and 6 of ``docs/testing.md`` would be reports here: loads come in pieces through a buffer that was
counted, by staged ids, out of memory that was pinned at the start.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from msgspec import structs

from tests.emulated_gpu import emulated
from tests.emulated_gpu.engines import GREEDY, answers, assert_tokens_of_transformers, started
from tests.emulated_gpu.sample import sample
from tests.fixtures.checkpoints import checkpoint
from tests.oracle.test_engine_store_compressed import NEVER_S
from tests.support.forced_compression import compress_all, plan_small_states
from weft.families import read_spec
from weft.files import read_json
from weft.memory.arena_work import WorkKind
from weft.memory.frames.plan import memory_for, plan_arena
from weft.request import Request
from weft.runner import transfers
from weft.runner.staging import Staged
from weft.runner.torch_executor import TorchExecutor

FAMILY = "qwen3_5"
PROMPT, OTHER = list(range(3, 69)), [300, 20, 411]
WAYS: dict[str, dict[str, Any]] = {"as computed": {}, "compressed": {"exact": False, "compress_kv": "int8"}}


@pytest.mark.parametrize("way", sample(WAYS, 1))
def test_decodes_go_on_while_a_prefix_is_loaded(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(FAMILY)
    if way == "compressed":
        plan_small_states(monkeypatch)
        compress_all(monkeypatch)
    with emulated() as card, started(card, FAMILY, store=str(tmp_path), **WAYS[way]) as engine:
        assert engine.core.store is not None
        engine.core.store.writes._paced_until_s = NEVER_S  # nothing is written before it is compressed
        [said] = answers(engine.core, [PROMPT])
        answers(engine.core, [[9, 8, 7]], name="between")
        engine.core.write_all(20.0)
    assert engine.puts, "at the latest as it ends"
    assert not card.reports, [str(report) for report in card.reports]
    with emulated() as card, started(card, FAMILY, store=str(tmp_path), **WAYS[way]) as engine:
        core, executor = engine.core, cast(TorchExecutor, engine.core.executor)
        lanes = executor.arena.device_transfers
        ended: Callable[[int], bool] = lanes.are_done
        lanes.are_done = lambda step: False  # type: ignore[method-assign]
        tokens: dict[str, list[int]] = {"other": [], "loaded": []}
        for name, prompt, count in (("other", OTHER, 8), ("loaded", PROMPT, len(said))):
            core.submit(
                Request(request_id=name, prompt_tokens=prompt, sampling=structs.replace(GREEDY, max_tokens=count))
            )
        under_way = 0
        while core.has_work:
            for event in core.step():
                tokens[event.request_id] += event.tokens
            assert core.failure is None, core.failure
            if lanes._under_way:
                under_way = under_way or len(tokens["other"])
                if len(tokens["other"]) >= under_way + 3:
                    lane = cast(Any, lanes._loads._stream).queue
                    assert lane is not card.default, "what stands in the steps' stream is waited for"
                    assert not tokens["loaded"]
                    lanes.are_done = ended  # type: ignore[method-assign]
        assert core.store is not None
        assert core.store.stats().restores.restored_tokens >= 48
        assert bool(core.memory.usage().cache.hits_inexact) is (way == "compressed")
        assert not card.reports, [str(report) for report in card.reports]
    assert len(tokens["other"]) == 8
    if way == "as computed":
        assert tokens["loaded"] == said
        assert_tokens_of_transformers(FAMILY, [OTHER, PROMPT], [tokens["other"], said])


def test_a_state_is_stored_without_a_wait_of_the_steps_for_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """In rooms smaller than a state, its third piece made the steps' stream wait for copies to the host."""
    waits: list[Any] = []
    let_in = transfers._Lane.let_in

    def counted(lane: Any, event: Any) -> None:
        waits.extend([event] * (event is not None))
        let_in(lane, event)

    monkeypatch.setattr(transfers._Lane, "let_in", counted)
    spec = read_spec(read_json(checkpoint(FAMILY) / "config.json"))
    plan = plan_arena(spec, memory_for(spec, "float32", 2, 64)[0], kv_layout="rows")
    state_B = np.zeros(plan.slot_bytes, np.uint8)
    with emulated() as card:
        arena_B = torch.arange(plan.arena_bytes, device="cuda").to(torch.uint8)
        lanes = transfers.DeviceTransfers(
            plan, arena_B, [SimpleNamespace(state_B=state_B, pages_PB=None)], rooms_bytes=plan.slot_bytes
        )
        ids = Staged(np.array([[0, 0]]), 0)
        for step in range(2):
            lanes.store(step, [(WorkKind.STORE_STATES, ids)])
        lanes.wait()
        want = arena_B[: plan.slot_bytes].cpu().numpy()
        assert not card.reports or {report.kind for report in card.reports} == {"wait"}
    assert not waits
    assert np.array_equal(state_B, want)
