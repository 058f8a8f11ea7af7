"""How long the tokens of one model stay away while another one is loaded into the same server.

    python -m benchmarks.bystander [--size 350m] [--vocabulary 151936] [--loads 4] [--json FILE]

    bystander    streams an answer, from begin to end         a small LFM2
    alone        nothing else happens                         the control, before each load
    loading      a request loads the other model              Qwen3.5's layers, with a tokenizer of real size
    unloading    it goes                                      keep_alive 0

For each of the three: the longest gap between two tokens of the bystander, and the longest wait for /version,
which the server's process gives without an engine. A tokenizer of 150,000 tokens is read by one call that
lets no other thread of its process run. So the second figure shows what the text side costs, and the first
what the cores do besides. The bound is that of docs/several-models.md: 200 ms, twice a GPU's
``--max-step-ms``.

Figures want a quiet machine; ``alone`` says how quiet it was. The run is bounded: ``--loads`` loads, and an
answer that ends by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.serve.checkpoints import SIZES, Size, config_of, save_tokenizer
from weft.cli.remote import free_port, stop_process

BOUND_S = 0.2
KINDS = ("alone", "loading", "unloading")
_ALONE_S = 2.0
_PING_S = 0.005
_ANSWER_TOKENS = 100_000
_START_S = 120.0


@dataclass(slots=True)
class Window:
    """Seconds of one kind of time. ``takes_s``: how long what gives it its name took, each time."""

    kind: str
    gaps_s: list[float] = field(default_factory=list)
    pings_s: list[float] = field(default_factory=list)
    takes_s: list[float] = field(default_factory=list)

    def row(self) -> str:
        gaps, pings = sorted(self.gaps_s), sorted(self.pings_s)
        return (
            f"{self.kind:10} {len(self.takes_s):2} x {max(self.takes_s):5.1f} s   tokens {len(gaps):5}: "
            f"longest gap {gaps[-1] * 1e3:5.0f} ms, p99 {gaps[len(gaps) * 99 // 100] * 1e3:5.0f} ms   "
            f"server {len(pings):5}: longest {pings[-1] * 1e3:5.0f} ms"
        )


def make_models(size: Size, vocabulary: int, under: Path) -> tuple[Path, Path]:
    """The bystander, and the one that is loaded beside it."""
    import torch
    from transformers import AutoModelForCausalLM

    directories = []
    for family, its_size, tokens in (("lfm2", "tiny" if size == "tiny" else "small", None), ("qwen", size, vocabulary)):
        config = config_of(family, its_size)  # type: ignore[arg-type]
        config.vocab_size = tokens or config.vocab_size
        config.max_position_embeddings = 1 << 17
        torch.manual_seed(0)
        auto: Any = AutoModelForCausalLM
        directory = under / family
        auto.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
        save_tokenizer(directory, config.vocab_size)
        if tokens is not None:
            _merge(directory / "tokenizer.json", tokens)
        directories.append(directory)
    return directories[0], directories[1]


def _merge(file: Path, vocabulary: int) -> None:
    """Made-up words become merges of shorter ones, as in a trained tokenizer."""
    stored = json.loads(file.read_text())
    dice = random.Random(0)
    tokens = list(stored["model"]["vocab"])[:259]
    letters, known, merges = tokens[3:], set(tokens), []
    while len(tokens) < vocabulary:
        first, second = dice.choice(letters), dice.choice(letters)
        if len(first + second) <= 12 and first + second not in known:
            known.add(first + second)
            tokens.append(first + second)
            letters.append(first + second)
            merges.append([first, second])
    stored["model"] |= {"vocab": {token: index for index, token in enumerate(tokens)}, "merges": merges}
    file.write_text(json.dumps(stored))


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[str]:
    """The address of a server with these arguments."""
    port = free_port()
    child = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "weft",
            "serve",
            "--host=127.0.0.1",
            f"--port={port}",
            "--log-level=warning",
            *arguments,
        ],
        stdin=subprocess.DEVNULL,
        process_group=0,
        env=os.environ | {"WEFT_FILE_STORE": "off", "WEFT_RESPONSE_STORE": "off"},
    )
    try:
        end_s = time.monotonic() + _START_S
        while not _is_healthy(port):
            assert child.poll() is None, "the server did not start"
            assert time.monotonic() < end_s, "the server does not answer"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        stop_process(child)


def _is_healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").is_success
    except httpx.TransportError:
        return False


class Watch:
    """Sorts gaps and answers into the window that is open while they end."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.windows = {kind: Window(kind) for kind in KINDS}
        self._client = client
        self._now: Window | None = None
        self.streams = asyncio.Event()

    @contextlib.asynccontextmanager
    async def window(self, kind: str) -> AsyncIterator[None]:
        """A gap that is open when it begins or ends counts whole."""
        self._now = self.windows[kind]
        began_s = time.perf_counter()
        yield
        self._now.takes_s.append(time.perf_counter() - began_s)
        await asyncio.sleep(0.05)

    async def stream(self) -> None:
        body = {
            "model": "bystander",
            "prompt": [5, 6, 7],
            "max_tokens": _ANSWER_TOKENS,
            "temperature": 1,
            "seed": 1,
            "stream": True,
            "ignore_eos": True,
        }
        async with self._client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.is_success, await answer.aread()
            last_s = None
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    now_s = time.perf_counter()
                    if last_s is not None and self._now is not None:
                        self._now.gaps_s.append(now_s - last_s)
                    last_s = now_s
                    self.streams.set()
        raise AssertionError("the bystander's answer ended before the loads")

    async def ping(self) -> None:
        for _ in itertools.count():
            began_s = time.perf_counter()
            (await self._client.get("/version")).raise_for_status()
            if self._now is not None:
                self._now.pings_s.append(time.perf_counter() - began_s)
            await asyncio.sleep(_PING_S)


async def measure(url: str, loads: int) -> list[Window]:
    async with httpx.AsyncClient(base_url=url, timeout=300.0) as client:
        watch = Watch(client)

        async def keep(seconds: str | int) -> None:
            asked = {"model": "loaded", "keep_alive": seconds}
            (await client.post("/api/generate", json=asked)).raise_for_status()
            wanted, state = "absent" if seconds == 0 else "loaded", ""
            while state != wanted:
                await asyncio.sleep(0.05)
                cards = (await client.get("/v1/models")).json()["data"]
                state = next(card["state"] for card in cards if card["id"] == "loaded")

        async def turns() -> None:
            await watch.streams.wait()
            for _ in range(loads):
                async with watch.window("alone"):
                    await asyncio.sleep(_ALONE_S)
                async with watch.window("loading"):
                    await keep("5m")
                async with watch.window("unloading"):
                    await keep(0)

        tasks = [asyncio.create_task(work) for work in (turns(), watch.stream(), watch.ping())]
        done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for task in done:
            task.result()
        return list(watch.windows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description="Gaps of one model's tokens while another one is loaded.")
    parser.add_argument("--size", choices=SIZES, default="350m")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--loads", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bystander, loaded = make_models(args.size, args.vocabulary, Path(folder))
        with serving(f"bystander={bystander}", f"loaded={loaded}", "--memory=4GiB") as url:
            windows = asyncio.run(measure(url, args.loads))
    for window in windows:
        print(window.row())
    longest_s = max(windows[KINDS.index("loading")].gaps_s)
    verdict = "within" if longest_s <= BOUND_S else "beyond"
    print(f"longest gap while loading: {longest_s * 1e3:.0f} ms, {verdict} {BOUND_S * 1e3:.0f} ms")
    if args.json:
        args.json.write_text(json.dumps([asdict(window) for window in windows]))


if __name__ == "__main__":
    main()
