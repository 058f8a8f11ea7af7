"""An HTTP worker: ``python -m weft.server.workers.process``, started by ``supervisor``.

    stdin:   one WorkerLaunch, then nothing; its end means that the supervisor is gone
    HTTP:    the listening socket that all workers share
    zmq:     a DEALER to the supervisor (``front``)

It has a session of its own, so signals of the terminal do not reach it: the supervisor decides about Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import socket
import sys
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
import uvloop

from weft.errors import WeftError
from weft.fleet.fleet import Fleet
from weft.rpc.engine_process import die_with_parent
from weft.rpc.messages import Refusal
from weft.server.config import ServerConfig
from weft.server.http import LAST_ANSWERS_S, http_server, raise_file_limit, set_up_logging
from weft.server.service import Service, load_served_model
from weft.server.workers.forward import forward_handler
from weft.server.workers.front import FrontFleet
from weft.server.workers.messages import FleetState, Opened, WorkerLaunch
from weft.server.workers.shared_counts import SharedCounts


def worker_config(launch: WorkerLaunch) -> ServerConfig:
    """Files and batches are the supervisor's."""
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value
                              for name, value in launch.config.items()}
    return dataclasses.replace(ServerConfig(**values), file_store="off")


async def answer(launch: WorkerLaunch, routing_id: str) -> None:
    """Until the supervisor says Stop."""
    config = worker_config(launch)
    counts = SharedCounts(Path(launch.counts_file), process=launch.process, processes=launch.processes,
                          keys=len(config.client_keys()))
    front = FrontFleet(launch.requests_address, routing_id)
    # Handlers of workers use a part of Fleet, and FrontFleet has it; the rest is forwarded.
    service = Service(config, cast(Fleet, front), counts=counts)
    front.series = service.metrics.series

    def on_state(state: FleetState) -> None:
        service.draining = state.draining

    front.on_state = on_state
    raise_file_limit(config.max_connections)
    sweeping = asyncio.create_task(service.edge.sweep_forever())
    receiving = asyncio.create_task(front.receive())
    http = http_server(service, forward=forward_handler(launch.http_socket))
    listener = socket.socket(fileno=launch.listener)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    opening = asyncio.create_task(open_model(service, front))
    try:
        await front.stopped.wait()
    finally:
        http.should_exit = True
        await asyncio.wait((serving,), timeout=LAST_ANSWERS_S)
        service.edge.abort_all()
        http.force_exit = True
        with contextlib.suppress(Exception):
            await serving
        for task in (opening, sweeping, receiving):
            task.cancel()
        await service.close()
        front.close()


async def open_model(service: Service, front: FrontFleet) -> None:
    """Once the supervisor knows the model. The supervisor learns whether it can be served."""
    try:
        service.open(await asyncio.to_thread(load_served_model, await front.info, service.config))
    except WeftError as error:
        front.opened(Opened(Refusal.of(error)))
    else:
        front.opened(Opened())


def read_launch(stream: BinaryIO) -> WorkerLaunch:
    """Eight bytes of length, then msgpack. Raises EOFError when the supervisor ended before."""
    size = stream.read(8)
    body = stream.read(int.from_bytes(size, "little"))
    if len(size) < 8 or len(body) < int.from_bytes(size, "little"):
        raise EOFError("the supervisor ended before it said what to serve")
    return msgspec.msgpack.decode(body, type=WorkerLaunch)


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    launch = read_launch(sys.stdin.buffer)
    die_with_parent(sys.stdin.fileno(), launch.folder)
    set_up_logging(worker_config(launch))
    runner: Any = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    with runner:
        runner.run(answer(launch, arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
