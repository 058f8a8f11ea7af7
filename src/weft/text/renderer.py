"""Conversations and texts to prompts in tokens, for the server and the Python API.

    ConversationFields --write_chat--> ChatRequest, ChatPrompt --encode_chat--> Prompt          both: render
                           |                |
                       template, pictures   '-- Dialect.plan_of --> AnswerPlan
    text --encode--> token ids

A renderer has everything of a model that turns text into tokens and back. It knows no HTTP. The server's template and
pictures wait for processes with limits, those of the Python API for nothing: ``finished`` runs its calls there.

The work for one text is bounded before it is done. ``check_text`` tokenizes the beginning of a text that is far too
long, ``part_for_cut`` the part that a cut leaves, and long texts are counted by a ``TokenizeBudget``.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from weft.errors import ContextLengthError, RequestError, maximum_context
from weft.request import PictureKind
from weft.text.chat import ChatMessage
from weft.text.chat_request import ChatRequest, ConversationFields, read_chat
from weft.text.current_request import note_ignored
from weft.text.dialect import Dialect, TemplateText
from weft.text.pictures import PicturePart
from weft.text.prompt import KnownPrefix, Prompt, encode_prompt, show_pictures
from weft.text.template_worker import ChatPrompt
from weft.text.text_parts import next_cut
from weft.text.tokenize_budget import TokenizeBudget
from weft.text.tokenizer import LONG_TEXT_CHARS, Tokenizer

if TYPE_CHECKING:
    from weft.images.picture import Picture

_HEAD_CHARS_PER_TOKEN = 16
"""Characters per token of the context. A longer text is first tokenized in part."""
_CUT_TOKENS_MIN = 1024
_CUT_WITHIN_CHARS = 4096
Encoded = TypeVar("Encoded")


class MessageWriter(TemplateText, Protocol):
    """Interface to a chat template: ``text.template_sandbox`` in a server."""

    @property
    def variables(self) -> Collection[str]: ...

    async def write(self, messages: list[ChatMessage], *, chars_cut: int, **rendering: Any) -> ChatPrompt:
        """Return the text of ``messages``. ``chars_cut``, ``rendering``: arguments of ``chat_prompt``. Raise
        RequestError."""
        ...


class PictureSource(Protocol):
    """Interface to the reader of pictures. ``tokens``: the model's picture tokens as text, by kind."""

    @property
    def tokens(self) -> Mapping[PictureKind, str]: ...

    async def read(self, parts: Sequence[PicturePart]) -> list[Picture]:
        """Read ``parts`` in order. Raise RequestError that names the part."""
        ...


@dataclass(frozen=True, slots=True)
class Renderer:
    """The text side of one model. ``template``: None for a model without a chat template. ``context_tokens``: the
    longest prompt. ``pictures``: None if the model reads only text. ``budget``: None for no bound. ``begun``: adds the
    first messages of a created name."""

    tokenizer: Tokenizer
    template: MessageWriter | None
    dialect: Dialect
    context_tokens: int
    pictures: PictureSource | None = None
    budget: TokenizeBudget | None = None
    begun: Callable[[list[ChatMessage]], list[ChatMessage]] | None = None

    def reads(self, variable: str) -> bool:
        """Return whether the chat template reads ``variable``."""
        return self.template is not None and variable in self.template.variables

    # ------------------------------------------------------------------ texts

    async def encode(self, text: str, *, add_special_tokens: bool, salt: str | None = None) -> list[int]:
        """Tokenize ``text``. ``salt``: see ``Tokenizer.encode_with_boundaries``. Raise as ``bounded``."""
        encode = functools.partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens, salt=salt)
        return await self.bounded(encode, text)

    async def bounded(self, encode: Callable[[], Encoded], *texts: str, whole: bool = False) -> Encoded:
        """Return the result of ``encode``, which tokenizes ``texts``: of long ones in a thread, within the budget.
        ``whole``: see ``Tokenizer.memory_of``. Raise TextTooLongError, QueueFullError."""
        chars = sum(map(len, texts))
        if chars < LONG_TEXT_CHARS or self.budget is None:
            return encode()
        memory_bytes = await asyncio.to_thread(self.tokenizer.memory_of, "".join(texts), whole=whole)
        with self.budget.spending(chars, memory_bytes):
            return await asyncio.to_thread(encode)

    async def check_text(self, text: str, *, param: str) -> None:
        """Raise ContextLengthError for a text that is far too long for the context. Only the beginning of the text is
        tokenized: tokenizing the largest body takes a minute and gigabytes."""
        limit = self.context_tokens
        head = _HEAD_CHARS_PER_TOKEN * limit
        while head < len(text):
            count = len(await self.encode(text[:head], add_special_tokens=False))
            # Twice the tokens, since the end of the part may be split into other tokens in the complete text.
            if count > 2 * limit:
                what = "the prediction" if param == "prediction" else "the prompt"
                raise ContextLengthError(
                    f"{what} has {len(text)} characters, and its first {head} are {count} tokens; "
                    f"{maximum_context(limit)}",
                    param=param,
                    tokens=count,
                    limit=limit,
                )
            head *= 4

    async def part_for_cut(self, text: str, tokens: int, *, at_start: bool) -> str:
        """Return the part of ``text`` that a cut to ``tokens`` tokens needs: the start or end with twice the tokens, or
        all of a text that is not much longer. Tokenizing the largest body would take a minute and gigabytes."""
        chars = _HEAD_CHARS_PER_TOKEN * max(tokens, _CUT_TOKENS_MIN)
        while chars < len(text):
            part = text[:chars] if at_start else text[_cut_before(text, len(text) - chars) :]
            if len(await self.encode(part, add_special_tokens=False)) >= 2 * tokens:
                return part
            chars *= 4
        return text

    # ------------------------------------------------------------------ conversations

    async def write_chat(
        self, conversation: ConversationFields, *, with_places: bool = False, begins: bool = True
    ) -> tuple[ChatRequest, ChatPrompt]:
        """Return the checked conversation, and its text as the model's template writes it. ``with_places``: also
        positions where the cache may keep a state; ``begins``: also the first messages of a created name. Raise
        RequestError."""
        if self.template is None:
            raise RequestError(
                "this model has no chat template, so it completes plain text only (/v1/completions, Engine.generate, "
                "`weft generate` without --chat). Put chat_template.jinja into the checkpoint directory, or start the "
                "server with --chat-template FILE, to give it one",
                param="messages",
            )
        if self.begun is not None and begins:
            conversation = msgspec.structs.replace(conversation, messages=self.begun(conversation.messages))
        pictures = self.pictures
        request = read_chat(
            conversation, template_variables=self.template.variables, reads=() if pictures is None else pictures.tokens
        )
        for name in request.left_out:
            note_ignored(name)
        chars_cut = _HEAD_CHARS_PER_TOKEN * self.context_tokens if with_places else 0
        prompt = await self.template.write(request.messages, chars_cut=chars_cut, **request.rendering)
        if pictures is not None and request.pictures:
            prompt = show_pictures(prompt, await pictures.read(request.pictures), pictures.tokens)
        return request, prompt

    async def encode_chat(
        self,
        prompt: ChatPrompt,
        *,
        add_special_tokens: bool = False,
        known: KnownPrefix | None = None,
        salt: str | None = None,
    ) -> Prompt:
        """Tokenize a rendered prompt. ``known`` and ``salt`` as in ``encode_prompt``."""
        encode = functools.partial(
            encode_prompt, self.tokenizer, prompt, add_special_tokens=add_special_tokens, known=known, salt=salt
        )
        return await self.bounded(encode, prompt.text, whole=bool(prompt.ends or prompt.marks or prompt.pictures))

    async def render(
        self,
        conversation: ConversationFields,
        *,
        field: str = "messages",
        cut_to: int | None = None,
        add_special_tokens: bool = False,
        known: KnownPrefix | None = None,
        with_places: bool = False,
        begins: bool = True,
        salt: str | None = None,
    ) -> tuple[ChatRequest, Prompt]:
        """Return the checked conversation and its prompt in tokens. ``field``: the request's field, for the error of a
        text that is far too long. ``cut_to``: such a text is instead cut to an end of at least this number of tokens.
        ``known`` and ``salt``: see ``encode_prompt``; other arguments: see ``write_chat``. Raise RequestError,
        ContextLengthError."""
        request, prompt = await self.write_chat(conversation, with_places=with_places, begins=begins)
        if cut_to is None:
            await self.check_text(prompt.text, param=field)
        elif not prompt.pictures:
            prompt = prompt.last(await self.part_for_cut(prompt.text, cut_to, at_start=False))
        return request, await self.encode_chat(prompt, add_special_tokens=add_special_tokens, known=known, salt=salt)


def finished(coroutine: Coroutine[Any, Any, Encoded]) -> Encoded:
    """Return the result of a call of a renderer whose template and pictures wait for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: Encoded = end.value
        return result
    coroutine.close()
    raise AssertionError("the renderer waits, so it needs an event loop")


def _cut_before(text: str, place: int) -> int:
    """Return the position at which to cut ``text`` near ``place``: between two words, so that the tokens after it are
    those of the complete text; ``place`` itself if no such position is near."""
    cut = next_cut(text[: place + _CUT_WITHIN_CHARS], place)
    return place if cut is None else cut
