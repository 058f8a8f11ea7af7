"""Tokenizers: what is loaded, that nothing cuts a prompt, and the bytes of a token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from weft.errors import CheckpointError, RequestError
from weft.text.tokenizer import LONG_TEXT_CHARS, Tokenizer


def byte_level(directory: Path, **config: object) -> Path:
    """Every byte is a token, "he" is one more, and <s> is put in front."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate([*alphabet, "he"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("h", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["héllo"])
    start = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", start)])
    backend.enable_truncation(3)
    backend.enable_padding(length=32)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def byte_fallback(directory: Path) -> Path:
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "▁hi": 257, "▁": 258}
    model = models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    backend = tokenizers.Tokenizer(model)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.save(str(directory / "tokenizer.json"))
    return directory


def test_text_comes_back_as_it_was(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_level(tmp_path))
    text = "the crème 🏔\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path: Path) -> None:
    """Negative control: the file as it is cuts to 3 and pads."""
    byte_level(tmp_path)
    assert len(tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("x" * 40).ids) != 41
    assert len(Tokenizer.load(tmp_path).encode("x" * 40)) == 41
    assert len(Tokenizer.load(tmp_path).encode("x")) == 2


def test_a_long_text_has_the_tokens_that_the_file_says(tmp_path: Path) -> None:
    """It goes another way through the library."""
    path = byte_level(tmp_path) / "tokenizer.json"
    text = "the crème héllo </s> 🏔\n" * (LONG_TEXT_CHARS // 10)
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.no_truncation()
    backend.no_padding()
    for add_special_tokens in (True, False):
        expected = backend.encode(text, add_special_tokens=add_special_tokens).ids
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer.encode(text, add_special_tokens=add_special_tokens) == expected
        ids, positions = tokenizer.encode_with_boundaries(
            text, [0, 3, len(text)], add_special_tokens=add_special_tokens
        )
        assert ids == expected
        assert positions == [int(add_special_tokens), 2 + int(add_special_tokens), len(ids)]


def test_special_tokens_are_added_only_when_asked_for(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_level(tmp_path))
    start = tokenizer.encode("x")[0]
    assert start in tokenizer.special_ids
    assert tokenizer.encode("x")[1:] == tokenizer.encode("x", add_special_tokens=False)


def test_special_tokens_are_hidden_or_shown(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_level(tmp_path))
    ids = tokenizer.encode("a</s>")
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>a</s>"


def test_the_bytes_of_tokens_join_to_the_bytes_of_the_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_level(tmp_path))
    for text in ("the é 🏔", "héllo there", "~¡­ÿ\x00\x7f"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(tokenizer.token_bytes(token) for token in ids) == text.encode()
    half = tokenizer.encode("é", add_special_tokens=False)[0]
    assert tokenizer.token_bytes(half) == b"\xc3"
    assert tokenizer.token_text(half) == "�"


def test_every_byte_is_some_tokens_bytes(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_level(tmp_path))
    assert {tokenizer.token_bytes(token) for token in range(256)} == {bytes([byte]) for byte in range(256)}


def test_byte_fallback_pieces_are_bytes(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_fallback(tmp_path))
    assert tokenizer.token_bytes(0xE2 + 1) == b"\xe2"
    assert tokenizer.token_bytes(257) == b" hi"
    assert tokenizer.token_bytes(258) == b" "


def test_a_token_beyond_the_vocabulary_has_no_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_level(tmp_path))
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""


def test_names_of_special_tokens_come_as_text_or_object(tmp_path: Path) -> None:
    byte_level(tmp_path, bos_token="<s>", eos_token={"content": "</s>", "lstrip": False}, pad_token=None)
    assert Tokenizer.load(tmp_path).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is not JSON"):
        Tokenizer.load(tmp_path)
    byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: a JSON object is needed"):
        Tokenizer.load(tmp_path)


def test_boundaries_in_a_text_become_positions_in_its_tokens(tmp_path: Path) -> None:
    """A token counts when it ends at or before the boundary; those put in front have no characters."""
    tokenizer = Tokenizer.load(byte_level(tmp_path))
    text = "the crème 🏔 he"
    ids, positions = tokenizer.encode_with_boundaries(text, [0, 1, 2, 3, 7, 8, 100])
    assert ids == tokenizer.encode(text)
    for boundary, position in zip([1, 3, 7, 8, 100], [2, 3, 8, 9, len(ids)], strict=True):
        assert positions[[0, 1, 2, 3, 7, 8, 100].index(boundary)] == position
    plain, [whole] = tokenizer.encode_with_boundaries(text, [len(text)], add_special_tokens=False)
    assert plain == tokenizer.encode(text, add_special_tokens=False)
    assert whole == len(plain)


def test_what_is_no_text_is_refused_and_files_that_are_known_are_not_read_again(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_level(tmp_path))
    for length in (1, LONG_TEXT_CHARS):
        for encode in (
            tokenizer.encode,
            lambda text: tokenizer.encode_with_boundaries(text, [0]),
            lambda text: tokenizer.encode_pair("a", text),
        ):
            with pytest.raises(RequestError, match="surrogate"):
                encode("\udcff" * length)
    assert Tokenizer.load(tmp_path, [tokenizer]) is tokenizer
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"eos_token": "another"}))
    assert Tokenizer.load(tmp_path, [tokenizer]).special_tokens["eos_token"] == "another"
