"""Memory of one request: a body of N bytes costs the server's processes at most K x N and a constant.

    VmHWM of the HTTP process, its engine and its workers, from the request on
      - VmRSS of the same before it                                   <=  K x N + C

A small body of the kind is sent before: what is imported late does not count. Most kinds take 3 to 15 times their
bytes; a body of many small messages takes 43 times as many, for objects.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.running import RunningServer

SERVER = {"tokenize_memory": "128MiB"}
SIZE = int(os.environ.get("HOSTILE_MIB", "2")) << 20
"""``make hostile`` has more."""
K, C = 48, 64 << 20
TEXT = "the cat sat on the mat, "


def chat(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "a", "max_tokens": 1, **fields}


def repeated(item: Any, size: int) -> list[Any]:
    return [item] * (size // (len(json.dumps(item)) + 2))


KINDS: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "words": ("/v1/completions", lambda size: completion(prompt=TEXT * (size // len(TEXT)))),
    "letters": ("/v1/completions", lambda size: completion(prompt="a" * size)),
    "spaces": ("/tokenize", lambda size: {"prompt": " " * size}),
    "truncated": ("/v1/completions", lambda size: completion(prompt="a" * size, truncate_prompt_tokens=5)),
    "chat": ("/v1/chat/completions", lambda size: chat(TEXT * (size // len(TEXT)))),
    "chat of letters": ("/tokenize", lambda size: chat("a" * size)),
    "control tokens": ("/tokenize", lambda size: chat("<|end|>" * 100_000 + "a" * (size - 700_000))),
    "messages": (
        "/v1/chat/completions",
        lambda size: {"messages": repeated({"role": "user", "content": "say:x"}, size), "max_tokens": 1},
    ),
    "tools": (
        "/v1/chat/completions",
        lambda size: chat(
            "say:x", tools=repeated({"type": "function", "function": {"name": "f", "description": "d" * 200}}, size)
        ),
    ),
    "ids": ("/v1/completions", lambda size: completion(prompt=repeated(1, size)[:900_000])),
    "values": ("/v1/completions", lambda size: completion(metadata=repeated({"a": "b" * 20}, size)[:300_000])),
    "inputs": ("/v1/embeddings", lambda size: {"input": repeated("a" * 400, size)}),
    "documents": ("/v1/rerank", lambda size: {"query": "q", "documents": repeated("a" * 400, size)}),
    "grammar": ("/v1/completions", lambda size: completion(guided_choice=repeated("x" * 400, size))),
    "prediction": (
        "/v1/completions",
        lambda size: completion(prediction={"type": "content", "content": TEXT * (size // len(TEXT))}),
    ),
    "picture": (
        "/v1/chat/completions",
        lambda size: {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * size}}],
                }
            ]
        },
    ),
}


def family(pid: int) -> list[int]:
    """``pid`` and all processes that it or they have started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    threads = Path(f"/proc/{pid}/task").iterdir()
    of_threads = [one for thread in threads for one in (thread / "children").read_text().split()]
    return [pid, *(other for child in {*children, *of_threads} for other in family(int(child)))]


def memory(pids: list[int], field: str) -> int:
    total = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError):  # a worker was replaced
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith(f"{field}:"):
                    total += int(line.split()[1]) * 1024
    return total


def peak_of(server: RunningServer, path: str, raw: bytes) -> tuple[int, int]:
    """Bytes above those before the request, and the status of its answer."""
    headers = {"content-type": "application/json"}
    pids = family(server.process.pid)
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
    before = memory(pids, "VmRSS")
    answer = httpx.post(server.url + path, content=raw, headers=headers, timeout=60)
    return memory(pids, "VmHWM") - before, answer.status_code


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_costs_at_most_so_many_times_its_bytes(server: RunningServer, kind: str) -> None:
    path, body = KINDS[kind]
    httpx.post(server.url + path, json=body(100_000), timeout=60)
    raw = json.dumps(body(SIZE)).encode()
    peak, status = peak_of(server, path, raw)
    print(f"{kind}: {len(raw):,} bytes, {peak:,} at the peak ({peak / len(raw):.1f}), {status}")
    assert status < 500 or status == 503
    assert peak <= K * len(raw) + C


def test_a_peak_is_seen(server: RunningServer) -> None:
    """The control: a body of 40 MB is held while it is read."""
    raw = json.dumps(completion(prompt="a" * (40 << 20))).encode()
    peak, _ = peak_of(server, "/v1/completions", raw)
    assert peak > 40 << 20
