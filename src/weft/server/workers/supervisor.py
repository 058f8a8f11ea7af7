"""``--http-workers N``: the process that owns the engines, and N processes that speak HTTP for it.

                    one listening socket
                   /         |          \\
    clients --> worker 0  worker 1 ... worker N-1     JSON, templates, tokenizer, text, SSE
                   \\         |          /             requests in, tokens out: one ipc message a turn
                      supervisor                      placement, resumption, drain, sleep, metrics, batches
                     /    |     \\
              engine 0  engine 1  joined machines

A worker is the server of one process, and its engine is the fleet of the supervisor: it has an ``EngineClient``, and
the supervisor answers that as an engine would (``weft.rpc.messages``). A worker answers requests that generate or
tokenize. It passes the rest on to the supervisor's own HTTP socket (``forward``), so a drain or a batch is the same at
each worker. Data of all processes is in files: counts (``SharedCounts``), and metrics, which prometheus_client adds up.

When a worker dies, the connections of its clients end. The supervisor cancels the requests, clears the counts, adds the
metrics to the metrics of all dead workers, and starts another worker. Workers never outlive the supervisor.

"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from weft.engine.stats import WeightsState
from weft.errors import EngineUnavailableError, WeftError
from weft.fleet.fleet import Fleet
from weft.fleet.replica import Lives
from weft.host import exit_reason
from weft.info import ModelInfo
from weft.request import TokenEvent
from weft.rpc.child import private_folder, start_child
from weft.rpc.loop_socket import LoopSocket
from weft.rpc.messages import Cancel, Progress, Ready, Refusal, Reply, Report, StepReport, Submit
from weft.server.config import ServerConfig
from weft.server.edge import SharedCounts
from weft.server.metrics import fold_counts
from weft.server.workers.link import FromWorker, KnowsWeights, WorkerLaunch
from weft.tasks import begin_task

_LOOK_S = 0.05
_END_S = 3.0
_AGREE_S = 5.0
"""Longest wait for a process to learn of weights: one that hangs is not waited for."""
_log = logging.getLogger("weft.server")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FromWorker)


class Worker:
    """One HTTP process at a time, and the receiver of the events of its requests. ``send`` never waits."""

    def __init__(self, number: int, fleet: Fleet, send: Callable[[bytes, Report], None]) -> None:
        self.number = number
        self.serves = asyncio.Event()
        self.process: asyncio.subprocess.Process | None = None
        self._fleet = fleet
        self._send = send
        self._starts = 0
        self._is_attached = False
        self._last_news: Report | None = None
        self._last_weights = WeightsState()
        self._knows_weights = asyncio.Event()
        self._knows_weights.set()
        self._submits: set[asyncio.Task[None]] = set()
        self._report = StepReport()

    @property
    def routing_id(self) -> bytes:
        """Id of the present process; messages of an earlier process have another id."""
        return f"{self.number}.{self._starts}".encode()

    def begin(self) -> None:
        """Begin the next process."""
        self._starts += 1
        self._is_attached, self._last_news, self._last_weights = False, None, WeightsState()
        self.serves.clear()

    def lost(self) -> None:
        """Note that the process ended, and with it the clients' connections."""
        self._fleet.requests.abandon(self)
        self._report = StepReport()
        self._knows_weights.set()

    def tell(self, news: Progress | Ready) -> None:
        if self._is_attached and news != self._last_news:
            self._last_news = news
            self._send(self.routing_id, news)

    def tell_weights(self, weights: WeightsState) -> None:
        if self._is_attached and weights != self._last_weights:
            self._last_weights = weights
            self._knows_weights.clear()
            self._send(self.routing_id, StepReport(weights=weights))

    async def knows_weights(self) -> None:
        """Wait until the process checks requests against the weights that it was told of, or has ended."""
        await self._knows_weights.wait()

    def take(self, message: FromWorker) -> None:
        if isinstance(message, Submit):
            begin_task(self._submit(message), self._submits)
        elif isinstance(message, Cancel):
            self._fleet.requests.cancel(message.request_id, message.index)
        elif isinstance(message, KnowsWeights):
            if message.digest == self._last_weights.digest:
                self._knows_weights.set()
        else:
            self._is_attached = True
            if message.serves:
                self.serves.set()

    # ------------------------------------------------------------------ events of its requests

    def put(self, event: TokenEvent) -> None:
        self._next_report().events.append(event)

    def deliver(self) -> None:
        """Do nothing: the next report is sent after the turn of the loop."""

    def fail(self, request_id: str, error: WeftError) -> None:
        self._next_report().failures[request_id] = Refusal.of(error)

    async def _submit(self, message: Submit) -> None:
        try:
            await self._fleet.requests.place([message.request], self)
            reply = Reply.of(message.number)
        except WeftError as error:
            reply = Reply.refused(message.number, error)
        self._next_report().replies.append(reply)

    def _next_report(self) -> StepReport:
        """Return the report that is sent at the end of this turn of the event loop."""
        report = self._report
        if not (report.events or report.replies or report.failures):
            asyncio.get_running_loop().call_soon(self._flush)
        return report

    def _flush(self) -> None:
        report, self._report = self._report, StepReport()
        self._send(self.routing_id, report)


class Workers:
    """The HTTP processes of a server. ``listener``: the descriptor of the listening socket. ``info``: of the model,
    once it is known."""

    def __init__(self, config: ServerConfig, fleet: Fleet, listener: int) -> None:
        self._fleet = fleet
        self._count = config.http_workers
        self.folder = private_folder()
        self._launch = WorkerLaunch(
            config=dataclasses.asdict(config),
            folder=self.folder,
            listener=listener,
            process=0,
            processes=self._count + 1,
        )
        self.counts = SharedCounts(
            Path(self._launch.counts_file),
            process=self._count,
            processes=self._count + 1,
            keys=len(config.client_keys()),
        )
        self.info: ModelInfo | None = None
        self._workers: list[Worker] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._failed_start: EngineUnavailableError | None = None

    @property
    def http_socket(self) -> str:
        return self._launch.http_socket

    def start(self) -> None:
        """Start the processes. They answer 503 until ``info`` is set."""
        self._context = zmq.Context()
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.SNDHWM, 0)  # bounded by the tokens of live requests
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.bind(self._launch.requests_address)
        self._socket = LoopSocket(socket)
        self._workers = [Worker(number, self._fleet, self._send) for number in range(self._count)]
        self._tasks = [
            asyncio.create_task(work)
            for work in (self._receive(), self._tell_news(), *(self._keep_alive(worker) for worker in self._workers))
        ]

    async def opened(self) -> None:
        """Wait until all workers answer. Raise EngineUnavailableError if a worker cannot start."""
        while not all(worker.serves.is_set() for worker in self._workers):
            if self._failed_start is not None:
                raise self._failed_start
            await asyncio.sleep(_LOOK_S)

    async def stop(self) -> None:
        """Stop the workers, which end once their last answers have left."""
        for task in self._tasks[2:]:
            task.cancel()
        running = [
            worker.process
            for worker in self._workers
            if worker.process is not None and worker.process.returncode is None
        ]
        for process in running:
            process.terminate()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(process.wait() for process in running)), _END_S)
        for task in self._tasks:
            task.cancel()
        for process in running:
            if process.returncode is None:
                process.kill()
        if self._tasks:
            self._socket.close()
            self._context.destroy(linger=0)
        shutil.rmtree(self.folder, ignore_errors=True)

    # ------------------------------------------------------------------ messages

    def tell_weights(self) -> None:
        """Tell processes that do not know yet which weights answer now: a session belongs to one set of weights."""
        for worker in self._workers:
            worker.tell_weights(self._fleet.engines.weights)

    async def agree_on_weights(self) -> None:
        """Tell all processes which weights answer now, and wait until they know, at most ``_AGREE_S``."""
        self.tell_weights()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_AGREE_S):
                await asyncio.gather(*(worker.knows_weights() for worker in self._workers))

    def _send(self, routing_id: bytes, message: Report) -> None:
        self._socket.send([routing_id, _encoder.encode(message)])

    async def _receive(self) -> None:
        while True:
            routing_id, raw = await self._socket.receive()
            worker = next((candidate for candidate in self._workers if candidate.routing_id == routing_id), None)
            if worker is not None:
                worker.take(_decoder.decode(raw))

    async def _tell_news(self) -> None:
        """Tell workers why they refuse requests until the model is known."""
        while True:
            news = Progress(self._fleet.progress) if self.info is None else Ready(self.info, None)
            for worker in self._workers:
                worker.tell(news)
            self.tell_weights()
            await asyncio.sleep(_LOOK_S)

    # ------------------------------------------------------------------ processes

    async def _keep_alive(self, worker: Worker) -> None:
        lives = Lives()
        while True:
            began_s = time.monotonic()
            code = await self._one_life(worker)
            worker.lost()
            self.counts.clear(worker.number)
            if worker.process is not None:
                fold_counts(self.folder, worker.process.pid)
            if not worker.serves.is_set():
                self._failed_start = EngineUnavailableError(
                    f"HTTP worker {worker.number} {exit_reason(code)} before it answered"
                )
            delay_s = lives.end(time.monotonic() - began_s)
            _log.warning(
                "HTTP worker %d %s; another starts%s",
                worker.number,
                exit_reason(code),
                f" in {delay_s:g} s" if delay_s else "",
            )
            await asyncio.sleep(delay_s)

    async def _one_life(self, worker: Worker) -> int:
        """Run one process to its end, and return the exit code."""
        worker.begin()
        launch = msgspec.structs.replace(self._launch, process=worker.number, is_replacement=self.info is not None)
        worker.process = await start_child(
            "weft.server.workers.process",
            launch,
            worker.routing_id.decode(),
            descriptors=(launch.listener,),
            environment={**os.environ, "PROMETHEUS_MULTIPROC_DIR": self.folder},
        )
        return await worker.process.wait()
