"""Whether a prompt is split: the router's own decision, with fixed costs."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.router.test_seconds import COSTS, Rig, prompt
from weft.handoff import LinkStats, Role
from weft.router.protocol import ReplicaLoad, Route, RoutedRequest
from weft.router.seconds import AMPLIFIED, HANDOFF_AGAIN_S

PREFILL, DECODE = 0, 1
LINK = LinkStats(bytes_s=1e6, latency_s=0.0, kv_bytes=1600, state_bytes=50_000, chunk_tokens=1024)
"""0.1 ms for a token and 50 ms for a state, where a token of a prompt takes 1 ms."""


class Split(Rig):
    """One replica for prompts, one for answers."""

    def __init__(self, roles: tuple[Role, ...] = ("prefill", "decode"), link: LinkStats | None = LINK) -> None:
        super().__init__(len(roles))
        self.roles, self.links = roles, [link] * len(roles)

    def loads(self) -> list[ReplicaLoad]:
        return [
            load._replace(role=role, link=link)
            for load, role, link in zip(super().loads(), self.roles, self.links, strict=True)
        ]

    def route(self, tokens: list[int], **more: bool) -> Route:
        return self.router.choose(RoutedRequest("asked", tokens, **{"may_split": True, **more}), self.loads())

    def delay(self, others: int) -> None:
        """So many sequences decode on the replica for answers, and have for long."""
        self.sequences[DECODE] = others
        self.router._shared_costs._delayed["decode"] = others / AMPLIFIED


def test_an_idle_fleet_splits_nothing() -> None:
    """A prefill of 2 s on either side; a split adds the last chunk."""
    choice = Split().route(prompt(2000))
    assert (choice.replica, choice.decode) == (DECODE, None)


def test_a_prompt_that_delays_more_than_its_transfer_takes_is_split() -> None:
    rig = Split()
    rig.delay(1)
    choice = rig.route(prompt(2000))
    assert (choice.replica, choice.decode, choice.decode_tokens) == (PREFILL, DECODE, 0)
    assert rig.route(prompt(50)).decode is None, "5 ms of KV and 50 ms of state against 50 ms of delay"
    assert rig.route(prompt(2000), may_split=False).replica == DECODE


@pytest.mark.parametrize(("bytes_s", "is_split"), [(1e6, True), (77e3, True), (76e3, False)])
def test_the_price_of_the_transfer_is_that_of_the_measured_link(bytes_s: float, is_split: bool) -> None:
    """2 s of delay, less a step of 10 ms. The last chunk of 2,000 tokens is 152.4 KB: 1.98 s at 77 KB/s. What
    comes before it goes out beside the prefill."""
    rig = Split(link=msgspec.structs.replace(LINK, bytes_s=bytes_s))
    rig.delay(1)
    assert (rig.route(prompt(2000)).decode is not None) == is_split


def test_a_hit_on_the_side_of_answers_keeps_a_prompt_whole() -> None:
    rig = Split()
    rig.delay(1)
    rig.report(DECODE, prompt(1920))
    choice = rig.route(prompt(2000))
    assert (choice.replica, choice.decode, choice.predicted_tokens) == (DECODE, None, 1920)


def test_a_hit_on_the_side_of_prompts_counts_and_records_that_are_there_are_not_sent() -> None:
    rig = Split()
    rig.delay(1)
    rig.report(PREFILL, prompt(6016))
    rig.report(DECODE, prompt(4096))
    choice = rig.route(prompt(8000))
    assert (choice.replica, choice.predicted_tokens) == (PREFILL, 6016)
    assert (choice.decode, choice.decode_tokens) == (DECODE, 4096)


def test_a_hit_on_the_side_of_prompts_splits_what_would_stay_whole_without_it() -> None:
    rig = Split()
    assert rig.route(prompt(4000)).decode is None
    rig.report(PREFILL, prompt(3008))
    assert rig.route(prompt(4000)).decode == DECODE


@pytest.mark.parametrize(("role", "is_whole"), [("decode", True), ("both", False)])
def test_a_prompt_costs_a_decode_replica_what_prefill_replicas_measure(role: Role, is_whole: bool) -> None:
    """80 tokens behind its snapshot, 2,000 on the other side. It has measured prefills of a few tokens, and
    each took a step's time. A replica that has all kinds of prompts is believed."""
    rig = Split(("prefill", role))
    rig.router._shared_costs._delayed[role] = 1 / AMPLIFIED
    rig.report(DECODE, prompt(1920))
    rig.costs[DECODE] = msgspec.structs.replace(COSTS, token_s=70 * COSTS.token_s)
    assert (rig.route(prompt(2000)).replica == DECODE) == is_whole


def test_two_replicas_between_which_records_do_not_pass_are_left_alone_for_a_while() -> None:
    rig = Split(("prefill", "decode", "decode"))
    rig.delay(1)
    rig.sequences[2] = 1
    assert rig.route(prompt(2000)).decode == DECODE
    rig.router.handoff_failed(PREFILL, DECODE)
    assert rig.route(prompt(2000)).decode == 2
    rig.router.handoff_failed(PREFILL, 2)
    assert rig.route(prompt(2000)).decode is None
    rig.clock.now_s = HANDOFF_AGAIN_S + 1
    assert rig.route(prompt(2000)).decode == DECODE


def test_an_engine_that_was_replaced_is_a_partner_at_once() -> None:
    rig = Split()
    rig.delay(1)
    rig.router.handoff_failed(PREFILL, DECODE)
    assert rig.route(prompt(2000)).decode is None
    rig.router.left(DECODE)
    rig.router.joined(DECODE)
    assert rig.route(prompt(2000)).decode == DECODE


@pytest.mark.parametrize(("room_bytes", "is_split"), [(0, True), (250_000, True), (249_999, False)])
def test_records_that_the_other_side_has_no_room_for_are_not_sent(room_bytes: int, is_split: bool) -> None:
    """125 pages of 1,600 bytes and a state of 50,000."""
    rig = Split(link=msgspec.structs.replace(LINK, room_bytes=room_bytes))
    rig.delay(1)
    assert (rig.route(prompt(2000)).decode is not None) == is_split


def test_a_replica_that_sends_nothing_is_no_partner() -> None:
    rig = Split(link=None)
    rig.delay(1)
    assert rig.route(prompt(2000)).decode is None


def test_without_a_replica_for_answers_one_for_prompts_serves_whole() -> None:
    rig = Split(("prefill", "prefill"))
    assert rig.route(prompt(2000)).decode is None


def test_what_is_sent_beside_the_prefill_is_not_waited_for() -> None:
    assert LINK.wait_s(0, 0, 4096, 4.0) == pytest.approx(0.1024 + 0.05), "the last chunk and its state"
    assert LINK.wait_s(0, 0, 4096, 0.1) == pytest.approx(0.4096 + 4 * 0.05 - 0.1), "the link is behind"
    assert LINK.wait_s(4032, 0, 4096, 4.0) == pytest.approx(0.0064 + 0.05), "the rest is there"
