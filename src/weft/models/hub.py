"""Resolution of a model's name to a directory on disk: a checkpoint directory, a GGUF file, or a name on the hub.

    directory, model.gguf     a path
    owner/name                a checkpoint: pulled (``local``), else on the hub
    owner/name:Q4_K_M         the GGUF file of that type, with all parts of a split one

A name that exists as a directory is that directory; a pulled model is in the directory of models; any other name is
looked up by ``huggingface_hub``. Every failure is an error that names the attempts and a remedy.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NoReturn, TypeVar

from weft.adapters import CONFIG_FILE, WEIGHTS_FILE, weights_missing
from weft.errors import CheckpointError
from weft.models.local import resolve_local

FETCHED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_OF_SOCKETS = (ConnectionError, TimeoutError, socket.gaierror)
_TEXT_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
NOT_FETCHED = ["original/*", "consolidated*", "onnx/*", "*.gguf"]


class HubUnreachableError(CheckpointError):
    """Error for a missing connection to the hub, or HF_HUB_OFFLINE."""

    status = 503
    kind = "service_unavailable"


def resolve_model(
    name: str | Path, revision: str | None = None, *, config_only: bool = False, text_only: bool = False
) -> Path:
    """Return the checkpoint directory for ``name``: a path, "owner/name" on the hub at ``revision``, or
    "owner/name:TYPE" for a GGUF file there. ``config_only`` fetches only ``config.json`` of a hub model, ``text_only``
    everything but weights; a GGUF file is always fetched completely.

    Raises CheckpointError when a path has no config.json, or the hub (or its cache, offline) has no such model.
    """
    local = local_checkpoint(name, revision)
    if local is not None:
        return local
    repository, _, kind = str(name).partition(":")
    if kind:
        return _gguf_from_hub(str(name), repository, kind, revision)
    return _from_hub(str(name), revision, ["config.json"] if config_only else _TEXT_FILES if text_only else FETCHED)


def name_of(model: str) -> str:
    """Return the name under which the model of this path or hub name is served."""
    path = Path(model).expanduser()
    if path.is_file():  # the common part of the names, for a model in several files
        return re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
    return path.resolve().name if path.is_dir() else model


def local_checkpoint(name: str | Path, revision: str | None = None) -> Path | None:
    """Return the checkpoint directory of a path, or of a model that was pulled; None for a name that may be on the
    hub. Raises CheckpointError for a path that is not a checkpoint, and for a model that is damaged or half pulled.
    """
    path, text = Path(name).expanduser(), str(name)
    if path.is_dir():
        if (path / "config.json").is_file():
            return path.resolve()
        view = _gguf_view(path)
        if view is None:
            raise CheckpointError(
                f"{path}: the directory has no config.json, so it is not a checkpoint in "
                f"Hugging Face format, and it has no GGUF file",
                param="model",
            )
        return view
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(
                f"{path} is a file; give the directory that holds config.json, or a .gguf file", param="model"
            )
        return _gguf_view(path)
    if path.suffix == ".gguf":
        raise CheckpointError(f"{path}: there is no such file", param="model")
    if text.startswith(("/", ".", "~")) or text.count("/") > 1 or "\\" in text:
        raise CheckpointError(f"{path}: there is no such directory", param="model")
    pulled = resolve_local(text, revision)
    return pulled if pulled is None or (pulled / "config.json").is_file() else _gguf_view(pulled)


def _gguf_view(path: Path) -> Path | None:
    """Return the view of a GGUF file, or of the one in a directory; None for a directory without one."""
    if path.is_dir() and not any(path.glob("*.gguf")):
        return None
    from weft.models.gguf.view import file_in, view_of  # numpy and ggml's tables: only for such files

    file = path if path.is_file() else file_in(path)
    return None if file is None else view_of(file)


def is_path(name: str) -> bool:
    """Return whether ``name`` is a path by its form, which no hub has."""
    return name.startswith(("/", ".", "~")) or name.count("/") != 1 or "\\" in name


def resolve_adapter(name: str) -> Path:
    """Return the directory of an adapter: a path, or "owner/name" on the hub. Raises CheckpointError."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if is_path(name):
        raise CheckpointError(f"{path}: there is no such directory of an adapter", param="lora")
    import huggingface_hub as hub

    snapshot = Path(
        ask_hub(
            name, None, lambda: hub.snapshot_download(name, allow_patterns=[CONFIG_FILE, WEIGHTS_FILE]), what="adapter"
        )
    )
    if not (snapshot / WEIGHTS_FILE).exists():
        raise weights_missing(name, ask_hub(name, None, lambda: _listed(hub, name, None), what="adapter"))
    return snapshot


Answer = TypeVar("Answer")


def _from_hub(name: str, revision: str | None, fetched: list[str]) -> Path:
    import huggingface_hub as hub

    snapshot = Path(
        ask_hub(
            name,
            revision,
            lambda: hub.snapshot_download(name, revision=revision, allow_patterns=fetched, ignore_patterns=NOT_FETCHED),
        )
    )
    if not (snapshot / "config.json").is_file():
        fail(
            name,
            revision,
            "the hub has it, but without config.json: not a checkpoint in Hugging Face "
            f"format; a GGUF file in it is named by its type, {name}:Q4_K_M",
        )
    return snapshot


def _gguf_from_hub(name: str, repository: str, kind: str, revision: str | None) -> Path:
    """Return the view of the file of type ``kind``, which is in the cache afterwards."""
    import huggingface_hub as hub

    files = ask_hub(name, revision, lambda: _listed(hub, repository, revision))
    chosen = file_of_type(name, revision, files, kind)
    parts = [
        Path(ask_hub(name, revision, partial(hub.hf_hub_download, repository, file, revision=revision)))
        for file in chosen
    ]
    view = _gguf_view(parts[0])
    assert view is not None
    return view


def _listed(hub: ModuleType, repository: str, revision: str | None) -> list[str]:
    """Return the names of the repository's files; if the hub is out of reach, of the files in the cache. Raises the
    client's errors.
    """
    from huggingface_hub import errors

    try:
        names: list[str] = hub.HfApi().list_repo_files(repository, revision=revision)
    except errors.HfHubHTTPError:  # an answer
        raise
    except out_of_reach():
        cached = Path(hub.snapshot_download(repository, revision=revision, local_files_only=True))
        names = [str(file.relative_to(cached)) for file in cached.rglob("*") if file.is_file()]
    return names


_PART = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)", re.IGNORECASE)


def file_of_type(name: str, revision: str | None, files: Sequence[str], kind: str) -> list[str]:
    """Return all parts of the one model of type ``kind`` among the ``files`` of a repository. Raises
    CheckpointError.
    """
    chosen = files_of_type(files, kind)
    if len(chosen) != 1:
        names = ", ".join(sorted(file for file in files if file.lower().endswith(".gguf"))) or "none"
        fail(name, revision, f"{len(chosen) or 'no'} GGUF models there are of type {kind!r}; the files are {names}")
    return chosen[0]


def files_of_type(files: Sequence[str], kind: str) -> list[list[str]]:
    """Return the models among ``files`` whose name has ``kind`` ("Q4_K_M") as a word, each with its parts in order.
    "UD-Q4_K_XL" is another word than "Q4_K_XL" if both are there.
    """
    word = re.compile(rf"(?:^|[-._/]){re.escape(kind)}(?=[-./])", re.IGNORECASE)
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.lower().endswith(".gguf") and word.search(file) and "mmproj" not in file.lower():
            models.setdefault(_PART.sub("", file), []).append(file)
    plain = [model for model in models if f"ud-{kind}".lower() not in model.lower()]
    return [models[model] for model in plain or models]


def ask_hub(
    name: str, revision: str | None, ask: Callable[[], Answer], *, what: str = "model", cached: bool = True
) -> Answer:
    """Return the answer of the hub, or of its cache. ``cached``: directories and the cache were tried before. Raises
    CheckpointError.
    """
    from huggingface_hub import constants, errors

    owner = "" if "/" in name else "; most hub names are owner/name, such as LiquidAI/LFM2-350M"
    tried = "there is no such directory, and " if cached else ""
    unreached = (
        "there is no such directory, it is not in the local hub cache, and the hub cannot be "
        f"reached (no connection, or HF_HUB_OFFLINE is set){owner}"
        if cached
        else f"the hub {constants.ENDPOINT} cannot be reached (no connection, or HF_HUB_OFFLINE is set)"
    )
    try:
        return ask()
    except errors.HFValidationError as error:
        reason = f"{tried}it is not a hub name (owner/name): {error}"
    except errors.GatedRepoError:
        reason = "it is gated on the hub: accept its terms there and log in (hf auth login, or HF_TOKEN)"
    except errors.RepositoryNotFoundError:
        reason = f"{tried}the hub has no such {what} (a private one needs HF_TOKEN){owner}"
    except errors.RevisionNotFoundError:
        reason = f"the hub has the {what} but not this revision"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        fail(name, revision, unreached, what, HubUnreachableError)
    except errors.HfHubHTTPError as error:
        reason = f"the hub did not deliver it: {error}"
    except out_of_reach() as error:
        is_of_disk = getattr(error, "errno", None) and not isinstance(error, _OF_SOCKETS)
        if not is_of_disk:
            fail(name, revision, unreached, what, HubUnreachableError)
        reason = f"the hub did not deliver it: {error}"
    fail(name, revision, reason, what)


def out_of_reach() -> tuple[type[Exception], ...]:
    """Return the errors of huggingface_hub without a connection: those of its HTTP library, which depends on the
    version, and of the system.
    """
    from huggingface_hub import errors

    library = errors.HfHubHTTPError.__mro__[1]
    return errors.OfflineModeIsEnabled, library if issubclass(library, Exception) else OSError, OSError


def fail(
    name: str, revision: str | None, reason: str, what: str = "model", error: type[CheckpointError] = CheckpointError
) -> NoReturn:
    described = f"{what} {name!r}" + (f" at revision {revision!r}" if revision else "")
    raise error(f"{described}: {reason}", param="model" if what == "model" else "lora")
