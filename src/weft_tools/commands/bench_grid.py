"""``weft bench grid``: one table and one file of a server, and tables of several files side by side."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import uvloop
from rich.table import Table

from weft.cli.flags import COUNT_MAX, DAY_S, VOCABULARY_MAX, Count, FlagCommand, Number
from weft.cli.main import print_table, progress_bar, table_of
from weft.errors import ConfigError
from weft.units import TOKENS_MAX
from weft_tools.bench import report
from weft_tools.bench.grid import GridRun, cells_of, measure_cell, read_grid, resumed
from weft_tools.bench.serve import VOCAB_SIZE_UNKNOWN, Server

STREAMS, PROMPTS = "1,16,64,256", "512,8192,30000"
COLUMNS = {
    "output_tokens_s": ("output tokens/s", 1.0),
    "stream_tokens_s": ("a stream", 1.0),
    "first_token_s": ("first token ms", 1e3),
    "first_token_p99_s": ("p99", 1e3),
    "prompt_tokens_s": ("prompt tokens/s", 1.0),
    "cached_tokens": ("cached tokens", 1.0),
}
"""Figures of a cell: title, and the factor of the shown number."""
LOWER_IS_BETTER = frozenset({"first_token_s", "first_token_p99_s"})


def numbers(text: str, flag: str) -> list[int]:
    """Return the numbers of a list such as "1,16,64". Raise ConfigError that names ``flag``."""
    try:
        values = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = [0]
    if any(value < 1 for value in values):
        raise ConfigError(f"{flag} is {text!r}; it is a list of numbers from 1 on, such as {STREAMS}", param=flag)
    return values


@click.command(
    "grid",
    cls=FlagCommand,
    params=[
        click.Argument(["files"], nargs=-1, type=click.Path(path_type=Path, dir_okay=False)),
        click.Option(
            ["--base-url"],
            envvar="WEFT_URL",
            default="http://127.0.0.1:8000",
            show_default=True,
            help="Server of any engine, with or without /v1.",
        ),
        click.Option(["--model"], help="Name of the model; default: the first that the server lists."),
        click.Option(["--api-key"], envvar="WEFT_API_KEY", help="Its key."),
        click.Option(["--streams"], default=STREAMS, show_default=True, help="Requests at once, one cell for each."),
        click.Option(
            ["--prompts"],
            default=PROMPTS,
            show_default=True,
            help="Prompt lengths whose first token is timed, one cell for each.",
        ),
        click.Option(
            ["--input-len"], type=Count(1, TOKENS_MAX), default=512, show_default=True, help="Prompt of a stream."
        ),
        click.Option(
            ["--output-len"], type=Count(2, TOKENS_MAX), default=128, show_default=True, help="Answer of a stream."
        ),
        click.Option(
            ["--turn-len"],
            type=Count(1, TOKENS_MAX),
            default=2048,
            show_default=True,
            help="Prompt of the first of two turns.",
        ),
        click.Option(
            ["--repetitions"],
            type=Count(1, COUNT_MAX),
            default=3,
            show_default=True,
            help="Repetitions of prompts and second turns; the median counts.",
        ),
        click.Option(
            ["--limit-s"],
            type=Number(0, DAY_S, above=True),
            default=120.0,
            show_default=True,
            help="Seconds after which a cell is given up.",
        ),
        click.Option(
            ["--vocab-size"],
            type=Count(2, VOCABULARY_MAX),
            help="Bound of random token ids; default: the vocabulary of the server.",
        ),
        click.Option(
            ["--output-json"],
            type=click.Path(path_type=Path, dir_okay=False),
            default=Path("grid.json"),
            show_default=True,
            help="File of the run. An existing file is continued.",
        ),
    ],
)
def grid(files: tuple[Path, ...], **values: Any) -> int:
    """Measure a running server in ten minutes: streams, prompts, second turns; any OpenAI-compatible server.

    With FILES of earlier runs nothing is measured: they are shown side by side, with ratios to the first.
    Exit code 1 when a cell failed.
    """
    if files:
        names = [path.stem for path in files]
        titles = (
            names if len(set(names)) == len(names) else [f"{number}. {path}" for number, path in enumerate(files, 1)]
        )
        show_together({title: read_grid(path) for title, path in zip(titles, files, strict=True)})
        return 0
    cells = cells_of(
        numbers(values["streams"], "--streams"),
        numbers(values["prompts"], "--prompts"),
        input_len=values["input_len"],
        output_len=values["output_len"],
        turn_len=values["turn_len"],
        repetitions=values["repetitions"],
    )
    report.check_writable(values["output_json"], "--output-json")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        whole = runner.run(_measure(values, cells))
    show_one(whole)
    click.echo(f"{values['output_json']} has the run; `weft bench grid FILE FILE` shows several side by side.")
    return int(any("failed" in figures for figures in whole["results"].values()))


async def _measure(values: Mapping[str, Any], cells: Sequence[Any]) -> dict[str, Any]:
    """Return the contents of the file, which is written after each cell."""
    server = Server(values["base_url"], api_key=values["api_key"])
    path: Path = values["output_json"]
    async with server.http:
        served = await server.served(values["model"])
        fresh = GridRun(server.url, served.name, tuple(cells), values["limit_s"], random.SystemRandom().getrandbits(32))
        run, results = resumed(path, fresh)
        vocab_size = values["vocab_size"] or served.vocab_size or VOCAB_SIZE_UNKNOWN
        with progress_bar("cells") as show:
            for index, cell in enumerate(run.cells):
                show(index, len(run.cells), cell.name)
                if "failed" in results.get(cell.name, {"failed": ""}):
                    results[cell.name] = await measure_cell(server, served, cell, run, vocab_size)
                whole = {**run.header(), "seed": run.seed, **report.facts(), "results": results}
                report.write(path, whole)
    return whole


def _shown(figures: Mapping[str, Any], key: str) -> str:
    value = figures.get(key)
    if value is None:
        return "-"
    value *= COLUMNS[key][1]
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"


def show_one(whole: Mapping[str, Any]) -> None:
    """Print the table of one run, and a line for each cell without figures."""
    table = table_of(
        ["cell"], [title for title, _ in COLUMNS.values()], title=f"{whole['model_id']} at {whole['base_url']}"
    )
    remarks = []
    for name, figures in whole["results"].items():
        table.add_row(name, *(_shown(figures, key) for key in COLUMNS))
        remarks += [f"{name}: {kind}: {figures[kind]}" for kind in ("skipped", "failed") if kind in figures]
        if figures.get("answer_known") is False:
            remarks.append(f"{name}: the server returns no token ids, so the second turn has stand-ins for the answer")
    print_table(table)
    for remark in remarks:
        click.echo(remark)


def show_together(runs: Mapping[str, Mapping[str, Any]]) -> None:
    """Print each figure of each cell of several runs, with ratios to the first run; above 1 is better."""
    first, *others = runs
    table: Table = table_of(["cell", "figure"], [first, *(title for name in others for title in (name, "ratio"))])
    for cell, figures in runs[first]["results"].items():
        for key, (title, _) in COLUMNS.items():
            if key not in figures:
                continue
            row = []
            for name in others:
                other = runs[name]["results"].get(cell, {})
                row += [_shown(other, key), _ratio(figures[key], other.get(key), key)]
            table.add_row(cell, title, _shown(figures, key), *row)
    print_table(table)


def _ratio(own: float | None, other: float | None, key: str) -> str:
    if key == "cached_tokens" or not own or not other:
        return "-"
    return f"{(own / other if key in LOWER_IS_BETTER else other / own):.2f}"
