"""What a router knows by reports is what the cache has: predicted tokens are those that a match has."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from tests.support.synthetic import Library, document_traffic
from tests.support.workload import small_arena
from weft.costs.step import StepCost
from weft.prefix_digests import prefix_digests
from weft.router.snapshot_table import SnapshotTable
from weft.snapshot_report import SnapshotReport
from weft_tools.sim.arms import find_arm
from weft_tools.sim.replay import Player, sizes_for
from weft_tools.sim.traffic import Traffic

COST = StepCost(0.005, 1e-5, 0.0, 1e-4, 0.0)
LIBRARY = Library(documents=6, lifetime_s=20.0)


def traffic(seed: int) -> Traffic:
    plain = document_traffic(seed, 30, LIBRARY)
    salts = Random(seed)
    return Traffic(
        [replace(one, salt=salts.choice(["", "", "tenant"])) for one in plain.requests],
        block_tokens=plain.block_tokens,
        fronts=plain.fronts,
        block_count=plain.block_count,
    )


class Follow:
    """A player whose reports go into a table. ``lost``: the report that does not arrive."""

    def __init__(self, seed: int, *, slots: int, arm: str = "lru", lost: int = 0) -> None:
        self.traffic = traffic(seed)
        arena = small_arena(pages_per_frame=64, slots_per_frame=slots, frame_count=90)
        self.player = Player(
            self.traffic, arena, COST, find_arm(arm), sizes_for(arena, self.traffic), jump=True, on_progress=None
        )
        self.follower = self.player.memory.follow_snapshots(pages=False)
        self.table = SnapshotTable()
        self.table.join(0)
        self.table.apply(0, self.follower.full_report())
        self.reports: list[SnapshotReport] = []
        self.lost = lost
        self.errors = 0
        self.hits = 0

    def run(self, *, compare: bool = True) -> None:
        player = self.player
        while player._next < len(self.traffic) or player.scheduler.has_work:
            if not player.scheduler.has_work:
                player.clock.advance_to(self.traffic.requests[player._next].at_s)
            player._arrive()
            player._step()
            report = self.follower.take()
            if report is not None:
                self.reports.append(report)
                if report.number != self.lost:
                    self.table.apply(0, report)
                if compare:
                    self.compare()

    def compare(self) -> None:
        for index in range(max(0, self.player._next - 3), min(len(self.traffic), self.player._next + 3)):
            prompt, salt = self.traffic.prompt(index), self.traffic.requests[index].salt
            match = self.player.memory.match(prompt, salt=salt)
            known = self.table.matches(prefix_digests(prompt, salt), prompt).get(0)
            position = 0 if known is None else known.position
            self.hits += match.cached_tokens > 0
            # Without states a prompt may end within four pages of a report.
            near = 63 if not self.player.memory.plan.slots_per_frame else 0
            self.errors += not match.cached_tokens - near <= position <= match.cached_tokens


@pytest.mark.parametrize(("slots", "arm"), [(2, "lru"), (2, "value"), (0, "lru")])
def test_a_router_predicts_what_a_match_finds_after_every_report(slots: int, arm: str) -> None:
    follow = Follow(3, slots=slots, arm=arm)
    follow.run()
    assert follow.errors == 0
    assert follow.hits > 50
    assert any(report.removed for report in follow.reports), "something was evicted"
    assert len({report.number for report in follow.reports}) == len(follow.reports)


def test_a_lost_report_is_noticed_and_a_full_report_repairs_it() -> None:
    whole = Follow(3, slots=2)
    whole.run(compare=False)
    lost = max(whole.reports[:-1], key=lambda report: len(report.added)).number
    follow = Follow(3, slots=2, lost=lost)
    follow.run()
    assert follow.errors, "the control: without this report the router predicts something else"
    assert follow.table.is_stale(0)
    follow.table.apply(0, follow.follower.full_report())
    assert not follow.table.is_stale(0)
    assert follow.table.snapshots_of(0) == follow.follower.offered_count
    before = follow.errors
    follow.compare()
    assert follow.errors == before


def test_a_flush_removes_everything_that_was_reported() -> None:
    follow = Follow(4, slots=2)
    follow.run(compare=False)
    assert follow.table.snapshots_of(0)
    follow.player.memory.flush()
    report = follow.follower.take()
    assert report is not None
    assert not report.added
    follow.table.apply(0, report)
    assert follow.table.snapshots_of(0) == 0
    assert not follow.table._holders
    assert follow.follower.take() is None
    assert not follow.follower.watch.digests or follow.player.memory.prefix_tree.by_id
    follow.follower.watch.stop()
    assert follow.player.memory.prefix_tree.watches == []


def test_pages_are_reported_of_a_model_with_states_if_a_router_asks() -> None:
    follow = Follow(5, slots=2)
    follow.run(compare=False)
    pages = follow.player.memory.follow_snapshots(pages=True).full_report()
    states = follow.player.memory.follow_snapshots(pages=False).full_report()
    assert len(pages.added) > len(states.added) > 0
    assert {one.digest for one in states.added if not one.tail} <= {one.digest for one in pages.added}
    assert np.all([one.position % 16 == 0 for one in pages.added])
