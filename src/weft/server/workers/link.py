"""An HTTP worker's connection to the supervisor: an engine client, and the fleet as handlers see it.

stdin, once WorkerLaunch --> the config of the worker
zmq           Attached, Submit, Cancel  -->  supervisor  -->  Progress, Ready, StepReport: as of an engine
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from weft.config import EngineConfig
from weft.errors import WeftError
from weft.fleet.live_request import RequestStream
from weft.request import Request, TokenEvent
from weft.rpc.client import EngineClient
from weft.rpc.loop_socket import LoopSocket
from weft.rpc.messages import Cancel, Submit
from weft.server.config import ServerConfig

_LINGER_MS = 200
_encoder = msgspec.msgpack.Encoder()


class WorkerLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """The launch of a worker. ``listener``: the file descriptor of the listening socket. ``folder`` has the sockets,
    the shared counts and metrics; ``process`` numbers the worker, ``processes`` counts workers and supervisor.
    ``is_replacement``: the server is open, and this worker follows one that died."""

    config: dict[str, Any]
    folder: str
    listener: int
    process: int
    processes: int
    is_replacement: bool = False

    @property
    def requests_address(self) -> str:
        return f"ipc://{self.folder}/requests"

    @property
    def http_socket(self) -> str:
        """Path of the socket where the supervisor answers forwarded requests."""
        return f"{self.folder}/http"

    @property
    def counts_file(self) -> str:
        return f"{self.folder}/counts"

    def server_config(self) -> ServerConfig:
        """Return the config of a worker; files and batches belong to the supervisor."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in self.config.items()
        }
        return dataclasses.replace(ServerConfig(**values), file_store="off")


class Attached(msgspec.Struct, frozen=True, tag=True):
    """The worker can be reached. ``serves``: whether it also answers requests."""

    serves: bool = False


class KnowsWeights(msgspec.Struct, frozen=True, tag=True):
    """The worker's requests are checked against the weights of this digest from now on."""

    digest: str


FromWorker = Attached | KnowsWeights | Submit | Cancel


class SupervisorLink:
    """A ``ProcessLink`` to the supervisor, which starts this process and not the other way round."""

    machine_lost = False
    started = True
    running = False
    """Always false: there is no process to wait for at the end."""

    def __init__(self, address: str, routing_id: str) -> None:
        self._context = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            socket.setsockopt(option, 0)
        socket.setsockopt(zmq.ROUTING_ID, routing_id.encode())
        socket.connect(address)
        self._socket = LoopSocket(socket)
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self, **order: Any) -> None:
        self.say(Attached())

    def say(self, message: Attached | KnowsWeights) -> None:
        self.post(_encoder.encode(message))

    def post(self, command: bytes) -> None:
        self._socket.send([command])

    async def send(self, command: bytes) -> None:
        self.post(command)

    async def receive(self) -> bytes:
        [raw] = await self._socket.receive()
        return raw

    async def wait(self) -> str:
        return await asyncio.shield(self._end)

    async def kill(self) -> None:
        self._end.set_result("this worker ends")

    def close(self) -> None:
        self._socket.close(_LINGER_MS)
        self._context.term()


class RequestsOfWorker:
    """The part of ``Placement`` that handlers use, over one client."""

    def __init__(self, link: SupervisorLink) -> None:
        self.client = EngineClient(
            EngineConfig(),
            link=link,
            stall_after_s=0,
            on_events=self._take,
            on_failure=self._fail,
            on_weights=lambda weights: link.say(KnowsWeights(weights.digest)),
        )
        self._streams: dict[str, RequestStream] = {}

    async def submit(self, requests: list[Request]) -> RequestStream:
        """Submit ``requests``, and return when engines have accepted them, all or none. Raise the first refusal."""
        stream = RequestStream([request.request_id for request in requests])
        self._streams |= dict.fromkeys(stream.request_ids, stream)
        submits = [asyncio.ensure_future(self.client.submit(request)) for request in requests]
        try:
            await asyncio.gather(*submits)
        except BaseException:
            for submit in submits:
                submit.cancel()
            for request_id in stream.request_ids:
                self.cancel(request_id)
            self.close(stream)
            raise
        return stream

    def cancel(self, request_id: str, index: int | None = None) -> None:
        self.client.cancel(request_id, index)

    def close(self, stream: RequestStream) -> None:
        """Close ``stream``: its later events are dropped."""
        for request_id in stream.request_ids:
            self._streams.pop(request_id, None)

    def _take(self, events: Sequence[TokenEvent]) -> None:
        met: dict[RequestStream, None] = {}
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is not None:
                stream.put(event)
                met[stream] = None
        for stream in met:
            stream.deliver()

    def _fail(self, request_id: str, error: WeftError) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.fail(request_id, error)


class FleetOfWorker:
    """The part of ``Fleet`` that the handlers of a worker use; the rest is forwarded."""

    def __init__(self, link: SupervisorLink) -> None:
        self.on_step_tokens: Callable[[int, list[int]], None] = lambda replica, sizes: None
        self.weight_version = ""
        """Unknown to a worker: the supervisor answers /health and updates; events carry the version of their tokens."""
        self.requests = RequestsOfWorker(link)
        self.client = self.requests.client
        self.check_alive = self.client.check_alive

    @property
    def weights_digest(self) -> str:
        """Digest of the weights, as the supervisor last reported it."""
        return self.client.weights.digest
