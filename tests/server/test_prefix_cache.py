"""What a client sees of the prefix cache, over HTTP with a tiny model: usage, sizes, metrics, flushing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fixtures.checkpoints import checkpoint
from tests.server.running import RunningServer, eventually, running_server
from weft.cli.main import main
from weft.cli.top import read_metrics
from weft.errors import ConfigError
from weft.server.config import ServerConfig

SYSTEM = "You keep one slot for each running sequence and pages for its tokens. " * 12


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    engine = {"model": str(checkpoint("qwen3_5")), "memory": "32MB", "threads": 1, "max_model_len": 1024}
    with running_server("", engine=engine) as running:
        yield running


def chat(server: RunningServer, question: str, **more: Any) -> Any:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return server.client().chat.completions.create(
        model="default", messages=messages, max_tokens=4, temperature=0, extra_body=more
    )  # type: ignore[arg-type]


def cached_tokens(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def test_the_second_question_under_a_system_prompt_does_not_pay_for_it(server: RunningServer) -> None:
    """And the third does not: the chat layer said where the system prompt ends, so the first one kept it."""
    system_tokens = server.post("/tokenize", {"prompt": SYSTEM}).json()["count"]
    salt = {"cache_salt": "what this test alone computes"}
    first = chat(server, "What turns the mill? Say it slowly, and then say it again, please.", **salt)
    assert cached_tokens(first) == 0
    for question in ("Which key is red?", "And the river? " * 20):
        answer = chat(server, question, **salt)
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


def test_a_page_of_another_site_cannot_flush_the_cache(server: RunningServer) -> None:
    chat(server, "a question")
    answer = server.post("/v1/cache/flush", {}, headers={"Origin": "https://elsewhere.example"})
    assert answer.status_code == 403
    assert "https://elsewhere.example" in answer.json()["error"]["message"]
    assert server.get("/v1/cache").json()["bytes"] > 0
    own = server.url.partition("://")[2]
    assert server.post("/v1/cache/flush", {}, headers={"Origin": f"http://{own}"}).status_code == 200


def test_metrics_say_what_was_found_and_what_was_lost(server: RunningServer) -> None:
    chat(server, "a question")
    chat(server, "a question")
    reading = read_metrics(server.get("/metrics").text, 0.0)
    assert reading.values["prefix_cache_hits_total"] > 0
    assert reading.values["prefix_cache_state_bytes"] > 0
    reasons = set(reading.by_label["prefix_cache_lost_tokens_total"])
    assert reasons == {"no_checkpoint", "evicted_state", "evicted_kv", "not_ready"}, "salt only if asked for"
    arena = server.get("/v1/cache").json()["memory_bytes"]
    assert reading.by_label["memory_bytes"].keys() == arena.keys()
    assert reading.by_label["memory_bytes"]["cached_states"] > 0
    assert reading.by_label["prefix_cache_evictions_total"].keys() == {"state", "tail", "page"}
    assert reading.by_label["compaction_moves_total"].keys() == {"state", "page"}


def test_the_cache_tells_its_shape_and_no_text(server: RunningServer) -> None:
    for question in ("one", "two"):
        chat(server, question, cache_salt="tenant 7")
    # An answer may be as old as the engine may be asked again.
    assert eventually(lambda: server.get("/v1/cache").json()["tree"]["salt_count"] > 0, 30.0)
    found = server.get("/v1/cache").json()
    tree = found["tree"]
    assert tree["prefixes"][0]["tokens"] >= 64
    assert sum(one["nodes"] for one in tree["by_depth"]) <= found["nodes"]
    assert "tenant" not in str(found)
    assert {"text", "head"}.isdisjoint(tree["prefixes"][0])
    assert len({one["label"] for one in tree["prefixes"]}) == len(tree["prefixes"])
    assert tree["prefixes"][0]["tokens_saved"] >= 64
    ages = [one["age_s"] for one in tree["prefixes"]]
    assert ages == sorted(ages)


# ---------------------------------------------------------------------- what a client marks, and is told

HERE = {"type": "ephemeral"}


def ask(server: RunningServer, *parts: dict[str, Any], **more: Any) -> Any:
    messages = [{"role": "user", "content": list(parts)}]
    return server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2, "temperature": 0, **more}).json()


def details(answer: Any) -> Any:
    return answer["usage"]["prompt_tokens_details"]


@pytest.mark.parametrize("marked", [True, False])
def test_a_marked_part_of_a_message_is_kept_and_found_by_the_second_request(
    server: RunningServer, *, marked: bool
) -> None:
    """Inside a message there is no boundary that the chat layer could find by itself."""
    handbook = {"type": "text", "text": SYSTEM, **({"cache_control": HERE} if marked else {})}
    salt = f"marked {marked}"
    for question in ("first " * 40, "second " * 40):
        answer = ask(server, handbook, {"type": "text", "text": question}, cache_salt=salt)
    found = details(answer)
    kept = server.post("/tokenize", {"prompt": SYSTEM}).json()["count"]
    if marked:
        assert found["cached_tokens"] > kept - 64
        assert found["lost_tokens"]["no_checkpoint"] < 64
    else:
        assert found["cached_tokens"] == 0
        assert found["lost_tokens"]["no_checkpoint"] > kept - 64, "its KV was there"
    assert found["recomputed_tokens"] == 0


def test_positions_in_tokens_are_marked_in_completions_and_chat(server: RunningServer) -> None:
    prompt = list(range(5, 305))
    for ending in ([1, 2, 3], [4, 5, 6]):
        body = {"prompt": prompt + ending * 20, "cache_boundaries": [200, 70], "cache_salt": "positions"}
        answer = server.post("/v1/completions", {**body, "max_tokens": 1}).json()
    assert details(answer)["cached_tokens"] == 192
    said = {"type": "text", "text": SYSTEM}
    for question in ("first " * 40, "second " * 40):
        part = {"type": "text", "text": question}
        answer = ask(server, said, part, cache_boundaries=[130], cache_salt="chat")
    assert details(answer)["cached_tokens"] == 128


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"cache_boundaries": [5000]}, "cache_boundaries is 5000; it must be at least 1 and at most"),
        ({"cache_boundaries": [0]}, "cache_boundaries is 0"),
        ({"cache_boundaries": [1] * 33}, "33 positions; the limit is 32"),
        ({"cache_boundaries": "64"}, "cache_boundaries: expected array"),
    ],
)
def test_marks_that_cannot_be_are_refused_with_the_limit(
    server: RunningServer, body: dict[str, Any], says: str
) -> None:
    response = server.post("/v1/completions", {"prompt": "hello", "max_tokens": 1, **body})
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "cache_boundaries"


def test_too_many_or_unknown_cache_controls_are_refused(server: RunningServer) -> None:
    part = {"type": "text", "text": "a", "cache_control": HERE}
    assert "9 places; the limit is 8" in ask(server, *[part] * 9)["error"]["message"]
    wrong = ask(server, {**part, "cache_control": {"type": "eternal"}})["error"]
    assert wrong["param"] == "messages[0].content[0].cache_control"


# ---------------------------------------------------------------------- weft top


def test_top_shows_one_frame_of_a_running_server(
    server: RunningServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chat(server, "one")
    chat(server, "two")
    monkeypatch.setenv("COLUMNS", "100")
    assert eventually(lambda: bool(server.get("/v1/cache").json()["tree"]["prefixes"]), 30.0)
    assert main(["top", "--url", server.url, "--once"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "qwen3_5 at http",
        "up",
        "tokens generated",
        "KV of running requests",
        "biggest prefixes",
        "lost: being computed",
        "state kept",
    ):
        assert words in shown, f"{words}\n{shown}"


def test_top_says_when_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", "http://127.0.0.1:9", "--once"]) == 2
    assert "nothing answers at http://127.0.0.1:9" in capsys.readouterr().err


def test_the_operator_alone_sees_text_and_only_if_asked_for() -> None:
    engine = {"model": str(checkpoint("qwen3_5")), "memory": "32MB", "threads": 1, "max_model_len": 1024}
    settings = {"api_key": ["client"], "operator_key": ["boss"], "show_text": True}
    with running_server("", engine=engine, server=settings) as running:
        client, boss = ({"Authorization": f"Bearer {key}"} for key in ("client", "boss"))
        for _ in range(2):
            assert (
                running.post(
                    "/v1/completions", {"prompt": "a lighthouse at sea, " * 20, "max_tokens": 2}, headers=client
                ).status_code
                == 200
            )

        def prefixes() -> list[dict[str, Any]]:
            return list(running.get("/v1/cache", headers=boss).json()["tree"]["prefixes"])

        assert eventually(lambda: bool(prefixes()), 30.0)
        [prefix, *_] = prefixes()
        assert prefix["text"].startswith("a lighthouse at sea")
        assert running.get("/v1/cache", headers=client).status_code == 403
    with pytest.raises(ConfigError, match="--operator-key"):
        ServerConfig(show_text=True).check()
