"""What coding agents send, in the words of each API: served, with what is left out in X-weft-Ignored.

The template takes a system message at the beginning alone, and walks arguments as an object, as Qwen3.5's does.
Bodies have the shapes of released agents (``agent_bodies``), in words of our own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.agent_bodies import BODIES
from tests.server.running import RunningServer, running_server
from tests.server.scripted_engine import MAX_MODEL_LEN, write_model_directory

STRICT = (
    "{%- for t in tools or [] -%}<{{ t.function.name }}>{%- endfor -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'system' and not loop.first -%}{{ raise_exception('a system message comes first') }}{%- endif -%}"
    "<|{{ 'assistant' if m.role == 'assistant' else 'user' }}|>{{ m.content }}"
    "{%- for c in m.tool_calls or [] -%}<tool_call><function={{ c.function.name }}>"
    "{%- for k, v in c.function.arguments | items -%}<parameter={{ k }}>{{ v }}</parameter>{%- endfor -%}"
    "</function></tool_call>{%- endfor -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
OLLAMA = "/api/chat"
F = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}
G = {**F, "name": "g"}
CALL = "<tool_call><function=f><parameter=x>1</parameter></function></tool_call>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = write_model_directory(tmp_path_factory.mktemp("strict"), template=STRICT)
    with running_server("build", engine={"model": str(directory)}) as running:
        yield running


def body_of(path: str, *messages: Any, **more: Any) -> dict[str, Any]:
    """A request of ``path`` with messages of the chat API's kind, which are the same in all but Responses."""
    listed = list(messages) or [{"role": "user", "content": "say:ok"}]
    body: dict[str, Any] = {"model": "scripted", "stream": False, **more}
    if path == RESPONSES:
        return {**body, "input": listed, "store": False}
    if path == MESSAGES:
        body = {"max_tokens": 32, **body}
    return {**body, "messages": listed}


def post(server: RunningServer, path: str, body: dict[str, Any], status: int = 200) -> httpx.Response:
    response = httpx.post(server.url + path, json=body, timeout=30)
    assert response.status_code == status, response.text
    return response


def ignored(response: httpx.Response) -> list[str]:
    return [name for name in response.headers.get("x-weft-ignored", "").split(", ") if name]


def text_of(answer: dict[str, Any]) -> str:
    if "choices" in answer:
        return str(answer["choices"][0]["message"]["content"])
    if "output" in answer:
        return str(answer["output"][-1]["content"][0]["text"])
    return str(answer["message"]["content"] if "message" in answer else answer["content"][-1]["text"])


APIS = (CHAT, RESPONSES, MESSAGES, OLLAMA)


@pytest.mark.parametrize("agent", BODIES)
def test_a_request_of_each_agent_is_served_as_a_stream(server: RunningServer, agent: str) -> None:
    path, body = BODIES[agent]
    response = post(server, path, {**body, "stream": True})
    assert "done" in "".join(_deltas(response.text)), response.text
    whole = post(server, path, {**{k: v for k, v in body.items() if k != "stream_options"}, "stream": False})
    assert ignored(whole) == ignored(response)
    assert all(name != "?" for name in ignored(whole))


def _deltas(stream: str) -> Iterator[str]:
    for line in stream.splitlines():
        event = json.loads(line[6:]) if line.startswith("data: {") else {}
        delta = event.get("delta", "")
        yield delta if isinstance(delta, str) else delta.get("text", "")
        yield from (choice["delta"].get("content") or "" for choice in event.get("choices", ()))


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize(
    "roles",
    [
        ("user", "system"),
        ("user", "assistant", "system", "user"),
        ("system", "system", "user"),
        ("system", "user", "system", "system", "user"),
        ("user", "user"),
        ("assistant", "user"),
    ],
)
def test_messages_of_any_order_are_served(server: RunningServer, path: str, roles: tuple[str, ...]) -> None:
    messages = [{"role": role, "content": f"text {at}. "} for at, role in enumerate(roles)]
    messages[-1]["content"] += "say:served"
    answer = post(server, path, body_of(path, *messages)).json()
    assert text_of(answer) == "served"


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_developer_message_behind_a_turn_is_served(server: RunningServer, path: str) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "developer", "content": "say:served"}]
    assert text_of(post(server, path, body_of(path, *messages)).json()) == "served"


def test_a_system_message_of_blocks_behind_a_user_is_served_in_messages(server: RunningServer) -> None:
    blocks = [{"type": "text", "text": "a reminder. say:seen", "cache_control": {"type": "ephemeral"}}]
    body = body_of(
        MESSAGES, {"role": "user", "content": "a"}, {"role": "system", "content": blocks}, system="Be brief."
    )
    assert text_of(post(server, MESSAGES, body).json()) == "seen"
    assert post(server, f"{MESSAGES}/count_tokens", body).json()["input_tokens"] > 20


@pytest.mark.parametrize("arguments", ["", None, "null", '{"x": "1', "[1]", '{"x": "1"}'])
def test_a_past_call_with_any_arguments_is_served(server: RunningServer, arguments: Any) -> None:
    asked, said = {"role": "user", "content": "a"}, {"role": "user", "content": "say:alive"}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "1", "content": "r"}
    past = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert text_of(post(server, CHAT, body_of(CHAT, asked, past, result, said)).json()) == "alive"
    assert text_of(post(server, OLLAMA, body_of(OLLAMA, asked, past, result, said)).json()) == "alive"
    items = [
        asked,
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments},
        {"type": "function_call_output", "call_id": "1", "output": "r"},
        said,
    ]
    assert text_of(post(server, RESPONSES, body_of(RESPONSES, *items)).json()) == "alive"
    blocks = [
        asked,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": arguments}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "r"}]},
        said,
    ]
    assert text_of(post(server, MESSAGES, body_of(MESSAGES, *blocks)).json()) == "alive"


def sent_back(path: str, answer: dict[str, Any]) -> list[dict[str, Any]]:
    """What an answer becomes in the next request of ``path``, as it is, with a result for each call."""
    if path == RESPONSES:
        calls = [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
        return answer["output"] + [{"type": "function_call_output", "call_id": call, "output": "r"} for call in calls]
    if path == MESSAGES:
        calls = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call, "content": "r"} for call in calls]
        said = {"role": "assistant", "content": answer["content"]}
        return [said, {"role": "user", "content": results}] if results else [said]
    message = answer["choices"][0]["message"] if path == CHAT else answer["message"]
    calls = [call.get("id", "") for call in message.get("tool_calls") or ()]
    return [message, *({"role": "tool", "tool_call_id": call, "content": "r"} for call in calls)]


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("said", [f"text{CALL}", CALL, "text<tool_call>", ""])
def test_an_answer_that_max_tokens_cut_can_be_sent_back(server: RunningServer, path: str, said: str) -> None:
    """Whatever an answer of this server is, the conversation goes on."""
    of_others = {"type": "function", "function": F}
    own = {RESPONSES: {"type": "function", **F}, MESSAGES: {"name": "f", "input_schema": F["parameters"]}}
    for limit in range(1, len(said) + 2, 5):
        asked = limited(path, LIMITS[path][0], limit, f"say:{said}")
        answer = post(server, path, asked | {"tools": [own.get(path, of_others)]}).json()
        back = [{"role": "user", "content": "a"}, *sent_back(path, answer), {"role": "user", "content": "say:alive"}]
        assert text_of(post(server, path, body_of(path, *back)).json()) == "alive"


def test_what_claude_code_asks_of_its_server_is_left_out_and_named(server: RunningServer) -> None:
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    body = body_of(
        MESSAGES,
        context_management={"edits": edits},
        mcp_servers=[{"type": "url", "url": "https://tools.example", "name": "x"}],
        output_config={"effort": "high"},
        metadata={"user_id": "u"},
        thinking={"type": "adaptive", "display": "omitted"},
        tools=[
            {"name": "f", "description": "d", "input_schema": F["parameters"], "eager_input_streaming": True},
            {"type": "custom", "name": "g", "input_schema": {"type": "object"}, "defer_loading": True},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
    )
    named = ignored(post(server, MESSAGES, body))
    left_out = {"context_management", "mcp_servers", "tools.web_search_20250305", "output_config.effort"}
    assert left_out | {"thinking.display"} <= set(named)
    choice = {"type": "tool", "name": "web_search"}
    assert "web_search" in post(server, MESSAGES, {**body, "tool_choice": choice}, 400).json()["error"]["message"]


@pytest.mark.parametrize(("of_tool", "status"), [(True, 200), (False, 400)])
def test_a_picture_in_a_result_is_a_text_to_a_model_that_reads_none(
    server: RunningServer, of_tool: bool, status: int
) -> None:
    """An agent opened a file. What the user sends to be seen is refused."""
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    document = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}
    for block in (picture, document):
        content = [{"type": "text", "text": "a file:"}, block, {"type": "text", "text": "say:alive"}]
        shown = [{"type": "tool_result", "tool_use_id": "1", "content": content}] if of_tool else content
        answer = post(server, MESSAGES, body_of(MESSAGES, {"role": "user", "content": shown}), status)
        if of_tool:
            assert text_of(answer.json()) == "alive"
            assert ignored(answer)


def test_blocks_of_other_servers_and_thinking_are_taken_back(server: RunningServer) -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "redacted_thinking", "data": "AAAA"},
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
        {"type": "text", "text": "Found."},
    ]
    text = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "say:read"}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [text]},
    ]
    answer = post(server, MESSAGES, body_of(MESSAGES, *messages))
    assert text_of(answer.json()) == "read"
    assert ignored(answer) == ["messages.server_tool_use", "messages.web_search_tool_result"]


BILLING = "x-anthropic-billing-header: cc_version=1.2.{}; cc_entrypoint=cli;"


@pytest.mark.parametrize("as_text", [False, True])
def test_the_billing_line_of_claude_code_is_no_part_of_the_prompt(server: RunningServer, as_text: bool) -> None:
    """It differs in each conversation, and stands before 20,000 tokens that do not."""

    def sent(*texts: str, user: str = "say:ok") -> tuple[list[str], int]:
        system: Any = "\n\n".join(texts) if as_text else [{"type": "text", "text": text} for text in texts]
        answer = post(server, MESSAGES, body_of(MESSAGES, {"role": "user", "content": user}, system=system))
        usage = answer.json()["usage"]
        return ignored(answer), usage["input_tokens"] + (usage.get("cache_read_input_tokens") or 0)

    _, plain = sent("Be brief.")
    for number in ("4df", "8a5"):
        assert sent(BILLING.format(number), "Be brief.") == (["system.billing_header"], plain)
    names, tokens = sent("Be brief.", "The x-anthropic-billing-header: is a line.")
    assert (names, tokens > plain) == ([], True)
    names, tokens = sent("Be brief.", user=f"{BILLING} say:ok")
    assert (names, tokens > plain) == ([], True)


HOSTED = ("web_search", "local_shell", "image_generation", "file_search", "mcp", "code_interpreter")


def test_hosted_tools_of_responses_are_left_out_and_named(server: RunningServer) -> None:
    hosted = [{"type": kind} for kind in HOSTED]
    space = {"type": "namespace", "name": "files", "description": "d", "tools": [{"type": "function", **G}]}
    body = body_of(RESPONSES, tools=[{"type": "function", **F}, *hosted, space], tool_choice="auto")
    answer = post(server, RESPONSES, body)
    assert ignored(answer) == [f"tools.{kind}" for kind in HOSTED]
    for kind in HOSTED:
        error = post(server, RESPONSES, {**body, "tool_choice": {"type": kind}}, 400).json()["error"]
        assert kind in error["message"]
    wrong = {**body, "tools": [{"type": "functoin", **F}]}
    assert post(server, RESPONSES, wrong, 400).json()["error"]["param"] == "tools[0].type"


@pytest.mark.parametrize("path", [CHAT, OLLAMA])
def test_hosted_tools_are_left_out_of_a_chat(server: RunningServer, path: str) -> None:
    tools = [{"type": "web_search"}, {"type": "function", "function": F}]
    assert ignored(post(server, path, body_of(path, tools=tools))) == ["tools.web_search"]
    assert post(server, path, body_of(path, tools=tools[:1])).status_code == 200


def test_a_function_in_a_namespace_is_called_by_it(server: RunningServer) -> None:
    def space(name: str) -> dict[str, Any]:
        return {"type": "namespace", "name": name, "description": "d", "tools": [{"type": "function", **F}]}

    asked = {"role": "user", "content": f"say:{CALL}"}
    body = body_of(RESPONSES, asked, tools=[space("one")])
    [call] = post(server, RESPONSES, body).json()["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "one", "f")
    assert json.loads(call["arguments"]) == {"x": "1"}
    longer = {"role": "user", "content": f"say:{CALL.replace('=f>', '=two.f>')}"}
    [call] = post(server, RESPONSES, body_of(RESPONSES, longer, tools=[space("one"), space("two")])).json()["output"]
    assert (call["namespace"], call["name"]) == ("two", "f")
    back = [
        {"role": "user", "content": "a"},
        {key: call[key] for key in ("type", "call_id", "namespace", "name", "arguments")},
        {"type": "function_call_output", "call_id": call["call_id"], "output": [{"type": "input_text", "text": "r"}]},
        {"role": "user", "content": "say:done"},
    ]
    body = body_of(RESPONSES, *back, tools=[space("one"), space("two")])
    assert text_of(post(server, RESPONSES, body).json()) == "done"
    events = httpx.post(
        server.url + RESPONSES, json={**body_of(RESPONSES, asked, tools=[space("one")]), "stream": True}
    )
    assert '"namespace":"one"' in events.text


def test_items_of_other_servers_and_of_a_local_shell_are_taken_back(server: RunningServer) -> None:
    items = [
        {"role": "user", "content": "a"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "AAAA"},
        {
            "type": "local_shell_call",
            "call_id": "1",
            "status": "completed",
            "action": {"type": "exec", "command": ["ls"]},
        },
        {"type": "local_shell_call_output", "call_id": "1", "output": "a.txt"},
        {"type": "message", "role": "assistant", "content": None, "phase": "commentary"},
        {"role": "user", "content": "say:alive"},
    ]
    answer = post(server, RESPONSES, body_of(RESPONSES, *items))
    assert text_of(answer.json()) == "alive"
    assert ignored(answer) == ["input.web_search_call"]


def test_tools_that_come_among_the_items_are_tools(server: RunningServer) -> None:
    """As Codex sends them, first and behind a search for tools."""
    space = {"type": "namespace", "name": "one", "description": "d", "tools": [{"type": "function", **F}]}
    search = {"type": "tool_search", "execution": "client", "description": "d", "parameters": {"type": "object"}}
    for items in (
        [{"type": "additional_tools", "role": "developer", "id": "at_1", "tools": [space, space]}],
        [
            {"role": "user", "content": "a"},
            {"type": "tool_search_call", "call_id": "1", "execution": "client", "arguments": {"query": "f"}},
            {"type": "tool_search_output", "call_id": "1", "status": "completed", "tools": [space]},
        ],
    ):
        asked = {"role": "user", "content": f"say:{CALL}"}
        answer = post(server, RESPONSES, body_of(RESPONSES, *items, asked, tools=[search, {"type": "function", **G}]))
        [call] = answer.json()["output"]
        assert (call["namespace"], call["name"]) == ("one", "f")
        assert ignored(answer) == ["tools.tool_search"]


def test_tools_that_a_turn_adds_and_empty_texts_are_taken_in_messages(server: RunningServer) -> None:
    added = {"type": "tool_addition", "tool": {"type": "tool_reference", "tool_name": "f"}}
    empty = {"type": "text", "text": "", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [empty]},
        {"role": "assistant", "content": [{"type": "text", "text": " "}]},
        {"role": "system", "content": [added]},
        {"role": "user", "content": "say:alive"},
    ]
    tools = [{"name": "f", "input_schema": F["parameters"], "defer_loading": True}]
    answer = post(server, MESSAGES, body_of(MESSAGES, *messages, tools=tools))
    assert text_of(answer.json()) == "alive"
    assert ignored(answer) == ["messages.tool_addition"]


def test_codex_wishes_of_length_and_effort_are_left_out_and_named(server: RunningServer) -> None:
    body = body_of(
        RESPONSES,
        text={"verbosity": "low"},
        reasoning={"effort": "medium", "summary": "auto"},
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        client_metadata={"a": "b"},
        context_management=[{"type": "compaction"}],
    )
    assert set(ignored(post(server, RESPONSES, body))) == {"text.verbosity", "reasoning.effort", "context_management"}


def test_a_grammar_of_a_custom_tool_that_cannot_be_held_is_told_to_the_model(server: RunningServer) -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    tools = [{"type": "custom", "name": "apply_patch", "description": "d", "format": form}]
    assert ignored(post(server, RESPONSES, body_of(RESPONSES, tools=tools))) == ["tools.apply_patch.format"]


LIMITS = {
    CHAT: ("max_tokens", "max_completion_tokens"),
    COMPLETIONS: ("max_tokens",),
    RESPONSES: ("max_output_tokens",),
    MESSAGES: ("max_tokens",),
    OLLAMA: ("options.num_predict",),
}
SING = "sing " * 380
CASES = [(path, name) for path, names in LIMITS.items() for name in names]


def limited(path: str, name: str, limit: int, text: str = SING) -> dict[str, Any]:
    value = {"options": {"num_predict": limit}} if name.startswith("options.") else {name: limit}
    if path == COMPLETIONS:
        return {"model": "scripted", "prompt": text, **value}
    return body_of(path, {"role": "user", "content": text}, **value)


def end_of(answer: dict[str, Any]) -> str:
    if "choices" in answer:
        return str(answer["choices"][0]["finish_reason"])
    if "incomplete_details" in answer:
        assert answer["status"] == "incomplete"
        return str(answer["incomplete_details"]["reason"])
    return str(answer.get("stop_reason") or answer["done_reason"])


@pytest.mark.parametrize(("path", "name"), CASES)
def test_a_limit_beyond_the_context_is_cut_to_it_and_named(server: RunningServer, path: str, name: str) -> None:
    answer = post(server, path, limited(path, name, 32_000))
    assert ignored(answer) == [name]
    assert end_of(answer.json()) in ("length", "max_output_tokens", "max_tokens")
    within = post(server, path, limited(path, name, 5))
    assert (ignored(within), end_of(within.json())) == ([], end_of(answer.json()))


@pytest.mark.parametrize(("path", "name"), CASES)
def test_a_prompt_that_leaves_no_room_is_refused_in_words_that_agents_know(
    server: RunningServer, path: str, name: str
) -> None:
    for length in (MAX_MODEL_LEN + 500, 90_000):
        answer = post(server, path, limited(path, name, 10, "x" * length), 400).json()
        if path == MESSAGES:
            assert answer["error"]["type"] == "invalid_request_error"
            said = answer["error"]["message"]
            assert said.startswith("prompt is too long: ")
            assert f" tokens > {MAX_MODEL_LEN} maximum" in said
            continue
        error = {"message": answer["error"]} if path == OLLAMA else answer["error"]
        assert f"maximum context length is {MAX_MODEL_LEN} tokens" in error["message"]
        assert error.get("code", "context_length_exceeded") == "context_length_exceeded"


def test_a_stream_of_responses_tells_of_an_overflow_in_its_last_event(server: RunningServer) -> None:
    """As OpenAI's does: Codex looks for the code there alone."""
    body = {**limited(RESPONSES, "max_output_tokens", 10, "x" * 5000), "stream": True}
    response = post(server, RESPONSES, body)
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert [event["type"] for event in events] == ["response.created", "response.failed"]
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "context_length_exceeded")
    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in failed["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", ["verbosity", "thinking_token_budget", "web_search_options", "kv_transfer_params"])
def test_a_wish_that_changes_no_meaning_is_left_out_and_named(server: RunningServer, path: str, name: str) -> None:
    body = body_of(CHAT) if path == CHAT else {"model": "scripted", "prompt": "say:ok"}
    value: Any = {"verbosity": "low", "thinking_token_budget": 5}.get(name, {"a": 1})
    assert ignored(post(server, path, {**body, name: value})) == [name]
