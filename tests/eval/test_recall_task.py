"""Promises of the recall task: honest splits, answers that can be found, lengths that are met."""

from __future__ import annotations

import random
import re

import pytest

from train.codes import make_codes_episodes
from weft_tools.eval.recall import Episode, is_right, make_episode, make_episodes
from weft_tools.eval.words import make_name, split_of


def by_thirds(text: str) -> int:
    return len(text) // 3 + 1


def made(split: str, seeds: range) -> list[Episode]:
    rngs = [random.Random(seed) for seed in seeds]
    return [make_episode(rng, 512, by_thirds, split=split, absent_rate=0.2) for rng in rngs]  # type: ignore[arg-type]


def words_of(episodes: list[Episode]) -> set[str]:
    return {word.lower() for episode in episodes for name in episode.names for word in name.split()}


def test_eval_names_never_occur_in_training() -> None:
    # The same seeds on both sides: the split must hold even then.
    training, held_out = words_of(made("training", range(150))), words_of(made("held_out", range(150)))
    assert len(training) > 500
    assert len(held_out) > 500
    assert not training & held_out


def test_a_word_is_on_one_side_whatever_its_case() -> None:
    rng = random.Random(3)
    for _ in range(200):
        name = make_name(rng, "held_out")
        assert {split_of(word.upper()) for word in name.split()} == {"held_out"}


def test_scored_codes_never_occur_in_training() -> None:
    def pairs(split: str) -> set[str]:
        episodes = make_codes_episodes(1, 256, 80, by_thirds, split=split)  # type: ignore[arg-type]
        return {turn.reply for episode in episodes for turn in episode.turns if turn.kind == "recall"}

    training, held_out = pairs("training"), pairs("held_out")
    assert min(len(training), len(held_out)) > 100
    assert not training & held_out


def test_the_same_seed_makes_the_same_conversations_and_another_seed_does_not() -> None:
    once = make_episodes(7, 256, 3, by_thirds)
    assert once == make_episodes(7, 256, 3, by_thirds)
    assert once != make_episodes(8, 256, 3, by_thirds)


@pytest.mark.parametrize("length", [128, 512, 2048])
def test_every_answer_was_told_before_it_is_asked_for(length: int) -> None:
    for episode in make_episodes(1, length, 10, by_thirds):
        asked = [index for index, turn in enumerate(episode.turns) if turn.kind == "recall"]
        assert asked
        for index in asked:
            turn = episode.turns[index]
            told = "\n".join(earlier.user for earlier in episode.turns[: index + 1])
            name, number = turn.reply.split(": ")
            assert name in turn.user.splitlines()[-1]
            assert any(name in line and number in line for line in told.replace(", ", "\n").splitlines())


@pytest.mark.parametrize("length", [128, 256, 512, 1024, 2048])
def test_the_prompt_of_the_last_question_is_close_to_the_length_asked_for(length: int) -> None:
    ratios = []
    for episode in make_episodes(1, length, 20, by_thirds):
        messages = episode.messages_before(len(episode.turns) - 1)
        ratios.append(sum(by_thirds(message["content"]) + 5 for message in messages) / length)
    assert 0.75 < sum(ratios) / len(ratios) < 1.05
    assert max(ratios) < 1.25


def test_a_code_that_was_changed_is_asked_for_as_it_is_now() -> None:
    changes = 0
    for episode in make_codes_episodes(2, 256, 40, by_thirds):
        codes: dict[str, str] = {}
        for turn in episode.turns:
            told = dict(re.findall(r"([A-Z][a-z]+) (\d+)", turn.user))
            changes += any(codes.get(colour, code) != code for colour, code in told.items())
            codes |= told
            if turn.kind == "recall":
                colour, code = turn.reply.split()
                assert colour in turn.user
                assert code == codes[colour]
    assert changes > 20


def test_a_wrong_digit_is_a_wrong_answer_and_white_space_is_not() -> None:
    assert is_right(" Bemo: 4821\n", "Bemo: 4821")
    assert not is_right("Bemo: 4822", "Bemo: 4821")
    assert not is_right("Bemo: 48210", "Bemo: 4821")
    assert not is_right("4821", "Bemo: 4821")
