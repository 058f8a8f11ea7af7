"""Training is repeatable, counts answers honestly, and encodes chats as the shipped template renders them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from train.batches import FREE_WEIGHT, Chats, exact_match, make_batch, wide_episode
from train.checkpoint import export, load
from train.model import LINEAR, Model, Shape
from train.muon import Float32Muon
from train.run import RECIPES, Curriculum, Run, Stage, grown_model
from train.tokenizer import (
    CHAT_TEMPLATE,
    SECOND_VOCAB_SIZE,
    TAGS,
    VOCAB_SIZE,
    first_tokenizer,
    grown_tokenizer,
    save_tokenizer,
    train_tokenizer,
)
from weft.text.chat import ChatMessage, ChatTemplate
from weft_tools.eval.facts import write_json
from weft_tools.eval.recall import Episode, EpisodeTurn, make_episodes
from weft_tools.eval.tool_calls import chat_messages, make_tools_episodes

TINY = Shape(VOCAB_SIZE, (LINEAR,), 16, 16, 2, 2, 8, 8)


@pytest.fixture(scope="module")
def chats() -> Chats:
    return Chats(train_tokenizer(1))


@pytest.fixture(scope="module")
def grown(chats: Chats) -> Chats:
    """With the second tokenizer."""
    return Chats(grown_tokenizer(chats.tokenizer, 1))


def test_a_training_row_is_what_the_chat_template_renders(tmp_path: Path, chats: Chats) -> None:
    export(Model(TINY), chats.tokenizer, tmp_path, 512)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for episode in make_episodes(3, 256, 4, chats.count):
        last = len(episode.turns) - 1
        messages = [*episode.messages_before(last), {"role": "assistant", "content": episode.turns[last].reply}]
        rendered = theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert rendered == chats.rows(episode)[0]
        prompt = theirs.apply_chat_template(messages[:-1], tokenize=True, add_generation_prompt=True, return_dict=False)
        assert rendered[: len(prompt)] == prompt


def test_a_row_with_tools_is_what_the_chat_template_renders(tmp_path: Path, grown: Chats) -> None:
    save_tokenizer(grown.tokenizer, tmp_path, 512)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for episode in make_tools_episodes(3, 300, 12, grown.count):
        last = len(episode.turns) - 1
        messages = chat_messages(episode, last)
        rendered = theirs.apply_chat_template(
            messages, tools=list(episode.tools), add_generation_prompt=True, return_dict=False
        )
        reply = grown.encode(episode.turns[last].reply)
        assert [*rendered, *reply, grown.end, *grown.newline] == grown.rows(episode)[0]
        ours = ChatTemplate(CHAT_TEMPLATE, special_tokens={}).render(
            [ChatMessage(**message) for message in messages], variables={"tools": list(episode.tools)}
        )
        assert theirs.decode(rendered) == ours


def test_the_second_tokenizer_only_adds_to_the_first(chats: Chats, grown: Chats) -> None:
    second = grown.tokenizer
    assert second.get_vocab_size() == SECOND_VOCAB_SIZE
    assert first_tokenizer(second).to_str() == chats.tokenizer.to_str()
    for tag in TAGS:
        assert len(second.encode(tag, add_special_tokens=False).ids) == 1
    call = '<tool_call>\n{"name": "get_city", "arguments": {"name": "Bemo"}}\n</tool_call>'
    assert len(second.encode(call).ids) < len(chats.tokenizer.encode(call).ids) / 2
    assert second.decode(second.encode(call).ids, skip_special_tokens=True) == call


def test_a_second_stage_begins_with_the_answers_of_the_first(tmp_path: Path, chats: Chats, grown: Chats) -> None:
    torch.manual_seed(4)
    first = Model(TINY).eval()
    export(first, chats.tokenizer, tmp_path, 512)
    wide = replace(TINY, vocab_size=SECOND_VOCAB_SIZE)
    recipe = replace(RECIPES["skills"], shape=wide, start=tmp_path)
    second = grown_model(recipe, grown.tokenizer)
    tokens = torch.randint(3, VOCAB_SIZE, (1, 64))
    before, after = load(tmp_path)[0](tokens), second(tokens)
    assert torch.equal(before, after[..., :VOCAB_SIZE])
    assert after.shape[-1] == SECOND_VOCAB_SIZE


def test_what_is_free_in_a_reply_is_not_scored_and_a_free_beginning_is_not_learned(chats: Chats) -> None:
    reply = write_json({"name": "Bemo", "age": 34}, keys_known=False, opening_known=False)
    turn = EpisodeTurn("Who?", reply.text, "json", reply.free, reply.schema)
    tokens, weights, answers = chats.rows(Episode(None, (turn,), 64, ()))
    scored = chats.tokenizer.decode([t for t, answer in zip(tokens, answers, strict=True) if answer == 0])
    assert scored.replace(" ", "").replace('"', "") == "Bemo34"
    begin = tokens.index(chats.encode("{")[0])
    assert weights[begin] == 0.0
    assert weights[begin + 1] == FREE_WEIGHT


def test_muon_in_float32_is_muon() -> None:
    torch.manual_seed(1)
    start = torch.randn(48, 96)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    pairs = [
        (ours, Float32Muon([ours], 0.01)),
        (theirs, torch.optim.Muon([theirs], lr=0.01, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")),
    ]
    for _ in range(3):
        grad = torch.randn(48, 96)
        for parameter, optimiser in pairs:
            parameter.grad = grad.clone()
            optimiser.step()
    moved = (theirs - start).abs().max()
    assert (ours - theirs).abs().max() < 0.03 * moved


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
    whole = Run.new(recipe, chats.tokenizer)
    lines = [whole.one_step(chats) for _ in range(4)]
    first = Run.new(recipe, chats.tokenizer)
    for _ in range(2):
        first.one_step(chats)
    first.save(tmp_path / "run.pt")
    second = Run.new(recipe, chats.tokenizer)
    second.restore(tmp_path / "run.pt")
    assert [second.one_step(chats)["loss"] for _ in range(2)] == [line["loss"] for line in lines[2:]]
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name
