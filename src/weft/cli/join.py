"""``weft join``: this machine's cores or GPUs serve for a server elsewhere.

    server     weft serve MODEL --listen-engines 0.0.0.0:8100 --token FILE
    machine    weft join server:8100 --token FILE

The server decides the model and how it is computed. Options of this command are what belongs to the machine.
"""

from __future__ import annotations

from typing import Any

import click

from weft.cli.flags import FlagCommand


@click.command("join", cls=FlagCommand, params=[
    click.Argument(["server"], metavar="HOST:PORT"),
    click.Option(["--token"], required=True, envvar="WEFT_TOKEN", metavar="FILE",
                 help="File with the token of the fleet, copied from the server."),
    click.Option(["--replicas"], type=click.IntRange(min=1), default=1, show_default=True,
                 help="Engine processes of this machine; cores, free RAM and GPUs are divided among them."),
    click.Option(["--model"], help="Where this machine has the model: a directory or hub name. Default: as "
                                   "the server names it."),
    click.Option(["--memory"], help="Memory for KV pages and states of each replica. Default: the server's "
                                    "--memory, or a share of what is free here."),
    click.Option(["--device"], help="cpu, cuda or auto. Default: the server's --device."),
    click.Option(["--threads"], type=click.IntRange(min=1), help="CPU threads of each replica."),
    click.Option(["--store"], help="Directory or bucket of cached prefixes. Default: the server's --store."),
])
def command(server: str, token: str, replicas: int, **own: Any) -> int:
    """Join the server at HOST:PORT (its --listen-engines) with engine processes of this machine.

    Ctrl-C drains them: requests finish or resume elsewhere. A lost connection is opened again, and requests
    go on at other replicas meanwhile.
    """
    from rich.console import Console

    from weft.fleet.join import join
    from weft.fleet.start_progress import StartProgress
    from weft.rpc.link import LinkKeys, read_token, tcp_address

    address = tcp_address(server, flag="HOST:PORT")
    keys = LinkKeys.of(read_token(token))
    given = {name: value for name, value in own.items() if value is not None}
    return join(address, keys, given, replicas, StartProgress(Console(soft_wrap=True)))
