"""Engines as sides of a comparison: started as processes of their own, asked, stopped.

    weft, vllm, llama      a server on a free port; token ids over HTTP, streamed answers
    transformers           a process asked over pipes (benchmarks.serve.peer), static batches

A setting is an engine with flags (``vllm-cache``: with its prefix cache). One engine runs at a time. A server
is in a process group of its own and is stopped by its own process id. A start that takes too long is given
up. A fault becomes Absent (not here, or refuses the model) or Failed (broke off); the run goes on.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import httpx

from benchmarks.peers.environment import Absent, Environment, clean_variables
from benchmarks.peers.lines import SHARED, TALK, Failed, Side, Talk
from benchmarks.serve.checkpoints import Checkpoint
from benchmarks.serve.load import LoadPlan, Summary, run_load, summarise
from benchmarks.serve.peer import How, Peer
from weft.cli.remote import free_port, own_server, stop_process
from weft.config import EngineConfig
from weft.errors import WeftError
from weft_tools.bench.serve import OPENAI, EndpointFormat, Timing, one_request

HOST = "127.0.0.1"
MAX_MODEL_LEN = 4096
MEMORY_GIB = 2
START_LIMIT_S = 400.0
STOP_LIMIT_S = 20.0

_VLLM_CHOICES = {"lfm2": ['--compilation-config={"custom_ops": ["-rotary_embedding"]}']}
"""Without it, vLLM 0.32's rotary embedding on CPUs changes LFM2's answers."""


def _llama_body(model: str, prompt: list[int] | str, output_tokens: int) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "n_predict": output_tokens,
        "temperature": 0.0,
        "stream": True,
        "ignore_eos": True,
        "return_tokens": True,
        "cache_prompt": True,
    }


def _llama_note(timing: Timing, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        timing.error = str(chunk["error"])
        return
    tokens = chunk.get("tokens") or []
    if tokens:
        timing.chunks.append((time.perf_counter(), len(tokens)))
        timing.tokens += tokens


LLAMA = EndpointFormat("/completion", _llama_body, _llama_note)
"""llama.cpp's own endpoint: the OpenAI one does not return token ids."""


Answer = TypeVar("Answer")


class HttpSide:
    """A server at ``url``. Raises Failed when a line takes longer than ``limit_s``."""

    def __init__(self, url: str, endpoint_format: EndpointFormat, limit_s: float) -> None:
        self.url, self.endpoint_format, self.limit_s = url, endpoint_format, limit_s
        models = httpx.get(f"{url}/v1/models", timeout=10.0).raise_for_status()
        self.model: str = models.json()["data"][0]["id"]

    def load(self, plan: LoadPlan) -> tuple[Summary, list[Timing]]:
        return self._bounded(run_load(self.url, plan, model=self.model, endpoint_format=self.endpoint_format))

    def talk(self, talk: Talk) -> list[list[Timing]]:
        return self._bounded(self._talk(talk))

    async def _talk(self, talk: Talk) -> list[list[Timing]]:
        async with httpx.AsyncClient(base_url=self.url, timeout=None) as client:

            async def converse(number: int) -> list[Timing]:
                prompt: list[int] = []
                turns: list[Timing] = []
                for turn in range(talk.turns):
                    prompt = prompt + talk.said(number, turn)
                    body = self.endpoint_format.body(self.model, prompt, talk.output_tokens)
                    turns.append(await one_request(client, body, self.endpoint_format))
                    if turns[-1].error is not None:
                        break
                    prompt = prompt + turns[-1].tokens
                return turns

            return list(await asyncio.gather(*map(converse, range(talk.conversations))))

    def _bounded(self, what: Coroutine[Any, Any, Answer]) -> Answer:
        async def run() -> Answer:
            return await asyncio.wait_for(what, self.limit_s)

        try:
            return asyncio.run(run())
        except TimeoutError:
            raise Failed(f"took more than {self.limit_s:.0f} s") from None
        except httpx.HTTPError as error:
            raise Failed(f"{type(error).__name__}: {error}") from error


class PipeSide:
    """transformers. The requests that wait when a batch is done form the next one; a turn of all
    conversations is a batch, computed from its beginning."""

    def __init__(self, peer: Peer, limit_s: float) -> None:
        self.peer, self.limit_s = peer, limit_s

    def load(self, plan: LoadPlan) -> tuple[Summary, list[Timing]]:
        begin = time.perf_counter()
        waiting = list(zip(plan.prompts(), (begin + at for at in plan.arrivals()), strict=True))
        timings: list[Timing] = []
        with self._bounded():
            while waiting:
                time.sleep(max(0.0, waiting[0][1] - time.perf_counter()))
                now = time.perf_counter()
                here = [one for one in waiting if one[1] <= now][: plan.concurrency]
                del waiting[: len(here)]
                answers = self.peer.batch([prompt for prompt, _ in here], plan.output_tokens, begin)
                for timing, (_, arrival) in zip(answers, here, strict=True):
                    timing.sent = arrival
                timings += answers
        return summarise(timings, time.perf_counter() - begin), timings

    def talk(self, talk: Talk) -> list[list[Timing]]:
        prompts: list[list[int]] = [[] for _ in range(talk.conversations)]
        turns: list[list[Timing]] = [[] for _ in prompts]
        with self._bounded():
            for turn in range(talk.turns):
                for number, prompt in enumerate(prompts):
                    prompt += talk.said(number, turn)
                answers = self.peer.batch(prompts, talk.output_tokens, time.perf_counter())
                for number, answer in enumerate(answers):
                    turns[number].append(answer)
                    prompts[number] += answer.tokens
        return turns

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        timer = threading.Timer(self.limit_s, self.peer.kill)
        timer.start()
        try:
            yield
        except (RuntimeError, BrokenPipeError) as error:
            late = not timer.is_alive()
            raise Failed(f"took more than {self.limit_s:.0f} s" if late else str(error)) from error
        finally:
            timer.cancel()


@dataclass(frozen=True, slots=True)
class Bench:
    """What every engine is started with."""

    checkpoint: Checkpoint
    environment: Environment
    threads: int
    limit_s: float


Start = Callable[[Bench], AbstractContextManager[Side]]


@dataclass(frozen=True, slots=True)
class Setting:
    """An engine with flags. ``lines`` are those for which the setting makes a difference; a weight has
    ``weight_bits`` bits."""

    engine: str
    start: Start
    lines: str = "abcde"
    weight_bits: int = 16


@contextmanager
def weft_side(bench: Bench, gguf: str | None = None, speculate: str = "off", **choices: Any) -> Iterator[Side]:
    """``gguf``: the file that llama.cpp gets, with weights stored so, in place of the checkpoint. Nothing is
    guessed ahead: answers of random weights repeat themselves more than those of a model."""
    model = bench.checkpoint.directory if gguf is None else as_gguf(bench, gguf)
    config = EngineConfig(
        model=str(model),
        dtype=bench.checkpoint.dtype,
        threads=bench.threads,
        max_model_len=MAX_MODEL_LEN,
        memory=f"{MEMORY_GIB}GiB",
        speculate=speculate,
        **choices,
    )
    try:
        with own_server(config) as url:
            yield HttpSide(url, OPENAI, bench.limit_s)
    except WeftError as error:
        raise Absent(str(error)) from error


@contextmanager
def _transformers(bench: Bench, how: How = "static") -> Iterator[Side]:
    try:
        peer = Peer(bench.checkpoint.directory, bench.checkpoint.dtype, bench.threads, how)
    except RuntimeError as error:
        raise Absent(str(error)) from error
    with peer:
        yield PipeSide(peer, bench.limit_s)


@contextmanager
def _vllm(bench: Bench, cache: bool) -> Iterator[Side]:
    port = free_port()
    command = [
        str(bench.environment.python()),
        "-m",
        "vllm.entrypoints.openai.api_server",
        f"--model={bench.checkpoint.directory}",
        f"--host={HOST}",
        f"--port={port}",
        f"--dtype={bench.checkpoint.dtype}",
        f"--max-model-len={MAX_MODEL_LEN}",
        "--max-num-seqs=64",
        "--disable-uvicorn-access-log",
        "--enable-prefix-caching" if cache else "--no-enable-prefix-caching",
        *_VLLM_CHOICES.get(bench.checkpoint.family, []),
    ]
    variables = bench.environment.vllm_variables(bench.threads) | {"VLLM_CPU_KVCACHE_SPACE": str(MEMORY_GIB)}
    with other_server(command, variables, port) as url:
        yield HttpSide(url, OPENAI, bench.limit_s)


@contextmanager
def llama_side(bench: Bench, kind: str | None = None, flags: Sequence[str] = ()) -> Iterator[Side]:
    """``kind``: how weights are stored; None as the checkpoint has them. ``flags``: of its server."""
    kind = kind or {"bfloat16": "bf16", "float32": "f32"}[bench.checkpoint.dtype]
    model = as_gguf(bench, kind)
    slots = SHARED.concurrency
    each = 64 * -(-max(SHARED.prompt_tokens + SHARED.output_tokens, TALK.tokens_max) // 64)
    port = free_port()
    command = [
        str(bench.environment.llama_server()),
        f"--model={model}",
        f"--host={HOST}",
        f"--port={port}",
        f"--threads={bench.threads}",
        f"--threads-batch={bench.threads}",
        f"--parallel={slots}",
        f"--ctx-size={slots * each}",
        "--no-ui",
    ]
    command = [*(part for option in command for part in option.split("=", 1)), *flags]
    with other_server(command, {}, port) as url:
        answering = httpx.get(f"{url}/props", timeout=10.0).json().get("model_path")
        if answering != str(model):
            raise Absent(f"{url} answers with {answering}, not with {model}")
        yield HttpSide(url, LLAMA, bench.limit_s)


SETTINGS: dict[str, Setting] = {
    "weft": Setting("weft", weft_side),
    "weft-tiles": Setting("weft", lambda bench: weft_side(bench, twelve_bit=False)),
    "weft-int8": Setting("weft", lambda bench: weft_side(bench, quantize="int8"), lines="ab", weight_bits=8),
    "weft-w8a8": Setting("weft", lambda bench: weft_side(bench, quantize="w8a8"), lines="abcd", weight_bits=8),
    "vllm": Setting("vllm", lambda bench: _vllm(bench, cache=False)),
    "vllm-cache": Setting("vllm", lambda bench: _vllm(bench, cache=True), lines="cd"),
    "transformers": Setting("transformers", _transformers),
    "transformers-continuous": Setting("transformers", lambda bench: _transformers(bench, "continuous"), lines="a"),
    "llama": Setting("llama", llama_side),
}
GGUF_BITS = {"q8_0": 8, "q4_k_m": 5, "q4_0": 4, "q4_1": 5, "iq4_xs": 4}
"""Kinds of GGUF files that both engines read, with about the bits of a weight."""


def _reading(kind: str, bits: int) -> dict[str, Setting]:
    return {
        f"llama-{kind}": Setting("llama", lambda bench: llama_side(bench, kind), lines="abd", weight_bits=bits),
        f"weft-{kind}": Setting("weft", lambda bench: weft_side(bench, kind), lines="abd", weight_bits=bits),
    }


for _kind, _bits in GGUF_BITS.items():
    SETTINGS |= _reading(_kind, _bits)


def as_gguf(bench: Bench, kind: str) -> Path:
    """The checkpoint as llama.cpp reads it, next to the original; made once. A GGUF file stays as it is."""
    checkpoint, environment = bench.checkpoint.directory.resolve(), bench.environment
    environment.llama_server()
    if checkpoint.is_file():
        return checkpoint
    made = checkpoint / f"{kind}.gguf"
    if not made.exists() and kind in GGUF_BITS and kind != "q8_0":  # which llama.cpp's converter writes
        building = made.with_suffix(".building")
        done = subprocess.run(
            [environment.llama_quantize(), as_gguf(bench, "bf16"), building, kind.upper()],
            capture_output=True,
            text=True,
            env=clean_variables(),
        )
        if done.returncode:
            raise Absent(f"llama-quantize failed: {done.stderr.strip().splitlines()[-1:]}")
        building.rename(made)
    elif not made.exists():
        building = made.with_suffix(".building")
        done = subprocess.run(
            [
                environment.python(),
                Path(__file__).with_name("to_gguf.py"),
                environment.llama_sources(),
                checkpoint,
                building,
                kind,
            ],
            capture_output=True,
            text=True,
            env=clean_variables(),
        )
        if done.returncode:
            raise Absent(f"conversion for llama.cpp failed: {done.stderr.strip().splitlines()[-1:]}")
        building.rename(made)
    return made


@contextmanager
def other_server(command: list[str], variables: dict[str, str], port: int) -> Iterator[str]:
    """Run ``command`` until the block ends; the value is its URL, once its /health says yes."""
    url = f"http://{HOST}:{port}"
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=clean_variables() | variables,
            start_new_session=True,
        )
        try:
            _wait_until_healthy(child, url, log)
            yield url
        finally:
            stop_process(child, STOP_LIMIT_S)


def _wait_until_healthy(child: subprocess.Popen[bytes], url: str, log: IO[str]) -> None:
    begin = time.monotonic()
    while time.monotonic() - begin < START_LIMIT_S:
        if child.poll() is not None:
            raise Absent(f"it ended with code {child.returncode} while starting: {last_error(log)}")
        try:
            if httpx.get(f"{url}/health", timeout=5.0).is_success:
                return
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(0.2)
    raise Absent(f"no answer from {url} within {START_LIMIT_S:.0f} s: {last_error(log)}")


def last_error(log: IO[str]) -> str:
    """The first error that a log names, or its last line."""
    log.seek(0)
    lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    named = [
        found.group()
        for line in lines
        if "WARNING" not in line and (found := re.search(r"\w*(?:Error|Exception|error): .*", line))
    ]
    return (named or lines[-1:] or ["it said nothing"])[0][:300]
