"""Masks of the tokens that may come next, for all rows whose answers follow a grammar.

    begin(rows)             masks are worked out in a thread, while the device computes the step's logits
    stage(staging, rows)    they go to the device, all in one copy
    Masks.apply(logits)     logit[token] = -inf for tokens that the grammar does not allow
    Constrained.advance(tokens)  each matcher takes the token that was chosen

Owns one matcher per constrained row. Its state is a function of only the answer's tokens: a sequence that comes back
after a preemption is admitted with the earlier tokens, and the matcher reads them again. The tokens that may come next
depend on the last one: if steps overlap, the tokens of the step before must be on the host before ``begin``.

    mask words (int32 [N, vocabulary / 32], a bit per token) --to the device--> bool [N, V] --> logits[rows]

The end of an answer is a token like any other: the mask allows it where the grammar is complete. A grammar
can outgrow the limits of one step in the middle of an answer: its row is reported in ``failures``, and every
other row goes on.

*A slow grammar ends its own answer.* The parser's work for a token may grow with the answer, and every row of the step
waits for it. All rows together may take ``step_s`` of a step, in seconds of CPU. More is a debt, and less pays it
back. Above DEBT_S the rows end that took more than an even share of ``step_s`` for a token of late. An answer that
resumes reads its tokens again, for RESUME_S at most.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
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
_SLOW = (
    "the answer ends here, as its grammar is too slow: {:.1f} ms a token; the grammars of a step may take {:g} ms "
    "(limits.grammar_step_ms), and it holds up every other request"
)
DEBT_S = 0.25
"""Seconds by which the grammars of several steps may exceed their budget."""
RESUME_S = 0.25
_SHARE_MIN_S = 0.0005
"""Seconds: smallest even share of a row, however many rows there are. A usual JSON schema takes a fifth of it."""
_RECENT = 8
"""Tokens that the seconds of a token are averaged over."""
_RESUME_TOKENS = 32
_MEASURED_STEPS = 32
"""Steps whose masks are computed one by one, after a step whose masks were slow."""


@dataclass(frozen=True, slots=True)
class Masks:
    """Masks of one step, on the device once they are sent. ``words``: int32 [N, words], of the rows ``index`` of some
    logits; None: of all of them, in order. ``ended``: rows where only the end is left.
    """

    words: Staged
    index: Staged | None
    ended: Staged | None

    def apply(self, logits_XV: torch.Tensor) -> None:
        """Set refused logits to -inf, in place."""
        if self.ended is not None:
            # Independent of `min_tokens` and NaN: the row always has a token, and the end always comes.
            logits_XV.index_fill_(0, self.ended.device, 0.0)
        refused_NV = _refused(self.words.device, logits_XV.shape[1])
        if self.index is None:
            logits_XV.masked_fill_(refused_NV, -math.inf)
            return
        index_N = self.index.device
        logits_XV.index_copy_(0, index_N, logits_XV.index_select(0, index_N).masked_fill_(refused_NV, -math.inf))


class _Row:
    """One constrained row. ``spent_s``: seconds for the token under way; ``token_s``: recent seconds per token."""

    __slots__ = ("failure", "matcher", "spent_s", "token_s")

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self.spent_s = 0.0
        self.token_s = 0.0
        self.failure = ""

    def end_token(self) -> None:
        self.token_s += (self.spent_s - self.token_s) / _RECENT
        self.spent_s = 0.0

    def slow(self, step_s: float) -> str:
        """Return why the row ends, as an error of its answer."""
        return _SLOW.format(self.token_s * 1e3, step_s * 1e3)


class Constrained:
    """Constrained rows of a step, by index among the rows that choose. ``slow`` records that the rows took a token,
    and returns the rows that end because their grammars are slow, with the reason.
    """

    __slots__ = ("_clock", "_rows", "_slow")

    def __init__(
        self, rows: list[tuple[int, _Row]], slow: Callable[[list[_Row]], dict[int, str]], clock: Callable[[], float]
    ) -> None:
        self._rows = rows
        self._slow = slow
        self._clock = clock

    def advance(self, tokens: npt.NDArray[np.int32]) -> dict[int, str]:
        """Let the matchers read the chosen ``tokens``. Return, by index, why a row cannot go on."""
        failures = {}
        began_s = self._clock()
        for index, row in self._rows:
            if row.failure:
                failures[index] = row.failure
            elif not row.matcher.consume_token(int(tokens[index])):
                failures[index] = _BROKEN.format(presentable(row.matcher.get_error(), otherwise="its parser failed"))
            now_s = self._clock()
            row.spent_s += now_s - began_s
            began_s = now_s
        for place, reason in self._slow([row for _, row in self._rows]).items():
            failures.setdefault(self._rows[place][0], reason)
        return failures


class GrammarRows:
    """Matchers of all constrained rows. ``clock``: seconds of CPU of the calling thread."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._token_count = 0
        self._step_s = 0.0
        self._debt_s = 0.0
        """Seconds that grammars took above ``_step_s`` a step."""
        self._rows: dict[int, _Row] = {}
        self._masks: Future[Words] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._fillers: Any = None
        self._measured_steps = 0

    def admit(self, row: int, grammar: CompiledGrammar, generated: npt.NDArray[np.int32]) -> None:
        """Give ``row`` to a constrained sequence that has made ``generated``."""
        self._token_count = grammar.token_count
        self._step_s = grammar.step_s
        admitted = self._rows[row] = _Row(grammar.matcher())
        began_s = self._clock()
        for first in range(0, generated.size, _RESUME_TOKENS):
            admitted.matcher.consume_tokens(generated[first : first + _RESUME_TOKENS].tolist())
            spent_s = self._clock() - began_s
            if spent_s > RESUME_S:
                admitted.token_s = spent_s / min(first + _RESUME_TOKENS, generated.size)
                admitted.failure = admitted.slow(self._step_s)
                return

    def clear(self, row: int) -> None:
        self._rows.pop(row, None)

    @property
    def any(self) -> bool:
        """Return whether any row follows a grammar."""
        return bool(self._rows)

    def among(self, rows: Int64s) -> Constrained | None:
        """Return the rows of ``rows`` that have a grammar; None if there are none."""
        constrained = self._constrained(rows)
        return Constrained(constrained, self._slow, self._clock) if constrained else None

    def begin(self, rows: Int64s) -> None:
        """Start computing the masks for a step that chooses a token for each of ``rows``. All earlier tokens must be
        known.
        """
        constrained = self._constrained(rows)
        if not constrained:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._masks = self._thread.submit(self._fill, [row for _, row in constrained])

    def stage(self, staging: Staging, rows: Int64s) -> Masks | None:
        """Return the masks of ``rows``, computed since ``begin`` if it was called; None if no row is constrained."""
        constrained = self._constrained(rows)
        if not constrained:
            return None
        if self._masks is None:
            self.begin(rows)
        assert self._masks is not None
        words, self._masks = self._masks.result(), None
        ended = [position for position, row in constrained if row.matcher.is_stopped()]
        index = None
        if len(constrained) < len(rows):
            index = staging.add(np.array([position for position, _ in constrained], np.int64))
        return Masks(staging.add(words), index, staging.add(np.array(ended, np.int64)) if ended else None)

    def close(self) -> None:
        """Drop all rows and stop the thread. Idempotent."""
        self._rows.clear()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _constrained(self, rows: Int64s) -> list[tuple[int, _Row]]:
        if not self._rows:
            return []
        return [(position, self._rows[row]) for position, row in enumerate(rows.tolist()) if row in self._rows]

    def _slow(self, rows: list[_Row]) -> dict[int, str]:
        """Record that ``rows`` took a token. Return the reasons of rows that end, by index in ``rows``."""
        self._debt_s = max(0.0, self._debt_s + sum(row.spent_s for row in rows) - self._step_s)
        for row in rows:
            row.end_token()
        if self._debt_s <= DEBT_S:
            return {}
        self._debt_s = 0.0
        share_s = max(self._step_s / len(rows), _SHARE_MIN_S)
        return {index: row.slow(self._step_s) for index, row in enumerate(rows) if row.token_s > share_s}

    def _fill(self, rows: list[_Row]) -> Words:
        """Return int32 [N, words]: bit b of word w is token 32 w + b."""
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

        words = np.zeros((len(rows), -(-self._token_count // _WORD_BITS)), np.int32)
        if len(rows) == 1 or self._measured_steps:
            self._measured_steps = max(0, self._measured_steps - 1)
            for index, row in enumerate(rows):
                began_s = self._clock()
                fill_next_token_bitmask(row.matcher, words, index)
                row.spent_s += self._clock() - began_s
            return words
        if self._fillers is None:
            self._fillers = LLExecutor(num_threads=max(1, min(torch.get_num_threads(), _THREADS_MAX)))
        began_s = time.monotonic()
        fill_next_token_bitmask_par(self._fillers, [(row.matcher, index) for index, row in enumerate(rows)], words)
        if time.monotonic() - began_s > self._step_s:
            self._measured_steps = _MEASURED_STEPS
        return words


def _refused(words_NW: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return bool [N, vocab_size]; a token that the tokenizer does not know is refused."""
    bits_8 = torch.bitwise_left_shift(
        torch.ones(8, dtype=torch.uint8, device=words_NW.device),
        torch.arange(8, dtype=torch.uint8, device=words_NW.device),
    )
    bytes_NB = words_NW.view(torch.uint8)
    refused_NV = (bytes_NB[:, :, None] & bits_8).eq_(0).view(torch.bool).flatten(1)
    missing = vocab_size - refused_NV.shape[1]
    return torch.nn.functional.pad(refused_NV, (0, missing), value=True) if missing else refused_NV
