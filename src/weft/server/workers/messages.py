"""What the supervisor and an HTTP worker say to each other: msgpack of these Structs, over ipc.

    worker                                              supervisor
    ------                                              ----------
    WorkerLaunch (stdin, once)   <--------------------  which server to be
    Connected                    -------------------->  it can be reached
    Opened                       -------------------->  the tokenizer is read; the worker answers
    SubmitRequests               -------------------->  requests of one HTTP request ...
                                 <--------------------  ... Submitted: accepted, or refused
                                 <--------------------  Events of all its streams, once a turn of the loop
                                 <--------------------  StreamFailed
    CancelRequest, CloseStream   -------------------->
                                 <--------------------  FleetState, whenever it changes
                                 <--------------------  AskMetrics: a scrape came, at whichever worker
    WorkerMetrics                -------------------->  its series
                                 <--------------------  StopWorker
"""

from __future__ import annotations

from typing import Any

import msgspec

from weft.info import ModelInfo
from weft.request import Request, TokenEvent
from weft.rpc.messages import Refusal

Series = list[tuple[str, str, str, list[tuple[str, dict[str, str], float]]]]
"""Families of metrics: name, type, help, and samples (name, labels, value)."""


class WorkerLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """``listener``: the file descriptor of the listening socket. ``folder`` has the sockets and the shared
    counts; ``process`` numbers the worker, ``processes`` counts workers and supervisor."""

    config: dict[str, Any]
    folder: str
    listener: int
    process: int
    processes: int

    @property
    def requests_address(self) -> str:
        return f"ipc://{self.folder}/requests"

    @property
    def http_socket(self) -> str:
        """Where the supervisor answers what a worker does not."""
        return f"{self.folder}/http"

    @property
    def counts_file(self) -> str:
        return f"{self.folder}/counts"


class Connected(msgspec.Struct, frozen=True, tag=True):
    """The first message of a worker: it can be reached from now on."""


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The worker answers requests. ``refusal``: why it cannot."""

    refusal: Refusal | None = None


class SubmitRequests(msgspec.Struct, frozen=True, tag=True):
    number: int
    requests: list[Request]


class CancelRequest(msgspec.Struct, frozen=True, tag=True):
    """``index`` None cancels every sequence of the request."""

    request_id: str
    index: int | None


class CloseStream(msgspec.Struct, frozen=True, tag=True):
    """Later events of the submit ``number`` are dropped."""

    number: int
    abandoned: bool = False
    """Its requests are cancelled too, whether or not they were accepted."""


class WorkerMetrics(msgspec.Struct, frozen=True, tag=True):
    number: int
    series: Series


FromWorker = Connected | Opened | SubmitRequests | CancelRequest | CloseStream | WorkerMetrics


class Submitted(msgspec.Struct, frozen=True, tag=True):
    number: int
    refusal: Refusal | None = None


class Events(msgspec.Struct, frozen=True, tag=True):
    events: list[TokenEvent]


class StreamFailed(msgspec.Struct, frozen=True, tag=True):
    number: int
    refusal: Refusal


class FleetState(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What a worker has to know of the fleet. ``refusal``: why it takes no requests now."""

    refusal: Refusal | None
    draining: bool
    info: ModelInfo | None


class AskMetrics(msgspec.Struct, frozen=True, tag=True):
    number: int


class StopWorker(msgspec.Struct, frozen=True, tag=True):
    """End once the last answers have left."""


ToWorker = Submitted | Events | StreamFailed | FleetState | AskMetrics | StopWorker
