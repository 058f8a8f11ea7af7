"""Training is repeatable, counts answers honestly, and encodes chats as the shipped template renders them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from train.batches import Chats, exact_match, make_batch, wide_episode
from train.checkpoint import export
from train.model import LINEAR, Model, Shape
from train.run import RECIPES, Curriculum, Run, Stage
from train.tokenizer import VOCAB_SIZE, train_tokenizer
from weft.eval.recall import make_episodes

TINY = Shape(VOCAB_SIZE, (LINEAR,), 16, 16, 2, 2, 8, 8)


@pytest.fixture(scope="module")
def chats() -> Chats:
    return Chats(train_tokenizer(1))


def test_a_training_row_is_what_the_chat_template_renders(tmp_path: Path, chats: Chats) -> None:
    export(Model(TINY), chats.tokenizer, tmp_path, 512)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for episode in make_episodes(3, 256, 4, chats.count):
        last = len(episode.turns) - 1
        messages = [
            *episode.messages_before(last),
            {"role": "assistant", "content": episode.turns[last].reply},
        ]
        rendered = theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert rendered == chats.rows(episode)[0]
        prompt = theirs.apply_chat_template(
            messages[:-1], tokenize=True, add_generation_prompt=True, return_dict=False
        )
        assert rendered[: len(prompt)] == prompt


def test_a_name_has_the_same_tokens_wherever_it_stands(chats: Chats) -> None:
    alone = chats.encode("Bemo Tarlik")
    for text in ("- Bemo Tarlik", "What is Bemo Tarlik", "x\nBemo Tarlik", '"Bemo Tarlik'):
        assert chats.encode(text)[-len(alone) :] == alone
    assert len(chats.encode("48213")) == 5


def test_an_answer_is_right_only_when_all_of_its_tokens_are() -> None:
    answers = torch.tensor([-1, 0, 0, -1, 1, 1, 2])
    targets = torch.tensor([9, 1, 2, 9, 3, 4, 5])
    predicted = torch.tensor([0, 1, 2, 0, 3, 0, 5])
    assert exact_match(predicted, targets, answers) == (2, 3)


def test_every_row_of_a_batch_has_the_length_of_its_stage(chats: Chats) -> None:
    batch = make_batch(chats, wide_episode, random.Random(1), 6, 256)
    assert batch.tokens_BL.shape == batch.targets_BL.shape == batch.weights_BL.shape == (6, 256)
    assert torch.equal(batch.tokens_BL[:, 1:], batch.targets_BL[:, :-1])
    assert (batch.answers_BL >= 0).sum() > 20
    assert batch.weights_BL[batch.answers_BL >= 0].min() == 1.0


def test_a_stage_ends_when_its_score_is_reached_and_not_before() -> None:
    recipe = replace(RECIPES["recall"], stages=(Stage(128, 0.8, 512), Stage(256, 2.0, 512)))
    curriculum = Curriculum(recipe, random.Random(1))
    for _ in range(50):
        curriculum.report(128, 79, 100)
    assert curriculum.stage == 0
    for _ in range(50):
        curriculum.report(128, 90, 100)
    assert curriculum.stage == 1


def test_a_run_that_was_stopped_goes_on_as_if_it_never_was(tmp_path: Path, chats: Chats) -> None:
    recipe = replace(RECIPES["states-only"], shape=TINY, steps=6, stages=(Stage(192, 2.0, 384),))
    whole = Run.new(recipe)
    lines = [whole.one_step(chats) for _ in range(4)]
    first = Run.new(recipe)
    for _ in range(2):
        first.one_step(chats)
    first.save(tmp_path / "run.pt")
    second = Run.new(recipe)
    second.restore(tmp_path / "run.pt")
    assert [second.one_step(chats)["loss"] for _ in range(2)] == [line["loss"] for line in lines[2:]]
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name
