"""Logprobs in the three shapes that clients know.

    chat          {"content": [{token, logprob, bytes, top_logprobs: [{token, logprob, bytes}]}]}
    completions   {tokens: [], token_logprobs: [], top_logprobs: [{text: logprob}], text_offset: []}
    prompt        [null, {"id": {logprob, rank, decoded_token}}, ...]          (ranks from 1)

A token that is only a part of a character is written ``bytes:\\xe2\\x82`` where text is a key, so that two such tokens
stay apart; chat carries the bytes in their own field. A probability of zero is -9999, because JSON has no infinity.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import msgspec

from weft.request import TokenLogprobs
from weft.text.tokenizer import Tokenizer

_LEAST = -9999.0
_NAMES_MAX = 1 << 16
"""Most names of tokens in the cache of names: the same tokens come again and again."""

Namer = Callable[[int], str]
"""A function from a token id to its text."""


class TopLogprob(msgspec.Struct, frozen=True, gc=False):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True, gc=False):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatTokenLogprob]


class CompletionLogprobs(msgspec.Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptTokenLogprob(msgspec.Struct, frozen=True, gc=False):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptTokenLogprob] | None]


@functools.lru_cache(8)
def namer(tokenizer: Tokenizer, *, as_ids: bool, escape_bytes: bool) -> Namer:
    """Return a namer. ``as_ids``: "token_id:17" (return_tokens_as_token_ids). ``escape_bytes``: write parts of
    characters as ``bytes:...``. All requests of a server share the names."""
    if as_ids:
        return lambda token: f"token_id:{token}"

    @functools.lru_cache(_NAMES_MAX)
    def named(token: int) -> str:
        raw = tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            if escape_bytes:
                return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            return raw.decode(errors="replace")

    return named


def chat_logprobs(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer, name: Namer, top: int) -> ChatLogprobs:
    @functools.lru_cache(_NAMES_MAX)
    def bytes_of(token: int) -> list[int]:
        return list(tokenizer.token_bytes(token))

    content = []
    for entry in entries:
        most_likely = [TopLogprob(name(token), _finite(value), bytes_of(token)) for token, value in entry.top[:top]]
        content.append(ChatTokenLogprob(name(entry.token), _finite(entry.logprob), bytes_of(entry.token), most_likely))
    return ChatLogprobs(content)


def completion_logprobs(
    entries: Sequence[TokenLogprobs | None],
    tokens: Sequence[int],
    tokenizer: Tokenizer,
    name: Namer,
    top: int,
    *,
    text_offset: int,
) -> CompletionLogprobs:
    """Return logprobs in the shape of completions. ``entries`` has an entry for each of ``tokens``; None for the
    prompt's first token, which nothing predicts. ``text_offset``: characters of the choice's text before the first
    token."""
    names, chosen, tops, offsets = [], [], [], []
    for token, entry in zip(tokens, entries, strict=True):
        names.append(name(token))
        offsets.append(text_offset)
        text_offset += len(tokenizer.token_bytes(token).decode(errors="ignore"))
        chosen.append(None if entry is None else _finite(entry.logprob))
        tops.append(None if entry is None else _top_by_text(entry, name, top))
    return CompletionLogprobs(names, chosen, tops, offsets)


def prompt_logprobs(entries: Sequence[TokenLogprobs | None], name: Namer, top: int) -> PromptLogprobs:
    shaped: PromptLogprobs = []
    for entry in entries:
        if entry is None:
            shaped.append(None)
            continue
        known = {
            str(token): PromptTokenLogprob(_finite(value), rank, name(token))
            for rank, (token, value) in enumerate(entry.top[:top], start=1)
        }
        known.setdefault(
            str(entry.token), PromptTokenLogprob(_finite(entry.logprob), entry.rank + 1, name(entry.token))
        )
        shaped.append(known)
    return shaped


def _top_by_text(entry: TokenLogprobs, name: Namer, top: int) -> dict[str, float]:
    """Return the ``top`` most likely tokens and, always, the chosen one."""
    by_text = {name(token): _finite(value) for token, value in entry.top[:top]}
    by_text.setdefault(name(entry.token), _finite(entry.logprob))
    return by_text


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
