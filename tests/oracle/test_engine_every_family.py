"""The families of ``MORE_FAMILIES`` and ``MAMBA_FAMILIES`` through the whole engine: what changes nothing for
others changes nothing for these. The suites beside this one go deeper, on fewer families; here prompts are
shorter and each promise is looked at once. Memory is full of NaN in all of them (see ``serving``).
"""

from __future__ import annotations

import functools

import pytest
import torch

from tests.fixtures.checkpoint_families_attention import MORE_FAMILIES
from tests.fixtures.checkpoint_families_mamba import MAMBA_FAMILIES
from tests.fixtures.checkpoints import asked
from tests.oracle.serving import TOLERANCE, Answer, Serving, Truth, assert_equal_to_truth, distance, loaded
from tests.oracle.test_models_against_transformers import expected_of_all
from tests.support.arena_fills import fill_pages, fill_slots
from tests.support.refused_growth import refuse_growth
from weft.memory.frames.plan import plan_arena
from weft.request import SamplingParams
from weft.units import pages_for

pytestmark = pytest.mark.parametrize("family", asked(*MORE_FAMILIES, *MAMBA_FAMILIES))

LENGTHS = (1, 40, 58, 230)
STEPS = 12
"""Decodes pass 48, 64 and 240: ends of pages, and of a chunk."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
LEFT = SamplingParams(temperature=0.0, max_tokens=1)
"""Of a prompt that leaves a prefix: its answer is not read."""


def text(name: int, length: int) -> list[int]:
    return torch.randint(3, 500, (length,), generator=torch.Generator().manual_seed(name)).tolist()


@functools.cache
def truths(family: str) -> list[Truth]:
    """What requests, each alone, cold and in one piece, are answered; transformers agrees with every logit of it."""
    serving = Serving(family)
    prompts = [text(length, length) for length in LENGTHS]
    return agreed(family, prompts, [serving.run([prompt], GREEDY)[0] for prompt in prompts])


def agreed(family: str, prompts: list[list[int]], answers: list[Answer]) -> list[Truth]:
    """Those of transformers, which sees prompt and answer in one forward: equal at every step, so all is."""
    whole = [[*prompt, *answer.tokens[:-1]] for prompt, answer in zip(prompts, answers, strict=True)]
    wanted = [logits[-STEPS:] for logits in expected_of_all(family, whole)]
    for answer, logits in zip(answers, wanted, strict=True):
        assert (answer.logits - logits).abs().max() < TOLERANCE
        assert answer.tokens == logits.argmax(-1).tolist()
    return [
        Truth(prompt, answer.tokens, logits, torch.empty(0))
        for prompt, answer, logits in zip(prompts, answers, wanted, strict=True)
    ]


def tight(family: str, *, tokens: int, slots: int) -> int:
    """Bytes of frames for so many tokens and so many slots."""
    arena = plan_arena(loaded(family).spec, 1 << 20)
    frames = -(-pages_for(tokens) // arena.pages_per_frame) if arena.pages_per_frame else 0
    frames += -(-slots // arena.slots_per_frame) if arena.slots_per_frame else 0
    return frames * arena.frame_bytes


def run(serving: Serving, wanted: list[Truth], **more: int) -> list[Answer]:
    answers = serving.run([one.prompt for one in wanted], GREEDY, **more)
    assert_equal_to_truth(answers, wanted)
    return answers


def test_one_request_alone_equals_transformers(family: str) -> None:
    assert len({token for one in truths(family) for token in one.tokens}) > 12


def test_company_small_chunks_and_pad_rows_change_nothing(family: str) -> None:
    serving = Serving(family, step_tokens=80, pad_decode_to=6)
    run(serving, truths(family), stagger_steps=3)
    assert any(0 < plan.decode_count < plan.run_count for plan in serving.plans), "no step was mixed"
    chunks = [plan for plan in serving.plans if len(LENGTHS) - 1 in plan.seqs[plan.decode_count :]]
    assert len(chunks) > 230 // 80, "the longest prompt was not cut"


def test_memory_in_other_hands_changes_nothing(family: str) -> None:
    """Memory for little more than one of them at a time: pages and slots come back, full of NaN."""
    serving = Serving(family, memory_bytes=tight(family, tokens=256, slots=1), step_tokens=128, max_model_len=256)
    wanted = truths(family)
    run(serving, [*wanted, wanted[-1], wanted[1]])
    slots = [int(slot) for plan in serving.plans for slot in plan.slots]
    pages = [int(page) for plan in serving.plans for page in plan.table_writes[2]]
    assert len(set(pages)) < len(pages) or len(set(slots)) < len(slots)


def test_preemption_changes_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time the first one grows there seems to be no room, once: the last one gives way and resumes."""
    serving = Serving(family, step_tokens=128)
    refused = refuse_growth(monkeypatch, lambda: serving.core.scheduler.running)
    answers = run(serving, truths(family)[1:])
    assert sum(answer.preemptions for answer in answers) >= len(refused)
    assert bool(refused) == bool(loaded(family).spec.attention_layers), "only what has pages grows"


def test_a_prefix_hit_changes_nothing(family: str) -> None:
    """It ends on the grid, one token behind it, inside of a chunk, and where the trunk does."""
    serving = Serving(family, cache=True, snapshots="every:64")
    trunk = text(7, 200)
    serving.run([trunk], LEFT)
    prompts = [trunk[:cut] + text(500 + cut, 9 + cut % 40) for cut in (64, 129, 199)] + [trunk]
    answers = [serving.run([prompt], GREEDY)[0] for prompt in prompts]
    agreed(family, prompts, answers)
    step = 64 if loaded(family).spec.recurrent_layers else 16
    assert [answer.cached_tokens for answer in answers] == [
        min(cut, len(prompt) - 1) // step * step for cut, prompt in zip((64, 129, 199, 200), prompts, strict=True)
    ]


def test_a_cached_prefix_that_is_damaged_is_noticed(family: str) -> None:
    """The control of the hit: what is kept is what is read."""
    serving = Serving(family, cache=True, snapshots="every:64")
    wanted, spec = truths(family)[-1], loaded(family).spec
    serving.run([wanted.prompt[:200]], LEFT)
    nodes = list(serving.core.memory._state.cache.tree.nodes())
    if spec.recurrent_layers:
        fill_slots(serving.executor.arena, [node.slot for node in nodes if node.slot != -1], 0)
    else:
        fill_pages(serving.executor.arena, [int(page) for node in nodes for page in node.pages], 0)
    [answer] = serving.run([wanted.prompt], GREEDY)
    assert answer.cached_tokens > 0
    assert distance(answer, wanted) > 100 * TOLERANCE
