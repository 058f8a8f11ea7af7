"""The lines of a recording of live traffic (``weft serve --record``), and the hashes that replace its tokens.

    {"weft_recording": 1, ...}                                    the model's geometry and the engine's sizes
    {"at_s", "input_length", "output_length", "blocks", ...}      one line for each sequence that ended
    {"steps": [[prefill tokens, pairs, decodes, context, s], ...]}   times of some steps, to fit a cost model
    {"front": [[3, "<7 x 4 bytes>"]]}      hashes of the first 7 tokens of block 3, comparable like blocks
    {"tokens": "<n x 4 bytes>"}            int32, little endian, base64; only with server.record_tokens
    {"ended": true, "dropped": 0}

**No text and no tokens** unless the operator asks for them. A block of 16 tokens is written as 8 bytes of a keyed hash
(BLAKE2b) that covers the salt of the request and all tokens up to the block's end. The key is drawn when recording
starts and is in no file: without the key, texts cannot be tried against the hashes. A file does reveal the times of
requests, the lengths of prompts and answers, and which requests of one cache salt share a beginning.

``weft.rpc.recorder`` writes the lines while an engine runs; ``weft_tools.sim.recording`` reads them for a replay.
"""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from weft.config import Sizes
from weft.memory.frames.plan import ArenaPlan
from weft.units import PAGE_TOKENS

VERSION = 1
BLOCK_TOKENS = PAGE_TOKENS
BLOCK_BYTES = 8
TOKEN_HASH_BYTES = 4
_TOKEN_BYTES = 4
_ENDS_MAX = 65_536
"""Most remembered positions inside a block at which requests ended; the least recently used is dropped first."""
_ENDS_PER_PLACE_MAX = 16


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Hashes of one sequence. ``blocks``: 8 bytes each. ``fronts``: by index of a block, 4 bytes for each of its first
    tokens."""

    blocks: bytes
    fronts: tuple[tuple[int, bytes], ...]


class Fingerprints:
    """Hashes of sequences under one ``key``, which must be random and never stored (16 to 64 bytes)."""

    def __init__(self, key: bytes) -> None:
        assert 16 <= len(key) <= 64
        self._key = key
        self._ends: OrderedDict[bytes, list[bytes]] = OrderedDict()

    def salt(self, salt: str) -> str:
        """Return a name for a cache salt; "" stays ""."""
        return blake2b(salt.encode(), key=self._key, digest_size=BLOCK_BYTES).hexdigest() if salt else ""

    def of(self, tokens: Sequence[int], salt: str, *, computed: int) -> Fingerprint:
        """Return the hashes of a sequence. ``tokens``: prompt and answer; the first ``computed`` of them were in memory
        when the sequence ended, where its state was kept."""
        data = np.asarray(tokens, dtype=np.int32).tobytes()
        state = blake2b(salt.encode(), key=self._key, digest_size=BLOCK_BYTES)
        blocks: list[bytes] = []
        fronts: list[tuple[int, bytes]] = []
        before = state.digest()
        size = BLOCK_TOKENS * _TOKEN_BYTES
        for index, first in enumerate(range(0, len(data), size)):
            block = data[first : first + size]
            own_end = max(0, computed - index * BLOCK_TOKENS) if computed < (index + 1) * BLOCK_TOKENS else 0
            if own_end or before in self._ends:
                front = self._front(state, before, block, own_end)
                if front:
                    fronts.append((index, front))
            state.update(block)
            before = state.digest()
            blocks.append(before)
        return Fingerprint(b"".join(blocks), tuple(fronts))

    def _front(self, state: Any, before: bytes, block: bytes, own_end: int) -> bytes:
        """Return hashes of the first tokens of ``block``, up to ``own_end``, which is remembered, and up to the last
        token shared with earlier requests that ended in this block."""
        following = state.copy()
        hashes = bytearray()
        for start in range(0, len(block), _TOKEN_BYTES):
            following.update(block[start : start + _TOKEN_BYTES])
            hashes += following.digest()[:TOKEN_HASH_BYTES]
        known = self._ends.setdefault(before, [])
        self._ends.move_to_end(before)
        common = max((_common(hashes, other) for other in known), default=0)
        if own_end:
            end = bytes(hashes[: own_end * TOKEN_HASH_BYTES])
            if end not in known:
                known.append(end)
                del known[:-_ENDS_PER_PLACE_MAX]
        if len(self._ends) > _ENDS_MAX:
            self._ends.popitem(last=False)
        return bytes(hashes[: max(common, own_end) * TOKEN_HASH_BYTES])


def _common(left: bytes | bytearray, right: bytes) -> int:
    """Return the number of leading tokens with equal hashes."""
    size, count = TOKEN_HASH_BYTES, 0
    while (count + 1) * size <= min(len(left), len(right)) and (
        left[count * size : (count + 1) * size] == right[count * size : (count + 1) * size]
    ):
        count += 1
    return count


def sequence_line(fingerprint: Fingerprint, **fields: Any) -> dict[str, Any]:
    """Return one line of the file; ``fields``: as ``read_recording`` expects them; empty ones are left out."""
    always = ("at_s", "input_length", "output_length")
    line = {name: value for name, value in fields.items() if value or name in always}
    line["blocks"] = base64.b64encode(fingerprint.blocks).decode()
    if fingerprint.fronts:
        line["front"] = [[index, base64.b64encode(hashes).decode()] for index, hashes in fingerprint.fronts]
    return line


def token_text(tokens: Sequence[int]) -> str:
    """Return the field ``tokens`` of a line."""
    return base64.b64encode(np.asarray(tokens, dtype="<i4").tobytes()).decode()


ARENA_NUMBERS = (
    "page_bytes",
    "pages_per_frame",
    "slot_bytes",
    "slot_stride_bytes",
    "slots_per_frame",
    "frame_bytes",
    "frame_count",
    "kv_dtype",
    "model_dtype",
)

COMPRESSED_NUMBERS = ("compressed_pages", "compressed_kv_bytes", "compressed_kv_dtype")


def header_line(*, model: str, arena: ArenaPlan, sizes: Sizes, snapshots: str) -> dict[str, Any]:
    return {
        "weft_recording": VERSION,
        "block_tokens": BLOCK_TOKENS,
        "model": model,
        "checkpoints": snapshots,
        "rows_max": sizes.rows_max,
        "step_tokens_max": sizes.step_tokens_max,
        "max_model_len": sizes.max_model_len,
        "grid_tokens": sizes.grid_tokens,
        "arena": {
            **{name: getattr(arena, name) for name in (*ARENA_NUMBERS, *COMPRESSED_NUMBERS)},
            "kv_fields": [astuple(kv_field) for kv_field in arena.kv_fields],
        },
    }
