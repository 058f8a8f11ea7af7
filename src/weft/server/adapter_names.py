"""The adapters that a server knows by name: values of ``model`` in a request, next to the model's own names.

    "name" -> Adapter (directory, digest)        bound at the start (--lora), and by operators later

A name is bound to the sha256 of files. Other files under the same name, or the same path, are another
adapter: requests that are running end with the first one, later ones begin with the second and find nothing
of the first in any cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.adapters import Adapter
from weft.errors import ConfigError, UnknownModelError


class AdapterNames:
    """A table from name to adapter."""

    def __init__(self) -> None:
        self._by_name: dict[str, Adapter] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def start_with(self, adapters: Sequence[Adapter], model_names: Sequence[str]) -> None:
        """Bind the names of ``--lora``. Raise ConfigError for a name that the model has."""
        for adapter in adapters:
            if adapter.name in model_names:
                raise ConfigError(
                    f"--lora {adapter.name} has a name of the model itself; choose another", param="--lora"
                )
            self._by_name[adapter.name] = adapter

    def find(self, name: str) -> Adapter | None:
        return self._by_name.get(name)

    def bind(self, adapter: Adapter) -> None:
        self._by_name[adapter.name] = adapter

    def release(self, name: str) -> Adapter:
        """Remove a name and return its adapter. Raise UnknownModelError."""
        if name not in self._by_name:
            raise UnknownModelError(f"there is no adapter {name[:200]!r} here", param="lora_name")
        return self._by_name.pop(name)

    def digests(self) -> set[str]:
        return {adapter.digest for adapter in self._by_name.values()}
