"""``weft serve``: EngineConfig and ServerConfig as flags, handed to ``weft.server.launch``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from weft.cli.flags import FlagCommand, build
from weft.config import EngineConfig
from weft.server.config import ServerConfig


@click.command(
    "serve",
    cls=FlagCommand,
    configs=(EngineConfig, ServerConfig),
    positional=False,
    params=[click.Argument(["models"], nargs=-1, metavar="[MODEL]...")],
)
def command(models: tuple[str, ...], **values: Any) -> int:
    """Serve one or several models over an OpenAI-compatible HTTP API.

    MODEL is a checkpoint directory, a GGUF file or a hub name, or NAME=MODEL; without it, the embedded model. Sizes are
    chosen from free memory; a size that does not fit is shrunk, with a note. Several models are loaded when requests
    name them, and --memory is of all of them together.
    """
    from weft.server.launch import serve

    engine, server = build(EngineConfig, values), build(ServerConfig, values)
    if len(models) > 1:
        if _is_typed("model"):
            raise click.UsageError(f"--model {engine.model} is one more model than the {len(models)} named")
        return serve(engine, server, models)
    if models:
        engine, server = one_model(models[0], engine, server)
    return serve(engine, server)


def one_model(text: str, engine: EngineConfig, server: ServerConfig) -> tuple[EngineConfig, ServerConfig]:
    """Read NAME=MODEL as --served-model-name NAME."""
    if _is_typed("model") and engine.model != text:
        raise click.UsageError(f"two values for model: {text} and --model {engine.model}")
    if "=" not in text or Path(text).expanduser().exists():
        return replace(engine, model=text), server
    from weft.server.sources import named_model

    name, path = named_model(text)
    return replace(engine, model=path), replace(server, served_model_name=server.served_model_name or (name,))


def _is_typed(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE
