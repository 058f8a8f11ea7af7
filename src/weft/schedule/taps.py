"""Where the recurrent state of a sequence is kept on its way: pure functions over numbers, tested as tables.

A *tap* is a position inside a run at which every recurrent layer also writes its state to a checkpoint
slot, during the forward pass that goes through there anyway. Taps lie on an absolute grid, the chunk that
the recurrent kernels compute at once, so that a hit computes the same chunks as a cold run: CHUNK_TOKENS, or
a page where they go token by token (docs/decisions/0017-grid.md). They never lie at the last known token, as
one token at least is computed to have logits.

    a prompt of n tokens        |system + tools|  turn 1  |   turn 2      |  question   |
    boundary (declared)                        b          b               b
    prompt end, grid(n - 1)                                                          e
    tail: the same on a coarser grid                                            t
    fork: seen before up to f, the deepest checkpoint is at c        c ---- f
    insurance: i, 2i, 4i, ...        i      2i              4i
    spare: between these               . . .   .  .  .  .       .
    decode: d, 2d, ... of the answer that follows                                      d       2d

* *prompt end*: the same prompt again, and n > 1, compute the last chunk only.
* *tail*: the last tokens of a prompt are the least likely to come again as they are: a template adds a few
  that it later takes away, a question is put in other words. So it lies on a grid that grows with the prompt,
  an eighth of it or less, up to 512: found by whoever shares the rest; no more than that is computed again.
* *boundary*: a system prompt is shared by requests that share nothing else; waiting for a second one to see
  that it is would pay for it twice.
* *fork*: two prompts are known to have parted here, so a third may.
* *insurance*: what nobody declared. With doubling distances, a prompt that shares p tokens with this one
  finds more than p / 2 of them, for log2(n) states. The first distance is where the KV of the tokens behind
  it weighs as much as the state itself: closer ones would fill memory with states.
* *spare*: with places a fifth apart that prompt finds five sixths of its p tokens. That takes four times as
  many states, which nobody asked for: they get slots that are free beyond what is kept free for others, and
  none once memory is full (docs/decisions/0014-cache-policy.md).
* *marks*: what the client asks for. First of all wishes, as it knows what it will send next.
* *decode*: an answer of many thousand tokens may be taken up in its middle (edited, cut, its reasoning left
  out). The kernels of decode runs look for no taps, and need not: between two steps the running slot holds
  the state after everything computed, and the plan of the step that would overwrite it has it copied. The
  distance makes these states weigh at most a quarter of the KV they go with.

What ends (or is preempted) donates its running slot besides; that needs no tap.

All of this is a wish (law L9): a run is never cut for a tap, and a tap that finds no slot is left out.
Wishes are ordered, the ones most likely to be used first, because that is the order in which slots are given
out when they are few.

Rejected: a checkpoint at each multiple of a block (the states of 397B weigh 6,253 tokens of KV each); only
one at the prompt's end (it lies in the unique tail of most prompts, where nobody finds it).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from weft.schedule.checkpoints import CheckpointPolicy
from weft.schedule.plan import Int32s
from weft.units import CHUNK_TOKENS, PAGE_TOKENS, ceil_div

INSURANCE_TOKENS_MIN = 512
INSURANCE_TOKENS_MAX = 8192
TAIL_GRID_MAX = 512
_TAIL_PARTS = 8
DECODE_TOKENS_MIN = 4096
DECODE_TOKENS_MAX = 32768
_DECODE_WEIGHTS = 4
_SPARE_GROWTH = 1.2
TAPS_PER_RUN_MAX = 32
"""Most states that one run keeps (law L11): each costs a write of a whole state in the forward pass."""


def on_grid(position: int, grid: int = CHUNK_TOKENS) -> int:
    """The last position of the grid that is not behind ``position``."""
    return position - position % grid


def tail_position(known_tokens: int, grid: int = CHUNK_TOKENS) -> int:
    """A little before the end of so many tokens: see *tail*."""
    while grid < TAIL_GRID_MAX and 2 * grid * _TAIL_PARTS <= known_tokens:
        grid *= 2
    return (known_tokens - 1) // grid * grid


def _within(tokens: int, low: int, high: int) -> int:
    """``tokens`` between ``low`` and ``high``, up to the grid."""
    return on_grid(min(max(tokens, low), high) + CHUNK_TOKENS - 1)


def _state_weight_tokens(slot_bytes: int, page_bytes: int) -> int:
    """Tokens whose KV weighs as much as one state; 0 where there is no KV."""
    return PAGE_TOKENS * ceil_div(slot_bytes, page_bytes) if page_bytes else 0


def insurance_tokens(slot_bytes: int, page_bytes: int) -> int:
    """The first distance: tokens whose KV weighs as much as one state, on the grid and within reason."""
    return _within(_state_weight_tokens(slot_bytes, page_bytes), INSURANCE_TOKENS_MIN, INSURANCE_TOKENS_MAX)


def decode_distance(policy: CheckpointPolicy, slot_bytes: int, page_bytes: int) -> int:
    """Tokens of an answer from one state to the next, 0 for none: as asked, or as many as weigh four times
    what the state does, on the grid and within reason."""
    if not policy.decode or policy.decode_tokens:
        return policy.decode_tokens
    weight = _state_weight_tokens(slot_bytes, page_bytes)
    return _within(_DECODE_WEIGHTS * weight, DECODE_TOKENS_MIN, DECODE_TOKENS_MAX)


def decodes_due(computed: Int32s, targets: Int32s, distance: int) -> list[int]:
    """Which of the decodes, with so many tokens ``computed`` and their prefill up to ``targets`` behind them
    (int32 [decodes]), have come as far as their next state: multiples of ``distance`` from the grid point at
    which the answer began, so all on the grid."""
    made = _made(computed, targets)
    due: list[int] = np.flatnonzero((made % distance == 0) & (made > 0)).tolist()
    return due


def until_due(computed: Int32s, targets: Int32s, distance: int) -> Int32s:
    """Tokens that each of these decodes is from its next state, where none is due now."""
    return distance - _made(computed, targets) % distance


def _made(computed: Int32s, targets: Int32s) -> Int32s:
    """Tokens since the grid point at which the answer began."""
    return computed - (targets - targets % CHUNK_TOKENS)


def wanted_positions(policy: CheckpointPolicy, *, known_tokens: int, start: int,
                     boundaries: Iterable[int] = (), marks: Iterable[int] = (), kv_tokens: int = 0,
                     insurance_first: int = INSURANCE_TOKENS_MIN, grid: int = CHUNK_TOKENS) -> list[int]:
    """Positions after ``start``, multiples of ``grid``, at which a sequence of ``known_tokens`` should leave
    its state, the most useful first. ``start``: where its computation begins; ``kv_tokens``: how far it was
    seen before; ``boundaries`` (declared) and ``marks`` (asked for): any order, on the grid or not, beyond
    the end or not."""
    last = on_grid(known_tokens - 1, grid)
    wishes: dict[int, None] = {}

    def wish(position: int) -> None:
        if start < position <= last:
            wishes.setdefault(position)

    if policy.marks:
        for mark in sorted(marks):
            wish(on_grid(mark, grid))
    if policy.prompt_end:
        wish(last)
    if policy.tail:
        wish(tail_position(known_tokens, grid))
    if policy.forks and kv_tokens > start:
        wish(on_grid(min(kv_tokens, last), grid))
    if policy.boundaries:
        for boundary in sorted(boundaries):
            wish(on_grid(boundary, grid))
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


def spare_in_run(taken: Sequence[int], start: int, end: int, *, known_tokens: int, insurance_first: int,
                 grid: int = CHUNK_TOKENS) -> list[int]:
    """Places at growing distances that the run [start, end) of a prompt passes or reaches, from the front:
    none within an eighth of one of ``taken``. With ``taken`` at most TAPS_PER_RUN_MAX."""
    found: list[int] = []
    last = min(end, on_grid(known_tokens - 1, grid))
    position = insurance_first
    while position <= last:
        if position > start and all(abs(other - position) > position // 8 for other in taken):
            found.append(position)
        position = max(position + grid, on_grid(int(position * _SPARE_GROWTH), grid))
    return found[: max(0, TAPS_PER_RUN_MAX - len(taken))]
