"""Whose bytes these are: a namespace is a digest of everything that decides what a record means.

    weights, architecture, rope, dtypes, quantised form, arithmetic, layout, adapter
        --canonical JSON--> SHA-256 --> 16 bytes: the namespace, in every row and under namespaces/

Another model at the same path, another KV dtype, another rope: each is another namespace, whose rows never
match. The JSON is written beside the ledger, so that ``weft store info`` can name what a directory holds.

The digest of weights covers every file's size, its header up to 16 MiB, and 64 KiB at 64 places of it.
Reading all of a 100 GB checkpoint at each start would take a minute. Two checkpoints that differ only between
the samples are not told apart.

Law: L10 at the scale of models.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LAYOUT_VERSION = 1
"""Of the bytes inside records: grows when pages or states are laid out another way."""
ARITHMETIC_VERSION = 2
"""Of the numbers inside records: grows when a kernel rounds or sums in another way. A new version must not
go on from states of an old one. It would compute them with other bits."""
SAMPLES = 64
SAMPLE_BYTES = 64 << 10
_HEADER_LENGTH_BYTES = 8
_HEADER_BYTES_MAX = 16 << 20
"""Of a header. A GGUF file begins with its magic, which names no length: its first bytes are the header."""
NAMESPACES_FOLDER = "namespaces"


@dataclass(frozen=True, slots=True)
class NamespaceIdentity:
    """What must be equal for records to mean the same. Values are JSON: texts, numbers, lists, mappings.

    ``model``: a name to show; it is not part of the digest. ``arithmetic``: the kernel set and the versions
    of its arithmetic, where two of them round differently. ``grain_bytes``: KV of 16 tokens. ``state_bytes``:
    one state."""

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

    def as_json(self) -> bytes:
        """The file namespaces/DIGEST.json."""
        return canonical_json(asdict(self)) + b"\n"


def canonical_json(facts: Any) -> bytes:
    """Sorted keys, no spaces, ASCII."""
    return json.dumps(facts, sort_keys=True, separators=(",", ":")).encode("ascii")


def weights_digest(files: Sequence[Path]) -> str:
    """Hex SHA-256 over the weight files in the order of their names. Raises OSError."""
    total = hashlib.sha256(b"sampled")
    for path in sorted(files, key=lambda one: one.name):
        total.update(_file_digest(path))
    return total.hexdigest()


def _file_digest(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = file.seek(0, 2)
        digest.update(size.to_bytes(8, "little"))
        file.seek(0)
        length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
        digest.update(length.to_bytes(8, "little"))
        digest.update(file.read(min(length, _HEADER_BYTES_MAX)))
        for sample in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()
