"""The comparison of pages with commands: what may differ, and what may not."""

from __future__ import annotations

import pytest

from tests.docs.comparison import complaint


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("took 12 ms", "took 4.7 ms\n"),
        ("9.3 tokens/s", "1,200 tokens/s"),
        ("12 GiB free", "3.4 GiB free"),
        ("at http://127.0.0.1:8000/", "at http://127.0.0.1:41235/"),
        ("id req-0a1b2c3d4e", "id req-ffffffffff01"),
        ("a   b", "a b"),
        ("a ... z", "a b c z"),
        ("...\nlast", "first\nsecond\nlast"),
        ("one\n...", "one"),
        ("one\n...\nlast", "one\n\nlast"),
        ('"created": 1763817600', '"created": 1863817601'),
    ],
)
def test_what_differs_from_run_to_run_matches(shown: str, printed: str) -> None:
    assert complaint(shown, "text", printed) == ""


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("took 12 ms", "took 12 s"),
        ("7 pages", "8 pages"),
        ("12 GiB", "13 GiB"),
        ("a ... z", "a b c"),
        ("one", "one\ntwo"),
        ("one\ntwo", "one"),
        ("port 8000", "port 8001"),
        ("req-0a1b", "req-0a1c"),
        ("one\n...\nlast", "two\nlast"),
        ("3.8%", "3.9%"),
        ("a.c", "abc"),
        ("", "one"),
    ],
)
def test_all_else_must_be_equal(shown: str, printed: str) -> None:
    assert complaint(shown, "text", printed) != ""


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ('{"a": 1}', '{"a": 1, "b": 2}'),
        ('{"a": [{"b": "x ..."}]}', '{"a": [{"b": "x y", "c": 1}]}'),
        ('[1, "..."]', "[1, 2, 3]"),
        ('{"id": "chatcmpl-0123abcd"}', '{"id": "chatcmpl-99999999"}'),
        ('{"a": null, "b": {}}', '{"a": null, "b": {"c": 1}}'),
    ],
)
def test_json_on_a_page_is_a_part_of_the_answer(shown: str, printed: str) -> None:
    assert complaint(shown, "json", printed) == ""


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ('{"a": 1}', '{"a": 2}'),
        ('{"a": 1}', '{"b": 1}'),
        ("[1]", "[1, 2]"),
        ("[1, 2]", "[1]"),
        ('{"a": 1}', '{"a": true}'),
        ('{"a": "x"}', '{"a": "y"}'),
        ('{"a": {"b": 1}}', '{"a": {"b": 1.5}}'),
        ('{"a": 1}', "not json"),
        ("{", "{}"),
        ('[1, 2, "..."]', "[1]"),
        ('{"a": null}', '{"a": 0}'),
    ],
)
def test_another_value_a_missing_field_and_another_length_are_noticed(shown: str, printed: str) -> None:
    assert complaint(shown, "json", printed) != ""
