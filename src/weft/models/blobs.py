"""Files that Ollama's clients upload by their digest, and the models that are made of them.

    POST /api/blobs/sha256:HEX --Upload--> .blobs/sha256-HEX.TOKEN.part --digest is right--> .blobs/sha256-HEX
    POST /api/create {"files": {...}} --create_model--> NAME/model.gguf, weft-model.json: as if it had been pulled

``.blobs`` is in the directory of models (``local``). A model links to the bytes of its file, so the upload may go:
one that is a day old does, when the next begins. An upload holds a lock of its file, so one that a killed server left
goes then too. Bytes, uploads at once and free disk are bounded (law L11).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from weft.errors import CheckpointError, RequestError
from weft.files import sync
from weft.models.hub import local_checkpoint
from weft.models.local import (
    PART,
    LocalModel,
    Manifest,
    ModelFile,
    alone,
    discard,
    find,
    model_directory,
    part_of,
    place_of,
    write_manifest,
)
from weft.units import format_bytes

_FOLDER = ".blobs"
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_AGE_MAX_S = 86_400.0
_FREE_BYTES = 1 << 28
"""Room of the disk that no upload takes."""
_FILE = "model.gguf"


class BlobError(RequestError):
    """An upload does not fit."""

    status = 413


def read_digest(text: str, *, param: str) -> str:
    """Return the hexadecimal part of ``sha256:HEX``. Raises RequestError."""
    match = _DIGEST.fullmatch(text)
    if match is None:
        raise RequestError(
            f"{param} is {text[:100]!r}; it is sha256: and 64 hexadecimal digits", param=param, code="invalid_digest"
        )
    return match.group(1)


def blob(digest: str) -> Path | None:
    """Return the uploaded file, None where there is none."""
    path = _path(digest)
    return path if path.is_file() else None


class Upload:
    """A file that comes in pieces; ``close`` drops it unless ``finish`` has kept it."""

    def __init__(self, digest: str, bytes_max: int) -> None:
        """Raises BlobError for a disk that takes nothing."""
        self._digest, self._bytes_max = digest, bytes_max
        self._hash, self._size = hashlib.sha256(), 0
        folder = model_directory() / _FOLDER
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _sweep(folder)
            self._part = folder / f"{_path(digest).name}.{token_hex(4)}{PART}"
            self._file = os.fdopen(
                os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb"
            )
        except OSError as error:
            raise _unwritten(error) from None
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def check_size(self, size: int) -> None:
        """Raises BlobError for a file of ``size`` bytes that is over the limit, or that the disk has no room for."""
        if size > self._bytes_max:
            raise BlobError(
                f"the file has {format_bytes(size)} or more; the limit is {format_bytes(self._bytes_max)} "
                "(limits.blob_size)",
                param="limits.blob_size",
                code="blob_too_large",
            )
        free = shutil.disk_usage(self._part.parent).free
        if size - self._size > free - _FREE_BYTES:
            raise BlobError(
                f"the file has {format_bytes(size)}, and {self._part.parent} has {format_bytes(free)} free",
                code="disk_full",
            )

    def write(self, data: bytes) -> None:
        """Raises BlobError."""
        self.check_size(self._size + len(data))
        try:
            self._file.write(data)
        except OSError as error:
            raise _unwritten(error) from None
        self._hash.update(data)
        self._size += len(data)

    def finish(self) -> None:
        """Raises RequestError for bytes with another digest, and BlobError."""
        if self._hash.hexdigest() != self._digest:
            raise RequestError(
                f"the file has the digest sha256:{self._hash.hexdigest()}, and not the one that the path names",
                param="digest",
                code="digest_mismatch",
            )
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._part.rename(_path(self._digest))
        except OSError as error:
            raise _unwritten(error) from None

    def close(self) -> None:
        self._part.unlink(missing_ok=True)
        with suppress(OSError):
            self._file.close()


def create_model(name: str, digest: str) -> LocalModel:
    """Make a model on disk of an uploaded GGUF file, in place of one with that name. Raises CheckpointError,
    RequestError, ModelInUseError."""
    source = blob(digest)
    if source is None:
        raise RequestError(
            f"files names sha256:{digest}, which was not uploaded: POST /api/blobs/sha256:{digest} sends it",
            param="files",
            code="blob_not_found",
        )
    place = place_of(name)
    part = part_of(place)
    try:
        part.mkdir(parents=True, exist_ok=True)
        with alone(part, name):
            (part / _FILE).unlink(missing_ok=True)
            try:
                os.link(source, part / _FILE)
            except OSError:  # a file system without links
                shutil.copyfile(source, part / _FILE)
            file = ModelFile(path=_FILE, source=_FILE, size=source.stat().st_size, sha256=digest)
            write_manifest(part, Manifest(name=name, revision="", commit=digest, pulled_s=time.time(), files=[file]))
            try:
                local_checkpoint(part / _FILE)
            except CheckpointError:
                discard(part)
                raise
            if place.is_dir():
                with alone(place, name):
                    discard(place)
            part.rename(place)
        sync(place.parent)
    except OSError as error:
        raise _unwritten(error) from None
    model = find(name)
    assert model is not None, "it was renamed"
    return model


def _path(digest: str) -> Path:
    return model_directory() / _FOLDER / f"sha256-{digest}"


def _unwritten(error: OSError) -> BlobError:
    return BlobError(f"{model_directory()}: {error.strerror}; WEFT_MODEL_DIR names another directory", code="disk_full")


def _sweep(folder: Path) -> None:
    """Remove uploads of killed servers, and those that are a day old."""
    for path in folder.iterdir():
        if path.suffix == PART:
            with suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # one that comes is locked
                path.unlink()
        elif path.stat().st_mtime < time.time() - _AGE_MAX_S:
            path.unlink(missing_ok=True)
