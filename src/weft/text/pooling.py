"""Embeddings and scores: the settings of a checkpoint, prompts, and values from pooled rows.

    modules.json, 1_Pooling/config.json, config_sentence_transformers.json      of sentence-transformers
    config.json: sentence_transformers, classifier_from_token

    text                --embedding--> PooledPrompt --engine--> float32 bytes --vector--> [float, ...]
    (query, document)   --scoring----> PooledPrompt --engine--> float32 bytes --score---> one float

A checkpoint without these files is pooled at its last token and normalised. Scores come in two ways. A model with a
score head reads the pair as its tokenizer joins pairs. A generative reranker reads a prompt that asks whether the
document answers the query; the score compares the logits of "yes" and "no".

An input is cut only if the request allows it, and the answer then says so. A checkpoint with a setting that weft does
not compute is refused at the first request that needs it. The end of every shared beginning (an instruction, the query
of a rerank) is a boundary, so that the prefix cache keeps a state there.

Sources: sentence-transformers 5.1 (``models/Pooling.py``, ``cross_encoder/CrossEncoder.py``); the model card
of Qwen3-Reranker.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from weft.errors import CheckpointError, ContextLengthError, RequestError
from weft.files import parse_json, read_json, read_text
from weft.request import Pooling
from weft.text.control_tokens import NO_CONTROL, ControlTokens
from weft.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from weft.text.dense import DenseModule

Kind = Literal["first", "last", "mean"]
_BYTES_MAX = 1 << 20
_SERVED_MODES: dict[str, Kind] = {"cls": "first", "lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
_MODE_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_VERDICT = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_NO_REFUSAL = ""


@dataclass(frozen=True, slots=True)
class EmbeddingSettings:
    """A checkpoint's settings of embeddings. ``includes_prompt``: whether the mean counts the tokens of the
    instruction. ``prompts``: texts that come before inputs, by name; ``default_prompt``: the name of the default.
    ``tokens_max``: longest text that the model was trained for, 0 for any. ``refusal``: why weft cannot embed with
    it."""

    kind: Kind = "last"
    normalize: bool = True
    includes_prompt: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    tokens_max: int = 0
    refusal: str = _NO_REFUSAL
    dense: tuple[Path, ...] = ()
    """Directories of the Dense modules that project the pooled vector, in order."""


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """A prompt to be pooled. ``truncated``: tokens that were left out, because the request allows it."""

    tokens: list[int]
    pooling: Pooling
    boundaries: list[int]
    truncated: int = 0


def is_embedder(directory: Path) -> bool:
    """Return whether the checkpoint was saved to embed. Its language-model head, if any, was then not trained."""
    return (directory / "modules.json").is_file()


def read_embedding_settings(directory: Path) -> EmbeddingSettings:
    """Return the checkpoint's settings of embeddings. Raise CheckpointError for a file that is not JSON of the expected
    form."""
    path = directory / "modules.json"
    if not path.is_file():
        return EmbeddingSettings()
    modules = parse_json(read_text(path, bytes_max=_BYTES_MAX), str(path))
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"{path}: expected a list of modules", param="model")
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    refusal = ""
    others = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Dense", "Normalize")]
    dense: list[Path] = []
    if others:
        refusal = f"its modules.json has {others[0]}, which weft does not compute"
    kind: Kind = "last"
    includes_prompt = True
    for module, name in zip(modules, kinds, strict=True):
        inside = directory / str(module.get("path", ""))
        if ".." in inside.parts or not inside.resolve().is_relative_to(directory.resolve()):
            raise CheckpointError(f"{path}: the path of its {name} leads elsewhere", param="model")
        if name == "Dense":
            dense.append(inside)
        if name == "Pooling":
            settings = read_json(inside / "config.json")
            includes_prompt = settings.get("include_prompt") is not False
            modes = _modes(settings)
            if len(modes) == 1 and modes[0] in _SERVED_MODES:
                kind = _SERVED_MODES[modes[0]]
            else:
                refusal = refusal or (
                    f"its pooling is {' and '.join(modes) or 'not named'}; weft pools the first token, the last "
                    "one, or the mean"
                )
    if "Pooling" not in kinds:
        refusal = refusal or "its modules.json has no Pooling"
    if kinds[1:2] != ["Pooling"] or "Normalize" in kinds[:-1]:
        refusal = refusal or f"its modules.json has {', '.join(kinds)} in this order, which weft does not compute"
    prompts, default = _prompts(directory)
    limit = _optional(directory / "sentence_bert_config.json").get("max_seq_length")
    return EmbeddingSettings(
        kind=kind,
        normalize="Normalize" in kinds,
        includes_prompt=includes_prompt,
        prompts=prompts,
        default_prompt=default,
        tokens_max=limit if isinstance(limit, int) and limit > 0 else 0,
        refusal=refusal,
        dense=tuple(dense),
    )


def _modes(settings: Mapping[str, Any]) -> list[str]:
    named = settings.get("pooling_mode")
    if isinstance(named, str):
        return [named]
    if isinstance(named, list):
        return [str(named_mode) for named_mode in named]
    return [mode for key, mode in _MODE_KEYS.items() if settings.get(key) is True]


def _prompts(directory: Path) -> tuple[dict[str, str], str | None]:
    settings = _optional(directory / "config_sentence_transformers.json")
    named = settings.get("prompts")
    prompts = {name: text for name, text in (named if isinstance(named, dict) else {}).items() if isinstance(text, str)}
    default = settings.get("default_prompt_name")
    return prompts, default if isinstance(default, str) and default in prompts else None


def _read_all_dense(settings: EmbeddingSettings) -> list[DenseModule]:
    if settings.refusal or not settings.dense:
        return []
    from weft.text.dense import read_dense  # imported here: a server without such a model needs no numpy

    return [read_dense(directory) for directory in settings.dense]


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


class Pooler:
    """Prompts and values of one model's embeddings and scores. ``score_labels``: rows of the score head, 0 without one.
    ``control``: control tokens that texts of requests can only spell."""

    def __init__(
        self,
        directory: Path,
        tokenizer: Tokenizer,
        *,
        name: str,
        score_labels: int,
        control: ControlTokens | None = None,
    ) -> None:
        self._control = control or ControlTokens(NO_CONTROL)
        self.settings = read_embedding_settings(directory)
        self._dense = _read_all_dense(self.settings)
        self._tokenizer = tokenizer
        self._name = name
        self._labels = score_labels
        config = _optional(directory / "config.json")
        self._sigmoid = not _has_identity(config)
        self._tokens: tuple[int, ...] = ()
        self._score_refusal = ""
        if not score_labels:
            self._tokens, self._score_refusal = _judging(config, directory, name, tokenizer)
        elif score_labels > 1:
            self._score_refusal = f"its score head has {score_labels} labels; a score needs one"

    # ------------------------------------------------------------------ embeddings

    def embedding(
        self,
        text_or_ids: str | Sequence[int],
        *,
        limit: int,
        prompt: str | None = None,
        prompt_name: str | None = None,
        truncate_to: int | None = None,
        param: str = "input",
    ) -> PooledPrompt:
        """Return the prompt of an embedding. ``limit``: the served context. ``prompt``: a text before the input;
        ``prompt_name``: the name of such a text in the checkpoint. ``truncate_to``: cut a longer input at its end;
        None: a longer input is an error. Raise RequestError, ContextLengthError."""
        settings = self.settings
        if settings.refusal:
            raise RequestError(
                f"{self._name} cannot embed: {settings.refusal}", param="model", code="unsupported_parameter"
            )
        before = self._instruction(prompt, prompt_name)
        bound = min(limit, settings.tokens_max or limit)
        if not isinstance(text_or_ids, str):
            if before and (prompt is not None or prompt_name is not None):
                raise RequestError(
                    "prompt and prompt_name go before texts; this input is token ids",
                    param="prompt_name" if prompt is None else "prompt",
                )
            tokens, front, tail = list(text_or_ids), 0, 0
        else:
            text, quoted = self._written((before, prompt is not None), (text_or_ids, True))
            tokens, [front] = self._tokenizer.encode_with_boundaries(text, [len(before)], quoted=quoted)
            front = front if before else 0
            tail = self._special_tail(tokens)
        if not tokens:
            raise RequestError(f"{param} is empty: it needs at least one token", param=param)
        left_out = 0
        if truncate_to is not None and len(tokens) > min(bound, truncate_to):
            length = min(bound, truncate_to)
            left_out = len(tokens) - length
            ends = tokens[len(tokens) - tail :] if tail < length else []
            tokens = tokens[: length - len(ends)] + ends
        if len(tokens) > bound:
            why = "sentence_bert_config.json: max_seq_length" if bound < limit else "--max-model-len"
            raise ContextLengthError(
                f"{param} has {len(tokens)} tokens; the limit is {bound} ({why})",
                param=param,
                code="context_length_exceeded",
            )
        skip = front if settings.kind == "mean" and not settings.includes_prompt else 0
        pooling = Pooling(kind=settings.kind, skip=min(skip, len(tokens) - 1))
        return PooledPrompt(tokens, pooling, [front] if front else [], left_out)

    def _written(self, *parts: tuple[str, bool]) -> tuple[str, list[int]]:
        """Return the joined text of ``parts``, and the positions at which parts from the request (True) spell control
        tokens."""
        text, quoted = "", list[int]()
        for part, is_said in parts:
            quoted += [len(text) + place for place in self._control.spelled(part)] if is_said else []
            text += part
        return text, quoted

    def _instruction(self, prompt: str | None, prompt_name: str | None) -> str:
        prompts = self.settings.prompts
        if prompt is not None and prompt_name is not None:
            raise RequestError(
                "prompt and prompt_name are given; one of them goes before the input", param="prompt_name"
            )
        if prompt is not None:
            return prompt
        name = prompt_name if prompt_name is not None else self.settings.default_prompt
        if name is None:
            return ""
        if name not in prompts:
            known = ", ".join(sorted(prompts)) or "none"
            raise RequestError(
                f"prompt_name is {name[:100]!r}; the prompts of this model are {known}", param="prompt_name"
            )
        return prompts[name]

    def _special_tail(self, tokens: Sequence[int]) -> int:
        """Return how many of the last ``tokens`` the tokenizer adds to every text: a cut at the end keeps these."""
        added = self._tokenizer.encode("")
        count = 0
        while count < min(len(added), len(tokens)) and added[-1 - count] == tokens[-1 - count]:
            count += 1
        return count

    def width(self, hidden_size: int) -> int:
        """Return the number of dimensions of an embedding."""
        return self._dense[-1].width if self._dense else hidden_size

    def vector(self, pooled: bytes, dimensions: int | None = None) -> array[float]:
        """Return the embedding in ``pooled``, float32. ``dimensions``: keep only the first of its numbers (Matryoshka),
        and normalise again. Raise RequestError."""
        values = array("f", pooled)
        for project in self._dense:
            values = project(values)
        if dimensions is not None:
            if not 1 <= dimensions <= len(values):
                raise RequestError(
                    f"dimensions is {dimensions}; this model's embeddings have {len(values)}", param="dimensions"
                )
            values = values[:dimensions]
        if self.settings.normalize:
            length = math.sqrt(math.fsum(value * value for value in values))
            values = array("f", [value / length for value in values]) if length > 0 else values
        return values

    # ------------------------------------------------------------------ scores

    def scoring(
        self,
        query: str,
        document: str,
        *,
        limit: int,
        instruction: str | None = None,
        truncate_to: int | None = None,
        param: str = "documents",
    ) -> PooledPrompt:
        """Return the prompt that scores ``document`` as an answer to ``query``. ``instruction``: for a generative
        reranker. Raise RequestError, ContextLengthError."""
        if self._score_refusal:
            raise RequestError(
                f"{self._name} cannot score: {self._score_refusal}", param="model", code="unsupported_parameter"
            )
        bound = limit if truncate_to is None else min(limit, truncate_to)
        if self._labels:
            if instruction is not None:
                raise RequestError(
                    "instruction is for generative rerankers; this model has a score head, and reads only "
                    "query and document",
                    param="instruction",
                )
            places = self._control.spelled(query), self._control.spelled(document)
            tokens, front, back = self._tokenizer.encode_pair(query, document, quoted=places)
            pooling = Pooling(score=True)
        else:

            def encode(*parts: tuple[str, bool]) -> list[int]:
                text, quoted = self._written(*parts)
                return self._tokenizer.encode(text, add_special_tokens=False, quoted=quoted)

            first = encode(
                (f"{_JUDGE}<Instruct>: ", False),
                (instruction or _INSTRUCTION, True),
                ("\n<Query>: ", False),
                (query, True),
                ("\n<Document>:", False),
            )
            end = encode((_VERDICT, False))
            tokens = [*first, *encode((f" {document}", True)), *end]
            front, back = len(first), len(end)
            pooling = Pooling(tokens=self._tokens)
        left_out = max(0, len(tokens) - bound)
        if left_out:
            if truncate_to is None or bound <= front + back:
                raise ContextLengthError(
                    f"{param}: query and document have {len(tokens)} tokens; the limit is {bound} (--max-model-len)",
                    param=param,
                    code="context_length_exceeded",
                )
            tokens = tokens[: bound - back] + tokens[len(tokens) - back :]
        return PooledPrompt(tokens, pooling, [front], left_out)

    def score(self, pooled: bytes) -> float:
        """Return the score in ``pooled``: between 0 and 1, or the logit if the checkpoint of a score head wants
        that."""
        values = array("f", pooled)
        if len(values) == 2:  # logits of no and yes
            return _sigmoid(values[1] - values[0])
        return _sigmoid(values[0]) if self._sigmoid else values[0]


def _sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value)) if value >= 0 else math.exp(value) / (1.0 + math.exp(value))


def _has_identity(config: Mapping[str, Any]) -> bool:
    settings = config.get("sentence_transformers")
    named = settings.get("activation_fn") if isinstance(settings, dict) else None
    return str(named or config.get("sbert_ce_default_activation_function") or "").endswith("Identity")


def _judging(
    config: Mapping[str, Any], directory: Path, name: str, tokenizer: Tokenizer
) -> tuple[tuple[int, ...], str]:
    """Return the tokens of no and yes, or the reason why the model cannot be asked."""
    words = config.get("classifier_from_token")
    if not (isinstance(words, list) and len(words) == 2 and all(isinstance(word, str) for word in words)):
        if "rerank" not in name.lower() and "rerank" not in directory.name.lower():
            return (), (
                "it has no score head (score.weight), and neither its name nor "
                "classifier_from_token in its config.json says that it is a reranker"
            )
        words = ["no", "yes"]
    ids = [tokenizer.encode(word, add_special_tokens=False) for word in words]
    if any(len(tokens) != 1 for tokens in ids):
        return (), f"{words[0]!r} and {words[1]!r} are not one token each"
    if tokenizer.added_id("<|im_start|>") is None:
        return (), "weft asks rerankers in the form of Qwen3-Reranker, and its tokenizer has no <|im_start|>"
    return (ids[0][0], ids[1][0]), ""
