"""A reader of stores written from docs/store.md alone: it imports nothing of weft."""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from pathlib import Path

import xxhash
import zstandard
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_ROW = struct.Struct("<BBHIQQIIQQ16sQQQ16s16sfIIIQ")
assert _ROW.size == 144


@dataclass(frozen=True)
class Row:
    kind: int
    flags: int
    tokens: int
    form: int
    number: int
    parent: int
    position: int
    volume: int
    offset: int
    payload_bytes: int
    checksum: bytes
    tokens_at: int
    chain: int
    head: int
    namespace: bytes
    salt: bytes
    seconds: float
    written: int
    uses: int
    reserved: int
    row_hash: int


@dataclass(frozen=True)
class Prefix:
    """A snapshot with everything that a restore needs."""

    namespace: bytes
    salt: bytes
    tokens: tuple[int, ...]
    kv: bytes
    state: bytes
    exact: bool


def read_store(directory: Path, secret: bytes = b"") -> list[Prefix]:
    """Every prefix that can be restored, by the rules of the page. ``secret``: of a key file."""
    names = sorted((directory.glob("ledger-????????.rows")), reverse=True)
    for name in names:
        content = name.read_bytes()
        header = (
            content[:16] == b"weft-store-rows\0"
            and struct.unpack_from("<I", content, 16)[0] == 1
            and struct.unpack_from("<Q", content, 24)[0] == int(name.stem[-8:])
            and _valid(content[:144])
        )
        if header or any(_valid(content[at : at + 144]) for at in range(144, len(content), 144)):
            return _prefixes(directory, content[144:], name.with_suffix(".tokens").read_bytes(), secret)
    return []


def salt_of(directory: Path, salt: str) -> bytes:
    return hmac.new((directory / "secret").read_bytes(), salt.encode(), hashlib.sha256).digest()[:16]


def _valid(row: bytes) -> bool:
    return len(row) == 144 and xxhash.xxh3_64_intdigest(row[:136]) == struct.unpack("<Q", row[136:])[0]


def _prefixes(directory: Path, content: bytes, tokens: bytes, secret: bytes) -> list[Prefix]:
    volumes = {int(path.name[-5:]): path.read_bytes() for path in (directory / "volumes").iterdir()}
    volumes = {number: volume for number, volume in volumes.items() if _is_volume(number, volume)}
    rows = [
        Row(*_ROW.unpack(content[at : at + 144]))
        for at in range(0, len(content) - 143, 144)
        if _valid(content[at : at + 144])
    ]
    retired = {row.parent for row in rows if row.kind == 3}
    by_number: dict[int, Row] = {}
    for row in rows:
        inside = row.payload_bytes == 0 or (
            row.volume in volumes
            and row.offset % 4096 == 0
            and row.offset + row.payload_bytes <= len(volumes[row.volume])
        )
        if (
            row.kind in (1, 2)
            and row.number not in retired
            and inside
            and (secret or not row.flags & 2)
            and row.tokens_at + 4 * row.tokens <= len(tokens)
        ):
            by_number.setdefault(row.number, row)
    _without_overlaps(by_number)
    answer = []
    for row in by_number.values():
        path = _path(row, by_number) if row.kind == 2 else None
        if path is None:
            continue
        payloads = [
            volumes[one.volume][one.offset : one.offset + one.payload_bytes] if one.payload_bytes else b""
            for one in (*path, row)
        ]
        if any(
            xxhash.xxh3_128_digest(payload) != one.checksum for payload, one in zip(payloads, (*path, row), strict=True)
        ):
            continue
        try:
            payloads = [
                _opened(payload, one, b"payload", secret) for payload, one in zip(payloads, (*path, row), strict=True)
            ]
            ids_by_record = [_opened(_tokens(one, tokens), one, b"tokens", secret) for one in path]
        except InvalidTag:
            continue
        payloads = [
            _unpacked(payload) if one.form == 4 else payload
            for payload, one in zip(payloads, (*path, row), strict=True)
        ]
        ids = b"".join(ids_by_record)
        if _chain(path, ids_by_record) != _digests(row, secret)[0]:
            continue
        answer.append(
            Prefix(
                row.namespace,
                row.salt,
                struct.unpack(f"<{len(ids) // 4}I", ids),
                b"".join(payloads[:-1]),
                payloads[-1],
                not any(one.flags & 1 for one in (*path, row)),
            )
        )
    return answer


def _unpacked(content: bytes) -> bytes:
    decoded, at = b"", 16
    while len(decoded) < struct.unpack_from("<Q", content, 8)[0]:
        word = struct.unpack_from("<I", content, at)[0]
        encoding, chunk = word >> 30, content[at + 4 : at + 4 + word % (1 << 30)]
        at += 4 + len(chunk)
        if encoding == 0:
            decoded += chunk
            continue
        count = min(1 << 20, struct.unpack_from("<Q", content, 8)[0] - len(decoded)) // (2 * encoding)
        frame = count * (2 * encoding - 1)
        exponents = zstandard.ZstdDecompressor().decompress(chunk[frame:])
        for number, exponent in enumerate(exponents):
            if encoding == 1:
                rest = chunk[number]
                decoded += struct.pack("<H", rest >> 7 << 15 | exponent << 7 | rest & 127)
            else:
                low, high = struct.unpack_from("<H", chunk, 2 * number)[0], chunk[2 * count + number]
                decoded += struct.pack("<I", high >> 7 << 31 | exponent << 23 | (high & 127) << 16 | low)
    assert xxhash.xxh3_64_intdigest(decoded) == struct.unpack_from("<Q", content)[0]
    return decoded


def _is_volume(number: int, volume: bytes) -> bool:
    return (
        volume[:16] == b"weft-store-vol\0\0"
        and struct.unpack_from("<II", volume, 16) == (1, number)
        and struct.unpack_from("<Q", volume, 24)[0] * 4096 <= len(volume)
        and xxhash.xxh3_64_intdigest(volume[:4088]) == struct.unpack_from("<Q", volume, 4088)[0]
    )


def _without_overlaps(by_number: dict[int, Row]) -> None:
    owner: dict[tuple[int, int], int] = {}
    for number in sorted(by_number, reverse=True):
        row = by_number[number]
        blocks = range(row.offset // 4096, -(-(row.offset + row.payload_bytes) // 4096))
        mine = {(row.volume, block) for block in blocks} if row.payload_bytes else set()
        if mine & owner.keys():
            del by_number[number]
        else:
            owner.update(dict.fromkeys(mine, number))


def _path(snapshot: Row, by_number: dict[int, Row]) -> tuple[Row, ...] | None:
    """The KV rows from the root on; None where one is missing or does not fit."""
    path: list[Row] = []
    below, end = snapshot, snapshot.position
    while below.parent:
        row = by_number.get(below.parent)
        if (
            row is None
            or row.kind != 1
            or row.position + row.tokens != end
            or (row.namespace, row.salt) != (snapshot.namespace, snapshot.salt)
        ):
            return None
        path.append(row)
        below, end = row, row.position
    return tuple(reversed(path)) if end == 0 else None


def _chain(path: tuple[Row, ...], ids_by_record: list[bytes]) -> int:
    chain = xxhash.xxh3_64_intdigest(path[0].namespace + path[0].salt)
    for ids in ids_by_record:
        chain = xxhash.xxh3_64_intdigest(struct.pack("<Q", chain) + ids)
    return chain


def _tokens(row: Row, tokens: bytes) -> bytes:
    return tokens[row.tokens_at : row.tokens_at + 4 * row.tokens + (28 if row.flags & 2 else 0)]


def _key(secret: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(secret, digest_size=32, person=purpose).digest()


def _digests(row: Row, secret: bytes) -> tuple[int, int]:
    """Chain and head."""
    if not row.flags & 2:
        return row.chain, row.head
    cipher = Cipher(algorithms.AES(_key(secret, b"weft-store-rows")), modes.ECB()).decryptor()
    chain, head = struct.unpack("<QQ", cipher.update(struct.pack("<QQ", row.chain, row.head)))
    return chain, head


def _opened(content: bytes, row: Row, what: bytes, secret: bytes) -> bytes:
    if not row.flags & 2 or not content:
        return content
    fields = struct.pack("<BBIHIQQ", row.kind, row.flags, row.form, row.tokens, row.position, row.chain, row.head)
    cipher = AESGCM(_key(secret, b"weft-store-recs"))
    return cipher.decrypt(content[:12], content[12:], what + fields + row.namespace)
