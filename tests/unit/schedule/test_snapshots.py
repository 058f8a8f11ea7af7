"""The flag that chooses the sources of snapshots: its grammar as tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.errors import ConfigError
from weft.schedule.snapshots import AUTO, NONE, PROMPT, SnapshotPolicy, parse_snapshots


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", AUTO),
        ("prompt", PROMPT),
        ("none", NONE),
        ("every:128", replace(PROMPT, forks=True, every_tokens=128)),
        ("auto,-insurance,-forks", replace(AUTO, insurance=False, forks=False)),
        ("auto,-request-end,-preemption", replace(AUTO, request_end=False, preemption=False)),
        ("auto,every:512", replace(AUTO, every_tokens=512)),
        ("auto,decode:128", replace(AUTO, decode_tokens=128)),
        ("auto,-decode", replace(AUTO, decode=False)),
        ("every:64,-every", replace(PROMPT, forks=True)),
        ("none,boundaries", SnapshotPolicy(boundaries=True)),
        ("boundaries,decode:4096", SnapshotPolicy(boundaries=True, decode=True, decode_tokens=4096)),
        ("decode", SnapshotPolicy(decode=True)),
        ("marks,every:64", SnapshotPolicy(marks=True, every_tokens=64)),
        ("prompt-end,-prompt-end,prompt-end", SnapshotPolicy(prompt_end=True)),
    ],
)
def test_a_list_begins_with_a_preset_or_with_nothing_and_adds_and_takes_away(
    text: str, expected: SnapshotPolicy
) -> None:
    assert parse_snapshots(text) == expected


def test_every_source_can_be_switched_off_alone() -> None:
    for name, field in (
        ("prompt-end", "prompt_end"),
        ("near-end", "near_end"),
        ("boundaries", "boundaries"),
        ("marks", "marks"),
        ("forks", "forks"),
        ("insurance", "insurance"),
        ("spare", "spare"),
        ("decode", "decode"),
        ("request-end", "request_end"),
        ("preemption", "preemption"),
    ):
        assert getattr(AUTO, field) or field == "prompt_end"
        assert parse_snapshots(f"auto,-{name}") == replace(AUTO, **{field: False})
        assert parse_snapshots(name) == replace(NONE, **{field: True})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "an item of it is empty"),
        ("all", "'all' is not a source"),
        ("auto,-tail", "the source 'tail' has another name now: near-end"),
        ("Auto", "'Auto' is not a source"),
        ("auto,", "an item of it is empty"),
        ("auto,,forks", "an item of it is empty"),
        ("auto, forks", "' forks' is not a source"),
        ("-forks", "begin with auto, as in auto,-forks"),
        ("forks,auto", "'auto' is not a source: it can only come first"),
        ("auto,-none", "can only come first"),
        ("auto,--forks", "'--forks' is not a source"),
        ("auto,prompt_end", "'prompt_end' is not a source"),
        ("every:", "the N of 'every:' is not a number"),
        ("every:-64", "the N of 'every:-64' is not a number"),
        ("every:99999999999", "is not a number"),
        ("every", "'every' is not a source"),
        ("auto,-every:64", "'-every:64' is not a source"),
        ("auto,-decode:64", "'-decode:64' is not a source"),
        ("every:0", "such as every:64"),
        ("every:100", "such as every:128"),
        ("auto,decode:4000", "such as decode:4032"),
        ("auto,decode:x", "the N of 'decode:x' is not a number"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_wrong_in_it_and_what_would_be_right(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_snapshots(text)
    message = caught.value.message
    assert message.startswith(f"--snapshots is {text!r}")
    assert says in message
    assert "such as" in message
    assert "64" in message
    assert caught.value.param == "--snapshots"
