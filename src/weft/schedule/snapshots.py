"""Snapshots for later requests: the flag that chooses the sources, and the positions at which states are saved.

    --snapshots LIST      LIST = first { "," item }      item = source | "-" source

    first       a preset, or a source: then the list begins with nothing
    preset      auto      every source but prompt-end and every:N
                prompt    prompt-end, request-end, preemption, marks
                every:N   as prompt, and forks, and every N tokens of the prompt
                none      nothing
    source      prompt-end      the last grid point of the prompt                   a tap of the prefill
                near-end        a little before that, on a coarser grid             a tap
                boundaries      declared: system prompt and tools, each message     taps
                marks           what the client asks for in its request             taps
                forks           where the prompt was seen further than any state    a tap
                insurance       growing distances in long prompts                   taps
                spare           between these, in slots beyond the reserve           taps
                every:N         every N tokens of the prompt                        taps
                decode[:N]      every N tokens of the answer; by weight without N   a copy between two steps
                request-end     where an answer ended                               the running slot, donated
                preemption      where a sequence was preempted                      the running slot, donated

Items are read from left to right. A state that a waiting request needs is saved whatever the list says. A
model without recurrent layers needs none of this: it resumes at every page.

A *tap* is a position inside a run: there every recurrent layer also writes its state to a snapshot slot. Taps are on an
absolute grid, the chunk of the recurrent kernels, so a hit computes the same chunks as a cold run. The grid is
CHUNK_TOKENS, or a page for kernels that go token by token (decision 0017).

    a prompt of n tokens        |system + tools|  turn 1  |   turn 2      |  question   |
    boundary (declared)                        b          b               b
    prompt end, grid(n - 1)                                                          e
    near-end: the same on a coarser grid                                        n
    fork: seen before up to f, the deepest snapshot is at c        c ---- f
    insurance: i, 2i, 4i, ...        i      2i              4i
    spare: between these               . . .   .  .  .  .       .
    decode: d, 2d, ... of the answer that follows                                      d       2d

* *near-end*: the last tokens of a prompt are the least likely to come again, as a template adds a few and
  later removes them.
* *boundary*: a system prompt is shared by requests that share nothing else.
* *fork*: two prompts are known to differ from here on, so a third may.
* *insurance*: for positions that are not declared. With doubling distances, a prompt that shares p tokens
  with this one finds more than p / 2 of them, for log2(n) states.
* *spare*: with places a fifth apart that prompt finds five sixths of its p tokens, for four times the states. They get
  slots beyond the reserve for others, and none once memory is full (decision 0014).
* *decode*: a request may resume inside an answer of many thousand tokens. Between two steps the running slot
  holds the state after every computed token, and the plan of the step that overwrites it copies it first.

All of this is best effort (law L9): a run is never cut for a tap, and a tap without a free slot is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from weft.errors import ConfigError
from weft.units import CHUNK_TOKENS, PAGE_TOKENS, ceil_div

if TYPE_CHECKING:
    from weft.schedule.plan import Int32s  # numpy, which a flag does without

_FLAG = "--snapshots"


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    """The sources that are on. ``every_tokens`` 0: not at regular distances of the prompt. ``decode_tokens``: that
    distance in an answer, 0 for one that follows from the weight of a state, where ``decode`` is on."""

    prompt_end: bool = False
    near_end: bool = False
    boundaries: bool = False
    marks: bool = False
    forks: bool = False
    insurance: bool = False
    spare: bool = False
    every_tokens: int = 0
    decode: bool = False
    decode_tokens: int = 0
    request_end: bool = False
    preemption: bool = False


NONE = SnapshotPolicy()
PROMPT = SnapshotPolicy(prompt_end=True, request_end=True, preemption=True, marks=True)
AUTO = replace(
    PROMPT, prompt_end=False, near_end=True, boundaries=True, forks=True, insurance=True, spare=True, decode=True
)

_PRESETS = {"auto": AUTO, "prompt": PROMPT, "none": NONE}
_SWITCHES = (
    "prompt-end",
    "near-end",
    "boundaries",
    "marks",
    "forks",
    "insurance",
    "spare",
    "request-end",
    "preemption",
)
_FORMS = (
    "auto, prompt, every:N, none, or a list such as auto,-forks or boundaries,decode:4096 of the "
    f"sources {', '.join(_SWITCHES)}, every:N, decode, decode:N"
)


def parse_snapshots(text: str) -> SnapshotPolicy:
    """Return the policy that ``text`` asks for, see the module. Raise ConfigError that names the flag, the value, the
    item that is wrong in it and the forms that are right."""
    first, *others = text.split(",")
    preset = _preset(first, text)
    if preset is None:
        if first.startswith("-"):
            raise _wrong(text, f"{first!r} takes away from nothing: begin with auto, as in auto,{first}")
        preset, others = NONE, [first, *others]
    policy = preset
    for item in others:
        policy = _with(policy, item, text)
    return policy


def _preset(word: str, text: str) -> SnapshotPolicy | None:
    if word.startswith("every:"):
        return replace(PROMPT, forks=True, every_tokens=_distance(word, text))
    return _PRESETS.get(word)


def _with(policy: SnapshotPolicy, item: str, text: str) -> SnapshotPolicy:
    on = not item.startswith("-")
    name = item.removeprefix("-")
    if name in _SWITCHES:
        return replace(policy, **{name.replace("-", "_"): on})
    kind, colon, _ = name.partition(":")
    if kind == "decode" and (on or not colon):
        return replace(policy, decode=on, decode_tokens=_distance(name, text) if colon else 0)
    if kind == "every" and on == bool(colon):
        return replace(policy, every_tokens=_distance(name, text) if on else 0)
    if name == "tail":
        raise _wrong(text, "the source 'tail' has another name now: near-end")
    if name in _PRESETS:
        raise _wrong(text, f"{name!r} is not a source: it can only come first, without a minus")
    raise _wrong(text, f"{item!r} is not a source" if item else "an item of it is empty")


def _distance(item: str, text: str) -> int:
    """Return N of ``every:N`` and ``decode:N``."""
    kind, _, digits = item.partition(":")
    if not re.fullmatch(r"\d{1,9}", digits):
        raise _wrong(text, f"the N of {item!r} is not a number of tokens")
    tokens = int(digits)
    if tokens == 0 or tokens % CHUNK_TOKENS:
        nearest = max(1, (tokens + CHUNK_TOKENS // 2) // CHUNK_TOKENS) * CHUNK_TOKENS
        raise ConfigError(
            f"{_FLAG} is {text!r}; the N of {kind}:N must be a multiple of {CHUNK_TOKENS}, the "
            f"grid of the recurrent kernels, such as {kind}:{nearest}",
            param=_FLAG,
        )
    return tokens


def _wrong(text: str, why: str) -> ConfigError:
    return ConfigError(
        f"{_FLAG} is {text!r}, and {why}; it must be {_FORMS}. N is a multiple of {CHUNK_TOKENS}", param=_FLAG
    )


INSURANCE_TOKENS_MIN = 512
INSURANCE_TOKENS_MAX = 8192
NEAR_END_GRID_MAX = 512
_NEAR_END_PARTS = 8
DECODE_TOKENS_MIN = 4096
DECODE_TOKENS_MAX = 32768
_DECODE_WEIGHTS = 4
_SPARE_GROWTH = 1.2
TAPS_PER_RUN_MAX = 32
"""Most states that one run keeps (law L11): each costs a write of a complete state in the forward pass."""


def on_grid(position: int, grid: int = CHUNK_TOKENS) -> int:
    """Return the last position of the grid up to ``position``."""
    return position - position % grid


def near_end_position(known_tokens: int, grid: int = CHUNK_TOKENS) -> int:
    """Return the position of *near-end* for ``known_tokens``."""
    # The grid grows with the prompt: an eighth of it or less.
    while grid < NEAR_END_GRID_MAX and 2 * grid * _NEAR_END_PARTS <= known_tokens:
        grid *= 2
    return (known_tokens - 1) // grid * grid


def _within(tokens: int, low: int, high: int) -> int:
    """Return ``tokens`` between ``low`` and ``high``, up to the grid."""
    return on_grid(min(max(tokens, low), high) + CHUNK_TOKENS - 1)


def _state_weight_tokens(slot_bytes: int, page_bytes: int) -> int:
    """Return the number of tokens whose KV has the bytes of one state; 0 where there is no KV."""
    return PAGE_TOKENS * ceil_div(slot_bytes, page_bytes) if page_bytes else 0


def insurance_tokens(slot_bytes: int, page_bytes: int) -> int:
    """Return the first distance: the number of tokens whose KV has the bytes of one state, on the grid and within
    reason."""
    # Closer ones would fill memory with states.
    return _within(_state_weight_tokens(slot_bytes, page_bytes), INSURANCE_TOKENS_MIN, INSURANCE_TOKENS_MAX)


def decode_distance(policy: SnapshotPolicy, slot_bytes: int, page_bytes: int) -> int:
    """Return tokens of an answer from one state to the next, 0 for none: the requested number, or tokens whose KV has
    four times the bytes of a state, on the grid and within reason."""
    if not policy.decode or policy.decode_tokens:
        return policy.decode_tokens
    weight = _state_weight_tokens(slot_bytes, page_bytes)
    return _within(_DECODE_WEIGHTS * weight, DECODE_TOKENS_MIN, DECODE_TOKENS_MAX)


def decodes_due(computed: Int32s, targets: Int32s, distance: int) -> list[int]:
    """Return indices of the decodes that have arrived at their next state. ``computed``: tokens; ``targets``: where
    their prefill ended; int32 [decodes]. States are multiples of ``distance`` from the grid point at which
    the answer began, so all are on the grid."""
    answered = _answer_tokens(computed, targets)
    due: list[int] = ((answered % distance == 0) & (answered > 0)).nonzero()[0].tolist()
    return due


def until_due(computed: Int32s, targets: Int32s, distance: int) -> Int32s:
    """Return tokens from each of these decodes to its next state, while none is due."""
    return distance - _answer_tokens(computed, targets) % distance


def _answer_tokens(computed: Int32s, targets: Int32s) -> Int32s:
    """Return the tokens since the grid point at which the answer began."""
    return computed - (targets - targets % CHUNK_TOKENS)


def wanted_positions(
    policy: SnapshotPolicy,
    *,
    known_tokens: int,
    start: int,
    boundaries: Iterable[int] = (),
    marks: Iterable[int] = (),
    kv_tokens: int = 0,
    insurance_first: int = INSURANCE_TOKENS_MIN,
    grid: int = CHUNK_TOKENS,
) -> list[int]:
    """Return positions after ``start``, multiples of ``grid``, at which a sequence of ``known_tokens`` should leave
    its state, the most useful first. ``start``: where its computation begins; ``kv_tokens``: how far it was
    seen before; ``boundaries`` (declared) and ``marks`` (asked for): any order, on the grid or not, beyond
    the end or not."""
    # Never the last known token: at least one must be computed for its logits.
    last = on_grid(known_tokens - 1, grid)
    # In order of use: slots are given out in this order when they are few.
    wishes: dict[int, None] = {}

    def wish(position: int) -> None:
        if start < position <= last:
            wishes.setdefault(position)

    # The client knows its next request.
    if policy.marks:
        for mark in sorted(marks):
            wish(on_grid(mark, grid))
    if policy.prompt_end:
        wish(last)
    if policy.near_end:
        wish(near_end_position(known_tokens, grid))
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
    """Return the positions of ``wanted``, in its order, in (start, end]: the state at ``end`` exists when the run
    is done, the one at ``start`` belongs to the run before. At most TAPS_PER_RUN_MAX."""
    return [position for position in dict.fromkeys(wanted) if start < position <= end][:TAPS_PER_RUN_MAX]


def spare_in_run(
    tapped: Sequence[int], start: int, end: int, *, known_tokens: int, insurance_first: int, grid: int = CHUNK_TOKENS
) -> list[int]:
    """Return places at growing distances that the run [start, end) of a prompt passes or reaches, from the front: none
    within an eighth of one of ``tapped``. With ``tapped`` at most TAPS_PER_RUN_MAX."""
    spare: list[int] = []
    last = min(end, on_grid(known_tokens - 1, grid))
    position = insurance_first
    while position <= last:
        if position > start and all(abs(other - position) > position // 8 for other in tapped):
            spare.append(position)
        position = max(position + grid, on_grid(int(position * _SPARE_GROWTH), grid))
    return spare[: max(0, TAPS_PER_RUN_MAX - len(tapped))]
