"""Pulls of models from the hub to the directory of models (``local``): resumed, checked, complete or absent.

    model_info --files, sizes, checksums--> owner--name.part/weft-model.json
    each file:  in the whole model with its checksum --link-->                        owner--name.part/FILE
                else http_get from where FILE.incomplete ends --checksum--> rename --> owner--name.part/FILE
    all of them --fsync, rename--> owner--name/

``huggingface_hub`` has the addresses, the tokens, the redirects and the retries. weft keeps the bytes so far, because
the library's own downloads start again in a new process. A file gets its name once its checksum was right, so a resumed
pull reads no finished file again. After a wrong checksum the file is downloaded once more; then the pull fails with an
error that names it. Another pull of the same model is refused: one process has the lock.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from weft.errors import CheckpointError
from weft.files import finish, sync
from weft.models.hub import FETCHED, NOT_FETCHED, ask_hub, fail, file_of_type
from weft.models.local import (
    INCOMPLETE,
    MANIFEST,
    LocalModel,
    Manifest,
    ModelFile,
    alone,
    damage,
    discard,
    find,
    is_right,
    model_directory,
    part_of,
    place_of,
    read_manifest,
    split_name,
    sweep,
    write_manifest,
)
from weft.units import format_bytes

PIECE_BYTES = 1 << 18
"""Most bytes that a lost connection costs. The client's own pieces have 10 MB, each written when it is complete."""
_FILES_AT_ONCE = 4
_TRIES = 2
"""Downloads of a file whose checksum is wrong."""
_HUB_NAMES_MAX = 10_000
_thread = threading.local()
"""Thread-local ``check``: that of the thread's pull."""
_FILE_BYTES_MAX = 1 << 44


class PullCancelledError(Exception):
    """Error of a pull that is no longer wanted; its files stay for the next one."""


@dataclass(frozen=True, slots=True)
class PullProgress:
    """Progress: ``done_bytes`` of ``total_bytes`` are here, of all files; ``file_bytes`` of ``file``."""

    file: ModelFile
    file_bytes: int
    done_bytes: int
    total_bytes: int
    verb: str


OnPull = Callable[[PullProgress], None]


def pull(
    name: str,
    revision: str | None = None,
    *,
    on_progress: OnPull = lambda progress: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> tuple[LocalModel, bool]:
    """Return the model, and whether anything had to be fetched. ``on_progress`` is called in several threads.

    Raises CheckpointError for files that the hub does not have or deliver, or that the disk has no room for. Raises
    ModelInUseError for a model that is loaded or pulled elsewhere, and PullCancelledError.
    """
    place, manifest = place_of(name), _listed_by_hub(name, revision)
    here = find(name)
    if here is not None and here.state == "whole" and here.manifest.commit == manifest.commit:
        return here, False
    part = part_of(place)
    try:
        part.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{part}: cannot be made: {error.strerror}; WEFT_MODEL_DIR names another directory", param="model"
        ) from None
    with alone(part, name):
        before = read_manifest(part)
        write_manifest(part, manifest)
        if place.is_dir():
            with alone(place, name):  # before hours of download, too
                pass
        checked = () if before is None else before.files
        _Pull(name, manifest, part, place, checked, on_progress, cancelled).run()
        if place.is_dir():
            with alone(place, name):
                discard(place)
        part.rename(place)
    sync(place.parent)
    sweep()
    model = find(name)
    assert model is not None, "it was renamed"
    assert model.state == "whole", "every file had its checksum"
    return model, True


def mended(model: LocalModel) -> LocalModel:
    """Return ``model`` after its checksums were read: a file with a wrong checksum is removed, so that the next pull
    fetches it.
    """
    while damage(model):
        wrong = next(file for file in model.manifest.files if not is_right(model.path / file.path, file))
        with alone(model.path, model.name):
            (model.path / wrong.path).unlink(missing_ok=True)
        looked = find(model.name)
        assert looked is not None
        if looked.state == "damaged":
            return looked
        model = looked
    return model


def _listed_by_hub(name: str, revision: str | None) -> Manifest:
    """Return the manifest of the files to fetch. Raises CheckpointError."""
    import huggingface_hub as hub

    repository, kind = split_name(name)
    info = ask_hub(
        name,
        revision,
        cached=False,
        ask=lambda: hub.HfApi().model_info(repository, revision=revision, files_metadata=True),
    )
    siblings = {sibling.rfilename: sibling for sibling in (info.siblings or ())[:_HUB_NAMES_MAX]}
    if kind:
        wanted = file_of_type(name, revision, list(siblings), kind)
    else:
        wanted = [path for path in siblings if _fits(path, FETCHED) and not _fits(path, [*NOT_FETCHED, MANIFEST])]
        if "config.json" not in wanted:
            types = ", ".join(sorted(path for path in siblings if path.endswith(".gguf"))[:8])
            fail(
                name,
                revision,
                "the hub has it without config.json, so it is not a checkpoint in Hugging Face "
                "format"
                + (f"; one of its GGUF files is named by its type, {name}:Q4_K_M; it has {types}" if types else ""),
            )
    files = [_file(name, siblings[path], flat=bool(kind)) for path in sorted(wanted)]
    folders = {str(parent) for file in files for parent in PurePosixPath(file.path).parents}
    for file in files:
        if file.path in folders:
            raise CheckpointError(
                f"model {name!r}: the hub lists {file.path} as a file and as a folder of others", param="model"
            )
    return Manifest(
        name=name, revision=revision or "main", commit=str(info.sha or ""), pulled_s=time.time(), files=files
    )


def _fits(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _file(name: str, sibling: Any, *, flat: bool) -> ModelFile:
    """Return a file of the manifest. ``sibling``: a file as the hub lists it. ``flat``: without the folders of the
    repository. Raises CheckpointError for a path that leads elsewhere, and for a file without a checksum.
    """
    source = PurePosixPath(sibling.rfilename)
    lfs = sibling.lfs
    sha256 = str(lfs["sha256"] if isinstance(lfs, dict) else lfs.sha256) if lfs else ""
    size = int((lfs["size"] if isinstance(lfs, dict) else lfs.size) if lfs else sibling.size or 0)
    if source.is_absolute() or ".." in source.parts or "\x00" in sibling.rfilename or "\\" in str(source):
        raise CheckpointError(
            f"model {name!r}: the hub lists {sibling.rfilename!r}, which leads out of the directory of the model",
            param="model",
        )
    if not (sha256 or sibling.blob_id) or not 0 <= size <= _FILE_BYTES_MAX:
        raise CheckpointError(
            f"model {name!r}: the hub names no checksum of {sibling.rfilename}, or no size", param="model"
        )
    return ModelFile(
        path=source.name if flat else str(source),
        source=str(source),
        size=size,
        sha256=sha256,
        git_sha1="" if sha256 else str(sibling.blob_id),
    )


class _Pull:
    """Pull of the files of one model into its ``part``. ``checked``: files of an earlier pull, which got their names
    when their checksums were right.
    """

    def __init__(
        self,
        name: str,
        manifest: Manifest,
        part: Path,
        place: Path,
        checked: Sequence[ModelFile],
        on_progress: OnPull,
        cancelled: Callable[[], bool],
    ) -> None:
        self._name, self._manifest, self._part, self._place = name, manifest, part, place
        self._checked = checked
        self._revision = None if manifest.revision == "main" else manifest.revision
        self._on_progress, self._cancelled = on_progress, cancelled
        self._lock = threading.Lock()
        self._bytes = {file.path: 0 for file in manifest.files}
        self._failed = threading.Event()

    def run(self) -> None:
        """Fetch all files. Raises CheckpointError, PullCancelledError."""
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()  # the client's own, of each file
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # otherwise it logs every retry
        self._drop_others()
        missing = [file for file in self._manifest.files if not self._is_here(file)]
        self._check_room(missing)
        with ThreadPoolExecutor(_FILES_AT_ONCE) as threads:
            # The largest first, so that the last download is a short one.
            work = [threads.submit(self._fetch, file) for file in sorted(missing, key=lambda file: -file.size)]
            wait(work, return_when=FIRST_EXCEPTION)
            self._failed.set()  # of no effect when all are done
            errors = [error for fetch in work if (error := fetch.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, PullCancelledError)):
            raise error

    def _drop_others(self) -> None:
        """Delete files of another revision, which this one does not have under that name."""
        listed = {self._part / file.path for file in self._manifest.files}
        for path in [path for path in self._part.rglob("*") if path.is_file() and path.name != MANIFEST]:
            if path.with_name(path.name.removesuffix(INCOMPLETE)) not in listed:
                path.unlink()

    def _is_here(self, file: ModelFile) -> bool:
        """Return whether the file is in the part already, or in the complete model of another revision with the same
        checksum.
        """
        target, other = self._part / file.path, self._place / file.path
        if target.is_file() and target.stat().st_size == file.size and file in self._checked:
            self._came(file, file.size, "present")
            return True
        target.unlink(missing_ok=True)
        if other.is_file() and is_right(other, file):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(other, target)
            except OSError:  # a file system without links
                shutil.copyfile(other, target)
            self._came(file, file.size, "present")
            return True
        return False

    def _check_room(self, missing: Sequence[ModelFile]) -> None:
        present = sum(
            path.stat().st_size for file in missing if (path := self._part / (file.path + INCOMPLETE)).is_file()
        )
        needed, free = sum(file.size for file in missing) - present, shutil.disk_usage(self._part).free
        if needed > free:
            raise CheckpointError(
                f"model {self._name!r} takes {format_bytes(needed)} more, and {model_directory()} has "
                f"{format_bytes(free)} free: make room (weft list, weft rm), or name another disk with "
                "WEFT_MODEL_DIR",
                param="model",
            )

    def _fetch(self, file: ModelFile) -> None:
        self._check_wanted()
        unfinished = self._part / (file.path + INCOMPLETE)
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(_TRIES):
            self._download(file, unfinished)
            checked = 0

            def on_bytes(count: int) -> None:
                nonlocal checked
                checked += count
                self._check_wanted()
                self._on_progress(self._progress(file, checked, "checking"))

            if is_right(unfinished, file, on_bytes):
                unfinished.rename(self._part / file.path)
                return
            unfinished.unlink(missing_ok=True)
        raise CheckpointError(
            f"model {self._name!r}: {file.path} came {_TRIES} times with another checksum "
            f"than the hub names ({file.digest})",
            param="model",
        )

    def _download(self, file: ModelFile, unfinished: Path) -> None:
        import huggingface_hub as hub
        from huggingface_hub import constants
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils._headers import build_hf_headers

        url = hub.hf_hub_url(split_name(self._name)[0], file.source, revision=self._manifest.commit)
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        constants.DOWNLOAD_CHUNK_SIZE = min(constants.DOWNLOAD_CHUNK_SIZE, PIECE_BYTES)
        begin = unfinished.stat().st_size if unfinished.is_file() else 0
        if begin > file.size:
            begin = 0
        with unfinished.open("r+b" if begin else "wb") as raw:
            raw.seek(begin)
            writer = _Writer(raw, lambda received: self._came(file, received, "pulling"), file.size)
            if begin < file.size:
                _thread.check = self._check_wanted
                _check_each_try()
                ask_hub(
                    self._name,
                    self._revision,
                    cached=False,
                    ask=lambda: http_get(url, cast("BinaryIO", writer), resume_size=begin, headers=headers),
                )
            finish(raw)

    def _came(self, file: ModelFile, received: int, verb: str) -> None:
        self._check_wanted()
        with self._lock:
            self._bytes[file.path] = received
        self._on_progress(self._progress(file, received, verb))

    def _check_wanted(self) -> None:
        if self._failed.is_set() or self._cancelled():
            raise PullCancelledError

    def _progress(self, file: ModelFile, received: int, verb: str) -> PullProgress:
        with self._lock:
            done = sum(self._bytes.values())
        return PullProgress(file, received, done, self._manifest.total_bytes, verb)


def _check_each_try() -> None:
    """Check for a cancelled pull at each request. The process has one client of the hub, which calls listeners at each
    request, in the thread that makes it. Before huggingface_hub 1.0 the client has no listeners, and a cancelled pull
    waits for all tries.
    """
    import huggingface_hub as hub

    hooks: dict[str, list[Callable[[object], None]]] = getattr(hub.get_session(), "event_hooks", {"request": []})
    if _check_thread not in hooks["request"]:
        hooks["request"].append(_check_thread)


def _check_thread(request: object) -> None:
    check = getattr(_thread, "check", None)
    if check is not None:
        check()


class _Writer:
    """File that ``http_get`` writes to, which reports its position. More bytes than were listed are an error: a server
    that never ends must not fill a disk.
    """

    def __init__(self, raw: BinaryIO, came: Callable[[int], None], size: int) -> None:
        self._raw, self._arrived, self._size = raw, came, size
        self.tell, self.seek, self.truncate, self.name = raw.tell, raw.seek, raw.truncate, raw.name

    def write(self, data: bytes) -> int:
        count = self._raw.write(data)
        if self._raw.tell() > self._size:
            raise CheckpointError(
                f"{Path(self.name).name}: more than the {self._size} bytes came that the hub lists", param="model"
            )
        self._arrived(self._raw.tell())
        return count
