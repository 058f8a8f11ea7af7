"""Rows whose answers follow a grammar: which tokens may come next, for all of them at once.

    begin(rows)             masks are worked out in a thread, while the device computes the step's logits
    stage(staging, rows)    they go to the device, all in one copy
    Masks.apply(logits)     logit[token] = -inf for what the grammar does not allow
    Constrained.advance(tokens)  each matcher takes the token that was chosen

Owns one matcher per constrained row. Its state is a function of the answer's tokens and nothing else: a
sequence that comes back after a preemption is admitted with what it had made, and its matcher reads that
again. Which tokens may come next hangs on the last one: where steps overlap, the step before must be home
before ``begin``.

    mask words (int32 [N, vocabulary / 32], a bit per token) --to the device--> bool [N, V] --> logits[rows]

The end of an answer is a token like any other: the mask allows it where the grammar is complete. A grammar
can outgrow the limits of one step in the middle of an answer: its row is reported in ``failures``, and every
other row goes on.
"""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weft.errors import presentable
from weft.runner.staging import Staged, Staging
from weft.schedule.plan import CompiledGrammar

Int64s = npt.NDArray[np.int64]
Words = npt.NDArray[np.int32]

_THREADS_MAX = 8
_WORD_BITS = 32
_BROKEN = "the answer cannot follow its grammar any further: {}"


@dataclass(frozen=True, slots=True)
class Masks:
    """Of one step, on the device once they are sent. ``words``: int32 [N, words], of the rows ``index`` of
    some logits; None: of all of them, in order. ``ended``: rows where only the end is left."""

    words: Staged
    index: Staged | None
    ended: Staged | None

    def apply(self, logits_XV: torch.Tensor) -> None:
        """What is refused becomes -inf, in place."""
        if self.ended is not None:
            # Whatever `min_tokens` or a NaN made of it: the row always has a token, and the end always comes.
            logits_XV.index_fill_(0, self.ended.device, 0.0)
        refused_NV = _refused(self.words.device, logits_XV.shape[1])
        if self.index is None:
            logits_XV.masked_fill_(refused_NV, -math.inf)
            return
        index_N = self.index.device
        logits_XV.index_copy_(0, index_N, logits_XV.index_select(0, index_N).masked_fill_(refused_NV, -math.inf))


class Constrained:
    """The matchers of a step's constrained rows, by their index among the rows that choose."""

    __slots__ = ("_matchers",)

    def __init__(self, matchers: list[tuple[int, Any]]) -> None:
        self._matchers = matchers

    def advance(self, tokens: npt.NDArray[np.int32]) -> dict[int, str]:
        """``tokens`` were chosen. Returns, by index, why a row cannot go on."""
        failures = {}
        for at, matcher in self._matchers:
            if not matcher.consume_token(int(tokens[at])):
                failures[at] = _BROKEN.format(presentable(matcher.get_error(), otherwise="its parser failed"))
        return failures


class GrammarRows:
    def __init__(self) -> None:
        self._token_count = 0
        self._matchers: dict[int, Any] = {}
        self._masks: Future[Words] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._fillers: Any = None

    def admit(self, row: int, grammar: CompiledGrammar, generated: npt.NDArray[np.int32]) -> None:
        """``row`` belongs to a constrained sequence that has made ``generated``."""
        self._token_count = grammar.token_count
        matcher = grammar.matcher()
        if generated.size:
            matcher.consume_tokens(generated.tolist())
        self._matchers[row] = matcher

    def clear(self, row: int) -> None:
        self._matchers.pop(row, None)

    @property
    def any(self) -> bool:
        """Whether any row follows a grammar."""
        return bool(self._matchers)

    def among(self, rows: Int64s) -> Constrained | None:
        """The constrained ones among ``rows``; None where there are none."""
        constrained = self._constrained(rows)
        return Constrained(constrained) if constrained else None

    def begin(self, rows: Int64s) -> None:
        """The step that is about to run chooses a token for each of ``rows``, and all that came before is
        known: start working out the masks."""
        constrained = self._constrained(rows)
        if not constrained:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._masks = self._thread.submit(self._fill, [matcher for _, matcher in constrained])

    def stage(self, staging: Staging, rows: Int64s) -> Masks | None:
        """The masks of ``rows`` (those of ``begin``, if it was called), None where none is constrained."""
        constrained = self._constrained(rows)
        if not constrained:
            return None
        if self._masks is None:
            self.begin(rows)
        assert self._masks is not None
        words, self._masks = self._masks.result(), None
        ended = [at for at, matcher in constrained if matcher.is_stopped()]
        index = None
        if len(constrained) < len(rows):
            index = staging.add(np.array([at for at, _ in constrained], np.int64))
        return Masks(staging.add(words), index, staging.add(np.array(ended, np.int64)) if ended else None)

    def close(self) -> None:
        """Idempotent."""
        self._matchers.clear()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _constrained(self, rows: Int64s) -> list[tuple[int, Any]]:
        if not self._matchers:
            return []
        return [(at, self._matchers[row]) for at, row in enumerate(rows.tolist()) if row in self._matchers]

    def _fill(self, matchers: list[Any]) -> Words:
        """int32 [N, words]: bit b of word w is token 32 w + b."""
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

        words = np.zeros((len(matchers), -(-self._token_count // _WORD_BITS)), np.int32)
        if len(matchers) == 1:
            fill_next_token_bitmask(matchers[0], words)
            return words
        if self._fillers is None:
            self._fillers = LLExecutor(num_threads=max(1, min(torch.get_num_threads(), _THREADS_MAX)))
        fill_next_token_bitmask_par(self._fillers, [(m, n) for n, m in enumerate(matchers)], words)
        return words


def _refused(words_NW: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """bool [N, vocab_size]; a token that the tokenizer does not know is refused."""
    bits_8 = torch.bitwise_left_shift(
        torch.ones(8, dtype=torch.uint8, device=words_NW.device),
        torch.arange(8, dtype=torch.uint8, device=words_NW.device),
    )
    bytes_NB = words_NW.view(torch.uint8)
    refused_NV = (bytes_NB[:, :, None] & bits_8).eq_(0).view(torch.bool).flatten(1)
    missing = vocab_size - refused_NV.shape[1]
    return torch.nn.functional.pad(refused_NV, (0, missing), value=True) if missing else refused_NV
