"""``weft generate``: stream the completion of one prompt, without a server.

Only the answer goes to stdout, so that it can be piped on; progress goes to stderr.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from weft.cli.flags import FlagCommand, build, given_sampling, sampling_parameters
from weft.config import EngineConfig
from weft.default_sampling import OLLAMA_SAMPLING
from weft.errors import RequestError

if TYPE_CHECKING:
    from weft.api import Engine


@click.command(
    "generate",
    cls=FlagCommand,
    configs=(EngineConfig,),
    positional=False,
    params=[
        click.Argument(["prompt"], required=False),
        click.Option(["--chat"], is_flag=True, help="Ask PROMPT through the model's chat template."),
        *sampling_parameters(),
    ],
)
def command(prompt: str | None, chat: bool, **values: Any) -> None:
    """Complete PROMPT and stream the text.

    Without PROMPT, or with "-", the prompt is read from stdin: `cat story.txt | weft generate`. The last line end does
    not belong to the prompt. With --lora the first adapter answers.
    """
    fields = given_sampling(values)
    text = read_prompt(prompt)
    from weft.api.completion import ChatPiece

    engine, fields["lora"] = local_engine(values)
    fields = {**OLLAMA_SAMPLING, **engine.info.default_sampling, **fields}
    with engine:
        stream = (
            engine.stream_chat([{"role": "user", "content": text}], **fields) if chat else engine.stream(text, **fields)
        )
        for piece in stream:
            if isinstance(piece, ChatPiece):
                click.echo(piece.reasoning, nl=False)
            click.echo(piece.text, nl=False)
    click.echo()


def local_engine(values: dict[str, Any]) -> tuple[Engine, str | None]:
    """Return an engine in this process, built from the flags ``values``, and the adapter that answers."""
    from weft.api import Engine
    from weft.cli.chat import first_adapter
    from weft.cli.remote import waiting

    with waiting("loading") as status:
        config = build(EngineConfig, values)
        return Engine(**asdict(config), on_progress=status.say), first_adapter(config)


def read_prompt(argument: str | None) -> str:
    """Return the prompt from the argument, or from a pipe without its last line end, which `echo` and editors add.
    Raise RequestError if there is neither."""
    if argument is not None and argument != "-":
        return argument
    if argument is None and sys.stdin.isatty():
        raise RequestError('there is no prompt: type weft generate "Once upon a time", or pipe one in', param="prompt")
    text = sys.stdin.read()
    if not text.strip():
        raise RequestError("the prompt from stdin is empty", param="prompt")
    return text.removesuffix("\n")
