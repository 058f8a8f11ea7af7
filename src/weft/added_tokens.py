"""Tokens that the files next to tokenizer.json add to it, as transformers adds them.

    tokenizer_config.json     added_tokens_decoder {"151665": {"content": "<tool_call>", ...}}
                              extra_special_tokens (before: additional_special_tokens), eos_token, image_token, ...
    special_tokens_map.json   the same names, over those above     } of checkpoints without an
    added_tokens.json         {"<tool_call>": 151665}              } added_tokens_decoder

Fine-tunes often add a token in only one of these files. A tokenizer.json without it cuts the token into pieces, and the
model was trained with one id. So the content of tokenizer.json is completed before anything reads it: encoding,
grammars and digests have one vocabulary.

A token gets the id that its text has in the vocabulary, or the next free one. Another id stated by a file cannot be
served: transformers silently takes the free one.

tokenizer_config.json may also say that the expression which cuts text is an old, wrong one (``fix_mistral_regex``).
Then the right one replaces it.

Source: ``TokenizersBackend`` and ``from_pretrained`` of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.errors import CheckpointError
from weft.files import read_json
from weft.pre_tokenizers import BYTE_LEVEL, TEKKEN, split

_FIRST_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_MISTRALS = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
_MISTRAL_VOCAB, _MISTRAL_VERSION = 100_000, 5
"""Smallest size of a vocabulary, and last version of transformers that saved it, whose expression transformers
corrects."""
Entry = dict[str, Any]
"""An entry of tokenizer.json's ``added_tokens``, without its id."""


@dataclass(frozen=True, slots=True)
class NextTo:
    """Tokens stated by the files next to tokenizer.json. ``named``: texts of eos_token, image_token, ... ``stated``:
    tokens with the ids in ``source``. ``special``: tokens that must be special, in the order in which they are
    added."""

    named: dict[str, str] = field(default_factory=dict)
    stated: dict[int, Entry] = field(default_factory=dict)
    special: tuple[Entry, ...] = ()
    source: str = ""
    is_mistral: bool = False
    """Whether ``TEKKEN`` replaces the regular expression of tokenizer.json."""


def read_next_to(directory: Path) -> NextTo:
    """Read the three files of ``directory``. Raise CheckpointError for a file that is not JSON."""
    config = _optional(directory / "tokenizer_config.json")
    if config.get("split_special_tokens"):
        raise CheckpointError(
            f"{directory / 'tokenizer_config.json'}: split_special_tokens is true: weft reads the markers of a chat "
            "template as single tokens",
            param="model",
        )
    extra: Any = next((config[key] for key in _EXTRA if config.get(key)), [])
    stated: dict[int, Entry] = {}
    source = "tokenizer_config.json"
    listed = config.get("added_tokens_decoder")
    if isinstance(listed, Mapping):
        stated = {
            int(index): entry for index, token in listed.items() if index.isdecimal() and (entry := _entry(token))
        }
    else:
        of_map = _optional(directory / "special_tokens_map.json")
        extra = next((of_map[key] for key in _EXTRA if of_map.get(key)), extra)
        config = config | of_map
        source = "added_tokens.json"
    # A dict has names for its tokens: {"image_token": "<image>"}.
    own = config.get("model_specific_special_tokens")
    for names in (own, extra):
        config = config | (dict(names) if isinstance(names, Mapping) else {})
    named = dict.fromkeys(_FIRST_NAMES) | config
    values = {key: value for key, value in named.items() if key.endswith("_token")}
    tokens = {key: entry for key, value in values.items() if (entry := _entry(value, special=True))}
    unnamed = extra if isinstance(extra, list) else []
    special = [*tokens.values(), *(entry for value in unnamed if (entry := _entry(value, special=True)))]
    if not isinstance(listed, Mapping):
        marked = {entry["content"] for entry in special}
        stated = {
            _id_in(directory / source, text, index): with_flags(text, special=text in marked)
            for text, index in _optional(directory / source).items()
        }
    by_text = {entry["content"]: entry for entry in stated.values()}
    return NextTo(
        {key: entry["content"] for key, entry in tokens.items()},
        stated,
        tuple(by_text.get(entry["content"], entry) | {"special": True} for entry in special),
        source,
        config.get("fix_mistral_regex") is True and _has_old_mistral(directory),
    )


def _has_old_mistral(directory: Path) -> bool:
    config = _optional(directory / "config.json")
    major = str(config.get("transformers_version")).partition(".")[0]
    return not (major.isdecimal() and int(major) >= _MISTRAL_VERSION) and config.get("model_type") in (*_MISTRALS, None)


def _id_in(path: Path, text: str, index: Any) -> int:
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise CheckpointError(f"{path}: {text!r} is {index!r:.40}; it must be the token's number", param="model")
    return index


def completed(content: Any, beside: NextTo, path: Path) -> dict[str, Any] | None:
    """Return the content of tokenizer.json with the tokens of ``beside`` added; None if no token is missing, and for
    content that is not a tokenizer. Raise CheckpointError if a token would get another id than the stated one."""
    try:
        vocab, added = content["model"]["vocab"], content.get("added_tokens") or []
        own = {piece[0]: index for index, piece in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)
        ids = {str(entry["content"]): int(entry["id"]) for entry in added}
        entries = {
            str(entry["content"]): with_flags(str(entry["content"]), **{"special": False} | _known(entry))
            for entry in added
        }
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None
    before, cuts = dict(entries), content.get("pre_tokenizer")
    if beside.is_mistral and len(own) + len(ids) > _MISTRAL_VOCAB:
        cuts = _cut_by_tekken(cuts)
    for index, entry in sorted(beside.stated.items()):
        text = entry["content"]
        if text not in ids and own.get(text, free := _next_id(ids, len(own))) != index:
            raise CheckpointError(
                f"{path.parent / beside.source}: {text!r} is token {index}; with {path.name} it is token "
                f"{own.get(text, free)}. Load the tokenizer with transformers' AutoTokenizer, check its ids, and "
                "save_pretrained() it there",
                param="model",
            )
        ids.setdefault(text, index)
        entries[text] = entry
    for entry in beside.special:
        text = entry["content"]
        ids.setdefault(text, own[text] if text in own else _next_id(ids, len(own)))
        entries[text] = entry
    if entries == before and cuts == content.get("pre_tokenizer"):
        return None
    whole = [{"id": ids[text], **entry} for text, entry in entries.items()]
    return {**content, "pre_tokenizer": cuts, "added_tokens": sorted(whole, key=lambda entry: entry["id"])}


def _cut_by_tekken(cuts: Any) -> Any:
    """Return the pre-tokenizer with ``TEKKEN`` in front, replacing the first part of a sequence."""
    if not isinstance(cuts, Mapping):
        return cuts
    if cuts.get("type") == "Sequence":
        return {**cuts, "pretokenizers": [split(TEKKEN), *cuts["pretokenizers"][1:]]}
    if cuts.get("type") == "Metaspace":
        cuts = BYTE_LEVEL | {"use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split(TEKKEN), cuts]}


def _next_id(ids: Mapping[str, int], vocab_size: int) -> int:
    """Return the id of the next new token, by the rule of the ``tokenizers`` library."""
    return max([vocab_size, *(index + 1 for index in ids.values())])


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _entry(value: Any, *, special: bool = False) -> Entry | None:
    """Return the entry of a token that a file writes as text, or as an object with ``content`` and flags; None for any
    other value."""
    if isinstance(value, str) and value:
        return with_flags(value, special=special)
    if isinstance(value, Mapping) and isinstance(value.get("content"), str) and value["content"]:
        return with_flags(value["content"], **{"special": special} | _known(value))
    return None


def _known(entry: Mapping[str, Any]) -> Entry:
    return {key: entry[key] for key in _FLAGS if key in entry}


def with_flags(content: str, special: bool, **flags: bool) -> Entry:
    """Return an entry with all flags; ``flags`` are those that differ from transformers' defaults."""
    unset = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": not special, "special": special}
    return {"content": content} | unset | flags
