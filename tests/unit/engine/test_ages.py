"""Versions of memory to seconds."""

from __future__ import annotations

from weft.engine.loop import SAMPLES_MAX, Ages


def test_a_version_is_as_old_as_the_sample_before_it() -> None:
    ages = Ages()
    assert ages.seconds_since(5, 100.0) == 0.0
    for version, now in ((0, 10.0), (3, 10.5), (7, 11.0), (20, 14.0)):
        ages.note(version, now)
    assert [ages.seconds_since(version, 15.0) for version in (0, 6, 7, 19, 20, 99)] == [5, 5, 4, 4, 1, 1]


def test_samples_are_bounded_and_what_is_older_is_as_old_as_the_oldest() -> None:
    ages = Ages()
    for second in range(SAMPLES_MAX + 50):
        ages.note(second, float(second))
    now = float(SAMPLES_MAX + 50)
    assert ages.seconds_since(0, now) == SAMPLES_MAX
    assert ages.seconds_since(SAMPLES_MAX + 40, now) == 10
