"""The whole way once: a tiny checkpoint in Hugging Face format, the real engine, the real client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fixtures.checkpoints import checkpoint, load_reference
from tests.server.running import RunningServer, eventually, running_server

PROMPT_TOKENS = [(7 * i * i + 3 * i) % 500 for i in range(70)]
ANSWER_TOKENS = 24


@pytest.fixture(scope="module")
def directory() -> Path:
    return checkpoint("qwen3_5")


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[RunningServer]:
    engine = {"model": str(directory), "memory": "32MB", "threads": 1, "max_model_len": 512}
    with running_server("", engine=engine) as running:
        yield running


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[int]:
    """Greedy tokens by transformers."""
    model = load_reference(directory)
    tokens = list(PROMPT_TOKENS)
    with torch.inference_mode():
        for _ in range(ANSWER_TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT_TOKENS) :]


def asked(**more: Any) -> dict[str, Any]:
    extra = {"return_token_ids": True, "ignore_eos": True}
    return {
        "model": "default",
        "prompt": PROMPT_TOKENS,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "extra_body": extra,
        **more,
    }


def test_the_tokens_over_http_are_those_of_transformers(server: RunningServer, expected: list[int]) -> None:
    choice = server.client().completions.create(**asked()).choices[0]
    assert choice.token_ids == expected
    assert choice.prompt_token_ids == PROMPT_TOKENS


def test_a_stream_has_the_same_tokens_and_text(server: RunningServer, expected: list[int]) -> None:
    client = server.client()
    whole = client.completions.create(**asked()).choices[0].text
    chunks = [chunk.choices[0] for chunk in client.completions.create(**asked(stream=True))]
    assert [token for chunk in chunks for token in chunk.token_ids] == expected
    assert "".join(chunk.text for chunk in chunks) == whole


async def test_thirty_two_at_once_have_the_same_tokens(server: RunningServer, expected: list[int]) -> None:
    client = server.async_client()
    answers = await asyncio.gather(*(client.completions.create(**asked()) for _ in range(32)))
    assert [answer.choices[0].token_ids for answer in answers] == [expected] * 32


def test_a_seed_gives_the_same_text_alone_and_in_company(server: RunningServer) -> None:
    client = server.client()

    def draw(**more: Any) -> list[str]:
        answer = client.completions.create(**asked(temperature=0.8, seed=11, **more))
        return [choice.text for choice in answer.choices]

    alone = draw()[0]
    both = [PROMPT_TOKENS, PROMPT_TOKENS[5:]]
    company = client.completions.create(**asked(prompt=both, temperature=0.8, seed=11))
    assert company.choices[0].text == alone
    assert draw(n=2)[0] != draw(n=2)[1]


def test_chat_answers_and_counts(server: RunningServer) -> None:
    answer = server.client().chat.completions.create(
        model="default", messages=[{"role": "user", "content": "Hello"}], max_tokens=8, logprobs=True, top_logprobs=2
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 8
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    top = answer.choices[0].logprobs.content[0].top_logprobs
    assert top[0].logprob >= top[1].logprob
    assert eventually(lambda: server.running() == 0)


def test_too_long_is_an_error_with_both_numbers(server: RunningServer) -> None:
    response = server.post("/v1/completions", {"prompt": [1] * 600})
    assert response.status_code == 400
    assert "600" in response.json()["error"]["message"]
    assert "512" in response.json()["error"]["message"]


def test_allowed_tokens_are_the_only_ones(server: RunningServer, expected: list[int]) -> None:
    allowed = sorted(set(range(60, 200)) - set(expected))[:5]
    answer = (
        server.client()
        .completions.create(**asked(extra_body={"return_token_ids": True, "allowed_token_ids": allowed}))
        .choices[0]
    )
    assert set(answer.token_ids) <= set(allowed)
    assert (len(answer.token_ids), answer.finish_reason) == (ANSWER_TOKENS, "length")


def test_bad_words_do_not_come_and_other_tokens_stay(server: RunningServer, expected: list[int]) -> None:
    words = server.post("/detokenize", {"tokens": expected[2:4]}).json()["prompt"].strip()
    assert words
    answer = (
        server.client()
        .completions.create(**asked(extra_body={"return_token_ids": True, "ignore_eos": True, "bad_words": [words]}))
        .choices[0]
    )
    assert words not in answer.text
    assert answer.token_ids[:2] == expected[:2]
    # The control: without the field, the words come.
    assert words in server.client().completions.create(**asked()).choices[0].text


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"truncate_prompt_tokens": 9}, PROMPT_TOKENS[-9:]),
        ({"truncate_prompt_tokens": 9, "truncation_side": "right"}, PROMPT_TOKENS[:9]),
        ({"truncate_prompt_tokens": -1}, PROMPT_TOKENS),
        ({"truncate_prompt_tokens": 500}, PROMPT_TOKENS),
    ],
)
def test_a_prompt_is_cut_where_the_client_asks(
    server: RunningServer, fields: dict[str, Any], tokens: list[int]
) -> None:
    extra = {"return_token_ids": True, "echo": True, **fields}
    answer = server.client().completions.create(**asked(extra_body=extra, max_tokens=1)).choices[0]
    assert answer.prompt_token_ids == tokens
    text = server.post("/detokenize", {"tokens": [*tokens, *answer.token_ids]}).json()["prompt"]
    assert answer.text == text


def test_minus_one_cuts_to_the_room_beside_the_answer(server: RunningServer) -> None:
    body = {"prompt": [5] * 600, "max_tokens": 12, "truncate_prompt_tokens": -1, "ignore_eos": True}
    usage = server.post("/v1/completions", body).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (500, 12)
    # The control: without the field this is an error.
    assert server.post("/v1/completions", {**body, "truncate_prompt_tokens": None}).status_code == 400
