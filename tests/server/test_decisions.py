"""Decisions: questions about one text over HTTP, against transformers, whatever the order and the company."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import torch
import transformers
from transformers.decision.template_utils import DECISION_PROMPT
from transformers.decision.template_utils import Question as TheirQuestion
from transformers.pipelines.decision import DecisionPipeline
from transformers.utils.chat_template_utils import _compile_jinja_template

from tests.fixtures.checkpoints import checkpoint, reference
from tests.server.running import RunningServer, running_server
from weft.errors import CheckpointError, RequestError
from weft.text.decisions import (
    DecisionSettings,
    lettered_prompt,
    prompt_of,
    read_decision_settings,
    read_question,
    system_one_answer,
)

ENGINE = {"memory": "96MiB", "threads": 1, "max_model_len": 4096, "dtype": "float32"}
FILES = ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json")
SETTINGS = {"labels": {"noul": ["Y", "N"]}, "temperature": {"choice": 1.5}, "noul_options": ["false", "true"]}
TOLERANCE = 1e-5


def make_jev(directory: Path) -> Path:
    """A Qwen3.5 with a decision head, as transformers saves it."""
    source = checkpoint("qwen3_5")
    text = json.loads((source / "config.json").read_text(encoding="utf-8"))
    torch.manual_seed(1)
    model = transformers.JevForDecision(
        transformers.JevConfig(hidden_size=text["hidden_size"], text_config=text, softcap=5.0)
    )
    model.float().save_pretrained(directory)
    for name in FILES:
        shutil.copy(source / name, directory / name)
    return directory


@pytest.fixture(scope="module")
def jev(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_jev(tmp_path_factory.mktemp("decisions") / "jev")


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model whose decision.json names labels of one token."""
    directory = Path(shutil.copytree(checkpoint("qwen3_5"), tmp_path_factory.mktemp("decisions") / "labelled"))
    (directory / "decision.json").write_text(json.dumps(SETTINGS), encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def head(jev: Path) -> Iterator[RunningServer]:
    with running_server("", engine={"model": str(jev), **ENGINE}) as running:
        yield running


@pytest.fixture(scope="module")
def chat(labelled: Path) -> Iterator[RunningServer]:
    with running_server("", engine={"model": str(labelled), **ENGINE}) as running:
        yield running


def text_of(tokens: int, seed: int) -> str:
    chance = Random(seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint("qwen3_5"))
    words = ["".join(chance.choice("abcdefgh") for _ in range(5)) for _ in range(tokens)]
    text = " ".join(words)
    while len(tokenizer.encode(text)) > tokens:
        words.pop()
        text = " ".join(words)
    return text


def questions(count: int) -> dict[str, Any]:
    kinds = (
        {"type": "noul", "instructions": "Is refund {} asked for?", "criteria": {"true": "they ask"}},
        {"type": "choice", "instructions": "Tone {}?", "criteria": {"calm": None, "angry": "rude", "sad": {"a": [1]}}},
        {"type": "score", "instructions": {"how": "urgent {}"}, "criteria": ["can wait", "this week", "today"]},
    )
    asked = {}
    for number in range(count):
        question = json.loads(json.dumps(kinds[number % 3]).replace("{}", str(number)))
        asked[f"q{number}"] = question
    return asked


def ask(server: RunningServer, state: Any, asked: dict[str, Any], **more: Any) -> dict[str, Any]:
    answer = server.post("/v1/systemone", {"state": state, "questions": asked, **more})
    assert answer.is_success, answer.text
    body: dict[str, Any] = answer.json()
    assert list(body["answers"]) == list(asked)
    return body


def flat(answer: Any) -> list[float]:
    """The numbers of an answer, in the order of its keys."""
    if isinstance(answer, dict):
        return [number for key in sorted(answer) for number in flat(answer[key])]
    return [answer] if isinstance(answer, float) else []


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, answer in theirs.items():
        assert ours[name]["type"] == answer["type"]
        assert ours[name].get("choice") == answer.get("choice")
        assert flat(ours[name]) == pytest.approx(flat(answer), abs=TOLERANCE), name


def test_a_decision_head_answers_as_in_transformers(head: RunningServer, jev: Path) -> None:
    model = transformers.JevForDecision.from_pretrained(jev).float().eval()
    pipe = DecisionPipeline(model=model, tokenizer=transformers.AutoTokenizer.from_pretrained(jev))
    for state, count in (("The parcel came broken. " * 20, 6), ({"order": [1, {"é": "x"}]}, 3)):
        asked = questions(count)
        compare(ask(head, state, asked)["answers"], pipe({"state": state, "questions": asked}))


def test_labels_of_a_chat_model_are_read_as_in_transformers(chat: RunningServer, labelled: Path) -> None:
    pipe = DecisionPipeline(
        model=reference("qwen3_5"),
        tokenizer=transformers.AutoTokenizer.from_pretrained(labelled),
        decision_config=transformers.decision.DecisionConfig.from_pretrained(labelled),
    )
    state, asked = "The parcel came broken. " * 20, questions(6)
    compare(ask(chat, state, asked)["answers"], pipe({"state": state, "questions": asked}))


@pytest.mark.parametrize("kind", ["head", "chat"])
def test_a_text_is_computed_once_for_200_questions(kind: str, request: pytest.FixtureRequest) -> None:
    server: RunningServer = request.getfixturevalue(kind)
    state, asked = text_of(2000, 3), questions(200)
    before = server.metric("computed_tokens_total")
    body = ask(server, state, asked)
    computed = server.metric("computed_tokens_total") - before
    tokens = body["usage"]["input_tokens"]
    own = tokens - 200 * 2000  # of the questions, and of the template around each
    assert own < 200 * 130
    assert 2000 < computed <= 2000 + own
    assert body["usage"]["input_tokens_details"]["cached_tokens"] >= 199 * 2000


def test_without_a_prefix_cache_each_question_computes_the_text(labelled: Path) -> None:
    """The control of the test above."""
    with running_server("", engine={"model": str(labelled), **ENGINE, "prefix_cache": False}) as server:
        body = ask(server, text_of(500, 3), questions(5))
        assert server.metric("computed_tokens_total") == body["usage"]["input_tokens"] > 5 * 500


def test_bits_do_not_depend_on_order_or_company(head: RunningServer) -> None:
    state, asked = text_of(500, 4), questions(30)
    whole = ask(head, state, asked)["answers"]
    turned = dict(reversed(asked.items()))
    assert ask(head, state, turned, cache_salt="cold")["answers"] == {name: whole[name] for name in turned}
    for name in ("q0", "q7", "q29"):
        assert ask(head, state, {name: asked[name]}, cache_salt=name)["answers"] == {name: whole[name]}


def decide(server: RunningServer, **body: Any) -> httpx.Response:
    return server.post("/v1/decisions", body)


def test_decisions_are_label_reads_of_the_model(chat: RunningServer) -> None:
    state = "The parcel came broken. " * 20
    asked = [
        {"type": "predicate", "instructions": "Refund?", "name": "refund"},
        {
            "type": "choice",
            "instructions": "Tone?",
            "choices": [{"value": "calm"}, {"value": True, "description": "x"}],
        },
        {"type": "score", "instructions": "Urgent?", "levels": [{"label": "low"}, {"label": "high"}]},
    ]
    body = decide(chat, input=state, questions=asked).json()
    refund, tone, urgent = body["answers"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint("qwen3_5"))
    prompt = f'{state}\n\nQuestion: Tone?\nA: "calm"\nB: true - x\nAnswer with the letter of one option only.'
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, enable_thinking=False, return_dict=False
    )
    with torch.inference_mode():
        logits = reference("qwen3_5")(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)
    labels = [float(logits[tokenizer.encode(label)[0]]) for label in "AB"]
    total = sum(map(math.exp, labels))
    got = [one["probability"] for one in tone["probabilities"]]
    assert got == pytest.approx([math.exp(label) / total for label in labels], abs=TOLERANCE)
    best = max(range(2), key=labels.__getitem__)
    assert tone["choice"] == ["calm", True][best]
    assert tone["confidence"] == pytest.approx(math.exp(labels[best]), abs=TOLERANCE)
    assert (refund["type"], refund["name"], set(refund)) == ("predicate", "refund", {"type", "name", "probability"})
    assert urgent["score"] == pytest.approx(urgent["probabilities"][1]["probability"])
    messages = [{"role": "user", "content": [{"type": "input_text", "text": state}]}]
    assert decide(chat, input=messages, questions=asked).json()["answers"] == body["answers"]


GOOD = {"type": "predicate", "instructions": "?"}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"questions": []}, "questions has 0; it must have at least 1 and at most 200"),
        ({"questions": [GOOD] * 201}, "questions has 201; it must have at least 1 and at most 200"),
        (
            {"questions": [{"type": "choice", "instructions": "", "choices": [{"value": "a"}]}]},
            "questions[0].choices has 1; it must have at least 2 and at most 26",
        ),
        (
            {"questions": [{"type": "choice", "instructions": "", "choices": [{"value": "a"}, {"value": "a"}]}]},
            "questions[0].choices has a value twice",
        ),
        (
            {"questions": [{"type": "score", "instructions": "", "levels": [{"label": str(n)} for n in range(11)]}]},
            "questions[0].levels has 11; it must have at least 2 and at most 10",
        ),
        ({"questions": [GOOD], "joint": True}, "joint is not supported: questions are read one by one"),
        ({"questions": [GOOD], "input": [{"role": "system", "content": "x"}]}, "input[0]: a message has the role user"),
        ({"questions": [GOOD], "input": [{"role": "user", "content": 5}]}, "input[0].content is a text, or a list"),
        ({"questions": [{"type": "other", "instructions": ""}]}, "questions[0].type: invalid value 'other'"),
    ],
)
def test_a_wrong_decision_is_one_sentence(chat: RunningServer, body: dict[str, Any], sentence: str) -> None:
    answer = decide(chat, **{"input": "x", **body})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith(sentence)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"questions": {}}, "questions has 0"),
        ({"questions": {"a": 5}}, "questions.a: type is None; it may be noul, choice or score"),
        ({"questions": {"a": {"type": "maybe"}}}, "questions.a: type is 'maybe'; it may be noul, choice or score"),
        ({"questions": {"a": {"type": "choice"}}}, "questions.a: criteria map each choice to a description or null"),
        ({"questions": {"a": {"type": "score", "criteria": {}}}}, "questions.a: criteria list the levels"),
        ({"questions": {"a": {"type": "noul", "criteria": {"x": 1}}}}, "questions.a: criteria of a noul question"),
        ({"questions": {"a": {"type": "noul", "critera": {}}}}, "questions.a has 'critera'; a question has type"),
        (
            {"questions": {"a": {"type": "choice", "criteria": {str(n): None for n in range(27)}}}},
            "questions.a has 27 options; this model has labels for 26",
        ),
        ({"questions": {"a": {"type": "noul"}}, "assets": {"img": {}}}, "assets is not supported: pictures are not"),
    ],
)
def test_a_wrong_question_is_one_sentence(chat: RunningServer, body: dict[str, Any], sentence: str) -> None:
    answer = chat.post("/v1/systemone", {"state": "x", **body})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith(sentence)
    assert "\n" not in message


def test_a_decision_model_says_what_else_it_does_not_do(head: RunningServer) -> None:
    refused = decide(head, input="x", questions=[GOOD])
    assert "has no head for next tokens, and /v1/decisions reads its labels; ask /v1/systemone" in refused.text
    assert head.post("/v1/completions", {"prompt": "x"}).status_code == 400


@pytest.mark.parametrize("name", questions(3))
@pytest.mark.parametrize("state", ["a text", {"k": ["é", 1.5, None]}, ["x"], ""])
def test_the_prompt_is_that_of_transformers(state: Any, name: str) -> None:
    given = questions(3)[name]
    for settings, theirs in (
        (DecisionSettings(), transformers.decision.DecisionConfig()),
        (
            DecisionSettings(labels={"noul": ("1", "2"), "choice": tuple("xyz")}),
            transformers.decision.DecisionConfig(labels={"noul": ["1", "2"], "choice": ["x", "y", "z"]}),
        ),
    ):
        question = TheirQuestion.from_request(name, given, theirs)
        expected = _compile_jinja_template(DECISION_PROMPT).render(state=state, question=question)
        assert prompt_of(state, read_question(name, given, settings)) == expected


@pytest.mark.parametrize("probabilities", [[1.0, 0.0, 0.0], [0.2, 0.3, 0.5], [1 / 3, 1 / 3, 1 / 3]])
@pytest.mark.parametrize("name", ["q1", "q2"])
def test_an_answer_is_that_of_transformers(name: str, probabilities: list[float]) -> None:
    given = questions(3)[name]
    theirs = TheirQuestion.from_request(name, given, transformers.decision.DecisionConfig())
    ours = system_one_answer(read_question(name, given, DecisionSettings()), probabilities)
    assert ours == theirs.answer(probabilities)


def test_the_prompt_of_decisions_is_that_of_vllm() -> None:
    text = lettered_prompt("state", "Tone?", [('"calm"', ""), ('"angry"', "rude")])
    assert text == (
        'state\n\nQuestion: Tone?\nA: "calm"\nB: "angry" - rude\nAnswer with the letter of one option only.'
    )


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("decision.json", {"labels": {"noul": "Y"}}, "labels must have a list of texts"),
        ("decision.json", {"temperature": {"noul": 0}}, "temperature must have a number above 0"),
        ("config.json", {"model_type": "jev", "offsets": {"noul": 0, "score": 30, "choice": 8}}, "offsets must have"),
    ],
)
def test_files_that_say_nothing_useful_are_refused(
    tmp_path: Path, file: str, content: dict[str, Any], sentence: str
) -> None:
    (tmp_path / file).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CheckpointError, match=sentence):
        read_decision_settings(tmp_path)


def test_a_template_of_its_own_is_not_asked_in_another_form(tmp_path: Path) -> None:
    (tmp_path / "decision_template.jinja").write_text("x", encoding="utf-8")
    assert "decision_template.jinja" in read_decision_settings(tmp_path).refusal


def test_a_head_bounds_the_options(jev: Path) -> None:
    settings = read_decision_settings(jev)
    assert [len(settings.labels_of(kind)) for kind in ("noul", "score", "choice")] == [2, 22, 16]
    with pytest.raises(RequestError, match="17 options; this model has labels for 16"):
        read_question("a", {"type": "choice", "criteria": {str(n): None for n in range(17)}}, settings)


def test_metrics_count_questions_and_their_tokens(chat: RunningServer) -> None:
    labels = ("decisions_total", "decision_questions_total", "decision_tokens_total")

    def values() -> dict[str, int]:
        return {name: chat.metric(name) for name in labels}

    before = values()
    usage = ask(chat, text_of(300, seed=77), questions(5))["usage"]
    after = values()
    assert [after[name] - before[name] for name in labels] == [1, 5, usage["input_tokens"]]
    page = chat.get("/metrics").text
    cached = re.search(r'decision_tokens_total{.*endpoint="systemone".*source="cached"} (\S+)', page)
    assert cached is not None
    assert float(cached[1]) >= usage["input_tokens_details"]["cached_tokens"] > 800
