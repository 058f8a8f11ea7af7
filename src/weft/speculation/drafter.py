"""The seam between drafts and their verification: known tokens go in, guesses of the next tokens come out.

    begin(key, tokens)           a sequence has its first token: prompt and answer so far
    draft(rows)                  for the step that is planned now: key -> tokens that may come next
    head_drafts(sequences)       how many tokens the model's own head drafts in that step
    settle(key, tokens, ...)     the tokens that the step chose, drafts among them
    offer(key, tokens, ...)      what the head expects behind them
    observe(decodes, ...)        what the step cost, once all of its sequences are settled
    sleep_through(steps, ...)    steps of decodes alone went by while it slept
    end(key)                     the sequence has ended

A token is a function of logits, seed and position (decision 0006), so the step chooses a token at every
drafted position. A draft is right if it equals the chosen token, and the first difference is the next token.
A wrong draft costs time and changes no text.

* ``draft`` changes nothing that a later call could see: a plan may be dropped. The planner may verify fewer.
* A preempted sequence stays begun. Its rows are missing from ``draft`` until it decodes again.
* Drafts of one salt never hold tokens of another (law L10).
* While it is not ``awake``, it is neither asked nor fed. The next ``settle`` brings all tokens since then.

The engine's thread calls all of it, between steps. Nothing here has a clock or a device.

Rejected: chances beside the tokens (the planner would weigh sources that it does not know); a draft per call
(the number of drafts of one row depends on all rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]

PLAIN_STEPS = 3
"""Plain steps in a row, of which the last one says what a plain step costs."""


class DraftGrammar(Protocol):
    """A compiled grammar, as ``weft.schedule.plan.CompiledGrammar`` describes it."""

    def matcher(self) -> Any:
        """A new matcher (``llguidance.LLMatcher``) that has seen no token."""
        ...

    def forced_tokens(self, matcher: Any) -> list[int]:
        """The text that alone may come next, in tokens; empty if there is a choice."""
        ...


class DraftRow(NamedTuple):
    """One decoding sequence of the step. ``key``: the number of the sequence. ``limit``: most tokens that may
    be drafted (taps, the context, ``max_tokens`` and the step's budget bound it)."""

    key: int
    limit: int


class Drafter(Protocol):
    """Where the planner gets drafts."""

    @property
    def awake(self) -> bool:
        """Whether the drafter may have drafts for the next step."""
        ...

    def wake(self) -> None:
        """A sequence that is likely to be drafted begins."""
        ...

    def begin(self, key: int, tokens: Int32s, *, prompt_length: int, salt: str | None,
              prediction: Sequence[int] | None, grammar: DraftGrammar | None = None) -> None:
        """The sequence ``key`` is about to decode. ``tokens``: its prompt of ``prompt_length`` tokens, and
        the answer so far. ``prediction``: the client's guess of the whole answer."""
        ...

    def draft(self, rows: Sequence[DraftRow]) -> dict[int, tuple[int, ...]]:
        """The tokens to verify in the step of ``rows``, by key. Keys without drafts are missing."""
        ...

    def settle(self, key: int, tokens: Sequence[int], *, drafted: int, accepted: int) -> None:
        """The step added ``tokens`` to the sequence. ``drafted`` tokens of the last ``draft`` were verified,
        and the first ``accepted`` of them were right. Both are 0 in a step without drafts."""
        ...

    def head_drafts(self, sequences: int, *, prompts: bool) -> int | None:
        """For the step whose drafts were asked for last, as ``StepPlan.mtp_drafts``. ``sequences`` of it
        choose a token. ``prompts``: it prefills."""
        ...

    def offer(self, key: int, tokens: Sequence[int], chances: Sequence[float]) -> None:
        """The model's own head expects ``tokens`` behind the settled ones, each with its chance."""
        ...

    def observe(self, decodes: int, drafted: int, seconds: float, *, prefills: bool = False) -> None:
        """A step of ``decodes`` sequences that verified ``drafted`` tokens in all took ``seconds``, without
        those of the head. With ``prefills`` they count too, and the seconds say nothing about drafts."""
        ...

    def sleep_through(self, steps: int, seconds: float, decodes: int, last_s: float | None) -> None:
        """``steps`` steps of decodes alone went by while it was not awake, and took ``seconds`` in all.
        ``decodes``: sequences of the last one. ``last_s``: its seconds, if it followed some of as many."""
        ...

    def observe_head(self, sequences: int, drafts: int, seconds: float, *, prefills: bool = False) -> None:
        """The head took ``seconds`` for ``drafts`` tokens of each of ``sequences``, in the same step. With
        ``prefills`` it read prompts as well."""
        ...

    def end(self, key: int) -> None:
        """The sequence has ended. A key that never began is no error: an answer may end in its first step."""
        ...
