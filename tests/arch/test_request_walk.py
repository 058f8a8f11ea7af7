"""The path of one chat request through the code, from the socket to ``EngineCore.submit``.

A profile records the calls: in a real server in this process, up to the socket of its engine process, and then in the
loop of an engine. Between ``prepare_turn`` and the job of the answer, the test counts *returns*: calls into a module
that the request has left before. Their bound may only fall. Modules are not counted, so a stage may have its own file.

The same profile finds the names of the request: classes of weft with fields that hold its prompt, as text or as
tokens.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import numpy as np
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
from weft.server.listening import bind
from weft.server.models import Models, PinnedModel
from weft.server.served_model import load_served_model
from weft.server.service import Service
from weft.text.tokenizer import Tokenizer

RETURNS_MAX = 4
"""Returns to ``text.renderer`` after the template, ``server.truncation`` once the prompt is known,
``server.generation`` after ``Request.check``, and ``text.dialect`` for the readers of the answer."""
FIRST, LAST = "prepare_turn", "ChatJob.__init__"
WALKS = 3
NOT_OF_THE_REQUEST = {"weft.rpc.heartbeat", "weft.rpc.loop_socket"}
"""A heartbeat of the engine may arrive at the same time."""
NAMES = [
    "ChatBody",
    "ConversationFields",
    "ChatRequest",
    "ChatPrompt",
    "Prompt",
    "Request",
    "RoutedRequest",
    "Sequence",
]
"""Names of the request on its way to the scheduler. A class that only holds one of them, such as ``Submit``, does not
count. RoutedRequest is the request for a router, in service and in simulations."""
ITEMS = {"ChatMessage"}
"""Classes of an element of a conversation."""
TEXT = "a prompt that is found again"


def holds_prompt(value: Any, tokens: list[int]) -> bool:
    """Return whether ``value``, of a class of weft, has a field that holds TEXT or ``tokens``, or items that do."""
    if not type(value).__module__.startswith("weft."):
        return False
    for field in fields_of(value):
        items = [item for item in field if type(item).__name__ in ITEMS] if isinstance(field, list) else []
        if holds(field, tokens) or any(holds_prompt(item, tokens) for item in items):
            return True
    return False


def fields_of(value: Any) -> list[Any]:
    names: Iterable[str] = getattr(value, "__struct_fields__", None) or getattr(type(value), "__slots__", ())
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    return [getattr(value, name, None) for name in names]


def holds(field: Any, tokens: list[int]) -> bool:
    if isinstance(field, str):
        return TEXT in field
    if isinstance(field, np.ndarray):
        field = field.tolist()
    return isinstance(field, list | tuple) and any(
        list(field[at : at + len(tokens)]) == tokens for at in range(len(field) - len(tokens) + 1)
    )


class Walk:
    """Modules of weft that are entered while it records, in order, and the names of the request there."""

    def __init__(self, first: str, last: str, tokens: list[int]) -> None:
        self.modules: list[str] = []
        self.names: dict[str, None] = {}
        self.stays: list[str] = []
        """Modules between FIRST and LAST in the order of the calls, each as often as it was entered."""
        self._tokens = tokens
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
        if (name == FIRST or self.stays) and LAST not in self.stays and not name.endswith(">"):  # no comprehension
            self.stays += [module] if self.stays[-1:] != [module] else []
            self.stays += [LAST] if name == LAST else []
        self.names |= {
            type(value).__name__: None for value in list(frame.f_locals.values()) if holds_prompt(value, self._tokens)
        }
        if name == self._last:
            self._state = "after"


async def walked_in_the_server(directory: Path, tokens: list[int]) -> tuple[list[str], list[str], list[str]]:
    walks = [Walk("BoundedProtocol.data_received", f"{EngineLink.__name__}.send", tokens) for _ in range(WALKS)]
    config = ServerConfig(port=0, file_store="off", response_store=None)
    fleet = Fleet(EngineConfig(model=str(directory)), factory="tests.server.scripted_engine:build")
    service = Service(config, Models([PinnedModel(fleet)]))
    http, listener = http_server(service), bind(config)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    await fleet.start()
    try:
        service.open(load_served_model(await fleet.ready(), config))
        await ask(walks, listener.getsockname()[1])
    finally:  # the socket of an engine that is not ended keeps this process alive
        await fleet.stop("the test is over")
        http.should_exit = True
        await serving
        await service.close()
    # A timer of the server that fires during one recording does not belong to the request.
    modules = [module for module in walks[0].modules if all(module in walk.modules for walk in walks)]
    return modules, list(walks[0].names), min((walk.stays for walk in walks), key=len)


async def ask(walks: list[Walk], port: int) -> None:
    body = {"model": "default", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 4}
    async with httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        assert (await client.post(url, json=body)).status_code == 200, "imports are no part of it"
        for walk in walks:
            sys.setprofile(walk)
            try:
                assert (await client.post(url, json=body)).status_code == 200
            finally:
                sys.setprofile(None)


def walked_in_the_engine(directory: Path, last: str, tokens: list[int]) -> Walk:
    walk = Walk("EngineLoop._obey", last, tokens)
    core = build(EngineConfig(model=str(directory)), on_progress=lambda text: None).core
    request = Request(request_id="r", prompt_tokens=tokens, sampling=SamplingParams())
    with zmq.Context() as context, context.socket(zmq.PULL) as commands, context.socket(zmq.PUSH) as events:
        loop = EngineLoop(core, commands, events)
        sys.setprofile(walk)
        try:
            loop._obey(Submit(0, request))
        finally:
            sys.setprofile(None)
    return walk


def test_a_request_goes_through_its_stages_in_order_and_has_few_names(tmp_path: Path) -> None:
    directory = write_model_directory(tmp_path)
    tokens = Tokenizer.load(directory).encode(TEXT, add_special_tokens=False)
    in_server, names, stays = asyncio.run(walked_in_the_server(directory, tokens))
    in_engine = walked_in_the_engine(directory, "EngineCore.submit", tokens)
    walk = list(dict.fromkeys(in_server + in_engine.modules))
    named = {
        "weft.server.connection",
        "weft.server.chat",
        "weft.text.chat_request",
        "weft.server.chat_turn",
        "weft.text.renderer",
        "weft.server.generation",
        "weft.fleet.placement",
        "weft.rpc.client",
        "weft.rpc.engine_process",
        "weft.engine.engine",
    }
    assert named <= set(walk), "the walk that docs/architecture.md names"
    assert len(in_server) > 10, "the walk begins and ends where its names say"
    assert stays[-1] == LAST
    returns = len(stays) - len(set(stays))
    assert returns <= RETURNS_MAX, f"{returns} returns:\n" + "\n".join(stays)
    behind = walked_in_the_engine(directory, "Scheduler.submit", tokens).names
    assert {*names, *behind} - ITEMS == set(NAMES)
