"""/v1/decisions and /v1/systemone: questions about one text; each question is a prompt whose answer is not generated.

    DecisionBody  (OpenAI, vLLM)              \\                                            / DecisionJob
                                               >-- PooledPrompt of each question --rows-- >
    SystemOneBody (System One, transformers)  /                                            \\ SystemOneJob

A row has the log-probabilities of a question's labels after the prompt (``Pooling.tokens``), or the scores of a
decision head. All prompts begin with the text. The engine computes the text for the first prompt; the others resume
from that state (``weft.schedule.prefix_sharing``).
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
from weft.server.generation import InputDetails, OutputDetails, ResponseUsage, check_count
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
"""Prompts that are written before other tasks get the event loop."""
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
    """The body of /v1/decisions. ``input``: a text, or messages of the user."""

    input: str | list[Any]
    questions: list[PredicateQuestion | ChoiceQuestion | ScoreQuestion]
    safety_identifier: str | None = None


class SystemOneBody(_AskingBody, kw_only=True):
    """The body of /v1/systemone. ``state``: a text or JSON. ``questions``: by name."""

    state: str | dict[str, Any] | list[Any]
    questions: dict[str, Any]


class DecisionAnswers(msgspec.Struct, kw_only=True):
    model: str
    answers: list[dict[str, Any]]
    usage: ResponseUsage


class SystemOneUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int = 0


class SystemOneAnswers(msgspec.Struct, kw_only=True):
    model: str
    answers: dict[str, Any]
    usage: SystemOneUsage


class _AskingJob(PoolingJob):
    """A job of questions. ``prefix`` names the endpoint."""

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
                usage=ResponseUsage(
                    input_tokens=usage.prompt_tokens,
                    input_tokens_details=InputDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
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
                    input_tokens_details=InputDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
                ),
            )
        )


def _options(question: PredicateQuestion | ChoiceQuestion | ScoreQuestion) -> list[tuple[str, str]]:
    """Return name and description of each option, in the order of the letters."""
    if isinstance(question, PredicateQuestion):
        return [("false", ""), ("true", "")]
    if isinstance(question, ChoiceQuestion):
        return [(_encoder.encode(option.value).decode(), option.description) for option in question.choices]
    return [(option.label, option.description) for option in question.levels]


def _answer(question: PredicateQuestion | ChoiceQuestion | ScoreQuestion, logprobs: Sequence[float]) -> dict[str, Any]:
    """Return the answer of /v1/decisions. Its confidence is the probability of the answer among all tokens of the
    vocabulary."""
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
                {"value": option.value, "probability": probability}
                for option, probability in zip(question.choices, probabilities, strict=True)
            ],
            "confidence": confidence,
        }
    return {
        "type": "score",
        "name": question.name,
        "score": sum(level * probability for level, probability in enumerate(probabilities)),
        "probabilities": [
            {"value": level, "label": option.label, "probability": probability}
            for level, (option, probability) in enumerate(zip(question.levels, probabilities, strict=True))
        ],
        "confidence": confidence,
    }


async def prepare_decisions(service: Service, body: DecisionBody) -> DecisionJob:
    """Prepare a request to /v1/decisions. Raise RequestError, ContextLengthError, UnknownModelError,
    EngineUnavailableError."""
    model = await service.model_for(body.model)
    text = body.input if isinstance(body.input, str) else _text_of(body.input)
    _check_questions(len(body.questions))
    for index, question in enumerate(body.questions):
        _check_options(f"questions[{index}]", question)
    if not model.info.generates:
        raise RequestError(
            f"{model.name} has no head for next tokens, and /v1/decisions reads its labels"
            + ("; ask /v1/systemone" if model.decisions.head is not None else ""),
            param="model",
        )
    messages = [
        (
            lettered_prompt(text, question.instructions, _options(question)),
            _pooling(model, LETTERS[: len(_options(question))], False),
        )
        for question in body.questions
    ]
    return DecisionJob(service, model, body, body.model, await _prompts(model, messages), field="input")


async def prepare_system_one(service: Service, body: SystemOneBody) -> SystemOneJob:
    """Prepare a request to /v1/systemone. Raise as ``prepare_decisions``."""
    model = await service.model_for(body.model)
    if model.decisions.refusal:
        raise RequestError(
            f"{model.name} cannot decide: {model.decisions.refusal}", param="model", code="unsupported_parameter"
        )
    _check_questions(len(body.questions))
    questions = [read_question(name, definition, model.decisions) for name, definition in body.questions.items()]
    has_head = model.decisions.head is not None
    if not has_head and not model.info.generates:
        raise RequestError(f"{model.name} has neither a decision head nor one for next tokens", param="model")
    messages = [(prompt_of(body.state, question), _pooling(model, question.labels, has_head)) for question in questions]
    prompts = await _prompts(model, messages)
    return SystemOneJob(service, model, body, body.model, prompts, field="state", questions=questions)


async def _prompts(model: ServedModel, messages: Sequence[tuple[str, Pooling]]) -> list[PooledPrompt]:
    """Return a prompt for each pair of user message and pooling."""
    check_count(len(messages), model.info.sizes.queue_max)
    written = []
    for index, (text, _) in enumerate(messages):
        if index % _YIELD_EVERY == 0:
            await asyncio.sleep(0)
        fields = ConversationFields(
            messages=[ChatMessage(role="user", content=text)], variables={"enable_thinking": False}
        )
        _, prompt = await model.renderer.render(fields, field="input")
        written.append(prompt.tokens)
    return [PooledPrompt(tokens, pooling, []) for tokens, (_, pooling) in zip(written, messages, strict=True)]


def _pooling(model: ServedModel, labels: Sequence[str], has_head: bool) -> Pooling:
    """Return the reading of the last row: scores of a decision head, or log-probabilities of ``labels``."""
    if has_head:
        return Pooling(score=True)
    ids = [model.renderer.tokenizer.encode(label, add_special_tokens=False) for label in labels]
    if any(len(tokens) != 1 for tokens in ids) or len({tokens[0] for tokens in ids}) != len(ids):
        raise RequestError(
            f"{model.name} cannot decide: the labels {', '.join(labels)} are not one token each", param="model"
        )
    return Pooling(tokens=tuple(tokens[0] for tokens in ids))


def _check_questions(count: int) -> None:
    if not 1 <= count <= QUESTIONS_MAX:
        raise RequestError(
            f"questions has {count}; it must have at least 1 and at most {QUESTIONS_MAX}", param="questions"
        )


def _check_options(place: str, question: PredicateQuestion | ChoiceQuestion | ScoreQuestion) -> None:
    if isinstance(question, ChoiceQuestion):
        name, count, most = "choices", len(question.choices), len(LETTERS)
        if len({(type(option.value), option.value) for option in question.choices}) != count:
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
    """Return the texts of the user's messages, joined as vLLM joins them. Raise RequestError."""
    texts = []
    for index, message in enumerate(messages):
        place = f"input[{index}]"
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
