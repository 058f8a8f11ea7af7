"""``weft version``: versions from installed metadata, without importing the packages."""

from __future__ import annotations

import platform
from importlib import metadata

import click

from weft.cli.flags import FlagCommand
from weft.version import weft_version


def installed_version(package: str) -> str | None:
    """Return the version of an installed package without importing it; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@click.command("version", cls=FlagCommand)
def command() -> None:
    """Print the versions of weft, Python and torch."""
    torch_version = installed_version("torch") or "not installed"
    click.echo(f"weft {weft_version()} (Python {platform.python_version()}, torch {torch_version})")
