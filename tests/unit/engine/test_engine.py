import gc

import msgspec
import pytest

from tests.support.checkers import expected_prompt_logprobs
from weft.engine.stats import EngineStats
from weft.errors import ContextLengthError, EngineUnavailableError, QueueFullError, RequestError
from weft.request import Request, SamplingParams, split_seed
from weft.schedule.plan import StepPlan

from .rig import EOS, Rig, counting


def test_a_request_gets_its_tokens_and_one_end() -> None:
    rig = Rig(next_token=counting(10))
    rig.submit("a", max_tokens=4)
    rig.run()
    answer = rig.answers["a", 0]
    assert (answer.tokens, answer.reason, answer.ends) == ([10, 11, 12, 13], "length", 1)
    assert not rig.core.has_work
    assert rig.step() == []


def test_eos_ends_the_answer_and_is_part_of_it() -> None:
    rig = Rig(next_token=counting(EOS - 2))
    rig.submit("a", ignore_eos=False, max_tokens=50)
    rig.run()
    answer = rig.answers["a", 0]
    assert (answer.tokens, answer.reason, answer.events[-1].stop_reason) == ([1, 2, 3], "stop", None)


def test_a_stop_token_is_named_as_the_reason() -> None:
    rig = Rig(next_token=counting(10))
    rig.submit("a", stop_token_ids=(12,), max_tokens=50)
    rig.run()
    assert rig.answers["a", 0].events[-1].stop_reason == 12


def test_stop_tokens_do_not_count_before_min_tokens() -> None:
    rig = Rig(next_token=counting(10))
    rig.submit("a", stop_token_ids=(11, 14), min_tokens=3, max_tokens=50)
    rig.run()
    assert rig.tokens("a") == [10, 11, 12, 13, 14]


def test_without_max_tokens_an_answer_goes_on_to_the_end_of_the_context() -> None:
    rig = Rig(max_model_len=100)
    rig.submit("a", 30, max_tokens=None)
    rig.run()
    assert (len(rig.tokens("a")), rig.answers["a", 0].reason) == (70, "length")


def test_max_tokens_zero_computes_the_prompt_and_ends() -> None:
    rig = Rig(max_model_len=200)
    rig.submit("a", 200, max_tokens=0, prompt_logprobs=1)
    rig.run()
    [event] = rig.answers["a", 0].events
    assert (event.tokens, event.finish_reason) == ([], "length")
    assert event.prompt_logprobs is not None
    assert len(event.prompt_logprobs) == 200
    assert sum(plan.token_count for plan in rig.plans) == 200


def test_n_sequences_of_a_request_have_seeds_of_their_own() -> None:
    rig = Rig(rows_max=2)
    rig.submit("a", n=3, temperature=1.0, seed=5)
    rig.run()
    texts = [tuple(rig.tokens("a", index)) for index in range(3)]
    assert len(set(texts)) == 3
    assert all(answer.ends == 1 for answer in rig.answers.values())


def test_a_seed_gives_the_same_text_whatever_n_is_and_whatever_else_runs() -> None:
    alone = Rig()
    alone.submit("a", temperature=1.0, seed=5)
    alone.run()
    crowd = Rig(rows_max=3, frame_count=5, seed=99)
    for number in range(6):
        crowd.submit(f"other{number}", 25, temperature=1.0, max_tokens=60)
    crowd.submit("a", temperature=1.0, seed=5, n=2)
    crowd.run()
    assert crowd.tokens("a", 0) == alone.tokens("a", 0)
    assert crowd.tokens("a", 1) != alone.tokens("a", 0)


def test_without_a_seed_two_requests_differ_and_the_engines_seed_repeats_them() -> None:
    texts = []
    for seed in (0, 0, 1):
        rig = Rig(seed=seed)
        rig.submit("aa", temperature=1.0)
        rig.submit("bb", temperature=1.0)
        rig.run()
        texts.append((tuple(rig.tokens("aa")), tuple(rig.tokens("bb"))))
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][0] != texts[0][1]


def test_split_seeds_are_64_bit_and_differ() -> None:
    seeds = {split_seed(seed, branch) for seed in (-(2**63), -1, 0, 1, 2**64 - 1) for branch in range(64)}
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert len(seeds) == 4 * 64, "-1 and 2**64 - 1 are one seed, all others differ"


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "words"),
    [
        ([], {}, RequestError, ["empty"]),
        ([1, 97], {}, RequestError, ["97", "96"]),
        ([-1], {}, RequestError, ["-1"]),
        ([2**70], {}, RequestError, ["not a token id"]),
        ([1], {"n": 0}, RequestError, ["n is 0"]),
        ([1] * 91, {"max_tokens": 10}, ContextLengthError, ["91", "101", "100", "--max-model-len"]),
        ([1] * 100, {"max_tokens": None}, ContextLengthError, ["100", "101"]),
        ([1] * 101, {"max_tokens": 0}, ContextLengthError, ["101", "100"]),
        ([1] * 90, {"max_tokens": None, "min_tokens": 11}, ContextLengthError, ["min_tokens", "101"]),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_numbers(
    prompt: list[int], sampling: dict, error: type, words: list[str]
) -> None:
    rig = Rig(max_model_len=100)
    with pytest.raises(error) as caught:
        rig.submit("a", prompt, **sampling)
    assert all(word in str(caught.value) for word in words), caught.value
    assert not rig.core.has_work
    rig.submit("a", [1] * 90, max_tokens=10)
    rig.run()
    assert len(rig.tokens("a")) == 10


def test_an_id_in_use_is_refused_and_free_again_after_its_end() -> None:
    rig = Rig()
    rig.submit("a")
    with pytest.raises(RequestError, match="in use"):
        rig.submit("a")
    rig.run()
    rig.submit("a")


def test_the_queue_is_bounded_in_sequences_and_the_error_names_the_flag() -> None:
    rig = Rig(queue_max=4, rows_max=2)
    rig.submit("a", n=3)
    with pytest.raises(QueueFullError, match=r"limits\.max_queued_requests"):
        rig.submit("b", n=2)
    rig.submit("c")
    with pytest.raises(QueueFullError):
        rig.submit("d")
    assert rig.core.stats().requests_refused == 2
    rig.step()
    rig.submit("d", n=2)
    assert set(rig.run()) == {("a", 0), ("a", 1), ("a", 2), ("c", 0), ("d", 0), ("d", 1)}


def test_cancelling_a_request_that_waits_ends_it_before_it_runs() -> None:
    rig = Rig(rows_max=1)
    rig.submit("a")
    rig.submit("b")
    rig.step()
    assert rig.core.cancel("b")
    rig.run()
    [event] = rig.answers["b", 0].events
    assert (event.finish_reason, event.tokens, event.queued_s) == ("cancelled", [], None)
    assert len(rig.tokens("a")) == 10


def test_cancelling_a_request_that_runs_frees_its_memory_with_the_next_plan() -> None:
    rig = Rig()
    rig.submit("a", max_tokens=50)
    for _ in range(5):
        rig.step()
    assert rig.core.cancel("a")
    assert rig.core.memory.usage().leases == 1
    rig.run()
    assert rig.core.memory.usage().leases == 0
    assert rig.plans[-1].run_count == 0
    assert rig.plans[-1].finished == (0,)
    assert (rig.answers["a", 0].reason, len(rig.tokens("a"))) == ("cancelled", 5)


def test_cancelling_during_a_step_drops_what_the_step_made() -> None:
    rig = Rig()
    rig.submit("a", max_tokens=50, n=2)

    def cancel_in_third(plan: StepPlan) -> None:
        if plan.step == 2:
            assert rig.core.cancel("a", 1)

    rig.before_execute = cancel_in_third
    rig.run()
    assert (len(rig.tokens("a", 1)), rig.answers["a", 1].reason) == (2, "cancelled")
    assert (len(rig.tokens("a", 0)), rig.answers["a", 0].reason) == (50, "length")
    assert [answer.ends for answer in rig.answers.values()] == [1, 1]


def test_cancelling_a_request_that_was_just_preempted_ends_it() -> None:
    rig = Rig(frame_count=3, rows_max=2)
    rig.submit("a", 20, max_tokens=100)
    rig.submit("b", 30, max_tokens=120)

    def cancel_the_victim(plan: StepPlan) -> None:
        if plan.preempted:
            assert plan.preempted == (1,)
            assert rig.core.cancel("b")

    rig.before_execute = cancel_the_victim
    rig.run()
    assert (rig.answers["b", 0].reason, rig.answers["b", 0].ends) == ("cancelled", 1)
    assert rig.core.stats().preemptions == 1
    assert len(rig.tokens("a")) == 100


def test_cancelling_what_is_not_there_is_no_error() -> None:
    rig = Rig()
    rig.submit("a")
    assert not rig.core.cancel("b")
    assert not rig.core.cancel("a", 1)
    rig.run()
    assert not rig.core.cancel("a")
    assert rig.answers["a", 0].ends == 1


def test_cancelling_one_index_leaves_the_others() -> None:
    rig = Rig(rows_max=2)
    rig.submit("a", n=4, temperature=1.0)
    rig.step()
    assert rig.core.cancel("a", 1)
    assert not rig.core.cancel("a", 1)
    assert rig.core.cancel("a", 3)
    rig.run()
    assert [rig.answers["a", index].reason for index in range(4)] == ["length", "cancelled"] * 2


def test_a_request_may_arrive_while_a_step_is_in_flight() -> None:
    rig = Rig()
    rig.submit("a")

    def submit_in_second(plan: StepPlan) -> None:
        if plan.step == 1:
            rig.submit("b")

    rig.before_execute = submit_in_second
    rig.run()
    assert len(rig.tokens("b")) == 10


@pytest.mark.parametrize("budget", [65, 130, 400])
def test_prompt_logprobs_are_the_same_for_any_chunking_and_come_with_the_first_event(budget: int) -> None:
    rig = Rig(rows_max=1, step_tokens_max=budget)
    prompt = [(3 * at) % 97 for at in range(200)]
    rig.submit("a", prompt, prompt_logprobs=2, max_tokens=3)
    rig.run()
    first, *later = rig.answers["a", 0].events
    expected = expected_prompt_logprobs(_request(prompt))
    assert first.prompt_logprobs == expected
    assert first.tokens
    assert all(event.prompt_logprobs is None for event in later)


def _request(prompt: list[int]) -> Request:
    return Request(request_id="x", prompt_tokens=prompt, sampling=SamplingParams(prompt_logprobs=2))


def test_prompt_logprobs_are_not_sent_twice_or_doubled_by_a_preemption() -> None:
    # 118 pages: 13 of "a", 104 of "b" and one to grow into. "b" needs 26 steps of prefill, in which "a"
    # crosses into a page twice.
    rig = Rig(slots_per_frame=0, pages_per_frame=1, frame_count=118, rows_max=2, step_tokens_max=64, max_model_len=1800)
    prompt = [(3 * at) % 97 for at in range(1650)]
    rig.submit("a", 200, max_tokens=100)
    for _ in range(8):
        rig.step()
    rig.submit("b", prompt, prompt_logprobs=2, max_tokens=10)
    rig.run()
    [when] = [at for at, plan in enumerate(rig.plans) if plan.preempted]
    assert 8 < when < 8 + 26, "b was to be preempted inside its prefill"
    events = rig.answers["b", 0].events
    sent = [event.prompt_logprobs for event in events if event.prompt_logprobs is not None]
    assert sent == [expected_prompt_logprobs(_request(prompt))]
    assert len(events) == 10


def test_logprobs_come_with_their_token() -> None:
    rig = Rig()
    rig.submit("a", logprobs=2)
    rig.submit("b")
    rig.run()
    for event in rig.answers["a", 0].events:
        assert event.logprobs is not None
        assert [one.token for one in event.logprobs] == event.tokens
        assert len(event.logprobs[0].top) == 2
    assert all(event.logprobs is None for event in rig.answers["b", 0].events)


def test_the_queue_time_is_from_acceptance_to_the_first_run() -> None:
    rig = Rig(rows_max=1)
    rig.submit("a", max_tokens=3)
    rig.submit("b", max_tokens=3)
    rig.run()
    assert [event.queued_s for event in rig.answers["a", 0].events] == [0.0, None, None]
    assert [event.queued_s for event in rig.answers["b", 0].events] == [3.0, None, None]


def test_an_executor_that_raises_ends_every_request_and_the_engine_once() -> None:
    rig = Rig(rows_max=1)
    rig.submit("a", max_tokens=20)
    rig.submit("b")

    def break_down(plan: StepPlan) -> None:
        if plan.step == 4:
            raise RuntimeError("no more device")

    rig.before_execute = break_down
    rig.run()
    assert [(answer.reason, answer.ends) for answer in rig.answers.values()] == [("error", 1)] * 2
    assert len(rig.tokens("a")) == 4
    error = rig.answers["b", 0].events[-1].error
    assert error is not None
    assert "no more device" in error
    assert isinstance(rig.core.failure, RuntimeError)
    assert rig.step() == []
    assert not rig.core.cancel("a")
    with pytest.raises(EngineUnavailableError, match="no more device"):
        rig.submit("c")
    assert rig.core.close() == []
    assert rig.device.closed


def test_a_step_that_was_interrupted_is_never_done_again() -> None:
    rig = Rig()
    rig.submit("a", max_tokens=20)
    rig.step()

    def interrupt(plan: StepPlan) -> None:
        raise KeyboardInterrupt

    rig.before_execute = interrupt
    with pytest.raises(KeyboardInterrupt):
        rig.step()
    assert isinstance(rig.core.failure, KeyboardInterrupt)
    assert [event.finish_reason for event in rig.core.step()] == ["error"]
    assert not rig.core.has_work


def test_closing_cancels_what_is_left_and_says_so() -> None:
    rig = Rig(rows_max=1)
    rig.submit("a", n=2)
    rig.step()
    events = rig.core.close()
    assert [(event.index, event.finish_reason) for event in events] == [(0, "cancelled"), (1, "cancelled")]
    assert rig.core.close() == []
    assert rig.device.closed
    with pytest.raises(EngineUnavailableError, match="stopped"):
        rig.submit("b")


def test_stats_add_up_and_cross_a_process_boundary() -> None:
    rig = Rig(frame_count=4, rows_max=3)
    for number in range(4):
        rig.submit(f"r{number}", 30, max_tokens=40, n=2)
    rig.step()
    rig.step()
    rig.core.cancel("r3")
    stats, scheduler = rig.core.stats(), rig.core.scheduler
    assert (stats.running, stats.waiting) == (len(scheduler.running), len(scheduler.waiting))
    rig.run()
    stats = rig.core.stats()
    assert stats.requests == 4
    assert stats.finished == {"stop": 0, "length": 6, "cancelled": 2, "error": 0}
    assert stats.prompt_tokens == 8 * 30
    assert stats.generation_tokens == sum(len(answer.tokens) for answer in rig.answers.values())
    assert stats.computed_tokens == sum(plan.token_count for plan in rig.plans)
    assert stats.steps == len(rig.plans)
    assert stats.preemptions == sum(len(plan.preempted) for plan in rig.plans) > 0
    assert (stats.running, stats.waiting, stats.memory.leases) == (0, 0, 0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=EngineStats) == stats


def test_an_ended_request_leaves_nothing_behind() -> None:
    rig = Rig(rows_max=2, queue_max=10)
    for number in range(200):
        rig.submit(f"r{number}", n=2, max_tokens=2)
        if number % 3 == 0:
            rig.core.cancel(f"r{number}", 0)
        rig.run()
        rig.answers.clear()
    core = rig.core
    assert not core.streams.by_seq
    assert not core.streams.by_request
    assert not core.streams.outbox
    assert core.memory.usage().frames_free == core.memory.usage().frame_count


def test_events_are_no_work_for_the_garbage_collector() -> None:
    """A step of 1,024 sequences makes as many, and full collections took longer than the step."""
    rig = Rig(rows_max=2)
    rig.submit("a", 40, max_tokens=30)
    events = [event for _ in range(4) for event in rig.core.step()]
    assert events
    assert not any(gc.is_tracked(event) for event in events)
