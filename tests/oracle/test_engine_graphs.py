"""Decode steps the way graphs go (static memory, padded widths, full page tables), computed at every replay:
the same tokens, in an arena full of NaN, and not a byte touched that is not theirs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.oracle.serving import Serving, assert_equal_to_truth, truth
from tests.support.graph_steps import EagerCapture, dummy_step
from weft.models.blocks import feed_forward as experts
from weft.runner.arena import NAN_BYTE
from weft.runner.batch import BatchBuilder, StepBatch
from weft.runner.step_graphs import StepBlock
from weft.schedule.plan import StepPlan
from weft.tensor.ops.moe import moe
from weft.units import PAD, PAGE_TOKENS

FAMILIES = ("qwen3_5", "bamba", "jamba", "lfm2")
"""Gated delta, Mamba-2, Mamba-1 and short convolutions, each beside attention."""


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_change_no_token(family: str) -> None:
    """With all that a step brings coming in one copy, and what it makes going home in one, as on a GPU."""
    truths = truth(family)
    serving = Serving(family, capture=EagerCapture(), remote=True)
    taken = blocks_of(serving)
    assert_equal_to_truth(serving.run([one.prompt for one in truths], stagger_steps=3), truths)
    assert {block.shape.decodes for block in taken} >= {4, 8}, "steps of one to five rows, padded to 1, 2, 4 and 8"


def test_rows_of_pad_read_no_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three decodes of a graph of four rows: the fourth row chooses no expert in any layer."""
    chosen: list[torch.Tensor] = []

    def noted(x_TD: torch.Tensor, ids_TX: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        chosen.append(ids_TX)
        return moe(x_TD, ids_TX, *more, **named)

    monkeypatch.setattr(experts, "moe", noted)
    serving = Serving("jamba", capture=EagerCapture())
    blocks = blocks_of(serving)
    chosen.clear()
    serving.run([one.prompt for one in truth("jamba")[:3]])
    assert [block.shape.decodes for block in blocks] == [4] * len(blocks), "all steps of decodes have three"
    padded = [ids_TX for ids_TX in chosen if len(ids_TX) == 4 and (ids_TX == PAD).any()]
    assert len(padded) >= len(blocks), "at least a layer of each step"
    assert all((ids_TX[3] == PAD).all() and (ids_TX[:3] != PAD).all() for ids_TX in padded)


def test_the_control_a_graph_that_is_shown_another_slot_changes_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    truths = truth("qwen3_5")[:3]
    build = BatchBuilder.build

    def swapped(self: BatchBuilder, plan: StepPlan) -> StepBatch:
        batch = build(self, plan)
        if isinstance(batch.inputs, StepBlock) and plan.run_count > 1:
            slots = batch.inputs.flat.view(6, -1)[3]
            slots[:2] = slots[:2].flip(0)
        return batch

    monkeypatch.setattr(BatchBuilder, "build", swapped)
    answers = Serving("qwen3_5", capture=EagerCapture()).run([one.prompt for one in truths])
    assert any(answer.tokens != one.tokens for answer, one in zip(answers, truths, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_replay_writes_its_own_slots_and_the_last_place_of_its_own_pages_and_no_other_byte(family: str) -> None:
    """Every byte of the arena that is not read by the live rows is NaN before, and the same after."""
    before: dict[int, torch.Tensor] = {}

    def spoil_others(serving: Serving, plan: StepPlan) -> None:
        arena = serving.executor.arena
        if before:
            return
        if plan.run_count == plan.decode_count == 3 and not plan.table_writes.size:
            owned = owned_bytes(serving, plan)
            arena.buffer[~owned] = NAN_BYTE
            before[plan.step] = arena.buffer.clone()

    serving = Serving(family, capture=EagerCapture(), before_step=spoil_others)
    execute = serving.executor.execute
    changed: list[torch.Tensor] = []

    def compared(plan: StepPlan) -> object:
        result = execute(plan)
        if plan.step in before:
            now = serving.executor.arena.buffer
            changed.append((now != before[plan.step]).clone())
            assert not changed[0][~owned_bytes(serving, plan)].any()
            assert changed[0].any()
            before_dummy = now.clone()
            dummy_step(serving.executor, 5)
            assert torch.equal(before_dummy, now), "PAD rows alone touch nothing at all"
        return result

    serving.executor.execute = compared  # type: ignore[method-assign, assignment]
    truths = truth(family)[:3]
    assert_equal_to_truth(serving.run([one.prompt for one in truths]), truths)
    assert changed, "no step of three decodes was looked at"


def owned_bytes(serving: Serving, plan: StepPlan) -> torch.Tensor:
    """bool [arena bytes]: the slots of the plan's runs, and the pages of their rows up to their context."""
    arena, executor = serving.arena, serving.executor
    owned = torch.zeros(arena.arena_bytes, dtype=torch.bool, device=executor.arena.device)
    for row, slot, start in zip(plan.rows.tolist(), plan.slots.tolist(), plan.starts.tolist(), strict=True):
        at = slot * arena.slot_stride_bytes
        owned[at : at + arena.slot_stride_bytes] = True
        for page in executor.batches.pages_of(row)[: start // PAGE_TOKENS + 1]:
            owned[page * arena.page_bytes : (page + 1) * arena.page_bytes] = True
    return owned


def blocks_of(serving: Serving) -> list[StepBlock]:
    """Filled with what graphs were given, as the engine runs."""
    assert serving.executor.graphs is not None
    taken: list[StepBlock] = []
    replay = serving.executor.graphs.replay

    def noted(block: StepBlock) -> torch.Tensor:
        taken.append(block)
        return replay(block)

    serving.executor.graphs.replay = noted  # type: ignore[method-assign]
    return taken
