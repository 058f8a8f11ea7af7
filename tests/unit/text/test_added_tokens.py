"""Tokens that files next to tokenizer.json name have the ids that transformers gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers

from weft.errors import CheckpointError
from weft.text.tokenizer import Tokenizer
from weft.text.tokenizer_file import tokenizer_digest, tokenizer_path, tokenizer_text

TEXT = "he</s> <tool_call>x<think> <a><img><b>"
FIRST = 258
"""The next free id: 256 bytes, "he" and "</s>" are before it."""


def written(directory: Path, added: tuple[str, ...] = ("<a>",), **files: dict[str, Any]) -> Path:
    """A byte-level tokenizer with the plain tokens ``added``, and ``files`` next to it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate([*alphabet, "he", "</s>"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("h", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in added])
    backend.save(str(directory / "tokenizer.json"))
    own = {"tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast"}}
    for name, content in (own | files).items():
        content = own.get(name, {}) | content
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def of_token(text: str, **flags: bool) -> dict[str, Any]:
    return {"content": text, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False} | flags


ONLY_THERE: dict[str, dict[str, dict[str, Any]]] = {
    "added_tokens_decoder": {
        "tokenizer_config": {
            "added_tokens_decoder": {
                "260": of_token("<think>", special=False),
                "259": of_token("<tool_call>", special=True),
                "258": of_token("<a>", special=False),
            }
        }
    },
    "another_flag": {"tokenizer_config": {"added_tokens_decoder": {"258": of_token("<a>", special=True, lstrip=True)}}},
    "additional_special_tokens": {"tokenizer_config": {"additional_special_tokens": ["<tool_call>", "<think>"]}},
    "extra_special_tokens": {"tokenizer_config": {"extra_special_tokens": ["<tool_call>", "<think>"]}},
    "extra_named": {"tokenizer_config": {"extra_special_tokens": {"image_token": "<img>", "b_token": "<b>"}}},
    "named": {"tokenizer_config": {"eos_token": "</s>", "image_token": "<img>", "pad_token": "<b>"}},
    "special_tokens_map": {
        "tokenizer_config": {"eos_token": "<b>"},
        "special_tokens_map": {"eos_token": of_token("</s>"), "additional_special_tokens": ["<tool_call>", "<think>"]},
    },
    "map_is_not_read": {
        "tokenizer_config": {"added_tokens_decoder": {"258": of_token("<a>", special=False)}, "eos_token": "</s>"},
        "special_tokens_map": {"eos_token": "<b>", "additional_special_tokens": ["<think>"]},
        "added_tokens": {"<tool_call>": 259},
    },
    "added_tokens": {
        "tokenizer_config": {"additional_special_tokens": ["<think>"]},
        "added_tokens": {"<tool_call>": 259, "<think>": 260, "<a>": 258},
    },
    # llama.cpp #3635, #3583: the file names tokens of the vocabulary again, next to a new one.
    "tokens_named_again": {"added_tokens": {"</s>": 257, "he": 256, "<think>": 259}},
}


@pytest.mark.parametrize("case", ONLY_THERE)
def test_a_token_named_in_one_file_alone_has_the_id_that_transformers_gives_it(case: str, tmp_path: Path) -> None:
    directory = written(tmp_path, **ONLY_THERE[case])
    truth = transformers.AutoTokenizer.from_pretrained(directory)
    ours = Tokenizer.load(directory)
    ids = truth(TEXT, add_special_tokens=False)["input_ids"]
    assert ours.encode(TEXT, add_special_tokens=False) == ids
    assert ours.decode(ids) == truth.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, skip_special_tokens=False) == truth.decode(ids)
    assert ours.special_ids == {i for i, token in truth.added_tokens_decoder.items() if token.special}
    assert ours.special_tokens == truth.special_tokens_map
    assert ours.end_id == truth.eos_token_id
    plain = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert plain.encode(TEXT).ids != ids, "negative control: tokenizer.json alone"


def test_grammars_and_digests_see_the_same_vocabulary(tmp_path: Path) -> None:
    path = tokenizer_path(written(tmp_path, tokenizer_config={"extra_special_tokens": ["<think>"]}))
    assert tokenizers.Tokenizer.from_str(tokenizer_text(path)).token_to_id("<think>") == FIRST + 1
    with_token = tokenizer_digest(path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert tokenizer_digest(path) != with_token


def test_a_tokenizer_that_has_all_tokens_is_its_file_to_the_letter(tmp_path: Path) -> None:
    path = tokenizer_path(written(tmp_path, tokenizer_config={"added_tokens_decoder": {"258": of_token("<a>")}}))
    assert tokenizer_text(path) == path.read_text()


@pytest.mark.parametrize(
    ("files", "where"),
    [
        ({"tokenizer_config": {"added_tokens_decoder": {"300": of_token("<think>")}}}, "tokenizer_config.json"),
        ({"added_tokens": {"<think>": 300}}, "added_tokens.json"),
    ],
)
def test_a_stated_id_that_the_vocabulary_cannot_give_is_refused(
    files: dict[str, Any], where: str, tmp_path: Path
) -> None:
    """transformers gives the token the next free id without a word; the model was trained with the other."""
    directory = written(tmp_path, **files)
    assert transformers.AutoTokenizer.from_pretrained(directory).convert_tokens_to_ids("<think>") == FIRST + 1
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(directory)
    assert str(directory / where) in caught.value.message
    assert "'<think>' is token 300; with tokenizer.json it is token 259" in caught.value.message
    assert "\n" not in caught.value.message


def test_markers_that_would_be_cut_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="split_special_tokens is true"):
        Tokenizer.load(written(tmp_path, tokenizer_config={"split_special_tokens": True}))


@pytest.mark.parametrize("content", ["[]", '{"model": 3}', '{"model": {"vocab": {"a": 0}}, "added_tokens": [3]}'])
def test_a_file_that_is_no_tokenizer_is_refused_by_its_name(content: str, tmp_path: Path) -> None:
    directory = written(tmp_path, tokenizer_config={"extra_special_tokens": ["<think>"]})
    (directory / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        Tokenizer.load(directory)
