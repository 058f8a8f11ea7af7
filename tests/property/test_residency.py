"""Several models in one memory: seeded traffic in virtual time, each law checked after every event.

The world of a test knows what runs and what waits by itself, and compares it with the machine's books. Loads
and unloads take random time and sometimes fail; models die; clients give up. A machine that breaks a law (the
mutants) must be caught by the same world.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.planning import residency
from weft.planning.residency import Residency, Resident, Use, shares

BUDGET = 100
KEEP_ALIVES = (None, 0.0, 3.0, 40.0)


class World:
    """``run`` returns how many requests were answered. Raises AssertionError where a law is broken, or where
    a request that nobody gave up is neither answered nor told why not."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        names = [f"m{number}" for number in range(self.random.randint(2, 5))]
        sizes = {name: self.random.randint(10, 100) for name in names}
        self.machine = Residency.of(
            sizes, BUDGET, waiting_max=self.random.choice((2, 6, 100)), keep_alive_s=self.random.choice(KEEP_ALIVES)
        )
        self.now = 0.0
        self.order = count()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.waiting: dict[str, set[int]] = {name: set() for name in names}
        self.running: dict[str, set[int]] = {name: set() for name in names}
        self.taken: dict[str, int] = {}
        self.asked, self.answered, self.refused, self.lost, self.given_up = 0, 0, 0, 0, 0

    def at(self, delay: float, work: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.order), work))

    def run(self, requests: int = 60) -> int:
        for _ in range(requests):
            self.at(self.random.uniform(0, 60), self.arrive)
        if self.random.random() < 0.3:
            self.at(self.random.uniform(5, 60), self.someone_dies)
        steps = 0
        while self.events:
            due, _, work = heapq.heappop(self.events)
            self.now = max(self.now, due)
            work()
            self.act()
            self.check()
            steps += 1
            assert steps < 20_000, "the machine is busy for ever"
        assert not any(self.waiting.values()), "a request waits for ever"
        assert self.asked == self.answered + self.refused + self.lost + self.given_up
        return self.answered

    # ------------------------------------------------------------------ requests

    def arrive(self) -> None:
        name, number = self.random.choice(list(self.waiting)), self.asked
        self.asked += 1
        entry = self.machine.enter(name, self.now)
        if entry == "in":
            self.begin(name, number)
        elif entry == "waits":
            self.waiting[name].add(number)
            if self.random.random() < 0.15:
                self.at(self.random.uniform(0, 10), lambda: self.give_up(name, number))
        else:
            assert entry == "refused" or sum(map(len, self.waiting.values())) >= self.machine.waiting_max
            self.refused += 1

    def give_up(self, name: str, number: int) -> None:
        if number in self.waiting[name]:
            self.waiting[name].remove(number)
            self.machine.leave_queue(name)
            self.given_up += 1

    def begin(self, name: str, number: int) -> None:
        self.running[name].add(number)
        use = self.machine.use(name)
        self.machine.keep_alive(name, self.random.choice(KEEP_ALIVES), self.now)
        self.at(self.random.expovariate(0.5), lambda: self.end(name, number, use))

    def end(self, name: str, number: int, use: Use) -> None:
        if number in self.running[name]:
            self.running[name].remove(number)
            self.answered += 1
        self.machine.leave(use, self.now)

    # ------------------------------------------------------------------ loads

    def act(self) -> None:
        for action in self.machine.actions(self.now):
            name = action.name
            if action.verb == "load":
                self.taken[name] = self.machine.models[name].share
                self.at(self.random.uniform(0, 8), lambda name=name: self.end_load(name))
            elif action.verb == "unload":
                assert not self.running[name], "L2: unloaded while a request runs"
                self.at(self.random.uniform(0, 2), lambda name=name: self.end_unload(name))
            else:
                self.admit(name)
        due = self.machine.next_s(self.now)
        if due < float("inf"):
            self.at(due - self.now, lambda: None)

    def end_load(self, name: str) -> None:
        if self.random.random() < 0.1:
            del self.taken[name]
            self.machine.failed(name, self.now)
            self.refused += len(self.waiting[name])
            self.waiting[name].clear()
        else:
            self.machine.loaded(name, self.now)
            self.admit(name)

    def admit(self, name: str) -> None:
        numbers, self.waiting[name] = self.waiting[name], set()
        for number in sorted(numbers):
            self.begin(name, number)

    def end_unload(self, name: str) -> None:
        del self.taken[name]
        self.machine.unloaded(name)

    def someone_dies(self) -> None:
        loaded = [name for name, model in self.machine.models.items() if model.state == "loaded"]
        if loaded:
            name = self.random.choice(loaded)
            self.machine.died(name, self.now)
            self.lost += len(self.running[name])
            self.running[name].clear()
            self.refused += len(self.waiting[name])
            self.waiting[name].clear()
            self.at(1.0, lambda: self.end_unload(name))

    def check(self) -> None:
        assert sum(self.taken.values()) <= BUDGET, "L1: more is taken than there is"
        models = self.machine.models
        assert sum(model.state == "loading" for model in models.values()) <= 1, "L3: two loads at once"
        for name, model in models.items():
            assert model.users == len(self.running[name]), f"users of {name}"
            assert model.waiting == len(self.waiting[name]), f"those that wait for {name}"
            assert not model.users or model.state == "loaded", "L2: used and not there"
        assert self.machine.waiting <= self.machine.waiting_max, "L4"


@pytest.mark.parametrize("first_seed", [0, 100, 200])
def test_no_law_is_broken_and_every_request_hears_something(first_seed: int) -> None:
    answered = sum(World(seed).run() for seed in range(first_seed, first_seed + 100))
    assert answered > 3000, "most requests are answered"


def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Residency, "used_bytes", property(lambda self: 0))


def careless(monkeypatch: pytest.MonkeyPatch) -> None:
    def unload(self: Residency, model: Resident) -> Any:
        model.state, model.drains, model.expires_s = "unloading", False, None
        return residency.Action("unload", model.name)

    monkeypatch.setattr(Residency, "_unload", unload)
    monkeypatch.setattr(Residency, "_is_idle", lambda self, model, now_s: model.state == "loaded")


def impatient_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model drains, and models that are used again and again are never unloaded: only an end of the
    traffic lets others in, so nothing is broken but the order. It forgets who waits instead."""
    monkeypatch.setattr(Residency, "_admit", lambda self, model, now_s: None)


@pytest.mark.parametrize("mutant", [unlimited, careless, impatient_never])
def test_a_machine_that_breaks_a_law_is_caught(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)

    def run_all() -> None:
        for seed in range(100):
            World(seed).run()

    with pytest.raises(AssertionError):
        run_all()


def test_a_model_that_is_always_busy_drains_for_one_that_waits() -> None:
    """Two models of which one fits, and requests for the first that overlap without end."""
    machine = Residency.of({"busy": 80, "other": 80}, 100, waiting_max=10, keep_alive_s=None)
    assert machine.enter("busy", 0.0) == "waits"
    assert [action.verb for action in machine.actions(0.0)] == ["load"]
    machine.loaded("busy", 1.0)
    first = machine.use("busy")
    assert machine.enter("other", 2.0) == "waits"
    assert machine.actions(2.0) == []
    assert machine.enter("busy", 3.0) == "in", "there is patience"
    patience_ends_s = machine.next_s(3.0)
    assert machine.actions(patience_ends_s) == []
    assert machine.enter("busy", patience_ends_s + 1) == "waits", "it drains"
    machine.leave(first, patience_ends_s + 2)
    assert machine.actions(patience_ends_s + 2) == [], "one of its requests still runs"
    machine.leave(first, patience_ends_s + 3)
    assert machine.actions(patience_ends_s + 3) == [residency.Action("unload", "busy")]
    machine.unloaded("busy")
    assert machine.actions(patience_ends_s + 4) == [residency.Action("load", "other")]


def test_one_that_drains_stays_when_the_other_request_is_given_up() -> None:
    machine = Residency.of({"busy": 80, "other": 80}, 100, waiting_max=10, keep_alive_s=None)
    machine.enter("busy", 0.0)
    machine.actions(0.0)
    machine.loaded("busy", 1.0)
    machine.enter("other", 2.0)
    machine.actions(10.0)
    assert machine.enter("busy", 11.0) == "waits"
    machine.leave_queue("other")
    assert [(action.verb, action.name) for action in machine.actions(12.0)] == [("admit", "busy")]
    assert machine.models["busy"].users == 2


def test_a_load_longer_than_patience_is_for_those_that_waited_for_it() -> None:
    """Requests that wait for a model's first load leave, and come again once they are prepared."""
    machine = Residency.of({"slow": 80, "other": 80}, 100, waiting_max=10, keep_alive_s=None)
    assert [machine.enter(name, 0.0) for name in ("slow", "slow", "other")] == ["waits"] * 3
    machine.actions(0.0)
    machine.loaded("slow", 60.0)
    for _ in range(2):
        machine.leave(machine.use("slow"), 60.0, keep_fresh=True)
    assert machine.actions(60.1) == []
    assert machine.enter("slow", 60.2) == "in"
    machine.leave(machine.use("slow"), 60.3)
    assert machine.actions(60.4) == [], "the second one is still prepared"
    assert machine.enter("slow", 60.5) == "in"
    machine.leave(machine.use("slow"), 60.6)
    assert machine.actions(60.7) == [residency.Action("unload", "slow")]


def test_the_least_recently_used_goes_first_and_no_more_than_needed() -> None:
    machine = Residency.of({"a": 30, "b": 30, "c": 30, "d": 40}, 100, waiting_max=10, keep_alive_s=None)
    for at, name in enumerate("abc"):
        machine.enter(name, float(at))
        machine.actions(float(at))
        machine.loaded(name, float(at))
        machine.leave(machine.use(name), 10.0 + at)
    machine.enter("a", 20.0)
    machine.leave(machine.use("a"), 21.0)
    machine.enter("d", 30.0)
    assert [(action.verb, action.name) for action in machine.actions(30.0)] == [("unload", "b")]


def test_keep_alive_is_a_time_nothing_or_for_ever() -> None:
    machine = Residency.of({"a": 30}, 100, waiting_max=10, keep_alive_s=60.0)
    for keep_alive_s, gone_after_s in ((60.0, 60.0), (0.0, 0.0), (None, float("inf"))):
        machine.enter("a", 0.0)
        machine.actions(0.0)
        if machine.models["a"].state == "loading":
            machine.loaded("a", 0.0)
        machine.keep_alive("a", keep_alive_s, 0.0)
        machine.leave(machine.use("a"), 100.0)
        assert machine.actions(100.0 + min(gone_after_s, 1e9) - 0.001) == [] or not gone_after_s
        if gone_after_s < float("inf"):
            machine.actions(100.0 + gone_after_s)
            assert machine.models["a"].state == "unloading"
            machine.unloaded("a")
        else:
            assert machine.next_s(100.0) == float("inf")


def test_a_model_that_does_not_load_is_refused_for_longer_and_longer_and_tried_again() -> None:
    machine = Residency.of({"a": 30}, 100, waiting_max=10, keep_alive_s=None)
    waits = []
    now = 0.0
    for _ in range(10):
        assert machine.enter("a", now) == "waits"
        assert [action.verb for action in machine.actions(now)] == ["load"]
        machine.failed("a", now)
        assert machine.enter("a", now) == "refused"
        waits.append(machine.models["a"].retry_s - now)
        now = machine.models["a"].retry_s
    assert waits == sorted(waits)
    assert waits[0] == residency.RETRY_FIRST_S
    assert waits[-1] == residency.RETRY_MAX_S


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(1, 40))
def test_as_many_models_as_possible_fit_together_from_the_smallest_on(weights: list[int], arena: int) -> None:
    sizes = {f"m{number}": size for number, size in enumerate(sorted(weights))}
    got = shares(sizes, dict.fromkeys(sizes, arena), BUDGET)
    together = max(
        (count for count in range(1, len(sizes) + 1) if sum(sorted(weights)[:count]) + count * arena <= BUDGET),
        default=1,
    )
    assert sum(list(got.values())[:together]) <= BUDGET
    for name, size in sizes.items():
        assert min(size + arena, BUDGET) <= got[name] <= BUDGET, "each has its arena, or all that there is"
    assert all(
        share - sizes[name] <= got["m0"] - sizes["m0"] or share - sizes[name] == arena for name, share in got.items()
    ), "no larger model has more room than the smallest"
