"""Keys of the files next to config.json that weft does not know, reported at the start.

The readers (``added_tokens``, ``images.settings``) raise errors for known keys that are not served.
``models.generation`` reports settings that transformers' ``generate`` applies and weft does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from weft.families.known_keys import (
    PREPROCESSOR_CONFIG,
    SPECIAL_TOKENS,
    TOKENIZER_CONFIG,
    VIDEO_PREPROCESSOR_CONFIG,
    unknown_line,
)
from weft.files import read_json

_WHOLE = (TOKENIZER_CONFIG, SPECIAL_TOKENS, PREPROCESSOR_CONFIG, VIDEO_PREPROCESSOR_CONFIG)
_NESTED = {"image_processor": PREPROCESSOR_CONFIG, "video_processor": VIDEO_PREPROCESSOR_CONFIG}
"""Objects in processor_config.json that replace separate files."""


def unknown_keys(directory: Path) -> Iterator[str]:
    """Yield a line for each file with keys that weft does not know. Raise CheckpointError for a file that is not
    JSON."""
    for name in _WHOLE:
        if (directory / name).is_file() and (line := unknown_line(name, read_json(directory / name))):
            yield line
    path = directory / "processor_config.json"
    outer = read_json(path) if path.is_file() else {}
    for name, file in _NESTED.items():
        inner = outer.get(name)
        if isinstance(inner, Mapping) and (line := unknown_line(file, inner)):
            yield line.replace(file, f"{name} of {path.name}")
