"""Models on this machine's disk: weft's own directory, separate from the hub's cache.

    $WEFT_MODEL_DIR, or ~/.local/share/weft/models
        owner--name/            weft-model.json, config.json, *.safetensors       owner/name
        owner--name@Q4_K_M/     weft-model.json, name-Q4_K_M.gguf                 owner/name:Q4_K_M
        owner--name.part/       weft-model.json, files so far, FILE.incomplete    a pull that goes on
        .trash-.../             a model that is being removed

A directory without ``.part`` is complete: ``pulling`` renames it once every checksum was right, and a removal renames
it before deleting. So no half-written directory has the name of a model. ``weft-model.json`` lists the files with
sizes and checksums, and every lookup of a model compares the sizes.

A process that has a model loaded holds a shared lock (flock) of its directory. A removal needs the exclusive lock. The
kernel releases a lock when its process ends, for any reason. Only a directory with a ``weft-model.json`` is ever
removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Literal

import msgspec

from weft.errors import CheckpointError, UserError
from weft.files import write_whole
from weft.units import format_bytes

DIRECTORY_VARIABLE = "WEFT_MODEL_DIR"
MANIFEST = "weft-model.json"
PART = ".part"
INCOMPLETE = ".incomplete"
_TRASH = ".trash-"
_READ_BYTES = 1 << 20
_KIND = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_REPOSITORY = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)


class ModelFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a model. ``path``: in the directory of the model. ``source``: in the repository. ``sha256``: of the
    content; ``git_sha1``: of a small file, as git makes it.
    """

    path: str
    source: str
    size: int
    sha256: str = ""
    git_sha1: str = ""

    @property
    def digest(self) -> str:
        return f"sha256:{self.sha256}" if self.sha256 else f"sha1:{self.git_sha1}"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Manifest of a pulled model. ``revision``: as requested; ``commit``: the commit of that revision at the time."""

    name: str
    revision: str
    commit: str
    pulled_s: float
    files: list[ModelFile]

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on disk. ``held_bytes``: on disk. ``problem``: of a damaged model, in words."""

    name: str
    path: Path
    manifest: Manifest
    state: Literal["whole", "partial", "damaged"]
    held_bytes: int
    problem: str = ""


class ModelInUseError(UserError):
    """Error for a model that a running process has loaded; the message names the process."""

    status = 409


def model_directory() -> Path:
    """Return the directory of pulled models; it need not exist."""
    named = os.environ.get(DIRECTORY_VARIABLE)
    if named:
        return Path(named).expanduser()
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "weft" / "models"


def split_name(name: str) -> tuple[str, str]:
    """Return (repository, type of GGUF file or ""). Raises CheckpointError for a string that no model can have as a
    name.
    """
    repository, colon, kind = name.partition(":")
    if (
        not _REPOSITORY.fullmatch(repository)
        or "--" in repository
        or ".." in repository
        or (colon and not _KIND.fullmatch(kind))
    ):
        raise CheckpointError(
            f"{name[:200]!r} is not a valid model name: names are owner/name, or owner/name:Q4_K_M for one of its "
            "GGUF files",
            param="model",
        )
    return repository, kind


def place_of(name: str) -> Path:
    """Return the directory of the complete model. Raises CheckpointError."""
    repository, kind = split_name(name)
    return model_directory() / (repository.replace("/", "--") + (f"@{kind}" if kind else ""))


def part_of(place: Path) -> Path:
    return place.with_name(place.name + PART)


def find(name: str) -> LocalModel | None:
    """Return the model, complete, damaged or partial; None if there is none."""
    with suppress(CheckpointError):
        place = place_of(name)
        return _look(place) or _look(part_of(place))
    return None


def listed() -> list[LocalModel]:
    """Return all models by name, with a partial update of a complete model as a separate entry."""
    directory = model_directory()
    if not directory.is_dir():
        return []
    looked = (_look(path) for path in directory.iterdir() if not path.name.startswith("."))
    return sorted((model for model in looked if model is not None), key=lambda model: (model.name, model.state))


def whole_models() -> dict[str, LocalModel]:
    """Return the models that can be loaded, by name."""
    return {model.name: model for model in listed() if model.state == "whole"}


def resolve_local(name: str, revision: str | None) -> Path | None:
    """Return the directory of a complete model; None if this machine has none of that name and revision. Raises
    CheckpointError for one that is damaged or half pulled.
    """
    model = find(name)
    if model is None or (revision is not None and revision not in (model.manifest.revision, model.manifest.commit)):
        return None
    if model.state == "partial":
        total = format_bytes(model.manifest.total_bytes)
        raise CheckpointError(
            f"model {name!r}: {format_bytes(model.held_bytes)} of {total} are here; "
            f"`weft pull {name}` goes on with it, `weft rm {name}` removes it",
            param="model",
        )
    if model.state == "damaged":
        raise CheckpointError(f"model {name!r} is damaged: {model.problem}; `weft pull {name}` mends it", param="model")
    return model.path


def damage(model: LocalModel, on_bytes: Callable[[int], None] = lambda count: None) -> str:
    """Return the fault in the bytes of a complete model, "" if there is none. ``on_bytes``: called with counts that
    were read.
    """
    for file in model.manifest.files:
        if not is_right(model.path / file.path, file, on_bytes):
            return f"{file.path} does not have the checksum that the hub names"
    return ""


def is_right(path: Path, file: ModelFile, on_bytes: Callable[[int], None] = lambda count: None) -> bool:
    """Return whether ``path`` has the size and checksum of ``file``."""
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\x00" % file.size, usedforsecurity=False)
    with path.open("rb") as stream:
        while part := stream.read(_READ_BYTES):
            digest.update(part)
            on_bytes(len(part))
    return digest.hexdigest() == (file.sha256 or file.git_sha1)


def remove(name: str, *, force: bool = False) -> int:
    """Remove the model, with the files of an unfinished pull; return the bytes freed. ``force``: also one that is
    loaded. Raises CheckpointError, ModelInUseError.
    """
    place = place_of(name)
    models = [model for model in (_look(place), _look(part_of(place))) if model is not None]
    if not models:
        present = ", ".join(model.name for model in listed()) or "no model"
        raise CheckpointError(f"there is no model {name!r} in {model_directory()}: it has {present}", param="model")
    freed = 0
    for model in models:
        with alone(model.path, name, force=force):
            freed += model.held_bytes
            discard(model.path)
    sweep()
    return freed


def discard(path: Path) -> None:
    """Remove a directory: rename it first, which is atomic, then delete the files."""
    trash = path.with_name(f"{_TRASH}{token_hex(8)}")
    path.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def sweep() -> None:
    """Remove the leftovers of a removal that was killed."""
    for trash in model_directory().glob(f"{_TRASH}*"):
        shutil.rmtree(trash, ignore_errors=True)


class LoadedLock:
    """Lock of a loaded model: until ``close``, or the end of the process, it is not removed."""

    def __init__(self, name: str | None) -> None:
        """Take the lock; no effect for a model outside of weft's directory."""
        self._fd: int | None = None
        model = None if name is None or Path(name).expanduser().exists() else find(name)
        if model is not None and model.state != "partial":
            self._fd = os.open(model.path, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):  # being removed, or a file system without locks
                fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    __del__ = close


@contextmanager
def alone(path: Path, name: str, *, force: bool = False) -> Iterator[None]:
    """Hold the directory exclusively, so that no other process loads, pulls or removes the model. Raises
    ModelInUseError if one does already.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not force:
                raise ModelInUseError(
                    f"model {name!r} is {_in_use(path)}; stop that first, or --force",
                    param="model",
                    code="model_in_use",
                ) from None
        except OSError:  # a file system without locks: NFS wants a file that is open for writing
            pass
        yield
    finally:
        os.close(fd)


def holders(path: Path) -> list[int]:
    """Return the processes that hold a lock of the directory, as far as the kernel tells."""
    try:
        inode, lines = path.stat().st_ino, Path("/proc/locks").read_text().splitlines()
    except OSError:
        return []
    rows = (line.split() for line in lines)
    return sorted(
        {int(row[4]) for row in rows if len(row) > 5 and row[1] == "FLOCK" and row[5].rpartition(":")[2] == str(inode)}
    )


def _in_use(path: Path) -> str:
    verb = "being pulled" if path.name.endswith(PART) else "loaded"
    pids = ", ".join(map(str, holders(path)))
    return f"{verb} by process {pids}" if pids else f"{verb} by another process"


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest completely or not at all."""
    write_whole(directory / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))


def read_manifest(directory: Path) -> Manifest | None:
    """Return the manifest, None for a directory that is not a pulled model."""
    try:
        return msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError):
        return None


def _look(path: Path) -> LocalModel | None:
    manifest = read_manifest(path)
    if manifest is None:
        return None
    present_bytes, problem = 0, ""
    for file in manifest.files:
        sizes = [
            candidate.stat().st_size
            for candidate in (path / file.path, path / (file.path + INCOMPLETE))
            if candidate.is_file()
        ]
        present_bytes += sum(sizes)
        if not problem and sizes[:1] != [file.size]:
            problem = f"{file.path} has {sizes[0]} of {file.size} bytes" if sizes else f"{file.path} is missing"
    if path.name.endswith(PART):
        return LocalModel(manifest.name, path, manifest, "partial", present_bytes)
    return LocalModel(manifest.name, path, manifest, "damaged" if problem else "whole", present_bytes, problem)
