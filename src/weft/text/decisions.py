"""Decisions: typed questions about one text, answered by the probability of each option, without generating text.

    state + question --prompt_of--> user message --chat template--> prompt, read at its last token
    log-probabilities of the labels, or scores of a decision head --answer--> an answer in the form of the API

Two APIs are served. ``/v1/decisions`` is OpenAI's API, with the prompt of vLLM. ``/v1/systemone`` is System One's API,
with the prompt of transformers. Both write the text first, so that its state is computed once, and name each option by
a label of one token. A decision head (``model_type`` jev) scores options by its rows; each kind of question has an
offset of its first row.

Sources: vLLM 0.33 ``entrypoints/openai/decisions``, transformers 5.24 ``decision/template_utils.py``.
"""

from __future__ import annotations

import json
import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from weft.errors import CheckpointError, RequestError
from weft.files import read_json

LETTERS = tuple(string.ascii_uppercase)
YES_NO = ("Yes", "No")
QUESTIONS_MAX = 200
"""Most questions of one request, as in vLLM."""
LEVELS_MAX = 10
Kind = Literal["noul", "choice", "score"]
KINDS: tuple[Kind, ...] = ("noul", "choice", "score")
SETTINGS, TEMPLATE = "decision.json", "decision_template.jinja"


@dataclass(frozen=True, slots=True)
class DecisionHead:
    """A decision head. ``count``: its rows; ``offsets``: the first row of each kind of question. ``softcap``: 0 for
    none."""

    count: int
    offsets: Mapping[str, int]
    softcap: float

    def scores_of(self, question: SystemOneQuestion, row: Sequence[float]) -> list[float]:
        """Return the score of each option of ``question``."""
        first = self.offsets[question.kind]
        scores = row[first : first + len(question.options)]
        return [self.softcap * math.tanh(score / self.softcap) for score in scores] if self.softcap else list(scores)


@dataclass(frozen=True, slots=True)
class DecisionSettings:
    """The checkpoint's ``decision.json``. ``labels`` of options and ``temperature``: by kind of question.
    ``true_first``: the order of the options of a ``noul`` question. ``head``: None for a model without a decision head.
    ``refusal``: why the model answers no questions here."""

    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    temperature: Mapping[str, float] = field(default_factory=dict)
    true_first: bool = True
    head: DecisionHead | None = None
    refusal: str = ""

    def labels_of(self, kind: Kind) -> tuple[str, ...]:
        """Return the labels of all options that a question of ``kind`` may have."""
        labels = self.labels.get(kind) or (YES_NO if kind == "noul" else LETTERS)
        return labels if self.head is None else labels[: self.head.count - self.head.offsets[kind]]


def read_decision_settings(directory: Path) -> DecisionSettings:
    """Return the settings in the files of a checkpoint, or the defaults. Raise CheckpointError."""
    refusal = ""
    if (directory / TEMPLATE).is_file():
        refusal = f"it has a {TEMPLATE}, and weft asks questions in the form of transformers' default prompt"
    head, path = _read_head(directory), directory / SETTINGS
    if not path.is_file():
        return DecisionSettings(head=head, refusal=refusal)
    settings = read_json(path)
    labels, temperature = settings.get("labels") or {}, settings.get("temperature") or {}
    if not isinstance(labels, dict) or not all(
        isinstance(of_kind, list) and all(isinstance(label, str) for label in of_kind) for of_kind in labels.values()
    ):
        raise CheckpointError(f"{path}: labels must have a list of texts for each type of question", param="model")
    if not isinstance(temperature, dict) or not all(
        isinstance(value, int | float) and 0 < value < math.inf for value in temperature.values()
    ):
        raise CheckpointError(f"{path}: temperature must have a number above 0 for each type", param="model")
    return DecisionSettings(
        labels={kind: tuple(of_kind) for kind, of_kind in labels.items()},
        temperature={kind: float(value) for kind, value in temperature.items()},
        true_first=settings.get("noul_options", ["true", "false"])[:1] == ["true"],
        head=head,
        refusal=refusal,
    )


def _read_head(directory: Path) -> DecisionHead | None:
    """Return the decision head that config.json describes. Raise CheckpointError."""
    path = directory / "config.json"
    config = read_json(path) if path.is_file() else {}
    if config.get("model_type") != "jev":
        return None
    count, softcap = config.get("num_verbalizers", 24), config.get("softcap") or 0.0
    offsets = config.get("offsets") or {"noul": 0, "score": 2, "choice": 8}
    if not isinstance(count, int) or not isinstance(softcap, int | float) or not 0 <= softcap < math.inf:
        raise CheckpointError(f"{path}: num_verbalizers is {count!r} and softcap {softcap!r}", param="model")
    if not isinstance(offsets, dict) or not all(
        isinstance(offsets.get(kind), int) and 0 <= offsets[kind] < count for kind in KINDS
    ):
        raise CheckpointError(f"{path}: offsets must have a row below {count} for {', '.join(KINDS)}", param="model")
    return DecisionHead(count, offsets, float(softcap))


@dataclass(frozen=True, slots=True)
class SystemOneQuestion:
    """One question of System One. ``options``: names in the order of the prompt; ``descriptions``: of each option, as
    text, JSON or None."""

    name: str
    kind: Kind
    instructions: Any
    options: tuple[str, ...]
    descriptions: tuple[Any, ...]
    labels: tuple[str, ...]


def read_question(name: str, definition: Any, settings: DecisionSettings) -> SystemOneQuestion:
    """Return the question ``name`` of ``/v1/systemone``. Raise RequestError."""
    place = f"questions.{name[:64]}"
    kind = definition.get("type") if isinstance(definition, dict) else None
    if kind not in KINDS:
        raise RequestError(f"{place}: type is {kind!r}; it may be noul, choice or score", param=f"{place}.type")
    unknown = sorted(set(definition) - {"type", "instructions", "criteria"})
    if unknown:
        raise RequestError(
            f"{place} has {unknown[0][:64]!r}; a question has type, instructions and criteria", param=place
        )
    criteria = definition.get("criteria")
    options: dict[str, Any]
    if kind == "noul":
        if criteria is not None and not (isinstance(criteria, dict) and set(criteria) <= {"true", "false"}):
            raise RequestError(
                f"{place}: criteria of a noul question describe true and false", param=f"{place}.criteria"
            )
        order = ("true", "false") if settings.true_first else ("false", "true")
        options = {option: (criteria or {}).get(option) for option in order}
    elif kind == "choice":
        if not isinstance(criteria, dict) or not criteria:
            raise RequestError(f"{place}: criteria map each choice to a description or null", param=f"{place}.criteria")
        options = criteria
    else:
        if not isinstance(criteria, list) or not criteria:
            raise RequestError(f"{place}: criteria list the levels, the lowest first", param=f"{place}.criteria")
        options = {str(level): description for level, description in enumerate(criteria)}
    labels = settings.labels_of(kind)
    _check_count(place, len(options), len(labels))
    return SystemOneQuestion(
        name, kind, definition.get("instructions"), tuple(options), tuple(options.values()), labels[: len(options)]
    )


def _check_count(place: str, count: int, most: int) -> None:
    if count > most:
        raise RequestError(f"{place} has {count} options; this model has labels for {most}", param=place)


def prompt_of(state: Any, question: SystemOneQuestion) -> str:
    """Return the user message of transformers' default decision prompt."""
    lines = [_text(question.instructions)]
    for label, option, description in zip(question.labels, question.options, question.descriptions, strict=True):
        said = _text(description)
        if question.kind == "noul":
            said = said or (option if question.labels != YES_NO else "")
            lines.append(f"{label}: {said}" if said else "")
        else:
            said = (f"{option}: {said}" if said else option) if question.kind == "choice" else said
            lines.append(f"{label}. {said}")
    if question.kind == "noul":
        end = f"Answer {question.labels[0]} or {question.labels[1]} only."
    else:
        noun = "letter" if question.labels == LETTERS[: len(question.labels)] else "label"
        of = "option" if question.kind == "choice" else "level"
        end = f"Answer with the {noun} of the {of} that fits best ({question.labels[0]} to {question.labels[-1]}) only."
    return "\n".join([f"{_text(state)}\n", *(line for line in lines if line), end])


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def system_one_answer(question: SystemOneQuestion, probabilities: Sequence[float]) -> dict[str, Any]:
    """Return the answer of System One. The ``probabilities`` of the options add up to 1."""
    by_option, count = dict(zip(question.options, probabilities, strict=True)), len(probabilities)
    if question.kind == "noul":
        return {"type": "noul", "noul": by_option["true"]}
    best = max(by_option, key=lambda option: by_option[option])
    if question.kind == "choice":
        confidence = 1.0 if count == 1 else max(0.0, (by_option[best] - 1 / count) / (1 - 1 / count))
        return {"type": "choice", "choice": best, "confidence": confidence, "probabilities": by_option}
    distance = sum(probability * abs(level - int(best)) for level, probability in enumerate(probabilities))
    uniform = sum(abs(level - (count - 1) / 2) for level in range(count)) / count
    return {
        "type": "score",
        "score": sum(level * probability for level, probability in enumerate(probabilities)),
        "legend": dict(zip(question.options, question.descriptions, strict=True)),
        "confidence": 1.0 if count == 1 else max(0.0, 1 - distance / uniform),
        "probabilities": by_option,
    }


def lettered_prompt(state: str, instructions: str, options: Sequence[tuple[str, str]]) -> str:
    """Return the user message of vLLM's ``/v1/decisions``. ``options``: names and descriptions, which may be empty."""
    lines = [
        f"{label}: {name} - {description}" if description else f"{label}: {name}"
        for label, (name, description) in zip(LETTERS, options, strict=False)
    ]
    heading = [f"Question: {instructions}"] if instructions else []
    return "\n".join([f"{state}\n", *heading, *lines, "Answer with the letter of one option only."])


def probabilities_of(scores: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Return the softmax of ``scores``."""
    scaled = [score / temperature for score in scores]
    top = max(scaled)
    weights = [math.exp(score - top) for score in scaled]
    total = math.fsum(weights)
    return [weight / total for weight in weights]
