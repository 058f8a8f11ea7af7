"""/v1/messages with the real anthropic client: whole answers, streams, tools, thinking, errors and usage.

The engine says what the prompt tells it to, one byte per token, so every marker arrives in pieces.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest

from tests.fixtures.checkpoints import checkpoint
from tests.server.running import RunningServer, running_server
from tests.server.scripted_engine import MAX_MODEL_LEN, write_model_directory
from tests.server.test_tools import CALL, TEMPLATES, stop_at_end
from weft.errors import RequestError
from weft.server.anthropic.answers import cache_marked, messages_turn
from weft.server.anthropic.protocol import UNSERVED_IN_MESSAGES, MessagesBody
from weft.server.chat_turn import ChatTurn
from weft.server.protocol import parse_body

if TYPE_CHECKING:
    import anthropic

WEATHER: Any = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    template = stop_at_end((TEMPLATES / "hermes_think.jinja").read_text())
    template = template.replace("{{- '<think>\\n\\n</think>\\n\\n' }}", "")  # the script would repeat it
    directory = write_model_directory(tmp_path_factory.mktemp("hermes"), template=template)
    with running_server("build_paced", engine={"model": str(directory)}) as running:
        yield running


@pytest.fixture(scope="module")
def cached() -> Iterator[RunningServer]:
    engine = {"model": str(checkpoint("qwen3_5")), "memory": "32MB", "threads": 1, "max_model_len": 1024}
    with running_server("", engine=engine) as running:
        yield running


def client(server: RunningServer) -> anthropic.Anthropic:
    import anthropic  # here: it has 3,200 modules, two seconds of each worker

    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def ask(server: RunningServer, say: str, **more: Any) -> Any:
    return client(server).messages.create(
        model="scripted", max_tokens=400, **{"messages": [{"role": "user", "content": f"say:{say}"}], **more}
    )


def stream(server: RunningServer, say: str, **more: Any) -> tuple[list[str], Any]:
    """The types of the events, and the message that the client assembles from them."""
    with client(server).messages.stream(
        model="scripted", max_tokens=400, **{"messages": [{"role": "user", "content": f"say:{say}"}], **more}
    ) as events:
        kinds = [
            event.type
            for event in events
            if event.type not in ("text", "thinking", "input_json", "content_block_delta", "signature")
        ]
        return kinds, events.get_final_message()


def test_a_text_is_answered_whole_and_streamed_alike(server: RunningServer) -> None:
    whole = ask(server, "Grüße 🏔")
    assert (whole.type, whole.role, whole.stop_reason) == ("message", "assistant", "end_turn")
    assert [block.text for block in whole.content] == ["Grüße 🏔"]
    kinds, streamed = stream(server, "Grüße 🏔")
    assert streamed.content[0].text == "Grüße 🏔"
    assert kinds == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    assert streamed.stop_reason == "end_turn"


def test_usage_counts_every_prompt_token_once(server: RunningServer) -> None:
    count = (
        client(server)
        .messages.count_tokens(model="scripted", messages=[{"role": "user", "content": "say:abc"}])
        .input_tokens
    )
    usage = ask(server, "abc").usage
    assert count > 7
    assert usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens == count
    assert usage.output_tokens == 4
    _, streamed = stream(server, "abc")
    assert streamed.usage.output_tokens == 4


def test_a_text_that_spells_a_marker_is_counted_as_it_is_answered(server: RunningServer) -> None:
    messages: Any = [{"role": "user", "content": "say:<|assistant|>"}]
    count = client(server).messages.count_tokens(model="scripted", messages=messages).input_tokens
    usage = client(server).messages.create(model="scripted", messages=messages, max_tokens=4).usage
    assert usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens == count


def test_a_cache_control_is_a_mark_and_what_it_creates_is_counted(cached: RunningServer) -> None:
    text = "You keep one slot for each running sequence and pages for its tokens. " * 12
    system: Any = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]

    def usage(question: str) -> Any:
        return (
            client(cached)
            .messages.create(
                model="default", max_tokens=4, system=system, messages=[{"role": "user", "content": question}]
            )
            .usage
        )

    first, second = usage("What turns the mill?"), usage("Which key is red?")
    assert first.cache_read_input_tokens == 0
    assert first.cache_creation_input_tokens > 100
    assert second.cache_read_input_tokens > 100
    assert second.cache_creation_input_tokens < 64
    assert 0 < second.input_tokens < first.cache_creation_input_tokens


def test_thinking_is_a_block_of_its_own_where_it_is_asked_for(server: RunningServer) -> None:
    said = "<think>\nhm, well\n</think>\n\nYes."
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    whole = ask(server, said, thinking=thinking)
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert whole.content[0].thinking.strip() == "hm, well"
    kinds, streamed = stream(server, said, thinking=thinking)
    assert [block.type for block in streamed.content] == ["thinking", "text"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2
    assert [block.type for block in ask(server, said).content] == ["text"]


def test_a_call_is_a_tool_use_block_and_its_result_goes_back(server: RunningServer) -> None:
    whole = ask(server, CALL, tools=[WEATHER])
    [call] = whole.content
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Köln 🏔"})
    assert whole.stop_reason == "tool_use"
    kinds, streamed = stream(server, CALL, tools=[WEATHER])
    assert streamed.content[0].input == {"city": "Köln 🏔"}
    assert streamed.stop_reason == "tool_use"
    assert kinds.count("content_block_start") == 1
    turns: Any = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": call.id, "name": call.name, "input": call.input}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": call.id, "content": "12 °C"},
                {"type": "text", "text": "say:cold"},
            ],
        },
    ]
    assert ask(server, "", messages=turns, tools=[WEATHER]).content[0].text == "cold"


def test_a_stop_sequence_and_the_limit_are_named(server: RunningServer) -> None:
    stopped = ask(server, "one two", stop_sequences=[" two"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " two")
    assert stopped.content[0].text == "one"
    cut = client(server).messages.create(
        model="scripted", max_tokens=2, messages=[{"role": "user", "content": "say:abcdef"}]
    )
    assert cut.stop_reason == "max_tokens"


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"type": "costum", "name": "f", "input_schema": {}}]}, "tools.0"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type"),
        ({"top_p": 9.0}, "top_p"),
    ],
)
def test_bad_input_is_an_error_of_the_dialect_that_names_the_field(
    server: RunningServer, change: dict[str, Any], place: str
) -> None:
    turns = [{"role": "user", "content": "say:a"}]
    body = {"model": "scripted", "max_tokens": 5, "messages": turns, **change}
    response = httpx.post(f"{server.url}/v1/messages", json=body)
    answer = response.json()
    assert response.status_code == 400
    assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
    assert place in answer["error"]["message"]
    assert answer["request_id"] == response.headers["x-request-id"]


def test_an_unknown_model_is_a_not_found_error_of_the_client(server: RunningServer) -> None:
    import anthropic  # here: it has 3,200 modules, two seconds of each worker

    with pytest.raises(anthropic.NotFoundError, match="no model"):
        client(server).messages.create(model="other", max_tokens=5, messages=[{"role": "user", "content": "say:a"}])


def test_a_request_id_is_in_the_header_that_this_client_reads(server: RunningServer) -> None:
    answer = ask(server, "a")
    assert answer._request_id
    assert "request-id" not in server.get("/v1/models").headers


def test_models_are_listed_with_the_fields_of_this_api(server: RunningServer) -> None:
    page = client(server).models.list()
    [model] = page
    assert (model.id, model.type, model.display_name) == ("scripted", "model", "scripted")
    assert model.created_at.tzinfo is not None
    assert model.max_input_tokens == MAX_MODEL_LEN
    assert (page.has_more, page.first_id, page.last_id) == (False, "scripted", "scripted")
    assert client(server).models.retrieve("default").display_name == "scripted"
    assert "has_more" not in server.get("/v1/models").json(), "other clients get OpenAI's list"


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_a_thread_is_refused_in_the_words_after_which_clients_send_all_messages(
    server: RunningServer, thread: dict[str, str]
) -> None:
    body = {"model": "default", "max_tokens": 5, "messages": [{"role": "user", "content": "say:a"}]}
    answer = server.post("/v1/messages", {**body, "thread": thread})
    assert answer.status_code == 400
    assert answer.json()["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert "details" not in server.post("/v1/messages", {**body, "max_tokens": 0}).json()["error"]


def converted(**fields: Any) -> ChatTurn:
    return messages_turn(msgspec.convert({"max_tokens": 5, "messages": [], **fields}, MessagesBody))


def test_turns_keep_their_order_and_marks() -> None:
    body: Any = converted(
        system="Be brief.",
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "text", "text": "b"}],
            },
        ],
    ).conversation
    assert [message.role for message in body.messages] == ["system", "user", "assistant"]
    assert body.messages[1].content[0]["cache_control"] == {"type": "ephemeral"}
    assert body.messages[2].reasoning_content == "t"
    assert body.continue_final_message is True


def test_a_schema_becomes_the_answers_grammar() -> None:
    schema = {"type": "object"}
    for field in (
        {"output_format": {"type": "json_schema", "schema": schema}},
        {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    ):
        fields = converted(messages=[{"role": "user", "content": "a"}], **field).fields
        assert fields.response_format is not None
        assert fields.response_format["json_schema"]["schema"] == schema
    with pytest.raises(RequestError, match="output_format"):
        converted(messages=[{"role": "user", "content": "a"}], output_format={"type": "xml"})


def test_marks_are_seen_wherever_they_stand() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    plain = {"max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
    assert not cache_marked(msgspec.convert(plain, MessagesBody))
    assert cache_marked(msgspec.convert({**plain, "tools": [{**WEATHER, **mark}]}, MessagesBody))
    assert cache_marked(msgspec.convert({**plain, "system": [{"type": "text", "text": "s", **mark}]}, MessagesBody))
    whole = msgspec.convert({**plain, **mark}, MessagesBody)
    assert cache_marked(whole)
    assert messages_turn(whole).conversation.messages[-1].cache_control == mark["cache_control"]


VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    10**30,
    1.5,
    "",
    "x" * 50,
    [],
    [[]],
    {},
    {"type": []},
    {"type": "text"},
    {"type": "tool_result", "content": [1]},
    {"type": "tool_use", "input": []},
    [{"type": "text", "text": 3}],
    {"cache_control": 7},
    "\ud800",
]


def mutated(rng: Random, value: Any) -> Any:
    """``value`` with one part replaced or left out."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(list(value))
        if rng.random() < 0.1:
            return {key: one for key, one in value.items() if key != name}
        return {**value, name: mutated(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return [*value[:at], mutated(rng, value[at]), *value[at + 1 :]]
    return rng.choice(VALUES)


def test_a_damaged_body_is_refused_by_a_request_error_or_served() -> None:
    """Never by another exception, which would be a 500."""
    whole: Any = {
        "model": "m",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s"}],
        "stream": False,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "r"}]},
        ],
        "tools": [WEATHER],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled"},
        "output_format": {"type": "json_schema", "schema": {"type": "object"}},
        "stop_sequences": ["x"],
    }
    rng, refused = Random(1), 0
    for _ in range(3000):
        body = mutated(rng, whole)
        for _ in range(rng.randrange(3)):
            body = mutated(rng, body)
        try:
            raw = json.dumps(body).encode("utf-8", "surrogatepass")
            parsed = parse_body(raw, MessagesBody, unserved=UNSERVED_IN_MESSAGES)
            assert messages_turn(parsed).conversation.messages or not parsed.messages
            assert cache_marked(parsed) in (True, False)
        except RequestError:
            refused += 1
    assert 1000 < refused < 3000
