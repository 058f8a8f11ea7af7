"""Promises of the JSON task: replies that fit their schemas, values that stand in the facts."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from train.invented import invented_turn
from weft_tools.eval.facts import FORMS, make_facts_episode, make_facts_episodes, write_json
from weft_tools.eval.recall import Episode, EpisodeTurn
from weft_tools.eval.words import split_of


def by_thirds(text: str) -> int:
    return len(text) // 3 + 1


def episodes(split: str, form: str | None = None) -> list[Episode]:
    rngs = [random.Random(seed) for seed in range(60)]
    return [make_facts_episode(rng, 300, by_thirds, split=split, form=form) for rng in rngs]  # type: ignore[arg-type]


def decided(turn: EpisodeTurn) -> str:
    """The reply without what is free in it."""
    free = {at for first, last in turn.free for at in range(first, last)}
    return "".join(character for at, character in enumerate(turn.reply) if at not in free)


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in leaves(part)]
    return [leaf for part in value for leaf in leaves(part)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("form", sorted(set(FORMS)))
def test_every_value_stands_in_the_facts_and_every_reply_fits_its_schema(form: str) -> None:
    checked = 0
    for episode in episodes("held_out", form):
        for turn in episode.turns:
            if turn.kind == "json":
                value = json.loads(turn.reply)
                jsonschema.validate(value, turn.schema)
                assert all(str(leaf) in episode.turns[0].user for leaf in leaves(value))
                checked += 1
    assert checked > 100


def test_scored_names_never_occur_in_training() -> None:
    def words(split: str) -> set[str]:
        return {word for episode in episodes(split) for name in episode.names for word in name.split()}

    assert not words("training") & words("held_out")
    assert {split_of(word) for word in words("held_out")} == {"held_out"}


def test_what_a_schema_decides_is_free_and_values_never_are() -> None:
    reply = write_json({"name": "Bemo", "age": 34}, keys_known=False, opening_known=False)
    assert decided(EpisodeTurn("", reply.text, "json", reply.free)) == '"Bemo"34'
    known = write_json({"name": "Bemo", "age": 34}, keys_known=True, opening_known=True)
    assert known.text == reply.text == '{"name": "Bemo", "age": 34}'
    assert known.free == ()


def test_an_answer_without_facts_is_json_whose_ends_are_not_free() -> None:
    rng = random.Random(4)
    for _ in range(100):
        turn = invented_turn(rng)
        jsonschema.validate(json.loads(turn.reply), turn.schema)
        assert turn.kind == "told"
        assert decided(turn).count('"') == 2 * sum(isinstance(x, str) for x in leaves(json.loads(turn.reply)))


def test_the_same_seed_makes_the_same_conversations_and_another_seed_does_not() -> None:
    once = make_facts_episodes(7, 300, 3, by_thirds)
    assert once == make_facts_episodes(7, 300, 3, by_thirds)
    assert once != make_facts_episodes(8, 300, 3, by_thirds)
