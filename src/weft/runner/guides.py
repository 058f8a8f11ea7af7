"""Rows whose answers follow a grammar: which tokens may come next, for all of them at once.

    begin(rows)           masks are worked out in a thread, while the device computes the step's logits
    apply(logits, rows)   logit[token] = -inf for what the grammar does not allow
    advance(rows, tokens) each matcher takes the token that was chosen

Owns one matcher per guided row. Its state is a function of the answer's tokens and nothing else: a sequence
that comes back after a preemption is admitted with what it had made, and its matcher reads that again. Rows
without a guide are never looked at: their logits are not touched, and a step without guided rows costs one
look at an empty dict.

    mask words (int32 [N, vocabulary / 32], a bit per token) --to the device--> bool [N, V] --> logits[rows]

The end of an answer is a token like any other: the mask allows it where the grammar is complete. Where
nothing else is left, its logit is set to 0, whatever ``min_tokens`` or a NaN made of it: so a guided row
always has a token to choose, and the end always comes.

A grammar can outgrow the limits of one step in the middle of an answer. That is a failure of this one
sequence: its row is reported in ``failures`` and every other row goes on.

Rejected: masking the allowed set as a list of ids (a JSON string allows nearly the whole vocabulary); masks
on the thread that steps (one may take milliseconds, the first time a state of the lexer is seen).
"""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weft.schedule.plan import CompiledGuide

Int64s = npt.NDArray[np.int64]
Words = npt.NDArray[np.int32]

_THREADS_MAX = 8
_WORD_BITS = 32
_BROKEN = "the answer cannot follow its grammar any further: {}"
_MESSAGE_CHARS_MAX = 300


@dataclass(frozen=True, slots=True)
class Masks:
    """``refused_NV`` (bool) of the rows ``index_N`` of some logits; None: of all of them, in order."""

    index_N: torch.Tensor | None
    refused_NV: torch.Tensor

    def apply(self, logits_XV: torch.Tensor) -> None:
        """What is refused becomes -inf, in place."""
        if self.index_N is None:
            logits_XV.masked_fill_(self.refused_NV, -math.inf)
        else:
            logits_XV[self.index_N] = logits_XV[self.index_N].masked_fill_(self.refused_NV, -math.inf)


class GuideRows:
    """``vocab_size``: the width of the logits, which may be more than the tokenizer knows."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._token_count = 0
        self._matchers: dict[int, Any] = {}
        self._masks: Future[Words] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._fillers: Any = None

    def admit(self, row: int, guide: CompiledGuide, generated: npt.NDArray[np.int32]) -> None:
        """``row`` belongs to a guided sequence that has made ``generated``."""
        self._token_count = guide.token_count
        matcher = guide.matcher()
        if generated.size:
            matcher.consume_tokens(generated.tolist())
        self._matchers[row] = matcher

    def clear(self, row: int) -> None:
        self._matchers.pop(row, None)

    def begin(self, rows: Int64s) -> None:
        """The step that is about to run chooses a token for each of ``rows``: start working out the masks."""
        guided = self._guided(rows)
        if not guided:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="guides")
        self._masks = self._thread.submit(self._fill, [self._matchers[row] for _, row in guided])

    def apply(self, logits_XV: torch.Tensor, rows: Int64s) -> Masks | None:
        """Changes the guided rows of ``logits_XV`` (float32) in place: what is not allowed becomes -inf.
        ``rows``: the row of each, those of ``begin``. Returns what it did, None where there was nothing to
        do."""
        guided = self._guided(rows)
        if not guided:
            return None
        if self._masks is None:
            self.begin(rows)
        assert self._masks is not None
        words, self._masks = self._masks.result(), None
        device = logits_XV.device
        ended = [at for at, row in guided if self._matchers[row].is_stopped()]
        if ended:
            logits_XV[torch.tensor(ended, device=device)] = 0.0
        index_N = None
        if len(guided) < len(rows):
            index_N = torch.tensor([at for at, _ in guided], device=device)
        masks = Masks(index_N, self._refused(words, device))
        masks.apply(logits_XV)
        return masks

    def advance(self, rows: Int64s, tokens: npt.NDArray[np.int32]) -> dict[int, str]:
        """``tokens`` were chosen. Returns, by index in ``rows``, why a row cannot go on."""
        failures = {}
        for at, row in self._guided(rows):
            matcher = self._matchers[row]
            if not matcher.consume_token(int(tokens[at])):
                said = str(matcher.get_error()).split("\n")[0][:_MESSAGE_CHARS_MAX]
                failures[at] = _BROKEN.format(said)
        return failures

    def close(self) -> None:
        """Idempotent."""
        self._matchers.clear()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _guided(self, rows: Int64s) -> list[tuple[int, int]]:
        if not self._matchers:
            return []
        return [(at, row) for at, row in enumerate(rows.tolist()) if row in self._matchers]

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

    def _refused(self, words: Words, device: torch.device) -> torch.Tensor:
        """bool [N, vocabulary]; a token that the tokenizer does not know is refused."""
        bytes_NB = torch.from_numpy(words.view(np.uint8)).to(device)
        bits_8 = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)
        refused_NV = (bytes_NB[:, :, None] & bits_8).eq_(0).view(torch.bool).flatten(1)
        missing = self._vocab_size - refused_NV.shape[1]
        return torch.nn.functional.pad(refused_NV, (0, missing), value=True) if missing else refused_NV
