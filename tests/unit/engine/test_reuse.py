"""What the engine does not compute again: one mechanism at a time, over the executor that checks every state
and page it is pointed at."""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod

import pytest

from weft.errors import RequestError
from weft.memory.transaction import Transaction
from weft.memory.values import Lost
from weft.request import TokenEvent
from weft.schedule.snapshots import NONE, PROMPT, SnapshotPolicy, parse_snapshots

from .rig import VOCAB_SIZE, Rig


def text(name: int, length: int) -> list[int]:
    return [(name * 13 + at * (name + 3)) % VOCAB_SIZE for at in range(length)]


def warm(**more: object) -> Rig:
    return Rig(**{"cache": True, "frame_count": 80, **more})  # type: ignore[arg-type]


def cached(rig: Rig, name: str, index: int = 0) -> int:
    return rig.answers[name, index].events[-1].cached_tokens


def taps(rig: Rig) -> list[int]:
    return sorted(tap.position for plan in rig.plans for tap in plan.taps)


def computed(rig: Rig) -> int:
    return rig.core.stats().computed_tokens


def test_with_the_cache_off_nothing_is_kept_and_nothing_waits() -> None:
    rig = Rig(step_tokens_max=512)
    for name in ("a", "b"):
        rig.submit(name, text(1, 200), boundaries=(100,))
    rig.run()
    assert taps(rig) == []
    assert [len(plan.admissions) for plan in rig.plans[:2]] == [2, 0]
    assert computed(rig) == 2 * 209
    assert cached(rig, "b") == 0
    assert rig.core.memory.usage().cached_bytes == 0


def test_a_second_request_starts_where_the_first_left_a_state() -> None:
    rig = warm()
    for name, prompt, expected in (
        ("a", text(1, 200), 0),
        ("b", text(1, 200), 192),
        ("c", text(1, 65), 64),
        ("d", text(1, 150), 64),
        ("e", text(2, 200), 0),
    ):
        rig.submit(name, prompt, boundaries=(70,) if name == "a" else ())
        rig.run()
        assert cached(rig, name) == expected, name
    assert rig.tokens("a") == rig.tokens("b")


def test_the_next_turn_starts_where_the_answer_ended() -> None:
    rig = warm()
    prompt = text(1, 37)
    for turn in range(5):
        rig.submit(f"turn {turn}", prompt)
        rig.run()
        made = rig.tokens(f"turn {turn}")
        if turn:
            assert cached(rig, f"turn {turn}") == len(prompt) - 5 - 1
        prompt = prompt + made + text(50 + turn, 5)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("slots_per_frame", [0, 2])
def test_a_turn_that_comes_before_the_last_one_has_left_waits_for_a_page(
    slots_per_frame: int, *, overlap: bool
) -> None:
    """A client has the last token of an answer before the plan that donates it. Another request runs all the time."""
    rig = warm(slots_per_frame=slots_per_frame, overlap=overlap)
    rig.submit("other", text(2, 30), max_tokens=200)
    prompt, ended = text(1, 37), 0
    for turn in range(5):
        name = f"turn {turn}"
        rig.submit(name, prompt, max_tokens=17)
        while (name, 0) not in rig.answers or rig.answers[name, 0].reason is None:
            rig.step()
        assert cached(rig, name) == (ended if slots_per_frame else ended - ended % 16)
        assert turn == 0 or rig.answers[name, 0].events[0].queued_s <= 2.0, "one step that donates, and its own"
        prompt = prompt + rig.tokens(name)
        ended = len(prompt) - 1
        prompt = prompt + text(50 + turn, 5)
    assert rig.answers["other", 0].reason is None


def test_every_answer_to_one_prompt_shares_its_prefill() -> None:
    rig = warm(rows_max=8)
    rig.submit("a", text(1, 300), n=6, temperature=1.0)
    rig.run()
    assert [cached(rig, "a", index) for index in range(6)] == [0, 256, 256, 256, 256, 256]
    assert computed(rig) == 300 + 5 * 44 + 6 * 9


def test_twins_wait_for_the_one_that_computes_what_they_share() -> None:
    rig = warm(rows_max=8, step_tokens_max=128)
    for number in range(4):
        rig.submit(f"r{number}", text(1, 300) + text(10 + number, 20))
    rig.submit("other", text(5, 30))
    rig.run()
    assert [cached(rig, f"r{number}") for number in range(4)] == [0, 256, 256, 256]
    assert 256 in taps(rig), "the state was kept because others waited for it"
    events = rig.answers["other", 0].events
    assert events[0].queued_s == 2.0, "who waits for a twin holds up nobody behind"


def test_twins_that_share_less_than_a_chunk_do_not_wait() -> None:
    rig = warm(rows_max=8)
    for number in range(3):
        rig.submit(f"r{number}", text(1, 60) + text(10 + number, 20))
    rig.step()
    assert len(rig.plans[0].admissions) == 3


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_twin_whose_leader_is_cancelled_goes_on_alone(steps: int) -> None:
    rig = warm(step_tokens_max=64)
    rig.submit("leader", text(1, 300))
    rig.submit("follower", text(1, 300))
    for _ in range(steps):
        rig.step()
    rig.core.cancel("leader")
    rig.run()
    assert rig.answers["follower", 0].reason == "length"
    # What the leader had computed is not lost: it was donated when it went.
    assert cached(rig, "follower") == 64 * steps


def test_a_leader_that_finds_no_room_for_its_state_is_not_waited_for_twice() -> None:
    rig = warm(slots_per_frame=1, frame_count=2 + 8, pages_per_frame=5, rows_max=2)
    rig.submit("a", text(1, 150), max_tokens=1)
    rig.submit("b", text(1, 150), max_tokens=1)
    rig.run()
    assert {answer.reason for answer in rig.answers.values()} == {"length"}


def test_a_request_that_wants_logprobs_of_its_prompt_computes_all_of_it_and_leaves_it_to_others() -> None:
    rig = warm()
    rig.submit("a", text(1, 200), prompt_logprobs=1)
    rig.run()
    rig.submit("b", text(1, 200), prompt_logprobs=1)
    rig.run()
    assert cached(rig, "b") == 0
    rig.submit("c", text(1, 200))
    rig.run()
    assert cached(rig, "c") == 192


def test_a_request_that_can_use_nothing_waits_for_nobody() -> None:
    rig = warm(step_tokens_max=512)
    rig.submit("a", text(1, 200))
    rig.submit("b", text(1, 200), prompt_logprobs=1)
    rig.step()
    assert len(rig.plans[0].admissions) == 2


def test_another_salt_finds_nothing_and_waits_for_nobody() -> None:
    rig = warm(step_tokens_max=512)
    rig.submit("a", text(1, 200), salt="x")
    rig.submit("b", text(1, 200), salt="y")
    rig.step()
    assert len(rig.plans[0].admissions) == 2
    rig.run()
    assert cached(rig, "b") == 0
    assert rig.core.memory.usage().cache.lost.no_checkpoint == 0, "nothing is said about another tenant"


def test_what_is_cancelled_is_kept_as_far_as_it_came() -> None:
    rig = warm(step_tokens_max=64)
    rig.submit("a", text(1, 300))
    for _ in range(3):
        rig.step()
    rig.core.cancel("a")
    rig.run()
    rig.submit("b", text(1, 300))
    rig.run()
    assert cached(rig, "b") == 192


@pytest.mark.parametrize(
    ("policy", "expected_taps", "expected_cached"),
    [(NONE, [], 0), (PROMPT, [256], 256), (parse_snapshots("every:64"), [64, 128, 192, 256], 256)],
)
def test_the_policy_says_where_states_are_kept(
    policy: SnapshotPolicy, expected_taps: list[int], expected_cached: int
) -> None:
    rig = warm(snapshots=policy)
    rig.submit("a", text(1, 300), boundaries=(70,))
    rig.run()
    assert taps(rig) == expected_taps
    rig.submit("b", text(1, 300))
    rig.run()
    assert cached(rig, "b") == expected_cached


def test_places_that_nobody_asked_for_are_kept_while_slots_lie_idle_and_no_longer() -> None:
    places = [512, 576, 640, 768, 896, 1024]
    auto = warm(frame_count=200, max_model_len=1200)
    auto.submit("a", text(1, 1100))
    auto.run()
    assert {512, 640, 768, 896, 1024} <= set(taps(auto)), "insurance, and between"
    for frame_count, kept in ((200, len(places)), (44, 4)):
        rig = warm(
            frame_count=frame_count,
            max_model_len=1120,
            slots_per_frame=1,
            pages_per_frame=2,
            snapshots=parse_snapshots("spare"),
        )
        rig.submit("a", text(1, 1100), max_tokens=2)
        rig.run()
        assert taps(rig) == places[:kept], frame_count
        rig.submit("b", text(1, 700) + text(2, 50), max_tokens=2)
        rig.run()
        assert cached(rig, "b") == max(place for place in places[:kept] if place <= 700)


def test_a_model_without_states_resumes_at_every_page_whatever_the_policy() -> None:
    rig = warm(slots_per_frame=0, snapshots=NONE)
    for name, length, expected in (("a", 200, 0), ("b", 200, 192), ("c", 100, 96), ("d", 33, 32)):
        rig.submit(name, text(1, length), max_tokens=1)
        rig.run()
        assert cached(rig, name) == expected


@pytest.mark.parametrize("slots_per_frame", [1, 2])
def test_a_model_without_attention_resumes_from_states_alone(slots_per_frame: int) -> None:
    rig = warm(pages_per_frame=0, slots_per_frame=slots_per_frame)
    for name, expected in (("a", 0), ("b", 192)):
        rig.submit(name, text(1, 200))
        rig.run()
        assert cached(rig, name) == expected


def test_a_full_cache_gives_way_to_whoever_comes() -> None:
    rig = warm(frame_count=12, rows_max=3)
    for number in range(12):
        rig.submit(f"r{number}", text(number, 150), max_tokens=20)
    rig.run()
    assert {answer.reason for answer in rig.answers.values()} == {"length"}
    assert rig.core.memory.usage().cache.evicted_pages > 50


@pytest.mark.parametrize("count", [2, 3, 4])
def test_several_that_come_at_once_take_from_a_full_cache_what_each_takes_alone(count: int) -> None:
    """And one step makes the room for all of them."""

    def given_up(coming: int) -> list[int]:
        rig = Rig(cache=True, rows_max=8, slots_per_frame=1, frame_count=12)
        for number in range(20):
            rig.submit(f"old{number}", [number + 5] * 20, max_tokens=1)
            rig.run()
        full = len(rig.plans)
        for number in range(coming):
            rig.submit(f"new{number}", [number + 60] * 20, max_tokens=1)
        rig.run()
        return [evicted for plan in rig.plans[full:] if (evicted := len(plan.reservation.evicted))]

    [alone] = given_up(1)
    [together] = given_up(count)
    assert count * alone <= together <= count * alone + 1, "and at most one more for the slots ahead of need"


def test_flushing_forgets_what_nobody_reads_and_harms_nobody() -> None:
    rig = warm()
    rig.submit("a", text(1, 200))
    rig.run()
    rig.submit("b", text(1, 200), max_tokens=30)
    rig.step()
    events: list[TokenEvent] = rig.step()
    assert events
    rig.core.flush_cache()
    rig.core.audit()
    rig.run()
    assert rig.tokens("b")[:10] == rig.tokens("a")
    rig.core.flush_cache()
    assert rig.core.memory.usage().cached_bytes == 0
    rig.submit("d", text(1, 200))
    while ("d", 0) not in rig.answers or rig.answers["d", 0].reason is None:
        rig.step()
    rig.core.flush_cache()  # it has ended and still holds its memory
    rig.run()
    assert rig.core.memory.usage().cached_bytes == 0
    rig.submit("c", text(1, 200))
    rig.run()
    assert cached(rig, "c") == 0


def test_the_numbers_say_what_was_reused_and_what_was_lost() -> None:
    rig = warm()
    for name in ("a", "b"):
        rig.submit(name, text(1, 200))
        rig.run()
    rig.submit("c", text(1, 150) + text(2, 10))
    rig.run()
    stats = rig.core.stats()
    assert stats.cached_tokens == 192
    counts = stats.memory.cache
    assert (counts.opened, counts.hits, counts.hit_tokens) == (3, 1, 192)
    assert counts.lost.no_checkpoint >= 144, "the KV matched and no state was there"


# ---------------------------------------------------------------------- sources, one at a time


def copies(rig: Rig) -> int:
    return sum(len(plan.arena_work.slot_copies) for plan in rig.plans)


def test_a_long_answer_keeps_a_state_at_every_distance_and_is_taken_up_in_its_middle() -> None:
    rig = warm(snapshots=parse_snapshots("decode:64"))
    prompt = text(1, 30)
    rig.submit("a", prompt, max_tokens=200)
    rig.run()
    assert copies(rig) == 3, "at 64, 128 and 192 of 230 tokens, and nothing else was kept"
    whole = prompt + rig.tokens("a")
    for name, length, expected in (("b", 180, 128), ("c", 230, 192), ("d", 64, 0), ("e", 65, 64)):
        rig.submit(name, whole[:length], max_tokens=1)
        rig.run()
        assert cached(rig, name) == expected, name
        assert rig.tokens(name) == [(whole + text(9, 1))[length]] or length == 230


def test_the_distance_of_an_answer_counts_from_where_it_began() -> None:
    rig = warm(snapshots=parse_snapshots("decode:128"))
    rig.submit("a", text(1, 200), max_tokens=150)
    rig.run()
    rig.submit("b", text(1, 200) + rig.tokens("a")[:140], max_tokens=1)
    rig.run()
    assert cached(rig, "b") == 192 + 128


def test_keeping_states_of_answers_takes_nothing_from_anybody() -> None:
    """Law L9: with no slot to spare for it, an answer goes on without, and no step is lost."""

    def steps(snapshots: str) -> tuple[int, int]:
        rig = warm(
            snapshots=parse_snapshots(snapshots),
            slots_per_frame=1,
            frame_count=8,
            pages_per_frame=5,
            rows_max=2,
            max_model_len=200,
        )
        for name in ("a", "b"):
            rig.submit(name, text(len(name), 30), max_tokens=150)
        rig.run()
        return len(rig.plans), copies(rig)

    without, _ = steps("none")
    with_copies, made = steps("decode:64")
    assert with_copies == without
    assert 0 < made < 4, "there is room for some"


@pytest.mark.parametrize(("policy", "expected"), [("request-end", 48), ("auto,-request-end", 0)])
def test_the_end_of_an_answer_is_kept_or_not(policy: str, expected: int) -> None:
    rig = warm(snapshots=parse_snapshots(policy))
    rig.submit("a", text(1, 40))
    rig.run()
    rig.submit("b", text(1, 40) + rig.tokens("a") + text(2, 9))
    rig.run()
    assert cached(rig, "b") == (49 if expected else 0)


def test_what_was_kept_on_the_way_is_not_lost_with_a_slot_that_is_not_donated() -> None:
    """An answer of one token ends in the step of its taps: they are published by the plan that closes it."""
    rig = warm(snapshots=parse_snapshots("prompt-end"))
    rig.submit("a", text(1, 200), max_tokens=1)
    rig.run()
    rig.submit("b", text(1, 200), max_tokens=1)
    rig.run()
    assert cached(rig, "b") == 192


@pytest.mark.parametrize(("policy", "donates"), [("preemption", True), ("auto,-preemption", False)])
def test_a_preempted_sequence_leaves_its_state_behind_or_not(policy: str, *, donates: bool) -> None:
    rig = warm(snapshots=parse_snapshots(policy), pages_per_frame=4, frame_count=6, rows_max=3, max_model_len=220)
    for name in ("a", "bb", "ccc"):
        rig.submit(name, 30, max_tokens=130)
    rig.run()
    assert {answer.reason for answer in rig.answers.values()} == {"length"}
    assert any(plan.preempted for plan in rig.plans)
    for plan in rig.plans:
        left = {publication.seq for publication in plan.reservation.published if publication.saves}
        assert left >= set(plan.preempted) if donates else not left & set(plan.preempted)


def recomputed_after_preemption() -> tuple[int, int]:
    """Three grow where two fit: how often one gave way, and what was computed again of it."""
    rig = warm(slots_per_frame=0, pages_per_frame=1, frame_count=18, rows_max=3, max_model_len=220)
    for name, answer in enumerate((130, 60, 130)):
        rig.submit(f"r{name}", text(name, 30), max_tokens=answer)
    rig.run()
    last = [rig.answers[f"r{name}", 0].events[-1] for name in range(3)]
    return sum(event.preemptions for event in last), sum(event.recomputed_tokens for event in last)


def test_what_a_preempted_sequence_left_is_not_given_up_for_its_own_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for it is short by the very pages that others grow into; giving up more would not bring it
    back."""
    assert recomputed_after_preemption() == (1, 3 * 16)
    monkeypatch.setattr(Transaction, "evict_last", lambda self, nodes: None)
    monkeypatch.setattr(Transaction, "reclaim", partialmethod(without_sparing, Transaction.reclaim))
    assert recomputed_after_preemption() == (1, 9 * 16), "the control: all of it goes, one page at a time"


def without_sparing(
    transaction: Transaction, plain: Callable[..., bool], *, sparing: object = (), **asked: int
) -> bool:
    return plain(transaction, **asked)


def test_nothing_is_remembered_of_who_gave_way_once_it_runs_or_is_gone() -> None:
    rig = warm(slots_per_frame=0, pages_per_frame=1, frame_count=18, rows_max=3, max_model_len=220)
    for name in range(3):
        rig.submit(f"r{name}", text(name, 30), max_tokens=130)
    reuse = rig.core.scheduler.reuse
    while not reuse.awaited():
        rig.step()
    [gone] = [seq for seq in rig.core.scheduler.waiting if seq.preemption_count]
    rig.core.cancel(f"r{gone.id}")
    assert reuse.awaited() == []
    rig.run()
    assert reuse.awaited() == []


def test_a_mark_of_the_client_is_kept_where_boundaries_are_off() -> None:
    for policy, expected in (("prompt", 128), ("prompt,-marks", 0)):
        rig = warm(snapshots=parse_snapshots(policy))
        rig.submit("a", text(1, 300), marks=(150,), boundaries=(250,))
        rig.run()
        rig.submit("b", text(1, 160) + text(2, 30))
        rig.run()
        assert cached(rig, "b") == expected


@pytest.mark.parametrize(
    ("marks", "says"),
    [
        ((0,), "is 0; it must be at least 1 and at most 20"),
        ((21,), "is 21; it must be at least 1"),
        ((-3,), "is -3"),
        (tuple(range(1, 20)) * 2, "mark 38 positions; the limit is 32"),
    ],
)
def test_marks_outside_the_prompt_or_too_many_are_refused(marks: tuple[int, ...], says: str) -> None:
    rig = warm()
    with pytest.raises(RequestError, match="cache_boundaries") as caught:
        rig.submit("a", text(1, 20), marks=marks)
    assert says in caught.value.message
    assert caught.value.param == "cache_boundaries"


# ---------------------------------------------------------------------- what is lost, and why


def test_what_another_computes_at_this_moment_is_not_ready_and_nothing_else() -> None:
    """The first is of worse rank than the second, so that the second does not wait for it."""
    rig = warm(step_tokens_max=320)
    rig.submit("a", text(1, 450), priority=1)
    rig.step()
    rig.submit("b", text(1, 440) + text(2, 20), priority=0)
    rig.run()
    openings = [opening for plan in rig.plans for opening in plan.reservation.opened]
    assert [opening.match.lost for opening in openings] == [Lost(), Lost(not_ready=384)]


def test_what_nobody_computes_any_more_is_lost_for_want_of_a_state() -> None:
    rig = warm(snapshots=parse_snapshots("request-end"))
    rig.submit("a", text(1, 300))
    rig.run()
    rig.submit("b", text(1, 250) + text(2, 20))
    rig.run()
    openings = [opening for plan in rig.plans for opening in plan.reservation.opened]
    assert openings[1].match.lost == Lost(no_checkpoint=240)


def test_each_lost_token_has_one_reason() -> None:
    match = Lost(no_checkpoint=100, evicted_state=50, evicted_kv=30)
    assert match.but("not_ready", 120) == Lost(no_checkpoint=30, evicted_kv=30, not_ready=120)
    assert match.but("not_ready", 500) == Lost(not_ready=500)
    assert match.but("not_ready", 20) == Lost(no_checkpoint=100, evicted_state=30, evicted_kv=30, not_ready=20)
