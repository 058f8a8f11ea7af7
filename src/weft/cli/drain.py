"""``weft drain``: take a replica of a running server out of service, without errors for clients.

    weft drain 1               no further requests for replica 1; running ones may finish, then its process ends
    weft drain 1 --restart     and a new process starts: the same verb for other weights or a device reset
    weft drain all --restart   a rolling restart of all replicas
    weft drain 1 --start       a replica that was drained, or died for good, serves again

The server does all of it (``Fleet.drain``); the command waits for the answer and shows the replicas.
"""

from __future__ import annotations

from contextlib import closing

import click

from weft.cli.flags import DAY_S, FlagCommand, Number
from weft.cli.remote import RemoteModel
from weft.errors import ConfigError

ALL = "all"


@click.command(
    "drain",
    cls=FlagCommand,
    params=[
        click.Argument(["replica"]),
        click.Option(
            ["--url"],
            envvar="WEFT_URL",
            default="http://127.0.0.1:8000",
            show_default=True,
            help="Server of the replica.",
        ),
        click.Option(
            ["--api-key"],
            envvar=["WEFT_OPERATOR_KEY", "WEFT_API_KEY"],
            help="Its key: the operator's, where it has one (--operator-key).",
        ),
        click.Option(
            ["--timeout"],
            type=Number(0, DAY_S),
            default=30.0,
            show_default=True,
            help="Seconds that requests get to finish; then they resume elsewhere.",
        ),
        click.Option(["--model"], help="Model of the replica, where the server has several."),
        click.Option(["--restart"], is_flag=True, help="Start a new process afterwards."),
        click.Option(["--start"], is_flag=True, help="Start a replica that was drained, or that died for good."),
    ],
)
def command(
    replica: str, url: str, api_key: str | None, timeout: float, model: str | None, restart: bool, start: bool
) -> int:
    """Take REPLICA (a number from 0, or all) of a running server out of service.

    Requests finish, or resume on another replica with their tokens so far. No client sees an error.
    """
    if restart and start:
        raise ConfigError("--restart and --start exclude each other", param="--start")
    if replica != ALL and not replica.isdecimal():
        raise ConfigError(f"REPLICA is {replica!r}; it is a number from 0, or all", param="REPLICA")
    if replica == ALL and not restart:
        raise ConfigError(
            "all replicas are restarted one after the other (weft drain all --restart); to end them, stop the server",
            param="--restart",
        )
    with closing(RemoteModel(url, api_key=api_key)) as server:
        named = {} if model is None else {"model": model}
        query = {"timeout": f"{timeout:g}", **named}
        if replica == ALL:
            answer = server.post("/v1/replicas/restart", query)
        elif start:
            answer = server.post(f"/v1/replicas/{replica}/start", named)
        else:
            answer = server.post(f"/v1/replicas/{replica}/drain", {**query, "restart": "true" if restart else "false"})
    rows = answer.json()["data"]
    several = len({row["model"] for row in rows}) > 1
    for row in rows:
        of_model = f"  {row['model']}" if several else ""
        click.echo(f"replica {row['replica']}  {row['state']:9} {row['sequences']:5} sequences{of_model}")
    return 0
