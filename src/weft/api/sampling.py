"""Keywords and SamplingParams of a call, as one SamplingParams; prompts as a list."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from weft.errors import RequestError
from weft.request import SamplingParams
from weft.text.bad_words import banned_sequences
from weft.text.grammars import KINDS, grammar_from
from weft.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
"""Text, or token ids that are used as they are."""


def sampling_from(sampling: SamplingParams | None, fields: Mapping[str, Any],
                  defaults: Mapping[str, Any], tokenizer: Tokenizer) -> SamplingParams:
    """``fields`` change single fields of ``sampling``, or of ``defaults`` without it. ``tokenizer`` spells
    ``bad_words``. Raises RequestError."""
    fields = dict(fields)
    bad_words = fields.pop("bad_words", None)
    if bad_words is not None:
        words = [bad_words] if isinstance(bad_words, str) else list(bad_words)
        fields["banned_sequences"] = banned_sequences(words, tokenizer)
    asked = {f"guided_{kind}": (kind, fields.pop(f"guided_{kind}", None)) for kind in KINDS}
    grammars = [grammar_from(kind, value, name) for name, (kind, value) in asked.items() if value is not None]
    if len(grammars) > 1:
        raise RequestError(f"{grammars[0].field} and {grammars[1].field} both say what the answer must "
                           "match; one can", param=grammars[1].field)
    if grammars:
        fields["grammar"] = grammars[0]
    for name in ("stop", "stop_token_ids", "allowed_token_ids"):
        if name in fields:
            value = fields[name]
            fields[name] = (value,) if isinstance(value, str | int) else tuple(value)
    if sampling is None:
        return SamplingParams(**{**defaults, **fields})
    if not isinstance(sampling, SamplingParams):
        raise RequestError(f"sampling is a {type(sampling).__name__}; it must be SamplingParams, or keywords",
                           param="sampling")
    return msgspec.structs.replace(sampling, **fields)


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list. Raises RequestError."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise RequestError(f"a prompt is text or a list of token ids, not {type(prompts).__name__}",
                           param="prompt")
    listed = list(prompts)
    if listed and all(isinstance(item, numbers.Integral) for item in listed):
        return [listed]  # type: ignore[list-item]
    return listed  # type: ignore[return-value]


def token_ids(prompt: Sequence[int]) -> list[int]:
    """Raises RequestError for a value that is no integer."""
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise RequestError(f"a prompt is text or a list of token ids; {prompt!r:.60} is neither",
                           param="prompt") from None
