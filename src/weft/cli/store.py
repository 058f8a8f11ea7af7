"""``weft store``: the contents of a store, their checksums, and its free space.

    info     by model: snapshots, tokens, bytes      works while a server runs
    verify   every checksum; exit code 1 on damage     works while a server runs
    prune    evict down to a size, remove volumes      needs the store for itself
    rm       one model, or all of it                   needs the store for itself

Exit codes: 0, 1 where ``verify`` finds damage, 2 for a user error. ``--json`` prints the values of ``weft.store``
unchanged.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weft.cli.flags import FlagCommand, Size
from weft.cli.main import CommandGroup, print_table, progress_bar, table_of
from weft.errors import UserError
from weft.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from weft.store.bucket import Bucket
    from weft.store.pruning import PruneResult
    from weft.store.survey import BucketPruned, ModelTotals, StoreSurvey, VerifyResult

NAMESPACE_SHOWN = 8
"""Digits of a namespace that a table shows; --model takes them."""


def _place(ctx: click.Context, param: click.Parameter, value: str) -> Path | Bucket:
    """Return a directory, or a bucket by its address."""
    from weft.store.bucket import Bucket
    from weft.store.location import is_bucket
    from weft.store.signing import read_signer

    key = ctx.meta.get(_KEY)
    if not is_bucket(value):
        if key is not None:
            raise UserError(f"--key {key} is of a bucket, and {value} is a directory", param="--key")
        return Path(value)
    return Bucket(value, signer=None if key is None else read_signer(key, flag="--key"))


def _note_key(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    ctx.meta[_KEY] = value


_KEY = "weft.cli.store.key"
_PATH = click.Argument(["path"], callback=_place)
_KEY_FILE = click.Option(
    ["--key"],
    callback=_note_key,
    expose_value=False,
    is_eager=True,
    help="File with the key of a bucket's signatures (cache.store_key).",
)
_JSON = click.Option(["--json", "as_json"], is_flag=True, help="Print the result as JSON.")


@click.group("store", cls=CommandGroup)
def command() -> None:
    """Show and check a store of prefixes (`weft serve --store`), and free its space."""


@command.command("info", cls=FlagCommand, params=[_PATH, _KEY_FILE, _JSON])
def info(path: Path | Bucket, as_json: bool) -> int:
    """Show the contents of a store, by model."""
    from weft.store.survey import survey

    if not isinstance(path, Path):
        return _bucket_info(path, as_json)
    facts = survey(path)
    if as_json:
        click.echo(json.dumps(asdict(facts), indent=2))
    else:
        _show_survey(facts)
    return 0


@command.command(
    "verify",
    cls=FlagCommand,
    params=[
        _PATH,
        _KEY_FILE,
        click.Option(["--retire"], is_flag=True, help="Remove damaged records; no server may write."),
        _JSON,
    ],
)
def verify(path: Path | Bucket, retire: bool, as_json: bool) -> int:
    """Read every record and compare its checksum; exit code 1 if any is damaged."""
    from weft.store.pruning import prune
    from weft.store.survey import verify as verify_store

    if not isinstance(path, Path):
        return _bucket_verify(path, retire, as_json)
    with progress_bar("records") as progress:
        result = verify_store(path, progress)
    if retire and not result.good:
        prune(path, size_bytes=None, numbers=[number for number, _ in result.damaged])
    if as_json:
        click.echo(json.dumps({**asdict(result), "good": result.good, "retired": retire}, indent=2))
    else:
        _show_verified(result, retire)
    return 0 if result.good else 1


@command.command(
    "prune",
    cls=FlagCommand,
    params=[
        _PATH,
        _KEY_FILE,
        click.Option(
            ["--size"],
            type=Size(least=0),
            help="Evict prefixes that save the fewest seconds per byte, down to this size.",
        ),
        _JSON,
    ],
)
def prune(path: Path | Bucket, size: str | None, as_json: bool) -> int:
    """Return free space to the disk, after evicting down to --size."""
    from weft.store.pruning import prune as prune_store

    size_bytes = None if size is None else parse_bytes(size, flag="--size")
    if not isinstance(path, Path):
        from weft.store.survey import prune_bucket

        with progress_bar("objects") as progress:
            _show_bucket_pruned(prune_bucket(path, size_bytes=size_bytes, progress=progress), as_json)
        return 0
    with progress_bar("moved") as progress:
        result = prune_store(path, size_bytes=size_bytes, progress=progress)
    _show_pruned(result, as_json)
    return 0


@command.command(
    "rm",
    cls=FlagCommand,
    params=[
        _PATH,
        _KEY_FILE,
        click.Option(
            ["--model", "models"],
            multiple=True,
            help="Model name or namespace, as `weft store info` shows it; may be repeated.",
        ),
        click.Option(["--all", "everything"], is_flag=True, help="The whole store, with its directory."),
        _JSON,
    ],
)
def remove(path: Path | Bucket, models: tuple[str, ...], everything: bool, as_json: bool) -> int:
    """Remove the prefixes of a model from a store, or all of them."""
    from weft.store.pruning import prune as prune_store
    from weft.store.survey import survey

    if everything == bool(models):
        raise click.UsageError("weft store rm needs either --model NAME or --all")
    if not isinstance(path, Path):
        return _bucket_remove(path, models, as_json)
    facts = survey(path)
    if everything:
        result = prune_store(path, size_bytes=None, without=[bytes.fromhex(model.namespace) for model in facts.models])
        shutil.rmtree(path)
    else:
        result = prune_store(
            path,
            size_bytes=None,
            without=[bytes.fromhex(name) for name in _namespaces(str(facts.path), facts.models, models)],
        )
    _show_pruned(result, as_json)
    return 0


def _namespaces(place: str, totals: Sequence[ModelTotals], models: tuple[str, ...]) -> Iterator[str]:
    for name in models:
        matches = [
            total
            for total in totals
            if name == total.model or (len(name) >= NAMESPACE_SHOWN and total.namespace.startswith(name))
        ]
        if not matches:
            known = ", ".join(sorted({total.model for total in totals})) or "no model"
            raise UserError(f"--model {name}: the store {place} has {known}", param="--model")
        yield from (total.namespace for total in matches)


def _bucket_info(bucket: Bucket, as_json: bool) -> int:
    from weft.store.survey import survey_bucket

    facts = survey_bucket(bucket)
    if as_json:
        click.echo(json.dumps(asdict(facts), indent=2))
    else:
        _show_models(facts.models, facts.location)
        click.echo(f"{format_bytes(facts.payload_bytes)} in {facts.payloads:,} payloads; {facts.segments:,} segments")
    return 0


def _bucket_verify(bucket: Bucket, retire: bool, as_json: bool) -> int:
    from weft.store.survey import verify_bucket

    with progress_bar("objects") as progress:
        result = verify_bucket(bucket, progress)
    if retire:
        for key, _ in result.damaged:
            bucket.delete(key)
    if as_json:
        click.echo(json.dumps({**asdict(result), "good": result.good, "retired": retire}, indent=2))
        return 0 if result.good else 1
    click.echo(
        f"{result.objects:,} payloads, {format_bytes(result.payload_bytes)}: "
        + ("every checksum is right" if result.good else f"{len(result.damaged)} are damaged")
    )
    for key, reason in result.damaged[:20]:
        click.echo(f"  {key}: {reason}")
    if result.missing:
        click.echo(f"{result.missing:,} payloads that a segment names are gone: misses, and no damage")
    return 0 if result.good else 1


def _bucket_remove(bucket: Bucket, models: tuple[str, ...], as_json: bool) -> int:
    from weft.store.survey import remove_from_bucket, survey_bucket

    totals = survey_bucket(bucket).models
    names = list(_namespaces(bucket.location, totals, models)) if models else [model.namespace for model in totals]
    with progress_bar("objects") as progress:
        _show_bucket_pruned(remove_from_bucket(bucket, names, progress), as_json)
    return 0


def _show_bucket_pruned(result: BucketPruned, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(asdict(result), indent=2))
        return
    click.echo(
        f"{result.removed:,} payloads removed, {format_bytes(result.removed_bytes)}; "
        f"{result.objects:,} are left, {format_bytes(result.payload_bytes)}"
    )


def _show_models(models: Sequence[ModelTotals], place: str) -> None:
    table = table_of(["model", "namespace"], ["snapshots", "tokens", "bytes", "restores"])
    for total in models:
        table.add_row(
            total.model,
            total.namespace[:NAMESPACE_SHOWN],
            f"{total.snapshots:,}",
            f"{total.tokens:,}",
            format_bytes(total.payload_bytes),
            f"{total.restores:,}",
        )
    if models:
        print_table(table)
    else:
        click.echo(f"{place} is empty")


def _show_survey(facts: StoreSurvey) -> None:
    from rich.console import Console

    _show_models(facts.models, facts.path)
    console = Console(highlight=False)
    console.print(
        f"{format_bytes(facts.used_bytes)} used of {format_bytes(facts.allocated_bytes)} in "
        f"{facts.volumes} volume{'' if facts.volumes == 1 else 's'}; "
        f"{facts.ledger_rows:,} rows in generation {facts.generation}",
        soft_wrap=True,
    )
    lines = [f"{facts.holder} writes to it"] if facts.holder else []
    for line in [*lines, *facts.notes]:
        console.print(line, soft_wrap=True, markup=False)


def _show_verified(result: VerifyResult, retired: bool) -> None:
    click.echo(
        f"{result.records:,} records, {format_bytes(result.payload_bytes)}: "
        + ("every checksum is right" if not result.damaged else f"{len(result.damaged)} are damaged")
    )
    for number, reason in result.damaged[:20]:
        click.echo(f"  record {number}: {reason}")
    if result.dropped_rows:
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(result.dropped_rows.items()))
        click.echo(f"rows of the ledger that are ignored: {counts}")
    if not result.good:
        click.echo(
            "they are removed now"
            if retired
            else "a server never hands them out; `weft store verify --retire` removes them"
        )


def _show_pruned(result: PruneResult, as_json: bool) -> None:
    facts: dict[str, Any] = asdict(result)
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    given_back = result.allocated_bytes_before - result.allocated_bytes
    click.echo(
        f"{result.records_before - result.records:,} records removed, {result.records:,} are left; "
        f"{format_bytes(given_back)} given back, {format_bytes(result.allocated_bytes)} are in use"
    )
