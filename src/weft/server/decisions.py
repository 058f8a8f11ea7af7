"""/v1/decisions and /v1/systemone: questions about one text, each a prompt without an answer.

    DecisionBody  (OpenAI, vLLM)              \\                                            / DecisionJob
                                               >-- PooledPrompt of each question --rows-- >
    SystemOneBody (System One, transformers)  /                                            \\ SystemOneJob

A row has the log-probabilities of a question's labels after the prompt (``Pooling.tokens``), or the scores of a
decision head. The prompts begin with the text. The engine computes it for the first of them, and the others go on from
its state (``weft.schedule.prefix_sharing``).
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from weft.errors import RequestError
from weft.request import Pooling
from weft.server.generation import check_count
from weft.server.pooling import UNSERVED_IN_POOLING, PoolingJob, PoolingUsage
from weft.server.protocol import Priority, Salt, Unserved
from weft.server.served_model import ServedModel
from weft.server.service import Service
from weft.server.sse import Way
from weft.text.chat import ChatMessage
from weft.text.chat_request import ConversationFields
from weft.text.decisions import (
    LETTERS,
    LEVELS_MAX,
    QUESTIONS_MAX,
    SystemOneQuestion,
    lettered_prompt,
    probabilities_of,
    prompt_of,
    read_question,
    system_one_answer,
)
from weft.text.pooling import PooledPrompt

UNSERVED_IN_DECISIONS: Unserved = {
    **UNSERVED_IN_POOLING,
    "joint": ("questions are read one by one; joint reads are for diffusion models", (False,)),
}
UNSERVED_IN_SYSTEM_ONE: Unserved = {
    **UNSERVED_IN_POOLING,
    "assets": ("pictures are not read here: describe them in the state", ({},)),
}
_YIELD_EVERY = 8
"""Prompts that are written before others get the loop."""
_encoder = msgspec.json.Encoder()


class PredicateQuestion(msgspec.Struct, kw_only=True, tag_field="type", tag="predicate"):
    """A statement that may be true."""

    instructions: str
    name: str | None = None


class ChoiceOption(msgspec.Struct, kw_only=True):
    value: str | bool
    description: str = ""


class ChoiceQuestion(msgspec.Struct, kw_only=True, tag_field="type", tag="choice"):
    """One of ``choices``."""

    instructions: str
    choices: list[ChoiceOption]
    name: str | None = None


class ScoreLevel(msgspec.Struct, kw_only=True):
    label: str
    description: str = ""


class ScoreQuestion(msgspec.Struct, kw_only=True, tag_field="type", tag="score"):
    """One of ``levels``, the lowest first."""

    instructions: str
    levels: list[ScoreLevel]
    name: str | None = None


class _AskingBody(msgspec.Struct, kw_only=True):
    """The fields that both endpoints share."""

    model: str | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None

    @property
    def stream(self) -> bool:
        return False


class DecisionBody(_AskingBody, kw_only=True):
    """``input``: a text, or messages of the user."""

    input: str | list[Any]
    questions: list[PredicateQuestion | ChoiceQuestion | ScoreQuestion]
    safety_identifier: str | None = None


class SystemOneBody(_AskingBody, kw_only=True):
    """``state``: a text or JSON. ``questions`` by their names."""

    state: str | dict[str, Any] | list[Any]
    questions: dict[str, Any]


class TokenDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int = 0


class DecisionUsage(msgspec.Struct, kw_only=True):
    """Counts over the prompts of all questions."""

    input_tokens: int
    input_tokens_details: TokenDetails
    output_tokens: int = 0
    output_tokens_details: OutputDetails
    total_tokens: int


class DecisionAnswers(msgspec.Struct, kw_only=True):
    model: str
    answers: list[dict[str, Any]]
    usage: DecisionUsage


class SystemOneUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: TokenDetails
    output_tokens: int = 0


class SystemOneAnswers(msgspec.Struct, kw_only=True):
    model: str
    answers: dict[str, Any]
    usage: SystemOneUsage


class _AskingJob(PoolingJob):
    """``prefix`` names the endpoint."""

    def counted(self) -> PoolingUsage:
        """Count the questions of an answer, and return its usage."""
        usage, metrics, base = self.usage(), self.service.metrics, self.model.base
        cached = usage.prompt_tokens_details.cached_tokens
        metrics.count(base, "decisions", self.prefix)
        metrics.count(base, "decision_questions", self.prefix, amount=len(self.prompts))
        for source, tokens in (("computed", usage.prompt_tokens - cached), ("cached", cached)):
            metrics.count(base, "decision_tokens", self.prefix, source, amount=tokens)
        return usage


class DecisionJob(_AskingJob):
    prefix = "decisions"

    async def written(self, rows: Sequence[bytes]) -> bytes:
        answers = [_answer(question, array("f", row)) for question, row in zip(self.body.questions, rows, strict=True)]
        usage = self.counted()
        return _encoder.encode(
            DecisionAnswers(
                model=self.name,
                answers=answers,
                usage=DecisionUsage(
                    input_tokens=usage.prompt_tokens,
                    input_tokens_details=TokenDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
                    output_tokens_details=OutputDetails(),
                    total_tokens=usage.total_tokens,
                ),
            )
        )


class SystemOneJob(_AskingJob):
    prefix = "systemone"

    def __init__(self, *args: Any, questions: Sequence[SystemOneQuestion], **more: Any) -> None:
        super().__init__(*args, **more)
        self._questions = questions

    async def written(self, rows: Sequence[bytes]) -> bytes:
        settings, answers = self.model.decisions, {}
        for question, row in zip(self._questions, rows, strict=True):
            scores = list(array("f", row))
            if settings.head is not None:
                scores = settings.head.scores_of(question, scores)
            probabilities = probabilities_of(scores, settings.temperature.get(question.kind, 1.0))
            answers[question.name] = system_one_answer(question, probabilities)
        usage = self.counted()
        return _encoder.encode(
            SystemOneAnswers(
                model=self.name,
                answers=answers,
                usage=SystemOneUsage(
                    input_tokens=usage.prompt_tokens,
                    input_tokens_details=TokenDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
                ),
            )
        )


def _options(question: PredicateQuestion | ChoiceQuestion | ScoreQuestion) -> list[tuple[str, str]]:
    """Return names and descriptions, in the order of the letters."""
    if isinstance(question, PredicateQuestion):
        return [("false", ""), ("true", "")]
    if isinstance(question, ChoiceQuestion):
        return [(_encoder.encode(one.value).decode(), one.description) for one in question.choices]
    return [(one.label, one.description) for one in question.levels]


def _answer(question: PredicateQuestion | ChoiceQuestion | ScoreQuestion, logprobs: Sequence[float]) -> dict[str, Any]:
    """Return the answer of /v1/decisions: a confidence is the share of the whole vocabulary that the answer has."""
    probabilities = probabilities_of(logprobs)
    if isinstance(question, PredicateQuestion):
        return {"type": "predicate", "name": question.name, "probability": probabilities[1]}
    top = max(range(len(probabilities)), key=probabilities.__getitem__)
    confidence = math.exp(logprobs[top])
    if isinstance(question, ChoiceQuestion):
        return {
            "type": "choice",
            "name": question.name,
            "choice": question.choices[top].value,
            "probabilities": [
                {"value": one.value, "probability": probability}
                for one, probability in zip(question.choices, probabilities, strict=True)
            ],
            "confidence": confidence,
        }
    return {
        "type": "score",
        "name": question.name,
        "score": sum(level * probability for level, probability in enumerate(probabilities)),
        "probabilities": [
            {"value": level, "label": one.label, "probability": probability}
            for level, (one, probability) in enumerate(zip(question.levels, probabilities, strict=True))
        ],
        "confidence": confidence,
    }


async def prepare_decisions(service: Service, body: DecisionBody) -> DecisionJob:
    """Raises RequestError, ContextLengthError, UnknownModelError, EngineUnavailableError."""
    model = await service.model_for(body.model)
    text = body.input if isinstance(body.input, str) else _text_of(body.input)
    _check_questions(len(body.questions))
    for at, question in enumerate(body.questions):
        _check_options(f"questions[{at}]", question)
    if not model.info.generates:
        raise RequestError(
            f"{model.name} has no head for next tokens, and /v1/decisions reads its labels"
            + ("; ask /v1/systemone" if model.decisions.head is not None else ""),
            param="model",
        )
    asked = [
        (
            lettered_prompt(text, question.instructions, _options(question)),
            _pooling(model, LETTERS[: len(_options(question))], False),
        )
        for question in body.questions
    ]
    return DecisionJob(service, model, body, body.model, await _prompts(model, asked), field="input")


async def prepare_system_one(service: Service, body: SystemOneBody) -> SystemOneJob:
    """Do as ``prepare_decisions``."""
    model = await service.model_for(body.model)
    if model.decisions.refusal:
        raise RequestError(
            f"{model.name} cannot decide: {model.decisions.refusal}", param="model", code="unsupported_parameter"
        )
    _check_questions(len(body.questions))
    questions = [read_question(name, given, model.decisions) for name, given in body.questions.items()]
    has_head = model.decisions.head is not None
    if not has_head and not model.info.generates:
        raise RequestError(f"{model.name} has neither a decision head nor one for next tokens", param="model")
    asked = [(prompt_of(body.state, question), _pooling(model, question.labels, has_head)) for question in questions]
    prompts = await _prompts(model, asked)
    return SystemOneJob(service, model, body, body.model, prompts, field="state", questions=questions)


async def _prompts(model: ServedModel, asked: Sequence[tuple[str, Pooling]]) -> list[PooledPrompt]:
    """Return the prompt of each user message, which its pooling reads."""
    check_count(len(asked), model.info.sizes.queue_max)
    written = []
    for at, (text, _) in enumerate(asked):
        if at % _YIELD_EVERY == 0:
            await asyncio.sleep(0)
        fields = ConversationFields(
            messages=[ChatMessage(role="user", content=text)], variables={"enable_thinking": False}
        )
        _, prompt = await model.render(fields, field="input")
        written.append(prompt.tokens)
    return [PooledPrompt(tokens, pooling, []) for tokens, (_, pooling) in zip(written, asked, strict=True)]


def _pooling(model: ServedModel, labels: Sequence[str], has_head: bool) -> Pooling:
    """Return the reading of the last row: scores of a decision head, or log-probabilities of ``labels``."""
    if has_head:
        return Pooling(score=True)
    ids = [model.tokenizer.encode(label, add_special_tokens=False) for label in labels]
    if any(len(one) != 1 for one in ids) or len({one[0] for one in ids}) != len(ids):
        raise RequestError(
            f"{model.name} cannot decide: the labels {', '.join(labels)} are not one token each", param="model"
        )
    return Pooling(tokens=tuple(one[0] for one in ids))


def _check_questions(count: int) -> None:
    if not 1 <= count <= QUESTIONS_MAX:
        raise RequestError(
            f"questions has {count}; it must have at least 1 and at most {QUESTIONS_MAX}", param="questions"
        )


def _check_options(place: str, question: PredicateQuestion | ChoiceQuestion | ScoreQuestion) -> None:
    if isinstance(question, ChoiceQuestion):
        name, count, most = "choices", len(question.choices), len(LETTERS)
        if len({(type(one.value), one.value) for one in question.choices}) != count:
            raise RequestError(f"{place}.choices has a value twice", param=f"{place}.choices")
    elif isinstance(question, ScoreQuestion):
        name, count, most = "levels", len(question.levels), LEVELS_MAX
    else:
        return
    if not 2 <= count <= most:
        raise RequestError(
            f"{place}.{name} has {count}; it must have at least 2 and at most {most}", param=f"{place}.{name}"
        )


def _text_of(messages: Sequence[Any]) -> str:
    """Return the texts of messages of the user, as vLLM joins them. Raises RequestError."""
    texts = []
    for at, message in enumerate(messages):
        place = f"input[{at}]"
        if not isinstance(message, dict) or message.get("role") != "user":
            raise RequestError(f"{place}: a message has the role user and a content", param=place)
        content = message.get("content")
        parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list) or not all(
            isinstance(part, dict) and part.get("type") == "input_text" and isinstance(part.get("text"), str)
            for part in parts
        ):
            raise RequestError(f"{place}.content is a text, or a list of input_text parts", param=f"{place}.content")
        texts.append("\n".join(part["text"] for part in parts))
    return "\n\n".join(texts)


DECISIONS = Way(DecisionBody, UNSERVED_IN_DECISIONS, prepare_decisions)
SYSTEM_ONE = Way(SystemOneBody, UNSERVED_IN_SYSTEM_ONE, prepare_system_one)
