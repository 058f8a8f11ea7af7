"""The flags of ``--store`` as ``StoreOptions``. Every start checks them; ``prefix_store`` opens the store.

An engine without a store never imports the modules of one.
"""

from __future__ import annotations

from weft.config import EngineConfig
from weft.errors import ConfigError
from weft.store.options import StoreOptions
from weft.units import parse_bytes


def check_store_flags(config: EngineConfig) -> None:
    """Raises ConfigError for a size that cannot be read."""
    store_options(config)


def store_options(config: EngineConfig) -> StoreOptions:
    size = None if config.store_size is None else parse_bytes(config.store_size, flag="--store-size")
    rate = parse_bytes(config.store_write.removesuffix("/s"), flag="--store-write")
    if rate <= 0:
        raise ConfigError(f"--store-write is {config.store_write!r}; it must be above 0 bytes a second",
                          param="--store-write")
    reserve = parse_bytes(config.store_reserve, flag="--store-reserve")
    return StoreOptions(capacity_bytes=size, write_bytes_per_second=float(rate), reserve_bytes=reserve,
                        accept_inexact=not config.exact)
