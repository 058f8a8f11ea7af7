"""The replicas of this server over HTTP: what each one does, and taking one out of service.

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

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weft.errors import RequestError, UnknownReplicaError
from weft.fleet.drain import drain, revive, roll, state_of
from weft.fleet.replica import Replica
from weft.server.service import Service
from weft.server.sse import Handler, json_response

DRAIN_S = 30.0
DRAIN_MAX_S = 24 * 3600.0


class ReplicaReport(msgspec.Struct):
    """``state``: starting, ready, draining, drained, waiting (for a restart), away (its machine cannot be
    reached) or dead. ``host``: the machine that joined with it; empty for this one. ``reason``: why its last
    process ended. ``sequences``: of the requests that it has; ``running``, ``waiting``: as its engine
    says."""

    replica: int
    host: str
    state: str
    restarts: int
    reason: str
    sequences: int
    running: int
    waiting: int


class ReplicaList(msgspec.Struct):
    object: str
    data: list[ReplicaReport]


def replica_handlers(service: Service) -> dict[str, Handler]:
    """By operation of ``weft.server.openapi.endpoints``."""
    handlers = _ReplicaHandlers(service)
    return {"replicas": handlers.list, "restart_replicas": handlers.restart,
            "drain_replica": handlers.drain, "start_replica": handlers.start}


class _ReplicaHandlers:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def list(self, request: Request) -> Response:
        self._service.engine.check_alive()
        return self._answer()

    async def drain(self, request: Request) -> Response:
        self._service.check_open()
        await drain(self._service.engine, _number(request), timeout_s=_timeout(request),
                    restart=_flag(request, "restart"))
        return self._answer()

    async def start(self, request: Request) -> Response:
        self._service.check_open()
        await revive(self._service.engine, _number(request))
        return self._answer()

    async def restart(self, request: Request) -> Response:
        self._service.check_open()
        await roll(self._service.engine, timeout_s=_timeout(request))
        return self._answer()

    def _answer(self) -> Response:
        fleet = self._service.engine
        return json_response(ReplicaList("list", [
            _report(replica, fleet.requests.count_on(replica.number)) for replica in fleet.replicas
            if replica.state != "left"]))


def _report(replica: Replica, sequences: int) -> ReplicaReport:
    stats = replica.engine.stats
    return ReplicaReport(replica.number, replica.host, state_of(replica), replica.restart_count,
                         replica.reason, sequences, stats.running if stats else 0,
                         stats.waiting if stats else 0)


def _number(request: Request) -> int:
    """Raises UnknownReplicaError for a text that is no number."""
    text: str = request.path_params["replica"]
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise UnknownReplicaError(f"there is no replica {text[:20]!r}; replicas are numbers from 0",
                                  param="replica")
    return int(text)


def _timeout(request: Request) -> float:
    text = request.query_params.get("timeout")
    if text is None:
        return DRAIN_S
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= DRAIN_MAX_S:  # also NaN
        raise RequestError(f"timeout is {text!r}; it may be 0 to {DRAIN_MAX_S:g} seconds", param="timeout")
    return value


def _flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise RequestError(f"{name} is {text!r}; it may be true or false", param=name)
    return text in ("true", "1")
