"""``weft list``, ``weft pull``, ``weft rm``: the models on this machine's disk.

    pull NAME     hub -> the directory of models, with checksums; continues an interrupted pull
    list          models on disk: complete, damaged or half pulled; models in the hub's cache
    rm NAME       frees the space, unless a running process has loaded the model

``list`` and ``rm`` also know the names that users created on this machine's servers (``server.presets``), in the
default file.

``weft doctor`` names the directory, and ``models.local`` reads its contents. The hub's cache is shared with other
programs, so it is shown and never changed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weft.cli.flags import FlagCommand
from weft.cli.main import print_table, progress_bar, say_error
from weft.errors import WeftError
from weft.units import format_bytes

if TYPE_CHECKING:
    from weft.models.local import LocalModel
    from weft.models.pulling import PullProgress
    from weft.server.presets import PresetStore

_JSON = click.Option(["--json", "as_json"], is_flag=True, help="Print the result as JSON.")
_SAID_EVERY_S = 10.0


@click.command(
    "pull",
    cls=FlagCommand,
    params=[
        click.Argument(["names"], nargs=-1, required=True, metavar="NAME..."),
        click.Option(["--revision"], help="Branch, tag or commit; default: main."),
        click.Option(["--verify"], is_flag=True, help="Check every file on disk, and fetch damaged files again."),
    ],
)
def pull(names: tuple[str, ...], revision: str | None, verify: bool) -> None:
    """Fetch models from the hub: owner/name, or owner/name:Q4_K_M for one GGUF file of it.

    Files of an earlier pull are kept. If a model changed on the hub, only the changed files are fetched again.
    """
    from weft.models.local import find
    from weft.models.pulling import mended
    from weft.models.pulling import pull as pull_model

    for name in names:
        here = find(name)
        if verify and here is not None and here.state == "whole":
            mended(here)
        with _Shown(name) as shown:
            model, is_new = pull_model(name, revision, on_progress=shown.progress)
        words = "pulled" if is_new else "is on disk already, at the hub's commit"
        click.echo(f"{model.name} {words}: {format_bytes(model.held_bytes)} in {model.path}")


def pull_missing(name: str, revision: str | None) -> None:
    """Fetch the model ``name`` unless it is a path, or complete on this machine's disk or in the hub's cache. Raises as
    ``models.pulling.pull``."""
    from weft.models.local import find
    from weft.models.pulling import pull as pull_model

    here = find(name)
    if Path(name).expanduser().exists() or (here is not None and here.state == "whole"):
        return
    if here is None and any(cached == name for cached, _, _ in cached_by_hub()):
        return  # the engine fetches files that the cache lacks
    with _Shown(name) as shown:
        pull_model(name, revision, on_progress=shown.progress)


class _Shown:
    """The progress of one pull: a bar on a terminal, else occasional lines."""

    def __init__(self, name: str) -> None:
        self._name, self._said_s = name, time.monotonic()
        self._bar = progress_bar(name, as_bytes=True)

    def __enter__(self) -> _Shown:
        self._draw = self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)

    def progress(self, now: PullProgress) -> None:
        self._draw(now.done_bytes, now.total_bytes, f"{now.verb} {now.file.path}")
        if not sys.stderr.isatty() and time.monotonic() - self._said_s > _SAID_EVERY_S:
            self._said_s = time.monotonic()
            click.echo(f"{self._name}: {format_bytes(now.done_bytes)} of {format_bytes(now.total_bytes)}", err=True)


@click.command(
    "list",
    cls=FlagCommand,
    params=[
        click.Option(["--verify"], is_flag=True, help="Read every checksum; exit code 1 if a model is damaged."),
        _JSON,
    ],
)
def list_models(verify: bool, as_json: bool) -> int:
    """List the models on this machine's disk: pulled ones, those of the hub's cache, and created names."""
    from weft.models.local import damage, listed, model_directory

    models = listed()
    problems = {model.path: model.problem for model in models}
    if verify:
        with progress_bar("checksums", as_bytes=True) as progress:
            done, total = 0, sum(model.held_bytes for model in models)

            def on_bytes(count: int) -> None:
                nonlocal done
                done += count
                progress(done, total)

            problems |= {model.path: damage(model, on_bytes) for model in models if model.state == "whole"}
    rows = [_row(model, problems[model.path]) for model in models]
    rows += [
        {"name": name, "state": "hub cache", "bytes": size, "path": str(path)} for name, path, size in cached_by_hub()
    ]
    store = _presets()
    rows += [
        {
            "name": preset.name,
            "state": "created",
            "bytes": 0,
            "path": str(store.path),
            "note": f"a name for {preset.model}",
        }
        for preset in store.names().values()
    ]
    if as_json:
        click.echo(json.dumps({"directory": str(model_directory()), "models": rows}, indent=2))
    else:
        _show(rows, model_directory())
    return 1 if any(row["state"] == "damaged" for row in rows) else 0


def _row(model: LocalModel, problem: str) -> dict[str, Any]:
    total = model.manifest.total_bytes
    state = "damaged" if problem and model.state != "partial" else model.state
    words = {
        "partial": f"{format_bytes(model.held_bytes)} of {format_bytes(total)}: `weft pull {model.name}` goes on",
        "damaged": f"{problem}: `weft pull --verify {model.name}` mends it",
    }
    return {
        "name": model.name,
        "state": state,
        "bytes": model.held_bytes,
        "total_bytes": total,
        "commit": model.manifest.commit,
        "pulled_s": model.manifest.pulled_s,
        "path": str(model.path),
        "note": words.get(state, ""),
    }


def cached_by_hub() -> list[tuple[str, Path, int]]:
    """Return (name, directory, bytes) of models that the cache of huggingface_hub has, complete or not."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    models = []
    for folder in sorted(cache.glob("models--*")) if cache.is_dir() else []:
        blobs = sum(file.stat().st_size for file in (folder / "blobs").glob("*") if file.is_file())
        models.append((folder.name.removeprefix("models--").replace("--", "/"), folder, blobs))
    return models


def _show(rows: list[dict[str, Any]], directory: Path) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    if not rows:
        console.print(f"no model is in {directory}; `weft pull owner/name` fetches one", soft_wrap=True, markup=False)
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in ("name", "size", "state", ""):
        table.add_column(title, no_wrap=title in ("name", "size"))
    for row in rows:
        table.add_row(escape(row["name"]), format_bytes(row["bytes"]), row["state"], escape(row.get("note", "")))
    print_table(table)


@click.command(
    "rm",
    cls=FlagCommand,
    params=[
        click.Argument(["names"], nargs=-1, required=True, metavar="NAME..."),
        click.Option(["--force"], is_flag=True, help="Remove even a model that a running process has loaded."),
    ],
)
def rm(names: tuple[str, ...], force: bool) -> int:
    """Remove pulled models from this machine's disk, files of unfinished pulls, and created names."""
    from weft.models.local import find, remove

    code = 0
    for name in names:
        try:
            if find(name) is None and _presets().remove(name):
                click.echo(f"{name} removed: it was a created name")
                continue
            click.echo(f"{name} removed: {format_bytes(remove(name, force=force))} given back")
        except WeftError as error:
            say_error(error.message + _elsewhere(name))
            code = 2
    return code


def _presets() -> PresetStore:
    """Return the created names of servers that use the default file."""
    from weft.server.config import ServerConfig

    store = ServerConfig().presets()
    assert store is not None
    return store


def _elsewhere(name: str) -> str:
    if any(cached == name for cached, _, _ in cached_by_hub()):
        return f". The hub's cache has {name}: `hf cache rm model/{name}` removes it there"
    return ""


globals()["list"] = list_models  # the name of the command; in this module ``list`` is Python's
