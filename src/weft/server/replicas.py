"""The replicas of this server over HTTP: their states, and taking a replica out of service.

    GET  /v1/replicas                  number, state, restarts, load of each
    POST /v1/replicas/N/drain          timeout=SECONDS, restart=true
    POST /v1/replicas/N/start          a drained or dead one serves again
    POST /v1/replicas/restart          all of them, one after the other

Fields go in the query. With --operator-key these paths are for operators (``gate``): a drain moves the work
of all clients.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from weft.engine.stats import Flushed, Part, SleepState, check_level, check_parts
from weft.errors import RequestError, UnknownReplicaError
from weft.fleet.fleet import Fleet
from weft.fleet.replica import Replica
from weft.handoff import Role
from weft.rpc.messages import SleepMode, SleepOutcome
from weft.server.protocol import parse_body
from weft.server.service import Service
from weft.server.sse import json_response

WAIT_S = 30.0
WAIT_MAX_S = 24 * 3600.0


class ReplicaReport(msgspec.Struct):
    """A replica as the API shows it. ``state``: starting, ready, draining, drained, waiting (for a restart), away (its
    machine cannot be reached) or dead. ``host``: the machine that joined with it; empty for this one. ``reason``: why
    its last process ended. ``sequences``: number of sequences of its requests; ``running``, ``waiting``: as its engine
    reports them. ``role``: prefill, decode or both."""

    replica: int
    host: str
    state: str
    restarts: int
    reason: str
    sequences: int
    running: int
    waiting: int
    model: str = ""
    role: Role = "both"


class ReplicaList(msgspec.Struct):
    object: str
    data: list[ReplicaReport]


class ReplicaHandlers:
    """The endpoints of replicas. A public method is an operation of ``openapi.endpoints``."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def replicas(self, request: Request) -> Response:
        self._service.models.check_alive()
        return self._answer()

    async def drain_replica(self, request: Request) -> Response:
        await self._fleet(request).drain(
            _replica_number(request),
            timeout_s=read_timeout(request.query_params),
            restart=read_flag(request.query_params, "restart"),
        )
        return self._answer()

    async def start_replica(self, request: Request) -> Response:
        await self._fleet(request).revive(_replica_number(request))
        return self._answer()

    async def restart_replicas(self, request: Request) -> Response:
        await self._fleet(request).roll(timeout_s=read_timeout(request.query_params))
        return self._answer()

    def _fleet(self, request: Request) -> Fleet:
        return self._service.fleet_of(request.query_params.get("model"))

    def _answer(self) -> Response:
        return json_response(
            ReplicaList(
                "list",
                [
                    _report(replica, fleet.requests.count_on(replica.number), name)
                    for name, fleet in self._service.models.fleets
                    for replica in fleet.replicas
                    if replica.state != "left"
                ],
            )
        )


def _report(replica: Replica, sequences: int, model: str) -> ReplicaReport:
    stats = replica.engine.stats
    return ReplicaReport(
        replica.number,
        replica.host,
        replica.shown_state,
        replica.restart_count,
        replica.reason,
        sequences,
        stats.running if stats else 0,
        stats.waiting if stats else 0,
        model,
        replica.role,
    )


def _replica_number(request: Request) -> int:
    """Return the number in the path. Raise UnknownReplicaError for a text that is not a number."""
    text: str = request.path_params["replica"]
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise UnknownReplicaError(f"there is no replica {text[:20]!r}; replicas are numbers from 0", param="replica")
    return int(text)


def read_flag(query: QueryParams, name: str, otherwise: bool = False) -> bool:
    """Return a flag of the query. Raise RequestError."""
    text = query.get(name, str(otherwise)).lower()
    if text not in ("true", "false", "1", "0"):
        raise RequestError(f"{name} is {text!r}; it may be true or false", param=name)
    return text in ("true", "1")


_MODES = ("wait", "abort")


class SleepBody(msgspec.Struct, frozen=True):
    level: int = 1
    mode: str | None = None
    timeout: float = WAIT_S


class WakeBody(msgspec.Struct, frozen=True):
    tags: list[str] | str | None = None


class SleepAnswer(msgspec.Struct):
    status: str
    level: int
    flushed: Flushed


class WakeAnswer(msgspec.Struct):
    status: str
    tags: list[Part] | None
    missing: list[Part]


class IsSleepingAnswer(msgspec.Struct):
    is_sleeping: bool
    level: int
    missing: list[Part]


class SleepRequest(msgspec.Struct, frozen=True):
    """A checked call of /sleep."""

    level: int
    mode: SleepMode | None
    timeout_s: float


def read_sleep(query: QueryParams, raw: bytes) -> SleepRequest:
    """Return the call; the query overrides the body. Raise RequestError that names the field."""
    body = parse_body(raw, SleepBody) if raw.strip() else SleepBody()
    level = _number(query, "level", int, body.level)
    timeout_s = read_timeout(query, body.timeout)
    mode = query.get("mode", body.mode)
    check_level(level)
    if mode not in (None, *_MODES):
        raise RequestError(f"mode is {mode!r}; it may be wait (until running requests end) or abort", param="mode")
    return SleepRequest(level, mode, timeout_s)  # type: ignore[arg-type]  # membership was checked above


def read_timeout(query: QueryParams, otherwise: float = WAIT_S) -> float:
    """Return the timeout of the query. Raise RequestError."""
    timeout_s: float = _number(query, "timeout", float, otherwise)
    if not 0 <= timeout_s <= WAIT_MAX_S:  # also NaN
        raise RequestError(f"timeout is {timeout_s:g} s; it may be 0 to {WAIT_MAX_S:g}", param="timeout")
    return timeout_s


def read_tags(query: QueryParams, raw: bytes) -> list[Part] | None:
    """Return the parts to wake; None for all. Raise RequestError."""
    body = parse_body(raw, WakeBody) if raw.strip() else WakeBody()
    named = [body.tags] if isinstance(body.tags, str) else body.tags
    tags = query.getlist("tags") or named
    check_parts(tags)
    return tags or None  # type: ignore[return-value]  # membership was checked above


def sleep_answer(outcome: SleepOutcome) -> SleepAnswer:
    assert outcome.flushed is not None
    return SleepAnswer("sleeping", outcome.state.level, outcome.flushed)


def wake_answer(outcome: SleepOutcome, tags: list[Part] | None) -> WakeAnswer:
    return WakeAnswer("sleeping" if outcome.state.level else "awake", tags, list(outcome.state.missing))


def state_answer(state: SleepState) -> IsSleepingAnswer:
    return IsSleepingAnswer(bool(state.level), state.level, list(state.missing))


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
