"""Which states are saved for later requests: the sources of checkpoints, and the flag that chooses among
them.

    --checkpoints LIST      LIST = first { "," item }      item = source | "-" source

    first       a preset, or a source: then the list begins with nothing
    preset      auto      every source but prompt-end and every:N
                prompt    prompt-end, request-end, preemption, marks
                every:N   as prompt, and forks, and every N tokens of the prompt
                none      nothing
    source      prompt-end      the last grid point of the prompt                   a tap of the prefill
                tail            a little before that, on a coarser grid             a tap
                boundaries      declared: system prompt and tools, each message     taps
                marks           what the client asks for in its request             taps
                forks           where the prompt was seen further than any state    a tap
                insurance       growing distances in long prompts                   taps
                spare           between these, in slots beyond the reserve           taps
                every:N         every N tokens of the prompt                        taps
                decode[:N]      every N tokens of the answer; by weight without N   a copy between two steps
                request-end     where an answer ended                               the running slot, donated
                preemption      where a sequence gave way                           the running slot, donated

Items are read from left to right: a source is added, with a minus it is taken away. ``auto,-forks``,
``prompt,every:1024,decode:4096``, ``boundaries,request-end``. A state that a waiting request needs
is saved whatever the list says: without it the request would compute the same prefix again at once.

A model without recurrent layers needs none of this: it resumes at every page.

Rejected: one switch per source (nine flags that are read together anyway); a list without presets (a user
should not need to know all sources to turn one off).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from weft.errors import ConfigError
from weft.units import CHUNK_TOKENS

_FLAG = "--checkpoints"


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """Which sources are on. ``every_tokens`` 0: not at regular distances of the prompt. ``decode_tokens``:
    that distance in an answer, 0 for one that follows from the weight of a state, where ``decode`` is on."""

    prompt_end: bool = False
    tail: bool = False
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


NONE = CheckpointPolicy()
PROMPT = CheckpointPolicy(prompt_end=True, request_end=True, preemption=True, marks=True)
AUTO = replace(PROMPT, prompt_end=False, tail=True, boundaries=True, forks=True, insurance=True, spare=True,
               decode=True)

_PRESETS = {"auto": AUTO, "prompt": PROMPT, "none": NONE}
_SWITCHES = ("prompt-end", "tail", "boundaries", "marks", "forks", "insurance", "spare", "request-end",
             "preemption")
_FORMS = ("auto, prompt, every:N, none, or a list such as auto,-forks or boundaries,decode:4096 of the "
          f"sources {', '.join(_SWITCHES)}, every:N, decode, decode:N")


def parse_checkpoints(text: str) -> CheckpointPolicy:
    """The policy that ``text`` asks for, see the module. Raises ConfigError that names the flag, the value,
    the item that is wrong in it and the forms that are right."""
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


def _preset(word: str, text: str) -> CheckpointPolicy | None:
    if word.startswith("every:"):
        return replace(PROMPT, forks=True, every_tokens=_distance(word, text))
    return _PRESETS.get(word)


def _with(policy: CheckpointPolicy, item: str, text: str) -> CheckpointPolicy:
    on = not item.startswith("-")
    name = item.removeprefix("-")
    if name in _SWITCHES:
        return replace(policy, **{name.replace("-", "_"): on})
    kind, colon, _ = name.partition(":")
    if kind == "decode" and (on or not colon):
        return replace(policy, decode=on, decode_tokens=_distance(name, text) if colon else 0)
    if kind == "every" and on == bool(colon):
        return replace(policy, every_tokens=_distance(name, text) if on else 0)
    if name in _PRESETS:
        raise _wrong(text, f"{name!r} is no source: it can only come first, without a minus")
    raise _wrong(text, f"{item!r} is no source" if item else "an item of it is empty")


def _distance(item: str, text: str) -> int:
    """N of ``every:N`` and ``decode:N``."""
    kind, _, digits = item.partition(":")
    if not re.fullmatch(r"\d{1,9}", digits):
        raise _wrong(text, f"the N of {item!r} is no number of tokens")
    tokens = int(digits)
    if tokens == 0 or tokens % CHUNK_TOKENS:
        nearest = max(1, (tokens + CHUNK_TOKENS // 2) // CHUNK_TOKENS) * CHUNK_TOKENS
        raise ConfigError(f"{_FLAG} is {text!r}; the N of {kind}:N must be a multiple of {CHUNK_TOKENS}, the "
                          f"grid of the recurrent kernels, such as {kind}:{nearest}", param=_FLAG)
    return tokens


def _wrong(text: str, why: str) -> ConfigError:
    return ConfigError(f"{_FLAG} is {text!r}, and {why}; it must be {_FORMS}. N is a multiple of "
                       f"{CHUNK_TOKENS}", param=_FLAG)
