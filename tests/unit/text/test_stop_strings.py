from random import Random

import pytest

from weft.text.choices import StopStrings


def feed(stops: StopStrings, pieces: list[str]) -> list[str]:
    return [stops.push(piece) for piece in pieces]


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    stops = StopStrings(["END"])
    assert feed(stops, ["a E", "N", "E", "ND", "x"]) == ["a ", "", "EN", "", ""]
    assert stops.stopped == "END"
    assert stops.flush() == ""


def test_text_held_back_comes_out_when_the_answer_ends() -> None:
    stops = StopStrings(["END"])
    assert feed(stops, ["the E", "N"]) == ["the ", ""]
    assert stops.flush() == "EN"
    assert stops.stopped is None


def test_nothing_past_a_stop_string_is_ever_shown() -> None:
    assert feed(StopStrings(["\n\n"]), ["one\n", "\ntwo", "three"]) == ["one", "", ""]
    assert feed(StopStrings(["\n\n"], include=True), ["one\n", "\ntwo", "three"]) == ["one", "\n\n", ""]


def test_without_stop_strings_text_passes_at_once() -> None:
    assert feed(StopStrings([]), ["a", "b"]) == ["a", "b"]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


def dull(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition, over the whole text: the stop that ends first, of those the longest."""
    ends = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end if include else end - len(stop)], stop


def test_stop_strings_do_not_depend_on_how_the_text_was_cut() -> None:
    random = Random(7)
    stopped = 0
    for _ in range(3000):
        stops = [
            "".join(random.choice("ab") for _ in range(random.randrange(1, 6))) for _ in range(random.randrange(1, 4))
        ]
        text = "".join(random.choice("abc") for _ in range(random.randrange(0, 14)))
        include = random.random() < 0.5
        matcher = StopStrings(stops, include=include)
        shown, rest = "", text
        expected, stop = dull(text, stops, include)
        while rest:
            cut = random.randrange(1, 4)
            shown += matcher.push(rest[:cut])
            rest = rest[cut:]
            assert expected.startswith(shown), "text was shown that must not be"
            assert len(matcher._held) < max(map(len, stops)), "more is held than can become a stop"
        assert (shown + matcher.flush(), matcher.stopped) == (expected, stop)
        stopped += stop is not None
    assert stopped > 500
