"""The road of one chat request, from the socket to ``EngineCore.submit``: the modules of weft that it enters.

A profile of the calls counts them: in a real server in this process, up to the socket of its engine process,
and then in the loop of an engine. The bound is what there is. It may only fall.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import zmq

from tests.server.scripted_engine import build, write_model_directory
from weft.config import EngineConfig
from weft.fleet.fleet import Fleet
from weft.request import Request, SamplingParams
from weft.rpc.client import EngineLink
from weft.rpc.engine_process import EngineLoop
from weft.rpc.messages import Submit
from weft.server.config import ServerConfig
from weft.server.http import http_server
from weft.server.launch import bind
from weft.server.service import Service, load_served_model

MODULES_MAX = 25
WALKS = 3
NOT_OF_THE_REQUEST = {"weft.rpc.heartbeat", "weft.rpc.loop_socket"}
"""A beat of the engine may arrive in the same moment."""


class Walk:
    """Modules of weft that are entered while it records, in order."""

    def __init__(self, first: str, last: str) -> None:
        self.modules: list[str] = []
        self._first, self._last = first, last
        self._state = "before"

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or self._state == "after":
            return
        module, name = str(frame.f_globals.get("__name__", "")), frame.f_code.co_qualname
        if name == self._first:
            self._state = "on the way"
        if self._state != "on the way" or not module.startswith("weft."):
            return
        if module not in self.modules and module not in NOT_OF_THE_REQUEST:
            self.modules.append(module)
        if name == self._last:
            self._state = "after"


async def walked_in_the_server(directory: Path) -> list[str]:
    walks = [Walk("BoundedProtocol.data_received", f"{EngineLink.__name__}.send_raw") for _ in range(WALKS)]
    config = ServerConfig(port=0, file_store="off", response_store=None)
    fleet = Fleet(EngineConfig(model=str(directory)), factory="tests.server.scripted_engine:build")
    service = Service(config, fleet)
    http, listener = http_server(service), bind(config)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    await fleet.start()
    try:
        service.open(load_served_model(await fleet.ready(), config))
        await ask(walks, listener.getsockname()[1])
    finally:   # the socket of an engine that is not ended keeps this process alive
        await fleet.stop("the test is over")
        http.should_exit = True
        await serving
        await service.close()
    # A timer of the server that fires in the middle of one walk is no part of the request.
    return [module for module in walks[0].modules if all(module in walk.modules for walk in walks)]


async def ask(walks: list[Walk], port: int) -> None:
    body = {"model": "default", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    async with httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        assert (await client.post(url, json=body)).status_code == 200, "imports are no part of it"
        for walk in walks:
            sys.setprofile(walk)
            try:
                assert (await client.post(url, json=body)).status_code == 200
            finally:
                sys.setprofile(None)


def walked_in_the_engine(directory: Path) -> list[str]:
    walk = Walk("EngineLoop._obey", "EngineCore.submit")
    core = build(EngineConfig(model=str(directory)), on_progress=lambda text: None).core
    request = Request(request_id="r", prompt_tokens=[104, 105], sampling=SamplingParams())
    with zmq.Context() as context, context.socket(zmq.PULL) as commands, context.socket(zmq.PUSH) as events:
        loop = EngineLoop(core, commands, events)
        sys.setprofile(walk)
        try:
            loop._obey(Submit(0, request))
        finally:
            sys.setprofile(None)
    return walk.modules


def test_a_request_crosses_few_modules_to_the_engine(tmp_path: Path) -> None:
    directory = write_model_directory(tmp_path)
    in_server = asyncio.run(walked_in_the_server(directory))
    in_engine = walked_in_the_engine(directory)
    walk = list(dict.fromkeys(in_server + in_engine))
    named = {"weft.server.connection", "weft.server.chat", "weft.text.chat_request", "weft.server.generation",
             "weft.fleet.placement", "weft.rpc.client", "weft.rpc.engine_process", "weft.engine.engine"}
    assert named <= set(walk), "the walk that docs/architecture.md names"
    assert len(in_server) > 10, "the walk begins and ends where its names say"
    assert len(walk) <= MODULES_MAX, f"{len(walk)} modules:\n" + "\n".join(walk)
