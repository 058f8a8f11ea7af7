"""Answers survive the death of their engine: the same tokens as in an undisturbed run, over a real server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
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
CALL = {"type": "function", "function": {"name": "forecast", "parameters": {
    "type": "object", "additionalProperties": False, "required": ["note"],
    "properties": {"note": {"type": "string", "minLength": 150, "maxLength": 200}}}}}
MESSAGES = [{"role": "user", "content": "Hi"}]


def completion(**more: Any) -> tuple[str, dict[str, Any]]:
    return "completions", {"model": "default", "prompt": PROMPT, "max_tokens": 300, "seed": 11,
                           "extra_body": {"return_token_ids": True, "ignore_eos": True}, **more}


def chat(**more: Any) -> tuple[str, dict[str, Any]]:
    return "chat", {"model": "default", "messages": MESSAGES, "max_tokens": 400, "seed": 5, **more}


ASKED = {
    "greedy": completion(temperature=0),
    "sampled, streamed": completion(temperature=0.9, top_p=0.95, stream=True),
    "three answers": completion(n=3, temperature=1.0, stream=True),
    "logprobs": completion(temperature=0, logprobs=3, seed=2, echo=True),
    "penalties and bias": completion(temperature=0.7, presence_penalty=0.6, frequency_penalty=0.4,
                                     logit_bias={"9": 4, "11": 3}),
    "repetition": completion(temperature=0, extra_body={"return_token_ids": True, "ignore_eos": True,
                                                        "repetition_penalty": 1.3}),
    "min_tokens": completion(temperature=1.0, max_tokens=350,
                             extra_body={"return_token_ids": True, "min_tokens": 250}),
    "stop string": completion(temperature=1.0, seed=21, stop=["zz", "q7", "aaaaa"], stream=True),
    "grammar": completion(temperature=1.0, extra_body={
        "return_token_ids": True, "guided_regex": "([a-f]{5}-){40}end"}),
    "a tool call": chat(temperature=1.0, tools=[CALL], tool_choice="required",
                        extra_body={"chat_template_kwargs": {"enable_thinking": False}}),
    "reasoning, streamed": chat(temperature=1.0, stream=True, max_tokens=300,
                                stream_options={"include_usage": True},
                                extra_body={"ignore_eos": True}),
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
    [line] = [line for line in server.get("/metrics").text.splitlines()
              if line.startswith("weft:engine_restarts_total{")]
    return int(float(line.rpartition(" ")[2]))


def resumes(server: RunningServer) -> int:
    [line] = [line for line in server.get("/metrics").text.splitlines()
              if line.startswith("weft:request_resumes_total{")]
    return int(float(line.rpartition(" ")[2]))


async def kill_at_random(server: RunningServer, times: int, rng: random.Random) -> None:
    """kill -9 while requests run, each time at another moment."""
    for _ in range(times):
        while not await asyncio.to_thread(server.running):
            await asyncio.sleep(0.005)
        await asyncio.sleep(rng.uniform(0.0, 0.3))
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(server.engine_pid(), signal.SIGKILL)
        await asyncio.sleep(0.2)


@pytest.fixture(scope="module")
def real() -> Iterator[RunningServer]:
    engine = {"model": str(checkpoint("qwen3_5")), "memory": "64MB", "threads": 1, "max_model_len": 1024}
    with running_server("", engine=engine, server={"chat_template": str(TEMPLATE), "restarts": 100}) as one:
        yield one


async def test_every_kind_of_answer_is_the_same_when_its_engine_is_killed(real: RunningServer) -> None:
    undisturbed = await all_answered(real)
    killer = asyncio.create_task(kill_at_random(real, 2, random.Random(7)))
    disturbed = await all_answered(real)
    killer.cancel()
    assert resumes(real) >= len(ASKED) // 2, "nothing was killed in time"
    for kind in ASKED:
        assert same(disturbed[kind], undisturbed[kind]), kind
    assert real.get("/health").json() == {"status": "ok"}


SUNG = {"model": "default", "prompt": "sing", "max_tokens": 500, "temperature": 1.0, "seed": 3,
        "extra_body": {"ignore_eos": True}}


@contextlib.contextmanager
def scripted(model_directory: Path, factory: str = "build_paced", **flags: Any) -> Iterator[RunningServer]:
    with running_server(factory, engine={"model": str(model_directory)}, server=flags) as server:
        yield server


def sung(server: RunningServer, **more: Any) -> str:
    text: str = server.client().completions.create(**{**SUNG, **more}).choices[0].text
    return text


def sung_and_killed(server: RunningServer) -> str:
    """The same, and the engine is killed after some tokens."""
    stream = server.client().completions.create(**SUNG, stream=True)
    text = ""
    for chunk in stream:
        text += chunk.choices[0].text
        if len(text) > 50 and not resumes(server):
            os.kill(server.engine_pid(), signal.SIGKILL)
            assert eventually(lambda: resumes(server) == 1)
    return text


def test_a_resume_at_another_position_is_noticed(model_directory: Path) -> None:
    with scripted(model_directory) as server:
        undisturbed = sung(server)
        assert sung_and_killed(server) == undisturbed
    with scripted(model_directory, "build_forgetful") as server:
        assert sung(server) == undisturbed
        assert sung_and_killed(server) != undisturbed


def test_a_deadly_request_is_refused_and_its_neighbours_go_on(model_directory: Path) -> None:
    with scripted(model_directory) as server:
        undisturbed = sung(server)
        neighbours = [Background(server, max_tokens=1500) for _ in range(3)]
        assert eventually(lambda: server.running() == 3)
        deadly = Background(server, messages=[{"role": "user", "content": "crash"}])
        refused = deadly.result()
        assert refused.status_code == 422
        assert refused.json()["error"]["code"] == "request_killed_engines"
        assert "2 engines in a row" in refused.json()["error"]["message"]
        texts = {one.result().json()["choices"][0]["message"]["content"] for one in neighbours}
        assert len(texts) == 1
        assert [one.result().json()["usage"]["completion_tokens"] for one in neighbours] == [1500] * 3
        assert restarts(server) == 2
        assert "request_deadly_total" in server.get("/metrics").text
        assert sung(server) == undisturbed


def test_a_stopped_engine_goes_on_or_is_replaced(model_directory: Path) -> None:
    with scripted(model_directory, stall_after=1.5) as server:
        undisturbed = sung(server)
        running = Background(server, max_tokens=1500)
        assert eventually(lambda: server.running() == 1)
        stopped = server.engine_pid()
        os.kill(stopped, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(stopped, signal.SIGCONT)
        assert running.result().json()["usage"]["completion_tokens"] == 1500
        assert restarts(server) == 0
        stream = server.client().completions.create(**SUNG, stream=True)
        text = next(stream).choices[0].text
        os.kill(stopped, signal.SIGSTOP)
        assert eventually(lambda: server.get("/health").json()["status"] == "degraded")
        health = server.get("/health")
        assert health.status_code == 200
        assert "stalled" in health.json()["reason"]
        assert "--stall-after" in health.json()["reason"]
        assert text + "".join(chunk.choices[0].text for chunk in stream) == undisturbed
        assert restarts(server) == 1
        assert server.get("/health").json() == {"status": "ok"}


def test_a_client_may_leave_and_come_while_the_engine_restarts(model_directory: Path) -> None:
    with scripted(model_directory) as server:
        undisturbed = sung(server, max_tokens=40)
        with httpx.stream("POST", f"{server.url}/v1/completions", json={
                "prompt": "sing", "max_tokens": 1500, "stream": True}) as leaving:
            next(leaving.iter_lines())
            os.kill(server.engine_pid(), signal.SIGKILL)
            assert eventually(lambda: server.get("/health").json()["status"] == "degraded")
        assert eventually(lambda: server.running() == 0)
        assert server.get("/load").json()["server_load"] == 0
        assert server.get("/v1/cache").status_code == 503
        assert sung(server, max_tokens=40) == undisturbed, "a request that comes meanwhile waits"
        assert server.running() == 0


def test_a_restart_that_fails_uses_up_an_attempt_and_then_the_server_ends(tmp_path: Path) -> None:
    with scripted(write_model_directory(tmp_path), "build_once", restarts=2) as server:
        streamed = Background(server, stream=True)
        assert eventually(lambda: server.running() == 1)
        os.kill(server.engine_pid(), signal.SIGKILL)
        events = events_of(streamed.result())
        assert "has gone since" in events[-2]["error"]["message"]
        assert server.exit_code() == 1
        output = server.rest_of_output()
    assert "restart 2 of 2" in output
    assert "error: model.safetensors has gone since" in output
