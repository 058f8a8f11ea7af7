"""When an answer ends by token: eos, ``stop_token_ids``, ``max_tokens``, the end of the context.

The engine has no text: stop strings end an answer where it is detokenized (``weft.text.stop_strings``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from weft.request import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class StopRule:
    """The token-level end of one sequence. ``new_tokens_max`` is ``max_tokens`` or what the context leaves,
    whichever is less; stop ids count only after ``min_tokens`` tokens."""

    ids: frozenset[int]
    named_ids: frozenset[int]
    min_tokens: int
    new_tokens_max: int

    def reason(self, token: int, position: int) -> FinishReason | None:
        """Why the sequence ends with ``token`` as generated token number ``position`` (from 1), or None."""
        if token in self.ids and position > self.min_tokens:
            return "stop"
        return "length" if position >= self.new_tokens_max else None

    def stop_reason(self, token: int) -> int | None:
        """What ``TokenEvent.stop_reason`` says after a "stop": the id, when the request named it."""
        return token if token in self.named_ids else None


def stop_rule(sampling: SamplingParams, eos_ids: Iterable[int], context_left: int) -> StopRule:
    """``context_left``: tokens between the prompt's end and ``max_model_len``."""
    new_tokens_max = context_left if sampling.max_tokens is None else min(sampling.max_tokens, context_left)
    # An end before min_tokens is masked, except where the grammar leaves nothing else: then it is the end.
    min_tokens = sampling.min_tokens if sampling.grammar is None else 0
    return StopRule(ids=_shared(stop_ids(sampling, eos_ids)), named_ids=frozenset(sampling.stop_token_ids),
                    min_tokens=min_tokens, new_tokens_max=new_tokens_max)


@lru_cache(maxsize=256)
def _shared(ids: tuple[int, ...]) -> frozenset[int]:
    """One set for all sequences with the same ends: most have the model's own, and a step reads each."""
    return frozenset(ids)


def stop_ids(sampling: SamplingParams, eos_ids: Iterable[int]) -> tuple[int, ...]:
    """Ids that end the sequence, in order and without repeats: the model's eos (unless ``ignore_eos``)
    and the request's own."""
    ends = () if sampling.ignore_eos else tuple(eos_ids)
    return tuple(dict.fromkeys((*ends, *sampling.stop_token_ids)))
