"""A library in Rust that gives up on a text: an error of that text, and of nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from weft.errors import CheckpointError, RequestError, is_panic
from weft.text.tokenizer import PART_CHARS, Tokenizer

BACKTRACKS = r"(a|a)*b|(?:a+)+$|."
TEXT = "a" * 42 + "!"


def backtracking(directory: Path) -> Path:
    """Write a tokenizer whose regular expression takes exponential time for TEXT."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={piece: at for at, piece in enumerate(alphabet)}, merges=[]))
    split = pre_tokenizers.Split(tokenizers.Regex(BACKTRACKS), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.save(str(directory / "tokenizer.json"))
    return directory


def test_the_library_gives_up_with_an_exception_that_is_no_exception(tmp_path: Path) -> None:
    """Negative control: what the tests below are about happens in this version of the library."""
    backend = tokenizers.Tokenizer.from_file(str(backtracking(tmp_path) / "tokenizer.json"))
    with pytest.raises(BaseException) as given_up:
        backend.encode(TEXT)
    assert is_panic(given_up.value)
    assert not isinstance(given_up.value, Exception)


@pytest.mark.parametrize("text", [TEXT, "b" * PART_CHARS + TEXT], ids=["short", "long"])
def test_a_text_on_which_the_tokenizer_gives_up_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    tokenizer = Tokenizer.load(backtracking(tmp_path))
    for encode in (
        lambda: tokenizer.encode(text),
        lambda: tokenizer.encode_with_boundaries(text, [1]),
        lambda: tokenizer.encode_pair(text, "b"),
    ):
        with pytest.raises(RequestError) as refused:
            encode()
        assert f"{text[:24]!r}... ({len(text)} characters)" in refused.value.message
        assert refused.value.code == "text_not_tokenizable"
    assert tokenizer.decode(tokenizer.encode("b!")) == "b!"


def test_a_tokenizer_file_on_which_the_library_gives_up_is_an_error_of_the_checkpoint(tmp_path: Path) -> None:
    form = json.loads((backtracking(tmp_path) / "tokenizer.json").read_text())
    form["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "("}
    (tmp_path / "tokenizer.json").write_text(json.dumps(form))
    with pytest.raises(CheckpointError, match="cannot be read as a tokenizer"):
        Tokenizer.load(tmp_path)
