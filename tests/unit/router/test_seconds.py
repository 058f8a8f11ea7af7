"""The router that knows snapshots: a score in seconds."""

from __future__ import annotations

import pytest

from weft.costs.step import StepCost
from weft.prefix_digests import prefix_digests
from weft.router.protocol import ReplicaLoad, Route, RoutedRequest
from weft.router.seconds import AMPLIFIED, Seconds, SharedCosts
from weft.snapshot_report import ReportedSnapshot, SnapshotReport
from weft.units import PAGE_TOKENS

COSTS = StepCost(fixed_s=0.01, token_s=1e-3)
"""A prompt of 1,000 tokens takes a second."""


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def prompt(length: int, number: int = 0, common: int = 0) -> list[int]:
    """``common`` tokens that all numbers have, then tokens of its own."""
    return [*range(common), *range(1_000_000 * (number + 1), 1_000_000 * (number + 1) + length - common)]


class Rig:
    """A router with ``count`` replicas, and the loads that a fleet would count."""

    def __init__(self, count: int = 2) -> None:
        self.clock = Clock()
        self.router = Seconds(self.clock)
        self.costs = dict.fromkeys(range(count), COSTS)
        self.sequences = dict.fromkeys(range(count), 0)
        self._reports = dict.fromkeys(range(count), 0)
        for replica in range(count):
            self.router.joined(replica)
            self.report(replica, is_full=True)

    def report(self, replica: int, *prefixes: list[int], salt: str = "", is_full: bool = False) -> bool:
        self._reports[replica] += 1
        added = [
            ReportedSnapshot(int(prefix_digests(prefix, salt)[-1]), len(prefix) // PAGE_TOKENS * PAGE_TOKENS)
            for prefix in prefixes
        ]
        return self.router.reported(
            replica, SnapshotReport(number=self._reports[replica], added=added, is_full=is_full)
        )

    def loads(self) -> list[ReplicaLoad]:
        return [
            ReplicaLoad(replica, count, 0, rows=8, costs=self.costs[replica])
            for replica, count in self.sequences.items()
        ]

    def choose(self, tokens: list[int], salt: str = "") -> Route:
        return self.router.choose(RoutedRequest("asked", tokens, salt), self.loads())

    def place(self, name: str, tokens: list[int]) -> Route:
        request = RoutedRequest(name, tokens)
        choice = self.router.choose(request, self.loads())
        self.router.placed(request, choice)
        self.sequences[choice.replica] += 1
        return choice


def test_a_request_goes_where_its_snapshot_is() -> None:
    rig = Rig(3)
    rig.report(2, prompt(1024))
    rig.report(1, prompt(512))
    choice = rig.choose(prompt(2000))
    assert (choice.replica, choice.predicted_tokens) == (2, 1024)
    assert rig.choose(prompt(2000), salt="other").predicted_tokens == 0
    assert rig.choose(prompt(2000, 5)).replica == 0


def test_ties_go_to_the_least_loaded() -> None:
    rig = Rig(3)
    rig.sequences = {0: 2, 1: 1, 2: 1}
    assert rig.choose(prompt(500)).replica == 1


def test_a_hot_prefix_goes_to_a_second_replica_once_waiting_takes_longer_than_computing() -> None:
    rig = Rig()
    rig.report(0, prompt(960, common=960))
    chosen = [rig.place(str(number), prompt(1260, number, common=960)).replica for number in range(8)]
    assert chosen[:3] == [0, 0, 0], "0.3 s each, against 1.26 s elsewhere"
    assert chosen[4:].count(1) >= 1
    rig.clock.now_s = 100.0
    for number in range(8):
        rig.router.admitted(str(number), 0)
    assert rig.choose(prompt(1260, 99, common=960)).replica == 0, "waiting is over"


def test_a_prompt_that_is_computed_now_counts_as_a_snapshot_to_come() -> None:
    rig = Rig()
    first = rig.place("first", prompt(3000, common=2048))
    assert (first.replica, first.predicted_tokens) == (0, 0)
    rig.clock.now_s = 2.0  # a second of the first is left; to compute 2048 tokens again takes two
    second = rig.choose(prompt(3000, 1, common=2048))
    assert (second.replica, second.predicted_tokens) == (0, 2048)
    rig.router.ended("first")
    assert rig.choose(prompt(3000, 1, common=2048)).predicted_tokens == 0, "nothing was reported of it"


def test_an_engine_that_reports_higher_costs_gets_fewer_requests() -> None:
    rig = Rig()
    rig.costs[0] = StepCost(fixed_s=0.1, token_s=1e-2)
    counts = [0, 0]
    for number in range(22):
        counts[rig.place(str(number), prompt(500, number)).replica] += 1
    assert counts[0] * 5 <= counts[1]


def test_an_engine_that_is_late_gets_fewer_requests_before_it_reports() -> None:
    rig = Rig()
    rig.report(0, prompt(960, common=960))
    assert rig.place("stuck", prompt(1260, 1, common=960)).replica == 0
    rig.clock.now_s = 10.0  # 0.3 s of work, and no token yet
    assert rig.choose(prompt(1260, 2, common=960)).replica == 1


def test_a_replica_without_a_free_row_counts_the_wait_for_one() -> None:
    rig = Rig()
    rig.place("short", prompt(100))
    rig.clock.now_s = 5.0
    rig.router.admitted("short", 0)
    rig.router.ended("short")
    rig.sequences = {0: 8, 1: 3}
    rig.report(0, prompt(448))
    assert rig.choose(prompt(500)).replica == 1
    rig.sequences = {0: 7, 1: 3}
    assert rig.choose(prompt(500)).replica == 0


def test_where_prompts_part_anywhere_is_a_boundary_of_the_next_request() -> None:
    rig = Rig()
    assert rig.place("first", prompt(2000, 0, common=700)).boundaries == ()
    rig.sequences[0] = 50
    second = rig.place("second", prompt(2000, 1, common=700))
    assert second.replica == 1, "it sees the prefix for the first time"
    assert second.boundaries == (640,)
    continued = rig.choose(prompt(2000, 1, common=700) + prompt(100, 9))
    assert continued.boundaries == (1984, 640)


def test_predicted_tokens_are_counted_beside_those_of_the_engine() -> None:
    rig = Rig()
    rig.report(1, prompt(1024))
    choice = rig.place("a", prompt(2000))
    rig.router.admitted("a", 960)
    rig.router.admitted("a", 960)
    rig.router.ended("a")
    counts = rig.router.counts()[choice.replica]
    assert (counts.requests, counts.predicted_tokens, counts.cached_tokens) == (1, 1024, 960)
    assert (counts.snapshots, counts.is_stale, counts.gaps) == (1, False, 0)


def test_a_replica_that_left_has_nothing_and_is_stale() -> None:
    rig = Rig()
    rig.report(1, prompt(1024))
    rig.router.left(1)
    assert rig.choose(prompt(2000)).predicted_tokens == 0
    assert rig.router.counts()[1].is_stale
    rig.router.joined(1)
    assert not rig.report(1, prompt(512), is_full=True)
    assert rig.choose(prompt(2000)) == Route(1, 512)


def test_nothing_is_left_of_requests_that_ended() -> None:
    rig = Rig()
    for number in range(50):
        rig.place(str(number), prompt(200, number))
    for number in range(50):
        rig.router.ended(str(number))
    assert not rig.router._flights
    assert all(
        not known.queue._prefills and not known.queue._by_beginning and not known.queue._work_s
        for known in rig.router._replicas.values()
    )


def test_a_router_that_restarts_under_load_knows_what_full_reports_say() -> None:
    rig = Rig()
    rig.report(1, prompt(1024))
    for number in range(6):
        rig.place(str(number), prompt(400, number + 10))
    rig.router = Seconds(rig.clock)
    rig._reports = {0: 40, 1: 70}
    for replica in (0, 1):
        rig.router.joined(replica)
    assert rig.choose(prompt(2000)).predicted_tokens == 0, "no full report has come"
    rig.report(1, prompt(512))
    rig.report(0, is_full=True)
    rig.report(1, prompt(1024), prompt(512), is_full=True)
    for number in range(6):  # of requests that the router before it had placed
        rig.router.admitted(str(number), 0)
        rig.router.ended(str(number))
    rig.sequences = {0: 0, 1: 0}
    assert rig.choose(prompt(2000)) == Route(1, 1024)
    assert [counts.is_stale for counts in rig.router.counts().values()] == [False, False]


def test_what_a_prefill_costs_others_grows_with_the_queue_and_with_a_full_cache() -> None:
    costs = SharedCosts()
    assert costs.weight(0) == 0.0
    costs.admitted(1000, 500)
    assert costs.weight(0) == 0.0, "nothing is evicted, so nothing is displaced"
    costs.evicted(0)
    assert costs.weight(0) == pytest.approx(AMPLIFIED), "each computed token displaces one worth as much"
    for _ in range(1000):
        costs.placed("both", ahead=1, decodes=1)
    assert costs.weight(0) == pytest.approx(3.0 * AMPLIFIED, rel=0.01)
    assert costs.weight(0, "prefill") == pytest.approx(AMPLIFIED), "each role has a queue of its own"
    assert costs.weight(1) == pytest.approx(2.0 * AMPLIFIED, rel=0.01), "a replica with room"
    costs.left(0)
    assert costs.weight(0) == costs.weight(1)


def test_idle_replicas_without_the_prompt_take_turns() -> None:
    rig = Rig(4)
    replicas = []
    for number in range(8):
        replicas.append(rig.place(str(number), prompt(300, number)).replica)
        rig.router.admitted(str(number), 0)
        rig.router.ended(str(number))
        rig.sequences = dict.fromkeys(range(4), 0)
    assert replicas == [0, 1, 2, 3, 0, 1, 2, 3]
