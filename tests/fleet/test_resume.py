"""Answers survive the death of their engine: the same tokens as in an undisturbed run, over a real server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fixtures.checkpoints import checkpoint
from tests.server.running import RunningServer, eventually, running_server
from tests.server.scripted_engine import write_model_directory
from tests.server.test_lifecycle import Background, events_of

TEMPLATE = Path(__file__).resolve().parents[1] / "fixtures" / "family_templates" / "hermes_think.jinja"
PROMPT = [(7 * i * i + 3 * i) % 500 for i in range(70)]
CALL = {
    "type": "function",
    "function": {
        "name": "forecast",
        "parameters": {
            "type": "object",
            "additionalProperties": False,
            "required": ["note"],
            "properties": {"note": {"type": "string", "minLength": 150, "maxLength": 200}},
        },
    },
}
MESSAGES = [{"role": "user", "content": "Hi"}]


def completion(**more: Any) -> tuple[str, dict[str, Any]]:
    return "completions", {
        "model": "default",
        "prompt": PROMPT,
        "max_tokens": 300,
        "seed": 11,
        "extra_body": {"return_token_ids": True, "ignore_eos": True},
        **more,
    }


def chat(**more: Any) -> tuple[str, dict[str, Any]]:
    return "chat", {"model": "default", "messages": MESSAGES, "max_tokens": 400, "seed": 5, **more}


ASKED = {
    "greedy": completion(temperature=0),
    "sampled, streamed": completion(temperature=0.9, top_p=0.95, stream=True),
    "three answers": completion(n=3, temperature=1.0, stream=True),
    "logprobs": completion(temperature=0, logprobs=3, seed=2, echo=True),
    "penalties and bias": completion(
        temperature=0.7, presence_penalty=0.6, frequency_penalty=0.4, logit_bias={"9": 4, "11": 3}
    ),
    "repetition": completion(
        temperature=0, extra_body={"return_token_ids": True, "ignore_eos": True, "repetition_penalty": 1.3}
    ),
    "min_tokens": completion(temperature=1.0, max_tokens=350, extra_body={"return_token_ids": True, "min_tokens": 250}),
    "stop string": completion(temperature=1.0, seed=21, stop=["zz", "q7", "aaaaa"], stream=True),
    "grammar": completion(temperature=1.0, extra_body={"return_token_ids": True, "guided_regex": "([a-f]{5}-){40}end"}),
    "a tool call": chat(
        temperature=1.0,
        tools=[CALL],
        tool_choice="required",
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    ),
    "reasoning, streamed": chat(
        temperature=1.0,
        stream=True,
        max_tokens=300,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    ),
}


async def answered(server: RunningServer, asked: tuple[str, dict[str, Any]]) -> Any:
    """What a client ends up with: text, tokens, calls, ends and counts of each choice."""
    kind, body = asked
    client = server.async_client()
    create = client.completions.create if kind == "completions" else client.chat.completions.create
    answer: Any = await create(**body)
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    async for chunk in answer if body.get("stream") else _once(answer):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            _add(choices.setdefault(choice.index, {}), choice.model_dump(exclude_none=True))
    counts = usage and (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
    return choices, counts


async def _once(answer: Any) -> Any:
    yield answer


def _add(whole: Any, part: dict[str, Any]) -> None:
    """Strings and lists of chunks are joined, dicts are merged."""
    for name, value in part.items():
        if name in ("index", "id", "role", "type"):
            continue
        if isinstance(value, dict):
            _add(whole.setdefault(name, {}), value)
        elif isinstance(value, list) and name == "tool_calls":
            _add(whole.setdefault(name, {}), value[0])
        elif isinstance(value, str | list) and name not in ("finish_reason", "stop_reason"):
            whole[name] = whole[name] + value if name in whole else value
        else:
            whole[name] = value


def same(left: Any, right: Any) -> bool:
    """Equal, with logprobs within 1e-4: a prefill of the answer adds in another order than its decodes."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return abs(left - right) < 1e-4 if isinstance(left, float) else bool(left == right)


async def all_answered(server: RunningServer) -> dict[str, Any]:
    answers = await asyncio.gather(*(answered(server, asked) for asked in ASKED.values()))
    return dict(zip(ASKED, answers, strict=True))


def restarts(server: RunningServer) -> int:
    [line] = [
        line for line in server.get("/metrics").text.splitlines() if line.startswith("weft:engine_restarts_total{")
    ]
    return int(float(line.rpartition(" ")[2]))


def resumes(server: RunningServer) -> int:
    [line] = [
        line for line in server.get("/metrics").text.splitlines() if line.startswith("weft:request_resumes_total{")
    ]
    return int(float(line.rpartition(" ")[2]))


def running_in_engine(server: RunningServer) -> int:
    """Sequences that it has taken up: those are resumed."""
    return int(server.get("/load").json()["running"])


async def kill_at_random(server: RunningServer, times: int, rng: random.Random) -> None:
    """kill -9 while requests run: once when most of them do, then each time at another moment."""
    for number in range(times):
        least = 1 if number else len(ASKED) * 3 // 4
        while await asyncio.to_thread(running_in_engine, server) < least:
            await asyncio.sleep(0.005)
        await asyncio.sleep(rng.uniform(0.0, 0.3) if number else 0.0)
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(server.engine_pid(), signal.SIGKILL)
        await asyncio.sleep(0.2)


@pytest.fixture(scope="module")
def real() -> Iterator[RunningServer]:
    engine = {"model": str(checkpoint("qwen3_5")), "memory": "64MB", "threads": 1, "max_model_len": 1024}
    server = RunningServer(
        "weft.assemble:assemble", engine, {"chat_template": str(TEMPLATE), "restarts": 100}, "Ctrl-C finishes"
    )
    try:
        yield server
    finally:
        server.stop()


async def test_every_kind_of_answer_is_the_same_when_its_engine_is_killed(real: RunningServer) -> None:
    undisturbed = await all_answered(real)
    # A machine that is busy may answer before most requests run at one time: then there is another round.
    for seed in range(7, 13):
        before = resumes(real)
        killer = asyncio.create_task(kill_at_random(real, 2, random.Random(seed)))
        disturbed = await all_answered(real)
        killer.cancel()
        for kind in ASKED:
            assert same(disturbed[kind], undisturbed[kind]), kind
        if resumes(real) - before >= len(ASKED) // 2:
            break
    else:
        pytest.fail("nothing was killed in time")
    assert real.get("/health").json() == {"status": "ok"}


SUNG = {
    "model": "default",
    "prompt": "sing",
    "max_tokens": 500,
    "temperature": 1.0,
    "seed": 3,
    "extra_body": {"ignore_eos": True},
}


class Held:
    """A server whose engines start only while no file ``hold`` lies beside the model."""

    def __init__(self, server: RunningServer, directory: Path) -> None:
        self.server = server
        self._file = directory / "hold"

    @contextlib.contextmanager
    def restarts(self) -> Iterator[None]:
        """Restarts wait until ``release``, or until the end of the block."""
        self._file.touch()
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        self._file.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    directory = write_model_directory(tmp_path_factory.mktemp("held"))
    with running_server(
        "build_for_resumes", engine={"model": str(directory)}, server={"restarts": 100, "stall_after": 3.0}
    ) as server:
        yield Held(server, directory)


def is_healthy(server: RunningServer) -> bool:
    return eventually(lambda: server.get("/health").json() == {"status": "ok"}, 60)


def is_degraded(server: RunningServer) -> bool:
    return eventually(lambda: server.get("/health").json()["status"] == "degraded", 60)


def sung(server: RunningServer, **more: Any) -> str:
    text: str = server.client().completions.create(**{**SUNG, **more}).choices[0].text
    return text


def sung_and_killed(server: RunningServer, **more: Any) -> str:
    """The same, and the engine is killed after some tokens."""
    resumes_before, was_killed, text = resumes(server), False, ""
    for chunk in server.client().completions.create(**{**SUNG, **more}, stream=True):
        text += chunk.choices[0].text
        if len(text) > 50 and not was_killed:
            was_killed = True
            os.kill(server.engine_pid(), signal.SIGKILL)
            assert eventually(lambda: resumes(server) == resumes_before + 1, 60)
    return text


@pytest.mark.parametrize(("salt", "goes_on"), [("", True), ("forget", False)])
def test_a_resume_at_another_position_is_noticed(held: Held, salt: str, goes_on: bool) -> None:
    more = {"extra_body": {"ignore_eos": True, "cache_salt": salt}}
    undisturbed = sung(held.server)
    assert undisturbed == sung(held.server, **more)
    assert (sung_and_killed(held.server, **more) == undisturbed) is goes_on


def test_a_deadly_request_is_refused_and_its_neighbours_go_on(held: Held) -> None:
    server = held.server
    undisturbed, restarts_before = sung(server), restarts(server)
    neighbours = [Background(server, max_tokens=1500) for _ in range(3)]
    assert eventually(lambda: server.running() == 3, 60)
    deadly = Background(server, messages=[{"role": "user", "content": "crash"}])
    refused = deadly.result()
    assert refused.status_code == 422, refused.text
    assert refused.json()["error"]["code"] == "request_killed_engines"
    assert "2 engines in a row" in refused.json()["error"]["message"]
    texts = {one.result().json()["choices"][0]["message"]["content"] for one in neighbours}
    assert len(texts) == 1
    assert [one.result().json()["usage"]["completion_tokens"] for one in neighbours] == [1500] * 3
    assert restarts(server) == restarts_before + 2
    assert "request_deadly_total" in server.get("/metrics").text
    assert sung(server) == undisturbed


def test_an_engine_that_stalls_is_replaced(held: Held) -> None:
    server = held.server
    undisturbed, restarts_before = sung(server), restarts(server)
    stream = server.client().completions.create(**SUNG, stream=True)
    text = next(stream).choices[0].text
    with held.restarts():
        os.kill(server.engine_pid(), signal.SIGSTOP)
        assert is_degraded(server)
        health = server.get("/health")
        assert health.status_code == 200
        assert "stalled" in health.json()["reason"]
        assert "limits.stall_after" in health.json()["reason"]
    assert text + "".join(chunk.choices[0].text for chunk in stream) == undisturbed
    assert restarts(server) == restarts_before + 1
    assert is_healthy(server)


def test_a_client_may_leave_and_come_while_the_engine_restarts(held: Held) -> None:
    server = held.server
    undisturbed = sung(server, max_tokens=40)
    with held.restarts(), ThreadPoolExecutor(1) as threads:
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={"prompt": "sing", "max_tokens": 1500, "stream": True}
        ) as leaving:
            lines = leaving.iter_lines()
            assert next(lines).startswith("data: ")
            os.kill(server.engine_pid(), signal.SIGKILL)
            assert is_degraded(server)
            assert server.get("/load").json()["server_load"] == 1
        assert eventually(lambda: server.get("/load").json()["server_load"] == 0, 60)
        assert server.running() == 0
        assert server.get("/v1/cache").status_code == 503
        coming = threads.submit(sung, server, max_tokens=40)
        assert eventually(lambda: server.running() == 1, 60), "a request that comes meanwhile waits"
        held.release()
        assert coming.result() == undisturbed
    assert eventually(lambda: server.running() == 0, 60)


def test_a_restart_that_fails_uses_up_an_attempt_and_then_the_server_ends(tmp_path: Path) -> None:
    with running_server(
        "build_once", engine={"model": str(write_model_directory(tmp_path))}, server={"restarts": 2}
    ) as server:
        streamed = Background(server, stream=True)
        assert eventually(lambda: server.running() == 1, 60)
        os.kill(server.engine_pid(), signal.SIGKILL)
        events = events_of(streamed.result())
        assert "has gone since" in events[-2]["error"]["message"]
        assert server.exit_code() == 1
        output = server.rest_of_output()
    assert "restart 2 of 2" in output
    assert "error: model.safetensors has gone since" in output
