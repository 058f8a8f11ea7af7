"""Text to token ids and back, for one checkpoint directory.

    tokenizer.json         the whole tokenizer (normalizer, pieces, merges, added tokens, decoder); without it
                           a World vocabulary, or Kimi's of tiktoken (``tokenizer_file``)
    tokenizer_config.json  further tokens, and the names of the special ones, which chat templates use

Only this module uses the ``tokenizers`` library. The rest of weft sees only this class and, in the engine, the
two-argument ``decode`` of the ``TextDecoder`` protocol. Two things in a tokenizer.json are switched off at load,
because they would change prompts silently: ``truncation`` and ``padding``.

*Bytes of a token.* Logprobs report each token's bytes. A token may be half a character, so its text does not determine
its bytes. The bytes follow from the decoder that the file declares: a byte-level alphabet (each byte drawn as one
printable character), byte fallback (``<0xE2>`` pieces), or neither (then they are the bytes of the text).

*Threads.* ``encode_batch`` of the library lets other threads run; ``encode`` does not, so a long text is encoded as a
batch of one. Loading does not either, and takes half a second for 150,000 tokens: a process that must go on answering
passes its loaded tokenizers (``known``).

*Quoted positions.* ``quoted``: positions (characters) at which a text spells an added token without meaning it
(``weft.text.control_tokens``); there the ids are those of plain text.

*Bad words.* Both spellings of a text, inside a word and after a space, become banned sequences of tokens. As in other
engines, a word that the model spells with other tokens (``c``, ``at``) passes. Law L11 (``BAD_WORDS_MAX`` words of
``BAD_WORD_CHARS_MAX`` characters).
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import tokenizers

from weft.added_tokens import read_next_to
from weft.errors import CheckpointError, RequestError, is_panic
from weft.files import parse_json
from weft.text.control_tokens import TokenFinder
from weft.text.plamo_vocabulary import cut_as_plamo
from weft.text.quoted_text import QuotedText, moved, quotable, unused_mark
from weft.text.text_parts import (
    NO_FRAME,
    PART_CHARS,
    PARTS_TOGETHER,
    Frame,
    TextParts,
    cuts,
    frame_of,
    ids_of,
    text_parts,
)
from weft.text.token_cache import SegmentTokens, TextSegment, TokenCache, joined, separators
from weft.text.tokenizer_file import byte_of_character, tokenizer_path, tokenizer_text

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SEGMENT_CHARS_MIN = 128
"""Characters of a segment at least: a lookup takes as long as tokenizing some ten characters."""
LONG_TEXT_CHARS = 4096
"""Characters from which on tokenizing takes milliseconds: a server does it in a thread."""
_SHOWN_CHARS = 24
_CHAR_BYTES = 44
"""Memory of a list of ids, bytes per character."""
_UNCUT_CHAR_BYTES = 160
"""Memory of the library for the parts that it encodes together, bytes per character."""


def _refusal(error: BaseException, *texts: str) -> BaseException:
    """Return the RequestError for ``texts`` that cannot be tokenized: strings with half of a surrogate pair, such as
    bytes of a terminal that are not UTF-8, and texts on which a regular expression of the tokenizer gives up. Return
    any other ``error`` itself."""
    if isinstance(error, TypeError):
        return RequestError("the text has half of a surrogate pair, or bytes that are not UTF-8, which is not text")
    if not is_panic(error):
        return error
    shown = " and ".join(f"{text[:_SHOWN_CHARS]!r}... ({len(text)} characters)" for text in texts)
    return RequestError(
        f"the text {shown} cannot be tokenized: a regular expression of the model's tokenizer gave up on it",
        code="text_not_tokenizable",
    )


class Tokenizer:
    """The tokenizer of one checkpoint. ``special_tokens`` maps bos_token, eos_token, ... to their text, as chat
    templates expect."""

    def __init__(
        self, backend: tokenizers.Tokenizer, *, special_tokens: dict[str, str] | None = None, decoder: Any = None
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = special_tokens or {}
        added = backend.get_added_tokens_decoder()
        self.added = {index: token.content for index, token in added.items()}
        self._quotable = added.values()
        self._quoted_texts: dict[str, QuotedText] = {}
        self.cache = TokenCache()
        self._added_ids = {token.content: index for index, token in added.items()}
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size = max([*backend.get_vocab(with_added_tokens=True).values(), -1]) + 1
        kinds = _decoder_kinds(decoder)
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._space = " " if kinds - {"ByteFallback", "Fuse", "Sequence"} else "▁"
        """Text of the mark of SentencePiece; PLaMo's pieces have spaces, and the mark is itself."""
        self.joins_bytes = kinds == {"ByteLevel"}
        self._cut_here = False
        """Whether texts are cut by code of weft's, which the library cannot write down."""
        self._lone_texts: tuple[dict[int, str], dict[int, str]] = ({}, {})
        """Texts of single ids with special tokens, and without."""
        self.digest = b""
        """Digest of the files that the tokenizer was loaded from."""

    @classmethod
    def load(cls, directory: Path, known: Iterable[Tokenizer] = ()) -> Tokenizer:
        """Load the tokenizer, or return one of ``known`` with the same files. Raise CheckpointError that names a file
        that is missing or cannot be read."""
        path = tokenizer_path(directory)
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing: weft reads fast tokenizers only. Load the checkpoint's tokenizer with "
                "transformers' AutoTokenizer and save_pretrained() it there."
            )
        text = tokenizer_text(path)
        special_tokens = read_next_to(directory).named
        digest = hashlib.sha256(text.encode() + repr(special_tokens).encode()).digest()
        for tokenizer in known:
            if tokenizer.digest == digest:
                return tokenizer
        parsed = parse_json(text, str(path))
        try:
            backend = tokenizers.Tokenizer.from_str(text)
            decoder = parsed.get("decoder")
            cut_here = cut_as_plamo(backend, parsed)
        except BaseException as error:  # the library raises bare Exception, and panics
            if not (isinstance(error, Exception) or is_panic(error)):
                raise
            raise CheckpointError(f"{path} cannot be read as a tokenizer: {error}") from error
        loaded = cls(backend, special_tokens=special_tokens, decoder=decoder)
        loaded._cut_here = cut_here
        loaded.digest = digest
        return loaded

    @cached_property
    def _parts(self) -> TextParts | None:
        """Encoder of very long texts; made at the first such text, because it reads tokenizer.json again."""
        return None if self._cut_here else text_parts(self._backend)

    @cached_property
    def _frame(self) -> Frame | None:
        return frame_of(self._backend)

    @cached_property
    def _separator(self) -> TokenFinder:
        return separators(self._quotable)

    def memory_of(self, text: str, *, whole: bool) -> int:
        """Return an upper bound of the memory that tokenizing a long ``text`` takes, bytes. ``whole``: with offsets of
        tokens, for which a text is not cut into parts."""
        longest = len(text)
        if not whole and self._parts is not None:
            longest = max(end - begin for begin, end in pairwise([*cuts(text), len(text)]))
        return _CHAR_BYTES * len(text) + _UNCUT_CHAR_BYTES * min(len(text), PARTS_TOGETHER * longest)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, quoted: Collection[int] = (), salt: str | None = None
    ) -> list[int]:
        """Return the ids of ``text``. ``add_special_tokens`` applies the file's post-processor (a BOS, where the model
        has one); ``salt``: see ``encode_with_boundaries``."""
        ids, _ = self.encode_with_boundaries(text, (), add_special_tokens=add_special_tokens, quoted=quoted, salt=salt)
        return ids

    def encode_with_boundaries(
        self,
        text: str,
        boundaries: Sequence[int],
        *,
        add_special_tokens: bool = True,
        quoted: Collection[int] = (),
        salt: str | None = None,
    ) -> tuple[list[int], list[int]]:
        """Return the ids of ``text`` and, for each of ``boundaries`` (characters), how many tokens end at or before
        it. ``salt``: the cache salt of a text whose segments are kept; None: nothing is kept."""
        frame = self._frame if add_special_tokens else NO_FRAME
        try:
            if frame is None:
                places = sorted({boundary for boundary in boundaries if boundary < len(text)})
                whole = TextSegment(text, tuple(places), tuple(quoted))  # special tokens may be before place 0
                tokens = self._encoded([whole], add_special_tokens=True)
                return joined([0], [whole], tokens, boundaries, NO_FRAME)
            starts = [0] if salt is None else self._separator.apart(text, SEGMENT_CHARS_MIN, quoted)
            return self.cache.encode(
                text, boundaries, starts=starts, quoted=quoted, salt=salt, frame=frame, encode=self._encoded
            )
        except BaseException as error:
            raise _refusal(error, text) from None

    def _encoded(self, parts: Sequence[TextSegment], *, add_special_tokens: bool = False) -> list[SegmentTokens]:
        """Return the tokens of each of ``parts``."""
        plain = [part.text for part in parts if not (part.places or part.quoted)]
        ids = self._ids_of(plain, add_special_tokens=add_special_tokens)
        return [
            self._encoded_alone(part, add_special_tokens=add_special_tokens)
            if part.places or part.quoted
            else SegmentTokens(next(ids))
            for part in parts
        ]

    def _ids_of(
        self, texts: list[str], *, add_special_tokens: bool, twin: QuotedText | None = None
    ) -> Iterator[list[int]]:
        """Yield the ids of each text. Without offsets of tokens, which take a quarter of the time. ``twin``: the
        tokenizer of marked texts."""
        backend = self._backend if twin is None else twin.twin
        read = ids_of if twin is None else (lambda encoding: twin.read(encoding)[0])
        if any(len(text) > PART_CHARS for text in texts) and self._parts is not None:
            parts = self._parts.of(backend)
            for text in texts:
                yield parts.encode(text, add_special_tokens=add_special_tokens, read=read)
            return
        for first in range(0, len(texts), PARTS_TOGETHER):
            group = texts[first : first + PARTS_TOGETHER]
            for encoding in backend.encode_batch_fast(group, add_special_tokens=add_special_tokens):
                yield read(encoding)

    def _encoded_alone(self, part: TextSegment, *, add_special_tokens: bool) -> SegmentTokens:
        """Return the tokens of a part that has places, or quotes added tokens."""
        text, backend, places, twin = part.text, self._backend, list(part.places), None
        if part.quoted:
            twin = self._quoted_text(text)
            text, marks = twin.marked(text, frozenset(part.quoted))
            backend, places = twin.twin, [moved(place, marks) for place in places]
        if not places:
            return SegmentTokens(next(self._ids_of([text], add_special_tokens=add_special_tokens, twin=twin)))
        if len(text) < LONG_TEXT_CHARS:
            encoding = backend.encode(text, add_special_tokens=add_special_tokens)
        else:
            [encoding] = backend.encode_batch([text], add_special_tokens=add_special_tokens)
        ids, before = (ids_of(encoding), None) if twin is None else twin.read(encoding)
        counts = [encoding.char_to_token(place) for place in places]
        if None in counts:
            # A token that the post-processor adds has no characters; a normalizer may reorder within a word.
            ends = list(accumulate((end for _, end in encoding.offsets), max))
            counts = [bisect_right(ends, place) for place in places]
        # The tokens before the one that has the character end at or before it.
        return SegmentTokens(ids, [count if before is None else before[count] for count in counts if count is not None])

    def encode_pair(
        self, first: str, second: str, *, quoted: tuple[Collection[int], Collection[int]] = ((), ())
    ) -> tuple[list[int], int, int]:
        """Return the ids of two texts, joined by the post-processor, and the numbers of ids before and after the second
        text."""
        try:
            twin, backend = None, self._backend
            if any(quoted):
                twin = self._quoted_text(first + second)
                first, second = (
                    twin.marked(text, frozenset(places))[0]
                    for text, places in zip((first, second), quoted, strict=True)
                )
                backend = twin.twin
            [encoding] = backend.encode_batch([(first, second)])
        except BaseException as error:
            raise _refusal(error, first, second) from None
        ids, before = (ids_of(encoding), None) if twin is None else twin.read(encoding)
        of_second = [places for places, number in enumerate(encoding.sequence_ids) if number == 1]
        if not of_second:
            return ids, len(ids), 0
        start, end = of_second[0], of_second[-1] + 1
        if before is not None:
            start, end = before[start], before[end]
        return ids, start, len(ids) - end

    def _quoted_text(self, text: str) -> QuotedText:
        """Return the tokenizer of texts with quoted places. Raise RequestError."""
        mark = unused_mark(text)
        if mark not in self._quoted_texts:
            letters = {byte: letter for letter, byte in byte_of_character().items()} if self._byte_level else None
            self._quoted_texts[mark] = QuotedText(self._backend, quotable(self._quotable), mark, letters=letters)
        return self._quoted_texts[mark]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``. Bytes that are not UTF-8 become U+FFFD; ids above the vocabulary (padding rows of
        an embedding) have no text."""
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def lone_text(self, token: int, skip_special_tokens: bool = True) -> str:
        """Return ``decode`` of a single id, and remember it: a text of each id of the vocabulary at most."""
        texts = self._lone_texts[skip_special_tokens]
        text = texts.get(token)
        if text is None:
            text = texts[token] = self.decode((token,), skip_special_tokens)
        return text

    @property
    def end_id(self) -> int | None:
        """Id of ``eos_token``; None if the vocabulary does not have it."""
        end: int | None = self._backend.token_to_id(self.special_tokens.get("eos_token", ""))
        return end

    def added_id(self, text: str) -> int | None:
        """Return the id of ``text`` if it is one added token of the vocabulary (a marker)."""
        return self._added_ids.get(text)

    def known_id(self, text: str) -> int | None:
        """Return the id of ``text`` if it is one token of the vocabulary, added or not."""
        token: int | None = self._backend.token_to_id(text)
        return token

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that this token adds to a text; for a special token, the bytes of its name."""
        if token in self.added:
            return self.added[token].encode()
        piece = self._backend.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level:
            table = byte_of_character()
            if all(character in table for character in piece):
                return bytes(table[character] for character in piece)
        if self._byte_fallback:
            match = _BYTE_PIECE.fullmatch(piece)
            if match:
                return bytes([int(match.group(1), 16)])
            return str(piece).replace("▁", self._space).encode()
        return self.decode([token], skip_special_tokens=False).encode()

    def token_text(self, token: int) -> str:
        """Return the text of one token for display; half a character shows as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", errors="replace")


def _decoder_kinds(decoder: Any) -> frozenset[str]:
    """Return the names of the decoder and, for a sequence, of its parts."""
    if not isinstance(decoder, dict):
        return frozenset()
    parts = [decoder, *decoder.get("decoders", [])]
    return frozenset(part.get("type", "") for part in parts if isinstance(part, dict))


BAD_WORDS_MAX = 512
BAD_WORD_CHARS_MAX = 256


def banned_sequences(words: Sequence[Any] | None, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of bad words. Raise RequestError that names ``bad_words``."""
    if not words:
        return ()
    if len(words) > BAD_WORDS_MAX:
        raise RequestError(f"bad_words has {len(words)} texts; the limit is {BAD_WORDS_MAX}", param="bad_words")
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise RequestError(
                f"bad_words has {word!r:.60}; each must be a text with a visible character", param="bad_words"
            )
        if len(word) > BAD_WORD_CHARS_MAX:
            raise RequestError(
                f"bad_words has a text of {len(word)} characters; the limit is {BAD_WORD_CHARS_MAX}", param="bad_words"
            )
        bare = word.lstrip()
        for spelled in (bare, f" {bare}"):
            tokens = tokenizer.encode(spelled, add_special_tokens=False)
            if tokens:
                sequences[tuple(tokens)] = None
    return tuple(sequences)
