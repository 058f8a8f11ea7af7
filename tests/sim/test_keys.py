"""The whole engine in virtual time with several API keys: what one key asks for costs another little."""

from __future__ import annotations

import pytest

from tests.unit.engine.rig import Rig
from weft.errors import QueueFullError

ROWS, STEP_TOKENS = 8, 256


def rig(*, overlap: bool = False, step_tokens: int = STEP_TOKENS) -> Rig:
    return Rig(rows_max=ROWS, step_tokens_max=step_tokens, frame_count=200, queue_max=512, overlap=overlap)


def steps_to_first_token(made: Rig, name: str, most: int = 400) -> int:
    """Steps from now on until ``name`` has a token."""
    for step in range(1, most):
        made.step()
        if (name, 0) in made.answers and made.answers[name, 0].tokens:
            return step
    raise AssertionError(f"{name} has no token after {most} steps")


def attack(
    made: Rig, *, keyed: bool, prompt: int = 20, priority: int = 0, count: int = 60, steps: int = 6, answer: int = 300
) -> None:
    for number in range(count):
        made.submit(
            f"attack{number}",
            [(5 * at + number) % 97 for at in range(prompt)],
            max_tokens=answer,
            priority=priority,
            key="attacker" if keyed else "",
        )
    for _ in range(steps):
        made.step()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prompt", [20, 120])
def test_another_keys_first_token_comes_in_twice_its_own_steps_and_one_more(prompt: int, overlap: bool) -> None:
    """Sixty long answers of one key hold all rows, and their prompts the budget of a step."""
    alone = rig(overlap=overlap)
    alone.submit("own", 500, key="bystander")
    own_steps = steps_to_first_token(alone, "own")
    made = rig(overlap=overlap)
    attack(made, keyed=True, prompt=prompt, priority=-(2**31))
    made.submit("own", 500, key="bystander")
    assert steps_to_first_token(made, "own") <= 2 * own_steps + 1


def test_a_long_prompt_that_is_being_computed_leaves_half_of_a_step_to_another_key() -> None:
    made = rig(step_tokens=128)
    attack(made, keyed=True, prompt=460, count=1, steps=1, answer=50)
    made.submit("own", 60, key="bystander", max_tokens=5)
    assert steps_to_first_token(made, "own") == 1
    assert ("attack0", 0) not in made.answers, "the prompt of the attacker is in progress"


def test_a_key_gets_memory_that_the_answers_of_another_key_fill() -> None:
    """Memory for three or four of the attacker's answers, and rows for eight."""
    made = Rig(rows_max=ROWS, step_tokens_max=STEP_TOKENS, frame_count=8, queue_max=512)
    for number in range(40):
        made.submit(f"attack{number}", 20, max_tokens=120, key="attacker")
    for _ in range(60):
        made.step()
    made.submit("own", 100, max_tokens=5, key="bystander")
    assert steps_to_first_token(made, "own", 100) <= 12
    made.run()
    assert all(answer.reason == "length" for answer in made.answers.values())


def test_turns_are_counted_in_seconds_of_the_engine() -> None:
    """One row: answers of 10 tokens and of 100 tokens get the same time, and not the same number."""
    made = Rig(rows_max=1, step_tokens_max=STEP_TOKENS, frame_count=200, queue_max=512)
    for number in range(100):
        made.submit(f"long{number}", 20, max_tokens=100, key="long")
        made.submit(f"short{number}", 20, max_tokens=10, key="short")
    for _ in range(800):
        made.step()
    counts = [
        sum(len(answer.tokens) for (name, _), answer in made.answers.items() if name.startswith(kind))
        for kind in ("long", "short")
    ]
    assert 0.6 < counts[0] / counts[1] < 1.7, counts


def test_without_keys_the_same_attack_holds_all_others_up() -> None:
    """The control."""
    made = rig()
    attack(made, keyed=False)
    made.submit("own", 20)
    with pytest.raises(AssertionError, match="has no token"):
        steps_to_first_token(made, "own", 200)


def test_a_running_answer_of_another_key_gets_a_token_in_every_step() -> None:
    made = rig()
    made.submit("own", 20, key="bystander", max_tokens=200)
    steps_to_first_token(made, "own")
    before = len(made.answers["own", 0].tokens)
    attack(made, keyed=True, priority=-(2**31))
    for _ in range(94):
        made.step()
    assert len(made.answers["own", 0].tokens) - before == 100


def test_keys_share_rows_evenly_and_every_answer_ends() -> None:
    made = rig()
    for number in range(30):
        made.submit(f"a{number}", 20, max_tokens=60, key="a")
    for _ in range(4):
        made.step()
    for number in range(10):
        made.submit(f"b{number}", 20, max_tokens=60, key="b")
    for _ in range(4):
        made.step()
    running = made.core.scheduler.running
    assert (running.count("a"), running.count("b")) == (ROWS // 2, ROWS // 2)
    made.run()
    assert len(made.answers) == 40
    assert all(answer.reason == "length" for answer in made.answers.values())


def test_one_key_fills_half_of_the_queue_at_most() -> None:
    made = rig()
    for number in range(256):
        made.submit(f"a{number}", 20, max_tokens=60, key="a")
    with pytest.raises(QueueFullError, match=r"half of limits\.max_queued_requests"):
        made.submit("more", 20, key="a")
    made.submit("b", 20, key="b")


@pytest.mark.parametrize("across", [False, True])
def test_an_operator_may_let_a_priority_go_before_other_keys(across: bool) -> None:
    """One row, and a key that has used more of it than the other."""
    made = Rig(rows_max=1, step_tokens_max=STEP_TOKENS, frame_count=200, queue_max=512, priority_across_keys=across)
    for number in range(4):
        made.submit(f"busy{number}", 20, max_tokens=50, key="busy")
    for _ in range(60):
        made.step()
    for number in range(6):
        made.submit(f"other{number}", 20, max_tokens=5, key="other")
    made.submit("urgent", 20, max_tokens=5, priority=-1, key="busy")
    made.run()
    order = [name for name, _ in made.answers]
    assert order.index("urgent") < order.index("busy2")
    before = [name for name in order[: order.index("urgent")] if name.startswith("other")]
    assert (not before) == across, order


def test_priority_orders_the_requests_of_a_key() -> None:
    made = rig()
    attack(made, keyed=True, count=ROWS)
    for name, priority in (("late", 0), ("soon", -1)):
        made.submit(name, 20, priority=priority, key="attacker", max_tokens=5)
    made.run()
    order = [name for name, _ in made.answers]
    assert order.index("soon") < order.index("late")
