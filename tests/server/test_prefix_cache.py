"""What a client sees of the prefix cache, over HTTP with a tiny model: usage, sizes, metrics, flushing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.checkpoints import checkpoint
from tests.server.running import RunningServer, running_server

SYSTEM = "You keep one slot for each running sequence and pages for its tokens. " * 12


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    engine = {"model": str(checkpoint("qwen3_5")), "memory": "32MB", "threads": 1, "max_model_len": 1024}
    with running_server("", engine=engine) as running:
        yield running


def chat(server: RunningServer, question: str, **more: Any) -> Any:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return server.client().chat.completions.create(model="default", messages=messages, max_tokens=4,
                                                   temperature=0, extra_body=more)  # type: ignore[arg-type]


def cached_tokens(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def test_the_second_question_under_a_system_prompt_does_not_pay_for_it(server: RunningServer) -> None:
    """And the third does not: the chat layer said where the system prompt ends, so the first one kept it."""
    system_tokens = server.post("/tokenize", {"prompt": SYSTEM}).json()["count"]
    first = chat(server, "What turns the mill? Say it slowly, and then say it again, please.")
    assert cached_tokens(first) == 0
    for question in ("Which key is red?", "And the river? " * 20):
        answer = chat(server, question)
        assert system_tokens - 64 <= cached_tokens(answer) < answer.usage.prompt_tokens


def test_another_salt_pays_itself(server: RunningServer) -> None:
    chat(server, "one")
    assert cached_tokens(chat(server, "two", cache_salt="tenant")) == 0
    assert cached_tokens(chat(server, "three", cache_salt="tenant")) > 0


def test_the_cache_tells_its_sizes_and_is_flushed(server: RunningServer) -> None:
    chat(server, "a question " * 10)
    before = server.get("/v1/cache").json()
    assert before["bytes"] > 0
    assert before["pages"] > 0
    assert before["states"] > 0
    assert before["counts"]["opened"] > 0
    assert SYSTEM[:10] not in str(before)
    after = server.post("/v1/cache/flush", {}).json()
    assert (after["bytes"], after["pages"], after["states"]) == (0, 0, 0)
    assert cached_tokens(chat(server, "a question " * 10)) == 0


def test_metrics_say_what_was_found_and_what_was_lost(server: RunningServer) -> None:
    chat(server, "a question")
    chat(server, "a question")
    text = server.get("/metrics").text
    values = {line.split(" ")[0].replace('model_name="qwen3_5",', ""): float(line.split(" ")[1])
              for line in text.splitlines() if "cache" in line and not line.startswith("#")}
    assert sum(value for name, value in values.items() if "prefix_cache_hits_total" in name) > 0
    assert sum(value for name, value in values.items() if "prefix_cache_state_bytes" in name) > 0
    assert {"no_checkpoint", "evicted_state", "evicted_kv"} == {
        reason for reason in ("no_checkpoint", "evicted_state", "evicted_kv")
        if any("lost_tokens" in name and reason in name for name in values)}
