"""``weft join``: this machine's cores or GPUs serve for a server on another machine.

    server     weft serve MODEL --listen-engines 0.0.0.0:8100 --token FILE
    machine    weft join server:8100 --token FILE

The server decides the model and how it is computed. Options of this command concern only the machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from weft.cli.flags import Count, FlagCommand, Size
from weft.config import THREADS_MAX
from weft.errors import ConfigError
from weft.handoff import REPLICAS_MAX

if TYPE_CHECKING:
    from weft.handoff import Role
    from weft.rpc.messages import PeerKeys


@click.command(
    "join",
    cls=FlagCommand,
    params=[
        click.Argument(["server"], metavar="HOST:PORT"),
        click.Option(
            ["--token"],
            required=True,
            envvar="WEFT_TOKEN",
            metavar="FILE",
            help="File with the token of the fleet, copied from the server.",
        ),
        click.Option(
            ["--replicas"],
            type=Count(1, REPLICAS_MAX),
            default=1,
            show_default=True,
            help="Engine processes of this machine; cores, free RAM and GPUs are divided among them.",
        ),
        click.Option(
            ["--model"],
            help="Where this machine has the model: a directory or hub name. Default: as the server names it.",
        ),
        click.Option(
            ["--memory"],
            type=Size(),
            help="Memory for KV pages and states of each replica. Default: the server's "
            "--memory, or a share of the free memory here.",
        ),
        click.Option(["--device"], help="cpu, cuda or auto. Default: the server's --device."),
        click.Option(["--threads"], type=Count(1, THREADS_MAX), help="CPU threads of each replica."),
        click.Option(
            ["--role"],
            type=click.Choice(["both", "prefill", "decode"]),
            default="both",
            show_default=True,
            help="Role of the replicas: only prompts (other replicas answer), only answers, or both.",
        ),
        click.Option(
            ["--peer-address"],
            metavar="HOST[:PORT]",
            help="With a role, where engines of other machines send records to this one. Default: the "
            "address towards the server, and any free port.",
        ),
        click.Option(["--store"], help="Directory or bucket of cached prefixes. Default: the server's --store."),
    ],
)
def command(server: str, token: str, replicas: int, role: Role, peer_address: str | None, **own: Any) -> int:
    """Join the server at HOST:PORT (its --listen-engines) with engine processes of this machine.

    Ctrl-C drains them: requests finish or resume elsewhere. After a lost connection the machine connects again;
    requests resume on other replicas meanwhile.
    """
    from weft.fleet.join import join
    from weft.fleet.start_progress import ServiceConsole, StartProgress
    from weft.rpc.link import LinkKeys, read_token, tcp_address

    address, secret = tcp_address(server, flag="HOST:PORT"), read_token(token)
    settings = {name: value for name, value in own.items() if value is not None}
    if role != "both":
        settings["handoffs"] = True
    peers = _peer_keys(server, peer_address, secret)
    if peers.port and replicas > 1:
        raise ConfigError(
            f"--peer-address {peer_address} is one port, and --replicas is {replicas}: leave the port out",
            param="--peer-address",
        )
    return join(
        address,
        LinkKeys.of(secret),
        settings,
        replicas,
        StartProgress(ServiceConsole(soft_wrap=True)),
        role=role,
        peers=peers,
    )


def _peer_keys(server: str, peer_address: str | None, token: str) -> PeerKeys:
    """Return the address where the engines of this machine listen for records, and the token. Raise ConfigError."""
    from weft.rpc.link import own_address
    from weft.rpc.messages import PeerKeys

    if peer_address is None:
        return PeerKeys(own_address(server.rpartition(":")[0].strip("[]")), 0, token)
    host, _, port = peer_address.rpartition(":") if ":" in peer_address else (peer_address, "", "0")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--peer-address {peer_address}: it is HOST or HOST:PORT", param="--peer-address")
    return PeerKeys(host, int(port), token)
