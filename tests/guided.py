"""A writer without a model: random tokens, of those that a guide allows. Whatever it writes must match."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import tokenizers
from llguidance.numpy import fill_next_token_bitmask
from tokenizers import decoders, models, pre_tokenizers

from weft.engine.guides import GuideCompiler
from weft.request import Guide
from weft.text.tokenizer import Tokenizer

END = "<|end|>"
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|tool_call_start|>", "<|tool_call_end|>",
           "<|tool_call|>", "[TOOL_CALLS]", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
           "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")


def backend(markers: tuple[str, ...] = MARKERS) -> tokenizers.Tokenizer:
    """Every byte is a token, then the end, then ``markers``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE(vocab={piece: at for at, piece in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END, *dict.fromkeys(markers)])
    return made


@functools.cache
def tokenizer(with_markers: bool = True) -> Tokenizer:
    return Tokenizer(backend(MARKERS if with_markers else ()), decoder={"type": "ByteLevel"})


@functools.cache
def compiler(with_markers: bool = True) -> GuideCompiler:
    made = backend(MARKERS if with_markers else ())
    return GuideCompiler(made.to_str, (made.token_to_id(END),), made.get_vocab_size())


def allowed_tokens(matcher: Any, token_count: int) -> list[int]:
    words = np.zeros((1, -(-token_count // 32)), np.int32)
    fill_next_token_bitmask(matcher, words)
    assert not matcher.is_error(), matcher.get_error()
    return [int(token) for token in np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))]


def write(guide: Guide, seed: int, *, wish: str = "", tokens_max: int = 600,
          with_markers: bool = True) -> str | None:
    """The text, or None where it did not come to its end. ``wish`` is written first, as far as it is allowed:
    a token of it that is not is an AssertionError."""
    compiled, text = compiler(with_markers).compile(guide), tokenizer(with_markers)
    end = text.added_id(END)
    matcher, chosen = compiled.matcher(), random.Random(seed)
    wished = text.encode(wish)
    written: list[int] = []
    for made in range(tokens_max):
        allowed = allowed_tokens(matcher, compiled.token_count)
        if made < len(wished):
            token = wished[made]
            before = text.decode(written, skip_special_tokens=False)
            assert token in allowed, f"{text.token_text(token)!r} is refused after {before!r}"
        else:
            token = chosen.choice(allowed)
        if token == end:
            return text.decode(written, skip_special_tokens=False)
        assert matcher.consume_token(token), matcher.get_error()
        written.append(token)
    return None
