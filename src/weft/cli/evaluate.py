"""``weft eval recall``: how well a server's answers come from its memory, as a table by length.

The scorer (``weft.eval.score``) talks HTTP only, so the same command scores a running server (``--url``),
or starts one on a model and scores that. Wrong memory shows as a wrong answer: this is the test that a
user can run on their own machine.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import click
import httpx

from weft.cli.flags import FlagCommand, build
from weft.config import EngineConfig
from weft.errors import EngineUnavailableError, UserError
from weft.eval.score import LENGTHS, RecallReport, score_recall


class Tasks(click.Group):
    """A group whose help shows the first sentence of each task in full: click alone cuts it off."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        tasks = [(name, task.get_short_help_str(limit=1000)) for name, task in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(tasks)


@click.group("eval", cls=Tasks)
def command() -> None:
    """Score a model on tasks whose answers are known."""


@command.command("recall", cls=FlagCommand, configs=(EngineConfig,), params=[
    click.Option(["--url"], envvar="WEFT_URL", help="Score this server instead of starting one."),
    click.Option(["--api-key"], envvar="WEFT_API_KEY", help="Key for --url."),
    click.Option(["--length", "lengths"], type=click.IntRange(min=64), multiple=True, default=LENGTHS,
                 help="Prompt length in tokens; may be given several times.", show_default=True),
    click.Option(["--questions"], type=click.IntRange(min=1), default=200, show_default=True,
                 help="Questions per length, at least."),
    click.Option(["--concurrency"], type=click.IntRange(min=1), default=8, show_default=True,
                 help="Conversations at once."),
    click.Option(["--pass-at"], type=click.FloatRange(0, 1),
                 help="Exit with code 1 when the accuracy of any length is below this."),
    click.Option(["--json", "as_json"], is_flag=True, help="Print the result as JSON."),
])
def recall(url: str | None, api_key: str | None, lengths: tuple[int, ...], questions: int, concurrency: int,
           pass_at: float | None, as_json: bool, **values: Any) -> int:
    """Ask about lists of made-up names and numbers, and count the exact answers.

    MODEL is started for the purpose; without one, the embedded model. With --url it is the name to ask
    that server for.
    """
    task = {"lengths": lengths, "questions_per_length": questions, "concurrency": concurrency,
            "seed": values["seed"] + 1, "api_key": api_key}
    if url is not None:
        report = _score(url, values["model"], task)
    else:
        from weft.cli.own_server import own_server
        from weft.cli.waiting import waiting

        config = build(EngineConfig, values)
        with waiting("starting the engine") as on_wait, own_server(config, on_wait=on_wait) as own:
            on_wait.done()
            report = _score(own, None, task)
    click.echo(json.dumps(report.to_json(), indent=2) if as_json else report.as_table())
    low = pass_at is not None and any(row.accuracy < pass_at for row in report.rows)
    return 1 if low else 0


def _score(url: str, name: str | None, task: dict[str, Any]) -> RecallReport:
    """Run the scorer with a progress bar; what goes wrong on the way becomes one sentence."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    from weft.cli.remote import RemoteModel

    model = RemoteModel(url, model=name, api_key=task["api_key"])
    columns = ("recall", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        row = bar.add_task("recall")

        def show(answered: int, planned: int) -> None:
            bar.update(row, completed=answered, total=planned)

        try:
            return asyncio.run(score_recall(url, model.model, on_progress=show, **task))
        except (httpx.HTTPError, ExceptionGroup) as error:
            raise _one_sentence(url, error) from error
        finally:
            model.close()


def _one_sentence(url: str, error: Exception) -> Exception:
    """What a conversation that failed means for the whole score; a bug stays what it is."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, httpx.HTTPStatusError):
        return UserError(f"{url} answered {error.response.status_code}: {error.response.text[:300]}")
    if isinstance(error, httpx.HTTPError):
        return EngineUnavailableError(f"{url} stopped answering: {error}")
    return error
