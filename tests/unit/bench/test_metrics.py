"""The field's figures from timings: each as a table whose numbers are worked out by hand."""

from __future__ import annotations

import pytest

from weft.errors import ConfigError
from weft_tools.bench.metrics import (
    Times,
    busiest_second,
    figures,
    keeps,
    most_at_once,
    parse_goodput,
    parse_names,
    parse_percentiles,
    times_of,
)
from weft_tools.bench.serve import Timing

QUICK = Timing(10.0, [(10.1, 1), (10.2, 1), (10.4, 2)], ended=10.4, prompt_tokens=5)
SLOW = Timing(10.0, [(11.0, 1), (12.0, 1)], ended=12.0, prompt_tokens=7, cached_tokens=3)
SINGLE = Timing(11.0, [(11.5, 1)], ended=11.5, prompt_tokens=1)
FAILED = Timing(10.0, error="503: no", prompt_tokens=99)


def test_times_of_an_answer_are_those_of_the_field() -> None:
    times = times_of(QUICK)
    assert times.ttft == pytest.approx(0.1)
    assert times.e2el == pytest.approx(0.4)
    assert times.tpot == pytest.approx(0.3 / 3), "the first of four tokens is not counted"
    assert times.itl == pytest.approx((0.1, 0.1, 0.1)), "a chunk of two shares its gap"


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    assert times_of(SINGLE).tpot is None
    assert times_of(SINGLE).itl == ()


def test_a_load_is_summed_up_without_what_failed() -> None:
    found = figures([QUICK, SLOW, SINGLE, FAILED], 2.0, percentiles=(50.0, 99.0))
    assert (found["completed"], found["failed"]) == (3, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (13, 7)
    assert found["total_cached_tokens"] == 3
    assert found["request_throughput"] == pytest.approx(1.5)
    assert found["output_throughput"] == pytest.approx(3.5)
    assert found["total_token_throughput"] == pytest.approx(10.0)
    assert found["request_goodput"] is None
    assert found["mean_ttft_ms"] == pytest.approx((100 + 1000 + 500) / 3)
    assert found["median_ttft_ms"] == found["p50_ttft_ms"] == pytest.approx(500)
    assert found["p99_ttft_ms"] == pytest.approx(500 + 0.98 * 500), "between the two nearest"
    assert found["mean_tpot_ms"] == pytest.approx((100 + 1000) / 2)
    assert found["mean_itl_ms"] == pytest.approx((3 * 100 + 1000) / 4)
    assert found["std_e2el_ms"] == pytest.approx(731.816, abs=0.01)


def test_only_the_figures_that_are_asked_for_are_there_and_nothing_has_no_figures() -> None:
    found = figures([FAILED], 1.0, names=("ttft",))
    assert found["mean_ttft_ms"] is None
    assert found["p99_ttft_ms"] is None
    assert not any("tpot" in key for key in found)
    assert found["request_throughput"] == 0.0


@pytest.mark.parametrize(
    ("promises", "kept"),
    [
        ({}, (True, True, True)),
        ({"ttft": 500.0}, (True, False, True)),
        ({"tpot": 100.1}, (True, False, True)),
        ({"e2el": 499.0}, (True, False, False)),
        ({"ttft": 2000.0, "tpot": 50.0}, (False, False, True)),
        ({"ttft": 99.0}, (False, False, False)),
    ],
)
def test_a_promise_is_kept_by_every_figure_it_names(promises: dict[str, float], kept: tuple[bool, ...]) -> None:
    timings = [QUICK, SLOW, SINGLE]
    assert tuple(keeps(times_of(timing), promises) for timing in timings) == kept
    if promises:
        assert figures([*timings, FAILED], 4.0, promises=promises)["request_goodput"] == sum(kept) / 4


def test_a_promise_is_kept_to_the_last_millisecond() -> None:
    assert keeps(Times(0.5, None, (), 1.0), {"ttft": 500.0})
    assert not keeps(Times(0.5001, None, (), 1.0), {"ttft": 500.0})


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["ttft:500"], {"ttft": 500.0}),
        (["ttft:500 tpot:50"], {"ttft": 500.0, "tpot": 50.0}),
        (["e2el:1e3", "ttft:1"], {"e2el": 1000.0, "ttft": 1.0}),
        ([], {}),
    ],
)
def test_promises_are_read_as_the_field_writes_them(given: list[str], found: dict[str, float]) -> None:
    assert parse_goodput(given) == found


@pytest.mark.parametrize("given", ["ttft", "itl:5", "ttft:", "ttft:0", "ttft:-1", "tpot:fast", "ttft:nan"])
def test_a_promise_that_means_nothing_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="--goodput"):
        parse_goodput([given])


def test_names_and_percentiles_are_read_and_checked() -> None:
    assert parse_names("ttft, itl,ttft") == ("ttft", "itl")
    assert parse_percentiles("50,99.9") == (50.0, 99.9)
    for read, bad in (
        (parse_names, "ttft,x"),
        (parse_percentiles, "101"),
        (parse_percentiles, "a"),
        (parse_percentiles, ""),
    ):
        with pytest.raises(ConfigError):
            read(bad)


def test_peaks_are_counted_over_all_answers() -> None:
    assert busiest_second([QUICK, SLOW, SINGLE]) == 4, "0.1, 0.2 and two at 0.4"
    assert busiest_second([]) == 0
    assert most_at_once([QUICK, SLOW, SINGLE]) == 2
    apart = [Timing(0.0, [(1.0, 1)], ended=1.0), Timing(1.0, [(2.0, 1)], ended=2.0)]
    assert most_at_once(apart) == 1
