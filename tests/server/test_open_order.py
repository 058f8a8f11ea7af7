"""A server with several HTTP processes is healthy only once each of them answers requests."""

from __future__ import annotations

import asyncio
import io
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from weft.server import launch, served_model
from weft.server.config import ServerConfig
from weft.server.workers import process


async def opened_in_order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    order: list[str] = []
    workers_open, info_known = asyncio.Event(), asyncio.Event()

    async def workers_opened() -> None:
        info_known.set()
        await workers_open.wait()
        order.append("workers")

    async def ready() -> str:
        return "info"

    async def looked() -> None:
        order.append("look")

    workers = SimpleNamespace(info=None, opened=workers_opened)
    service: Any = SimpleNamespace(
        workers=workers, background=[], open=lambda model: order.append("service"), models=SimpleNamespace(look=looked)
    )
    fleet: Any = SimpleNamespace(ready=ready)
    model = SimpleNamespace(renderer=SimpleNamespace(template=None))
    monkeypatch.setattr(served_model, "load_served_model", lambda *arguments: model)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = launch.Serving(ServerConfig(), lambda: service, listener, Console(file=io.StringIO()), fleet=fleet)
        opening = asyncio.create_task(serving._open(service))
        await asyncio.wait_for(info_known.wait(), 30)
        assert (workers.info, order) == ("info", []), "workers know the model; /health does not say ok yet"
        workers_open.set()
        await opening
    return order


async def test_the_supervisor_opens_after_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await opened_in_order(monkeypatch) == ["workers", "service", "look"]


@pytest.mark.parametrize(
    ("is_replacement", "wanted"), [(True, ["open", "listen", "serves"]), (False, ["open", "serves"])]
)
async def test_a_worker_that_follows_a_dead_one_takes_connections_once_it_can_answer(
    monkeypatch: pytest.MonkeyPatch, is_replacement: bool, wanted: list[str]
) -> None:
    """The first ones listen before, and say that the server starts."""
    order: list[str] = []
    said = asyncio.Event()

    async def ready() -> str:
        return "info"

    async def listen() -> None:
        order.append("listen")

    def say(message: process.Attached) -> None:
        assert message.serves
        order.append("serves")
        said.set()

    monkeypatch.setattr(process, "load_served_model", lambda info, config: "open")
    answering = asyncio.create_task(
        process.answer_for_ever(
            SimpleNamespace(open=order.append, config=None),
            SimpleNamespace(ready=ready),  # type: ignore[arg-type]
            SimpleNamespace(say=say),
            SimpleNamespace(is_replacement=is_replacement),
            listen,
        )
    )  # type: ignore[arg-type]
    await said.wait()
    answering.cancel()
    assert order == wanted
