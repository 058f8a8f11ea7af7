"""``weft ps``: the servers of this machine, and the models that each has in memory.

    state directory --running_servers--> addresses --GET /health, /api/ps--> rows

A server with keys lists its models only for a key (``--api-key``).
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from weft.cli.flags import FlagCommand
from weft.cli.main import EXIT_FAILED, print_table, say_error
from weft.errors import WeftError
from weft.units import format_bytes

if TYPE_CHECKING:
    from weft.server.running import RunningProcess

_TIMEOUT_S = 5.0


@click.command(
    "ps",
    cls=FlagCommand,
    params=[
        click.Option(["--url"], envvar="WEFT_URL", help="Ask this server only, on whatever machine."),
        click.Option(["--api-key"], envvar=["WEFT_OPERATOR_KEY", "WEFT_API_KEY"], help="Key of the servers."),
        click.Option(["--json", "as_json"], is_flag=True, help="Print the result as JSON."),
    ],
)
def command(url: str | None, api_key: str | None, as_json: bool) -> int:
    """List the servers of this machine and the models that they have in memory."""
    from weft.server.running import RunningProcess, running_servers

    servers = running_servers() if url is None else []
    if url is not None:
        servers = [RunningProcess(0, url, None, 0.0)]
    rows = [row for server in servers for row in _rows(server, api_key)]
    failed = url is not None and "error" in rows[0]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif failed:
        say_error(rows[0]["error"])
    elif not rows:
        click.echo("no server runs on this machine; `weft serve MODEL` starts one")
    else:
        _show(rows)
    return EXIT_FAILED if failed else 0


def _rows(process: RunningProcess, api_key: str | None) -> list[dict[str, Any]]:
    """Return a row for each model in memory, or one row with the reason why there is none."""
    from weft.cli.remote import RemoteModel

    head = {"url": process.url, "pid": process.pid or None, "model": process.model or ""}
    server = RemoteModel(process.url, api_key=api_key, certificate=process.certificate)
    try:
        models = server.get("/api/ps", timeout_s=_TIMEOUT_S).json()["models"]
    except WeftError as error:
        return [{**head, "error": error.message}]
    except (ValueError, KeyError, TypeError):
        return [{**head, "error": "the answering process is not a server of models"}]
    finally:
        server.close()
    if not models:
        return [{**head, "error": "no model is in memory"}]
    return [
        {
            **head,
            "model": model["model"],
            "size": model["size"],
            "size_vram": model.get("size_vram", 0),
            "context_length": model.get("context_length"),
            "expires_at": model.get("expires_at"),
            "dtype": model.get("details", {}).get("quantization_level", ""),
            "of": model.get("details", {}).get("parent_model", ""),
        }
        for model in models
    ]


def _show(rows: Sequence[dict[str, Any]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in ("server", "pid", "model", "weights", "form", "on", "context", "until"):
        table.add_column(title, no_wrap=title in ("server", "pid", "weights"))
    for row in rows:
        head = (row["url"], str(row["pid"] or ""), escape(str(row["model"])))
        if "error" in row:
            table.add_row(*head, "", "", "", "", escape(row["error"]))
            continue
        weights = f"of {row['of']}" if row["of"] else format_bytes(row["size"])  # missing for a created name
        table.add_row(
            *head,
            escape(weights),
            row["dtype"],
            "GPU" if row["size_vram"] else "CPU",
            str(row["context_length"] or ""),
            _until(row["expires_at"], time.time()),
        )
    print_table(table)


def _until(moment: str | None, now_s: float) -> str:
    """Return when the model leaves memory, in words."""
    try:
        left_s = datetime.datetime.fromisoformat(moment or "").timestamp() - now_s
    except ValueError:
        return ""
    if left_s > 366 * 86_400:
        return "it stays"
    return f"{left_s / 60:.0f} min" if left_s >= 90 else f"{max(left_s, 0):.0f} s"
