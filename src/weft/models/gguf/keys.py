"""Typed reading of a GGUF file's keys. Each error names the file, the key, the value, and the valid values.

    GgufKeys("…/x.gguf": general.architecture "lfm2")       integer("block_count") is the key lfm2.block_count

Some keys have one number for all layers or an array with one for each; ``by_layer`` gives the array.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any, NoReturn

import numpy as np

from weft.errors import CheckpointError
from weft.families.config_keys import INTEGER_MAX
from weft.models.gguf.header import FileTensor, Header
from weft.models.gguf.known_keys import NEUTRAL, NEUTRAL_OF_TOKENIZER, is_harmless, is_known_of_tokenizer

_BLOCK, _HEAD = re.compile(r"blk\.(\d+)\."), re.compile(r"blk\.(\d+)\.nextn\.")
_SHOWN_CHARS = 120
_NONE = object()


def _numbers(pattern: re.Pattern[str], names: Iterable[str]) -> set[int]:
    return {int(match[1]) for match in map(pattern.match, names) if match}


class GgufKeys:
    """Keys of one architecture, and the names of the file's tensors."""

    def __init__(self, header: Header, architecture: str) -> None:
        self.header, self.architecture = header, architecture
        self.seen: set[str] = set()
        """Names of keys that were asked for."""

    def get(self, name: str, default: Any = None) -> Any:
        self.seen.add(name)
        return self.header.keys.get(f"{self.architecture}.{name}", default)

    def integer(self, name: str, default: int | None = None, *, least: int = 0) -> int:
        """Return an integer key. ``default`` None means required. The value of an array is its largest number."""
        value = self.get(name, default)
        if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iu":
            value = int(value.max())
        if not isinstance(value, int) or isinstance(value, bool):
            self.fail(name, value, "it must be a whole number")
        if not least <= value <= INTEGER_MAX:
            self.fail(name, value, f"it must be from {least} to {INTEGER_MAX}")
        return value

    def varies(self, name: str) -> bool:
        """Return whether the key has a number for each layer."""
        return isinstance(self.get(name), np.ndarray)

    def by_layer(self, name: str, layers: int) -> list[int]:
        """Return a number of each layer, from an array or from one number for all."""
        value = self.get(name)
        if not isinstance(value, np.ndarray):
            return [self.integer(name, least=1)] * layers
        self.integer(name, least=1)
        if value.size != layers:
            self.fail(name, value, f"the file has {layers} layers")
        return [int(number) for number in value]

    def integers(self, name: str, count: int = 0) -> list[int]:
        """Return the first ``count`` numbers of an array (0: all), exact in 64 bits. None is below 0."""
        value = self.get(name)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or value.size < count:
            self.fail(name, value, f"it must be a list of {count or 'some'} whole numbers")
        numbers = [int(number) for number in value[: count or None]]
        if min(numbers, default=0) < 0:
            self.fail(name, value, "its numbers must not be below 0")
        return numbers

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            self.fail(name, value, "it must be a number")
        return shortest(float(value))

    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            self.fail(name, value, "it must be true or false")
        return value

    def tensor(self, name: str) -> FileTensor | None:
        return self.header.tensors.get(name)

    def layers_with(self, part: str) -> list[bool]:
        """Return, for each layer, whether it has the tensor ``part``."""
        return [f"blk.{layer}.{part}" in self.header.tensors for layer in range(self.layers)]

    @property
    def layers(self) -> int:
        """Number of layers, without the heads that predict further tokens, which are blocks after the last layer. A
        file may count heads that the converter left out, so only blocks with tensors other than those of a head are
        layers.
        """
        blocks = self.integer("block_count", least=1)
        first = blocks - min(self.integer("nextn_predict_layers", 0), blocks - 1)
        heads = range(first, blocks)
        return next((block for block in heads if block in self._heads or block not in self._blocks), blocks)

    @cached_property
    def _blocks(self) -> set[int]:
        """Numbers of blocks that have tensors."""
        return _numbers(_BLOCK, self.header.tensors)

    @cached_property
    def _heads(self) -> set[int]:
        """Numbers of blocks that predict further tokens."""
        return _numbers(_HEAD, self.header.tensors)

    def refuse_unknown(self) -> None:
        """Raise CheckpointError for a key that may change answers and that the architecture did not ask for."""
        begin, of_tokenizer = f"{self.architecture}.", "tokenizer."
        for key, value in self.header.keys.items():
            name = key.removeprefix(begin)
            if key.startswith(begin) and name not in self.seen:
                self._refuse(key, value, NEUTRAL.get(name, _NONE), known=is_harmless(name))
            elif key.startswith(of_tokenizer):
                name = key.removeprefix(of_tokenizer)
                self._refuse(key, value, NEUTRAL_OF_TOKENIZER.get(name, _NONE), known=is_known_of_tokenizer(name))
        if (kind := self.header.keys.get("general.type", "model")) != "model":
            raise CheckpointError(f"{self.header.path}: general.type is {kind!r}; models are served", param="model")

    def _refuse(self, key: str, value: object, neutral: object, *, known: bool) -> None:
        if known:
            return
        if neutral is _NONE:
            self._fail(key, value, "weft does not know this key, which may change answers")
        if np.any(np.asarray(value) != neutral):
            self._fail(key, value, f"of this architecture only {neutral} is served")

    def fail(self, name: str, value: object, reason: str) -> NoReturn:
        self._fail(f"{self.architecture}.{name}", value, reason)

    def _fail(self, key: str, value: object, reason: str) -> NoReturn:
        shown = repr(value)
        shown = shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}..."
        raise CheckpointError(
            f"{self.header.path}: {key} is {'missing' if value is None else shown}: {reason}", param="model"
        )


def shortest(value: float) -> float:
    """Return the decimal number that a float32 of a file was: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if np.isfinite(value) else value
