"""A grid of measurements of one server, of any engine: times of streams, prompts and second turns.

    streams N        N requests at once, each with tokens of its own      output tokens/s, first token, gaps
    prompt P         one request of P tokens after another                seconds to the first token
    second turn      the first turn's prompt, its answer, and new tokens  seconds to the first token, cached tokens

A cell ends at its time limit. Results are written after each cell, so an interrupted run can continue from its file.
Prompts are random tokens from a seed that the file keeps; another run has another seed, because a server would find
known prompts in its cache.

The second turn repeats the tokens of the answer if the server returns them (``return_token_ids``). Otherwise it has
stand-ins, which no server can find in its cache, and ``answer_known`` is false.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from weft.errors import ConfigError, WeftError
from weft_tools.bench.metrics import figures
from weft_tools.bench.prompts import SampleRequest, random_requests
from weft_tools.bench.serve import LoadConfig, Served, Server, Timing, one_request, run_load

GRID_VERSION = 1
SECOND_TURN_TOKENS = 32
"""Number of new tokens of a second turn."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement. ``kind``: "streams", "prompt" or "second turn"; ``count``: requests at once, or repetitions."""

    kind: str
    count: int
    input_tokens: int
    output_tokens: int

    @property
    def name(self) -> str:
        if self.kind == "streams":
            return f"{self.count} streams" if self.count > 1 else "1 stream"
        return f"{self.kind}, {self.input_tokens:,} tokens"

    @property
    def context_tokens(self) -> int:
        """Tokens of the longest request of the cell."""
        second = SECOND_TURN_TOKENS if self.kind == "second turn" else 0
        return self.input_tokens + 2 * self.output_tokens * bool(second) + self.output_tokens * (not second) + second


def cells_of(
    streams: Sequence[int], prompts: Sequence[int], *, input_len: int, output_len: int, turn_len: int, repetitions: int
) -> list[Cell]:
    """Return the cells in the order in which they are measured: the short ones first."""
    return [
        *(Cell("streams", count, input_len, output_len) for count in sorted(streams)),
        Cell("second turn", repetitions, turn_len, output_len),
        *(Cell("prompt", repetitions, length, 1) for length in sorted(prompts)),
    ]


@dataclass(frozen=True, slots=True)
class GridRun:
    """The settings of a run. A run may continue a file with equal settings."""

    url: str
    model: str
    cells: tuple[Cell, ...]
    limit_s: float
    seed: int

    def header(self) -> dict[str, Any]:
        return {
            "weft_bench_grid": GRID_VERSION,
            "base_url": self.url,
            "model_id": self.model,
            "limit_s": self.limit_s,
            "cells": [cell.name + f" ({cell.input_tokens} -> {cell.output_tokens})" for cell in self.cells],
        }


def resumed(path: Path, run: GridRun) -> tuple[GridRun, dict[str, Any]]:
    """Return the run with the seed of the file ``path``, and the file's results; without a file, return the run
    unchanged. Raise ConfigError for the file of a run with other settings."""
    if not path.exists():
        return run, {}
    known = read_grid(path)
    for key, value in run.header().items():
        if known.get(key) != value:
            raise ConfigError(
                f"--output-json {path} has a run with {key} {known.get(key)!r}, and this one has {value!r}: "
                "name another file, or remove it",
                param="--output-json",
            )
    return replace(run, seed=int(known["seed"])), dict(known["results"])


def read_grid(path: Path) -> dict[str, Any]:
    """Return the contents of a file of a grid. Raise ConfigError for anything else."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a result of weft bench grid: {error}", param="FILE") from None
    if not isinstance(known, dict) or known.get("weft_bench_grid") != GRID_VERSION or "results" not in known:
        raise ConfigError(f"{path} is not a result of weft bench grid", param="FILE")
    return known


async def measure_cell(server: Server, served: Served, cell: Cell, run: GridRun, vocab_size: int) -> dict[str, Any]:
    """Return the figures of ``cell``, in seconds and tokens a second; {"skipped": why} if the server's context is too
    small or the time limit ended the cell, {"failed": why} if a request failed."""
    if served.max_model_len and cell.context_tokens > served.max_model_len:
        return {
            "skipped": f"needs {cell.context_tokens:,} tokens of context, and the server has {served.max_model_len:,}"
        }
    seed = hash_of(run.seed, cell)
    try:
        async with asyncio.timeout(run.limit_s):
            if cell.kind == "streams":
                return await _streams(server, served, cell, seed, vocab_size)
            if cell.kind == "prompt":
                return await _prompts(server, served, cell, seed, vocab_size)
            return await _second_turns(server, served, cell, seed, vocab_size)
    except TimeoutError:
        return {"skipped": f"took over {run.limit_s:g} s"}
    except WeftError as error:
        return {"failed": error.message}


def hash_of(seed: int, cell: Cell) -> int:
    """Return a seed for the cell, the same in every process."""
    return seed * 1_000_003 + zlib.crc32(cell.name.encode()) % 1_000_003


async def _streams(server: Server, served: Served, cell: Cell, seed: int, vocab_size: int) -> dict[str, Any]:
    requests = random_requests(
        cell.count, input_len=cell.input_tokens, output_len=cell.output_tokens, vocab_size=vocab_size, seed=seed
    )
    timings, seconds = await run_load(server, served, requests, LoadConfig(extra_body={"ignore_eos": True}))
    if broken := _failure(timings):
        return {"failed": broken}
    whole = figures(timings, seconds, percentiles=(99.0,))
    return {
        "output_tokens_s": whole["output_throughput"],
        "stream_tokens_s": 1e3 / whole["mean_tpot_ms"] if whole["mean_tpot_ms"] else None,
        "first_token_s": whole["median_ttft_ms"] / 1e3,
        "first_token_p99_s": whole["p99_ttft_ms"] / 1e3,
    }


async def _prompts(server: Server, served: Served, cell: Cell, seed: int, vocab_size: int) -> dict[str, Any]:
    """Measure prompts. The first request of a length is not counted: engines compile kernels for it."""
    requests = random_requests(
        cell.count + 1, input_len=cell.input_tokens, output_len=cell.output_tokens, vocab_size=vocab_size, seed=seed
    )
    timings = [await _asked(server, served, request) for request in requests]
    if broken := _failure(timings):
        return {"failed": broken}
    first_token_s = median(timing.first_token_s for timing in timings[1:])
    return {"first_token_s": first_token_s, "prompt_tokens_s": cell.input_tokens / first_token_s}


async def _second_turns(server: Server, served: Served, cell: Cell, seed: int, vocab_size: int) -> dict[str, Any]:
    own = cell.input_tokens + cell.output_tokens + SECOND_TURN_TOKENS
    drawn = random_requests(
        cell.count + 1, input_len=own, output_len=cell.output_tokens, vocab_size=vocab_size, seed=seed
    )
    turns: list[Timing] = []
    known = True
    for request in drawn:
        assert isinstance(request.prompt, list)
        opening, later = request.prompt[: cell.input_tokens], request.prompt[cell.input_tokens :]
        first = await _asked(server, served, SampleRequest(opening, cell.output_tokens))
        if broken := _failure([first]):
            return {"failed": broken}
        answer, new = later[: cell.output_tokens], later[cell.output_tokens :]
        known = known and len(first.tokens) == cell.output_tokens
        answer = first.tokens if known else answer
        turns.append(
            await _asked(
                server, served, SampleRequest(opening + (first.tokens if known else answer) + new, cell.output_tokens)
            )
        )
    if broken := _failure(turns):
        return {"failed": broken}
    return {
        "first_token_s": median(turn.first_token_s for turn in turns[1:]),
        "cached_tokens": median(turn.cached_tokens for turn in turns[1:]),
        "prompt_tokens": own,
        "answer_known": known,
    }


async def _asked(server: Server, served: Served, request: SampleRequest) -> Timing:
    body = server.endpoint_format.body(served.name, request.prompt, request.output_tokens)
    return await one_request(server.http, body, server.endpoint_format)


def _failure(timings: Sequence[Timing]) -> str | None:
    """Return the first error, or a sentence for an answer without tokens; None if there is none."""
    for timing in timings:
        if timing.error is not None or not timing.chunks:
            return timing.error or "an answer brought no token"
    return None
