"""The head for multi-token prediction of the embedded model: it drafts, and changes no token and no bit."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.oracle.serving import Answer, Serving
from tests.support.graph_steps import EagerCapture
from train.checkpoint import load, load_mtp
from train.mtp import MtpHead, drafts
from weft.costs.rows import RowCosts
from weft.models.loading import LoadedModel, load_model
from weft.request import SamplingParams
from weft.runner.mtp import HeadRunner
from weft.runner.step_graphs import StepBlock
from weft.speculation.drafter import SourceName
from weft.speculation.speculator import Speculator
from weft.text.tokenizer import Tokenizer

EMBEDDED = Path(weft.__file__).parent / "embedded" / "weft-recall"
FREE = {rows: 1.0 + rows / 1000 for rows in (1, 2, 4, 8, 16, 32, 64)}
NEW_TOKENS = 24


@functools.cache
def with_head() -> LoadedModel:
    return load_model(EMBEDDED, mtp=True)


@functools.cache
def without_head() -> LoadedModel:
    return load_model(EMBEDDED)


def drafter(*sources: SourceName) -> Speculator:
    """One that finds every draft worth it."""
    return Speculator(sources or ("mtp",), costs=RowCosts(FREE), head_seconds={1: 1e-6, 2: 2e-6, 3: 3e-6})


@functools.cache
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.load(EMBEDDED)
    texts = [
        "Once upon",
        "Bemo: 4821, Tarlik Os: 77120, Venta: 99812.\n" * 3 + "Bemo: 4821, Tarlik",
        "the cat and the dog and the cat and the dog " * 8,
    ]
    return [tokenizer.encode(text) for text in texts]


def sampling(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True, **fields})


@dataclass(frozen=True)
class Case:
    engine: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    rounds: int = 1
    copies: int = 1


CASES = {
    "nothing else": Case(),
    "sampling and penalties": Case(sampling={"temperature": 0.8, "seed": 3, "frequency_penalty": 0.4}),
    "logprobs of answers and prompts": Case(sampling={"logprobs": 2, "prompt_logprobs": 1}),
    "prefix hits and snapshots": Case(engine={"cache": True, "snapshots": "every:64", "grid_tokens": 16}, rounds=2),
    "preemptions": Case(engine={"memory_bytes": 800_000, "max_model_len": 256}, sampling={"max_tokens": 40}, copies=3),
    "overlap": Case(engine={"overlap": True}),
    "padded decodes and chunks": Case(engine={"pad_decode_to": 5, "step_tokens": 40}, run={"stagger_steps": 2}),
    "KV in int8": Case(engine={"kv_dtype": "int8"}),
}


def rounds(case: Case, serving: Serving) -> list[Answer]:
    return [
        answer
        for _ in range(case.rounds)
        for answer in serving.run(prompts() * case.copies, sampling(**case.sampling), **case.run)
    ]


@pytest.mark.parametrize("name", CASES)
def test_the_head_changes_nothing_with(name: str) -> None:
    case = CASES[name]
    truth = rounds(case, Serving("", model=without_head(), **case.engine))
    source = drafter()
    answers = rounds(case, Serving("", model=with_head(), drafter=source, **case.engine))
    for answer, one in zip(answers, truth, strict=True):
        assert answer.tokens == one.tokens
        assert answer.logprobs == one.logprobs
        assert answer.prompt_logprobs == one.prompt_logprobs
        assert float((answer.logits - one.logits).abs().max()) == 0.0
    assert source.stats().sources["mtp"].accepted > 8
    if name == "preemptions":
        assert sum(answer.preemptions for answer in answers) > 0


def test_its_drafts_are_those_of_the_head_that_was_trained() -> None:
    """Draft 1 by ``train.mtp``, which computes the whole text at once, against the ones that were offered."""
    offered: list[tuple[int, ...]] = []

    class Listening(Speculator):
        def offer(self, key: int, tokens: Any, chances: Any) -> None:
            offered.append(tuple(tokens))
            super().offer(key, tokens, chances)

    prompt = prompts()[2]
    source = Listening(("mtp",), costs=RowCosts({1: 1.0, 2: 100.0}))  # no draft is worth a window
    assert source._head is not None
    source._head.drafts = lambda sequences, costs: 1  # type: ignore[method-assign]
    answer = Serving("", model=with_head(), drafter=source).run([prompt], sampling())[0]
    model, _ = load(EMBEDDED)
    head = MtpHead(model.shape)
    load_mtp(head, EMBEDDED)
    tokens = torch.tensor([[*prompt, *answer.tokens]])
    with torch.no_grad():
        hidden = drafts(model, head, tokens, 1)[0][0]
    best = (hidden @ model.embed_tokens.weight.T).argmax(-1).tolist()
    first = len(prompt) - 1
    assert [draft[0] for draft in offered] == best[first : first + len(offered)]
    assert len(offered) >= NEW_TOKENS - 1


def test_a_head_whose_keys_are_lost_is_wrong_more_often() -> None:
    """A control: without keys of the prompt a digit of a number cannot be looked up."""
    rights = []
    for spoilt in (False, True):
        source = drafter()
        serving = Serving("", model=with_head(), drafter=source)
        head = serving.executor._head
        assert head is not None
        if spoilt:
            run = head.run
            every = range(serving.core.memory.plan.page_count)
            head.run = lambda plan, inputs, hidden, result, head=head, run=run, every=every: (  # type: ignore[misc]
                run(plan, inputs, hidden, result),
                head.zero(every),
            )[0]
        serving.run([prompts()[1]], sampling(max_tokens=40))
        stats = source.stats()
        assert stats.sequence_steps
        rights.append(sum(one.accepted for one in stats.sources.values()) / stats.sequence_steps)
    assert rights[1] < rights[0] - 0.3


class Late(Speculator):
    """The head drafts from token ``begin`` of an answer on, and reads no prompt if that is not 0."""

    begin_at = 0

    def __init__(self) -> None:
        super().__init__(("mtp",), costs=RowCosts({1: 1.0, 2: 100.0}))  # no draft is worth a window
        self.offered: list[tuple[int, ...]] = []

    def head_drafts(self, sequences: int, *, prompts: bool) -> int | None:
        answers = [len(one.answer) for one in self._by_key.values()]
        return 1 if max(answers, default=0) >= self.begin_at else None

    def offer(self, key: int, tokens: Any, chances: Any) -> None:
        self.offered.append(tuple(tokens))


def test_a_head_that_begins_late_reads_nothing_of_other_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages were another sequence's, with keys of the head. Without zeros, the control, it reads them."""
    offers = []
    for recycled, zeroing in ((False, True), (True, True), (True, False)):
        if not zeroing:
            monkeypatch.setattr(HeadRunner, "zero", lambda self, pages: None)
        source = Late()
        serving = Serving("", model=with_head(), drafter=source, cache=False)
        if recycled:
            serving.run([prompts()[2]], sampling())
            assert source.offered
        source.begin_at, source.offered = 6, []
        serving.run([prompts()[1]], sampling())
        offers.append(source.offered)
    assert len(offers[0]) > 10
    assert offers[0] == offers[1]
    assert offers[0] != offers[2]


@pytest.mark.parametrize("copies", [1, 2])
def test_drafts_of_graphs_are_those_of_launches_from_python(copies: int) -> None:
    """Tokens and chances, beside prompts and behind verify runs; ``Listening`` has every offer."""
    offers: list[dict[int, list[Any]]] = []

    class Listening(Speculator):
        def offer(self, key: int, tokens: Any, chances: Any) -> None:
            offers[-1].setdefault(key, []).append((tuple(tokens), tuple(chances)))
            super().offer(key, tokens, chances)

    replays = 0
    for capture in (None, EagerCapture()):
        offers.append({})
        source = Listening(("mtp",), costs=RowCosts(FREE), head_seconds={1: 1e-6, 2: 2e-6, 3: 3e-6})
        serving = Serving("", model=with_head(), drafter=source, capture=capture)
        head = serving.executor._head
        assert head is not None
        if head.graphs is not None:
            graphs, replay = head.graphs._graphs, head.graphs._graphs.replay

            def counting(block: StepBlock, name: Any = None, replay: Any = replay) -> torch.Tensor:
                nonlocal replays
                replays += name == "draft"
                return replay(block, name)

            graphs.replay = counting  # type: ignore[method-assign]
        serving.run(prompts()[:2] * copies, sampling(), stagger_steps=1)
    plain, recorded = offers
    assert plain == recorded
    assert replays > len(recorded)
    assert max(len(tokens) for made in plain.values() for tokens, _ in made) == 3
