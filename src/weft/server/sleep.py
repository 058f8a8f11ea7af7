"""POST /sleep, POST /wake_up, GET /is_sleeping: to give the memory back and take it again.

    /sleep    level 1 or 2; mode wait, abort or none; timeout in seconds      in the query or a JSON body
    /wake_up  tags: weights, kv_cache, several, or none for all

The names are those that other servers use. One thing differs: without a ``mode``, a busy engine is not put to
sleep (409, with the number of live sequences), where others abort. The answer says what the prefix cache
lost. ``weft.engine.stats`` defines the levels, ``weft.rpc.sleep_queue`` the waiting.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
from starlette.datastructures import QueryParams

from weft.engine.stats import Part, SleepState, check_level, check_parts
from weft.errors import RequestError
from weft.rpc.messages import SleepMode, SleepOutcome
from weft.server.protocol import parse_body

STATES = ("awake", "weights_offloaded", "discard_all")
"""Values of the metric: awake, level 1, level 2."""
WAIT_S = 30.0
WAIT_MAX_S = 24 * 3600.0
_MODES = ("wait", "abort")


class SleepBody(msgspec.Struct, frozen=True):
    level: int = 1
    mode: str | None = None
    timeout: float = WAIT_S


class WakeBody(msgspec.Struct, frozen=True):
    tags: list[str] | str | None = None


class SleepRequest(msgspec.Struct, frozen=True):
    """A call to sleep that passed the checks."""

    level: int
    mode: SleepMode | None
    timeout_s: float


def read_sleep(query: QueryParams, raw: bytes) -> SleepRequest:
    """The query wins over the body. Raises RequestError naming the field."""
    body = parse_body(raw, SleepBody) if raw.strip() else SleepBody()
    level = _number(query, "level", int, body.level)
    timeout_s = _number(query, "timeout", float, body.timeout)
    mode = query.get("mode", body.mode)
    check_level(level)
    if mode not in (None, *_MODES):
        raise RequestError(f"mode is {mode!r}; it may be wait (for what runs to end) or abort", param="mode")
    if not 0 <= timeout_s <= WAIT_MAX_S:  # also NaN
        raise RequestError(f"timeout is {timeout_s:g} s; it may be 0 to {WAIT_MAX_S:g}", param="timeout")
    return SleepRequest(level, mode, timeout_s)  # type: ignore[arg-type]  # membership was checked above


def read_tags(query: QueryParams, raw: bytes) -> list[Part] | None:
    """None for all. Raises RequestError."""
    body = parse_body(raw, WakeBody) if raw.strip() else WakeBody()
    named = [body.tags] if isinstance(body.tags, str) else body.tags
    tags = query.getlist("tags") or named
    check_parts(tags)
    return tags or None  # type: ignore[return-value]  # membership was checked above


def sleep_answer(outcome: SleepOutcome) -> dict[str, Any]:
    assert outcome.flushed is not None
    return {"status": "sleeping", "level": outcome.state.level,
            "flushed": {"bytes": outcome.flushed.bytes, "tokens": outcome.flushed.tokens}}


def wake_answer(outcome: SleepOutcome, tags: list[Part] | None) -> dict[str, Any]:
    return {"status": "sleeping" if outcome.state.level else "awake", "tags": tags,
            "missing": list(outcome.state.missing)}


def state_answer(state: SleepState) -> dict[str, Any]:
    return {"is_sleeping": bool(state.level), "level": state.level, "missing": list(state.missing)}


def state_name(state: SleepState) -> str:
    """One of STATES."""
    return STATES[state.level]


def _number(query: QueryParams, name: str, kind: type[int] | type[float], otherwise: float) -> Any:
    text = query.get(name)
    if text is None:
        return otherwise
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise RequestError(f"{name} is {text!r}; it must be a number", param=name)
    return value
