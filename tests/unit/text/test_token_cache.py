"""Cached segments of texts have the ids of the text, are kept for their salt alone, and are bounded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors

from benchmarks.dialects import ready_service
from weft.server.app import build_app
from weft.text import tokenizer as module
from weft.text.token_cache import SegmentTokens, TextSegment, TokenCache, separators
from weft.text.tokenizer import Tokenizer

TOKENS = [
    AddedToken("<s>", special=True),
    AddedToken("<|im_start|>", special=True),
    AddedToken("<|im_start|>user", special=True),
    AddedToken("<left>", special=True, lstrip=True),
    AddedToken("<right>", special=True, rstrip=True),
    AddedToken("<word>", special=True, single_word=True),
    AddedToken("<soft>", normalized=True),
    AddedToken("[INST]", special=True),
    AddedToken("ab[", special=True),
    AddedToken("   ", normalized=False),
]
PIECES = [
    *(token.content for token in TOKENS),
    " ",
    "  ",
    "\n",
    "the",
    "ab",
    "e\u0301",
    "Ω",
    "user",
    "x",
    "<",
    "st",
    ">",
]

QUOTING = [piece for piece in PIECES if piece not in ("<word>", "<soft>")]


def byte_level(**parts: Any) -> tokenizers.Tokenizer:
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "Ġt", "Ġthe"]
    merges = [("t", "h"), ("th", "e"), ("Ġ", "t"), ("Ġt", "h")]
    vocabulary.append("Ġth")
    made = tokenizers.Tokenizer(models.BPE(vocab={piece: at for at, piece in enumerate(vocabulary)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, part in parts.items():
        setattr(made, name, part)
    made.add_tokens(TOKENS)
    return made


def spaced(scheme: str) -> tokenizers.Tokenizer:
    pieces = ["<unk>", "▁", "▁the", "the", "t", "h", "e", "a", "b", "x", "▁x", "s", "u", "r", ">", "<", "\n", "Ω"]
    made = tokenizers.Tokenizer(
        models.Unigram([(piece, -len(pieces) / (len(piece) + 1)) for piece in pieces], unk_id=0)
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.add_tokens(TOKENS)
    return made


BACKENDS = {
    "bytes": byte_level,
    "nfc": lambda: byte_level(normalizer=normalizers.NFC()),
    "prefixed": lambda: byte_level(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "prepended": lambda: byte_level(normalizer=normalizers.Prepend("▁")),
    "framed": lambda: byte_level(
        post_processor=processors.TemplateProcessing("<s> $A <s>", special_tokens=[("<s>", 261)])
    ),
    "first": lambda: spaced("first"),
    "always": lambda: spaced("always"),
}


@pytest.mark.parametrize("name", BACKENDS)
def test_cached_segments_have_the_ids_of_the_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_CHARS_MIN", 1)
    tokenizer, drawn, cuts = Tokenizer(BACKENDS[name]()), random.Random(name), 0
    finder = separators(TOKENS)
    for number in range(150):
        # In all of a text that quotes, marks change what is next to a word, and what is normalized.
        text = "".join(drawn.choices(PIECES if number % 2 else QUOTING, k=30))
        # A character that a normalizer inserts has no position of its own.
        boundaries = [] if name == "prepended" else drawn.choices(range(len(text) + 2), k=4)
        spelled = [at for at in range(len(text)) if text.startswith(("<s>", "<|im_start|>"), at)]
        quoted = [] if number % 2 else drawn.sample(spelled, len(spelled) // 3)
        cuts += len(finder.apart(text, 1, quoted)) - 1
        for special in (False, True):
            fields: dict[str, Any] = {"add_special_tokens": special, "quoted": quoted}
            whole = tokenizer.encode_with_boundaries(text, boundaries, **fields)
            for _ in range(2):
                assert tokenizer.encode_with_boundaries(text, boundaries, salt="", **fields) == whole, text
            assert tokenizer.encode(text, salt="", **fields) == whole[0], text
    assert cuts > 300


def test_a_text_is_cut_before_tokens_that_do_not_reach_to_their_left() -> None:
    text = "".join("x" * 200 + token.content for token in TOKENS)
    cut = [text[start : start + 12] for start in separators(TOKENS).apart(text, 128, [])[1:]]
    assert [content.partition(">")[0] for content in cut] == ["<s", "<|im_start|", "<|im_start|", "<right"]


def counted(seen: list[str]) -> Any:
    def encode(segments: Sequence[TextSegment]) -> list[SegmentTokens]:
        seen.extend(segment.text for segment in segments)
        return [SegmentTokens([len(segment.text)]) for segment in segments]

    return encode


def test_a_segment_is_known_to_its_salt_until_its_memory_is_needed() -> None:
    cache, seen = TokenCache(2500), list[str]()
    first, second = TextSegment("a" * 500), TextSegment("b" * 500)
    for salt in ("one", "one", "two", "one"):
        assert cache.tokens_of(salt, [first, first], counted(seen))[1].ids[0] == 500
    assert [text[0] for text in seen] == ["a", "a"]
    cache.tokens_of("one", [second], counted(seen))  # the third entry: the segment of "two" is the oldest
    cache.tokens_of("one", [first], counted(seen))
    assert cache.bytes <= cache.bytes_max
    assert len(seen) == 3
    cache.tokens_of("two", [first], counted(seen))
    assert len(seen) == 4


def test_a_cache_without_memory_keeps_nothing() -> None:
    cache, seen = TokenCache(0), list[str]()
    for _ in range(2):
        assert cache.tokens_of("", [TextSegment("abc")], counted(seen))[0].ids[0] == 3
    assert len(seen) == 2
    assert cache.bytes == 0


async def test_a_turn_tokenizes_its_new_message_only_and_salts_share_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    encoded = Tokenizer._encoded

    def noted(self: Tokenizer, parts: Sequence[TextSegment], **fields: Any) -> list[SegmentTokens]:
        seen.extend(part.text for part in parts)
        return encoded(self, parts, **fields)

    monkeypatch.setattr(Tokenizer, "_encoded", noted)
    service = ready_service(tmp_path)
    transport = httpx.ASGITransport(build_app(service))
    messages = [{"role": role, "content": f"{role} says: {'a long text, ' * 20}"} for role in ("system", "user")]
    answer = [{"role": "assistant", "content": "an answer, " * 20}, {"role": "user", "content": "and then? " * 20}]
    counts = []
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        for turn, salt in ((messages, "one"), (messages + answer, "one"), (messages, "two"), (messages, "one")):
            del seen[:]
            body = {"messages": turn, "max_tokens": 1, "cache_salt": salt}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
            counts.append("".join(seen).count("long text") + 100 * "".join(seen).count("and then"))
        prompt = "<s>" + "a long text, " * 20
        for salt in ("one", "one", "two"):
            del seen[:]
            body = {"prompt": prompt, "max_tokens": 1, "cache_salt": salt}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            counts.append(len(seen))
    await service.close()
    assert counts == [40, 2000, 40, 0, 1, 0, 1]
