"""``--http-workers N``: the process that owns the engines, and N processes that speak HTTP for it.

                    one listening socket
                   /         |          \\
    clients --> worker 0  worker 1 ... worker N-1     JSON, templates, tokenizer, text, SSE
                   \\         |          /             requests in, tokens out: one ipc message a turn
                      supervisor                      placement, resumption, drain, sleep, metrics, batches
                     /    |     \\
              engine 0  engine 1  joined machines

The supervisor is the server of one process, on a socket in a private directory: the same ``Service``,
``Fleet`` and routes. Workers answer what generates or tokenizes, and pass the rest on to that socket
(``forward``). So a scrape, a drain or a batch is the same at each worker.

All events of one turn of the loop go to a worker as one message.

A worker that dies takes its clients' connections with it. Its requests are cancelled, its counts cleared, and
another starts. The others and the engines go on. Workers never outlive the supervisor.

Rejected: a router in each worker (strikes, loads and held requests would be shared state with a protocol of
their own; the count in flight would be late); SO_REUSEPORT (a second server could take the port without an
error, and connections queued at a worker that dies are lost).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from weft.errors import EngineUnavailableError, WeftError
from weft.fleet.fleet import Fleet
from weft.fleet.replica import SHORT_LIFE_S, backoff_s
from weft.fleet.request_stream import RequestStream
from weft.info import ModelInfo
from weft.request import TokenEvent
from weft.rpc.engine_link import private_folder
from weft.rpc.loop_socket import LoopSocket
from weft.rpc.messages import Refusal
from weft.server.config import ServerConfig
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
    WorkerLaunch,
    WorkerMetrics,
)
from weft.server.workers.shared_counts import SharedCounts

_STATE_EVERY_S = 0.05
_SCRAPE_S = 2.0
_END_S = 3.0
_log = logging.getLogger("weft.server")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FromWorker)


class WorkerStream(RequestStream):
    """Events of one HTTP request go to its worker instead of a handler here."""

    def __init__(self, worker: Worker, number: int, request_ids: list[str]) -> None:
        super().__init__(request_ids)
        self._worker = worker
        self._number = number

    def put(self, event: TokenEvent) -> None:
        self._worker.put(event)

    def fail(self, error: WeftError) -> None:
        self._worker.say(StreamFailed(self._number, Refusal.of(error)))


class Worker:
    """One HTTP process at a time. ``send`` never waits."""

    def __init__(self, number: int, fleet: Fleet, send: Callable[[bytes, ToWorker], None]) -> None:
        self.number = number
        self.connected = False
        self.opened = asyncio.Event()
        self.refusal: Refusal | None = None
        self.process: asyncio.subprocess.Process | None = None
        self._fleet = fleet
        self._send = send
        self._starts = 0
        self._events: list[TokenEvent] = []
        self._submits: dict[int, asyncio.Task[None]] = {}
        self._streams: dict[int, WorkerStream] = {}

    @property
    def routing_id(self) -> bytes:
        """Of the present process; messages of an earlier one have another."""
        return f"{self.number}.{self._starts}".encode()

    @property
    def stream_count(self) -> int:
        return len(self._streams) + len(self._submits)

    def begin(self) -> None:
        """The next process."""
        self._starts += 1
        self.connected = False
        self.opened.clear()

    def lost(self) -> None:
        """Its process ended: so did its clients' connections."""
        for number in [*self._submits, *self._streams]:
            self._close(number, abandoned=True)
        self._events.clear()

    def say(self, message: ToWorker) -> None:
        self._flush()
        self._send(self.routing_id, message)

    def put(self, event: TokenEvent) -> None:
        if not self._events:
            asyncio.get_running_loop().call_soon(self._flush)
        self._events.append(event)

    def take(self, message: FromWorker) -> None:
        if isinstance(message, SubmitRequests):
            task = asyncio.get_running_loop().create_task(self._submit(message))
            self._submits[message.number] = task
        elif isinstance(message, CancelRequest):
            self._fleet.requests.cancel(message.request_id, message.index)
        elif isinstance(message, CloseStream):
            self._close(message.number, abandoned=message.abandoned)
        elif isinstance(message, Connected):
            self.connected = True
        elif isinstance(message, Opened):
            self.refusal = message.refusal
            self.opened.set()

    async def _submit(self, message: SubmitRequests) -> None:
        stream = WorkerStream(self, message.number, [request.request_id for request in message.requests])
        try:
            await self._fleet.requests.submit(message.requests, stream)
        except WeftError as error:
            self.say(Submitted(message.number, Refusal.of(error)))
        else:
            self._streams[message.number] = stream
            self.say(Submitted(message.number))
        finally:
            self._submits.pop(message.number, None)

    def _close(self, number: int, *, abandoned: bool) -> None:
        submit, stream = self._submits.pop(number, None), self._streams.pop(number, None)
        if submit is not None:
            submit.cancel()
        if stream is None:
            return
        if abandoned:
            for request_id in stream.request_ids:
                self._fleet.requests.cancel(request_id)
        self._fleet.requests.close(stream)

    def _flush(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._send(self.routing_id, Events(events))


class Workers:
    """``listener``: the descriptor of the listening socket. ``info``: of the model, once it is known;
    ``draining``: workers refuse new requests."""

    def __init__(self, config: ServerConfig, fleet: Fleet, listener: int) -> None:
        self._fleet = fleet
        self._count = config.http_workers
        self._folder = private_folder()
        self._launch = WorkerLaunch(config=dataclasses.asdict(config), folder=self._folder,
                                    listener=listener, process=0, processes=self._count + 1)
        self.counts = SharedCounts(Path(self._launch.counts_file), process=self._count,
                                   processes=self._count + 1, keys=len(config.client_keys()))
        self.draining = False
        self.info: ModelInfo | None = None
        self._workers: list[Worker] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._questions = itertools.count()
        self._answers: dict[int, dict[bytes, Series]] = {}
        self._answered = asyncio.Event()

    @property
    def http_socket(self) -> str:
        return self._launch.http_socket

    @property
    def active(self) -> int:
        """HTTP requests that workers answer."""
        return sum(worker.stream_count for worker in self._workers)

    def start(self) -> None:
        """Starts the processes. They answer 503 until ``info`` is set."""
        self._context = zmq.Context()
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.SNDHWM, 0)  # bounded by the tokens of live requests
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.bind(self._launch.requests_address)
        self._socket = LoopSocket(socket)
        self._workers = [Worker(number, self._fleet, self._send) for number in range(self._count)]
        self._tasks = [asyncio.create_task(work) for work in (
            self._receive(), self._tell_state(), *(self._keep_alive(worker) for worker in self._workers))]

    async def opened(self) -> None:
        """Waits until all workers answer. Raises the error of one that cannot."""
        for worker in self._workers:
            await worker.opened.wait()
            if worker.refusal is not None:
                raise worker.refusal.as_error()

    async def idle(self) -> None:
        """Waits until no worker answers a request, once all know that the server drains."""
        await asyncio.sleep(2 * _STATE_EVERY_S)
        while self.active:
            await asyncio.sleep(_STATE_EVERY_S)

    async def stop(self) -> None:
        """Workers end once their last answers have left."""
        for task in self._tasks[2:]:
            task.cancel()
        for worker in self._workers:
            worker.say(StopWorker())
        ends = [worker.process.wait() for worker in self._workers if worker.process is not None]
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*ends), _END_S)
        for task in self._tasks:
            task.cancel()
        for worker in self._workers:
            worker.lost()
            if worker.process is not None and worker.process.returncode is None:
                worker.process.kill()
        if self._tasks:
            self._socket.close()
            self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def metrics(self) -> list[Series]:
        """Of the workers that answer in time."""
        number = next(self._questions)
        answers = self._answers[number] = {}
        asked = [worker for worker in self._workers if worker.opened.is_set()]
        for worker in asked:
            worker.say(AskMetrics(number))
        try:
            async with asyncio.timeout(_SCRAPE_S):
                while len(answers) < len(asked):
                    self._answered.clear()
                    await self._answered.wait()
        except TimeoutError:
            _log.warning("a scrape of /metrics lacks %d of %d HTTP workers", len(asked) - len(answers),
                         len(asked))
        finally:
            del self._answers[number]
        return list(answers.values())

    # ------------------------------------------------------------------ messages

    def _send(self, routing_id: bytes, message: ToWorker) -> None:
        self._socket.send([routing_id, _encoder.encode(message)])

    async def _receive(self) -> None:
        while True:
            routing_id, raw = await self._socket.receive()
            worker = next((one for one in self._workers if one.routing_id == routing_id), None)
            if worker is None:
                continue
            message = _decoder.decode(raw)
            if isinstance(message, WorkerMetrics):
                if message.number in self._answers:
                    self._answers[message.number][routing_id] = message.series
                    self._answered.set()
            else:
                worker.take(message)

    async def _tell_state(self) -> None:
        sent: dict[bytes, FleetState] = {}
        while True:
            state = self._state()
            for worker in self._workers:
                if worker.connected and sent.get(worker.routing_id) != state:
                    sent[worker.routing_id] = state
                    worker.say(state)
            await asyncio.sleep(_STATE_EVERY_S)

    def _state(self) -> FleetState:
        try:
            self._fleet.check_alive()
        except EngineUnavailableError as error:
            return FleetState(refusal=Refusal.of(error), draining=self.draining, info=self.info)
        return FleetState(refusal=None, draining=self.draining, info=self.info)

    # ------------------------------------------------------------------ processes

    async def _keep_alive(self, worker: Worker) -> None:
        short_lives = 0
        while True:
            began_s = time.monotonic()
            code = await self._one_life(worker)
            worker.lost()
            self.counts.clear(worker.number)
            if not worker.opened.is_set():
                worker.refusal = Refusal.of(EngineUnavailableError(
                    f"HTTP worker {worker.number} ended with code {code} before it answered"))
                worker.opened.set()
            short_lives = short_lives + 1 if time.monotonic() - began_s < SHORT_LIFE_S else 0
            delay_s = backoff_s(short_lives)
            _log.warning("HTTP worker %d ended with code %d; another starts%s", worker.number, code,
                         f" in {delay_s:g} s" if delay_s else "")
            await asyncio.sleep(delay_s)

    async def _one_life(self, worker: Worker) -> int:
        """The exit code."""
        worker.begin()
        launch = msgspec.structs.replace(self._launch, process=worker.number)
        process = worker.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "weft.server.workers.process", worker.routing_id.decode(),
            stdin=asyncio.subprocess.PIPE, start_new_session=True, pass_fds=(launch.listener,),
            env=dict(os.environ))
        assert process.stdin is not None
        body = _encoder.encode(launch)
        process.stdin.write(len(body).to_bytes(8, "little") + body)
        return await process.wait()
