"""Identity of stored bytes: a namespace is a digest of everything that decides the meaning of a record.

    weights, architecture, rope, dtypes, quantised form, arithmetic, layout, adapter
        --canonical JSON--> SHA-256 --> 16 bytes: the namespace, in every row and under namespaces/

Another model at the same path, another KV dtype, another rope: each is another namespace, whose rows never match. The
JSON is written into the directory, so that ``weft store info`` can name the models of its records.

The digest of weights covers all bytes of every file that the weights are read from (``file_digests``).

Law: L10 at the scale of models.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.store import file_digests

LAYOUT_VERSION = 1
"""Version of the bytes inside records; it grows when the layout of pages or states changes."""
ARITHMETIC_VERSION = 2
"""Version of the numbers inside records; it grows when a kernel rounds or sums differently. A new version must not
go on from states of an old one, because it would have computed other bits.
"""
NAMESPACES_FOLDER = "namespaces"
KEY = "key"
"""Name among ``more`` of the id of the key of records (``sealing``)."""


@dataclass(frozen=True, slots=True)
class NamespaceIdentity:
    """Facts that must be equal for records to mean the same. Values are JSON: texts, numbers, lists, mappings.

    ``model``: a name to show; it is not part of the digest. ``arithmetic``: the kernel set and the versions of the
    arithmetic, because kernel sets and versions may round differently. ``grain_bytes``: bytes of the KV of 16 tokens.
    ``state_bytes``: bytes of one state."""

    model: str
    weights: str
    architecture: Mapping[str, Any]
    rope: Mapping[str, Any]
    kv_dtype: str
    state_dtype: str
    quantised: str
    arithmetic: str
    grain_bytes: int
    state_bytes: int
    adapter: str = ""
    layout: int = LAYOUT_VERSION
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> bytes:
        """16 bytes: the namespace."""
        facts = asdict(self)
        del facts["model"]
        return hashlib.sha256(canonical_json(facts)).digest()[:16]

    @property
    def key(self) -> str | None:
        """Id of the key that encrypts the records; None without one."""
        key: str | None = self.more.get(KEY)
        return key

    @property
    def without_key(self) -> bytes:
        """The namespace that the same records would have without a key."""
        return replace(self, more={name: value for name, value in self.more.items() if name != KEY}).digest

    def as_json(self) -> bytes:
        """Return the content of the file namespaces/DIGEST.json."""
        return canonical_json(asdict(self)) + b"\n"


def canonical_json(facts: Any) -> bytes:
    """Return JSON with sorted keys, without spaces, in ASCII."""
    return json.dumps(facts, sort_keys=True, separators=(",", ":")).encode("ascii")


def weights_digest(files: Sequence[Path]) -> str:
    """Return the hex SHA-256 over the digests of ``files`` in the order of their names. Raise OSError,
    CheckpointError."""
    total = hashlib.sha256(file_digests.ALGORITHM.encode())
    for path in sorted(files, key=lambda file: file.name):
        total.update(bytes.fromhex(file_digests.file_digest(path)))
    return total.hexdigest()
