"""What a program gets back: completions, answers of a chat, and their pieces."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from weft.request import FinishReason, LostTokens, TokenLogprobs
from weft.text.choices import Choice, Piece
from weft.text.tools.body_reader import CallDelta


class Completion(msgspec.Struct, kw_only=True):
    """One answer. ``prompt_index`` is the prompt's place in the call, ``index`` counts its ``n`` answers.

    ``tokens`` has the token that ended the answer, ``text`` does not show it. ``stop_reason``: the stop
    string or stop token id that ended it, None for the model's own end. ``logprobs``: one per token, when
    asked for; ``prompt_logprobs``: one per prompt token, None for the first. ``cached_tokens`` of the prompt
    came from the prefix cache. ``lost_tokens`` were cached and could not be used. ``recomputed_tokens`` were
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
    """An answer of a chat. ``text`` is its content; reasoning and calls of tools stand apart. With calls,
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
                {"id": call.id, "type": "function",
                 "function": {"name": call.name, "arguments": call.arguments}} for call in self.tool_calls]
        return message


@dataclass(slots=True)
class ChatPiece(Piece):
    """A piece of a chat's answer. ``text`` is content. ``calls``: what calls of tools gained."""

    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)
