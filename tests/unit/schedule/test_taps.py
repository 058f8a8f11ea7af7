"""Where states are kept: tables."""

from __future__ import annotations

import pytest

from weft.errors import ConfigError
from weft.schedule.taps import (
    AUTO,
    NONE,
    PROMPT,
    TAPS_PER_RUN_MAX,
    TapPolicy,
    insurance_tokens,
    parse_checkpoints,
    taps_in_run,
    wanted_positions,
)
from weft.units import CHUNK_TOKENS


@pytest.mark.parametrize(("known", "expected"), [
    (1, []), (63, []), (64, []), (65, [64]), (128, [64]), (129, [128]), (1049, [1024]),
])
def test_the_prompt_end_is_the_last_grid_point_before_the_last_token(known: int, expected: list[int]) -> None:
    assert wanted_positions(PROMPT, known_tokens=known, start=0) == expected


@pytest.mark.parametrize(("start", "expected"), [(0, [1024]), (1000, [1024]), (1024, []), (1040, [])])
def test_nothing_is_wanted_where_the_computation_does_not_come_through(start: int,
                                                                       expected: list[int]) -> None:
    assert wanted_positions(PROMPT, known_tokens=1049, start=start) == expected


@pytest.mark.parametrize(("boundaries", "expected"), [
    ([200], [192]),
    ([64, 128], [64, 128]),
    ([63], []),
    ([300, 100, 110], [64, 256]),
    ([10**9, 400], [384]),
    ([-5, 0], []),
])
def test_declared_boundaries_are_floored_to_the_grid(boundaries: list[int], expected: list[int]) -> None:
    only = TapPolicy(boundaries=True)
    assert wanted_positions(only, known_tokens=420, start=0, boundaries=boundaries) == expected


@pytest.mark.parametrize(("start", "kv_tokens", "expected"), [
    (0, 1000, [960]), (960, 1000, []), (64, 64, []), (64, 130, [128]), (0, 5000, [1984]), (100, 0, []),
])
def test_a_fork_is_kept_where_the_kv_matched_further_than_the_state(start: int, kv_tokens: int,
                                                                    expected: list[int]) -> None:
    only = TapPolicy(forks=True)
    assert wanted_positions(only, known_tokens=2000, start=start, kv_tokens=kv_tokens) == expected


def test_insurance_doubles_its_distance_and_keeps_away_from_what_is_kept_anyway() -> None:
    only = TapPolicy(insurance=True)
    assert wanted_positions(only, known_tokens=5000, start=0, insurance_first=512) == [512, 1024, 2048, 4096]
    # The prompt's end at 4992 is within a quarter of 4096, the boundary at 576 within a quarter of 512.
    both = TapPolicy(insurance=True, boundaries=True, prompt_end=True)
    found = wanted_positions(both, known_tokens=5000, start=0, boundaries=[600], insurance_first=512)
    assert found == [4992, 576, 1024, 2048]


@pytest.mark.parametrize(("slot_bytes", "page_bytes", "expected"), [
    (192_100_000, 30_720 * 16, 6272),    # a state of 397B is 6,253 tokens of KV
    (82_000, 12_288 * 16, 512),          # one of LFM2 is 7
    (10**12, 1, 8192), (100, 0, 512), (0, 1000, 512),
])
def test_insurance_begins_where_the_kv_weighs_as_much_as_the_state(slot_bytes: int, page_bytes: int,
                                                                   expected: int) -> None:
    assert insurance_tokens(slot_bytes, page_bytes) == expected


def test_the_most_useful_wish_comes_first() -> None:
    found = wanted_positions(AUTO, known_tokens=2000, start=0, boundaries=[500], kv_tokens=700)
    assert found[:3] == [1984, 640, 448]


def test_each_source_can_be_off() -> None:
    everything = {"known_tokens": 9000, "start": 0, "boundaries": [640], "kv_tokens": 1300}
    assert wanted_positions(NONE, **everything) == []  # type: ignore[arg-type]
    assert wanted_positions(PROMPT, **everything) == [8960]  # type: ignore[arg-type]
    every = parse_checkpoints("every:4096")
    assert wanted_positions(every, **everything) == [8960, 1280, 4096, 8192]  # type: ignore[arg-type]


@pytest.mark.parametrize(("start", "end", "expected"), [
    (0, 64, [64]), (0, 63, []), (64, 128, []), (63, 64, [64]), (0, 256, [256, 64, 192]), (192, 256, [256]),
])
def test_a_run_keeps_what_it_passes_or_reaches(start: int, end: int, expected: list[int]) -> None:
    assert taps_in_run([256, 64, 192, 64], start, end) == expected


def test_one_run_keeps_a_bounded_number_of_states() -> None:
    wanted = wanted_positions(parse_checkpoints("every:64"), known_tokens=100_000, start=0)
    kept = taps_in_run(wanted, 0, 100_000)
    assert len(wanted) > 1000
    assert len(kept) == TAPS_PER_RUN_MAX


def test_every_wish_is_on_the_grid_ahead_of_the_start_and_before_the_last_token() -> None:
    for known in range(1, 700, 7):
        for start in range(0, known, 31):
            found = wanted_positions(AUTO, known_tokens=known, start=start, kv_tokens=start + 200,
                                     boundaries=range(0, 900, 50))
            assert len(set(found)) == len(found)
            assert all(start < at < known and at % CHUNK_TOKENS == 0 for at in found)


def test_the_flag_is_understood_in_all_its_forms() -> None:
    assert parse_checkpoints("auto") is AUTO
    assert parse_checkpoints("prompt") is PROMPT
    assert parse_checkpoints("none") is NONE
    assert parse_checkpoints("every:128").every_tokens == 128


@pytest.mark.parametrize(("text", "says"), [
    ("", "auto, prompt, every:N"), ("all", "auto, prompt, every:N"), ("every:", "auto, prompt, every:N"),
    ("every:0", "every:64"), ("every:100", "every:128"), ("every:-64", "auto, prompt, every:N"),
    ("Auto", "auto, prompt, every:N"), ("every:99999999999", "auto, prompt, every:N"),
])
def test_a_wrong_value_is_refused_with_what_would_be_right(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match="--checkpoints") as caught:
        parse_checkpoints(text)
    assert says in caught.value.message
    assert caught.value.param == "--checkpoints"
