"""An HTTP worker: the server of one process, whose engine is the fleet of the supervisor (``link``).

It answers on the listening socket that all workers share. At SIGTERM it ends, after its last answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import uvloop

from weft.fleet.fleet import Fleet
from weft.host import end_start
from weft.logs import set_up_child_logging
from weft.rpc.child import die_with_parent, read_launch
from weft.rpc.client import EngineClient
from weft.server.edge import SharedCounts
from weft.server.http import serving
from weft.server.models import Models, PinnedModel
from weft.server.served_model import load_served_model
from weft.server.service import Service
from weft.server.workers.forward import forward_handler
from weft.server.workers.link import Attached, FleetOfWorker, SupervisorLink, WorkerLaunch


async def answer(launch: WorkerLaunch, routing_id: str) -> None:
    """Answer requests until SIGTERM."""
    config = launch.server_config()
    counts = SharedCounts(
        Path(launch.counts_file), process=launch.process, processes=launch.processes, keys=len(config.client_keys())
    )
    link = SupervisorLink(launch.requests_address, routing_id)
    fleet = FleetOfWorker(link)
    # Handlers of workers use a part of Fleet; the rest is forwarded.
    service = Service(config, Models([PinnedModel(cast(Fleet, fleet))]), counts=counts)
    listener = socket.socket(fileno=launch.listener)
    async with contextlib.AsyncExitStack() as until_end:

        async def listen() -> None:
            await until_end.enter_async_context(serving(service, listener, forward_handler(launch.http_socket)))

        answering = asyncio.create_task(answer_for_ever(service, fleet.client, link, launch, listen))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, answering.cancel)
        if not launch.is_replacement:
            await listen()
        await fleet.client.start()
        with contextlib.suppress(asyncio.CancelledError):
            await answering
    await fleet.client.stop("this worker ends")


async def answer_for_ever(
    service: Service,
    client: EngineClient,
    link: SupervisorLink,
    launch: WorkerLaunch,
    listen: Callable[[], Awaitable[None]],
) -> None:
    """Answer requests once the supervisor knows the model and this worker has read it. A replacement takes no
    connection before that: other workers answer meanwhile."""
    service.open(await asyncio.to_thread(load_served_model, await client.ready(), service.config))
    end_start()
    if launch.is_replacement:
        await listen()
    link.say(Attached(serves=True))
    await asyncio.Event().wait()


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    launch = read_launch(sys.stdin.buffer, WorkerLaunch)
    die_with_parent(sys.stdin.fileno(), launch.folder)
    set_up_child_logging("http")
    runner: Any = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    with runner:
        runner.run(answer(launch, arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
