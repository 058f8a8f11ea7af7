"""``open_store``: a store for one model, at a directory or at a bucket.

    /data/prefixes      a directory                                     DirectoryStore
    s3://bucket/prefix  a bucket, gs:// az:// file:// alike, with a     TieredStore
                        directory as a cache in front of it

The start asks a bucket once. One that does not answer is no error, unless ``required``: the directory serves
until it does, and ``stats().notes`` says what is wrong.

Rejected: a class with many constructors. A place is a text, as ``--store`` takes it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from weft.errors import ConfigError
from weft.store.bucket import Bucket, is_bucket
from weft.store.directory_store import DirectoryStore
from weft.store.disk import OsDisk
from weft.store.identity import NamespaceIdentity
from weft.store.opening import PARAM, StoreOptions, open_directory, write_namespace
from weft.store.tiered_store import TieredStore

CACHE_FOLDER = "~/.cache/weft/store"


def open_store(location: str | Path, identity: NamespaceIdentity, options: StoreOptions, *,
               disk: OsDisk | None = None) -> DirectoryStore | TieredStore:
    """Raises ConfigError that names the place and what to change. A directory that another process writes
    to, or without permission to write, is opened for reading; ``stats().notes`` says so."""
    if not is_bucket(str(location)):
        return open_local(Path(location).expanduser(), identity, options, disk=disk)
    bucket = Bucket(str(location))
    fault = bucket.check()
    if fault and options.required:
        raise ConfigError(f"--store {location} does not answer: {fault}; without --store-required the server "
                          "starts all the same", param=PARAM)
    local = open_local(cache_directory(str(location), options), identity, options, disk=disk)
    return TieredStore(local, bucket, refresh_s=options.refresh_s)


def cache_directory(location: str, options: StoreOptions) -> Path:
    """The directory in front of a bucket: one for each location."""
    if options.cache_directory is not None:
        return Path(options.cache_directory).expanduser()
    return Path(CACHE_FOLDER).expanduser() / hashlib.sha256(location.encode()).hexdigest()[:16]


def open_local(directory: Path, identity: NamespaceIdentity, options: StoreOptions, *,
               disk: OsDisk | None = None) -> DirectoryStore:
    disk = disk or OsDisk()
    opened = open_directory(directory, disk)
    if opened.writable:
        try:
            write_namespace(directory, disk, identity)
        except OSError as error:
            opened.close()
            raise ConfigError(f"--store {directory}: {error.strerror}", param=PARAM) from None
    return DirectoryStore(opened, identity, options)
