"""A request for a chat answer, prepared once for the server and the Python API.

    ConversationFields --read_chat--> ChatRequest --template--> ChatPrompt --encode_prompt--> Prompt
                                          |             |
                                          |             '-- text, and characters where a state is worth it
                                          '-- plan(dialect, prompt, grammar) --> AnswerPlan: grammar, reader

``ChatRequest`` holds the checked fields: messages, tools, the choice of a tool, the variables of the
template. The Python API renders in its own process (``weft.text.template_worker.chat_prompt``). The server
has a ``TemplateSandbox`` for it:

    write(messages) --small--> worker 1 \\
                    --large--> worker 2 / --> ChatPrompt | RequestError

A template comes with the weights, from a stranger, and messages come from clients. Either can make a
rendering endless. So it runs in a process with limits of time, memory and characters. A worker that exceeds
its time is killed; the next conversation starts another. Small conversations have a worker of their own:
they never wait for one of megabytes. Each worker takes one conversation at a time, and the line before it is
bounded (law L11).

*Boundaries* are positions up to which another conversation is likely to be the same. *Marks* are positions that the
client set with a ``cache_control``.

Structs of msgspec, because a frozen dataclass takes ten times longer to construct.
"""

from __future__ import annotations

import asyncio
import hashlib
import marshal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from weft.errors import CheckpointError, ContextLengthError, RequestError, maximum_context
from weft.request import Grammar, PictureKind, PlacedPicture, Pooling
from weft.text.chat import ChatMessage
from weft.text.control_tokens import NO_CONTROL, ControlTexts
from weft.text.dialect import AnswerPlan, Dialect
from weft.text.grammars import BUDGET_FIELD
from weft.text.pictures import PicturePart, placed, split_pictures, with_pictures, without_unread_results
from weft.text.template_worker import Answer, ChatPrompt, Refused, TemplateFacts, TemplateStart, without_marks
from weft.text.tokenizer import Tokenizer
from weft.text.tools.definitions import Tool, ToolChoice, hosted_types, read_choice, read_tools, unheld_formats
from weft.text.tools.formats import NONE, ToolFormat
from weft.text.worker_main import JobFunction
from weft.text.workers import BoundedWorker, WorkerLane

if TYPE_CHECKING:
    from weft.images.picture import Picture

_decode_answer = msgspec.msgpack.Decoder[Answer](Answer).decode
LARGE_BYTES = 256 << 10
"""Bytes from which on a conversation waits in the line of large ones."""
LINE_MAX = 256
_START_WITHIN_S = 10.0
"""Seconds for the start of Python, which is slow on a machine that is busy."""
BUDGET_MAX = 1 << 30
"""Most tokens of reasoning that a request may allow; no context is as long."""
_PREDICTION = '{"type": "content", "content": text or a list of text parts}'


class ConversationFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that shape the prompt of a chat, under the template's names instead of an API's: unchecked.
    ``variables``: extra ones for the template; ``effort_field``: the API's own name of ``reasoning_effort``.
    ``thinking_token_budget``: most tokens of the reasoning; ``budget_field``: the API's own name of it."""

    messages: list[ChatMessage]
    tools: Sequence[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    variables: Mapping[str, Any] | None = None
    documents: list[Any] | None = None
    reasoning_effort: str | None = None
    effort_field: str = "reasoning_effort"
    thinking_token_budget: int | None = None
    budget_field: str = BUDGET_FIELD
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request for a chat answer. ``variables``: seen by the template besides the messages. ``pictures``:
    contents of the parts of the messages that are pictures. ``several_calls``: an answer may call more than one tool.
    ``left_out``: names of requested fields that the client does not need and does not get."""

    messages: list[ChatMessage]
    pictures: list[PicturePart] = []
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice("none")
    several_calls: bool = True
    variables: dict[str, Any]
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    thinking_token_budget: int | None = None
    left_out: list[str] = []

    @property
    def rendering(self) -> dict[str, Any]:
        """The arguments of ``chat_prompt`` besides the messages. Its tools still have their
        ``cache_control``, which the template does not see."""
        tools = [tool.definition for tool in self.tools] if "tools" in self.variables else []
        return {
            "add_generation_prompt": self.add_generation_prompt,
            "tools": tools,
            "continue_final_message": self.continue_final_message,
            "variables": self.variables,
        }

    def plan(self, dialect: Dialect, prompt: str, grammar: Grammar | None) -> AnswerPlan:
        """Return the plan of the answer. ``prompt``: the rendered text; ``grammar``: the structured output that the
        request asks for. Raise RequestError."""
        continued = _content_text(self.messages[-1]) if self.continue_final_message else None
        return dialect.plan(
            prompt,
            tools=self.tools,
            choice=self.choice,
            several_calls=self.several_calls,
            grammar=grammar,
            continued=continued,
            budget=self.thinking_token_budget,
        )


class Prompt(msgspec.Struct, frozen=True):
    """A prompt in tokens. ``text`` is None for a prompt that came as token ids; echo then decodes them. ``boundaries``,
    ``marks``, ``prediction``, ``pictures`` and ``pooling`` as in ``Request``."""

    tokens: list[int]
    text: str | None = None
    boundaries: list[int] = []
    marks: list[int] = []
    prediction: list[int] = []
    pictures: list[PlacedPicture] = []
    pooling: Pooling | None = None


def read_chat(
    conversation: ConversationFields, *, template_variables: Collection[str], reads: Collection[PictureKind] = ()
) -> ChatRequest:
    """Check a conversation. ``template_variables``: the names that the template reads. ``reads``: kinds of pictures
    that the model reads. Raise RequestError that names the field."""
    checked = read_tools(conversation.tools)
    choice = read_choice(conversation.tool_choice, checked)
    shown: dict[str, Any] = dict(conversation.variables or {})
    if checked and choice.mode != "none":
        shown["tools"] = without_marks([tool.definition for tool in checked])
    left_out = [f"tools.{kind}" for kind in hosted_types(conversation.tools)]
    left_out += [f"tools.{name}.format" for name in unheld_formats(conversation.tools)]
    for name in ("documents", "reasoning_effort"):
        value = getattr(conversation, name)
        if value is None:
            continue
        if name in template_variables:
            shown[name] = value
        elif name == "documents" and value:
            raise RequestError(
                f"{name} is not supported: this model's chat template does not use it",
                param=name,
                code="unsupported_parameter",
            )
        elif name == "reasoning_effort" and value != "none":
            left_out.append(conversation.effort_field)
    budget = conversation.thinking_token_budget
    if budget is not None and not 0 <= budget <= BUDGET_MAX:
        field = conversation.budget_field
        raise RequestError(f"{field} is {budget}; it may be 0 to {BUDGET_MAX}", param=field)
    messages = conversation.messages
    pictures: list[PicturePart] = []
    if any(isinstance(message.content, list) for message in messages):
        messages, unread = without_unread_results(messages, reads=reads)
        left_out += unread
        messages, pictures = split_pictures(messages, reads=reads)
    return ChatRequest(
        messages=messages,
        pictures=pictures,
        tools=checked,
        choice=choice,
        several_calls=conversation.parallel_tool_calls is not False,
        variables=shown,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=bool(conversation.continue_final_message),
        thinking_token_budget=budget,
        left_out=left_out,
    )


def template_worker(memory_bytes: int) -> BoundedWorker:
    """Return a process that may begin with a template later. By then it has imported the modules that rendering
    needs."""
    return BoundedWorker(JobFunction("weft.text.template_worker:prepare", memory_bytes))


class TemplateSandbox:
    """The process that renders one model's template, within limits. ``source`` is the template, ``origin`` says where
    it came from. ``worker``: one that has not begun. ``control``: tokens that no text of a request becomes. ``calls``:
    how the model writes calls, if that is known. Raises CheckpointError if the template cannot be compiled within the
    limits."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str],
        origin: str,
        seconds: float,
        chars_max: int,
        memory_bytes: int,
        worker: BoundedWorker | None = None,
        control: ControlTexts = NO_CONTROL,
        calls: ToolFormat | None = None,
    ) -> None:
        self.source = source
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._start = msgspec.msgpack.encode(
            TemplateStart(source, dict(special_tokens), origin, chars_max, control, calls.name if calls else NONE)
        )
        worker, facts = self._begun(worker or template_worker(memory_bytes))
        self._lanes = tuple(
            WorkerLane(self._worker, seconds, first, workers=2, line_max=LINE_MAX) for first in (worker, None)
        )
        self.variables = frozenset(facts.variables)
        self.reads_tools = facts.reads_tools

    async def write(self, messages: list[ChatMessage], *, key: str = "", **job: Any) -> ChatPrompt:
        """Render ``messages`` in a worker. ``key``: the API key that asks; ``job``: the arguments of
        ``weft.text.template_worker.chat_prompt``.

        Raises RequestError for a refusal of the template and for an exceeded limit, and EngineUnavailableError where
        too many conversations wait."""
        try:
            body = marshal.dumps({"messages": msgspec.to_builtins(messages), **job})
        except (RecursionError, ValueError):
            raise RequestError("messages: nested too deeply", param="messages") from None
        lane = self._lanes[len(body) >= LARGE_BYTES]
        lane.check_line(key, "conversations wait to be rendered")
        try:
            raw = await lane.ask(body, key)
        except TimeoutError:
            raise RequestError(
                f"the chat template takes more than {self._seconds:g} s for these messages (limits.template_seconds)",
                param="messages",
            ) from None
        except OSError:
            raise RequestError("the chat template ended its process on these messages", param="messages") from None
        answer = _decode_answer(raw) if len(raw) < LARGE_BYTES else await asyncio.to_thread(_decode_answer, raw)
        if isinstance(answer, Refused):
            raise RequestError(answer.message, param=answer.param, code=answer.code)
        assert isinstance(answer, ChatPrompt)
        return answer

    def close(self) -> None:
        for lane in self._lanes:
            lane.end()

    def _worker(self) -> BoundedWorker:
        return self._begun(template_worker(self._memory_bytes))[0]

    def _begun(self, worker: BoundedWorker) -> tuple[BoundedWorker, TemplateFacts]:
        """Return the worker, once it has compiled the template. Raises CheckpointError."""
        worker.begin(self._start)
        limit_s = self._seconds + _START_WITHIN_S
        try:
            raw = worker.receive(0, limit_s)
        except OSError:
            raise CheckpointError(
                "the chat template ended the process that compiled it", param="--chat-template"
            ) from None
        if raw is None:
            worker.end()
            raise CheckpointError(
                f"the chat template takes more than {limit_s:g} s to compile", param="--chat-template"
            )
        answer = _decode_answer(raw)
        if isinstance(answer, Refused):
            raise CheckpointError(answer.message, param="--chat-template")
        assert isinstance(answer, TemplateFacts)
        return worker, answer


@dataclass(frozen=True, slots=True)
class KnownPrefix:
    """Tokens that a model has read and written: an earlier prompt and its answer. Their text has ``chars``
    characters and the SHA-256 ``digest``."""

    tokens: list[int]
    chars: int
    digest: bytes

    def begins(self, text: str) -> bool:
        return self.chars <= len(text) and text_digest(text[: self.chars]) == self.digest


def text_digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def encode_prompt(
    tokenizer: Tokenizer, prompt: ChatPrompt, *, add_special_tokens: bool = False, known: KnownPrefix | None = None
) -> Prompt:
    """Tokenize ``prompt``. ``known``: tokens that replace the beginning of the text, if it is the same text. A model
    writes a text in other tokens than the tokenizer does, and the cache has the model's own."""
    places = [*prompt.ends, *prompt.marks, *(at for picture in prompt.pictures for at, _, _ in picture.spans)]
    # The digest of a text does not cover its pictures.
    if known is not None and not prompt.pictures and known.begins(prompt.text):
        rest, positions = tokenizer.encode_with_boundaries(
            prompt.text[known.chars :],
            [max(at - known.chars, 0) for at in places],
            add_special_tokens=False,
            quoted=[at - known.chars for at in prompt.quoted if at >= known.chars],
        )
        if rest and tokenizer.is_added(rest[0]):  # a token could reach over the boundary
            positions = [len(known.tokens) + at for at in positions]
            return _encoded([*known.tokens, *rest], positions, prompt)
    if not places:
        tokens = tokenizer.encode(prompt.text, add_special_tokens=add_special_tokens, quoted=prompt.quoted)
        return Prompt(tokens, prompt.text)
    tokens, positions = tokenizer.encode_with_boundaries(
        prompt.text, places, add_special_tokens=add_special_tokens, quoted=prompt.quoted
    )
    return _encoded(tokens, positions, prompt)


def _encoded(tokens: list[int], positions: list[int], prompt: ChatPrompt) -> Prompt:
    ends, marks = len(prompt.ends), len(prompt.ends) + len(prompt.marks)
    pictures = placed(prompt.pictures, positions[marks:]) if prompt.pictures else []
    return Prompt(
        tokens,
        prompt.text,
        sorted(set(positions[:ends])),
        [at for at in positions[ends:marks] if at],
        pictures=pictures,
    )


def show_pictures(prompt: ChatPrompt, pictures: Sequence[Picture], tokens: Mapping[PictureKind, str]) -> ChatPrompt:
    """Return ``prompt``, as the template wrote it, with the tokens of each picture's rows. ``tokens``: as in
    ``with_pictures``. Raise RequestError."""
    text, shown, (ends, marks, quoted) = with_pictures(
        prompt.text, (prompt.ends, prompt.marks, prompt.quoted), pictures, tokens, quoted=prompt.quoted
    )
    return ChatPrompt(text, ends, marks, shown, quoted)


class PictureSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of a picture in a prompt, one span for each tile. ``part``: of the request. ``offset``: in tokens.
    ``digest``: of the picture, in hex."""

    part: str
    kind: PictureKind
    offset: int
    rows: int
    digest: str


def check_spans(chat: ChatRequest, encoded: Prompt, longest: int) -> None:
    """Raise ContextLengthError that names the first picture beyond the context."""
    for span in picture_spans(chat, encoded):
        if span.offset + span.rows > longest:
            raise ContextLengthError(
                f"{span.part}: this {'picture' if span.kind == 'image' else 'video'} has rows up to token "
                f"{span.offset + span.rows} of the prompt; {maximum_context(longest)}",
                param=span.part,
                tokens=len(encoded.tokens),
                limit=longest,
            )


def picture_spans(chat: ChatRequest, encoded: Prompt) -> list[PictureSpan]:
    return [
        PictureSpan(part=part.where, kind=part.kind, offset=offset, rows=rows, digest=picture.digest.hex())
        for part, picture in zip(chat.pictures, encoded.pictures, strict=True)
        for offset, rows in picture.places
    ]


def _content_text(message: ChatMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    parts = message.content or ()
    return "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in parts)


def predicted_text(value: Any) -> str | None:
    """Return the text in ``value`` of the field ``prediction``, the client's own guess of the answer: a source of
    drafts, which changes no token. None without one. Raise RequestError that names the place."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _wrong_prediction("prediction", f"it must be {_PREDICTION}")
    if value.get("type") != "content":
        raise _wrong_prediction("prediction.type", f"it is {value.get('type')!r}; it must be 'content'")
    content = value.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong_prediction("prediction.content", "it must be text or a list of text parts")
    texts = []
    for at, part in enumerate(content):
        place = f"prediction.content[{at}]"
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise _wrong_prediction(place, f"it is {str(kind)[:100]!r}; parts of a prediction have the type 'text'")
        if not isinstance(part.get("text"), str):
            raise _wrong_prediction(f"{place}.text", "it must be text")
        texts.append(part["text"])
    return "".join(texts)


def _wrong_prediction(place: str, why: str) -> RequestError:
    return RequestError(f"{place}: {why}", param=place, code="invalid_type")
