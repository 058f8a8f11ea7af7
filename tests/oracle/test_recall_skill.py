"""The shipped models answer through the engine, and stop answering when the engine's memory is damaged.

This is where a memory bug shows as a wrong answer instead of a number in the fifth decimal. Prompts are
prefilled in chunks that end at a border in the middle of the text; there, what the engine holds for the
sequence is damaged in the device arena: its pages (the embedded model, whose long memory is KV) or its slot
(the states-only model, which has nothing else). Damage is zeros, or what the sequence before held there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

import weft
from train.codes import make_codes_episodes
from weft.config import EngineConfig
from weft.engine.engine import EngineCore
from weft.memory.frames.plan import fit_sizes, plan_arena
from weft.memory.memory import Memory
from weft.models.loading import load_model
from weft.request import Request, SamplingParams
from weft.runner.torch_executor import TorchExecutor
from weft.schedule.plan import StepPlan
from weft.text.chat import ChatMessage, load_chat_template
from weft.text.tokenizer import Tokenizer
from weft.units import PAGE_TOKENS
from weft_tools.eval.recall import Episode, is_right, make_episodes

EMBEDDED = Path(weft.__file__).parent / "embedded" / "weft-recall"
STATES_ONLY = Path(__file__).parents[1] / "data" / "states-only"
SEED = 7
GREEDY = SamplingParams(temperature=0.0, max_tokens=32)


class Exam:
    """One engine, asked one question at a time. ``damaged``: "pages" or "slot", with ``source`` "zeros" or
    "another"; or "nothing"."""

    def __init__(self, directory: Path, border: int, damaged: str = "nothing", source: str = "zeros") -> None:
        loaded = load_model(directory)
        self.tokenizer = Tokenizer.load(directory)
        self.damage_count = 0
        template = load_chat_template(directory, special_tokens=self.tokenizer.special_tokens)
        assert template is not None
        self._template = template
        self._border, self._damaged, self._source = border, damaged, source
        self._arena = plan_arena(loaded.spec, 32 << 20)
        config = EngineConfig(max_num_seqs=1, max_num_batched_tokens=border + 1, max_model_len=2048)
        sizes = fit_sizes(config, loaded.spec, self._arena)
        self._executor = TorchExecutor(loaded.model, self._arena, sizes, before_step=self._before_step)
        self._core = EngineCore(
            vocab_size=loaded.spec.vocab_size,
            sizes=sizes,
            memory=Memory(self._arena),
            executor=self._executor,
            clock=lambda: 0.0,
            seed=0,
            eos_ids=loaded.generation_defaults.eos_ids,
        )
        self._pages: list[int] = []
        self._held_before: list[torch.Tensor] = []

    def count_tokens(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def accuracy(self, episodes: Sequence[Episode], count: int) -> float:
        """Share of right answers to ``count`` questions, the first of each episode that reaches past the
        border: little was said again there, and the sequence before is another conversation."""
        right = asked = 0
        for episode in episodes:
            for index, turn in enumerate(episode.turns):
                messages = msgspec.convert(episode.messages_before(index), list[ChatMessage])
                prompt = self.tokenizer.encode(self._template.render(messages), add_special_tokens=False)
                # a prompt of border + 1 tokens would be computed in one piece
                if turn.kind == "recall" and len(prompt) > self._border + 1:
                    right += is_right(self._answer(prompt), turn.reply)
                    asked += 1
                    break
            if asked == count:
                return right / asked
        raise AssertionError(f"only {asked} questions reach past token {self._border}")

    def _answer(self, prompt: list[int]) -> str:
        self._core.submit(Request(request_id="question", prompt_tokens=prompt, sampling=GREEDY))
        tokens: list[int] = []
        while self._core.has_work:
            for event in self._core.step():
                tokens += event.tokens
            assert self._core.failure is None, self._core.failure
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def _before_step(self, plan: StepPlan) -> None:
        if plan.admissions:
            self._pages = []
        self._pages += plan.table_writes[2].tolist()
        if self._damaged == "nothing" or plan.run_count == 0 or plan.starts[0] != self._border:
            return
        self.damage_count += 1
        places = self._places(int(plan.slots[0]))
        held = [place.clone() for place in places]
        for at, place in enumerate(places):
            # The first sequence has nobody before it: zeros for that one.
            place.copy_(
                self._held_before[at] if self._source == "another" and self._held_before else torch.zeros_like(place)
            )
        self._held_before = held

    def _places(self, slot: int) -> list[torch.Tensor]:
        """The bytes of the sequence's state, or of its pages before the border."""
        buffer = self._executor.arena.buffer
        if self._damaged == "slot":
            return [buffer.view(-1, self._arena.slot_stride_bytes)[slot]]
        pages = buffer.view(-1, self._arena.page_bytes)
        return [pages[page] for page in self._pages[: self._border // PAGE_TOKENS]]


recall_exam = functools.partial(Exam, EMBEDDED, 384)
codes_exam = functools.partial(Exam, STATES_ONLY, 128)


def recall_episodes(exam: Exam) -> list[Episode]:
    return make_episodes(SEED, 640, 100, exam.count_tokens)


def codes_episodes(exam: Exam) -> list[Episode]:
    return make_codes_episodes(SEED, 256, 120, exam.count_tokens)


def test_the_embedded_model_recalls_through_the_engine() -> None:
    exam = recall_exam()
    assert exam.accuracy(recall_episodes(exam), 80) >= 0.95


@pytest.mark.parametrize("source", ["zeros", "another"])
def test_the_embedded_model_forgets_when_its_pages_are_damaged(source: str) -> None:
    exam = recall_exam(damaged="pages", source=source)
    assert exam.accuracy(recall_episodes(exam), 30) < 0.2
    assert exam.damage_count == 30


def test_the_states_only_model_recalls_through_the_engine() -> None:
    exam = codes_exam()
    assert exam.accuracy(codes_episodes(exam), 80) >= 0.95


@pytest.mark.parametrize("source", ["zeros", "another"])
def test_the_states_only_model_forgets_when_its_states_are_damaged(source: str) -> None:
    exam = codes_exam(damaged="slot", source=source)
    assert exam.accuracy(codes_episodes(exam), 30) < 0.3
    assert exam.damage_count == 30
