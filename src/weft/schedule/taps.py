"""Where the recurrent state of a sequence is kept on its way: pure functions over numbers, tested as tables.

A *tap* is a position inside a run at which every recurrent layer also writes its state to a checkpoint
slot, during the forward pass that goes through there anyway. Taps lie on the absolute grid of CHUNK_TOKENS,
so that a hit computes the same chunks as a cold run, and never at the last known token, as one token at
least is computed to have logits.

    a prompt of n tokens        |system + tools|  turn 1  |   turn 2      |  question   |
    boundary (declared)                        b          b               b
    prompt end, floor64(n - 1)                                                       e
    fork: KV matches to f, the deepest checkpoint is at c        c ---- f
    insurance: i, 2i, 4i, ...        i      2i              4i

* *prompt end*: the same prompt again, and n > 1, compute the last chunk only.
* *boundary*: a system prompt is shared by requests that share nothing else; waiting for a second one to see
  that it is would pay for it twice.
* *fork*: two prompts are known to have parted here, so a third may.
* *insurance*: what nobody declared. With doubling distances, a prompt that shares p tokens with this one
  finds more than p / 2 of them, for log2(n) states. The first distance is where the KV of the tokens behind
  it weighs as much as the state itself: closer ones would fill memory with states.

What ends (or is preempted) donates its running slot besides; that needs no tap. Decode runs have no taps:
their kernels do not look for them, and the donated slot covers what a following turn needs.

All of this is a wish (law L9): a run is never cut for a tap, and a tap that finds no slot is left out.
Wishes are ordered, the ones most likely to be used first, because that is the order in which slots are given
out when they are few.

Rejected: a checkpoint at each multiple of a block (the states of 397B weigh 6,253 tokens of KV each); only
one at the prompt's end (it lies in the unique tail of most prompts, where nobody finds it).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from weft.errors import ConfigError
from weft.units import CHUNK_TOKENS, PAGE_TOKENS, ceil_div

INSURANCE_TOKENS_MIN = 512
INSURANCE_TOKENS_MAX = 8192
TAPS_PER_RUN_MAX = 32
"""Most states that one run keeps (law L11): each costs a write of a whole state in the forward pass."""

_FLAG = "--checkpoints"


@dataclass(frozen=True, slots=True)
class TapPolicy:
    """Which sources are on. ``every_tokens`` 0: not at regular distances. ``donations``: a sequence that ends
    or is preempted leaves its pages and its state to the cache."""

    prompt_end: bool = False
    boundaries: bool = False
    forks: bool = False
    insurance: bool = False
    every_tokens: int = 0
    donations: bool = False


AUTO = TapPolicy(prompt_end=True, boundaries=True, forks=True, insurance=True, donations=True)
PROMPT = TapPolicy(prompt_end=True, donations=True)
NONE = TapPolicy()


def parse_checkpoints(text: str) -> TapPolicy:
    """``auto``, ``prompt``, ``every:N`` or ``none``. Raises ConfigError that names the flag and the forms."""
    named = {"auto": AUTO, "prompt": PROMPT, "none": NONE}.get(text)
    if named is not None:
        return named
    match = re.fullmatch(r"every:(\d{1,9})", text)
    if match is None:
        raise ConfigError(f"{_FLAG} is {text!r}; it must be auto, prompt, every:N (N tokens, a multiple of "
                          f"{CHUNK_TOKENS}) or none", param=_FLAG)
    every = int(match.group(1))
    if every == 0 or every % CHUNK_TOKENS:
        nearest = max(CHUNK_TOKENS, on_grid(every + CHUNK_TOKENS // 2))
        raise ConfigError(f"{_FLAG} is {text}; N must be a multiple of {CHUNK_TOKENS}, the grid of the "
                          f"recurrent kernels, such as every:{nearest}", param=_FLAG)
    return TapPolicy(prompt_end=True, forks=True, every_tokens=every, donations=True)


def on_grid(position: int) -> int:
    """The last position of the grid that is not behind ``position``."""
    return position - position % CHUNK_TOKENS


def insurance_tokens(slot_bytes: int, page_bytes: int) -> int:
    """The first distance: tokens whose KV weighs as much as one state, on the grid and within reason."""
    weight = PAGE_TOKENS * ceil_div(slot_bytes, page_bytes) if page_bytes else INSURANCE_TOKENS_MIN
    return on_grid(min(max(weight, INSURANCE_TOKENS_MIN), INSURANCE_TOKENS_MAX) + CHUNK_TOKENS - 1)


def wanted_positions(policy: TapPolicy, *, known_tokens: int, start: int, boundaries: Iterable[int] = (),
                     kv_tokens: int = 0, insurance_first: int = INSURANCE_TOKENS_MIN) -> list[int]:
    """Positions after ``start`` at which a sequence of ``known_tokens`` should leave its state, the most
    useful first. ``start``: where its computation begins; ``kv_tokens``: how far the cache had its KV;
    ``boundaries``: declared positions, any order, on the grid or not, beyond the end or not."""
    last = on_grid(known_tokens - 1)
    wishes: dict[int, None] = {}

    def wish(position: int) -> None:
        if start < position <= last:
            wishes.setdefault(position)

    if policy.prompt_end:
        wish(last)
    if policy.forks and kv_tokens > start:
        wish(on_grid(min(kv_tokens, last)))
    if policy.boundaries:
        for boundary in sorted(boundaries):
            wish(on_grid(boundary))
    if policy.insurance:
        declared = list(wishes)
        position = insurance_first
        while position <= last:
            if not any(abs(other - position) <= position // 4 for other in declared):
                wish(position)
            position *= 2
    if policy.every_tokens:
        for position in range(policy.every_tokens, last + 1, policy.every_tokens):
            wish(position)
    return list(wishes)


def taps_in_run(wanted: Iterable[int], start: int, end: int) -> list[int]:
    """Of ``wanted``, in its order, what the run [start, end) passes or reaches: the state at ``end`` is there
    when the run is done, the one at ``start`` is not this run's to keep. At most TAPS_PER_RUN_MAX."""
    return [position for position in dict.fromkeys(wanted) if start < position <= end][:TAPS_PER_RUN_MAX]
