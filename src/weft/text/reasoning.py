"""Separation of a model's reasoning from its answer.

    <think>            written by the model, or by the prompt template
    ... reasoning ...
    </think>
    ... content ...

``ReasoningSplitter`` takes the text of an answer in pieces of any size and divides each into reasoning and content. The
result does not depend on how the text is cut into pieces. Together, reasoning and content have every character of the
answer, except the markers and the line ends next to them.

Reasoning can only be at the beginning of an answer: a ``<think>`` after some content is content, except for Gemma 4,
which may reason again (``again``). If the prompt ends with the start marker, the answer begins inside the reasoning. A
repeated marker is skipped, at the start and at the end. An answer that ends within its reasoning has no content.

Each format is a row of FORMATS. ``auto`` takes the first format whose markers the chat template writes, or whose
markers are tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from weft.errors import ConfigError
from weft.text.choices import first_marker, held_characters

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A format of reasoning. ``opened``: answers begin inside the reasoning, even if the prompt does not show it.
    ``signs``: texts that identify the format, if the markers do not. ``label``: a line after the start marker that is
    not part of the reasoning. ``again``: reasoning may also follow content. ``frame``: texts before and after content,
    and after the answer, which are left out (Kimi K3). ``bare_end``: an answer without reasoning may begin with the end
    marker (MiniMax-M3). ``harmony`` and ``inkling`` are read by
    ``weft.text.channels``."""

    name: str
    start: str
    end: str
    opened: bool = False
    signs: tuple[str, ...] = ()
    label: str = ""
    again: bool = False
    frame: tuple[str, ...] = ()
    bare_end: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts of the format that may be single tokens."""
        return (self.start, self.end, *self.frame, *(self.signs if self.frame else ()))

    def around(self, *, begun: bool, calls: bool) -> tuple[str, str]:
        """Return the texts before and after content, or after empty content and before calls. ``begun``: the prompt
        has the first one."""
        if not self.frame:
            return "", ""
        open, close, end = self.frame
        before = "" if begun else open
        return (before + close, end) if calls else (before, close + end)


FORMATS: tuple[ReasoningFormat, ...] = (
    ReasoningFormat("think", "<think>", "</think>"),
    ReasoningFormat("deepseek_r1", "<think>", "</think>", opened=True),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
    ReasoningFormat("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningFormat("apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
    ReasoningFormat(
        "kimi_k3",
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        signs=("<|open|>", "<|close|>", "<|sep|>"),
        frame=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    ReasoningFormat("plamo3", "<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    ReasoningFormat("minimax_m3", "<mm:think>", "</mm:think>", bare_end=True),
    ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
    ReasoningFormat(
        "gemma4", "<|channel>", "<channel|>", signs=("<|channel>", "<channel|>"), label="thought", again=True
    ),
    ReasoningFormat("harmony", "<|channel|>analysis<|message|>", "<|end|>", signs=("<|channel|>", "<|message|>")),
    ReasoningFormat(
        "inkling", "<|content_thinking|>", "<|end_message|>", signs=("<|content_thinking|>", "<|content_text|>")
    ),
)
NAMES = tuple(row.name for row in FORMATS)


def reasoning_format(name: str, template: str, has_token: Callable[[str], bool]) -> ReasoningFormat | None:
    """Return the row called ``name``; with "auto" the row whose signs are in ``template`` (its source) or the
    vocabulary; None for "none", and if no row matches. Raise ConfigError that lists the names."""
    check_reasoning_parser(name)
    if name == NONE:
        return None
    if name != AUTO:
        return next(row for row in FORMATS if row.name == name)
    candidates = [row for row in FORMATS if not row.opened]
    written = (row for row in candidates if _is_in(template, row))
    known = (row for row in candidates if all(map(has_token, row.signs or (row.start, row.end))))
    return next(written, None) or next(known, None)


def _is_in(template: str, row: ReasoningFormat) -> bool:
    return all(sign in template for sign in row.signs) if row.signs else row.start in template or row.end in template


def check_reasoning_parser(name: str) -> None:
    if name not in (AUTO, NONE, *NAMES):
        raise ConfigError(
            f"--reasoning-parser {name!r} is unknown; there are {', '.join((AUTO, NONE, *NAMES))}",
            param="--reasoning-parser",
        )


def begins_inside(row: ReasoningFormat, prompt: str, continued: str | None = None) -> bool:
    """Return whether the text that follows ``prompt`` is reasoning from its first character. ``continued``: the
    beginning of the answer, if the prompt ends with one."""
    if continued is not None:
        return continued.rfind(row.start) > continued.rfind(row.end)
    return row.opened or prompt.rstrip().endswith(row.start)


@dataclass(frozen=True, slots=True)
class Split:
    reasoning: str = ""
    content: str = ""


class _State(Enum):
    BEFORE = auto()
    """Only whitespace so far: a start marker may follow."""
    INSIDE = auto()
    BEHIND = auto()
    """After the end marker: line ends, and more end markers."""
    CONTENT = auto()


class ReasoningSplitter:
    """A splitter of one answer. ``inside``: whether the prompt has opened the reasoning."""

    def __init__(self, row: ReasoningFormat, *, inside: bool) -> None:
        self._row = row
        self._opened = inside
        self._state = _State.BEFORE
        self._held = ""
        self._is_labelled = False
        """Whether the label was read, or is missing."""
        self._has_emitted = False
        """Whether some reasoning was emitted: line ends at the beginning of the reasoning are dropped."""
        self._waits = True
        """Whether more text is needed to classify the held-back text."""
        self.over = False
        """Whether the end marker was read."""

    @property
    def inside(self) -> bool:
        """Whether the next text is reasoning, as far as is known."""
        return self._state is _State.INSIDE or (self._state is _State.BEFORE and self._opened)

    @property
    def undecided(self) -> bool:
        """Whether the held-back text may begin a start marker, or content."""
        return self._state is _State.BEFORE and not self._opened

    @property
    def held_chars(self) -> int:
        """Number of characters at the end of the text so far that are not classified yet."""
        return len(self._held)

    @property
    def has_more(self) -> bool:
        """Whether text of the last piece waits for ``push("")``: a piece may have content before further reasoning."""
        return self._state is _State.INSIDE and not self._has_emitted and bool(self._held) and not self._waits

    def push(self, text: str) -> Split:
        self._held += text
        reasoning = content = ""
        if self._state is _State.BEFORE:
            self._begin()
        if self._state is _State.INSIDE:
            reasoning = self._reason()
        if self._state is _State.BEHIND:
            self._skip_ends()
        if self._state is _State.CONTENT:
            content = self._content()
        return Split(reasoning, content)

    def finish(self) -> Split:
        """End the answer: text that was held back for a marker is plain text."""
        rest, self._held = self._held, ""
        if self.inside:
            return Split(reasoning=rest.rstrip("\n") if self._has_emitted else rest.strip("\n"))
        return Split(content=rest)

    def _skip_ends(self) -> None:
        end = self._row.end
        self._held = self._held.lstrip("\n")
        while self._held.startswith(end):
            self._held = self._held[len(end) :].lstrip("\n")
        if not end.startswith(self._held):
            self._state = _State.CONTENT

    def _content(self) -> str:
        """Return the content up to the next reasoning, without texts of the frame."""
        start = self._row.start
        parts = []
        while (match := first_marker(self._held, self._row.frame)) is not None:
            parts.append(self._held[: match[0]])
            self._held = self._held[match[0] + len(match[1]) :]
        position = self._held.find(start) if self._row.again else -1
        safe = position if position >= 0 else len(self._held)
        if position < 0 and (self._row.again or self._row.frame):
            safe -= held_characters(self._held, (*self._row.frame, *((start,) if self._row.again else ())))
        content, self._held = "".join(parts) + self._held[:safe], self._held[safe:]
        if position >= 0:
            self._held = self._held[len(start) :]
            self._state, self.over = _State.INSIDE, False
            self._has_emitted = self._is_labelled = self._waits = False
        return content

    def _begin(self) -> None:
        bare = self._held.lstrip()
        start, end = self._row.start, self._row.end if self._row.bare_end and not self._opened else ""
        if bare.startswith(start):
            self._held, self._state = bare[len(start) :], _State.INSIDE
        elif end and bare.startswith(end):
            self._held, self._state = bare, _State.BEHIND
        elif not start.startswith(bare) and not end.startswith(bare):
            self._state = _State.INSIDE if self._opened else _State.CONTENT

    def _reason(self) -> str:
        end = self._row.end
        if not self._has_emitted:
            self._held = self._held.lstrip("\n")
        label = self._row.label
        if label and not self._is_labelled:
            self._waits = label.startswith(self._held)
            if self._waits:
                return ""
            self._is_labelled = True
            if self._held.startswith((f"{label}\n", f"{label}{end[:1]}")):
                self._held = self._held[len(label) :].lstrip("\n")
        self._waits = True
        position = self._held.find(end)
        if position >= 0:
            reasoning = self._held[:position].rstrip("\n")
            self._held, self._state, self.over = self._held[position + len(end) :], _State.BEHIND, True
            return reasoning
        safe = self._held[: len(self._held) - held_characters(self._held, (end,))].rstrip("\n")
        self._held = self._held[len(safe) :]
        self._has_emitted = self._has_emitted or bool(safe)
        return safe
