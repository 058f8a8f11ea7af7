"""From what the user typed to a directory on disk: a checkpoint directory, a GGUF file, or a name on the hub.

A name that exists as a directory is that directory, as everywhere in the field; anything else is asked of
``huggingface_hub`` (which uses its cache first when offline). Only what serving reads is fetched:
configuration, tokenizer, chat template, safetensors; or ``config.json`` alone, which is all that planning
reads. Every failure is an error that says which of the two was tried and what to do.
"""

from __future__ import annotations

from pathlib import Path

from weft.errors import CheckpointError

_FETCHED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_TEXT_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
_NOT_FETCHED = ["original/*", "consolidated*", "onnx/*", "*.gguf"]


def resolve_model(name: str | Path, revision: str | None = None, *, config_only: bool = False,
                  text_only: bool = False) -> Path:
    """The checkpoint directory for ``name``: a path, or "owner/name" on the hub at ``revision``. Of a hub
    model ``config_only`` fetches ``config.json`` and nothing else, ``text_only`` everything but weights.

    Raises CheckpointError when a path has no config.json, or the hub (or its cache, offline) has no such
    model.
    """
    return local_checkpoint(name) or _from_hub(
        str(name), revision, ["config.json"] if config_only else _TEXT_FILES if text_only else _FETCHED)


def local_checkpoint(name: str | Path) -> Path | None:
    """The checkpoint directory of a path; None for what may be a hub name. Raises CheckpointError for a path
    that is no checkpoint."""
    path, text = Path(name).expanduser(), str(name)
    if path.is_dir():
        if (path / "config.json").is_file():
            return path.resolve()
        view = _gguf_view(path)
        if view is None:
            raise CheckpointError(f"{path}: the directory has no config.json, so it is not a checkpoint in "
                                  f"Hugging Face format, and no GGUF file", param="model")
        return view
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path} is a file; give the directory that holds config.json, or a "
                                  f".gguf file", param="model")
        return _gguf_view(path)
    if path.suffix == ".gguf":
        raise CheckpointError(f"{path}: there is no such file", param="model")
    if text.startswith(("/", ".", "~")) or text.count("/") > 1 or "\\" in text:
        raise CheckpointError(f"{path}: there is no such directory", param="model")
    return None


def _gguf_view(path: Path) -> Path | None:
    """The view of a GGUF file, or of the one in a directory; None for a directory without one."""
    if path.is_dir() and not any(path.glob("*.gguf")):
        return None
    from weft.models.gguf.view import file_in, view_of  # numpy and ggml's tables: for such files alone

    file = path if path.is_file() else file_in(path)
    return None if file is None else view_of(file)


def _from_hub(name: str, revision: str | None, fetched: list[str]) -> Path:
    import huggingface_hub as hub
    from huggingface_hub import errors

    asked = f"model {name!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        snapshot = Path(hub.snapshot_download(name, revision=revision, allow_patterns=fetched,
                                           ignore_patterns=_NOT_FETCHED))
    except errors.HFValidationError as error:
        reason = f"there is no such directory, and it is not a hub name (owner/name): {error}"
    except errors.GatedRepoError:
        reason = "it is gated on the hub: accept its terms there and log in (hf auth login, or HF_TOKEN)"
    except errors.RepositoryNotFoundError:
        reason = "there is no such directory, and the hub has no such model (a private one needs HF_TOKEN)"
    except errors.RevisionNotFoundError:
        reason = "the hub has the model but not this revision"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        reason = ("there is no such directory, it is not in the local hub cache, and the hub cannot be "
                  "reached (no connection, or HF_HUB_OFFLINE is set)")
    except (errors.HfHubHTTPError, OSError) as error:
        reason = f"the hub did not deliver it: {error}"
    else:
        if (snapshot / "config.json").is_file():
            return snapshot
        reason = "the hub has it, but without config.json: not a checkpoint in Hugging Face format"
    raise CheckpointError(f"{asked}: {reason}", param="model")
