"""``open_store``: a store for one model, at a directory.

Rejected: a class with many constructors. A place is a text, as ``--store`` takes it.
"""

from __future__ import annotations

from pathlib import Path

from weft.errors import ConfigError
from weft.store.directory_store import DirectoryStore
from weft.store.disk import OsDisk
from weft.store.identity import NamespaceIdentity
from weft.store.opening import PARAM, open_directory, write_namespace
from weft.store.options import StoreOptions


def open_store(directory: Path, identity: NamespaceIdentity, options: StoreOptions, *,
               disk: OsDisk | None = None) -> DirectoryStore:
    """Raises ConfigError that names the directory and what to change. A directory that another process
    writes to, or without permission to write, is opened for reading; ``stats().notes`` says so."""
    disk = disk or OsDisk()
    opened = open_directory(directory, disk)
    if opened.writable:
        try:
            write_namespace(directory, disk, identity)
        except OSError as error:
            opened.close()
            raise ConfigError(f"--store {directory}: {error.strerror}", param=PARAM) from None
    return DirectoryStore(opened, identity, options)
