"""``weft batch IN.jsonl -o OUT.jsonl``: OpenAI's batch lines, answered without a server.

Exit codes: 0 when every line has an answer of status 200; 1 when some are errors, or the engine failed; 2 when the
input or a flag cannot work, before anything is computed; 130 after Ctrl-C. In each case the output has complete lines,
and the same command computes the missing ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from weft.cli.flags import FlagCommand, build
from weft.config import EngineConfig
from weft.server.config import ServerConfig

EXIT_LINES_FAILED, EXIT_INTERRUPTED = 1, 130
_SERVED = ("served_model_name", "chat_template", "reasoning_parser", "tool_parser")


def _served_options() -> list[click.Parameter]:
    """Return the fields of ServerConfig that shape an answer."""
    from weft.cli.flags import parameters_of

    return [param for param in parameters_of(ServerConfig) if param.name in _SERVED]


@click.command(
    "batch",
    cls=FlagCommand,
    configs=(EngineConfig,),
    positional=False,
    params=[
        click.Argument(
            ["source"], metavar="IN.jsonl", type=click.Path(path_type=Path, dir_okay=False, exists=True, readable=True)
        ),
        click.Option(
            ["-o", "--output"],
            required=True,
            metavar="OUT.jsonl",
            type=click.Path(path_type=Path, dir_okay=False),
            help="File for the answers. Lines that it has already are not computed again.",
        ),
        *_served_options(),
    ],
)
def command(source: Path, output: Path, **values: Any) -> int:
    """Answer the requests in IN.jsonl, one JSON line each, without a server.

    A line has custom_id, method POST, url (/v1/chat/completions, /v1/completions,
    /v1/responses, /v1/embeddings, /v1/rerank or /v1/score) and the
    body of that endpoint. Requests that begin alike are computed together.
    """
    served: dict[str, Any] = {name: values[name] for name in _SERVED}
    served |= {"response_store": "off", "file_store": "off", "name_store": "off"}
    from weft.api.calls import AnswerBar
    from weft.cli.remote import waiting
    from weft.server.batches.answering import BatchCounts, RunInterruptedError, run_file

    with waiting("reading the input") as status:
        bars: list[AnswerBar] = []

        def on_answer(counts: BatchCounts) -> None:
            if not bars:
                status.done()
                bars.append(AnswerBar(counts.total))
            if bars[0].due:
                bars[0].show(counts.earlier + counts.done, counts.tokens)

        try:
            counts = run_file(
                source,
                output,
                build(EngineConfig, values),
                ServerConfig(**served),
                on_progress=status.say,
                on_answer=on_answer,
            )
        except RunInterruptedError as error:
            counts = error.counts
            click.echo(
                f"interrupted: {counts.earlier + counts.done} of {counts.total} answers are in "
                f"{output}; the same command continues",
                err=True,
            )
            return EXIT_INTERRUPTED
        finally:
            for bar in bars:
                bar.close()
    click.echo(said(counts, output), err=True)
    return EXIT_LINES_FAILED if counts.failed else 0


def said(counts: Any, output: Path) -> str:
    """Return the last line of a run."""
    parts = [f"{counts.total} answers in {output}"]
    if counts.done:
        parts.append(f"{counts.done} in {counts.seconds:.1f} s")
    if counts.earlier:
        parts.append(f"{counts.earlier} of them from an earlier run")
    if counts.failed:
        parts.append(f"{counts.failed} are errors (status_code is not 200)")
    return "; ".join(parts)
