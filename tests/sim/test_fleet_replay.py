"""A trace through several replicas and the real router."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sim.test_snapshot_reports import COST
from tests.support.synthetic import Library, document_traffic
from tests.support.workload import small_arena
from weft.errors import ConfigError
from weft_tools.sim.fleet_replay import FleetReplayReport, Kill, replay_fleet
from weft_tools.sim.replay import replay
from weft_tools.sim.routers import ROUTERS
from weft_tools.sim.traffic import Traffic

ARENA = small_arena(pages_per_frame=64, slots_per_frame=2, frame_count=110)


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    return document_traffic(3, 40, Library(documents=6, lifetime_s=20.0)).faster(3)


@pytest.fixture(scope="module")
def undisturbed(traffic: Traffic) -> FleetReplayReport:
    return replay_fleet(traffic, ARENA, COST, replicas=3)


def test_one_replica_is_a_replay_of_one_engine(traffic: Traffic) -> None:
    alone, fleet = replay(traffic, ARENA, COST), replay_fleet(traffic, ARENA, COST, replicas=1)
    assert fleet.computed_tokens + fleet.cached_tokens == alone.computed_tokens + alone.cached_tokens
    assert abs(fleet.hit_rate - alone.hit_rate) < 0.02
    assert fleet.ttft.p50 == pytest.approx(alone.ttft.p50, rel=0.1)


@pytest.mark.parametrize("router", ROUTERS)
def test_every_request_ends_with_every_router(traffic: Traffic, router: str) -> None:
    report = replay_fleet(traffic, ARENA, COST, replicas=3, router=router)
    assert report.requests == len(traffic)
    assert not np.isnan(report.timeline.ended_s).any()
    assert sum(replica.requests for replica in report.replicas) == len(traffic)
    assert (report.timeline.first_s >= [one.at_s for one in traffic.requests]).all()


def test_the_router_predicts_what_engines_find(undisturbed: FleetReplayReport, traffic: Traffic) -> None:
    assert undisturbed.predicted_tokens == pytest.approx(undisturbed.admitted_tokens, rel=0.05)
    assert undisturbed.admitted_tokens == undisturbed.cached_tokens > 0
    blind = replay_fleet(traffic, ARENA, COST, replicas=3, router="round-robin")
    assert undisturbed.hit_rate > blind.hit_rate


def test_requests_of_an_engine_that_dies_end_elsewhere(traffic: Traffic, undisturbed: FleetReplayReport) -> None:
    middle_s = traffic.requests[len(traffic) // 2].at_s
    kills = [Kill(0, middle_s), Kill(1, middle_s + 0.5), Kill(0, middle_s + 3)]
    report = replay_fleet(traffic, ARENA, COST, replicas=3, kills=kills, restart_s=2.0)
    assert report.resumes > 0
    assert not np.isnan(report.timeline.ended_s).any()
    assert report.computed_tokens > undisturbed.computed_tokens
    before = undisturbed.timeline.ended_s < middle_s
    assert (report.timeline.ended_s[before] == undisturbed.timeline.ended_s[before]).all()


def test_without_a_replica_requests_wait_for_the_restart(traffic: Traffic) -> None:
    report = replay_fleet(traffic, ARENA, COST, replicas=1, kills=[Kill(0, 1.0)], restart_s=5.0)
    assert not np.isnan(report.timeline.ended_s).any()
    waited = [index for index, one in enumerate(traffic.requests) if 1.0 < one.at_s < 6.0]
    assert waited
    assert (report.timeline.began_s[waited] >= 6.0).all()


def test_equal_runs_are_equal(traffic: Traffic, undisturbed: FleetReplayReport) -> None:
    assert replay_fleet(traffic, ARENA, COST, replicas=3).digest == undisturbed.digest


def test_an_unknown_router_is_refused(traffic: Traffic) -> None:
    with pytest.raises(ConfigError, match="not a router"):
        replay_fleet(traffic, ARENA, COST, replicas=2, router="best")
