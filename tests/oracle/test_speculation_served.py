"""Speculation beside what lies around the model: compaction, sleep, stop strings, reasoning, tools, salts.

The replies of an engine with drafts are those of one without, and drafts were right in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.oracle.serving import Serving
from tests.oracle.test_engine_compaction import PROMPTS, SAMPLINGS
from tests.oracle.test_engine_speculation import Speculating, loaded
from tests.server.scripted_engine import _FreeRows, build, write_model_directory
from tests.server.test_tools import CALL, TEMPLATES, TIME, WEATHER, stop_at_end
from weft import Engine
from weft.costs.rows import RowCosts
from weft.memory.reservation import Reservation
from weft.memory.transaction import Transaction
from weft.request import SamplingParams
from weft.speculation.speculator import Speculator

SPACE = {"memory": "64MiB", "max_num_seqs": 4}


def test_compaction_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    samplings = [SamplingParams(temperature=0.0, max_tokens=one.max_tokens, ignore_eos=True) for one in SAMPLINGS[:7]]
    space: dict[str, Any] = {
        "memory_bytes": 1 << 20,
        "step_tokens": 128,
        "max_num_seqs": 12,
        "max_model_len": 320,
        "cache": True,
    }
    how: dict[str, Any] = {"stagger_steps": 1, "boundaries": [64]}
    truth = Serving("qwen3_5", model=loaded("qwen3_5"), **space).run(PROMPTS[:7], samplings, **how)
    seal = Transaction.seal

    def sealing(transaction: Transaction) -> Reservation:
        transaction.compact()
        return seal(transaction)

    monkeypatch.setattr(Transaction, "seal", sealing)
    speculating = Speculating(
        "qwen3_5", before_step=lambda serving, plan: None if plan.step % 3 else serving.core.flush_cache(), **space
    )
    answers = speculating.run("random", PROMPTS[:7], truth, samplings, **how)
    for answer, one in zip(answers, truth, strict=True):
        assert answer.tokens == one.tokens
        assert float((answer.logits - one.logits).abs().max()) == 0.0
    assert speculating.serving.core.memory.usage().moves.pages > 0
    assert speculating.serving.core.memory.usage().moves.slots > 0
    assert speculating.drafter.accepted > 5


def embedded(speculate: str) -> Engine:
    engine = Engine(speculate=speculate, **SPACE)
    drafter = engine._core.drafter
    if isinstance(drafter, Speculator):
        drafter.costs = _FreeRows()
    return engine


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_between_answers(level: int) -> None:
    question = [{"role": "user", "content": "Bemo: 4821, Tarlik Os: 77120. What is Tarlik Os's number?"}]
    with embedded("off") as plain, embedded("mtp,suffix") as drafting:
        expected = plain.chat(question, temperature=0.0, max_tokens=32).text
        for _ in range(2):
            before = drafting.stats().speculation.accepted
            assert drafting.chat(question, temperature=0.0, max_tokens=32).text == expected
            assert drafting.stats().speculation.accepted > before + 3
            drafting.sleep(level)
            drafting.wake_up()


def test_n_answers_and_a_cancel_inside_windows() -> None:
    """A stream that is left early is canceled; the same question is then answered as without drafts."""
    prompt = "Bemo: 4821, Tarlik Os: 77120, Bemo: 4821, Tarlik Os: 77120, Bemo:"
    how: dict[str, Any] = {"temperature": 0.7, "seed": 3, "max_tokens": 40, "ignore_eos": True}
    with embedded("off") as plain, embedded("prediction,tree,suffix") as drafting:
        costs = drafting._core.drafter.costs  # type: ignore[union-attr]
        for rows in (2, 4) * 3:
            RowCosts.note(costs, rows, 1.0)
        one, *others = (reply.text for reply in plain.generate(prompt, progress=False, n=3, **how))
        assert one not in others
        pieces = drafting.stream(prompt, prediction=one, **how)
        heard = "".join(next(pieces).text for _ in range(3))
        pieces.close()  # type: ignore[attr-defined]
        assert one.startswith(heard)
        replies = drafting.generate(prompt, progress=False, n=3, prediction=one, **how)
        assert [reply.text for reply in replies] == [one, *others]
        assert drafting.stats().speculation.accepted > 20


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    template = stop_at_end((TEMPLATES / "hermes_think.jinja").read_text())
    directory: Path = write_model_directory(tmp_path_factory.mktemp("hermes"), template=template)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "weft.api.engine.assemble", lambda config, *, on_progress: build(config, on_progress=lambda text: None)
        )
        plain, drafting = Engine(str(directory)), Engine(str(directory), speculate="prediction")
    with plain, drafting:
        yield plain, drafting


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("one two STOP three four", {"stop": ["STOP"]}),
        ("one two three four five", {"stop": ["o th", "never"]}),
        ("<think>cold? or warm?</think>It is cold.", {}),
        (f"<think>cold?</think>I look. {CALL}", {"tools": [WEATHER, TIME]}),
        (f"{CALL}{CALL}", {"tools": [WEATHER, TIME]}),
    ],
    ids=["a stop string", "a stop string across tokens", "reasoning", "reasoning and a call", "two calls"],
)
def test_marks_inside_a_window(engines: tuple[Engine, Engine], text: str, fields: dict[str, Any]) -> None:
    """``</think>`` in a draft window, mangled tool calls, ends that cross one: reports of other engines."""
    plain, drafting = engines
    messages = [{"role": "user", "content": f"say:{text}"}]
    before = drafting.stats().speculation.accepted
    expected = plain.chat(messages, **fields)
    reply = drafting.chat(messages, prediction=text, **fields)
    assert (reply.text, reply.reasoning, reply.finish_reason) == (
        expected.text,
        expected.reasoning,
        expected.finish_reason,
    )
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [
        (call.name, call.arguments) for call in expected.tool_calls
    ]
    assert drafting.stats().speculation.accepted > before + 2


def test_salts_share_no_draft() -> None:
    """The same prompt twice: within a salt the second answer is drafted from the first, beyond it is not."""
    accepted = {}
    for salts in (("a", "a"), ("a", "b")):
        drafter = Speculator(("tree", "suffix"), costs=_FreeRows())
        serving = Serving("qwen3_5", model=loaded("qwen3_5"), cache=True, drafter=drafter)
        drafter._tree = serving.core.memory.prefix_tree
        sampling = SamplingParams(temperature=1.0, seed=4, max_tokens=30, ignore_eos=True)
        texts = [serving.run([PROMPTS[3]], sampling, salt=salt)[0].tokens for salt in salts]
        assert texts[0] == texts[1]
        accepted[salts] = drafter.stats().accepted
    assert accepted["a", "a"] > 15
    assert accepted["a", "b"] <= 2
