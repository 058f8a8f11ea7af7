"""A budget of reasoning tokens over HTTP: exact in all four APIs, whatever happens to the engine."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.checkpoints import checkpoint
from tests.server.running import RunningServer, running_server

TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n<think>\n"
    "{%- if enable_thinking is defined and not enable_thinking -%}\n</think>\n\n{%- endif -%}{%- endif -%}"
)
QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]
MARKERS = 1
"""Tokens of the reasoning that are no reasoning: the end marker."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real model with random weights whose template opens the reasoning, and which has both markers as tokens."""
    made = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(checkpoint("qwen3_5"), made)
    tokenizer = json.loads((made / "tokenizer.json").read_text())
    pieces = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    last = len(pieces) - 1
    for token, marker in ((last - 1, "<think>"), (last, "</think>")):
        old = pieces[token]
        tokenizer["model"]["vocab"][marker] = tokenizer["model"]["vocab"].pop(old)
        tokenizer["model"]["merges"] = [
            merge for merge in tokenizer["model"]["merges"] if "".join(merge).replace(" ", "") != old
        ]
        like = dict(tokenizer["added_tokens"][0], id=token, content=marker)
        tokenizer["added_tokens"].append(like)
    (made / "tokenizer.json").write_text(json.dumps(tokenizer))
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[RunningServer]:
    engine = {"model": str(directory), "threads": 1, "max_model_len": 1024, "memory": "4MB", "speculate": "auto"}
    with running_server("", engine=engine) as running:
        yield running


def chat(server: RunningServer, **fields: Any) -> dict[str, Any]:
    body = {"messages": QUESTION, "max_tokens": 80, "temperature": 0, **fields}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return said


def reasoned(said: dict[str, Any]) -> int:
    return int(said["usage"]["completion_tokens_details"]["reasoning_tokens"])


@pytest.mark.parametrize("budget", [0, 1, 17, 500])
def test_an_answer_reasons_exactly_so_long_and_then_answers(server: RunningServer, budget: int) -> None:
    said = chat(server, thinking_token_budget=budget, max_tokens=budget + 40)
    [choice] = said["choices"]
    assert reasoned(said) == budget + MARKERS
    assert choice["message"]["content"]
    assert "think>" not in choice["message"]["content"]
    assert bool(choice["message"].get("reasoning")) == bool(budget)


def test_without_a_budget_it_would_have_gone_on(server: RunningServer) -> None:
    """The control."""
    assert reasoned(chat(server)) == 80


def test_a_schema_holds_after_the_budget(server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    said = chat(
        server,
        thinking_token_budget=17,
        max_tokens=120,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    assert json.loads(said["choices"][0]["message"]["content"])["n"] in (1, 2)
    assert reasoned(said) == 17 + MARKERS


def test_each_api_has_its_own_name_for_it(server: RunningServer) -> None:
    import anthropic  # here: it has 3,200 modules, two seconds of each worker

    for fields in ({"reasoning": {"max_tokens": 17}}, {"reasoning": {"max_tokens": 3}, "thinking_token_budget": 17}):
        assert reasoned(chat(server, **fields)) == 17 + MARKERS
    assert not chat(server, reasoning={"max_tokens": 17, "exclude": True})["choices"][0]["message"].get("reasoning")
    off = chat(server, reasoning={"enabled": False, "max_tokens": 17})
    assert reasoned(off) == 0
    response = server.post(
        "/v1/responses",
        {"input": "Why?", "max_output_tokens": 80, "reasoning": {"max_tokens": 17}, "store": False, "temperature": 0},
    ).json()
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 17 + MARKERS
    client = anthropic.Anthropic(base_url=server.url, api_key="any")
    message = client.messages.with_raw_response.create(
        model="default",
        max_tokens=80,
        messages=[{"role": "user", "content": "Why is the sky blue?"}],
        thinking={"type": "enabled", "budget_tokens": 17},
    )
    assert [block.type for block in message.parse().content] == ["thinking", "text"]
    assert "x-weft-ignored" not in message.headers
    low = server.post(
        "/api/chat",
        {"model": "default", "messages": QUESTION, "think": "low", "stream": False, "options": {"num_predict": 40}},
    )
    assert low.status_code == 200, low.text
    assert "x-weft-ignored" not in low.headers, "a template that reads no level bounds the reasoning instead"


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/chat/completions", {"thinking_token_budget": -1}, "thinking_token_budget is -1; it may be 0 to"),
        ("/v1/chat/completions", {"reasoning": {"max_tokens": -2}}, "reasoning.max_tokens is -2"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": "many"}}, "thinking.budget_tokens"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": -3}}, "thinking.budget_tokens is -3"),
    ],
)
def test_a_budget_that_is_none_is_refused_by_its_name(
    server: RunningServer, path: str, body: dict[str, Any], said: str
) -> None:
    answer = server.post(path, {"messages": QUESTION, "max_tokens": 8, **body})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_a_stream_that_outlives_its_engine_keeps_its_budget(server: RunningServer) -> None:
    fields: dict[str, Any] = {"extra_body": {"thinking_token_budget": 300}, "max_tokens": 340, "temperature": 0}
    whole = chat(server, thinking_token_budget=300, max_tokens=340)["choices"][0]["message"]
    stream = server.client().chat.completions.create(model="default", messages=QUESTION, stream=True, **fields)  # type: ignore[call-overload]
    texts, killed = {"reasoning": "", "content": ""}, False
    for chunk in stream:
        if not chunk.choices:
            continue
        delta = chunk.choices[0].delta
        texts["reasoning"] += getattr(delta, "reasoning", None) or ""
        texts["content"] += delta.content or ""
        if len(texts["reasoning"]) > 10 and not killed:
            os.kill(server.engine_pid(), signal.SIGKILL)
            killed = True
    assert killed
    assert (texts["reasoning"], texts["content"]) == (whole["reasoning"], whole["content"])
