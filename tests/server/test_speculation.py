"""Speculation over HTTP, on the embedded model: the same answers, counted drafts, and ``prediction``."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from tests.server.running import RunningServer, running_server
from weft.cli.top import frame, read_metrics

LIST = "\n".join(
    f"{name}: {7000 + 37 * at}" for at, name in enumerate(("Oshan", "Imre", "Ulla", "Vero", "Kasp", "Bri"))
)
MESSAGES = [{"role": "user", "content": f"Remember this list.\n{LIST}\nWhat is the number of Vero?"}]
ENGINE = {"memory": "64MB", "threads": 1, "max_model_len": 1024}


LEAST_ACCEPTED = 10
"""Of 60 tokens. How many are drafted depends on what steps cost on this machine: some steps stay plain, to be
measured, and more of them beside other work."""


@pytest.fixture(scope="module")
def plain() -> Iterator[RunningServer]:
    with running_server("", engine={**ENGINE, "speculate": "off"}) as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("build_embedded_with_free_drafts", engine={**ENGINE, "speculate": "auto"}) as running:
        yield running


def chat(server: RunningServer, **more: Any) -> Any:
    extra = {"ignore_eos": True, "return_token_ids": True, **more.pop("extra_body", {})}
    return server.client().chat.completions.create(
        model="default", messages=MESSAGES, extra_body=extra, **{"max_tokens": 60, "temperature": 0.0, **more}
    )


def texts(answer: Any) -> list[str]:
    return [choice.message.content for choice in answer.choices]


def details(answer: Any) -> tuple[int, int]:
    counts = answer.usage.completion_tokens_details
    return counts.accepted_prediction_tokens, counts.rejected_prediction_tokens


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.7, "seed": 9, "n": 3, "presence_penalty": 0.5},
        {"logprobs": True, "top_logprobs": 3},
        {"stop": ["7"], "extra_body": {"ignore_eos": False}},
        {"extra_body": {"ignore_eos": False, "guided_regex": "(Vero|Bri): [0-9]{4}\\. I have it\\."}},
    ],
)
def test_predictions_right_and_wrong_change_no_answer(
    plain: RunningServer, server: RunningServer, sampling: dict[str, Any]
) -> None:
    expected = chat(plain, **sampling)
    right = {"type": "content", "content": texts(expected)[0]}
    wrong = {"type": "content", "content": [{"type": "text", "text": LIST}, {"type": "text", "text": "?"}]}
    for prediction in (right, wrong, right):
        answer = chat(server, **sampling, prediction=prediction)
        assert texts(answer) == texts(expected)
        assert answer.usage.completion_tokens == expected.usage.completion_tokens
        if sampling.get("logprobs"):
            assert [
                [entry.token for entry in content.top_logprobs] for content in answer.choices[0].logprobs.content
            ] == [[entry.token for entry in content.top_logprobs] for content in expected.choices[0].logprobs.content]


def test_a_right_prediction_is_accepted_and_counted(plain: RunningServer, server: RunningServer) -> None:
    expected = chat(plain)
    assert details(expected) == (0, 0)
    prediction = {"type": "content", "content": texts(expected)[0]}
    answer = chat(server, prediction=prediction, extra_body={"cache_salt": "own"})
    accepted, rejected = details(answer)
    assert accepted > LEAST_ACCEPTED
    assert accepted > rejected
    *_, last = chat(
        server,
        prediction=prediction,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"cache_salt": "own"},
    )
    assert details(last)[0] > LEAST_ACCEPTED


def test_a_repeated_question_is_answered_from_the_tree_of_its_salt_alone(server: RunningServer) -> None:
    def accepted_from_the_tree(salt: str) -> float:
        chat(server, extra_body={"cache_salt": salt})
        reading = read_metrics(server.get("/metrics").text, 0.0)
        return reading.by_label["spec_decode_num_accepted_tokens_total"]["tree"]

    first = accepted_from_the_tree("tree-a")
    again = accepted_from_the_tree("tree-a")
    assert again > first
    assert accepted_from_the_tree("tree-b") == again


def test_metrics_and_top_show_drafts_by_source(plain: RunningServer, server: RunningServer) -> None:
    chat(server, prediction={"type": "content", "content": LIST})
    reading = read_metrics(server.get("/metrics").text, 0.0)
    drafted = reading.by_label["spec_decode_num_draft_tokens_total"]
    accepted = reading.by_label["spec_decode_num_accepted_tokens_total"]
    assert set(drafted) == set(accepted) == {"prediction", "grammar", "tree", "suffix", "mtp"}
    assert drafted["prediction"] >= accepted["prediction"] > 0
    assert reading.values["spec_decode_num_drafts_total"] > 0
    shown = _lines(frame("", reading, None, {}))
    assert any(line.startswith("speculation") for line in shown)
    assert any(line.startswith("prediction") for line in shown)
    assert not any(
        line.startswith("speculation")
        for line in _lines(frame("", read_metrics(plain.get("/metrics").text, 0.0), None, {}))
    )


def _lines(screen: Any) -> list[str]:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(screen)
    return console.export_text().splitlines()
