"""Prefill apart from decode in ``weft simulate --roles``: the engines' scheduler, memory and restores."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from tests.sim.test_fleet_replay import ARENA
from tests.sim.test_snapshot_reports import COST
from tests.support.synthetic import Library, document_traffic
from weft.handoff import Role
from weft.request import SamplingParams
from weft.schedule.sequence import Sequence
from weft.schedule.tier_values import FetchWish
from weft.units import SeqId
from weft_tools.sim.arms import find_arm
from weft_tools.sim.fleet_replay import FleetReplayReport, Kill, replay_fleet
from weft_tools.sim.handoffs import LinkModel, VirtualLink
from weft_tools.sim.replay import VirtualClock
from weft_tools.sim.report import Gaps
from weft_tools.sim.traffic import Traffic

ROLES: tuple[Role, ...] = ("prefill", "decode")
LINK = LinkModel(1e12, ARENA.page_bytes, ARENA.slot_bytes, 256, latency_s=1e-6)


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    return document_traffic(3, 40, Library(documents=6, lifetime_s=20.0)).faster(3)


def split(traffic: Traffic, link: LinkModel = LINK, router: str = "split", **more: list[Kill]) -> FleetReplayReport:
    return replay_fleet(traffic, ARENA, COST, replicas=2, router=router, roles=ROLES, link=link, restart_s=2.0, **more)


def limit_buffers(monkeypatch: pytest.MonkeyPatch, limit_bytes: int) -> None:
    """Of all engines, and in what they say of themselves."""
    for module in ("handoffs", "store_tier"):
        monkeypatch.setattr(f"weft_tools.sim.{module}.buffer_limit", lambda arena_bytes: limit_bytes)


@pytest.fixture(scope="module")
def report(traffic: Traffic) -> FleetReplayReport:
    return split(traffic)


def test_every_request_ends_and_decode_engines_compute_no_prompt(report: FleetReplayReport, traffic: Traffic) -> None:
    assert not np.isnan(report.timeline.ended_s).any()
    assert (report.timeline.ended_s >= report.timeline.first_s).all()
    several = [one.output_tokens for one in traffic.requests if one.output_tokens > 1]
    assert report.splits == len(several) > 0
    prompts = sum(one.prompt_tokens for one in traffic.requests if one.output_tokens > 1)
    assert report.replicas[1].computed_tokens < sum(several) + 0.02 * prompts


def test_equal_runs_are_equal(report: FleetReplayReport, traffic: Traffic) -> None:
    assert split(traffic) == report
    assert split(traffic).digest == report.digest


def test_a_slow_link_delays_the_second_token_and_no_first_one(traffic: Traffic) -> None:
    """Both are slow enough to send each chunk beside the next one."""
    slow, slower = (split(traffic, replace(LINK, bytes_s=ARENA.slot_bytes / state_s)) for state_s in (0.1, 1.0))
    waited_s = [np.mean(one.timeline.ended_s - one.timeline.first_s) for one in (slower, slow)]
    assert waited_s[0] > waited_s[1] + 0.5
    assert slower.ttft.p50 == pytest.approx(slow.ttft.p50, rel=0.1)


def test_a_link_that_is_fast_beside_the_prefill_takes_no_states_behind_chunks() -> None:
    stats = LINK.stats(ARENA.arena_bytes)
    assert list(stats.chunk_ends(0, 1000, 1.0)) == []
    assert list(msgspec.structs.replace(stats, bytes_s=stats.state_bytes / 0.1).chunk_ends(0, 1000, 1.0)) == [
        256,
        512,
        768,
    ]


def test_the_router_splits_nothing_over_a_link_that_takes_longer_than_it_saves(traffic: Traffic) -> None:
    assert split(traffic, replace(LINK, bytes_s=ARENA.slot_bytes / 500.0), "seconds").splits == 0


def test_the_router_splits_nothing_that_no_engine_takes(traffic: Traffic, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_buffers(monkeypatch, ARENA.slot_bytes - 1)
    assert split(traffic).splits == 0


@pytest.mark.parametrize("replica", [0, 1])
def test_requests_of_a_side_that_dies_end_elsewhere(traffic: Traffic, replica: int) -> None:
    kills = [Kill(replica, one.at_s + 0.01) for one in traffic.requests[::7]]
    killed = split(traffic, kills=kills)
    assert killed.resumes > 0
    assert not np.isnan(killed.timeline.ended_s).any()


def test_a_request_waits_for_the_buffer_that_another_one_has_until_its_load_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is one buffer. It is free when the step behind the load has ended, and not when the tree has its
    pages: a plan may come between the two."""
    limit_buffers(monkeypatch, 40 * ARENA.page_bytes + ARENA.slot_bytes)
    clock = VirtualClock()
    memory = find_arm("lru").make_memory(ARENA, COST, clock)
    tier, inbox = LINK.tier_for(memory, COST, clock)
    restores = tier.restores
    first, second = (
        Sequence(
            SeqId(number),
            prompt=np.arange(601, dtype=np.int32) + 1000 * number,
            sampling=SamplingParams(),
            seed=0,
            stop_ids=(),
            rank=(0, number, 0),
        )
        for number in (1, 2)
    )

    def wish(seq: Sequence) -> FetchWish | None:
        match = memory.match(seq.prompt, salt="")
        return restores.look(seq, seq.prompt, match, (), 0).wish

    assert inbox.arrive("first", "", first.prompt[:-1], 0)
    asked = wish(first)
    assert asked is not None
    restores.begin(asked)
    assert not inbox.arrive("second", "", second.prompt[:-1], 0), "the first one is not copied yet"
    clock.advance(1.0)
    tier.poll()
    assert inbox.arrive("second", "", second.prompt[:-1], 0)

    [key] = restores.fetches
    for passes in (
        lambda: None,
        lambda: restores.loading(key, 1),
        lambda: restores.finished(1),
        lambda: restores.published(key),
    ):
        passes()
        waits_for = wish(second)
        assert waits_for is not None, "it computes its prompt"
        restores.begin(waits_for)
        assert waits_for.key not in restores.fetches, "nothing is over the limit"
    restores.finished(2)
    asked = wish(second)
    assert asked is not None
    restores.begin(asked)
    assert list(restores.fetches) == [asked.key]


def test_parcels_leave_one_after_the_other() -> None:
    link = VirtualLink(LinkModel(100.0, 10, 30, 16, latency_s=0.5))
    assert [link.send(0, 16, 1.0), link.send(16, 48, 1.1), link.send(0, 0, 9.0)] == pytest.approx([1.9, 2.4, 9.8])
    assert link.sent_bytes == 120


def test_gaps_are_counted_to_two_per_cent() -> None:
    gaps = Gaps()
    gaps.add(0.01, 98)
    gaps.add(0.3)
    gaps.add(0.4)
    found = gaps.percentiles()
    assert (found.p50, found.p99) == pytest.approx((0.01, 0.3), rel=0.02)
    assert Gaps().percentiles().p99 == 0
