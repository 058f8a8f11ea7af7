"""Sleep over the scripted executor, which forgets its memory and sees every byte that is read unwritten."""

from __future__ import annotations

import pytest

from tests.unit.engine.rig import Rig
from weft.engine.sleeper import Sleeper
from weft.engine.stats import AWAKE, PARTS, Flushed
from weft.errors import AsleepError, BusyError, EngineUnavailableError, RequestError
from weft.memory.frames.arena import Arena

PROMPT = [(5 * at) % 90 for at in range(200)]


def busy_spell(rig: Rig, name: str) -> list[list[int]]:
    """Pages, states and a hit; more than the frames of one kind."""
    for index in range(6):
        rig.submit(f"{name}-{index}", PROMPT[: 150 + index] + [index] * 20, max_tokens=12)
    rig.run()
    return [rig.tokens(f"{name}-{index}") for index in range(6)]


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_changes_no_token(level: int) -> None:
    rig = Rig(cache=True)
    before = busy_spell(rig, "before")
    sleeper = Sleeper(rig.core)
    flushed = sleeper.sleep(level)
    assert flushed.bytes > 0
    assert flushed.tokens >= 150
    assert sleeper.wake_up() == AWAKE
    assert busy_spell(rig, "after") == before


def test_a_memory_that_remembers_its_frames_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the arena is another one, and frames that count as used would not be zeroed."""
    monkeypatch.setattr(Arena, "forget", lambda arena: None)
    rig = Rig(cache=True)
    busy_spell(rig, "before")
    sleeper = Sleeper(rig.core)
    sleeper.sleep()
    sleeper.wake_up()
    rig.submit("after")
    rig.run()
    assert "L6" in str(rig.core.failure)


def test_nothing_is_cached_and_nothing_forgotten_after_a_sleep() -> None:
    rig = Rig(cache=True)
    busy_spell(rig, "before")
    counted, cached_tokens = rig.core.stats(), rig.core.memory.cached_tokens
    sleeper = Sleeper(rig.core)
    assert sleeper.sleep() == Flushed(counted.memory.cached_bytes, cached_tokens)
    sleeper.wake_up()
    after = rig.core.stats()
    assert (after.memory.cached_bytes, after.memory.pages_held, after.memory.slots_held) == (0, 0, 0)
    assert after.memory.free_bytes == after.memory.arena_bytes
    assert after.memory.cache.hits == counted.memory.cache.hits
    assert (after.requests, after.computed_tokens) == (counted.requests, counted.computed_tokens)
    rig.submit("again", PROMPT[:150] + [0] * 20)
    rig.run()
    assert rig.answers["again", 0].events[-1].cached_tokens == 0


def test_a_busy_engine_says_how_many_are_in_the_way_and_goes_on() -> None:
    rig = Rig()
    rig.submit("one", n=2)
    rig.step()
    with pytest.raises(BusyError, match=r"2 sequences are running.*mode=wait.*mode=abort") as caught:
        Sleeper(rig.core).sleep()
    assert caught.value.status == 409
    assert rig.core.sleep_state == AWAKE
    rig.run()
    assert len(rig.tokens("one", 1)) == 10


def test_what_is_aborted_ends_once_and_says_why() -> None:
    rig = Rig()
    rig.submit("runs")
    rig.step()
    rig.submit("waits")
    Sleeper(rig.core).sleep(abort=True)
    rig.run()
    for name in ("runs", "waits"):
        assert rig.answers[name, 0].ends == 1
        assert rig.answers[name, 0].reason == "cancelled"
        assert "sleep" in str(rig.answers[name, 0].events[-1].error)


def test_an_engine_that_is_asleep_takes_nothing_and_says_how_it_is_woken() -> None:
    rig = Rig()
    sleeper = Sleeper(rig.core)
    sleeper.sleep()
    with pytest.raises(AsleepError, match=r"level 1.*wake_up") as caught:
        rig.submit("one")
    assert caught.value.status == 503
    assert not rig.core.has_work
    sleeper.wake_up()
    rig.submit("one")
    rig.run()
    assert rig.answers["one", 0].reason == "length"


def test_it_is_awake_when_every_part_is_back() -> None:
    rig = Rig()
    sleeper = Sleeper(rig.core)
    assert sleeper.wake_up() == AWAKE, "waking who is awake changes nothing"
    sleeper.sleep()
    assert sleeper.state.missing == PARTS
    assert sleeper.wake_up(["weights"]).missing == ("kv_cache",)
    with pytest.raises(AsleepError):
        rig.submit("one")
    assert sleeper.wake_up(["kv_cache"]) == AWAKE


@pytest.mark.parametrize(("first", "second", "level"), [(1, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 2)])
def test_weights_that_are_dropped_stay_so_whatever_is_asked_next(first: int, second: int, level: int) -> None:
    sleeper = Sleeper(Rig().core)
    sleeper.sleep(first)
    assert sleeper.sleep(second) == Flushed(0, 0)
    assert sleeper.state.level == level


@pytest.mark.parametrize("level", [0, 3, -1])
def test_there_are_two_levels(level: int) -> None:
    rig = Rig()
    with pytest.raises(RequestError, match=f"level is {level}"):
        Sleeper(rig.core).sleep(level)
    with pytest.raises(RequestError, match="'kv'"):
        Sleeper(rig.core).wake_up(["kv"])  # type: ignore[list-item]
    assert rig.core.sleep_state == AWAKE


def test_a_failed_engine_does_not_sleep() -> None:
    rig = Rig()
    rig.submit("one")
    rig.before_execute = lambda plan: 1 / 0  # type: ignore[assignment, return-value]
    rig.step()
    with pytest.raises(EngineUnavailableError, match="failed"):
        Sleeper(rig.core).sleep()
    assert rig.core.sleep_state == AWAKE
