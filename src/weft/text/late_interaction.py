"""Settings of a checkpoint that gives a vector for each token and scores pairs by max-sim (ColBERT).

    config_sentence_transformers.json   of PyLate: query_prefix, query_length, do_query_expansion, skiplist_words, ...
    sentence_bert_config.json           of sentence-transformers: query_length, document_length, query_expansion
    N_MultiVectorMask/config.json       of sentence-transformers: skiplist_words, skiplist_tasks

    query      [ prefix  tokens            expansions ]     filled up to ``expanded_to`` tokens
    document   [ prefix  tokens ]                           without vectors of ``skipped`` tokens
    score      sum over vectors of the query of the largest product with a vector of the document

Sources: PyLate 1.6 (``models/colbert.py``); sentence-transformers 6.2 (``multi_vector_encoder``).
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from weft.errors import CheckpointError
from weft.text.tokenizer import Tokenizer

Role = Literal["query", "document"]
ROLES: tuple[Role, ...] = ("query", "document")
_SAVED_BY_PYLATE = "ColBERT"
_MASK = "MultiVectorMask"
_LENGTHS: Mapping[Role, int] = {"query": 32, "document": 180}
"""PyLate's default lengths in tokens."""


@dataclass(frozen=True, slots=True)
class LateInteraction:
    """``lengths``: most tokens of a text by role, 0 for any. ``expanded_to``: tokens of a query with its expansions, 0
    without them; ``expansion``: their token, the mask token if "". ``attends``: whether attention sees their keys.
    ``skipped``: tokens whose vectors are left out, in the roles ``skips_in``."""

    prefixes: Mapping[str, str]
    lengths: Mapping[Role, int]
    expanded_to: int
    expansion: str
    attends: bool
    skipped: tuple[str, ...]
    skips_in: tuple[str, ...]

    def expansion_of(self, tokenizer: Tokenizer) -> int:
        """Return the token of expansions. Raise CheckpointError for a tokenizer that has none."""
        names = (self.expansion,) if self.expansion else map(tokenizer.special_tokens.get, ("mask_token", "eos_token"))
        for name in names:
            token = None if name is None else tokenizer.known_id(name)
            if token is not None:
                return token
        raise CheckpointError(
            f"queries are expanded by {self.expansion or 'mask_token or eos_token'!r}, which the tokenizer lacks",
            param="model",
        )

    def skipped_of(self, tokenizer: Tokenizer) -> frozenset[int]:
        ids = map(tokenizer.known_id, self.skipped)
        return frozenset(token for token in ids if token is not None)


def read_late_interaction(
    kinds: list[str], settings: Mapping[str, Any], transformer: Mapping[str, Any], mask: Mapping[str, Any]
) -> LateInteraction | None:
    """Return the settings, None for a checkpoint that pools. ``kinds``: its modules; ``settings``, ``transformer``,
    ``mask``: its three files, empty where one is missing. Raise CheckpointError for a setting that is not served."""
    by_pylate = settings.get("model_type") == _SAVED_BY_PYLATE
    if not by_pylate and _MASK not in kinds:
        return None
    if mask.get("keep_only_token_ids"):
        raise CheckpointError("keep_only_token_ids selects vectors of pictures, which are not served", param="model")

    def of(name: str, default: Any) -> Any:
        value = transformer.get(name, settings.get(name))
        return default if value is None else value

    lengths = {role: _count(f"{role}_length", of(f"{role}_length", _LENGTHS[role] * by_pylate)) for role in ROLES}
    expands = by_pylate and settings.get("do_query_expansion") is not False
    old = {"attend": settings.get("attend_to_expansion_tokens"), "length": lengths["query"], "strategy": "fixed"}
    expansion = of("query_expansion", old if expands else {})
    if not isinstance(expansion, dict):
        raise CheckpointError(f"query_expansion is {expansion!r:.100}; it must be an object or null", param="model")
    expanded_to = _count("query_expansion.length", expansion.get("length", 0))
    if expansion.get("strategy") == "fixed":
        lengths["query"] = expanded_to
    saved = settings.get("prompts")
    prompts = saved if isinstance(saved, dict) else {}
    skipped = mask.get("skiplist_words", settings.get("skiplist_words"))
    return LateInteraction(
        {role: _prefix(role, settings, prompts, by_pylate) for role in ROLES},
        lengths,
        expanded_to,
        str(expansion.get("token") or ""),
        bool(expansion.get("attend")),
        tuple(map(str, (string.punctuation if by_pylate else ()) if skipped is None else skipped)),
        tuple(mask.get("skiplist_tasks") or ("document",)),
    )


def _prefix(role: Role, settings: Mapping[str, Any], prompts: Mapping[str, Any], by_pylate: bool) -> str:
    inserted = settings.get(f"{role}_prefix")
    if inserted is None:
        inserted = {"query": "[Q] ", "document": "[D] "}[role] if by_pylate else ""
    return str(inserted) + str(prompts.get(role) or "").removeprefix(str(inserted))


def _count(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise CheckpointError(f"{name} is {value!r:.100}; it must be a whole number of tokens", param="model")
    return value
