"""Answers to the lines of a batch: the jobs of the endpoints, without HTTP.

    url, body --the type and ``prepare`` of that endpoint--> Job --start, answer--> status, body

A line gets the answer that the endpoint would have sent: the same checks, the same answer, the same errors. A full
queue, or an engine that sleeps or restarts, is not an answer: ``RetryLaterError`` is raised, and the line waits.

Lines run below interactive requests: without a ``priority`` of their own they get BATCH_PRIORITY.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from weft.config import EngineConfig
from weft.errors import EngineUnavailableError, ModelLoadError, QueueFullError, RequestError, WeftError
from weft.fleet.fleet import Fleet
from weft.rpc.client import ASSEMBLE
from weft.server.batches.lines import IndexedLine, OutputFile, OutputLine, output_line, read_body_of, read_index
from weft.server.chat import CHAT
from weft.server.chat_turn import prepare_turn
from weft.server.completions import COMPLETIONS
from weft.server.config import ServerConfig
from weft.server.errors import error_body
from weft.server.fleets import new_fleet
from weft.server.models import Models, PinnedModel
from weft.server.pooling import EMBEDDINGS, RERANK, SCORE
from weft.server.pooling_tasks import CLASSIFY, POOLING
from weft.server.protocol import read_body
from weft.server.responses.answers import ResponsesJob
from weft.server.responses.items import UNSERVED_IN_RESPONSES, ResponsesBody, check_fields, new_response_id, read_items
from weft.server.responses.turns import responses_turn
from weft.server.served_model import load_served_model
from weft.server.service import Service
from weft.server.sse import Job, Way
from weft.server.tenants import Tenant
from weft.tasks import end_tasks
from weft.text.current_request import begin_request

BATCH_PRIORITY = 1_000_000


class RetryLaterError(Exception):
    """The engine takes no request now; try the line again later."""


async def _prepare_response(service: Service, body: ResponsesBody) -> Job:
    check_fields(body)
    if body.previous_response_id is not None:
        raise RequestError(
            "previous_response_id is not supported in a batch",
            param="previous_response_id",
            code="unsupported_parameter",
        )
    if body.background:
        raise RequestError(
            "background is not supported in a batch, which is in the background itself",
            param="background",
            code="unsupported_parameter",
        )
    body.store = False
    response_id = new_response_id()
    turn = responses_turn(body, read_items(body.input, response_id))
    return ResponsesJob(await prepare_turn(service, turn), body, response_id)


_WAYS: dict[str, Way] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/embeddings": EMBEDDINGS,
    "/v1/rerank": RERANK,
    "/v1/score": SCORE,
    "/classify": CLASSIFY,
    "/pooling": POOLING,
    "/v1/responses": Way(ResponsesBody, UNSERVED_IN_RESPONSES, _prepare_response),
}
URLS = frozenset(_WAYS)
"""Endpoints that a line may name."""


async def answer_line(service: Service, url: str, raw: bytes, *, tenant: Tenant | None = None) -> tuple[int, bytes]:
    """Return the status and the body. Raise RetryLaterError."""
    try:
        job = await _job(service, url, raw, tenant)
        try:
            await job.generation.start()
            return 200, await job.answer()
        finally:
            job.generation.close()
            if tenant is not None:
                tenant.spend(job.generation.usage().total_tokens)
    except ModelLoadError as error:  # only this line's model is not ready: lines for other models are still answered
        return error.status, error_body(error)
    except (QueueFullError, EngineUnavailableError) as error:
        raise RetryLaterError(error.message) from error
    except WeftError as error:
        return error.status, error_body(error)


async def _job(service: Service, url: str, raw: bytes, tenant: Tenant | None) -> Job:
    way = _WAYS[url]
    begin_request(strict=service.config.strict_fields)
    await service.body_checker.check(raw)
    body: Any = await read_body(raw, way.body, unserved=way.unserved)
    if body.stream:
        raise RequestError(
            "stream is not supported in a batch: an answer is one line", param="stream", code="unsupported_parameter"
        )
    if body.priority is None:
        body.priority = BATCH_PRIORITY
    if tenant is not None:
        body.cache_salt = tenant.salt(body.cache_salt)
    return await way.prepare(service, body)


_PAUSE_S = 0.5


def window_of(service: Service) -> int:
    """Return how many lines are computed at once."""
    return service.models.first.lines_at_once()


def in_order(lines: Iterable[IndexedLine]) -> list[IndexedLine]:
    """Return the lines in an order in which neighbours share the longest prefixes."""
    return sorted(lines, key=lambda line: (line.url, line.key, line.offset))


async def run_lines(
    service: Service,
    source: Path,
    lines: Iterable[IndexedLine],
    write: Callable[[OutputLine], None],
    *,
    window: int,
    tenant: Tenant | None = None,
) -> None:
    """Answer lines, ``window`` at once, in the order of the prefix cache. A line that the engine cannot take now goes
    back to the front, and the window pauses. ``write`` gets each answer once. Raise WeftError when the engine is lost
    for good."""
    waiting = deque(in_order(lines))
    running: dict[asyncio.Task[tuple[int, bytes]], IndexedLine] = {}
    ended: asyncio.Queue[asyncio.Task[tuple[int, bytes]]] = asyncio.Queue()
    try:
        while waiting or running:
            while waiting and len(running) < window:
                line = waiting.popleft()
                body = read_body_of(source, line)
                task = asyncio.create_task(answer_line(service, line.url, body, tenant=tenant))
                task.add_done_callback(ended.put_nowait)
                running[task] = line
            done = [await ended.get()]
            while not ended.empty():
                done.append(ended.get_nowait())
            pause = False
            for task in done:
                line = running.pop(task)
                try:
                    status, body = task.result()
                except RetryLaterError:
                    if service.models.death is not None:
                        raise service.models.death from None
                    waiting.appendleft(line)
                    pause = True
                    continue
                write(output_line(line, status, body))
            if pause:
                await asyncio.sleep(_PAUSE_S)
    finally:
        await end_tasks(*running)


@dataclass(slots=True)
class BatchCounts:
    """Counts of a run. ``earlier``: answers that were in the output already; ``failed``: answers that are errors.
    ``seconds``: from the first line to the last answer, without the start of the engine."""

    total: int
    earlier: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        return self.earlier + self.done == self.total


class RunInterruptedError(Exception):
    """Ctrl-C was pressed; ``counts`` says how far the run came."""

    def __init__(self, counts: BatchCounts) -> None:
        super().__init__()
        self.counts = counts


def run_file(
    source: Path,
    output: Path,
    engine: EngineConfig,
    server: ServerConfig,
    *,
    on_progress: Callable[[str], None],
    on_answer: Callable[[BatchCounts], None],
    factory: str = ASSEMBLE,
) -> BatchCounts:
    """Answer the lines of a file. Raise RequestError, ConfigError, CheckpointError, EngineUnavailableError,
    RunInterruptedError."""
    server.check()
    if output.exists() and output.samefile(source):
        raise RequestError(f"the output is the input: {output}", param="--output")
    index = read_index(source, urls=URLS)
    with contextlib.closing(OutputFile(output, {line.custom_id for line in index})) as answers:
        counts = BatchCounts(len(index), earlier=len(answers.done), failed=answers.failed_count)
        missing = [line for line in index if line.custom_id not in answers.done]
        if missing:
            run = _Run(source, answers, counts, on_answer)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(run.all(missing, engine, server, on_progress, factory))
    return counts


class _Run:
    def __init__(
        self, source: Path, answers: OutputFile, counts: BatchCounts, on_answer: Callable[[BatchCounts], None]
    ) -> None:
        self._source = source
        self._answers = answers
        self._counts = counts
        self._on_answer = on_answer
        self._began_s = 0.0

    async def all(
        self,
        lines: list[IndexedLine],
        engine: EngineConfig,
        server: ServerConfig,
        on_progress: Callable[[str], None],
        factory: str,
    ) -> None:
        fleet = new_fleet(engine, server, factory=factory, on_progress=on_progress)
        service = Service(server, Models([PinnedModel(fleet)]))
        interrupted = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, interrupted.set)
        work = asyncio.ensure_future(self._work(service, fleet, lines))
        stop = asyncio.ensure_future(interrupted.wait())
        try:
            await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise RunInterruptedError(self._counts)
            work.result()
        finally:
            await end_tasks(stop, work)
            await fleet.stop("the batch ended")

    async def _work(self, service: Service, fleet: Fleet, lines: list[IndexedLine]) -> None:
        await fleet.start()
        info = await fleet.ready()
        service.open(await asyncio.to_thread(load_served_model, info, service.config))
        self._began_s = time.perf_counter()
        await run_lines(service, self._source, lines, functools.partial(self._write, fleet), window=window_of(service))

    def _write(self, fleet: Fleet, line: OutputLine) -> None:
        self._answers.write(line)
        self._counts.done += 1
        self._counts.seconds = time.perf_counter() - self._began_s
        self._counts.failed = self._answers.failed_count
        self._counts.tokens = sum(stats.generation_tokens for _, stats in fleet.engines.stats())
        self._on_answer(self._counts)
