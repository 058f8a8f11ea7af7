"""Reading of untrusted files of a checkpoint: only inside the directory, bounded, with clear errors.

    directory/config.json ---- a plain file there                      read, up to its bound
                          ---- a link to a file of the directory       read
                          ---- a link out of it                        refused
                          ---- a link into the hub cache's own blobs   read: snapshots/X/f -> blobs/H

The bounds limit memory: a text is never longer than its limit, and JSON is never deeper than any real file needs. A
file that is missing, not text, not JSON, too long or too deep is a CheckpointError that names it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from weft.errors import CheckpointError
from weft.units import format_bytes

JSON_DEPTH_MAX = 64
"""Most levels of arrays and objects; published configurations and tokenizers have less than twenty."""
CONFIG_BYTES_MAX = 16 << 20
INDEX_BYTES_MAX = 256 << 20
TOKENIZER_BYTES_MAX = 256 << 20
TEMPLATE_BYTES_MAX = 4 << 20


def inside(path: Path) -> Path:
    """Return ``path`` if it is a file inside its directory.

    Raise CheckpointError if it is missing or a link out of the directory.
    """
    try:
        real, home = path.resolve(strict=True), path.parent.resolve()
    except (OSError, RuntimeError):  # RuntimeError: a loop of links
        raise CheckpointError(f"{path}: the file is missing", param="model") from None
    homes = [home]
    if home.parent.name == "snapshots":  # the hub cache: models--owner--name/{snapshots/REVISION,blobs}
        homes.append(home.parent.parent / "blobs")
    if not any(real.is_relative_to(root) for root in homes):
        raise CheckpointError(
            f"{path}: is a link out of the checkpoint's directory; put the file itself there", param="model"
        )
    if not real.is_file():
        raise CheckpointError(f"{path}: is not a file", param="model")
    return path


def read_text(path: Path, *, bytes_max: int) -> str:
    """Return the text of a file. Raise CheckpointError that names a file that is missing, linked elsewhere, too long or
    not UTF-8."""
    inside(path)
    try:
        with path.open("rb") as file:
            content = file.read(bytes_max + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}", param="model") from None
    if len(content) > bytes_max:
        raise CheckpointError(f"{path}: is longer than {format_bytes(bytes_max)}", param="model")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path}: is not UTF-8 text: byte {error.start} is {content[error.start]:#04x}", param="model"
        ) from None


def read_json(path: Path, *, bytes_max: int = CONFIG_BYTES_MAX) -> dict[str, Any]:
    """Return the object in a file. Raise CheckpointError that names a file that is not a JSON object within the
    bounds."""
    value = parse_json(read_text(path, bytes_max=bytes_max), str(path))
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON object is needed", param="model")
    return value


def parse_json(text: str | bytes, origin: str) -> Any:
    """Parse ``text``. Raise CheckpointError that names ``origin`` if it is not JSON or nested too deeply."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep(origin) from None
    except ValueError as error:
        raise CheckpointError(f"{origin}: is not JSON: {error}", param="model") from None
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(JSON_DEPTH_MAX):
        level = [
            inner
            for container in level
            for inner in (container.values() if isinstance(container, dict) else container)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return value
    raise _too_deep(origin)


def sync(directory: Path) -> None:
    """Flush the names in ``directory`` to the disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replace the file ``path`` atomically; on return the new content is on the disk."""
    unfinished = path.with_name(f"{path.name}.writing")
    with open(os.open(unfinished, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, mode), "wb") as file:
        file.write(content)
        finish(file)
    unfinished.rename(path)


def finish(file: BinaryIO) -> None:
    """Flush ``file`` to the disk."""
    file.flush()
    os.fsync(file.fileno())


def _too_deep(origin: str) -> CheckpointError:
    return CheckpointError(f"{origin}: is JSON of more than {JSON_DEPTH_MAX} levels", param="model")
