"""Stop strings count in content only: the answer is the content up to the stop string, however the text is cut."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from weft.text.channels import FORMATS as CHANNELS
from weft.text.channels import MessageReader, Thought
from weft.text.choices import StopStrings
from weft.text.reasoning import FORMATS, ReasoningFormat, ReasoningSplitter
from weft.text.stop_scope import AfterReasoning, InMessages, ScopedStops, StopScope

PLAIN = [row for row in FORMATS if row.name not in ("harmony", "inkling")]
WORDS = ("a", "b", "ab", "\n", "\n\n", "<", " ", "</", "thought")


def stopped(text: str, stops: StopStrings, scope: StopScope, rng: random.Random) -> tuple[str, str | None]:
    """Return what is shown of ``text``, in pieces cut anywhere, and the stop string that ended it."""
    scoped = ScopedStops(stops, scope)
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(12)))
    shown = "".join(scoped.push(text[a:b]) for a, b in pairwise([0, *cuts, len(text)]))
    return shown + scoped.flush(), scoped.stopped


def split(row: ReasoningFormat, text: str, *, inside: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(row, inside=inside)
    parts = [splitter.push(text)]
    while splitter.has_more:
        parts.append(splitter.push(""))
    parts.append(splitter.finish())
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


@pytest.mark.parametrize("row", PLAIN, ids=lambda row: row.name)
def test_the_answer_is_its_content_up_to_the_stop_string(row: ReasoningFormat) -> None:
    rng = random.Random(row.name)
    ended = reasoned = 0
    for _ in range(600):
        text = "".join(rng.choice((*WORDS, row.start, row.end)) for _ in range(rng.randrange(14)))
        inside, include = rng.random() < 0.5, rng.random() < 0.3
        strings = [rng.choice(("a", "ab", "ba", "\n\n", "b<", "aab", row.end[:3])) for _ in range(2)]
        reasoning, content = split(row, text, inside=inside)
        cut = StopStrings(strings, include=include)
        expected = cut.push(content)
        expected += "" if cut.stopped else cut.flush()
        scope = AfterReasoning(ReasoningSplitter(row, inside=inside))
        shown, stop = stopped(text, StopStrings(strings, include=include), scope, rng)
        assert stop == cut.stopped
        if row.again and stop is not None:
            continue  # what is shown may begin another thought
        assert split(row, shown, inside=inside)[1] == expected
        assert shown == text if stop is None else text.startswith(shown)
        ended += stop is not None
        reasoned += stop is not None and any(string in reasoning for string in strings)
    assert row.again or (ended > 50 and reasoned > 2)


@pytest.mark.parametrize(
    ("row", "text", "shown"),
    [
        (
            CHANNELS[0],
            "<|channel|>analysis<|message|>x: final<|end|><|start|>assistant<|channel|>final<|message|>Yes. Q: no",
            "<|channel|>analysis<|message|>x: final<|end|><|start|>assistant<|channel|>final<|message|>Yes. Q",
        ),
        (CHANNELS[1], "<|content_thinking|>a: b<|end_message|><|message_model|><|content_text|>c: d", ""),
        (CHANNELS[0], "<|channel|>analysis<|message|>x: final", ""),
        (CHANNELS[0], "Q: no markers", "Q"),
    ],
)
def test_stop_strings_count_in_the_bodies_of_messages(row: object, text: str, shown: str) -> None:
    rng = random.Random(2)
    for _ in range(30):
        scope = InMessages(row, None, takes_calls=True, thinks=True, single=False, eager=False)  # type: ignore[arg-type]
        got, stop = stopped(text, StopStrings([":"]), scope, rng)
        assert got == (shown or text.removesuffix(": d"))
        assert (stop is None) == (got == text)
        reader = MessageReader(row, None, takes_calls=True, thinks=True, single=False, eager=False)  # type: ignore[arg-type]
        parts = reader.push(got) + reader.finish(is_cut=False)
        assert all(isinstance(part, Thought) or ":" not in part for part in parts)  # type: ignore[operator]
