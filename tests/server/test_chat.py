"""/v1/chat/completions with the openai client: roles, parts, templates, streams, logprobs, limits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.running import RunningServer
from tests.server.scripted_engine import EOS, MAX_MODEL_LEN, SONG

FACTORY = "build_paced"


def chat(server: RunningServer, content: Any, **more: Any) -> Any:
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    return server.client().chat.completions.create(model="scripted", messages=messages, **more)


def rendered(server: RunningServer, messages: list[dict[str, Any]], **more: Any) -> str:
    tokens = server.post("/tokenize", {"messages": messages, **more}).json()["tokens"]
    return str(server.post("/detokenize", {"tokens": tokens}).json()["prompt"])


def test_an_answer_has_role_text_reason_and_usage(server: RunningServer) -> None:
    answer = chat(server, "say:héllo 🏔")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "héllo 🏔"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "scripted"
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_without_a_limit_an_answer_goes_to_the_end_of_the_context(server: RunningServer) -> None:
    answer = chat(server, "x" * (MAX_MODEL_LEN - 52))
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == MAX_MODEL_LEN


@pytest.mark.parametrize(
    "limit", [{"max_tokens": 7}, {"max_completion_tokens": 7}, {"max_tokens": 500, "max_completion_tokens": 7}]
)
def test_both_names_of_the_limit_work(server: RunningServer, limit: dict[str, int]) -> None:
    assert chat(server, "sing", **limit).usage.completion_tokens == 7


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(server: RunningServer) -> None:
    chunks = list(chat(server, "say:héllo 🏔", stream=True, n=2))
    roles = [choice for chunk in chunks[:2] for choice in chunk.choices]
    assert [(choice.index, choice.delta.role, choice.delta.content) for choice in roles] == [
        (0, "assistant", ""),
        (1, "assistant", ""),
    ]
    assert all(choice.delta.role is None for chunk in chunks[2:] for choice in chunk.choices)
    for index in (0, 1):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in mine) == "héllo 🏔"
        assert [choice.finish_reason for choice in mine][-1] == "stop"
        assert all(choice.finish_reason is None for choice in mine[:-1])
    assert all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_may_end_with_usage(server: RunningServer) -> None:
    chunks = list(chat(server, "say:abc", stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 4
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 0


def test_parts_of_text_are_joined_by_lines(server: RunningServer) -> None:
    parts = [{"type": "text", "text": "say:one"}, {"type": "text", "text": "two"}]
    assert chat(server, [{"role": "user", "content": parts}]).choices[0].message.content == "one\ntwo"


def test_a_developer_is_a_system_where_the_template_knows_no_developer(server: RunningServer) -> None:
    turns = [{"role": "user", "content": "hi"}]
    assert rendered(server, [{"role": "developer", "content": "Be kind."}, *turns]) == rendered(
        server, [{"role": "system", "content": "Be kind."}, *turns]
    )


def test_every_role_and_a_past_tool_call_are_taken(server: RunningServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "user", "content": "say:ok"},
    ]
    assert chat(server, turns).choices[0].message.content == "ok"


def test_the_last_message_can_be_continued(server: RunningServer) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "say:ab "}]
    text = rendered(server, turns, continue_final_message=True)
    assert text.endswith("<|assistant|>say:ab ")
    answer = chat(server, turns, extra_body={"continue_final_message": True, "add_generation_prompt": False})
    assert answer.choices[0].message.content == "ab "
    assert rendered(server, turns).endswith("<|assistant|>say:ab <|assistant|>")


def test_template_arguments_reach_the_template(server: RunningServer) -> None:
    turns = [{"role": "user", "content": "hi"}]
    assert "LOUD" in rendered(server, turns, chat_template_kwargs={"shout": True})
    assert "LOUD" not in rendered(server, turns, chat_template_kwargs={"shout": False})
    assert not rendered(server, turns, add_generation_prompt=False).endswith("<|assistant|>")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_one_per_token_with_their_bytes(server: RunningServer, stream: bool) -> None:
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    choices = (
        [chunk.choices[0] for chunk in chat(server, "say:é", stream=True, **asked)]
        if stream
        else chat(server, "say:é", **asked).choices
    )
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert [entry.bytes for entry in entries] == [[0xC3], [0xA9], list(b"<|end|>")]
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in entries)
    assert chat(server, "say:é").choices[0].logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_named(server: RunningServer, stream: bool) -> None:
    if stream:
        chunks = list(chat(server, "sing", stop="montagne", stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        last = chunks[-1].choices[0]
    else:
        last = chat(server, "sing", stop="montagne").choices[0]
        text = last.message.content
    assert text == SONG.partition("montagne")[0]
    assert (last.finish_reason, last.stop_reason) == ("stop", "montagne")


def test_token_ids_are_returned_on_request(server: RunningServer) -> None:
    answer = chat(server, "say:a", extra_body={"return_token_ids": True})
    assert answer.choices[0].token_ids[-1] == EOS
    assert len(answer.prompt_token_ids) == answer.usage.prompt_tokens
    chunks = list(chat(server, "say:a", stream=True, extra_body={"return_token_ids": True}))
    assert chunks[0].prompt_token_ids == answer.prompt_token_ids
    streamed = [token for chunk in chunks[1:] for token in chunk.choices[0].token_ids]
    assert streamed == answer.choices[0].token_ids


def test_the_model_may_be_named_default_or_left_out(server: RunningServer) -> None:
    turns = [{"role": "user", "content": "say:a"}]
    assert server.client().chat.completions.create(model="default", messages=turns).model == "scripted"
    assert server.post("/v1/chat/completions", {"messages": turns}).status_code == 200


def test_seeds_are_exact_and_draws_differ(server: RunningServer) -> None:
    def draw(**more: Any) -> list[str]:
        answer = chat(server, "x", temperature=1.0, max_tokens=24, **more)
        return [choice.message.content for choice in answer.choices]

    assert draw(seed=7) == draw(seed=7)
    assert draw(seed=7) != draw(seed=8)
    assert len(set(draw(seed=7, n=4))) == 4
    assert draw() != draw()
