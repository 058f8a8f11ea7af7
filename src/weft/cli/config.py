"""``weft config``: the settings that `weft serve` would have, as a config file; and ``weft completion``.

    weft config --show FLAGS    TOML of what a flag, a variable or the --config file sets, each with its source
    weft config --example       TOML of every key with its default, all commented out

Both print a file that ``--config`` reads again. Keys of the API are never printed: their lines are comments.
"""

from __future__ import annotations

import json
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import Field, fields
from typing import Any, get_args, get_origin

import click
from click.core import ParameterSource
from click.shell_completion import get_completion_class

from weft.cli.flags import ENV_PREFIX, GROUPS, FlagCommand
from weft.config import EngineConfig
from weft.config_check import TABLES, without_none
from weft.errors import UserError
from weft.server.config import ServerConfig

_CONFIGS = (EngineConfig, ServerConfig)
_SECRETS = frozenset({"api_key", "operator_key"})
_SHELLS = ("bash", "zsh", "fish")
_WIDTH = 100


@click.command(
    "config",
    cls=FlagCommand,
    configs=_CONFIGS,
    params=[
        click.Option(["--show"], is_flag=True, help="Print the settings, with the source of each value (default)."),
        click.Option(["--example"], is_flag=True, help="Print every key with its default and meaning, commented out."),
    ],
)
@click.pass_context
def command(ctx: click.Context, /, show: bool, example: bool, **values: Any) -> None:
    """Print the settings that `weft serve` would have with these flags, variables and --config file, as TOML."""
    if show and example:
        raise click.UsageError("--show prints the settings, --example all possible ones: give one of them")
    if example:
        click.echo("\n".join(_example()))
        return
    for config in _CONFIGS:
        config(**{f.name: values[f.name] for f in fields(config)}).check()  # a wrong value is an error here too
    lines = list(_shown(ctx, values))
    click.echo("\n".join(lines) if lines else "# nothing is set: all settings have their defaults")


@click.command("completion", params=[click.Argument(["shell"], type=click.Choice(_SHELLS))])
def completion(shell: str) -> None:
    """Print the completion of `weft` for a shell.

    bash: eval "$(weft completion bash)" in ~/.bashrc; zsh the same in ~/.zshrc; fish: weft completion fish >
    ~/.config/fish/completions/weft.fish
    """
    from weft.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "weft", "_WEFT_COMPLETE").source())


def _by_table() -> Iterator[tuple[str | None, list[Field[Any]]]]:
    """Yield the fields of both configs, by table of the config file; None: above every table, in groups of --help."""
    every = list({f.name: f for config in _CONFIGS for f in fields(config)}.values())  # some fields are in both
    order = {name: index for index, name in enumerate(name for names in GROUPS.values() for name in names)}
    yield None, sorted((f for f in every if "table" not in f.metadata), key=lambda f: order[f.name])
    for table in TABLES:
        yield table, [f for f in every if f.metadata.get("table") == table]


def _shown(ctx: click.Context, values: dict[str, Any]) -> Iterator[str]:
    sources = {
        ParameterSource.COMMANDLINE: "flag",
        ParameterSource.ENVIRONMENT: "variable",
        ParameterSource.DEFAULT_MAP: "--config file",
    }
    for table, declared in _by_table():
        lines = []
        for f in declared:
            source = sources.get(ctx.get_parameter_source(f.name) or ParameterSource.DEFAULT)
            if source is None:
                continue
            if source == "variable":
                source = ENV_PREFIX + f.name.upper()
            if f.name in _SECRETS:
                lines.append(f"# {f.name} is set, and not shown  ({source})")
            else:
                lines.append(f"{f.name} = {_toml(values[f.name])}  # {source}")
        if lines:
            yield from ([] if table is None else ["", f"[{table}]"]) + lines


def _example() -> Iterator[str]:
    yield "# weft.toml: give it with --config FILE or WEFT_CONFIG. Each line has the default."
    headings = {names[0]: heading for heading, names in GROUPS.items()}
    for table, declared in _by_table():
        if table is not None:
            yield from ("", f"[{table}]")
        for f in declared:
            if f.name in headings and table is None:
                yield from ("", f"# {headings[f.name]}")
            yield ""
            yield from textwrap.wrap(f.metadata["help"], _WIDTH, initial_indent="# ", subsequent_indent="# ")
            yield f"# {f.name} = {_default(f)}"


def _default(declared: Field[Any]) -> str:
    """Return the default as TOML; for a default that is decided at the start, an example of the type."""
    if declared.default is not None:
        return _toml(declared.default)
    config = next(candidate for candidate in _CONFIGS if declared.name in {f.name for f in fields(candidate)})
    inner = without_none(typing.get_type_hints(config)[declared.name])
    if get_origin(inner) is typing.Literal:
        return f'"{get_args(inner)[0]}"'
    return {int: "0", float: "0.0", bool: "false"}.get(inner, '"..."') + "  # decided at the start"


def _toml(value: Any) -> str:
    """Return ``value`` as TOML: text, a number, a bool, or several. JSON writes all of them in the same way."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    if not isinstance(value, str | int | float):
        raise UserError(f"{value!r} has no form in TOML")
    return json.dumps(value, ensure_ascii=False)
