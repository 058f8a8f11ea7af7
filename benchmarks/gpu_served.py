"""Every organ of one small model through ``weft serve``: a line of "@{json}" for each way to serve it.

    python -m benchmarks.gpu_served [--device cuda] [--only plain store] [--after N]

    gpu_checkpoint every-part --head --adapters 2, in bfloat16, fp8 and int4
         |
         +--> weft serve, torch's operators and no graphs    the tokens to compare with
         +--> weft serve, a flag or two                      tokens, seconds of the start, steps by their form

A way is a server of its own, of some ten seconds. It answers the same prompts side by side, greedy; some ways then do
something and ask again: a restart with its store, a sleep and a wake. ``equal_tokens`` counts the tokens before the
first that differs. Kernels round in another order than torch's operators, so a few late differences are no fault.
``largest picture`` is an engine in this process, whose arena takes all the memory that the start leaves.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_checkpoint import EVERY_PART
from benchmarks.gpu_server import READY, lines_until_ready

START_S, ANSWER_S = 90, 60
TOKENS = 24
LENGTHS = (3, 40, 70, 200)
"""Tokens of the prompts."""
VOCAB = 1024
REFERENCE = {"WEFT_GPU_KERNELS": "torch", "WEFT_CUDA_GRAPHS": "off", "WEFT_CPU_KERNELS": "torch"}


@dataclass(frozen=True)
class Way:
    """``flags`` of the server; ``form`` of the checkpoint; ``then``: what happens before the prompts are asked again;
    ``adapters``: prompts of two adapters and of none."""

    flags: Sequence[str] = ()
    form: str = "bf16"
    then: Sequence[str] = ()
    adapters: bool = False
    rounds: bool = False
    """The flags round numbers, so the reference has them too."""


WAYS = {
    "plain": Way(),
    "drafts": Way(flags=("--speculate", "mtp")),
    "store": Way(flags=("--store", "STORE"), then=("restart",)),
    "adapters": Way(adapters=True),
    "sleep": Way(then=("sleep 1", "wake", "sleep 2", "wake")),
    "fp8": Way(form="fp8"),
    "int4": Way(form="int4"),
    "states in 16 bits": Way(flags=("--state-dtype", "float16"), rounds=True),
    "pages in fp8": Way(flags=("--kv-dtype", "fp8"), rounds=True),
    "two HTTP processes": Way(flags=("--http-workers", "2")),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", choices=[*WAYS, PICTURE], default=[*WAYS, PICTURE])
    parser.add_argument("--after", type=int, default=0, help="the first case")
    args, _ = parser.parse_known_args(argv)  # the rest is for other parts of the first run
    with tempfile.TemporaryDirectory() as home:
        for number, (name, run) in enumerate(cases(args.device, Path(home))):
            if number < args.after or name not in args.only:
                continue
            print("@" + json.dumps({"number": number, "begins": name}), flush=True)
            try:
                found = run()
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"}
            print("@" + json.dumps({"number": number, "name": name} | found), flush=True)
    return 0


PICTURE = "largest picture"


def cases(device: str, home: Path) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    known: dict[Any, list[list[int]]] = {}
    for name, way in WAYS.items():
        yield name, lambda way=way: compared(way, device, home, known)  # type: ignore[misc]
    yield PICTURE, lambda: largest_picture(device, checkpoint(home, "bf16"))


def checkpoint(home: Path, form: str) -> Path:
    """Made by the first case that asks for it."""
    directory = home / form
    if not directory.exists():
        command = [sys.executable, "-m", "benchmarks.gpu_checkpoint", EVERY_PART, str(directory), "--layers", "2"]
        subprocess.run([*command, "--head", "--adapters", "2", "--form", form], check=True)
    return directory


def compared(way: Way, device: str, home: Path, known: dict[Any, list[list[int]]]) -> dict[str, Any]:
    model, rounding = checkpoint(home, way.form), tuple(way.flags if way.rounds else ())
    key = (way.form, way.adapters, rounding)
    if key not in known:
        with served(model, device, way, REFERENCE, rounding) as reference:
            known[key] = reference.answers(adapters=way.adapters)
    flags = [flag.replace("STORE", str(home / "store")) for flag in way.flags]
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(served(model, device, way, {}, flags))
        found["start_s"], found["said"] = server.start_s, server.said[-12:]
        found |= difference(known[key], server.answers(adapters=way.adapters))
        for action in way.then:
            if action == "restart":
                stack.close()
                server = stack.enter_context(served(model, device, way, {}, flags))
            else:
                server.act(action)
        if way.then:
            found["then"] = difference(known[key], server.answers(adapters=way.adapters))
        found["metrics"] = server.metrics()
    return found


def difference(expected: list[list[int]], tokens: list[list[int]]) -> dict[str, int]:
    equal = sum(
        next((at for at, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))
        for a, b in zip(expected, tokens, strict=True)
    )
    return {"equal_tokens": equal, "tokens": sum(map(len, tokens))}


@dataclass
class Server:
    """A server that is ready, and what it said until then."""

    port: int
    start_s: float
    said: list[str]

    def post(self, path: str, body: dict[str, Any] | None = None, limit_s: float = ANSWER_S) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body or {}).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=limit_s) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.code} {error.read().decode()[:300]}") from None

    def answers(self, *, adapters: bool) -> list[list[int]]:
        """The tokens of each prompt, all at once; with ``adapters`` of two of them and of the base model in turn."""
        chance = random.Random(5)
        names = ["a0", None, "a1", "a0"] if adapters else [None] * len(LENGTHS)
        asked = [
            {
                "model": name or "model",
                "prompt": [chance.randrange(16, VOCAB) for _ in range(length)],
                "max_tokens": TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            for name, length in zip(names, LENGTHS, strict=True)
        ]
        with ThreadPoolExecutor(len(asked)) as threads:
            made = list(threads.map(lambda body: self.post("/v1/completions", body), asked))
        return [one["choices"][0]["token_ids"] for one in made]

    def act(self, action: str) -> None:
        verb, _, level = action.partition(" ")
        self.post(f"/sleep?level={level}" if verb == "sleep" else "/wake_up")

    def metrics(self) -> dict[str, float]:
        """Steps by form, drafts and restored tokens, where they are not zero."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        kept = ("graph_steps_total", "spec", "draft", "restored")
        counted = [line for line in lines if not line.startswith("#") and any(word in line for word in kept)]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in counted) if float(value)}


@contextlib.contextmanager
def served(
    model: Path, device: str, way: Way, variables: Mapping[str, str], flags: Sequence[str] = ()
) -> Iterator[Server]:
    """Raises RuntimeError with its last lines where a server does not get ready."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    lora = [f"a{number}={model.with_name(f'{model.name}-adapter-{number}')}" for number in range(2)]
    command = [sys.executable, "-m", "weft", "serve", str(model), "--port", str(port), "--device", device]
    command += ["--served-model-name", "model", "--max-model-len", "2048", *flags]
    command += [part for one in lora for part in ("--lora", one)] if way.adapters else []
    began_s = time.monotonic()
    server = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | variables,
    )
    try:
        said = lines_until_ready(server, began_s + START_S)
        if not any(READY in line for line in said):
            raise RuntimeError("no start: " + " | ".join(said[-8:]))
        yield Server(port, time.monotonic() - began_s, said)
    finally:
        server.terminate()
        server.wait(30)


def largest_picture(device: str, model: Path) -> dict[str, Any]:
    """A picture of as many patches as the settings allow, next to a prompt of text, in an engine that leaves no
    memory."""
    from weft.assemble.assembly import assemble
    from weft.config import EngineConfig
    from weft.request import PlacedPicture, Request, SamplingParams

    on_cpu = {"memory": "256MiB"} if device == "cpu" else {"gpu_memory_fraction": 1.0}
    core = assemble(EngineConfig(model=str(model), device=device, speculate="off", **on_cpu)).core  # type: ignore[arg-type]
    pictures: Any = core.executor.pictures  # type: ignore[attr-defined]
    picture = pictures.vision.largest()
    rows = min(picture.rows, core.sizes.max_model_len // 2)
    if rows < picture.rows:
        return {"left_out": f"{picture.rows} rows do not fit into a context of {core.sizes.max_model_len}"}
    tokens = [16, *[pictures.picture_tokens[0]] * rows, 17]
    placed = PlacedPicture(digest=picture.digest, places=[(1, rows)], data=picture.to_bytes())
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    began_s = time.monotonic()
    core.submit(Request(request_id="text", prompt_tokens=list(range(20, 60)), sampling=sampling))
    core.submit(Request(request_id="seen", prompt_tokens=tokens, sampling=sampling, pictures=[placed]))
    ends, slowest_s, before_s = {}, 0.0, began_s
    while core.has_work:
        ends |= {event.request_id: event.finish_reason for event in core.step() if event.finish_reason}
        now_s = time.monotonic()
        slowest_s, before_s = max(slowest_s, now_s - before_s), now_s
        if core.failure is not None:
            raise core.failure
    core.close()
    return {"rows": rows, "ends": ends, "seconds": time.monotonic() - began_s, "longest_step_s": slowest_s}


if __name__ == "__main__":
    raise SystemExit(main())
