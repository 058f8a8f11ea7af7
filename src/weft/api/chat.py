"""A conversation of a program: prepared as on the server, and its answer read as on the server.

    messages, tools --ChatWriter--> PreparedChat: token ids, cache positions, sampling with its grammar
    Completion --PreparedChat.reply--> ChatReply: text, reasoning, calls of tools

The preparation itself is ``weft.text.chat_request``, which the server uses too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from weft.api.completion import ChatPiece, ChatReply, Completion, FunctionCall
from weft.errors import RequestError
from weft.request import SamplingParams
from weft.text.chat import TEMPLATE_CHARS_MAX, ChatMessage, load_chat_template
from weft.text.chat_request import ChatRequest, ConversationFields, EncodedChat, encode_prompt, read_chat
from weft.text.choices import Piece
from weft.text.detokenize import TextDecoder
from weft.text.dialect import AnswerPlan, Dialect
from weft.text.template_worker import ChatPrompt, chat_prompt
from weft.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """``decoder`` leaves the markers in the text that ``plan`` reads. ``sampling`` has the grammar of calls,
    of structured output, or of both."""

    encoded: EncodedChat
    plan: AnswerPlan
    sampling: SamplingParams
    decoder: TextDecoder

    def reply(self, completion: Completion) -> ChatReply:
        """``completion`` in parts: content, reasoning, calls of tools."""
        heard = self.plan.reader(eager=False).read(completion.text, completion.tokens, last=True)
        calls: dict[int, FunctionCall] = {}
        for delta in heard.calls:
            call = calls.setdefault(delta.index, FunctionCall())
            if delta.call_id is not None and delta.name is not None:
                call.id, call.name = delta.call_id, delta.name
            call.arguments += delta.arguments
        fields = msgspec.structs.asdict(completion)
        if calls and completion.finish_reason == "stop":
            fields["finish_reason"] = "tool_calls"
        return ChatReply(**{**fields, "text": heard.content}, reasoning=heard.reasoning,
                         tool_calls=list(calls.values()))

    def pieces(self, pieces: Iterable[Piece]) -> Iterator[ChatPiece]:
        """``reply`` for a stream. A piece whose text may become a marker has no text yet."""
        readers = [self.plan.reader(eager=True) for _ in range(self.sampling.n)]
        for piece in pieces:
            heard = readers[piece.index].read(piece.text, piece.tokens, last=piece.finish_reason is not None)
            yield ChatPiece(piece.index, heard.content, piece.tokens, piece.logprobs, piece.finish_reason,
                            piece.stop_reason, heard.reasoning, heard.calls)


class ChatWriter:
    """The text side of one model's chat. Raises CheckpointError or ConfigError for a broken template."""

    def __init__(self, directory: Path, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._template = load_chat_template(directory, special_tokens=tokenizer.special_tokens)
        self._dialect = Dialect(self._template, tokenizer)

    def prepare(self, messages: Sequence[Mapping[str, Any]], sampling: SamplingParams,
                template: Mapping[str, Any] | None, **fields: Any) -> PreparedChat:
        """``template``: extra variables of the template; ``fields``: those of ``ConversationFields``. Raises
        RequestError."""
        request, prompt = self._write(messages, template, **fields)
        plan = request.plan(self._dialect, prompt.text, sampling.grammar)
        return PreparedChat(encode_prompt(self._tokenizer, prompt), plan,
                            msgspec.structs.replace(sampling, grammar=plan.grammar),
                            self._tokenizer.showing(plan.shown_ids))

    def tokens(self, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any] | None,
               **fields: Any) -> list[int]:
        """Token ids of a conversation, up to where the answer begins. Raises RequestError."""
        _, prompt = self._write(messages, template, **fields)
        return encode_prompt(self._tokenizer, prompt).tokens

    def _write(self, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any] | None,
               **fields: Any) -> tuple[ChatRequest, ChatPrompt]:
        if self._template is None:
            raise RequestError("this model has no chat template: put chat_template.jinja into the checkpoint "
                               "directory, or complete plain text: Engine.generate, `weft generate` without "
                               "--chat", param="messages")
        try:
            turns = msgspec.convert(list(messages), list[ChatMessage])
        except msgspec.ValidationError as error:
            raise RequestError(f"messages: {error}", param="messages") from None
        conversation = ConversationFields(messages=turns, variables=template, **fields)
        request = read_chat(conversation, template_variables=self._template.variables)
        return request, chat_prompt(self._template, turns, chars_cut=TEMPLATE_CHARS_MAX, **request.rendering)
