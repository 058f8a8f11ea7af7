"""All engines of a fleet have the weights of the last update, those that start later too."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from weft.engine.stats import AWAKE, EngineStats, SleepState, WeightsState
from weft.errors import CheckpointError
from weft.fleet.all_engines import AllEngines
from weft.fleet.joined import identity_with
from weft.rpc.messages import SleepOutcome, WeightsOutcome


@dataclass
class Engine:
    """What ``AllEngines`` asks of one. ``refuses``: directories that it cannot serve."""

    refuses: frozenset[str] = frozenset()
    directory: str = "first"
    version: str = ""
    updates: int = 0
    paused: bool = False
    sleep_state: SleepState = AWAKE
    calls: list[str] = field(default_factory=list)

    @property
    def weights(self) -> WeightsState:
        return WeightsState(self.version, f"digest of {self.directory}", self.updates)

    @property
    def stats(self) -> Any:
        return cast(EngineStats, self)

    @property
    def info(self) -> Any:
        return self

    async def update_weights(self, directory: str, version: str, mode: str, timeout_s: float) -> WeightsOutcome:
        self.calls.append(directory)
        if directory in self.refuses:
            raise CheckpointError(f"{directory} cannot be served")
        self.directory, self.version, self.updates = directory, version, self.updates + 1
        return WeightsOutcome(weights=self.weights, paused=self.paused)

    async def pause(self, mode: str, timeout_s: float, *, flush: bool) -> WeightsOutcome:
        if "pause" in self.refuses:
            raise CheckpointError("busy")
        self.paused = True
        return WeightsOutcome(weights=self.weights, paused=True)

    async def resume(self) -> WeightsOutcome:
        self.paused = False
        return WeightsOutcome(weights=self.weights, paused=False)

    async def sleep(self, level: int, mode: str, timeout_s: float) -> SleepOutcome:
        self.sleep_state = SleepState(level, ("weights", "kv_cache"))
        return SleepOutcome(state=self.sleep_state)

    async def wake_up(self, tags: list[str] | None) -> SleepOutcome:
        left = tuple(part for part in self.sleep_state.missing if tags is not None and part not in tags)
        self.sleep_state = SleepState(self.sleep_state.level, left) if left else AWAKE
        return SleepOutcome(state=self.sleep_state)


@dataclass
class OneReplica:
    engine: Engine
    ready: bool = True
    number: int = 0
    reason: str = ""


def fleet(*engines: Engine) -> AllEngines:
    return AllEngines(cast(Any, [OneReplica(engine) for engine in engines]))


@pytest.mark.parametrize("version", ["step-1", ""])
def test_an_engine_that_starts_later_gets_the_weights_of_the_last_update(version: str) -> None:
    old = Engine()
    engines = fleet(old)
    asyncio.run(engines.update_weights("second", version, "keep", 0.0))
    assert engines.weights == old.weights
    late = Engine()
    asyncio.run(engines.follow(cast(Any, late)))
    assert (late.directory, late.version) == ("second", version)
    asyncio.run(engines.follow(cast(Any, late)))
    assert late.calls == ["second"], "it has them now"


def test_an_engine_that_starts_before_any_update_is_left_alone() -> None:
    late = Engine()
    asyncio.run(fleet(Engine()).follow(cast(Any, late)))
    assert late.calls == []


def test_where_one_engine_refuses_all_have_the_old_weights() -> None:
    first, second = Engine(), Engine(refuses=frozenset({"bad"}))
    engines = fleet(first, second)
    asyncio.run(engines.update_weights("good", "one", "keep", 0.0))
    with pytest.raises(CheckpointError, match="bad"):
        asyncio.run(engines.update_weights("bad", "two", "keep", 0.0))
    assert (first.directory, second.directory) == ("good", "good")
    assert engines.weights.version == "one"


def test_a_pause_is_of_all_engines_or_none() -> None:
    first, second = Engine(), Engine(refuses=frozenset({"pause"}))
    engines = fleet(first, second)
    with pytest.raises(CheckpointError, match="busy"):
        asyncio.run(engines.pause("keep", 0.0, flush=False))
    assert not first.paused
    assert not engines.is_paused
    second.refuses = frozenset()
    asyncio.run(engines.pause("keep", 0.0, flush=False))
    assert engines.is_paused
    late = Engine()
    asyncio.run(engines.follow(cast(Any, late)))
    assert late.paused


def test_an_identity_follows_the_weights() -> None:
    """Engines that join are compared with what answers now, not with what answered at the start."""
    started = {"weights": "aaaa", "records": "cccc", "version": "1"}
    assert identity_with(started, WeightsState("", "aaaabbbb", 0)) == started
    assert identity_with(started, WeightsState("x", "ddddeeee", 1)) == {"weights": "dddd", "version": "1"}


@pytest.mark.parametrize(("tags", "level"), [(None, 0), (["weights"], 1)])
def test_an_engine_that_starts_later_sleeps_until_the_others_are_wholly_awake(
    tags: list[Any] | None, level: int
) -> None:
    async def run() -> None:
        engines = fleet(Engine(), Engine())
        await engines.sleep(1, "abort", 0.0)
        late = Engine()
        await engines.follow(cast(Any, late))
        assert late.sleep_state.level == 1
        await engines.wake_up(tags)
        later = Engine()
        await engines.follow(cast(Any, later))
        assert later.sleep_state.level == level

    asyncio.run(run())
