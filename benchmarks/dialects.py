"""What a dialect costs the HTTP process, besides the engine and the socket.

    python -m benchmarks.dialects [--requests 20] [--tokens 256] [--rounds 30] [--json FILE]

The whole application runs in this process: routes, bodies, template, tokenizer, answers and the store of
responses. The engine is replaced by one that has a token ready at each turn of the event loop. All dialects get
prompts of about the same length, in turns, and the table has the least of all rounds: other work on the machine
only adds.

    wall      microseconds of a request with an answer of one token, whose text is new
    request   of these, the time of this process on a CPU, all threads; the template has a process of its own
    again     the same for a text whose tokens are known from an earlier request
    token     CPU microseconds of a streamed token: (a stream of N tokens - a stream of 1) / (N - 1)

Completions have no template. ``over completions`` is therefore the price of a conversation plus the
dialect's, and ``over chat`` the dialect's alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.serve.checkpoints import save_tokenizer
from weft.config import Sizes
from weft.fleet.live_request import RequestStream
from weft.info import ModelInfo
from weft.request import Request, TokenEvent
from weft.server.app import build_app
from weft.server.config import ServerConfig
from weft.server.connection import WRITE_PART
from weft.server.models import Models, PinnedModel
from weft.server.served_model import load_served_model
from weft.server.service import Service

VOCAB_SIZE = 2000
TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}\n{{ message.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
TEXT = "What turns the mill by the river, and which key is red? " * 8
TOKEN = 300
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/responses stored")


class ReadyEngine:
    """What the server asks of its engines; it is its own table of requests."""

    weight_version = ""
    death = None

    def __init__(self) -> None:
        self.requests = self
        self.engines = self
        self.on_step_tokens: Callable[[list[int]], None] = lambda sizes: None

    def check_alive(self) -> None:
        """It always is."""

    async def submit(self, requests: list[Request]) -> RequestStream:
        """Return a stream that gets a token at each turn of the event loop."""
        await asyncio.sleep(0)
        [request], loop = requests, asyncio.get_running_loop()
        stream = RequestStream([request.request_id])

        def step(left: int) -> None:
            event = TokenEvent(
                request_id=request.request_id, index=0, tokens=[TOKEN], finish_reason=None if left else "length"
            )
            stream.put(event)
            stream.deliver()
            if left:
                loop.call_soon(step, left - 1)

        loop.call_soon(step, (request.sampling.max_tokens or 1) - 1)
        return stream

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """Everything has finished."""

    def close(self, stream: RequestStream) -> None:
        """Nothing is held."""

    async def cache_shapes(self) -> list[Any]:
        return []


def body_of(path: str, tokens: int, text: str = TEXT, *, stream: bool) -> dict[str, Any]:
    shared: dict[str, Any] = {"model": "m", "temperature": 0, "ignore_eos": True, "stream": stream}
    match path:
        case "/v1/completions":
            return {**shared, "prompt": text, "max_tokens": tokens}
        case "/v1/responses" | "/v1/responses stored":
            return {**shared, "input": text, "max_output_tokens": tokens, "store": path.endswith("stored")}
        case _:
            return {**shared, "messages": [{"role": "user", "content": text}], "max_tokens": tokens}


async def ask(app: Any, path: str, raw: bytes) -> None:
    sent: list[bytes] = []
    status = 0

    def write(part: bytes) -> bool:
        sent.append(part)
        return True

    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": path.partition(" ")[0],
        "raw_path": b"",
        "query_string": b"",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(raw)).encode()),
        ],
        "http_version": "1.1",
        "scheme": "http",
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
        "root_path": "",
        "state": {WRITE_PART: write},
    }
    parts = [{"type": "http.request", "body": raw, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not parts:
            await asyncio.Event().wait()  # the client stays
        return parts.pop()

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)
        sent.append(message.get("body", b""))

    await app(scope, receive, send)
    assert status == 200, (path, b"".join(sent))


async def timed(app: Any, path: str, texts: Sequence[str], tokens: int, *, stream: bool) -> tuple[float, float]:
    """(wall, CPU) seconds of one request; each has a text of its own."""
    bodies = [json.dumps(body_of(path, tokens, text, stream=stream)).encode() for text in texts]
    count = len(bodies)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    for raw in bodies:
        await ask(app, path, raw)
    return (time.perf_counter() - wall_s) / count, (time.process_time() - cpu_s) / count


def ready_service(directory: Path) -> Service:
    """Return an open service whose engine is a ``ReadyEngine``. ``directory``: gets a tokenizer and a template."""
    save_tokenizer(directory, VOCAB_SIZE)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    engine: Any = ReadyEngine()
    config = ServerConfig(response_store=str(directory / "responses.sqlite"))
    service = Service(config, Models([PinnedModel(engine)]))
    sizes = Sizes(max_model_len=4096, rows_max=64, step_tokens_max=2048, queue_max=1024, memory_bytes=1 << 30)
    info = ModelInfo(
        name="m",
        directory=str(directory),
        family="",
        layers="",
        vocab_size=VOCAB_SIZE,
        dtype="float32",
        weights_bytes=0,
        load_s=0.0,
        device="cpu",
        threads=1,
        kernels="",
        sizes=sizes,
        memory=[],
        notes=[],
        eos_ids=[2],
        generation_defaults={},
    )
    service.open(load_served_model(info, config))
    return service


async def measure(directory: Path, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    service = ready_service(directory)
    app = build_app(service)
    rounds: dict[str, list[dict[str, float]]] = {path: [] for path in PATHS}
    for number in range(args.rounds + 1):
        for path in PATHS:
            new = [f"{number} {request} {path} {TEXT}" for request in range(args.requests)]
            wall_s, cpu_s = await timed(app, path, new, 1, stream=False)
            _, again_s = await timed(app, path, new, 1, stream=False)
            many_s, one_s = [(await timed(app, path, new[:2], tokens, stream=True))[1] for tokens in (args.tokens, 1)]
            if number:  # the first round warms up
                seconds = {"request": cpu_s, "again": again_s, "wall": wall_s, "many": many_s, "one": one_s}
                rounds[path].append({name: count * 1e6 for name, count in seconds.items()})
    await service.close()
    return {path: least(results, args.tokens) for path, results in rounds.items()}


def least(rounds: Sequence[dict[str, float]], tokens: int) -> dict[str, float]:
    """Return the least of ``rounds`` by name. ``many`` and ``one``, times of streams with ``tokens`` tokens and with
    one, become ``token``: the least of their differences would be that of the worst ``one``."""
    row = {name: min(times[name] for times in rounds) for name in rounds[0]}
    token = (row.pop("many") - row.pop("one")) / (tokens - 1)
    return row | {"token": token}


def show(table: dict[str, dict[str, float]]) -> None:
    base, chat = table["/v1/completions"], table["/v1/chat/completions"]
    print(f"{'':24}{'wall':>8}{'request':>9}{'again':>7}{'token':>7}{'over completions':>20}{'over chat':>20}")
    for path, row in table.items():
        over = "".join(
            f"{row['request'] - other['request']:+12.0f}{row['token'] - other['token']:+8.1f}" for other in (base, chat)
        )
        print(f"{path:24}{row['wall']:8.0f}{row['request']:9.0f}{row['again']:7.0f}{row['token']:7.1f}{over}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Microseconds that each dialect costs the HTTP process.")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    # The loop is that of a server.
    with tempfile.TemporaryDirectory() as name, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        table = runner.run(measure(Path(name), args))
    show(table)
    if args.json is not None:
        args.json.write_text(json.dumps(table, indent=2))


if __name__ == "__main__":
    main()
