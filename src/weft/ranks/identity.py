"""What must be equal on all ranks, as text: refused at start where it differs.

    version     of weft and of torch
    dtype       of the weights, and how they are rounded
    config      digest of config.json
    weights     digest of the files: names, shapes, sizes, and 16 samples of each file

Samples are 4 KiB each, evenly spaced. They tell one fine-tune from another at the price of a few pages.
Rejected: a digest of all bytes (each rank would read the whole model, which is what shards avoid).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

_SAMPLES = 16
_SAMPLE_BYTES = 4096
_DIGITS = 12


def identity_of(directory: Path, settings: Iterable[tuple[str, str]]) -> dict[str, str]:
    """``settings``: (name, value) of what was chosen for this rank."""
    config = hashlib.sha256((directory / "config.json").read_bytes())
    weights = hashlib.sha256()
    for file in sorted(directory.glob("*.safetensors")):
        size = file.stat().st_size
        weights.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            for sample in range(_SAMPLES):
                stream.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                weights.update(stream.read(_SAMPLE_BYTES))
    return {**dict(settings), "config.json": config.hexdigest()[:_DIGITS],
            "weights": weights.hexdigest()[:_DIGITS]}
