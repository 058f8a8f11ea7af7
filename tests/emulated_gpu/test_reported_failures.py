"""Reported failures of GPU paths in other engines, as classes: each by name, each with a mutant
(see ``tests/oracle/reported.py``). Numbers in docstrings are public threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from msgspec import structs

from tests.emulated_gpu import emulated
from tests.emulated_gpu.engines import GREEDY, answers, assert_tokens_of_transformers, started
from tests.fixtures.checkpoints import checkpoint
from tests.gpu.recurrences import RECURRENCES
from tests.gpu.steps import on_device, strided_on
from tests.ops.batches import Run, make_runs
from tests.oracle.reported import happened, is_noticed
from weft.runner.batch import BatchBuilder, _Padding
from weft.runner.graph_shapes import GraphShape
from weft.schedule.plan import StepPlan
from weft.tensor.inputs import Runs

PROMPTS = [[7], [300]]
SHORT = structs.replace(GREEDY, max_tokens=3)


def prompts_as_short_as_decodes() -> bool:
    """A step of prompts of one token has the shape of a step of decodes, for which there is a graph. Slots have
    the states of other answers."""
    checkpoint("qwen3_5")
    with emulated() as card, started(card, "qwen3_5") as engine:
        answers(engine.core, [[5, 6, 8], [9, 11, 10]], SHORT, name="before")
        engine.core.flush_cache()
        made = answers(engine.core, PROMPTS, SHORT)
        happened(card.replays, "nothing was replayed")
        reports = [str(report) for report in card.reports]
    assert_tokens_of_transformers("qwen3_5", PROMPTS, made)
    return not reports


def test_a_prompt_of_the_shape_of_a_decode_is_not_replayed_by_its_graph() -> None:
    """vllm-ascend 12255, vllm 53051, 49918: a graph of decodes reads a state that was never written."""
    assert prompts_as_short_as_decodes()


def test_a_prompt_that_a_graph_of_decodes_computes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    padding, seen = BatchBuilder._padding, [0]

    def by_shape(self: BatchBuilder, plan: StepPlan) -> _Padding:
        shape = GraphShape.of_decodes(plan.run_count)
        if plan.run_count == plan.token_count and shape in self.shapes:
            seen[0] += plan.decode_count == 0
            return _Padding(shape=shape)
        return padding(self, plan)

    monkeypatch.setattr(BatchBuilder, "_padding", by_shape)
    assert is_noticed(prompts_as_short_as_decodes)
    assert seen[0]


FIELDS = ("starts_R", "slots_R", "context_R", "page_table_RP")


@pytest.mark.parametrize("name", FIELDS)
def test_no_step_can_be_made_with_a_strided_view_of_its_indices(name: str) -> None:
    """vllm 55375, 52207, gibberish of Qwen3.8-Flash-Next: a column of a wider table is read as if its numbers
    were next to each other."""
    runs = make_runs([Run(7, slot=3), Run(40, slot=1), Run(9, slot=0)], [])
    dense = getattr(runs, name)
    wide = torch.stack((dense, torch.full_like(dense, 5)), dim=-1)
    with pytest.raises(AssertionError, match=name):
        replace(runs, **{name: wide[..., 0]}, memo={})
    assert torch.equal(getattr(replace(runs, **{name: wide[..., 0].contiguous()}, memo={}), name), dense)


def test_what_a_kernel_reads_through_a_strided_view_is_another_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: without the contract of ``Runs`` the numbers are others."""
    monkeypatch.setattr(Runs, "__post_init__", lambda self: None)
    runs = make_runs([Run(7, slot=3), Run(40, slot=1), Run(9, slot=2)], [])
    wide = torch.stack((runs.slots_R, torch.zeros_like(runs.slots_R)), dim=1)
    op, cuda = RECURRENCES[0], torch.device("cuda", 0)
    states = op.states(5)
    with emulated():
        inputs = {name: x.to(cuda) for name, x in op.inputs(3, 0).items()}
        there = on_device(runs, cuda)
        outputs = [
            op.call(op.op, inputs, strided_on(states, cuda), replace(there, slots_R=slots, memo={}), 0).cpu()
            for slots in (there.slots_R, wide.to(cuda)[:, 0])
        ]
    right, wrong = outputs
    assert torch.equal(right[0], wrong[0])
    assert not torch.equal(right[1:], wrong[1:])
