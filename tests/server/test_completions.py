"""/v1/completions with the openai client: prompts, echo, logprobs, stops, n, seeds, streams."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.running import RunningServer
from tests.server.scripted_engine import EOS, MAX_MODEL_LEN, SONG

FACTORY = "build_paced"


def complete(server: RunningServer, prompt: Any, **more: Any) -> Any:
    return server.client().completions.create(model="scripted", prompt=prompt, **more)


def streamed(server: RunningServer, prompt: Any, **more: Any) -> list[Any]:
    return list(complete(server, prompt, stream=True, **more))


def text_of(chunks: list[Any], index: int = 0) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices if choice.index == index)


def test_the_answer_ends_at_the_end_token_which_is_counted_and_not_shown(server: RunningServer) -> None:
    answer = complete(server, "say:héllo", max_tokens=50)
    assert answer.choices[0].text == "héllo"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason is None
    assert answer.usage.completion_tokens == len("héllo".encode()) + 1
    assert answer.usage.prompt_tokens == len("say:héllo".encode())
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_sixteen_tokens_are_the_default(server: RunningServer) -> None:
    answer = complete(server, "sing")
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


def test_the_default_is_cut_to_what_the_context_leaves(server: RunningServer) -> None:
    answer = complete(server, "x" * (MAX_MODEL_LEN - 3))
    assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize("prompt", ["say:abc", ["say:abc"], [115, 97, 121, 58, 97, 98, 99]])
def test_a_prompt_may_be_text_or_a_list(server: RunningServer, prompt: Any) -> None:
    ids = server.post("/tokenize", {"prompt": "say:abc"}).json()["tokens"]
    answer = complete(server, ids if isinstance(prompt, list) and isinstance(prompt[0], int) else prompt)
    assert answer.choices[0].text == "abc"


def test_several_prompts_are_answered_in_their_order(server: RunningServer) -> None:
    ids = server.post("/tokenize", {"prompt": "say:three"}).json()["tokens"]
    answer = complete(server, ["say:one", "say:two", "sing"], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4, 5]
    assert [choice.text for choice in answer.choices[:4]] == ["one", "one", "two", "two"]
    assert answer.usage.prompt_tokens == len("say:one") + len("say:two") + len("sing")
    both = complete(server, [ids, ids])
    assert [choice.text for choice in both.choices] == ["three", "three"]


def test_a_stream_gives_the_same_text_and_never_half_a_character(server: RunningServer) -> None:
    whole = complete(server, "sing", max_tokens=120)
    chunks = streamed(server, "sing", max_tokens=120)
    assert text_of(chunks) == whole.choices[0].text
    assert SONG in text_of(chunks)
    assert not any("�" in choice.text for chunk in chunks for choice in chunk.choices)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
    assert len(chunks) > 3


def test_a_character_cut_by_max_tokens_is_shown_as_broken_not_dropped(server: RunningServer) -> None:
    answer = complete(server, "say:é", max_tokens=1)
    assert answer.choices[0].text == "�"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_before_it(server: RunningServer, stream: bool) -> None:
    arguments: dict[str, Any] = {"max_tokens": 1500, "stop": ["vieux", "never"]}
    with server.ends_early(1500):
        if stream:
            chunks = streamed(server, "sing", **arguments)
            text, last = text_of(chunks), chunks[-1].choices[0]
        else:
            answer = complete(server, "sing", **arguments)
            text, last = answer.choices[0].text, answer.choices[0]
    assert text == SONG.partition("vieux")[0]
    assert last.finish_reason == "stop"
    assert last.stop_reason == "vieux"


def test_a_stop_string_may_be_kept(server: RunningServer) -> None:
    extra = {"include_stop_str_in_output": True}
    answer = complete(server, "sing", max_tokens=200, stop="vieux", extra_body=extra)
    assert answer.choices[0].text == SONG.partition("vieux")[0] + "vieux"


def test_the_start_of_a_stop_string_that_does_not_come_is_shown(server: RunningServer) -> None:
    chunks = streamed(server, "say:abcabd", stop=["abcabX", "abd!"])
    assert text_of(chunks) == "abcabd"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_min_tokens_holds_back_stop_strings_and_the_end(server: RunningServer) -> None:
    extra = {"min_tokens": 12}
    assert complete(server, "say:ab", max_tokens=14, extra_body=extra).usage.completion_tokens >= 12
    answer = complete(server, "say:aaaaaaaaaaaaaaaa", stop="a", max_tokens=20, extra_body=extra)
    assert answer.choices[0].text == "a" * 12


def test_a_stop_token_ends_the_answer_and_is_named(server: RunningServer) -> None:
    (token,) = server.post("/tokenize", {"prompt": "c"}).json()["tokens"]
    answer = complete(server, "say:abcd", extra_body={"stop_token_ids": [token]})
    assert (answer.choices[0].text, answer.choices[0].stop_reason) == ("ab", token)


def test_ignore_eos_goes_on(server: RunningServer) -> None:
    answer = complete(server, "say:ab", max_tokens=9, extra_body={"ignore_eos": True})
    assert answer.choices[0].text == "ababab"
    assert answer.choices[0].finish_reason == "length"
    extra = {"ignore_eos": True, "skip_special_tokens": False}
    shown = complete(server, "say:ab", max_tokens=3, extra_body=extra)
    assert shown.choices[0].text == "ab<|end|>"


def test_the_same_seed_gives_the_same_text_and_another_seed_another(server: RunningServer) -> None:
    def draw(seed: int, **more: Any) -> str:
        return str(complete(server, "x", temperature=1.0, seed=seed, max_tokens=24, **more).choices[0].text)

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    several = complete(server, "x", temperature=1.0, seed=1, n=3, max_tokens=24)
    assert len({choice.text for choice in several.choices}) == 3


def test_the_checkpoints_own_sampling_applies_where_the_request_is_silent(server: RunningServer) -> None:
    """The scripted checkpoint says temperature 0."""
    assert SONG.startswith(complete(server, "sing").choices[0].text)
    assert not SONG.startswith(complete(server, "sing", temperature=1.0, seed=3).choices[0].text)


def test_echo_puts_the_prompt_in_front(server: RunningServer) -> None:
    assert complete(server, "say:ab", echo=True).choices[0].text == "say:abab"
    chunks = streamed(server, "say:ab", echo=True)
    assert text_of(chunks) == "say:abab"
    ids = server.post("/tokenize", {"prompt": "say:ab"}).json()["tokens"]
    assert complete(server, ids, echo=True).choices[0].text == "say:abab"


def test_echo_with_logprobs_scores_the_prompt(server: RunningServer) -> None:
    answer = complete(server, "abc", echo=True, logprobs=2, max_tokens=0)
    scored = answer.choices[0].logprobs
    assert answer.choices[0].text == "abc"
    assert scored.tokens == ["a", "b", "c"]
    assert scored.token_logprobs[0] is None
    assert scored.top_logprobs[0] is None
    assert all(value < 0 or value == 0 for value in scored.token_logprobs[1:])
    assert all(len(top) in (2, 3) for top in scored.top_logprobs[1:])
    assert scored.text_offset == [0, 1, 2]
    assert answer.usage.completion_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_one_per_token(server: RunningServer, stream: bool) -> None:
    arguments: dict[str, Any] = {"logprobs": 3, "max_tokens": 20}
    choices = (
        [chunk.choices[0] for chunk in streamed(server, "say:aé", **arguments)]
        if stream
        else complete(server, "say:aé", **arguments).choices
    )
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    assert tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "<|end|>"]
    assert sum(len(choice.logprobs.token_logprobs) for choice in choices) == 4
    for choice in choices:
        for token, value, top in zip(
            choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
        ):
            assert top[token] == value
            assert len(top) == 3


def test_logprobs_zero_reports_the_chosen_token_only(server: RunningServer) -> None:
    scored = complete(server, "say:ab", logprobs=0).choices[0].logprobs
    assert [list(top) for top in scored.top_logprobs] == [["a"], ["b"], ["<|end|>"]]


def test_prompt_logprobs_come_by_token_id(server: RunningServer) -> None:
    ids = server.post("/tokenize", {"prompt": "abc"}).json()["tokens"]
    choice = complete(server, "abc", max_tokens=1, extra_body={"prompt_logprobs": 1}).choices[0]
    assert choice.prompt_logprobs[0] is None
    entry = choice.prompt_logprobs[1][str(ids[1])]
    assert entry["decoded_token"] == "b"
    assert entry["rank"] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_returned_on_request(server: RunningServer, stream: bool) -> None:
    extra = {"return_token_ids": True}
    choices = (
        [chunk.choices[0] for chunk in streamed(server, "say:hé", extra_body=extra)]
        if stream
        else complete(server, "say:hé", extra_body=extra).choices
    )
    tokens = [token for choice in choices for token in choice.token_ids]
    assert tokens == [*server.post("/tokenize", {"prompt": "hé"}).json()["tokens"], EOS]
    assert choices[0].prompt_token_ids == server.post("/tokenize", {"prompt": "say:hé"}).json()["tokens"]
    plain = complete(server, "say:h").choices[0].model_dump()
    assert "token_ids" not in plain


def test_tokens_may_be_written_as_ids(server: RunningServer) -> None:
    extra = {"return_tokens_as_token_ids": True}
    scored = complete(server, "say:a", logprobs=1, extra_body=extra).choices[0].logprobs
    (token,) = server.post("/tokenize", {"prompt": "a"}).json()["tokens"]
    assert scored.tokens == [f"token_id:{token}", f"token_id:{EOS}"]


def test_usage_comes_last_in_a_stream_when_asked_for(server: RunningServer) -> None:
    chunks = streamed(server, "say:abc", stream_options={"include_usage": True})
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == len("say:abc") + 4
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 0
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert all(chunk.choices for chunk in streamed(server, "say:abc"))


def test_continuous_usage_counts_as_it_goes(server: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = streamed(server, "say:abcdef", extra_body={"stream_options": options})
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 7


def test_the_lines_of_a_stream_are_server_sent_events_that_end_with_done(server: RunningServer) -> None:
    response = server.post("/v1/completions", {"prompt": "say:abc", "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
    assert all(chunk["object"] == "text_completion" for chunk in chunks)


def test_several_choices_stream_side_by_side(server: RunningServer) -> None:
    chunks = streamed(server, ["say:one", "say:two"], n=2)
    assert [text_of(chunks, index) for index in range(4)] == ["one", "one", "two", "two"]
    ends = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sorted(ends) == [0, 1, 2, 3]


def test_priority_and_salt_are_taken(server: RunningServer) -> None:
    extra = {"priority": -5, "cache_salt": "tenant"}
    assert complete(server, "say:abc", extra_body=extra).choices[0].text == "abc"


def test_unknown_fields_and_nulls_are_ignored(server: RunningServer) -> None:
    body = {
        "prompt": "say:abc",
        "user": "me",
        "something_new": {"a": 1},
        "temperature": None,
        "tools": None,
        "logprobs": None,
        "response_format": {"type": "text"},
        "best_of": 1,
        "suffix": None,
    }
    assert server.post("/v1/completions", body).json()["choices"][0]["text"] == "abc"
