"""Token ids and rendered chats of a GGUF file are those of the tokenizer that it was made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.fixtures.checkpoints import checkpoint
from tests.support.gguf_files import write_gguf, write_vocabulary
from tests.unit.text.test_world_vocabulary import longest
from tests.unit.text.test_world_vocabulary import vocabulary as world_tokens
from weft.errors import CheckpointError
from weft.models.generation import read_generation_defaults
from weft.models.gguf import vocabulary
from weft.models.gguf.header import read_header
from weft.models.hub import resolve_model
from weft.pre_tokenizers import PRE_TOKENIZERS
from weft.text.chat import ChatMessage, load_chat_template
from weft.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog.", "  two spaces,\ttabs\n\nand\r\n lines  ",
    "I'VE don't we'll 'tis", "3.14 1234567 12 007", "naïve Ångström e\u0301galité", "你好，世界！ こんにちは",
    "Привет, как дела?", "🙂👩‍👩‍👧 ok", "def f(x):\n    return x ** 2  # note",
    "https://example.org/a?b=c&d=%20", "<|im_start|>user\nhi<|im_end|>\n", "a<|endoftext|>b", "कखग हिन्दी",
    "", " ", "\n", "x" * 70, "CamelCase snake_case", "说Hello你好World 中Ab文", "\u00a0nbsp\u2003em"
]  # fmt: skip
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}"
    r"\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI_K2 = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&"
    r"[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)
MARKED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_V3 = (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", MARKED)
HAN_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"
    "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
K_EXAONE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
JAIS2 = LLAMA3.removesuffix(r"|\s+(?!\S)|\s+") + (
    r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)"
    r"|\s{1,2}(?!\S)|\s{1}"
)
SEED = QWEN2.replace(r"\p{L}\p{N}]+[\r\n]*", r"\p{L}\p{N}\r\n]+")
RELEASED: dict[str, tuple[tuple[str, ...], bool]] = {
    "lfm2": ((LLAMA3,), False),
    "llama-bpe": ((LLAMA3,), False),
    "qwen2": ((QWEN2,), True),
    "deepseek-r1-qwen": ((QWEN2,), True),
    "hunyuan": ((QWEN2,), False),
    "qwen35": ((QWEN35,), True),
    "tekken": ((TEKKEN,), False),
    "gpt-4o": ((GPT_4O,), False),
    "minimax-m2": ((GPT_4O,), False),
    "tiny_aya": ((r"\d{1,3}(?=(?:\d{3})*\b)", GPT_4O), False),
    "refact": (("digits", "gpt2"), False),
    "exaone": (("digits", "gpt2"), False),
    "gpt-2": (("gpt2",), False),
    "exaone4": (("gpt2",), False),
    "kimi-k2": ((KIMI_K2,), False),
    "bailingmoe2": ((LING,), False),
    "glm4": ((LLAMA3,), False),
    "deepseek-v3": (DEEPSEEK_V3, False),
    "hunyuan-dense": (DEEPSEEK_V3, False),
    "deepseek-coder": ((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN_AND_HANGUL, "digits"), False),
    "afmoe": ((r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", ASIAN, MARKED), False),
    "seed-coder": ((SEED,), False),
    "exaone-moe": ((K_EXAONE,), False),
    "jais-2": ((JAIS2,), False),
    "minicpm5": ((r"\p{N}{1,3}", QWEN2.replace(r"|\p{N}|", r"|\p{N}+|")), False),
}
"""Pre-tokenizers as tokenizer.json of the releases has them, and whether text is composed (NFC)."""


def trained(cuts: tuple[str, ...], nfc: bool) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE())
    parts: list[Any] = [
        pre_tokenizers.Digits(individual_digits=True)
        if cut == "digits"
        else pre_tokenizers.Split(tokenizers.Regex(cut), "isolated")
        for cut in cuts
        if cut != "gpt2"
    ]
    own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex="gpt2" in cuts)
    inner.pre_tokenizer = pre_tokenizers.Sequence([*parts, own]) if parts else own
    if nfc:
        inner.normalizer = normalizers.NFC()
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(
        CORPUS * 3,
        trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=["<|startoftext|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"],
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        ),
    )
    return inner


def from_file(directory: Path, path: Path, pre: str, more: dict[str, Any] | None = None) -> Tokenizer:
    writer = gguf.GGUFWriter(path, "lfm2")
    write_vocabulary(directory, writer, 640, pre)
    for key, value in (more or {}).items():
        (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    made = path.parent / "made"
    made.mkdir()
    vocabulary.write_tokenizer(read_header(path), made)
    return Tokenizer.load(made)


@pytest.mark.parametrize("pre", RELEASED)
def test_token_ids_are_those_of_the_released_tokenizer(pre: str, tmp_path: Path) -> None:
    original = trained(*RELEASED[pre])
    original.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    ours = from_file(tmp_path, tmp_path / "v.gguf", pre)
    for text in CORPUS:
        ids = original.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.decode(ids, False) == original.decode(ids, skip_special_tokens=False)


def test_the_first_deepseek_cuts_words_with_a_space_of_any_kind_and_whole_numbers(tmp_path: Path) -> None:
    """Pieces as llama.cpp has them: its letters are those of scripts with two cases."""
    pre = tokenizers.Tokenizer.from_str(json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}} | {
        "pre_tokenizer": PRE_TOKENIZERS["deepseek-llm"].content()})).pre_tokenizer  # fmt: skip
    text = "ab\tÀЖ 你好2024 한글, ok！ 12345\n x  "
    pieces = [text[begin:end] for _, (begin, end) in pre.pre_tokenize_str(text)]
    assert pieces == ["ab", "\tÀЖ", " ", "你好", "2024", " ", "한글", ",", " ok", "！", " ", "12345", "\n", " x", "  "]


def world(path: Path, *, more: tuple[str, ...] = ()) -> Tokenizer:
    """Out of a file whose tokens are what Python prints of their bytes."""
    writer, kinds = gguf.GGUFWriter(path, "rwkv7"), gguf.TokenType
    texts = ["<s>", *(repr(token)[2:-1] for token in world_tokens()), *more, "[PAD]"]
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list(texts)
    writer.add_token_types([kinds.CONTROL, *[kinds.NORMAL] * (len(texts) - 2), kinds.UNUSED])
    writer.add_chat_template("rwkv-world")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    vocabulary.write_tokenizer(read_header(path), path.parent)
    return Tokenizer.load(path.parent)


def test_a_world_vocabulary_is_read_as_the_original_file(tmp_path: Path) -> None:
    tokens, ours = world_tokens(), world(tmp_path / "v.gguf")
    for text in (*CORPUS, "thence the thesis\n\n'\"\\d|(?:.*\x00\x7f", "今天今 é"):
        assert ours.encode(text) == longest(text, tokens)
    assert all(ours.token_bytes(index) == token for token, index in tokens.items())
    assert ours.vocab_size == len(tokens) + 1
    assert not (tmp_path / "chat_template.jinja").exists(), "the name of a template is none"


def test_a_token_that_stands_for_no_bytes_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer.ggml.tokens has '今', which is not bytes"):
        world(tmp_path / "v.gguf", more=("今",))


def test_another_pre_tokenizer_gives_other_ids(tmp_path: Path) -> None:
    """The control of the test above."""
    original = trained(*RELEASED["lfm2"])
    original.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    ours = from_file(tmp_path, tmp_path / "v.gguf", "qwen2")
    assert [text for text in CORPUS if ours.encode(text) != original.encode(text).ids]


def test_pairs_of_what_is_no_token_are_left_out(tmp_path: Path) -> None:
    """llama.cpp ignores them; the tokenizers library would refuse the whole file."""
    original = trained(*RELEASED["lfm2"])
    content = json.loads(original.to_str())
    content["model"]["merges"].insert(0, ["Ġ", "nowhere"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    ours = from_file(tmp_path, tmp_path / "v.gguf", "lfm2")
    for text in CORPUS:
        assert ours.encode(text, add_special_tokens=False) == original.encode(text).ids


def test_tokens_around_a_text_are_put_there(tmp_path: Path) -> None:
    trained((LLAMA3,), False).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<|startoftext|>", "eos_token": "<|im_end|>"}')
    ours = from_file(tmp_path, tmp_path / "v.gguf", "lfm2", {"tokenizer.ggml.add_eos_token": True})
    inner = ours.encode("hello", add_special_tokens=False)
    assert ours.encode("hello") == [0, *inner, 2]
    assert ours.special_tokens == {"bos_token": "<|startoftext|>", "eos_token": "<|im_end|>"}


@pytest.mark.parametrize("kind", ["llama", "gemma4"])
def test_sentence_piece_vocabularies_give_the_ids_of_the_original(kind: str, tmp_path: Path) -> None:
    """Gemma 4 has merges in the file, no space in front of a text, and runs of newlines apart."""
    inner = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    texts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "gemma4":
        inner.normalizer = normalizers.Replace(" ", "▁")
        inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("\n+"), "isolated")
        inner.decoder = decoders.Sequence(texts)
    else:
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        inner.decoder = decoders.Sequence([*texts, decoders.Strip(" ", 1, 0)])
    inner.train_from_iterator(
        CORPUS * 3,
        trainers.BpeTrainer(
            vocab_size=700,
            show_progress=False,
            special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        ),
    )
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    content = json.loads(inner.to_str())
    by_id = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    rank = {"".join(merge): -float(number) for number, merge in enumerate(content["model"]["merges"])}
    kinds = [
        gguf.TokenType.UNKNOWN
        if index == 0
        else gguf.TokenType.CONTROL
        if index < 3
        else gguf.TokenType.BYTE
        if index < 259
        else gguf.TokenType.NORMAL
        for index in range(len(by_id))
    ]
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(by_id)
    if kind == "llama":
        writer.add_token_scores([rank.get(token, -1e6) for token in by_id])
    else:
        writer.add_token_scores([-1000.0] * len(by_id))
        writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
        writer.add_add_space_prefix(False)
        writer.add_add_bos_token(True)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    vocabulary.write_tokenizer(read_header(tmp_path / "v.gguf"), tmp_path)
    ours = Tokenizer.load(tmp_path)
    plain = [text for text in CORPUS if "<|" not in text]
    for text in plain:
        assert ours.encode(text) == inner.encode(text).ids
        assert ours.decode(ours.encode(text)) == inner.decode(inner.encode(text).ids)


def test_chats_and_ends_are_those_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = checkpoint("lfm2")
    view = resolve_model(write_gguf(source, tmp_path / "model.gguf"))
    messages = [ChatMessage(role="user", content="hi"), ChatMessage(role="assistant", content="yo")]
    found = []
    for directory in (source, view):
        tokenizer = Tokenizer.load(directory)
        template = load_chat_template(directory, special_tokens=tokenizer.special_tokens)
        assert template is not None
        rendered = template.render(messages)
        found.append((rendered, tokenizer.special_tokens, tokenizer.encode(rendered)))
    assert found[0] == found[1]
    ends = {
        read_generation_defaults(directory, json.loads((directory / "config.json").read_text())).eos_ids
        for directory in (source, view)
    }
    assert len(ends) == 1
