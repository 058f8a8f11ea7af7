"""``weft eval``: tasks whose answers are known, as tables.

    recall    questions about lists of names and numbers, by length of the prompt
    tools     tool calls and answers from their results
    json      structured output over facts in the conversation

The scorers (``weft_tools.eval.score``) talk HTTP only, so the same command scores a running server (``--url``), or
starts one on a model and scores that. Faults of memory show as wrong answers, so users can test their own machine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import click
import httpx

from weft.cli.flags import COUNT_MAX, PORTS_MAX, Count, FlagCommand, Number, build
from weft.cli.main import CommandGroup, progress_bar
from weft.config import EngineConfig
from weft.errors import EngineUnavailableError, UserError
from weft.units import TOKENS_MAX
from weft_tools.eval.score import LENGTHS, SKILL_LENGTHS, RecallReport, SkillReport, score_recall, score_skill

Report = RecallReport | SkillReport


@click.group("eval", cls=CommandGroup)
def command() -> None:
    """Score a model on tasks whose answers are known."""


def _options(lengths: tuple[int, ...], questions: int) -> list[click.Parameter]:
    return [
        click.Option(["--url"], envvar="WEFT_URL", help="Score this server instead of starting one."),
        click.Option(["--api-key"], envvar="WEFT_API_KEY", help="Key for --url."),
        click.Option(
            ["--length", "lengths"],
            type=Count(64, TOKENS_MAX),
            multiple=True,
            default=lengths,
            help="Prompt length in tokens; may be given several times.",
            show_default=True,
        ),
        click.Option(
            ["--questions"],
            type=Count(1, COUNT_MAX),
            default=questions,
            show_default=True,
            help="Questions per length, at least.",
        ),
        click.Option(
            ["--concurrency"], type=Count(1, PORTS_MAX), default=8, show_default=True, help="Conversations at once."
        ),
        click.Option(
            ["--pass-at"], type=Number(0, 1), help="Exit with code 1 when the accuracy of any row is below this."
        ),
        click.Option(["--json", "as_json"], is_flag=True, help="Print the result as JSON."),
    ]


def _skill_options() -> list[click.Parameter]:
    return [
        *_options(SKILL_LENGTHS, 100),
        click.Option(
            ["--controls"],
            is_flag=True,
            help="Ask again with the tools or facts of another conversation: these answers must be wrong.",
        ),
    ]


@command.command("recall", cls=FlagCommand, configs=(EngineConfig,), params=_options(LENGTHS, 200))
def recall(**values: Any) -> int:
    """Ask about lists of made-up names and numbers, and count the exact answers. A server of MODEL is started; without
    MODEL, of the embedded model. With --url MODEL is a name on that server.
    """
    return _run("recall", score_recall, values)


@command.command("tools", cls=FlagCommand, configs=(EngineConfig,), params=_skill_options())
def tools(controls: bool, **values: Any) -> int:
    """Ask for tool calls, and for answers from their results, and count the right ones.

    A call is right when its name and its arguments are. MODEL is started for the purpose; without one, the
    embedded model. With --url it is the name to ask that server for.
    """
    return _run("tools", partial(score_skill, skill="tools", controls=controls), values)


@command.command("json", cls=FlagCommand, configs=(EngineConfig,), params=_skill_options())
def json_command(controls: bool, **values: Any) -> int:
    """Ask for JSON over facts in the conversation, under a schema, and count the right values.

    MODEL is started for the purpose; without one, the embedded model. With --url it is the name to ask
    that server for.
    """
    return _run("json", partial(score_skill, skill="json", controls=controls), values)


def _run(name: str, scorer: Callable[..., Awaitable[Report]], values: dict[str, Any]) -> int:
    """Score a running server, or a server that is started for this. Return the exit code: 1 if the accuracy is too
    low."""
    flags = {key: values.pop(key) for key in ("url", "pass_at", "as_json")}
    task = {
        "lengths": values.pop("lengths"),
        "questions_per_length": values.pop("questions"),
        "concurrency": values.pop("concurrency"),
        "api_key": values.pop("api_key"),
        "seed": values["seed"] + 1,
    }
    if flags["url"] is not None:
        report = _score(name, scorer, flags["url"], values["model"], task)
    else:
        from weft.cli.remote import own_server, waiting

        config = build(EngineConfig, values)
        with waiting("starting the engine") as on_wait, own_server(config, on_wait=on_wait) as own:
            on_wait.done()
            report = _score(name, scorer, own, None, task)
    click.echo(json.dumps(report.to_json(), indent=2) if flags["as_json"] else report.as_table())
    pass_at = flags["pass_at"]
    return 1 if pass_at is not None and any(row.accuracy < pass_at for row in report.rows) else 0


def _score(
    name: str, scorer: Callable[..., Awaitable[Report]], url: str, model_name: str | None, task: dict[str, Any]
) -> Report:
    """Run the scorer with a progress bar. Raise errors as one sentence."""
    from weft.cli.remote import RemoteModel

    model = RemoteModel(url, model=model_name, api_key=task["api_key"])

    async def score() -> Report:
        with progress_bar(name) as show:
            return await scorer(url, model.model, on_progress=show, **task)

    try:
        return asyncio.run(score())
    except (httpx.HTTPError, ExceptionGroup) as error:
        raise _one_sentence(url, error) from error
    finally:
        model.close()


def _one_sentence(url: str, error: Exception) -> Exception:
    """Return a failed conversation's error as the error of the score; return a bug unchanged."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, httpx.HTTPStatusError):
        return UserError(f"{url} answered {error.response.status_code}: {error.response.text[:300]}")
    if isinstance(error, httpx.HTTPError):
        return EngineUnavailableError(f"{url} stopped answering: {error}")
    return error
