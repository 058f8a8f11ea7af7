"""Files that Ollama's clients upload by digest, and the models that are made of such files.

    POST /api/blobs/sha256:HEX --Upload--> .blobs/sha256-HEX.TOKEN.part --digest is right--> .blobs/sha256-HEX
    POST /api/create {"files": {...}} --create_model--> NAME/model.gguf, weft-model.json: as if it had been pulled
                     all parts of a split model           NAME/*-0000N-of-0000M.gguf
                     a projector                          NAME/mmproj.gguf, which is kept and not read

``.blobs`` is in the directory of models (``local``). A model links to the bytes of its file, so the upload may be
deleted: each new upload deletes those that are a day old. A running upload holds a lock of its file, so uploads of
killed servers are deleted too. Bytes, uploads at once and free disk are bounded (law L11).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from weft.errors import CheckpointError, RequestError
from weft.files import sync
from weft.models.gguf.header import is_projector
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
"""Bytes of the disk that uploads leave free."""
_FILE, PROJECTOR = "model.gguf", "mmproj.gguf"
_PART_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,200}-\d{5}-of-\d{5}\.gguf", re.ASCII)
FILES_MAX = 100
"""Most parts of one uploaded model."""


class BlobError(RequestError):
    """Error of an upload that does not fit."""

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
    """Return the uploaded file, None if there is none."""
    path = _path(digest)
    return path if path.is_file() else None


class Upload:
    """An uploaded file that comes in pieces; ``close`` drops it unless ``finish`` has kept it."""

    def __init__(self, digest: str, bytes_max: int) -> None:
        """Begin the upload. Raises BlobError if the disk cannot be written."""
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
        """Raise BlobError for a file of ``size`` bytes that is over the limit, or that the disk has no room for."""
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
        """Write the next piece. Raises BlobError."""
        self.check_size(self._size + len(data))
        try:
            self._file.write(data)
        except OSError as error:
            raise _unwritten(error) from None
        self._hash.update(data)
        self._size += len(data)

    def finish(self) -> None:
        """Keep the file under its digest. Raises RequestError for bytes with another digest, and BlobError."""
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


def create_model(name: str, digests: Mapping[str, str]) -> LocalModel:
    """Make a model on disk from uploaded GGUF files, replacing a model with that name. ``digests``: by the client's
    names of the files. Raises CheckpointError, RequestError, ModelInUseError.
    """
    sources = _named_sources(digests)
    place = place_of(name)
    part = part_of(place)
    try:
        part.mkdir(parents=True, exist_ok=True)
        with alone(part, name):
            for left in part.glob("*.gguf"):
                left.unlink()
            files = [_placed(part, file, source, digest) for file, (source, digest) in sorted(sources.items())]
            commit = hashlib.sha256(" ".join(file.sha256 for file in files).encode()).hexdigest()
            write_manifest(part, Manifest(name=name, revision="", commit=commit, pulled_s=time.time(), files=files))
            try:
                local_checkpoint(part)
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


def _named_sources(digests: Mapping[str, str]) -> dict[str, tuple[Path, str]]:
    """Return the uploaded files and their digests by new names. Raises RequestError, CheckpointError."""
    models: dict[str, tuple[Path, str]] = {}
    projectors: list[tuple[Path, str]] = []
    for name, digest in digests.items():
        source = blob(digest)
        if source is None:
            raise RequestError(
                f"files names sha256:{digest}, which was not uploaded: POST /api/blobs/sha256:{digest} sends it",
                param="files",
                code="blob_not_found",
            )
        if len(digests) > 1 and is_projector(source):
            projectors.append((source, digest))
        else:
            models[Path(name).name] = source, digest
    if len(projectors) > 1 or not models:
        raise RequestError(f"files names {len(projectors)} projectors; a model has one at most", param="files")
    if len(models) == 1:
        models = {_FILE: models.popitem()[1]}
    other = next((name for name in models if not _PART_NAME.fullmatch(name)), None)
    if len(models) > 1 and other is not None:
        raise RequestError(
            f"files names {len(models)} files of one model, whose names end in -00001-of-{len(models):05}.gguf and so "
            f"on; {other[:200]!r} does not",
            param="files",
        )
    if projectors:
        models[PROJECTOR] = projectors[0]
    return models


def _placed(directory: Path, name: str, source: Path, digest: str) -> ModelFile:
    try:
        os.link(source, directory / name)
    except OSError:  # a file system without links
        shutil.copyfile(source, directory / name)
    return ModelFile(path=name, source=name, size=source.stat().st_size, sha256=digest)


def _path(digest: str) -> Path:
    return model_directory() / _FOLDER / f"sha256-{digest}"


def _unwritten(error: OSError) -> BlobError:
    return BlobError(f"{model_directory()}: {error.strerror}; WEFT_MODEL_DIR names another directory", code="disk_full")


def _sweep(folder: Path) -> None:
    """Remove uploads that are a day old or of killed servers."""
    for path in folder.iterdir():
        if path.suffix == PART:
            with suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held while an upload comes
                path.unlink()
        elif path.stat().st_mtime < time.time() - _AGE_MAX_S:
            path.unlink(missing_ok=True)
