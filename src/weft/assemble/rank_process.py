"""A rank's own process: ``python -m weft.assemble.rank_process FD``, started by ``weft.ranks.peers``.

    FD        one end of a pair of sockets; its end means that rank 0 is gone

    launch -> meet the other ranks -> load the rank's share of the weights -> room, identity
    layout -> arena, executor -> ready; on a GPU, graphs of decode steps, which all ranks record at once
    plans  -> one step each, in order, between them transfer buffers that come and go; the next step is launched
              while the device computes one

The process decides nothing. It replies to a step only if the step stores; for any other step the collectives are the
reply. The process ends when its socket closes, and when a collective fails, because rank 0 is gone then or has given
up. If it fails itself, it sends a message first.

Arrays of a plan that are equal to those of the plan before are replaced by the older ones: the runner recognises a step
of the same decodes by the identity of its arrays (``runner.decodes``), which pickling loses.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.assemble import assembly
from weft.assemble.ranks import group_of, identity_of, identity_with, meet, settings_of
from weft.assemble.room import (
    adapter_bytes,
    cache_dtypes,
    measured_gpu_room,
    mixed_tokens_max,
    ram_room,
    records_verify_runs,
)
from weft.assemble.weights import WeightsSource
from weft.errors import ConfigError, UserError
from weft.logs import set_up_child_logging
from weft.ranks import messages
from weft.ranks.shared_buffers import ReceivedBuffers, received
from weft.schedule.plan import StepPlan
from weft.units import format_bytes

if TYPE_CHECKING:
    from weft.runner.launched import LaunchedStep
    from weft.runner.torch_executor import TorchExecutor

_NEW_EACH_STEP = ("tokens", "starts")
_IDLE_S = 0.1
"""Seconds without a message after which the steps under way are waited for: an error of the last one is said then."""
_GRACE_S = 0.5
"""Seconds for an end in good order, once rank 0 is gone."""


def serve_launch(launch: messages.RankLaunch, connection: Connection[Any, Any]) -> None:
    """Serve one launch until its close."""
    config = launch.config
    threads = assembly.prepare_torch(config, [])
    device = assembly.choose_device_of(config, launch.rank, [])
    assembly.choose_kernels(config, threads, device)
    connection.send(messages.RankPresent())
    collectives = meet(config, launch.folder, launch.rank, device)
    group = group_of(config, launch.rank, collectives)

    source = WeightsSource(config, "", launch.directory, leads=False)

    loaded = source.load(device, group)
    spec, kv_dtype = cache_dtypes(config, loaded.spec)
    capture = assembly.choose_capture(config, device, group)
    identity = identity_with(identity_of(launch.directory, settings_of(config)), loaded)
    connection.send(messages.RankLoaded(identity, loaded.spec, loaded.weights_bytes, loaded.read_bytes))
    room = (
        ram_room(config, spec, kv_dtype)
        if device.type == "cpu"
        else measured_gpu_room(config, loaded, spec, kv_dtype, device, capture, lambda line: None)
    )
    connection.send(messages.RankRoom(room.most_bytes, room.usual_bytes))
    layout = connection.recv()
    if isinstance(layout, messages.RankClose):
        connection.send(messages.RankReady(0))
        return
    assert isinstance(layout, messages.RankLayout)

    from weft.ranks.samplers import FollowingSampler
    from weft.runner.torch_executor import TorchExecutor

    leader = collectives if launch.shares_choice else None
    try:
        executor = TorchExecutor(
            loaded.model,
            layout.arena,
            layout.sizes,
            kv_scales=loaded.kv_scales,
            device=device,
            reload=source.reload,
            read_from=source.read_from,
            capture=capture,
            mixed_tokens_max=mixed_tokens_max(config),
            verify_runs=records_verify_runs(config),
            adapters=adapter_bytes(config) > 0,
            on_worker=False,
            sampler=partial(FollowingSampler, leader),
        )
    except (MemoryError, RuntimeError) as error:
        size = format_bytes(layout.arena.arena_bytes)
        raise ConfigError(f"an arena of {size} cannot be allocated: {error}", param="--memory") from error
    del loaded
    buffers = ReceivedBuffers(launch.rank, launch.size, layout.arena.page_bytes, layout.arena.slot_bytes)
    if config.moves_records:  # a GPU has rooms for transfers then, which the reserve counts
        executor.arena.attach(buffers)
    connection.send(messages.RankReady(layout.arena.arena_bytes))
    executor.record_graphs()  # rank 0 says which sizes were refused
    executor.warm()
    try:
        follow(executor, connection, buffers)
    finally:
        executor.close()
        buffers.close()


class _LaunchedSteps:
    """Steps of a rank, at most two of them launched and not known to be computed, as on rank 0."""

    def __init__(self, executor: TorchExecutor) -> None:
        self._executor = executor
        self._launched: deque[LaunchedStep] = deque()

    def launch(self, plan: StepPlan) -> None:
        launched = self._executor.launch(plan)
        self._launched.append(launched)
        self.await_all_but(0 if launched.continues else 1)

    def await_all_but(self, count: int) -> None:
        """Wait until at most ``count`` steps are under way. Raises the errors of the others."""
        while len(self._launched) > count:
            self._launched.popleft().result()


def follow(executor: TorchExecutor, connection: Connection[Any, Any], buffers: ReceivedBuffers) -> None:
    """Compute the steps that rank 0 sends, until a close."""
    before: StepPlan | None = None
    steps = _LaunchedSteps(executor)
    while True:
        if not connection.poll(_IDLE_S):
            steps.await_all_but(0)
        message = connection.recv()
        if isinstance(message, StepPlan):
            before = with_known_arrays(message, before)
            steps.launch(before)
            if before.arena_work.stores:
                steps.await_all_but(0)
                executor.arena.await_transfers()
                connection.send(messages.RankStored())
            continue
        steps.await_all_but(0)
        if isinstance(message, messages.RankBuffer):
            buffers.receive(message, connection)
        elif isinstance(message, messages.RankBufferFreed):
            executor.arena.follow_loads(message.buffer)  # before the next step, and so before its end
            buffers.forget(message)
        elif isinstance(message, messages.RankMemory):
            from weft.tensor.gpu.host_memory import CudaPin, HostBuffer

            buffers.memory = HostBuffer(
                message.size, CudaPin(executor.arena.device), received(connection, message.size)
            )
        elif isinstance(message, messages.RankCall):
            getattr(executor, message.method)(*message.arguments)
            connection.send(messages.RankDone())
        elif isinstance(message, messages.RankPicture):
            assert executor.pictures is not None
            if message.data:
                executor.pictures.receive(message.digest, message.data, message.grids)
            else:
                executor.pictures.drop(message.digest)
        else:
            assert isinstance(message, messages.RankClose)
            connection.send(messages.RankReady(0))
            return


def with_known_arrays(plan: StepPlan, before: StepPlan | None) -> StepPlan:
    """Return ``plan`` with the arrays of ``before`` that are equal to its own."""
    if before is None or plan.run_count != before.run_count or plan.rows_cleared or plan.admissions:
        return plan
    known = {}
    for field in fields(plan):
        now, then = getattr(plan, field.name), getattr(before, field.name)
        if isinstance(now, np.ndarray) and field.name not in _NEW_EACH_STEP and np.array_equal(now, then):
            known[field.name] = then
    return replace(plan, **known)


def main(descriptor: int, serve: Callable[[messages.RankLaunch, Connection[Any, Any]], None] = serve_launch) -> int:
    set_up_child_logging("rank")
    threading.Thread(target=_end_with_rank_0, args=(descriptor,), daemon=True).start()
    connection: Connection[Any, Any] = Connection(descriptor)
    while True:
        try:
            launch = connection.recv()
        except (EOFError, OSError):
            return 0
        try:
            serve(launch, connection)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return 0
        except UserError as error:  # rank 0 decides whether another launch follows
            if not _said(connection, messages.RankFailed(error.message, refused=True, param=error.param)):
                return 0
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            _said(
                connection,
                messages.RankFailed(text, traceback=traceback.format_exc(), lost_others=_is_of_collectives(error)),
            )
            return 1


def _end_with_rank_0(descriptor: int) -> None:
    """End this process soon after rank 0 is gone: a collective on a GPU would wait for ever."""
    gone = select.poll()
    gone.register(descriptor, select.POLLHUP | select.POLLRDHUP)
    gone.poll()
    time.sleep(_GRACE_S)
    os._exit(0)


def _is_of_collectives(error: BaseException) -> bool:
    """Return whether ``error`` is of gloo or NCCL, so that another rank is to blame."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL"))


def _said(connection: Connection[Any, Any], failed: messages.RankFailed) -> bool:
    """Send ``failed`` and return whether rank 0 can still be told."""
    try:
        connection.send(failed)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    _code = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(_code)
