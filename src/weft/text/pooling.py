"""Embeddings, scores and labels: the settings of a checkpoint, prompts, and values from pooled rows.

    modules.json, 1_Pooling/config.json, config_sentence_transformers.json      of sentence-transformers
    config.json: sentence_transformers, classifier_from_token, problem_type, id2label

    text              --embedding--> PooledPrompt --engine--> float32 bytes --vector---------> [float, ...]
    text              --embedding--> PooledPrompt --engine--> float32 bytes --token_vectors--> [[float, ...], ...]
    text              --labelling--> PooledPrompt --engine--> float32 bytes --probabilities--> [[float, ...], ...]
    (query, document) --scoring----> PooledPrompt --engine--> float32 bytes --score----------> one float

A checkpoint without these files is pooled at its last token and normalised. Scores come in three ways. A model with a
score head reads the pair as its tokenizer joins pairs. A generative reranker reads a prompt that asks whether the
document answers the query; the score compares the logits of "yes" and "no". A model of late interaction reads query and
document for themselves; the score is their max-sim.

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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from weft.errors import CheckpointError, ContextLengthError, RequestError
from weft.files import parse_json, read_json, read_text
from weft.request import Pooling
from weft.text.control_tokens import NO_CONTROL, ControlTokens
from weft.text.labels import STEP_TAG, read_labels, sigmoid
from weft.text.late_interaction import LateInteraction, Role, read_late_interaction
from weft.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from weft.text.dense import DenseModule

Kind = Literal["first", "last", "mean", "token"]
_BYTES_MAX = 1 << 20
_SERVED_MODULES = ("Transformer", "Pooling", "Dense", "Normalize", "MultiVectorMask")
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
    late: LateInteraction | None = None
    """Settings of a checkpoint that gives a vector for each token, and not one for a text."""


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """A prompt to be pooled. ``truncated``: tokens that were left out, because the request allows it. ``positions``:
    of the tokens whose vectors count, None for all."""

    tokens: list[int]
    pooling: Pooling
    boundaries: list[int]
    truncated: int = 0
    positions: list[int] | None = None


@dataclass(frozen=True, slots=True)
class PairPrompts:
    """Inputs that score pairs. ``inputs``: arguments of ``Pooler.scoring``, each with the place of its pair in the
    request; ``parts_of``: for each pair the inputs whose rows make its score."""

    inputs: list[tuple[str | None, str | None, int]]
    parts_of: list[tuple[int, ...]]


def is_embedder(directory: Path) -> bool:
    """Return whether the checkpoint was saved to embed. Its language-model head, if any, was then not trained."""
    return (directory / "modules.json").is_file()


def read_embedding_settings(directory: Path) -> EmbeddingSettings:
    """Return the checkpoint's settings of embeddings. Raise CheckpointError for a file that is not JSON of the expected
    form, and for settings of late interaction that are not served."""
    if not is_embedder(directory):
        return EmbeddingSettings()
    modules = _read_modules(directory)
    kinds = [kind for kind, _ in modules]
    refusal = ""
    others = [kind for kind in kinds if kind not in _SERVED_MODULES]
    if others:
        refusal = f"its modules.json has {others[0]}, which weft does not compute"
    kind: Kind = "last"
    includes_prompt = True
    for name, inside in modules:
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
    saved = _optional(directory / "config_sentence_transformers.json")
    transformer = _optional(directory / "sentence_bert_config.json")
    mask = next((_optional(inside / "config.json") for name, inside in modules if name == "MultiVectorMask"), {})
    late = read_late_interaction(kinds, saved, transformer, mask)
    if late is None and "Pooling" not in kinds:
        refusal = refusal or "its modules.json has no Pooling"
    pooled_at = kinds[1:2] if late is None else ["Pooling"]
    ends = kinds.index("Normalize") + 1 if "Normalize" in kinds else len(kinds)
    if pooled_at != ["Pooling"] or not {"MultiVectorMask"}.issuperset(kinds[ends:]):
        refusal = refusal or f"its modules.json has {', '.join(kinds)} in this order, which weft does not compute"
    prompts, default = _prompts(saved)
    limit = transformer.get("max_seq_length")
    return EmbeddingSettings(
        kind=kind if late is None else "token",
        normalize="Normalize" in kinds or (late is not None and "MultiVectorMask" not in kinds),
        includes_prompt=includes_prompt,
        prompts=prompts if late is None else {**prompts, **late.prefixes},
        default_prompt=default if late is None else "document",
        tokens_max=limit if isinstance(limit, int) and limit > 0 else 0,
        refusal=refusal,
        dense=tuple(inside for name, inside in modules if name == "Dense"),
        late=late,
    )


def _read_modules(directory: Path) -> list[tuple[str, Path]]:
    """Return kind and directory of each module."""
    path = directory / "modules.json"
    modules = parse_json(read_text(path, bytes_max=_BYTES_MAX), str(path))
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"{path}: expected a list of modules", param="model")
    kinds = []
    for module in modules:
        name = str(module.get("type", "")).rpartition(".")[2]
        inside = directory / str(module.get("path", ""))
        if ".." in inside.parts or not inside.resolve().is_relative_to(directory.resolve()):
            raise CheckpointError(f"{path}: the path of its {name} leads elsewhere", param="model")
        kinds.append((name, inside))
    return kinds


def _modes(settings: Mapping[str, Any]) -> list[str]:
    named = settings.get("pooling_mode")
    if isinstance(named, str):
        return [named]
    if isinstance(named, list):
        return [str(named_mode) for named_mode in named]
    return [mode for key, mode in _MODE_KEYS.items() if settings.get(key) is True]


def _prompts(settings: Mapping[str, Any]) -> tuple[dict[str, str], str | None]:
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
    """Prompts and values of one model's embeddings, scores and labels. ``score_labels``: rows of the score head, 0
    without one. ``causal``: whether a token sees no later ones. ``control``: control tokens that texts of requests can
    only spell."""

    def __init__(
        self,
        directory: Path,
        tokenizer: Tokenizer,
        *,
        name: str,
        score_labels: int,
        causal: bool = True,
        control: ControlTokens | None = None,
    ) -> None:
        self._control = control or ControlTokens(NO_CONTROL)
        self.settings = read_embedding_settings(directory)
        self._dense = _read_all_dense(self.settings)
        self._tokenizer = tokenizer
        self._name = name
        config = _optional(directory / "config.json")
        self.labels = read_labels(config, score_labels) if score_labels else None
        self._sigmoid = not _has_identity(config)
        self._tokens: tuple[int, ...] = ()
        self._score_refusal = ""
        self._expansion, self._skipped = 0, frozenset[int]()
        if self.settings.late is not None:
            self._expansion, self._skipped = _late_tokens(self.settings.late, tokenizer, directory, causal=causal)
        elif not score_labels:
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
        per_token: bool = False,
    ) -> PooledPrompt:
        """Return the prompt of an embedding. ``limit``: the served context. ``prompt``: a text before the input;
        ``prompt_name``: the name of such a text in the checkpoint. ``truncate_to``: cut a longer input at its end;
        None: a longer input is an error. ``per_token``: embed each token. Raise RequestError, ContextLengthError."""
        settings, late = self.settings, self.settings.late
        refusal = settings.refusal
        if late is not None and not per_token:
            refusal = "it gives a vector for each token; ask /pooling or /v1/rerank"
        if refusal:
            raise RequestError(f"{self._name} cannot embed: {refusal}", param="model", code="unsupported_parameter")
        before = self._instruction(prompt, prompt_name)
        role: Role = "query" if prompt_name == "query" else "document"
        longest = settings.tokens_max if late is None else late.lengths[role]
        bound = min(limit, longest or limit)
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
        why = "sentence_bert_config.json: max_seq_length" if late is None else f"{role}_length of the checkpoint"
        tokens, left_out = _bounded(
            tokens, tail, bound, truncate_to, param, why if bound < limit else "--max-model-len"
        )
        if per_token:
            return replace(self._of_tokens(tokens, role), truncated=left_out)
        skip = front if settings.kind == "mean" and not settings.includes_prompt else 0
        pooling = Pooling(kind=settings.kind, skip=min(skip, len(tokens) - 1))
        return PooledPrompt(tokens, pooling, [front] if front else [], left_out)

    def _of_tokens(self, tokens: list[int], role: Role) -> PooledPrompt:
        """Return the prompt of the vectors of ``tokens``: of a query with its expansions, if it has some."""
        late, positions = self.settings.late, None
        if late is None:
            return PooledPrompt(tokens, Pooling(kind="token"), [])
        if role in late.skips_in and self._skipped:
            positions = [place for place, token in enumerate(tokens) if token not in self._skipped]
        added = max(0, late.expanded_to - len(tokens)) if role == "query" else 0
        if positions is not None:
            positions += range(len(tokens), len(tokens) + added)
        pooling = Pooling(kind="token", unseen=0 if late.attends else added)
        return PooledPrompt(tokens + [self._expansion] * added, pooling, [], positions=positions)

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

    def vector(self, pooled: bytes, dimensions: int | None = None, *, raw: bool = False) -> array[float]:
        """Return the embedding in ``pooled``, float32. ``dimensions``: keep only the first of its numbers (Matryoshka),
        and normalise again; ``raw``: do not normalise. Raise RequestError."""
        values = array("f", pooled)
        if self._dense:
            from weft.text.dense import token_vectors

            [row] = token_vectors(pooled, 1, None, self._dense, None, normalize=False)
            values = array("f", row.tobytes())
        if dimensions is not None:
            self.check_dimensions(dimensions, len(values))
            values = values[:dimensions]
        if self.settings.normalize and not raw:
            length = math.sqrt(math.fsum(value * value for value in values))
            values = array("f", [value / length for value in values]) if length > 0 else values
        return values

    def check_dimensions(self, dimensions: int, width: int) -> None:
        """Raise RequestError for ``dimensions`` that vectors of ``width`` numbers do not have."""
        if not 1 <= dimensions <= width:
            raise RequestError(f"dimensions is {dimensions}; this model's embeddings have {width}", param="dimensions")

    def token_vectors(
        self, pooled: bytes, prompt: PooledPrompt, dimensions: int | None = None, *, raw: bool = False
    ) -> npt.NDArray[np.float32]:
        """Return the vectors of the tokens of ``prompt`` that count, float32 [tokens, width]; ``raw``: not
        normalised."""
        from weft.text.dense import token_vectors

        return token_vectors(
            pooled,
            len(prompt.tokens),
            prompt.positions,
            self._dense,
            dimensions,
            normalize=self.settings.normalize and not raw,
        )

    # ------------------------------------------------------------------ labels

    def labelling(
        self,
        text_or_ids: str | Sequence[int],
        *,
        limit: int,
        truncate_to: int | None = None,
        param: str = "input",
        per_token: bool = False,
    ) -> PooledPrompt:
        """Return the prompt that the score head reads at its last token, or with ``per_token`` at each, of a model that
        rewards steps at their tags. Raise RequestError, ContextLengthError."""
        if self.labels is None:
            raise RequestError(
                f"{self._name} cannot classify: it has no score head (score.weight)",
                param="model",
                code="unsupported_parameter",
            )
        tokens, tail = list(text_or_ids) if not isinstance(text_or_ids, str) else [], 0
        if isinstance(text_or_ids, str):
            text, quoted = self._written((text_or_ids, True))
            tokens = self._tokenizer.encode(text, quoted=quoted)
            tail = self._special_tail(tokens)
        tokens, left_out = _bounded(tokens, tail, limit, truncate_to, param, "--max-model-len")
        pooling = Pooling(kind="token" if per_token else "last", score=True)
        positions = None
        if per_token and self.labels.of_steps:
            tag = self._tokenizer.known_id(STEP_TAG)
            positions = [position for position, token in enumerate(tokens) if token == tag]
            if not positions:
                raise RequestError(f"{param} has no {STEP_TAG}: this model rewards steps that end with it", param=param)
        return PooledPrompt(tokens, pooling, [], left_out, positions)

    def probabilities(self, pooled: bytes, prompt: PooledPrompt, *, raw: bool = False) -> list[list[float]]:
        """Return the probabilities of the labels in ``pooled``, by row of ``prompt`` that counts; ``raw``: the
        logits."""
        assert self.labels is not None, "a model without a score head was asked for labels"
        rows = self.labels.probabilities(pooled, raw=raw)
        return rows if prompt.positions is None else [rows[position] for position in prompt.positions]

    # ------------------------------------------------------------------ scores

    def pairs(self, pairs: Sequence[tuple[str, str]]) -> PairPrompts:
        """Return the inputs that score ``pairs`` of query and document, each once."""
        numbers: dict[tuple[str | None, str | None], int] = {}
        inputs: list[tuple[str | None, str | None, int]] = []
        parts_of = []
        for number, (query, document) in enumerate(pairs):
            parts: list[tuple[str | None, str | None]] = [(query, document)]
            if self.settings.late is not None:
                parts = [(query, None), (None, document)]
            for part in parts:
                if part not in numbers:
                    numbers[part] = len(inputs)
                    inputs.append((*part, number))
            parts_of.append(tuple(numbers[part] for part in parts))
        return PairPrompts(inputs, parts_of)

    def scoring(
        self,
        query: str | None,
        document: str | None,
        *,
        limit: int,
        instruction: str | None = None,
        truncate_to: int | None = None,
        param: str = "documents",
    ) -> PooledPrompt:
        """Return the prompt that scores ``document`` as an answer to ``query``, or that of one of them if the other is
        None (late interaction). ``instruction``: for a generative reranker. Raise RequestError, ContextLengthError."""
        if query is None or document is None:
            if instruction is not None:
                raise RequestError(
                    "instruction is for generative rerankers; this model compares vectors of query and document",
                    param="instruction",
                )
            return self.embedding(
                query if document is None else document,  # type: ignore[arg-type]  # one of them is a text
                limit=limit,
                prompt_name="query" if document is None else "document",
                truncate_to=truncate_to,
                param=param,
                per_token=True,
            )
        if self._score_refusal:
            raise RequestError(
                f"{self._name} cannot score: {self._score_refusal}", param="model", code="unsupported_parameter"
            )
        bound = limit if truncate_to is None else min(limit, truncate_to)
        if self.labels is not None:
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

    def score(self, rows: Sequence[bytes], prompts: Sequence[PooledPrompt]) -> float:
        """Return the score of a pair by the pooled ``rows`` of its ``prompts``: between 0 and 1, the logit if the
        checkpoint of a score head wants that, or the max-sim of query and document."""
        if len(rows) == 2:
            from weft.text.dense import max_sim

            query, document = map(self.token_vectors, rows, prompts)
            return max_sim(query, document)
        values = array("f", rows[0])
        if len(values) == 2:  # logits of no and yes
            return sigmoid(values[1] - values[0])
        return sigmoid(values[0]) if self._sigmoid else values[0]


def _bounded(
    tokens: list[int], tail: int, bound: int, truncate_to: int | None, param: str, why: str
) -> tuple[list[int], int]:
    """Return ``tokens``, cut before its ``tail`` special tokens if the request allows it, and the number that was cut
    off. Raise RequestError for no tokens, ContextLengthError for more than ``bound``, which ``why`` sets."""
    if not tokens:
        raise RequestError(f"{param} is empty: it needs at least one token", param=param)
    left_out = 0
    if truncate_to is not None and len(tokens) > min(bound, truncate_to):
        length = min(bound, truncate_to)
        left_out = len(tokens) - length
        ends = tokens[len(tokens) - tail :] if tail < length else []
        tokens = tokens[: length - len(ends)] + ends
    if len(tokens) > bound:
        raise ContextLengthError(
            f"{param} has {len(tokens)} tokens; the limit is {bound} ({why})",
            param=param,
            code="context_length_exceeded",
        )
    return tokens, left_out


def _late_tokens(
    late: LateInteraction, tokenizer: Tokenizer, directory: Path, *, causal: bool
) -> tuple[int, frozenset[int]]:
    """Return the token of expansions, and the tokens whose vectors are left out. Raise CheckpointError."""
    if late.expanded_to and causal and not late.attends:
        raise CheckpointError(
            f"{directory}: queries have expansions that attention does not see (attend_to_expansion_tokens false), "
            "which is served in models that are not causal",
            param="model",
        )
    return late.expansion_of(tokenizer) if late.expanded_to else 0, late.skipped_of(tokenizer)


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
