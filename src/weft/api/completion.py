"""Results for a program: completions, chat answers, and pieces of them."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from weft.errors import RequestError
from weft.request import FinishReason, LostTokens, SamplingParams, TokenLogprobs
from weft.text.choices import Choice, Piece
from weft.text.grammars import KINDS, grammar_from
from weft.text.tokenizer import Tokenizer, banned_sequences
from weft.text.tools.json_calls import CallDelta


class Completion(msgspec.Struct, kw_only=True):
    """One answer. ``prompt_index``: position of the prompt in the call; ``index``: number of the answer, of ``n``.
    ``tokens`` include the token that ended the answer, ``text`` does not. ``stop_reason``: the stop string or stop
    token id that ended the answer, None if the model ended it. ``logprobs``: one per token, if requested;
    ``prompt_logprobs``: one per prompt token, None for the first. ``cached_tokens``: prompt tokens from the prefix
    cache. ``lost_tokens``: prompt tokens that were cached in part and could not be used. ``recomputed_tokens``:
    computed again after preemptions.
    """

    prompt_index: int
    index: int
    prompt_tokens: list[int]
    text: str = ""
    tokens: list[int] = []
    finish_reason: FinishReason | Literal["tool_calls"] | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs | None] = []
    cached_tokens: int = 0
    lost_tokens: LostTokens = LostTokens()
    recomputed_tokens: int = 0

    def add(self, piece: Piece, choice: Choice) -> None:
        """Append ``piece`` of ``choice``."""
        self.text += piece.text
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        if piece.finish_reason is not None:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
            self.cached_tokens = choice.cached_tokens
            self.lost_tokens = choice.lost_tokens
            self.recomputed_tokens = choice.recomputed_tokens
            self.prompt_logprobs = choice.prompt_logprobs


class FunctionCall(msgspec.Struct, kw_only=True):
    """A call of a tool. ``arguments`` is JSON text, as the model wrote it."""

    id: str = ""
    name: str = ""
    arguments: str = ""


class ChatReply(Completion, kw_only=True):
    """An answer of a chat. ``text``: the content; reasoning and tool calls have separate fields. With calls,
    ``finish_reason`` is "tool_calls"."""

    reasoning: str = ""
    tool_calls: list[FunctionCall] = []

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message for the next turn."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


@dataclass(slots=True)
class ChatPiece(Piece):
    """A piece of a chat's answer. ``text`` is content. ``calls``: additions to calls of tools."""

    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)


Prompt = str | Sequence[int]
"""Text, or token ids that are used as they are."""


def sampling_from(
    sampling: SamplingParams | None, fields: Mapping[str, Any], defaults: Mapping[str, Any], tokenizer: Tokenizer
) -> SamplingParams:
    """Return ``sampling`` (default: ``defaults``) with single values replaced by ``fields``. ``tokenizer``: for
    ``bad_words``. Raise RequestError."""
    fields = dict(fields)
    bad_words = fields.pop("bad_words", None)
    if bad_words is not None:
        words = [bad_words] if isinstance(bad_words, str) else list(bad_words)
        fields["banned_sequences"] = banned_sequences(words, tokenizer)
    guided = {f"guided_{kind}": (kind, fields.pop(f"guided_{kind}", None)) for kind in KINDS}
    grammars = [grammar_from(kind, value, name) for name, (kind, value) in guided.items() if value is not None]
    if len(grammars) > 1:
        raise RequestError(
            f"{grammars[0].field} and {grammars[1].field} both define the form of the answer; give only one",
            param=grammars[1].field,
        )
    if grammars:
        fields["grammar"] = grammars[0]
    for name in ("stop", "stop_token_ids", "allowed_token_ids"):
        if name in fields:
            value = fields[name]
            fields[name] = (value,) if isinstance(value, str | int) else tuple(value)
    if sampling is None:
        return SamplingParams(**{**defaults, **fields})
    if not isinstance(sampling, SamplingParams):
        raise RequestError(
            f"sampling is a {type(sampling).__name__}; it must be SamplingParams, or keywords", param="sampling"
        )
    return msgspec.structs.replace(sampling, **fields)


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or many as a list. Raise RequestError."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise RequestError(f"a prompt is text or a list of token ids, not {type(prompts).__name__}", param="prompt")
    listed = list(prompts)
    if listed and all(isinstance(item, numbers.Integral) for item in listed):
        return [listed]  # type: ignore[list-item]
    return listed  # type: ignore[return-value]


def token_ids(prompt: Sequence[int]) -> list[int]:
    """Return the ids as a list of int. Raise RequestError for a value that is not an integer."""
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise RequestError(
            f"a prompt is text or a list of token ids; {prompt!r:.60} is neither", param="prompt"
        ) from None
