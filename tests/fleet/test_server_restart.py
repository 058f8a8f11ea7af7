"""A server dies under load and starts again: the machine that joined it comes back with its engine."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fleet.test_join import (
    TOKENS,
    both_ready,
    engine_of,
    free_port,
    joining,
    sung,
    sung_at_length,
    until_it_computes,
)
from tests.server.running import RunningServer, eventually, running_server

LOST_TOKENS = 1800
"""Length of each answer that the death of a server cuts: half of them would be the joined engine's."""


async def lost(server: RunningServer) -> None:
    """Requests that are under way when the server is killed."""
    singing = asyncio.create_task(sung_at_length(server, 4, max_tokens=LOST_TOKENS))
    await until_it_computes(server)
    server.process.kill()
    with pytest.raises(openai.APIConnectionError):
        await singing


def test_a_machine_outlives_its_server(model_directory: Path, tmp_path: Path) -> None:
    token, port = tmp_path / "token", free_port()
    settings: dict[str, Any] = {
        "replicas": "1",
        "token": str(token),
        "router": "least-loaded",
        "listen_engines": f"127.0.0.1:{port}",
    }
    with contextlib.ExitStack() as stack:
        model = {"model": str(model_directory)}
        first, second = (running_server("build_paced", engine=model, server=settings) for _ in range(2))
        server = stack.enter_context(first)
        machine = stack.enter_context(joining(port, token))
        assert both_ready(server)
        undisturbed, engine = asyncio.run(sung(server, 4)), engine_of(machine)
        asyncio.run(lost(server))
        server = stack.enter_context(second)
        assert both_ready(server)
        assert engine_of(machine) == engine, "the engine outlives the server, with its cache"
        assert asyncio.run(sung(server, 4)) == undisturbed
        assert eventually(lambda: server.running() == 0)
        cut = server.metric("generation_tokens_total") - 2 * TOKENS - 4 * TOKENS
        assert cut < 2 * LOST_TOKENS, "nothing of the first server computes on"
