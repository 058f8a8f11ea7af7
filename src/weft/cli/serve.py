"""``weft serve``: EngineConfig and ServerConfig as flags, handed to ``weft.server.launch``."""

from __future__ import annotations

from typing import Any

import click

from weft.cli.flags import FlagCommand, build
from weft.config import EngineConfig
from weft.server.config import ServerConfig


@click.command("serve", cls=FlagCommand, configs=(EngineConfig, ServerConfig))
def command(**values: Any) -> int:
    """Serve a model over an OpenAI-compatible HTTP API.

    MODEL is a checkpoint directory or a hub name; without one, the embedded model. Sizes are chosen from
    free memory, and what does not fit is shrunk and said.
    """
    from weft.server.launch import serve

    return serve(build(EngineConfig, values), build(ServerConfig, values))
