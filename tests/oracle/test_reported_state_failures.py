"""Reported failures of recurrent states in other engines, as classes: each by name, each with a mutant.

Every class has a check on a tiny model, in memory full of NaN (see ``serving``): answers have the bits of the
same prompt alone, cold and in one piece. The mutant puts the reported fault into weft, and the check has to
fail. ``test_reported_memory_failures`` has the classes of memory and its tiers,
``tests/emulated_gpu/test_reported_failures.py`` those of a GPU, and ``test_rescoring`` the one of prompts that
differ from decodes in bits. Numbers in docstrings are public threads.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from msgspec import structs

from tests.fixtures.drafters import AnswerDrafter
from tests.oracle.reported import are_same, happened, is_noticed
from tests.oracle.serving import Serving, directory
from tests.oracle.test_engine_prefix_cache import cold, text
from tests.support.refused_growth import refuse_growth
from weft.models.loading import LoadedModel, load_model
from weft.request import Request, SamplingParams
from weft.runner import torch_executor
from weft.runner.batch import BatchBuilder
from weft.runner.staging import Staging
from weft.schedule.plan import Int32s, StepPlan
from weft.schedule.plan_builder import PlanBuilder
from weft.schedule.reuse import Reuse
from weft.schedule.sequence import Sequence as RunningSequence
from weft.speculation.drafter import DraftRow
from weft.tensor.inputs import Runs, StepInputs
from weft.units import PAD

FAMILIES = ("qwen3_5", "granite", "lfm2", "mamba2")
"""A gated delta net, Mamba-2 and short convolutions beside attention; Mamba-2 alone."""
SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = structs.replace(SHORT, max_tokens=24)
VOCAB_SIZE = 512
Edit = Callable[[StepPlan], StepPlan]


def edit_plans(monkeypatch: pytest.MonkeyPatch, edit: Edit) -> None:
    """Change what the device gets, and nothing that the scheduler knows."""
    apply = BatchBuilder.apply
    monkeypatch.setattr(
        BatchBuilder, "apply", lambda self, plan, *rest: apply(self, edit(plan) if plan.run_count else plan, *rest)
    )


# ---------------------------------------------------------------------- a first chunk of one token


def prompts_of_one_token(family: str) -> bool:
    prompts = [text(1, 70), [7], text(2, 33), [9], [11], [7]]
    serving = Serving(family, max_num_seqs=3)
    answers = serving.run(prompts, SHORT, stagger_steps=2)
    first = [
        plan
        for plan in serving.plans
        if plan.decode_count and any(plan.lengths[run] == 1 and plan.starts[run] == 0 for run in plan.prefills)
    ]
    happened(first, "no prompt of one token came beside decodes")
    return are_same(answers, [cold(family, prompt, SHORT) for prompt in prompts])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_first_chunk_of_one_token_reads_no_state_of_the_slots_last_owner(family: str) -> None:
    """vllm 32118, 51483, 51562, 51039: it is computed as a decode, which reads the slot."""
    assert prompts_of_one_token(family)


def test_a_first_token_that_is_computed_as_a_decode_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    edit_plans(monkeypatch, lambda plan: replace(plan, fresh=plan.fresh & (plan.lengths > 1)))
    assert is_noticed(lambda: prompts_of_one_token("qwen3_5"))


# ---------------------------------------------------------------------- a tail that is padded to the drafts

TRUNK, TALKER = text(21, 64), text(22, 30)


@functools.cache
def said(family: str) -> list[int]:
    return cold(family, TALKER, LONG).tokens


def tail_beside_drafts(family: str, spoil: Callable[[Serving], None] = lambda serving: None) -> bool:
    """A prompt of which one token is left after a hit joins a step with verify runs."""
    drafter = AnswerDrafter("adversarial", {1: said(family)}, VOCAB_SIZE, most=3)
    serving = Serving(family, cache=True, drafter=drafter)
    serving.run([[*TRUNK, 9]], SHORT)
    spoil(serving)
    answers = serving.run([TALKER, [*TRUNK, 7]], [LONG, SHORT], stagger_steps=4)
    beside = [
        plan
        for plan in serving.plans
        if plan.verify_count and any(plan.lengths[run] == 1 and plan.starts[run] == 64 for run in plan.prefills)
    ]
    happened(beside, "no tail of one token came beside verify runs")
    return are_same(answers, [cold(family, TALKER, LONG), cold(family, [*TRUNK, 7], SHORT)])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tail_of_one_token_beside_drafts_advances_its_state_by_one(family: str) -> None:
    """vllm 55178: it is padded to the length of the verify runs, and its state takes in the placeholders."""
    assert tail_beside_drafts(family)


def test_a_tail_whose_state_takes_in_placeholders_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def padded(serving: Serving) -> None:
        replay = torch_executor.replay

        def and_placeholders(runs: Runs, counts: list[int], tables: Staging) -> None:
            replay(runs, counts, tables)
            for run in range(runs.decode_count + runs.verify_count, runs.run_count):
                if runs.lengths[run] == 1:
                    serving.executor.model.forward(placeholders(runs, run, 3), serving.executor._caches)

        monkeypatch.setattr(torch_executor, "replay", and_placeholders)

    assert is_noticed(lambda: tail_beside_drafts("qwen3_5", padded))


def placeholders(runs: Runs, run: int, count: int) -> StepInputs:
    """``count`` tokens behind ``run``."""
    start = runs.starts[run] + runs.lengths[run]
    return StepInputs(
        torch.zeros(count, dtype=torch.int64),
        torch.arange(start, start + count),
        Runs(
            offsets=[0],
            starts=[start],
            lengths=[count],
            slots=[runs.slots[run]],
            fresh=[False],
            decode_count=0,
            starts_R=torch.tensor([start]),
            slots_R=torch.tensor([runs.slots[run]]),
            context_R=torch.tensor([start + count]),
            page_table_RP=runs.page_table_RP[run : run + 1],
        ),
    )


# ---------------------------------------------------------------------- rows that overlapped steps discard


def ends_that_nobody_foresaw(family: str) -> bool:
    """Answers that end by a token, and one that is cancelled, with the next step in flight; then the next
    turn of each, from the state that it left."""
    prompts = [text(31, 40), text(32, 75)]
    whole = [cold(family, prompt, LONG).tokens for prompt in prompts]
    ends = [next(at for at in range(6, 24) if tokens.index(tokens[at]) == at) for tokens in whole]
    ending = [structs.replace(LONG, stop_token_ids=(tokens[at],)) for tokens, at in zip(whole, ends, strict=True)]
    serving = Serving(family, cache=True, overlap=True)
    answers = serving.run(prompts, ending)
    happened([answer.finish_reason for answer in answers] == ["stop", "stop"], "an answer did not end by a token")
    left = text(33, 50)
    taken = cancelled_after(serving, left, 5)
    turns = [
        [*prompt, *tokens[: at + 1], *text(40 + at, 9)]
        for prompt, tokens, at in zip([*prompts, left], [*whole, taken], [*ends, len(taken) - 1], strict=True)
    ]
    following = [serving.run([turn], SHORT)[0] for turn in turns]
    deep = [len(prompt) + 4 for prompt in (*prompts, left)]
    happened(
        all(answer.cached_tokens >= least for answer, least in zip(following, deep, strict=True)),
        "a turn did not begin at the state that the one before left",
    )
    return are_same(following, [cold(family, turn, SHORT) for turn in turns])


def cancelled_after(serving: Serving, prompt: list[int], count: int) -> list[int]:
    """The tokens of an answer that is cancelled once it has ``count``."""
    tokens: list[int] = []
    serving.core.submit(Request(request_id="leaves", prompt_tokens=prompt, sampling=LONG))
    while serving.core.has_work:
        for event in serving.core.step():
            tokens += event.tokens
        if len(tokens) >= count:
            serving.core.cancel("leaves")
    return tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_that_is_discarded_with_a_step_in_flight_leaves_a_state_of_its_own_tokens(family: str) -> None:
    """vllm 51508, 48475, 50021, 45100: the row of an ended answer has index -1, or advances what others
    read."""
    assert ends_that_nobody_foresaw(family)


def test_a_state_that_a_discarded_row_has_advanced_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = Reuse.leave

    def one_short(self: Reuse, step: PlanBuilder, seq: RunningSequence, *, preempted: bool) -> None:
        row = self._rows.row_of(seq)
        self._rows.computed[row] -= 1
        leave(self, step, seq, preempted=preempted)
        self._rows.computed[row] += 1

    monkeypatch.setattr(Reuse, "leave", one_short)
    assert is_noticed(lambda: ends_that_nobody_foresaw("qwen3_5"))


# ---------------------------------------------------------------------- steps with drafts and without


class NowAndThen(AnswerDrafter):
    """Drafts of which some are right, in every second step."""

    asked = 0

    def draft(self, rows: Sequence[DraftRow]) -> dict[int, tuple[int, ...]]:
        self.asked += 1
        return super().draft(rows) if self.asked % 2 else {}


def drafts_now_and_then(family: str) -> bool:
    prompts = [text(51, 40), text(52, 9)]
    wanted = [cold(family, prompt, LONG) for prompt in prompts]
    drafter = NowAndThen("random", {at: answer.tokens for at, answer in enumerate(wanted)}, VOCAB_SIZE)
    serving = Serving(family, drafter=drafter)
    answers = serving.run(prompts, LONG)
    verifies = [bool(plan.verify_count) for plan in serving.plans if plan.decode_count or plan.verify_count]
    turns = sum(one and not other for one, other in itertools.pairwise(verifies))
    happened(turns > 3 and drafter.accepted > 3, "steps with drafts and without did not take turns")
    return are_same(answers, wanted)


@pytest.mark.parametrize("family", [*FAMILIES, "nemotron_h"])
def test_a_plain_step_after_accepted_drafts_reads_the_state_behind_them(family: str) -> None:
    """vllm 56531, 40875: steps with drafts keep the state in another place than steps without."""
    assert drafts_now_and_then(family)


def test_a_plain_step_that_reads_the_state_before_the_drafts_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_executor, "replay", lambda runs, counts, tables: None)
    assert is_noticed(lambda: drafts_now_and_then("qwen3_5"))


# ---------------------------------------------------------------------- states between two chunks


@functools.cache
def in_bfloat16(family: str) -> LoadedModel:
    return load_model(directory(family), dtype="bfloat16")


def hits_off_the_chunk(family: str, spoil: Callable[[Serving, StepPlan], None] | None = None) -> bool:
    """A bfloat16 model with states in float32, which are kept at every sixteenth token."""
    prompts = [text(60 + length, length) for length in (17, 33, 50, 70, 100)]
    serving = Serving(
        family, model=in_bfloat16(family), cache=True, snapshots="prompt", grid_tokens=16, before_step=spoil
    )
    computed, hits = ([serving.run([prompt], SHORT)[0] for prompt in prompts] for _ in range(2))
    happened([answer.cached_tokens for answer in computed] == [0] * 5, "what was to be computed was a hit")
    happened([answer.cached_tokens for answer in hits] == [16, 32, 48, 64, 96], "no hit between two chunks")
    return are_same(hits, computed)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_state_kept_between_two_chunks_has_the_bits_of_one_that_was_passed(family: str) -> None:
    """sglang 33515, lucebox 311: a tap off the kernel's chunks is written in bfloat16, where a cold run
    crosses it in float32."""
    assert hits_off_the_chunk(family)


def test_a_state_that_is_kept_in_fewer_bits_is_noticed() -> None:
    def round_what_is_read(serving: Serving, plan: StepPlan) -> None:
        for copy in plan.arena_work.slot_copies:
            for cache in serving.executor._caches:
                for part in cache.state.values():
                    part[copy.src] = part[copy.src].bfloat16().to(part.dtype)

    assert is_noticed(lambda: hits_off_the_chunk("qwen3_5", round_what_is_read))


# ---------------------------------------------------------------------- all but the last token


def hits_at_multiples_of_a_chunk(family: str) -> bool:
    """A prompt whose every chunk has a state begins before its last token, however it ends."""
    serving = Serving(family, cache=True, snapshots="every:64")
    trunk = text(71, 200)
    serving.run([trunk], SHORT)
    lengths = (63, 64, 65, 127, 128, 129, 192)
    answers = [serving.run([trunk[:length]], SHORT)[0] for length in lengths]
    cached = [answer.cached_tokens for answer in answers]
    return cached == [(length - 1) // 64 * 64 for length in lengths] and are_same(
        answers, [cold(family, trunk[:length], SHORT) for length in lengths]
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hit_leaves_the_last_token_at_exact_multiples_of_a_chunk(family: str) -> None:
    """vllm 51094: a prompt that ends where a state was kept has no token left to compute."""
    assert hits_at_multiples_of_a_chunk(family)


def test_a_hit_of_a_whole_prompt_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    match = Reuse.match

    def whole(self: Reuse, seq: RunningSequence, known: Int32s) -> object:
        return match(self, seq, np.append(known, np.int32(PAD)))

    monkeypatch.setattr(Reuse, "match", whole)
    assert is_noticed(lambda: hits_at_multiples_of_a_chunk("qwen3_5"))


# ---------------------------------------------------------------------- requests that resume


def resumed(family: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Each time the first one grows, the last one gives way once, and resumes."""
    prompts = [text(81, 40), text(82, 65), text(83, 90)]
    serving = Serving(family, step_tokens=128)
    with monkeypatch.context() as patch:
        refuse_growth(patch, lambda: serving.core.scheduler.running)
        answers = serving.run(prompts, LONG)
    happened(sum(answer.preemptions for answer in answers), "no request gave way")
    return are_same(answers, [cold(family, prompt, LONG) for prompt in prompts])


@pytest.mark.parametrize("family", ["qwen3_5", "granite", "lfm2"])
def test_a_request_that_resumes_keeps_no_old_state(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-metal 488: it is computed again from its first token, onto the state that it had."""
    assert resumed(family, monkeypatch)


def test_a_request_that_resumes_onto_an_old_state_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def onto_the_old(plan: StepPlan) -> StepPlan:
        again = {one.seq for one in plan.admissions if len(one.tokens) > one.prompt_tokens}
        return replace(plan, fresh=plan.fresh & np.array([seq not in again for seq in plan.seqs]))

    edit_plans(monkeypatch, onto_the_old)
    assert is_noticed(lambda: resumed("qwen3_5", monkeypatch))
