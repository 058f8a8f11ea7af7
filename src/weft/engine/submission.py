"""Submission: a request is checked and becomes sequences that can be scheduled, with seeds and rules for their ends.

    Request --check--> prompt (int32) --sequences--> (index, Sequence, StopRule) of each of its n answers

A request that resumes has a sequence for each answer that has not ended, with the tokens of that answer. Such a
sequence is in the state of a preempted one: the same seed, the next position, and tokens to be computed again. A
request that resumes ranks before the others of the same priority, because another engine accepted it earlier.

Every error names the field, the value and the limit. A request that passes ``check`` may still find the queue
full or its grammar wrong; only then does the engine count it and number its sequences. The engine has no
text: stop strings end an answer where it is detokenized (``weft.text.choices``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from weft.config import Sizes
from weft.errors import QueueFullError, RequestError
from weft.pictures import check_pictures
from weft.request import FinishReason, Request, Resumption, SamplingParams, split_seed
from weft.schedule.plan import CompiledGrammar, Int32s
from weft.schedule.sequence import Sequence
from weft.units import SeqId


@dataclass(frozen=True, slots=True)
class StopRule:
    """The token-level end of one sequence. ``new_tokens_max`` is ``max_tokens`` or the rest of the context, whichever
    is less; stop ids count only after ``min_tokens`` tokens."""

    ids: frozenset[int]
    named_ids: frozenset[int]
    min_tokens: int
    new_tokens_max: int

    def reason(self, token: int, position: int) -> FinishReason | None:
        """Return why the sequence ends with ``token`` as generated token number ``position`` (from 1), or None."""
        if token in self.ids and position > self.min_tokens:
            return "stop"
        return "length" if position >= self.new_tokens_max else None

    def stop_reason(self, token: int) -> int | None:
        """Return ``TokenEvent.stop_reason`` for a "stop": the token id if the request named it, else None."""
        return token if token in self.named_ids else None


def stop_rule(sampling: SamplingParams, eos_ids: Iterable[int], context_left: int) -> StopRule:
    """Return the rule of one sequence. ``context_left``: tokens between the prompt's end and ``max_model_len``."""
    # The context was checked against the arena: an answer never outgrows its pages.
    new_tokens_max = context_left if sampling.max_tokens is None else min(sampling.max_tokens, context_left)
    # An end before min_tokens is masked, except where the grammar leaves nothing else: then it is the end.
    min_tokens = sampling.min_tokens if sampling.grammar is None else 0
    return StopRule(
        ids=_shared(stop_ids(sampling, eos_ids)),
        named_ids=frozenset(sampling.stop_token_ids),
        min_tokens=min_tokens,
        new_tokens_max=new_tokens_max,
    )


@lru_cache(maxsize=256)
def _shared(ids: tuple[int, ...]) -> frozenset[int]:
    """Return one set for all sequences with the same ends: most have the model's own, and each step reads it."""
    return frozenset(ids)


def stop_ids(sampling: SamplingParams, eos_ids: Iterable[int]) -> tuple[int, ...]:
    """Return ids that end the sequence, in order and without repeats: the model's eos (unless ``ignore_eos``)
    and the request's own."""
    ends = () if sampling.ignore_eos else tuple(eos_ids)
    return tuple(dict.fromkeys((*ends, *sampling.stop_token_ids)))


RESUMED_FIRST = 1 << 40
"""Offset subtracted from the number of a resumed request: more than the requests that an engine accepts."""


class Submission:
    """The checks of one engine's requests. ``eos_ids`` are the model's own end tokens; ``seed`` is the engine's.
    ``picture_tokens``: token ids at rows of pictures in a prompt; none where the model reads text only."""

    def __init__(
        self,
        *,
        vocab_size: int,
        sizes: Sizes,
        eos_ids: tuple[int, ...],
        seed: int,
        picture_tokens: tuple[int, ...] = (),
    ) -> None:
        self._vocab_size = vocab_size
        self._sizes = sizes
        self._eos_ids = eos_ids
        self._seed = seed
        self._picture_tokens = picture_tokens
        self._next_seq = 0

    def check(self, request: Request) -> Int32s:
        """Return the prompt as an array. Raise RequestError or ContextLengthError."""
        request.check(self._sizes.max_model_len, self._vocab_size)
        sampling = request.sampling
        allowed = set(sampling.allowed_token_ids)
        if sampling.min_tokens and allowed and allowed <= set(stop_ids(sampling, self._eos_ids)):
            raise RequestError(
                "every token of allowed_token_ids ends the answer, so min_tokens "
                f"{sampling.min_tokens} cannot be reached",
                param="allowed_token_ids",
            )
        try:
            tokens = np.asarray(request.prompt_tokens, dtype=np.int64)
        except (OverflowError, TypeError, ValueError):
            raise RequestError("the prompt has a value that is not a token id", param="prompt") from None
        bad = np.flatnonzero((tokens < 0) | (tokens >= self._vocab_size))
        if bad.size:
            raise RequestError(
                f"prompt token {int(bad[0])} is {int(tokens[bad[0]])}; this model has tokens "
                f"0 to {self._vocab_size - 1}",
                param="prompt",
            )
        if request.resumption is not None:
            context_left = self._sizes.max_model_len - int(tokens.size)
            rule = stop_rule(request.sampling, self._eos_ids, context_left)
            request.resumption.check(request.sampling.n, rule.new_tokens_max, self._vocab_size)
        prompt = tokens.astype(np.int32)
        check_pictures(request.pictures, prompt, self._picture_tokens)
        return prompt

    def check_queue(self, waiting: int, own: int, request: Request) -> None:
        """Raise QueueFullError where the sequences of ``request`` do not fit after the ``waiting`` ones, of which
        ``own`` have its key; a key may fill half of the queue (law L11). A request that resumes always fits: an engine
        has accepted it already, within that bound."""
        if request.resumption is not None:
            return
        new, half = request.sampling.n, self._sizes.queue_max // 2
        if request.key and own and own + new > half and waiting + new <= self._sizes.queue_max:
            raise QueueFullError(
                f"{own} sequences of this API key are waiting and this request brings {new}; the limit is {half}, half "
                "of limits.max_queued_requests. Try again later",
                param="limits.max_queued_requests",
                code="queue_full",
            )
        if waiting + new > self._sizes.queue_max:
            raise QueueFullError(
                f"{waiting} sequences are waiting and this request brings {new}; the limit is "
                f"{self._sizes.queue_max} (limits.max_queued_requests). Try again later, or raise the limit",
                param="limits.max_queued_requests",
                code="queue_full",
            )

    def sequences(
        self, request: Request, prompt: Int32s, grammar: CompiledGrammar | None, number: int
    ) -> Iterator[tuple[int, Sequence, StopRule]]:
        """Yield the sequences of a request. ``number`` counts accepted requests: it decides the order of arrival, and
        the seed of a request that names none."""
        sampling = request.sampling
        seed = split_seed(self._seed, number) if sampling.seed is None else sampling.seed
        rule = stop_rule(sampling, self._eos_ids, self._sizes.max_model_len - int(prompt.size))
        ends = stop_ids(sampling, self._eos_ids)
        resumption = request.resumption or Resumption(answers={index: [] for index in range(sampling.n)})
        if request.resumption is not None:
            number -= RESUMED_FIRST
        for index, tokens in sorted(resumption.answers.items()):
            seq = Sequence(
                SeqId(self._next_seq),
                prompt=prompt,
                sampling=sampling,
                seed=split_seed(seed, index),
                stop_ids=ends,
                rank=(request.priority, number, index),
                salt=request.salt,
                key=request.key,
                boundaries=tuple(request.boundaries),
                marks=tuple(request.marks),
                grammar=grammar,
                new_tokens_max=rule.new_tokens_max,
                prediction=tuple(request.prediction) or None,
                pictures=tuple(request.pictures),
                adapter="" if request.adapter is None else request.adapter.digest,
                pooling=request.pooling,
            )
            if tokens:
                seq.resume(tokens)
            self._next_seq += 1
            yield index, seq, rule
