"""Prefill apart from decode by seeds: every order of messages, and a death at every message."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tests.support.sharing import sharing_scenario
from tests.support.split_fleet import SplitFleet, expected
from tests.support.workload import VOCAB_SIZE, Scenario
from weft.handoff import Role
from weft.request import Request, SamplingParams
from weft.store.inbox import Inbox
from weft.units import PAGE_TOKENS, ceil_div

ROLES: tuple[Role, ...] = ("prefill", "decode", "decode")


HYBRID, ATTENTION, RECURRENT = 10, 0, 11
"""Seeds of geometries: pages and states, pages alone, states alone."""


def scenario(geometry: int = HYBRID) -> Scenario:
    one = sharing_scenario(geometry)
    sizes = replace(
        one.sizes, max_model_len=min(one.sizes.max_model_len, 512), step_tokens_max=64, rows_max=8, queue_max=64
    )
    return replace(one, sizes=sizes)


def requests(seed: int, count: int = 3) -> list[Request]:
    chance = Random(seed)
    system = [chance.randrange(VOCAB_SIZE) for _ in range(70)]
    return [
        Request(
            request_id=f"r{number}",
            cache_salt=chance.choice(("", "a")),
            prompt_tokens=[*system, *(chance.randrange(VOCAB_SIZE) for _ in range(chance.choice((1, 40, 90))))],
            sampling=SamplingParams(
                max_tokens=chance.choice((1, 2, 5)) if number else 5,
                seed=number,
                ignore_eos=True,
                temperature=chance.choice((0.0, 1.0)),
                n=chance.choice((1, 1, 2)),
            ),
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("geometry", [HYBRID, ATTENTION, RECURRENT])
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_messages_gives_the_answers_of_one_engine(seed: int, geometry: int) -> None:
    fleet = SplitFleet(scenario(geometry), ROLES, seed)
    asked = requests(seed)
    assert fleet.run(asked) == expected(fleet, asked)
    assert fleet.placement.handoff_count > 0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_at_any_message_changes_no_answer_and_leaves_nothing_leased(seed: int, victim: int) -> None:
    asked = requests(seed, 2)
    whole = SplitFleet(scenario(), ROLES, seed)
    answers = whole.run(asked)
    assert answers == expected(whole, asked)
    for message in range(1, whole.messages + 1):
        fleet = SplitFleet(scenario(), ROLES, seed, kill=(message, victim))
        assert fleet.run(asked) == answers, f"a death of {victim} at message {message}"


def long_prompts(count: int) -> list[Request]:
    chance = Random(count)
    return [
        Request(
            request_id=f"r{number}",
            prompt_tokens=[chance.randrange(VOCAB_SIZE) for _ in range(150)],
            sampling=SamplingParams(max_tokens=5, seed=number, ignore_eos=True),
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("prompts", [1.0, 1.5, 3.0])
def test_an_engine_with_room_for_few_prompts_computes_none_of_them_again(
    seed: int, prompts: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six come at once. Records wait at their senders until there is room."""
    one, asked = scenario(), long_prompts(6)
    room_bytes = int(prompts * (ceil_div(150, PAGE_TOKENS) * one.arena.page_bytes + one.arena.slot_bytes))

    def computed() -> int:
        fleet = SplitFleet(one, ("prefill", "decode"), seed, room_bytes=room_bytes)
        assert fleet.run(asked) == expected(fleet, asked)
        assert fleet.placement.handoff_count == len(asked)
        return int(fleet.replicas[1].engine.core.stats().computed_tokens)

    assert computed() == len(asked) * 4, "the tokens of the answers behind the first one"
    # the control: an inbox whose oldest records go for new ones
    monkeypatch.setattr(
        Inbox, "_pushed_out", lambda inbox, parcel: [name for name in inbox._arrivals if name != parcel.handoff]
    )
    assert computed() >= len(asked) * 4 + 150


def test_a_wrong_record_is_noticed() -> None:
    """The control: a state that changes behind the checksums."""
    fleet = SplitFleet(scenario(), ROLES, 0)
    for replica in fleet.replicas:
        inbox = replica.engine.peers.inbox
        accept = inbox.add

        def changed(parcel, records, accept=accept):  # type: ignore[no-untyped-def]
            record, state = records[-1]
            return accept(parcel, [*records[:-1], (record, state ^ 1)])

        inbox.add = changed
    with pytest.raises(AssertionError, match="does not hold the state"):
        fleet.run(requests(0))


def test_damaged_bytes_are_refused_and_the_request_is_served_another_way() -> None:
    asked = requests(0)
    fleet = SplitFleet(scenario(), ROLES, 0, change=lambda payload: bytes([payload[0] ^ 1]) + payload[1:])
    assert fleet.run(asked) == expected(fleet, asked)
    assert fleet.placement.handoff_count == 0
    assert sum(replica.engine.peers.inbox.refused for replica in fleet.replicas) > 0
