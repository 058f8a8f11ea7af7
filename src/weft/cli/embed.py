"""``weft embed``: the embeddings of texts, one JSON list per line, without a server."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from weft.cli.flags import Count, FlagCommand
from weft.cli.generate import local_engine
from weft.config import EngineConfig
from weft.errors import RequestError


@click.command(
    "embed",
    cls=FlagCommand,
    configs=(EngineConfig,),
    positional=False,
    params=[
        click.Argument(["texts"], nargs=-1),
        click.Option(["--prompt-name"], help="Name of a prompt of the checkpoint that comes before each text."),
        click.Option(
            ["--dimensions"],
            type=Count(1, 1 << 20),
            help="Keep only the first dimensions of each embedding, normalised again.",
        ),
        click.Option(["--query"], help="Rank TEXTS by their relevance to this query, with a reranker."),
    ],
)
def command(
    texts: tuple[str, ...], prompt_name: str | None, dimensions: int | None, query: str | None, **values: Any
) -> None:
    """Print the embedding of each of TEXTS as a line of JSON.

    Without TEXTS each line of stdin is a text. With --query, a line is [score, text], the best first. With --lora the
    first adapter computes them.
    """
    listed = list(texts) or ([] if sys.stdin.isatty() else sys.stdin.read().splitlines())
    if not listed:
        raise RequestError('there is nothing to embed: type weft embed "a text", or pipe lines in', param="texts")
    engine, lora = local_engine(values)
    with engine:
        if query is not None:
            for ranked in engine.rerank(query, listed, lora=lora):
                click.echo(json.dumps([ranked.score, listed[ranked.index]], ensure_ascii=False))
            return
        for vector in engine.embed(listed, prompt_name=prompt_name, dimensions=dimensions, lora=lora):
            click.echo(json.dumps(vector.tolist()))
