"""A worker's end of the supervisor: what handlers see as the fleet.

    requests.submit(requests)  --SubmitRequests-->  accepted, or the refusal of an engine
    requests.cancel, close     --one message-->
    events, failures           <--Events-->         into the stream of their request
    check_alive()              by the last FleetState

It has the part of ``Fleet`` that the endpoints of workers use. Other endpoints are forwarded, so this class
has no replicas, no sleep and no cache.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import msgspec
import zmq

from weft.errors import EngineUnavailableError, WeftError
from weft.fleet.request_stream import RequestStream
from weft.info import ModelInfo
from weft.request import Request
from weft.rpc.loop_socket import LoopSocket
from weft.server.workers.messages import (
    AskMetrics,
    CancelRequest,
    CloseStream,
    Connected,
    Events,
    FleetState,
    FromWorker,
    Opened,
    Series,
    StopWorker,
    StreamFailed,
    SubmitRequests,
    Submitted,
    ToWorker,
    WorkerMetrics,
)

_LINGER_MS = 200
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ToWorker)


class WorkerRequests:
    """As ``Placement`` looks to a handler."""

    def __init__(self, send: Callable[[FromWorker], None]) -> None:
        self._send = send
        self._numbers = itertools.count()
        self._streams: dict[str, RequestStream] = {}
        self._by_number: dict[int, RequestStream] = {}
        self._submits: dict[int, asyncio.Future[None]] = {}

    async def submit(self, requests: list[Request]) -> RequestStream:
        """Returns when engines have accepted them, all or none. Raises the first refusal."""
        number = next(self._numbers)
        stream = self._by_number[number] = RequestStream([request.request_id for request in requests])
        self._streams |= dict.fromkeys(stream.request_ids, stream)
        accepted = self._submits[number] = asyncio.get_running_loop().create_future()
        self._send(SubmitRequests(number, requests))
        try:
            await accepted
        except BaseException:
            self._forget(number)
            self._send(CloseStream(number, abandoned=True))
            raise
        finally:
            del self._submits[number]
        return stream

    def cancel(self, request_id: str, index: int | None = None) -> None:
        self._send(CancelRequest(request_id, index))

    def close(self, stream: RequestStream) -> None:
        """Later events of the stream are dropped."""
        for number in [number for number, one in self._by_number.items() if one is stream]:
            self._forget(number)
            self._send(CloseStream(number))

    def take(self, message: Submitted | Events | StreamFailed) -> None:
        if isinstance(message, Events):
            for event in message.events:
                stream = self._streams.get(event.request_id)
                if stream is not None:
                    stream.put(event)
        elif isinstance(message, StreamFailed):
            if message.number in self._by_number:
                self._by_number[message.number].fail(message.refusal.as_error())
        elif (accepted := self._submits.get(message.number)) is not None and not accepted.done():
            if message.refusal is None:
                accepted.set_result(None)
            else:
                accepted.set_exception(message.refusal.as_error())

    def _forget(self, number: int) -> None:
        stream = self._by_number.pop(number, None)
        if stream is not None:
            for request_id in stream.request_ids:
                self._streams.pop(request_id, None)


class FrontFleet:
    """``on_state`` is called with each state, ``series`` gives this worker's metrics."""

    def __init__(self, address: str, routing_id: str) -> None:
        self.on_step_tokens: Callable[[int, list[int]], None] = lambda replica, sizes: None
        self.on_state: Callable[[FleetState], None] = lambda state: None
        self.series: Callable[[], Series] = list
        self.requests = WorkerRequests(self._send)
        self.stopped = asyncio.Event()
        self.info: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
        self._refusal: WeftError | None = EngineUnavailableError("the server is starting")
        self._context = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            socket.setsockopt(option, 0)
        socket.setsockopt(zmq.ROUTING_ID, routing_id.encode())
        socket.connect(address)
        self._socket = LoopSocket(socket)
        self._send(Connected())

    def check_alive(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def opened(self, message: Opened) -> None:
        self._send(message)

    async def receive(self) -> None:
        """For ever."""
        while True:
            [raw] = await self._socket.receive()
            message = _decoder.decode(raw)
            if isinstance(message, FleetState):
                self._refusal = None if message.refusal is None else message.refusal.as_error()
                if message.info is not None and not self.info.done():
                    self.info.set_result(message.info)
                self.on_state(message)
            elif isinstance(message, AskMetrics):
                self._send(WorkerMetrics(message.number, self.series()))
            elif isinstance(message, StopWorker):
                self.stopped.set()
            else:
                self.requests.take(message)

    def close(self) -> None:
        self._socket.close(_LINGER_MS)
        self._context.term()

    def _send(self, message: FromWorker) -> None:
        self._socket.send([_encoder.encode(message)])
