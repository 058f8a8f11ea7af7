"""From a put to its records: one for each piece of KV, then one for the state, in the order of the ledger.

    put(tokens, position, kv, state) --> KV row, KV row, ..., CHECKPOINT row

Each row names the one before it as its parent, so a checkpoint's row follows those of the KV that it needs.
The numbers of a put's records are consecutive, and the checkpoint has the last.

Law: L8. A put whose pieces leave a gap is a bug of the caller and an assert.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.memory.prefix_store import GRAIN_TOKENS, RECORD_TOKENS_MAX, KvPiece
from weft.store.extents import BLOCK_BYTES
from weft.store.index import NO_ENTRY, KvChain, StoreIndex
from weft.store.rows import CHECKPOINT, INEXACT, KV, chain_of, head_of
from weft.store.writing import RecordWrite


@dataclass(frozen=True, slots=True)
class PutRequest:
    """``base``: the stored KV that the pieces continue. ``tokens``: uint32 bytes of the whole prefix."""

    base: KvChain
    tokens: bytes
    pieces: tuple[KvPiece, ...]
    state: memoryview
    exact: bool
    seconds: float
    state_form: int
    namespace: bytes
    salt: bytes

    @property
    def payloads(self) -> list[memoryview]:
        return [*(piece.payload for piece in self.pieces), self.state]

    @property
    def nbytes(self) -> int:
        return sum(len(payload) for payload in self.payloads)


def put_request(base: KvChain, tokens: bytes, kv: Sequence[KvPiece], state: memoryview, *, exact: bool,
                seconds: float, state_form: int, namespace: bytes, salt: bytes) -> PutRequest:
    """Checks that the pieces run from the end of ``base`` to the last token without gaps."""
    pieces = tuple(KvPiece(one.start, one.end, one.payload.cast("B"), one.form) for one in kv)
    at = base.end
    for piece in pieces:
        assert piece.start == at, "KV pieces leave a gap"
        assert piece.start % GRAIN_TOKENS == 0, "a KV piece begins at a multiple of 16"
        assert 0 < piece.end - piece.start <= RECORD_TOKENS_MAX, "a KV piece has 1 to 256 tokens"
        at = piece.end
    assert 4 * at == len(tokens), "KV pieces end at the checkpoint's position"
    return PutRequest(base, tokens, pieces, state.cast("B"), exact, seconds, state_form, namespace, salt)


def records_of(request: PutRequest, index: StoreIndex, places: Sequence[tuple[int, int]],
               first_number: int) -> tuple[RecordWrite, ...]:
    """The records with their rows; each gets an entry that is not durable yet."""
    flags = 0 if request.exact else INEXACT
    written = int(time.time()) & 0xFFFF_FFFF
    space = index.space_of(request.namespace, request.salt)
    base = request.base
    parent_entry = base.entries[-1] if base.entries else NO_ENTRY
    parent_number = index.c["number"].item(parent_entry) if base.entries else 0
    chain, number = base.chain, first_number
    records: list[RecordWrite] = []
    owned = {"flags": flags, "namespace": request.namespace, "salt": request.salt, "written": written,
             "seconds": request.seconds}

    def add(kind: int, place: tuple[int, int], payload: memoryview, content: bytes, **own: Any) -> int:
        entry = index.add(parent=parent_entry, space=space, kind=kind, number=number, flags=flags,
                          volume=place[0], block=place[1], payload=len(payload), seconds=request.seconds,
                          **own)
        row = {**owned, **own, "kind": kind, "parent": parent_number, "volume": place[0],
               "offset": place[1] * BLOCK_BYTES, "payload_bytes": len(payload)}
        records.append(RecordWrite(entry, number, place[0], place[1], payload, content, row))
        return entry

    for piece, place in zip(request.pieces, places, strict=False):
        tokens = request.tokens[4 * piece.start:4 * piece.end]
        head, chain = head_of(chain, tokens), chain_of(chain, tokens)
        parent_entry = add(KV, place, piece.payload, tokens, head=head, chain=chain, position=piece.start,
                           tokens=piece.end - piece.start, form=piece.form)
        parent_number, number = number, number + 1
    add(CHECKPOINT, places[-1], request.state, b"", chain=chain, position=len(request.tokens) // 4,
        form=request.state_form)
    return tuple(records)
