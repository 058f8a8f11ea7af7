"""GGUF files as they lie on disk: what is refused, and which view a name leads to."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.fixtures.checkpoints import checkpoint
from tests.support import gguf_files
from tests.support.gguf_files import bytes_of, tensor_entry, text, text_key, write_gguf
from weft.errors import CheckpointError, UnknownArchitectureError
from weft.models.gguf.header import Header, read_header
from weft.models.gguf.vocabulary import generation_config
from weft.models.hub import resolve_model

HUGE = 2**63
ARRAY, STRING, UINT32 = 9, 8, 4


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def array_key(name: str, kind: int, count: int, content: bytes = b"") -> bytes:
    return text(name) + struct.pack("<IIQ", ARRAY, kind, count) + content


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "begins with"),
    "magic": (b"GGML" + bytes(60), "begins with b'GGML'"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
    "version 1": (bytes_of([], [], version=1), "version 1, written by an old converter"),
    "byte order": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "in the other byte order"),
    "short": (b"GGUF\x03\0\0\0\0", "truncated at 9 bytes"),
    "keys claimed": (bytes_of([], [], counts=(0, HUGE)), f"claims {HUGE} keys"),
    "tensors claimed": (bytes_of([], [], counts=(HUGE, 0)), f"claims {HUGE} tensors"),
    "name too long": (bytes_of([struct.pack("<Q", HUGE) + bytes(40)], []), "within the name of a key"),
    "text too long": (
        bytes_of([text("general.name") + struct.pack("<IQ", STRING, HUGE) + bytes(40)], []),
        "within the key general.name",
    ),
    "array too long": (bytes_of([array_key("a", UINT32, HUGE, bytes(64))], []), f"the key a claims {HUGE} values"),
    "texts too many": (bytes_of([array_key("a", STRING, HUGE, bytes(64))], []), f"the key a claims {HUGE} values"),
    "text in array too long": (bytes_of([array_key("a", STRING, 1, struct.pack("<Q", HUGE))], []), "within the key a"),
    "arrays in arrays": (bytes_of([array_key("a", ARRAY, 1, struct.pack("<IQ", ARRAY, 1) * 8)], []), "levels"),
    "value type": (bytes_of([text("a") + struct.pack("<I", 77) + bytes(40)], []), "of type 77"),
    "name": (bytes_of([struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<IB", 0, 1)], []), "not UTF-8"),
    "key twice": (bytes_of([text_key("a", "b")] * 2, []), "the key a twice"),
    "alignment": (bytes_of([text("general.alignment") + struct.pack("<II", UINT32, 33)], []), "power of 2"),
    "dims": (bytes_of([], [tensor_entry("t", (1,) * 5, 0, 0)]), "5 dims"),
    "shape": (bytes_of([], [tensor_entry("t", (HUGE - 1, HUGE - 1), 0, 0)]), "which the file cannot hold"),
    "tensor type": (bytes_of([], [tensor_entry("t", (4,), 99, 0)], bytes(64)), "type 99"),
    "blocks": (bytes_of([], [tensor_entry("t", (2, 48), 8, 0)], bytes(256)), "blocks of 32 columns"),
    "offset": (bytes_of([], [tensor_entry("t", (4,), 0, 7)], bytes(64)), "not a multiple of 32"),
    "truncated": (bytes_of([], [tensor_entry("t", (64,), 0, 0)], bytes(128)), "truncated: t ends at byte"),
    "overlap": (
        bytes_of([], [tensor_entry("t", (64,), 0, 0), tensor_entry("u", (8,), 0, 32)], bytes(512)),
        "t and u overlap",
    ),
    "tensor twice": (bytes_of([], [tensor_entry("t", (8,), 0, 0)] * 2, bytes(64)), "tensor t twice"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_in_one_line_that_names_it(name: str, tmp_path: Path) -> None:
    content, reason = BROKEN[name]
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(CheckpointError) as refused:
        read_header(file)
    assert reason in refused.value.message
    assert str(file) in refused.value.message
    assert "\n" not in refused.value.message


def test_the_header_is_that_of_the_library(tmp_path: Path) -> None:
    file = write_gguf(checkpoint("lfm2"), tmp_path / "model.gguf")
    ours, theirs = read_header(file), gguf.GGUFReader(file)
    assert set(ours.keys) == {key for key in theirs.fields if not key.startswith("GGUF.")}
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            value = ours.keys[key]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents()
    assert {(one.name, one.type, one.shape, one.stored_bytes, one.begin) for one in ours.tensors.values()} == {
        (one.name, one.tensor_type.name, tuple(int(x) for x in one.shape[::-1]), one.n_bytes, one.data_offset)
        for one in theirs.tensors
    }


def test_a_file_cut_at_any_place_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(checkpoint("lfm2"), tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 400, 7), *range(400, len(whole), len(whole) // 40)]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            resolve_model(cut)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("general.architecture", "gpt-j", "general.architecture is 'gpt-j'; of GGUF files weft serves lfm2"),
        ("tokenizer.ggml.model", "bert", "tokenizer.ggml.model is 'bert'; weft reads gpt2, llama"),
        ("tokenizer.ggml.pre", "klingon", "tokenizer.ggml.pre is 'klingon'; the pre-tokenizers that weft knows are"),
    ],
)
def test_what_is_not_served_is_named(key: str, value: str, reason: str, tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0][key].value = value

    file = write_gguf(checkpoint("lfm2"), tmp_path / "model.gguf", change=change)
    with pytest.raises((CheckpointError, UnknownArchitectureError)) as refused:
        resolve_model(file)
    assert f"{file}: {reason}" in refused.value.message


def test_a_shape_that_contradicts_the_keys_is_named(tmp_path: Path) -> None:
    from weft.models.loading import load_model

    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["lfm2.feed_forward_length"].value = 99

    directory = resolve_model(write_gguf(checkpoint("lfm2"), tmp_path / "model.gguf", change=change))
    with pytest.raises(
        CheckpointError,
        match=r"feed_forward.w1.weight has shape \[96, 64\]; config.json makes it "
        r"\[99, 64\]",
    ):
        load_model(directory)


def test_a_directory_with_one_model_leads_to_it_and_with_two_names_them(tmp_path: Path) -> None:
    first = write_gguf(checkpoint("lfm2"), tmp_path / "a.gguf")
    (tmp_path / "mmproj-a.gguf").write_bytes(b"GGUF")
    assert resolve_model(tmp_path) == resolve_model(first)
    (tmp_path / "b.gguf").write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match=r"name one of a\.gguf, b\.gguf"):
        resolve_model(tmp_path)


def test_a_file_that_changes_has_another_view(tmp_path: Path) -> None:
    file = write_gguf(checkpoint("lfm2"), tmp_path / "a.gguf")
    before = resolve_model(file)
    assert resolve_model(file) == before
    write_gguf(checkpoint("qwen3"), file)
    after = resolve_model(file)
    assert after != before
    assert json.loads((after / "config.json").read_text())["model_type"] == "qwen3"


def test_a_split_model_is_read_from_any_part_and_needs_all(tmp_path: Path) -> None:
    whole = write_gguf(checkpoint("lfm2"), tmp_path / "whole.gguf")
    parts = gguf_files.split(whole, 3)
    headers = [read_header(part) for part in parts]
    assert [sorted(header.tensors) for header in headers] == [sorted(read_header(whole).tensors)] * 3
    assert resolve_model(parts[0]) == resolve_model(parts[2])
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"whole-00002-of-00003\.gguf: the file is missing"):
        resolve_model(parts[0])


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(checkpoint("lfm2"), tmp_path / "a.gguf")
    (tmp_path / "taken").write_text("no directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    with pytest.raises(CheckpointError, match="XDG_CACHE_HOME"):
        resolve_model(file)


def test_views_of_files_that_are_gone_go_and_so_do_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.models.gguf.view._VIEWS_MAX", 2)
    files = [write_gguf(checkpoint("lfm2"), tmp_path / f"{name}.gguf") for name in "abcd"]
    first, second = resolve_model(files[0]), resolve_model(files[1])
    os.utime(first, (1, 1))
    os.utime(second, (2, 2))
    assert resolve_model(files[0]) == first, "which makes it newer than the second"
    third = resolve_model(files[2])
    assert (first.is_dir(), second.is_dir(), third.is_dir()) == (True, False, True)
    files[0].unlink()
    fourth = resolve_model(files[3])
    assert (first.is_dir(), third.is_dir(), fourth.is_dir()) == (False, True, True)


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        (("<|end|>", "<|endoftext|>"), ("<|end|>", "<|endoftext|>")),
        (("<|end|>", "<|return|>", "<|call|>"), ("<|return|>", "<|call|>")),
        (("<|end|>", "<|flush|>", "<|calls|>"), ("<|flush|>", "<|calls|>")),
        (("<turn|>", "<|tool_response>", "</s>"), ("<turn|>", "<|tool_response>")),
    ],
)
def test_an_answer_of_several_messages_does_not_end_with_the_first(
    texts: tuple[str, ...], ends: tuple[str, ...]
) -> None:
    """Files of gpt-oss and Solar Open name one end of several, and converters gave some ends the type of plain text."""
    for kind in (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED, gguf.TokenType.NORMAL):
        keys = {"tokenizer.ggml.tokens": list(texts), "tokenizer.ggml.token_type": np.full(len(texts), kind)}
        ids = generation_config(Header(Path("model.gguf"), keys, {}))["eos_token_id"]
        assert [texts[index] for index in ids] == list(ends)
    unused = keys | {"tokenizer.ggml.token_type": np.full(len(texts), gguf.TokenType.UNUSED)}
    assert generation_config(Header(Path("model.gguf"), unused, {}))["eos_token_id"] == []
    stated = keys | {"tokenizer.ggml.eos_token_id": 0}
    assert generation_config(Header(Path("model.gguf"), stated, {}))["eos_token_id"][0] == 0
