"""Where states are kept: tables."""

from __future__ import annotations

import numpy as np
import pytest

from weft.schedule.snapshots import (
    AUTO,
    NONE,
    PROMPT,
    TAPS_PER_RUN_MAX,
    SnapshotPolicy,
    decode_distance,
    decodes_due,
    insurance_tokens,
    near_end_position,
    parse_snapshots,
    spare_in_run,
    taps_in_run,
    wanted_positions,
)
from weft.units import CHUNK_TOKENS


@pytest.mark.parametrize(
    ("known", "expected"), [(1, []), (63, []), (64, []), (65, [64]), (128, [64]), (129, [128]), (1049, [1024])]
)
def test_the_prompt_end_is_the_last_grid_point_before_the_last_token(known: int, expected: list[int]) -> None:
    assert wanted_positions(PROMPT, known_tokens=known, start=0) == expected


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (1, 0),
        (64, 0),
        (65, 64),
        (1023, 960),
        (1024, 896),
        (1025, 1024),
        (2047, 1920),
        (2048, 1792),
        (4095, 3840),
        (4096, 3584),
        (5000, 4608),
        (100_001, 99_840),
    ],
)
def test_a_tail_is_near_the_end_on_a_grid_of_an_eighth_at_most(known: int, expected: int) -> None:
    assert near_end_position(known) == expected
    wanted = [expected] if expected else []
    assert wanted_positions(SnapshotPolicy(near_end=True), known_tokens=known, start=0) == wanted


@pytest.mark.parametrize(("start", "expected"), [(0, [1024]), (1000, [1024]), (1024, []), (1040, [])])
def test_nothing_is_wanted_where_the_computation_does_not_come_through(start: int, expected: list[int]) -> None:
    assert wanted_positions(PROMPT, known_tokens=1049, start=start) == expected


@pytest.mark.parametrize(
    ("boundaries", "expected"),
    [
        ([200], [192]),
        ([64, 128], [64, 128]),
        ([63], []),
        ([300, 100, 110], [64, 256]),
        ([10**9, 400], [384]),
        ([-5, 0], []),
    ],
)
def test_declared_boundaries_are_floored_to_the_grid(boundaries: list[int], expected: list[int]) -> None:
    only = SnapshotPolicy(boundaries=True)
    assert wanted_positions(only, known_tokens=420, start=0, boundaries=boundaries) == expected


@pytest.mark.parametrize(
    ("start", "kv_tokens", "expected"),
    [(0, 1000, [960]), (960, 1000, []), (64, 64, []), (64, 130, [128]), (0, 5000, [1984]), (100, 0, [])],
)
def test_a_fork_is_kept_where_the_kv_matched_further_than_the_state(
    start: int, kv_tokens: int, expected: list[int]
) -> None:
    only = SnapshotPolicy(forks=True)
    assert wanted_positions(only, known_tokens=2000, start=start, kv_tokens=kv_tokens) == expected


def test_insurance_doubles_its_distance_and_keeps_away_from_what_is_kept_anyway() -> None:
    only = SnapshotPolicy(insurance=True)
    assert wanted_positions(only, known_tokens=5000, start=0, insurance_first=512) == [512, 1024, 2048, 4096]
    # The prompt's end at 4992 is within a quarter of 4096, the boundary at 576 within a quarter of 512.
    both = SnapshotPolicy(insurance=True, boundaries=True, prompt_end=True)
    found = wanted_positions(both, known_tokens=5000, start=0, boundaries=[600], insurance_first=512)
    assert found == [4992, 576, 1024, 2048]


def spare(taken: list[int], start: int, end: int, known_tokens: int = 5000) -> list[int]:
    return spare_in_run(taken, start, end, known_tokens=known_tokens, insurance_first=512)


def test_spare_places_lie_a_fifth_apart_wherever_a_run_ends() -> None:
    found = spare([], 0, 2048)
    assert found == [512, 576, 640, 768, 896, 1024, 1216, 1408, 1664, 1984]
    assert found == spare([], 0, 1000) + spare([], 1000, 2048)
    assert spare([], 0, 2048, known_tokens=600) == [512, 576]
    assert spare([], 0, 2048, known_tokens=577) == [512, 576]
    assert spare([], 0, 2048, known_tokens=576) == [512], "the last token is computed"


def test_spare_places_keep_away_from_what_is_kept_anyway_and_are_bounded_with_it() -> None:
    assert spare([512, 1024, 1900], 0, 2048) == [640, 768, 896, 1216, 1408, 1664]
    assert spare(list(range(31)), 0, 4096) == [512]
    assert spare(list(range(40)), 0, 4096) == []


@pytest.mark.parametrize(
    ("slot_bytes", "page_bytes", "expected"),
    [
        (192_100_000, 30_720 * 16, 6272),  # a state of 397B is 6,253 tokens of KV
        (82_000, 12_288 * 16, 512),  # one of LFM2 is 7
        (10**12, 1, 8192),
        (100, 0, 512),
        (0, 1000, 512),
    ],
)
def test_insurance_begins_where_the_kv_weighs_as_much_as_the_state(
    slot_bytes: int, page_bytes: int, expected: int
) -> None:
    assert insurance_tokens(slot_bytes, page_bytes) == expected


def test_the_most_useful_wish_comes_first() -> None:
    found = wanted_positions(AUTO, known_tokens=2000, start=0, boundaries=[500], kv_tokens=700)
    assert found[:3] == [1920, 640, 448]


def test_each_source_can_be_off() -> None:
    everything = {"known_tokens": 9000, "start": 0, "boundaries": [640], "kv_tokens": 1300}
    assert wanted_positions(NONE, **everything) == []  # type: ignore[arg-type]
    assert wanted_positions(PROMPT, **everything) == [8960]  # type: ignore[arg-type]
    every = parse_snapshots("every:4096")
    assert wanted_positions(every, **everything) == [8960, 1280, 4096, 8192]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(0, 64, [64]), (0, 63, []), (64, 128, []), (63, 64, [64]), (0, 256, [256, 64, 192]), (192, 256, [256])],
)
def test_a_run_keeps_what_it_passes_or_reaches(start: int, end: int, expected: list[int]) -> None:
    assert taps_in_run([256, 64, 192, 64], start, end) == expected


def test_one_run_keeps_a_bounded_number_of_states() -> None:
    wanted = wanted_positions(parse_snapshots("every:64"), known_tokens=100_000, start=0)
    kept = taps_in_run(wanted, 0, 100_000)
    assert len(wanted) > 1000
    assert len(kept) == TAPS_PER_RUN_MAX


def test_every_wish_is_on_the_grid_ahead_of_the_start_and_before_the_last_token() -> None:
    for known in range(1, 700, 7):
        for start in range(0, known, 31):
            found = wanted_positions(
                AUTO, known_tokens=known, start=start, kv_tokens=start + 200, boundaries=range(0, 900, 50)
            )
            assert len(set(found)) == len(found)
            assert all(start < at < known and at % CHUNK_TOKENS == 0 for at in found)


@pytest.mark.parametrize(
    ("policy", "slot_bytes", "page_bytes", "expected"),
    [
        (AUTO, 192_100_000, 30_720 * 16, 4 * 6253 // 64 * 64 + 64),  # a quarter of the KV, for 397B
        (AUTO, 82_000, 12_288 * 16, 4096),
        (AUTO, 100, 0, 4096),
        (AUTO, 10**12, 1, 32768),
        (NONE, 82_000, 12_288 * 16, 0),
        (PROMPT, 82_000, 12_288 * 16, 0),
        (parse_snapshots("decode:128"), 10**12, 1, 128),
    ],
)
def test_the_states_of_an_answer_weigh_a_quarter_of_its_kv_or_are_as_far_apart_as_asked(
    policy: SnapshotPolicy, slot_bytes: int, page_bytes: int, expected: int
) -> None:
    assert decode_distance(policy, slot_bytes, page_bytes) == expected


def test_an_answer_keeps_a_state_at_each_distance_from_where_it_began() -> None:
    computed = np.asarray([100, 192, 256, 300, 128, 64, 320], dtype=np.int32)
    target = np.asarray([100, 100, 129, 100, 128, 100, 100], dtype=np.int32)
    assert decodes_due(computed, target, 128) == [1, 2, 6]
    assert decodes_due(computed[:0], target[:0], 128) == []


def test_what_the_client_marks_comes_before_everything_and_without_boundaries_too() -> None:
    marked = {"known_tokens": 2000, "start": 0, "boundaries": [500], "marks": [1300, 130, 10]}
    assert wanted_positions(AUTO, **marked)[:4] == [128, 1280, 1920, 448]  # type: ignore[arg-type]
    assert wanted_positions(PROMPT, **marked) == [128, 1280, 1984]  # type: ignore[arg-type]
    without = parse_snapshots("auto,-marks,-insurance")
    assert wanted_positions(without, **marked) == [1920, 448]  # type: ignore[arg-type]
    assert wanted_positions(NONE, **marked) == []  # type: ignore[arg-type]
