"""A budget of reasoning tokens: so many, then the end marker, then an answer as it would be without a budget.

Each test feeds tokens to the grammar as an engine would. A token here is a byte or a marker.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixtures import constrained
from weft.engine.grammars import GrammarCompiler
from weft.errors import RequestError
from weft.request import Grammar
from weft.text import channels
from weft.text.chat import ChatMessage
from weft.text.chat_request import ConversationFields, read_chat
from weft.text.dialect import Dialect
from weft.text.grammars import choice_grammar
from weft.text.reasoning import FORMATS, ReasoningFormat
from weft.text.tokenizer import Tokenizer
from weft.text.tools.definitions import ToolChoice, read_tools

ANSWER = choice_grammar(["sunny"], field="response_format")
TOOLS = read_tools([{"type": "function", "function": {"name": "get_time"}}])
TEXT_FORMATS = [row for row in FORMATS if row.name not in ("granite", "harmony", "inkling", "kimi_k3")]
MARKERS = tuple(
    dict.fromkeys(
        [
            *constrained.MARKERS,
            *(marker for row in TEXT_FORMATS for marker in (row.start, row.end)),
            *(marker for row in channels.FORMATS for marker in row.markers),
        ]
    )
)


EOS = "<|return|>"
"""The end of an answer; the other end marker ends a message."""


class Template:
    """A template that reads tools."""

    source = ""
    reads_tools = True


class Writer:
    """Tokens of one answer, checked against its grammar. ``markers``: those that are tokens."""

    def __init__(self, markers: tuple[str, ...] = MARKERS) -> None:
        backend = constrained.backend((*markers, EOS))
        self.tokenizer = Tokenizer(backend, decoder={"type": "ByteLevel"})
        self.end = backend.token_to_id(EOS)
        self._compiler = GrammarCompiler(backend.to_str, (self.end,), backend.get_vocab_size())
        self._matcher: Any = None
        self._count = 0

    def dialect(self, row: ReasoningFormat) -> Dialect:
        return Dialect(Template(), self.tokenizer, reasoning_parser=row.name, tool_parser="hermes")

    def begin(self, grammar: Grammar | None) -> Writer:
        assert grammar is not None
        compiled = self._compiler.compile(grammar)
        self._matcher, self._count = compiled.matcher(), compiled.token_count
        return self

    def allowed(self) -> set[int]:
        return set(constrained.allowed_tokens(self._matcher, self._count))

    def write(self, text: str) -> Writer:
        for token in self.tokenizer.encode(text):
            assert token in self.allowed(), f"{self.tokenizer.token_text(token)!r} of {text!r}"
            assert self._matcher.consume_token(token)
        return self

    def next_is(self, marker: str) -> bool:
        """Whether ``marker`` alone may follow."""
        return self.allowed() == {self.tokenizer.added_id(marker)}


@pytest.fixture(scope="module")
def writer() -> Writer:
    return Writer()


@pytest.mark.parametrize("row", TEXT_FORMATS, ids=lambda row: row.name)
@pytest.mark.parametrize("budget", [0, 1, 17, 500])
@pytest.mark.parametrize("grammar", [None, ANSWER], ids=["free", "choice"])
@pytest.mark.parametrize("opened", [False, True], ids=["unopened", "opened"])
def test_the_end_marker_follows_the_last_token_of_the_budget(
    writer: Writer, row: ReasoningFormat, budget: int, grammar: Grammar | None, *, opened: bool
) -> None:
    prompt = f"Hello.{row.start}" if opened else "Hello."
    plan = writer.dialect(row).plan(prompt, grammar=grammar, budget=budget)
    writer.begin(plan.grammar)
    if not opened and not row.opened:
        writer.write("sunny").begin(plan.grammar)  # it need not reason at all
        writer.write(row.start)
    if budget:
        writer.write("x" * (budget - 1))
        assert writer.tokenizer.added_id(row.end) in writer.allowed()
        writer.write("y")
    assert writer.next_is(row.end)
    writer.write(f"{row.end}\n\n")
    if grammar is None:
        writer.write("Any <tool_call> text.")
        assert writer.end in writer.allowed()
        free = writer.allowed()
        assert len(free) >= writer._count - 1, "all tokens, but the start of a second reasoning where there may be one"
    else:
        writer.write("sunny")
        assert writer.allowed() == {writer.end}


@pytest.mark.parametrize("row", TEXT_FORMATS, ids=lambda row: row.name)
def test_a_shorter_reasoning_ends_by_itself_and_an_answer_may_have_none(writer: Writer, row: ReasoningFormat) -> None:
    if not row.opened:
        plan = writer.dialect(row).plan("Hello.", budget=17)
        writer.begin(plan.grammar).write("No thought at all, and long enough.")
        assert writer.end in writer.allowed()
        writer.write(f"{row.start}{'x' * 17}")
        assert writer.next_is(row.end), "no reasoning without its budget"
        writer.begin(plan.grammar).write(f"\n{row.start}short{row.end}Yes.")
    opened = writer.dialect(row).plan(f"Hello.{row.start}", budget=17)
    writer.begin(opened.grammar).write(f"short{row.end}Yes.")
    assert writer.end in writer.allowed()


def test_models_that_reason_again_after_some_content_do_so_within_one_budget(writer: Writer) -> None:
    [row] = [row for row in FORMATS if row.again]
    plan = writer.dialect(row).plan("Hello.", budget=3)
    writer.begin(plan.grammar).write(f"{row.start}abc{row.end}So.")
    assert writer.tokenizer.added_id(row.start) not in writer.allowed()


def test_without_a_budget_or_without_reasoning_nothing_changes(writer: Writer) -> None:
    for row in FORMATS:
        dialect = writer.dialect(row)
        assert dialect.plan("Hello.").grammar is None
        assert dialect.plan("Hello.", grammar=ANSWER) == dialect.plan("Hello.", grammar=ANSWER, budget=None)
    think = writer.dialect(FORMATS[0])
    assert think.plan("Hello.<think>\n\n</think>\n\n", budget=5).grammar is None, "the template left the reasoning out"
    none = Dialect(Template(), writer.tokenizer, reasoning_parser="none")
    assert not none.bounds_reasoning
    assert none.plan("Hello.", budget=5).grammar is None


def test_a_marker_that_is_no_token_bounds_nothing_and_is_said(writer: Writer) -> None:
    [granite] = [row for row in FORMATS if row.name == "granite"]
    assert not writer.dialect(granite).bounds_reasoning
    assert writer.dialect(granite).plan("Hello.", budget=5).grammar is None
    plain = Writer(markers=())
    assert not plain.dialect(FORMATS[0]).bounds_reasoning
    assert all(writer.dialect(row).bounds_reasoning for row in FORMATS if row.name not in ("granite", "kimi_k3"))


@pytest.mark.parametrize("budget", [0, 1, 17, 500])
@pytest.mark.parametrize("grammar", [None, ANSWER], ids=["free", "choice"])
@pytest.mark.parametrize("row", channels.FORMATS, ids=lambda row: row.name)
def test_the_reasoning_message_of_a_channel_ends_with_its_budget(
    writer: Writer, row: channels.ChannelFormat, budget: int, grammar: Grammar | None
) -> None:
    dialect = Dialect(Template(), writer.tokenizer, reasoning_parser=row.name, tool_parser=row.name)
    plan = dialect.plan("Hello.", grammar=grammar, budget=budget)
    writer.begin(plan.grammar).write(f"{row.thought}{'x' * budget}")
    assert writer.next_is(row.end)
    writer.write(f"{row.end}{row.turn}")
    with pytest.raises(AssertionError, match=" of "):
        writer.begin(plan.grammar).write(f"{row.thought}{'x' * budget}{row.end}{row.turn}").write(row.thought)
    writer.begin(plan.grammar).write(f"{row.thought}{'x' * budget}{row.end}{row.turn}{row.answer}")
    if grammar is None:
        writer.write("It is noon.")
        assert writer.end in writer.allowed()
    else:
        writer.write("sunny")
    writer.begin(plan.grammar).write(f"{row.answer}{'It is.' if grammar is None else 'sunny'}")


def test_calls_in_a_channel_follow_a_bounded_reasoning(writer: Writer) -> None:
    row = channels.FORMATS[0]
    dialect = Dialect(Template(), writer.tokenizer, reasoning_parser=row.name, tool_parser=row.name)
    plan = dialect.plan("Hello.", tools=TOOLS, choice=ToolChoice("auto"), budget=4)
    writer.begin(plan.grammar).write(f"{row.thought}look{row.end}{row.turn}")
    writer.write("<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{}")
    writer.begin(plan.grammar).write(f"{row.thought}look{row.end}{row.turn}{row.answer}Noon.")


@pytest.mark.parametrize("budget", [-1, 1 << 40])
def test_a_budget_out_of_bounds_names_the_field_of_its_api(budget: int) -> None:
    fields = ConversationFields(
        messages=[ChatMessage(role="user", content="x")],
        thinking_token_budget=budget,
        budget_field="thinking.budget_tokens",
    )
    with pytest.raises(RequestError, match=rf"thinking\.budget_tokens is {budget}; it may be 0 to"):
        read_chat(fields, template_variables=())


def test_a_budget_alone_makes_no_call_sure(writer: Writer) -> None:
    """A stream holds the beginning of a call back, as without a budget: what breaks off is content."""
    broken = '</think><tool_call>{"name": "get_time", "arguments": {"x": and so on'
    prompt, dialect = "Hello.<think>", writer.dialect(FORMATS[0])
    for budget, choice in ((None, "auto"), (5, "auto")):
        plan = dialect.plan(prompt, tools=TOOLS, choice=ToolChoice(choice), budget=budget)
        reader = plan.reader(eager=True)
        events = [event for piece in (broken[:50], broken[50:]) for event in reader.read(piece, [1], None)]
        assert [event.block.kind for event in events if event.block.is_call] == []
    required = dialect.plan(prompt, tools=TOOLS, choice=ToolChoice("required"), budget=5).reader(eager=True)
    assert any(event.block.is_call for event in required.read(broken, [1], None)), "a grammar of calls does"
