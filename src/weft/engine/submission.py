"""From a request to sequences that can be scheduled: the checks, the seeds, the ends.

    Request --check--> prompt (int32) --sequences--> one (Sequence, StopRule) for each of its n answers

Every error names the field, the value and the limit. A request that passes ``check`` may still find the queue
full or its grammar wrong; only then does the engine count it and number its sequences.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.config import Sizes
from weft.engine.seeds import split
from weft.engine.stopping import StopRule, stop_ids, stop_rule
from weft.errors import QueueFullError, RequestError
from weft.request import Request
from weft.schedule.plan import CompiledGrammar, Int32s
from weft.schedule.sequence import Sequence
from weft.units import SeqId


class Submission:
    """``eos_ids`` are the model's own end tokens; ``seed`` is the engine's."""

    def __init__(self, *, vocab_size: int, sizes: Sizes, eos_ids: tuple[int, ...], seed: int) -> None:
        self._vocab_size = vocab_size
        self._sizes = sizes
        self._eos_ids = eos_ids
        self._seed = seed
        self._next_seq = 0

    def check(self, request: Request) -> Int32s:
        """The prompt as an array. Raises RequestError or ContextLengthError."""
        request.sampling.check(self._vocab_size)
        request.check_length(self._sizes.max_model_len)
        request.check_marks()
        sampling = request.sampling
        allowed = set(sampling.allowed_token_ids)
        if sampling.min_tokens and allowed and allowed <= set(stop_ids(sampling, self._eos_ids)):
            raise RequestError("every token of allowed_token_ids ends the answer, so min_tokens "
                               f"{sampling.min_tokens} cannot be reached", param="allowed_token_ids")
        try:
            tokens = np.asarray(request.prompt_tokens, dtype=np.int64)
        except (OverflowError, TypeError, ValueError):
            raise RequestError("the prompt has a value that is no token id", param="prompt") from None
        bad = np.flatnonzero((tokens < 0) | (tokens >= self._vocab_size))
        if bad.size:
            raise RequestError(f"prompt token {int(bad[0])} is {int(tokens[bad[0]])}; this model has tokens "
                               f"0 to {self._vocab_size - 1}", param="prompt")
        return tokens.astype(np.int32)

    def check_queue(self, waiting: int, new: int) -> None:
        """Raises QueueFullError where ``new`` sequences do not fit behind those that wait (law L11)."""
        if waiting + new > self._sizes.queue_max:
            raise QueueFullError(
                f"{waiting} sequences are waiting and this request brings {new}; the limit is "
                f"{self._sizes.queue_max} (--max-queued-requests). Try again later, or raise the limit",
                param="--max-queued-requests", code="queue_full")

    def sequences(self, request: Request, prompt: Int32s, grammar: CompiledGrammar | None,
                  number: int) -> Iterator[tuple[Sequence, StopRule]]:
        """``number`` counts accepted requests: it decides the order of arrival, and the seed of a request
        that names none."""
        sampling = request.sampling
        seed = split(self._seed, number) if sampling.seed is None else sampling.seed
        rule = stop_rule(sampling, self._eos_ids, self._sizes.max_model_len - int(prompt.size))
        ends = stop_ids(sampling, self._eos_ids)
        for index in range(sampling.n):
            seq = Sequence(SeqId(self._next_seq), prompt=prompt, sampling=sampling, seed=split(seed, index),
                           stop_ids=ends, rank=(request.priority, number, index), salt=request.cache_salt,
                           boundaries=tuple(request.boundaries), marks=tuple(request.marks),
                           grammar=grammar, new_tokens_max=rule.new_tokens_max)
            self._next_seq += 1
            yield seq, rule
