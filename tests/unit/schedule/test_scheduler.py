import numpy as np
import pytest

from tests.support.trace import plan_bytes
from weft.schedule.plan import StepPlan
from weft.units import PAD, PAGE_TOKENS

from ..engine.rig import Rig


def runs(plan: StepPlan) -> list[tuple[int, int, int]]:
    """(sequence, start, length) of each run."""
    return list(zip(plan.seqs, plan.starts.tolist(), plan.lengths.tolist(), strict=True))


def test_planning_changes_nothing() -> None:
    rig = Rig(frame_count=4, rows_max=4)
    for number in range(6):
        rig.submit(f"r{number}", 30 + number, max_tokens=60)
    preempted = 0
    while rig.core.has_work:
        plans = [rig.core.scheduler.plan() for _ in range(3)]
        rig.core.audit()
        rig.step()
        assert len({plan_bytes(plan) for plan in [*plans, rig.plans[-1]] if plan is not None}) == 1
        preempted += len(rig.plans[-1].preempted)
    assert preempted > 0, "the pool was too large for this test"


def test_a_plan_that_was_made_does_not_change_with_the_engine() -> None:
    rig = Rig()
    rig.submit("a", 100, max_tokens=40)
    seen: list[tuple[StepPlan, bytes]] = []
    rig.before_execute = lambda plan: seen.append((plan, plan_bytes(plan)))
    rig.run()
    assert all(plan_bytes(plan) == before for plan, before in seen)


def test_a_stale_plan_cannot_be_committed() -> None:
    rig = Rig()
    rig.submit("a")
    stale = rig.core.scheduler.plan()
    assert stale is not None
    rig.step()
    with pytest.raises(AssertionError):
        rig.core.scheduler.commit(stale)


def test_decodes_come_first_and_all_of_them() -> None:
    rig = Rig(rows_max=8, step_tokens_max=72)
    for number in range(4):
        rig.submit(f"d{number}", 10, max_tokens=50)
    rig.step()
    rig.step()
    rig.submit("long", 200)
    rig.step()
    plan = rig.plans[-1]
    assert plan.decode_count == 4
    assert runs(plan)[:4] == [(0, 11, 1), (1, 11, 1), (2, 11, 1), (3, 11, 1)]
    assert runs(plan)[4] == (4, 0, 64)
    assert plan.token_count <= 72


def test_a_prompt_is_cut_on_the_grid_whatever_the_budget() -> None:
    for budget in (65, 100, 128, 200, 512):
        rig = Rig(rows_max=1, step_tokens_max=budget, frame_count=80)
        rig.submit("a", 300)
        rig.run()
        prefills = [runs(plan)[0] for plan in rig.plans if plan.run_count and not plan.decode_count]
        ends = [start + length for _, start, length in prefills]
        assert ends[-1] == 300
        assert all(end % 64 == 0 for end in ends[:-1])
        assert len(ends) == -(-300 // (budget - budget % 64)) or budget >= 300


def test_a_prompt_of_one_token_is_a_prefill_and_not_a_decode() -> None:
    rig = Rig()
    rig.submit("a", 1)
    rig.step()
    assert (rig.plans[0].decode_count, runs(rig.plans[0])) == (0, [(0, 0, 1)])
    assert rig.plans[0].fresh.tolist() == [True]


def test_the_last_token_of_a_prompt_left_over_by_the_grid_is_no_decode() -> None:
    rig = Rig(rows_max=1, step_tokens_max=64)
    rig.submit("a", 129)
    rig.run()
    assert [(plan.decode_count, runs(plan)) for plan in rig.plans[:3]] == [
        (0, [(0, 0, 64)]),
        (0, [(0, 64, 64)]),
        (0, [(0, 128, 1)]),
    ]
    assert [plan.samples.tolist() for plan in rig.plans[:3]] == [[False], [False], [True]]


def test_lower_priority_numbers_run_earlier_and_then_first_come_first_served() -> None:
    rig = Rig(rows_max=1)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -3)):
        rig.submit(name, priority=priority, max_tokens=2)
    rig.run()
    order = [admission.seq for plan in rig.plans for admission in plan.admissions]
    assert order == [3, 1, 0, 2]


def test_pages_are_asked_for_only_when_a_token_crosses_into_one() -> None:
    rig = Rig()
    rig.submit("a", 20, max_tokens=40)
    rig.run()
    for plan in rig.plans[1:-1]:
        crosses = plan.starts[0] % PAGE_TOKENS == 0
        assert plan.table_writes.shape == (3, int(crosses))
    assert rig.plans[0].table_writes[:2].tolist() == [[0, 0], [0, 1]]


def test_an_admission_leases_the_whole_prompt_so_prefill_cannot_run_short() -> None:
    rig = Rig(rows_max=2, step_tokens_max=66, frame_count=80)
    rig.submit("a", 300)
    rig.step()
    assert rig.plans[0].table_writes.shape[1] == -(-300 // PAGE_TOKENS)
    rig.run()
    assert all(plan.table_writes.size == 0 for plan in rig.plans[1:5])


def test_an_admission_leaves_each_running_sequence_a_page_to_grow_into() -> None:
    # 10 pages: 3 for "a" (40 tokens), then "b" wants 7: it would fit, and leave "a" nothing.
    rig = Rig(slots_per_frame=0, pages_per_frame=1, frame_count=10)
    rig.submit("a", 40, max_tokens=8)
    rig.step()
    rig.submit("b", 7 * PAGE_TOKENS)
    rig.step()
    assert not rig.plans[-1].admissions
    rig.submit("c", 6 * PAGE_TOKENS, priority=-1)
    rig.step()
    assert [admission.seq for admission in rig.plans[-1].admissions] == [2]


def test_a_prompt_that_does_not_fit_yet_is_not_overtaken() -> None:
    rig = Rig(slots_per_frame=0, pages_per_frame=1, frame_count=10)
    rig.submit("running", 40, max_tokens=8)
    rig.step()
    rig.submit("large", 9 * PAGE_TOKENS)
    rig.submit("small", 1)
    rig.run()
    order = [admission.seq for plan in rig.plans for admission in plan.admissions]
    assert order == [0, 1, 2]


def test_logprobs_of_a_prompt_are_not_skipped_by_a_cached_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(rows_max=2)
    plain, asked = rig.core.memory.match, []
    monkeypatch.setattr(
        rig.core.memory, "match", lambda tokens, *, salt: (asked.append(len(tokens)), plain(tokens, salt=salt))[1]
    )
    rig.submit("a", 20)
    rig.submit("b", 20, prompt_logprobs=0)
    rig.run()
    assert asked == [20, 0]


def test_a_row_is_cleared_by_the_plan_after_the_end_and_may_be_used_again_in_it() -> None:
    rig = Rig(rows_max=1)
    rig.submit("a", max_tokens=1)
    rig.submit("b", max_tokens=1)
    rig.run()
    first, second = rig.plans[0], rig.plans[1]
    assert (first.rows_cleared, first.finished) == ((), ())
    assert (second.rows_cleared, second.finished) == ((0,), (0,))
    assert [admission.row for admission in second.admissions] == [0]


def test_the_worst_gives_way_and_the_best_never_does() -> None:
    rig = Rig(frame_count=6, rows_max=4)
    for number in range(4):
        rig.submit(f"r{number}", 30, max_tokens=200)
    preempted = []
    while rig.core.has_work:
        best = next((seq.id for seq in rig.core.scheduler.running), None)
        rig.step()
        plan = rig.plans[-1]
        preempted += plan.preempted
        assert best not in plan.preempted
        if plan.preempted:
            assert not plan.admissions
            running = [seq.id for seq in rig.core.scheduler.running]
            assert not running or max(running) < min(plan.preempted)
    assert preempted
    assert 0 not in preempted
    assert all(answer.reason == "length" and len(answer.tokens) == 200 for answer in rig.answers.values())


def test_one_that_is_short_and_the_worst_waits_and_keeps_its_state() -> None:
    # 10 pages without slots: "a" 4, "b" 5; "a" takes the last one, then "b" is short.
    rig = Rig(slots_per_frame=0, pages_per_frame=1, frame_count=10)
    rig.submit("a", 4 * PAGE_TOKENS, max_tokens=8)
    rig.submit("b", 5 * PAGE_TOKENS - 1, max_tokens=8)
    rig.run()
    assert rig.core.stats().preemptions == 0
    idle = [plan for plan in rig.plans if plan.seqs == (0,)]
    assert idle, "b was never short in this test"
    assert [len(answer.tokens) for answer in rig.answers.values()] == [8, 8]


def test_a_preempted_sequence_returns_to_its_own_place_with_its_tokens() -> None:
    alone = Rig()
    alone.submit("b", 30, max_tokens=120)
    alone.run()
    rig = Rig(frame_count=3, rows_max=2)
    rig.submit("a", 20, max_tokens=100)
    rig.submit("b", 30, max_tokens=120)
    while not rig.core.stats().preemptions:
        rig.step()
    rig.submit("later", 5)
    rig.run()
    assert rig.tokens("b") == alone.tokens("b")
    order = [
        (admission.seq, admission.prompt_tokens, admission.tokens.size)
        for plan in rig.plans
        for admission in plan.admissions
    ]
    assert [seq for seq, _, _ in order][-1] == 2
    resumed = [tokens for seq, prompt, tokens in order if seq == 1 and prompt == 30]
    assert resumed[0] == 30
    assert resumed[1] > 30
    assert rig.answers["b", 0].events[-1].preemptions >= 1
    assert rig.core.stats().recomputed_tokens > 0


@pytest.mark.parametrize(("pages", "slots"), [(5, 0), (0, 3), (3, 2)])
def test_models_without_attention_or_without_state_are_ordinary(pages: int, slots: int) -> None:
    rig = Rig(pages_per_frame=pages, slots_per_frame=slots, frame_count=6, rows_max=3, max_model_len=200)
    for number in range(5):
        rig.submit(f"r{number}", 70, max_tokens=9)
    rig.run()
    assert all(answer.reason == "length" for answer in rig.answers.values())
    for plan in rig.plans:
        assert (plan.slots == PAD).all() == (slots == 0 or plan.run_count == 0)
        assert pages or plan.table_writes.size == 0


def test_the_arrays_of_a_plan_are_int32() -> None:
    rig = Rig()
    rig.submit("a")
    rig.run()
    for plan in rig.plans:
        for name in ("rows", "starts", "lengths", "slots", "tokens", "table_writes"):
            assert getattr(plan, name).dtype == np.int32, name
        assert plan.table_writes.ndim == 2


def test_a_key_that_comes_begins_where_the_others_are() -> None:
    """Time without requests is no credit: else a key could save it for an attack."""
    rig = Rig(rows_max=8)
    for name in ("a", "b"):
        rig.submit(name, 30, max_tokens=40, ignore_eos=True, key=name)
    for _ in range(10):
        rig.step()
    used_s = rig.core.scheduler.shares.used_s
    least = min(used_s["a"], used_s["b"])
    assert least > 0
    rig.submit("c", 30, key="c")  # the others run, and none waits
    assert used_s["c"] == least
