"""Results on the screen and in a file. The file also has facts of the machine and the run."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from weft.errors import ConfigError
from weft.host import usable_cores
from weft.version import weft_version
from weft_tools.bench.diagnosis import Diagnosis


def facts() -> dict[str, Any]:
    """Return facts about this machine and this moment."""
    return {
        "date": datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"),
        "weft": weft_version(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": usable_cores(),
        "load_average": list(os.getloadavg()),
    }


def check_writable(path: Path | None, flag: str) -> None:
    """Raise ConfigError if the file cannot be written, before hours of measuring."""
    if path is not None and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise ConfigError(f"{flag} {path}: there is no folder {path.parent} that can be written", param=flag)


def write(path: Path, results: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def conclude(diagnosis: Diagnosis) -> None:
    """Print the last lines of a measurement."""
    for name, words in diagnosis.rows().items():
        click.echo(click.style(f"{name}:".ljust(13), bold=True) + words)


def show(title: str, rows: Mapping[str, object]) -> None:
    """Print numbers with their names; None is a dash."""
    click.secho(title, bold=True)
    for name, value in rows.items():
        shown = (
            "-"
            if value is None
            else f"{value:,.2f}"
            if isinstance(value, float)
            else (f"{value:,}" if isinstance(value, int) else str(value))
        )
        click.echo(f"  {name:<38}{shown:>14}")
