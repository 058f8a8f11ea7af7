"""``weft batch``: an engine of its own, the lines of one file, and no HTTP.

    read the input --> open the output --> start the engine --> run_lines --> counts
    (exit 2: nothing    (what is there is    (only if a line
     was computed)       not computed again)  is missing)

The service is the server's, without a listening socket: tokenizer, template, tool parser and checks are those
of ``weft serve``, and a line gets the same answer from both. The engine has a process of its own, so
tokenizing and JSON do not delay a step.

Ctrl-C ends the run at once. Answers that are written stay; the same command goes on behind them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvloop

from weft.config import EngineConfig
from weft.errors import RequestError
from weft.fleet.fleet import Fleet
from weft.rpc.client import ASSEMBLE
from weft.server.batches.answering import URLS, run_lines, window_of
from weft.server.batches.lines import IndexedLine, OutputFile, OutputLine, read_index
from weft.server.config import ServerConfig
from weft.server.service import Service, load_served_model


@dataclass(slots=True)
class BatchCounts:
    """``earlier`` answers were in the output already; ``failed`` of all are errors. ``seconds``: from the
    first line to the last answer, without the start of the engine."""

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
    """Ctrl-C; ``counts`` says how far it came."""

    def __init__(self, counts: BatchCounts) -> None:
        super().__init__()
        self.counts = counts


def run_file(source: Path, output: Path, engine: EngineConfig, server: ServerConfig, *,
             on_progress: Callable[[str], None], on_answer: Callable[[BatchCounts], None],
             factory: str = ASSEMBLE) -> BatchCounts:
    """Raises RequestError, ConfigError, CheckpointError, EngineUnavailableError, RunInterruptedError."""
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
    def __init__(self, source: Path, answers: OutputFile, counts: BatchCounts,
                 on_answer: Callable[[BatchCounts], None]) -> None:
        self._source = source
        self._answers = answers
        self._counts = counts
        self._on_answer = on_answer
        self._began_s = 0.0

    async def all(self, lines: list[IndexedLine], engine: EngineConfig, server: ServerConfig,
                  on_progress: Callable[[str], None], factory: str) -> None:
        fleet = Fleet(engine, restarts=server.restarts, factory=factory, stall_after_s=server.stall_after,
                      on_progress=on_progress)
        service = Service(server, fleet)
        interrupted = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, interrupted.set)
        work = asyncio.ensure_future(self._work(service, lines))
        stop = asyncio.ensure_future(interrupted.wait())
        try:
            await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise RunInterruptedError(self._counts)
            work.result()
        finally:
            stop.cancel()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await fleet.stop("the batch ended")

    async def _work(self, service: Service, lines: list[IndexedLine]) -> None:
        await service.engine.start()
        info = await service.engine.ready()
        service.open(await asyncio.to_thread(load_served_model, info, service.config))
        self._began_s = time.perf_counter()
        await run_lines(service, self._source, lines, functools.partial(self._write, service),
                        window=window_of(service))

    def _write(self, service: Service, line: OutputLine) -> None:
        self._answers.write(line)
        self._counts.done += 1
        self._counts.seconds = time.perf_counter() - self._began_s
        self._counts.failed = self._answers.failed_count
        self._counts.tokens = sum(stats.generation_tokens for _, stats in service.engine.engines.stats())
        self._on_answer(self._counts)
