"""``bad_words``: texts that an answer must not contain, as token sequences.

    "cat" --tokenizer--> [cat]     in the middle of a word, or at the answer's begin
          --tokenizer--> [ cat]    as a word of its own, behind a space

Both spellings become banned sequences of ``SamplingParams``. The sampler refuses a sequence at its last
token (``weft.runner.banned_sequences``). As in other engines, tokens are banned, not text: a word that the
model spells with other tokens (``c``, ``at``) passes.

Laws: L11 (``BAD_WORDS_MAX`` words of ``BAD_WORD_CHARS_MAX`` characters).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.errors import RequestError
from weft.text.tokenizer import Tokenizer

BAD_WORDS_MAX = 512
BAD_WORD_CHARS_MAX = 256


def banned_sequences(words: Sequence[Any] | None, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Raises RequestError that names ``bad_words``."""
    if not words:
        return ()
    if len(words) > BAD_WORDS_MAX:
        raise RequestError(f"bad_words has {len(words)} texts; the limit is {BAD_WORDS_MAX}",
                           param="bad_words")
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise RequestError(f"bad_words has {word!r:.60}; each must be a text with a visible character",
                               param="bad_words")
        if len(word) > BAD_WORD_CHARS_MAX:
            raise RequestError(f"bad_words has a text of {len(word)} characters; the limit is "
                               f"{BAD_WORD_CHARS_MAX}", param="bad_words")
        bare = word.lstrip()
        for spelled in (bare, f" {bare}"):
            tokens = tokenizer.encode(spelled, add_special_tokens=False)
            if tokens:
                sequences[tuple(tokens)] = None
    return tuple(sequences)
