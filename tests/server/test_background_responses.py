"""Responses in the background: polled, followed, cancelled, deleted; and what becomes of them at a death."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.running import RunningServer, eventually, running_server
from tests.server.test_responses import EVENTS

LONG_TOKENS = 1500
LONG = {"input": "sing", "max_output_tokens": LONG_TOKENS}
"""Some seconds of the slow engine."""
KEY = {"Authorization": "Bearer one"}


def served(directory: Path, path: Path) -> Any:
    return running_server(
        "build_slow",
        engine={"model": str(directory)},
        server={"response_store": str(path), "api_key": ["one", "two"], "drain_timeout": 0.1},
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "responses.sqlite"


@pytest.fixture(scope="module")
def server(model_directory: Path, path: Path) -> Iterator[RunningServer]:
    with served(model_directory, path) as running:
        yield running


def client(server: RunningServer, key: str = "one") -> openai.OpenAI:
    return server.client(api_key=key)


def begin(server: RunningServer, **body: Any) -> Any:
    return client(server).responses.create(model="default", background=True, **body)


def ended(server: RunningServer, response_id: str) -> Any:
    responses = client(server).responses
    assert eventually(lambda: responses.retrieve(response_id).status not in ("queued", "in_progress"))
    return responses.retrieve(response_id)


def test_a_response_is_polled_and_continued(server: RunningServer) -> None:
    first = begin(server, input="say:well done")
    assert (first.status, first.background, first.output) == ("queued", True, [])
    done = ended(server, first.id)
    assert (done.status, done.output_text, done.usage.output_tokens) == ("completed", "well done", 10)
    with pytest.raises(openai.NotFoundError):
        client(server, "two").responses.retrieve(first.id)
    second = client(server).responses.create(model="default", input="say:yes", previous_response_id=first.id)
    assert second.usage.input_tokens > done.usage.input_tokens + done.usage.output_tokens
    cut = ended(server, begin(server, input="sing", max_output_tokens=3).id)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_events_are_followed_from_any_number(server: RunningServer) -> None:
    seen: list[Any] = []
    with begin(server, input="say:one two three four", stream=True) as stream:
        for event in stream:
            seen.append(event)
            if len(seen) == 6:
                break  # the client leaves, and the response goes on
    response_id = seen[0].response.id
    for starting_after in (seen[-1].sequence_number, 2):
        rest = client(server).responses.retrieve(response_id, stream=True, starting_after=starting_after)
        events = [*seen[: starting_after + 1], *rest]
        assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:
        EVENTS.validate_python(event.to_dict(), strict=True)
    assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == "one two three four"
    assert ended(server, response_id).output_text == "one two three four"
    unfollowed = begin(server, input="say:x")
    with pytest.raises(openai.BadRequestError, match="stream"):
        list(client(server).responses.retrieve(unfollowed.id, stream=True))


def test_a_response_is_cancelled_and_its_engine_is_free(server: RunningServer) -> None:
    with server.ends_early(LONG_TOKENS, headers=KEY):
        response = begin(server, **LONG)
        with pytest.raises(openai.BadRequestError, match="not finished"):
            begin(server, input="more", previous_response_id=response.id)
        with pytest.raises(openai.NotFoundError):
            client(server, "two").responses.cancel(response.id)
        assert client(server).responses.cancel(response.id).status == "cancelled"
        assert client(server).responses.cancel(response.id).status == "cancelled"
        assert ended(server, response.id).status == "cancelled"
    done = begin(server, input="say:x")
    ended(server, done.id)
    with pytest.raises(openai.BadRequestError, match="it is completed"):
        client(server).responses.cancel(done.id)


def test_a_response_is_deleted_while_it_is_computed(server: RunningServer) -> None:
    with server.ends_early(LONG_TOKENS, headers=KEY):
        response = begin(server, **LONG)
        client(server).responses.delete(response.id)
        with pytest.raises(openai.NotFoundError):
            client(server).responses.retrieve(response.id)


@pytest.mark.parametrize(
    ("change", "param"), [({"store": False}, "background"), ({"max_output_tokens": 0}, "max_output_tokens")]
)
def test_what_cannot_be_is_refused(server: RunningServer, change: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        begin(server, **{"input": "say:x", **change})
    assert refusal.value.param == param


@pytest.mark.parametrize("query", ["stream=maybe", "stream=true&starting_after=x", "starting_after=-2"])
def test_a_bad_query_names_its_field(server: RunningServer, query: str) -> None:
    answer = httpx.get(f"{server.url}/v1/responses/resp_1?{query}", headers={"Authorization": "Bearer one"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in query


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_the_next_server_knows_what_became_of_responses(
    model_directory: Path, tmp_path: Path, end: signal.Signals
) -> None:
    path = tmp_path / "responses.sqlite"
    with served(model_directory, path) as first:
        done, cut = begin(first, input="say:kept"), begin(first, **LONG)
        ended(first, done.id)
        with served(model_directory, path) as other:
            assert client(other).responses.retrieve(cut.id).status == "queued", "its server lives"
        os.killpg(first.process.pid, end) if end == signal.SIGKILL else first.process.send_signal(end)
        first.process.wait(20)
        time.sleep(0.1)
        with served(model_directory, path) as second:
            assert client(second).responses.retrieve(done.id).output_text == "kept"
            failed = client(second).responses.retrieve(cut.id)
            assert failed.status == "failed"
            assert failed.error.code == "server_error"
            assert client(second).responses.retrieve(cut.id).status == "failed"
