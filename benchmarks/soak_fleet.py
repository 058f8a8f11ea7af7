"""kill -9 of a random engine every few seconds, under streams: no error at a client, no token that differs.

    python -m benchmarks.soak_fleet --streams 2000 --replicas 2 --every 5

The server is ``weft serve --replicas N``, the client is httpx. The streams are of six kinds: greedy, sampled,
two answers, logprobs with penalties, a grammar, a stop string. The same streams run twice: undisturbed first,
for the tokens that are right, then with the kills. Only an engine that serves is killed, so each kill has
requests to move.

The result is one line of JSON: streams, kills, resumes, errors, streams that differ, and what is left on the
server afterwards. The exit code is 1 where one of the last three is not 0. The control, ``--other-seeds``,
changes the seeds of the second run: sampled streams must differ then, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil

START_S = 300.0
WORDS = ("river", "lantern", "copper", "orchard", "signal", "harbour", "meadow", "granite", "violet")


def body(number: int, tokens: int, *, seed_shift: int = 0) -> dict[str, Any]:
    """Stream ``number``: prompts share a beginning, as conversations do."""
    rng = random.Random(number)
    shared = "Remember this list. " + " ".join(
        f"{word} {(7919 * (number % 8 + i)) % 90000 + 10000}" for i, word in enumerate(WORDS)
    )
    prompt = f"{shared} And {rng.choice(WORDS)} {rng.randrange(10**6)}:"
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.95},
        {"temperature": 1.0, "n": 2},
        {"temperature": 0.8, "logprobs": 2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"temperature": 1.0, "guided_regex": "([0-9]{4}-){12}end", "ignore_eos": False},
        {"temperature": 1.0, "stop": ["7 7", "zz", "end"]},
    )
    return {
        "prompt": prompt,
        "stream": True,
        "max_tokens": tokens,
        "seed": number + seed_shift,
        "return_token_ids": True,
        "ignore_eos": True,
        **kinds[number % len(kinds)],
    }


async def stream(client: httpx.AsyncClient, asked: dict[str, Any]) -> tuple[dict[int, Any], str]:
    """Tokens, text and end of each choice, and the error ("" for none)."""
    choices: dict[int, Any] = {}
    try:
        async with client.stream("POST", "/v1/completions", json=asked) as response:
            if response.status_code != 200:
                return choices, (await response.aread()).decode()
            done = False
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if not line.startswith("data: "):
                    continue
                if data == "[DONE]":
                    done = True
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    return choices, str(chunk["error"]["message"])
                for choice in chunk["choices"]:
                    known = choices.setdefault(choice["index"], {"tokens": [], "text": "", "end": None})
                    known["tokens"] += choice["token_ids"]
                    known["text"] += choice["text"]
                    known["end"] = choice["finish_reason"] or known["end"]
            return choices, "" if done else "the stream ended early"
    except httpx.HTTPError as error:
        return choices, f"{type(error).__name__}: {error}"


async def all_streams(url: str, args: argparse.Namespace, *, seed_shift: int = 0) -> list[tuple[Any, str]]:
    gate = asyncio.Semaphore(args.concurrency)
    limits = httpx.Limits(max_connections=args.concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:

        async def one(number: int) -> tuple[Any, str]:
            async with gate:
                return await stream(client, body(number, args.tokens, seed_shift=seed_shift))

        return await asyncio.gather(*map(one, range(args.streams)))


async def kill_engines(server: int, url: str, every_s: float, kills: Counter[str]) -> None:
    rng = random.Random(1)
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        while True:
            await asyncio.sleep(every_s)
            ready = [row for row in (await client.get("/v1/replicas")).json()["data"] if row["state"] == "ready"]
            engines = {
                engine.pid: engine
                for engine in psutil.Process(server).children()
                if "engine_process" in " ".join(engine.cmdline())
            }
            serving = sorted(engines)[-len(ready) :] if ready else []
            if not serving:
                kills["none served"] += 1
                continue
            os.kill(rng.choice(serving), signal.SIGKILL)
            kills["killed"] += 1


def metric(text: str, name: str) -> int:
    return int(sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"weft:{name}{{")))


async def soak(args: argparse.Namespace, url: str, server: int) -> dict[str, Any]:
    begin_s = time.monotonic()
    expected = await all_streams(url, args)
    undisturbed_s = time.monotonic() - begin_s
    kills = Counter[str]()
    killer = asyncio.create_task(kill_engines(server, url, args.every, kills))
    begin_s = time.monotonic()
    answers = await all_streams(url, args, seed_shift=10**6 if args.other_seeds else 0)
    disturbed_s = time.monotonic() - begin_s
    killer.cancel()
    await asyncio.sleep(1)
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        load = (await client.get("/load")).json()
        metrics = (await client.get("/metrics")).text
    errors = Counter(error for _, error in [*expected, *answers] if error)
    return {
        "streams": args.streams,
        "tokens": args.tokens,
        "replicas": args.replicas,
        "every_s": args.every,
        "concurrency": args.concurrency,
        "undisturbed_s": round(undisturbed_s, 1),
        "disturbed_s": round(disturbed_s, 1),
        "kills": kills["killed"],
        "restarts": metric(metrics, "engine_restarts_total"),
        "resumes": metric(metrics, "request_resumes_total"),
        "errors": sum(errors.values()),
        "error_messages": dict(errors.most_common(3)),
        "differing": sum(one != other for (one, _), (other, _) in zip(expected, answers, strict=True)),
        "left": load["server_load"] + load["running"] + load["waiting"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--every", type=float, default=5.0, help="Seconds between two kills.")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--other-seeds", action="store_true", help="The control: streams must differ.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("serve", nargs="*", help="Further arguments of weft serve.")
    args = parser.parse_args()
    url = f"http://127.0.0.1:{args.port}"
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "weft",
            "serve",
            *args.serve,
            "--port",
            str(args.port),
            "--replicas",
            str(args.replicas),
            "--log-level",
            "error",
        ],
        env=os.environ | {"WEFT_RESTARTS": "1000000"},
        stdout=subprocess.DEVNULL,
    )
    try:
        limit_s = time.monotonic() + START_S
        while not _healthy(url):
            if server.poll() is not None or time.monotonic() > limit_s:
                print("the server did not start", file=sys.stderr)
                return 2
            time.sleep(0.2)
        result = asyncio.run(soak(args, url, server.pid))
    finally:
        server.terminate()
        server.wait()
    line = json.dumps(result)
    print(line)
    if args.json is not None:
        args.json.write_text(line + "\n")
    return int(bool(result["errors"] or result["differing"] or result["left"]))


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").json()["status"] == "ok"
    except httpx.HTTPError:
        return False


if __name__ == "__main__":
    sys.exit(main())
