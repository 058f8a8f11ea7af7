"""The engine's own process: ``python -m weft.rpc.engine_process``, a child of the server.

    stdin:     one Launch message
    commands:  zmq PULL, read between two steps without waiting; without work, the loop waits for one
    events:    zmq PUSH, at most one StepReport per step; a second PUSH for the heartbeat's thread

        take commands -> core.step() -> report      while there is work
        (short wait) -> audit -> (wait)             when there is none: no busy loop

Tokenizing, JSON and slow clients are in the other process and never delay a step. The process never ends silently: a
Fatal report gives the reason first. The audit (law L1: recount the memory from its owners) runs once after each busy
period; a failed audit is fatal, because wrong accounts of memory lead to wrong answers.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pkgutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import zmq

from weft.config import EngineConfig
from weft.engine.engine import EngineCore
from weft.errors import ConfigError, RankLostError, RequestError, UserError, WeftError
from weft.handoff import Handoff
from weft.host import TRIM_EVERY_S, end_memory_turn, end_start, in_background, trim_heap, use_part_of_host
from weft.info import ModelInfo
from weft.kv_events import FLAG
from weft.logs import set_up_child_logging
from weft.memory.prefix.followers import SnapshotFollower
from weft.request import Request, TokenEvent
from weft.rpc.child import die_with_parent, own_group, read_launch
from weft.rpc.heartbeat import StepClock, start_beating
from weft.rpc.messages import (
    Cancel,
    Command,
    Fatal,
    Flush,
    Follow,
    GetCacheShape,
    Launch,
    LoadAdapter,
    Pause,
    PinPrefixes,
    Progress,
    Ready,
    Refusal,
    Reply,
    Report,
    Reset,
    Resume,
    Sleep,
    StepReport,
    Submit,
    UnloadAdapter,
    UnpinPrefixes,
    UpdateWeights,
    Wake,
)
from weft.rpc.pin_queue import PinQueue
from weft.rpc.queues import AdapterQueue, GrammarQueue
from weft.rpc.standstill import Standstill
from weft.snapshot_report import SnapshotReport
from weft.store.peer_store import PeerStore

if TYPE_CHECKING:
    from weft.rpc.kv_publisher import KvEventFeed
    from weft.rpc.recorder import Recorder

_log = logging.getLogger("weft.engine")
_AUDIT_AFTER_MS = 100
_GRAMMAR_LOOK_MS = 2
"""Milliseconds between two checks of the compiling thread while the engine waits only for a grammar."""
_STORE_LOOK_MS = 10
"""Milliseconds between two checks of the store while an idle engine has snapshots to write."""
_HANDOFF_LOOK_MS = 1
"""Milliseconds between two checks of the store while another engine waits for this engine's records."""
_STEPS_TO_CLOSE = 2
_STATS_EVERY_S = 0.1
_IDLE_LOOK_MS = 1000
"""Milliseconds between two checks of an idle engine, which then reports whether its bucket answers, and drops records
that no request took. An engine without bucket and handoffs needs no such checks."""
_LINGER_MS = 2000
_GIVEN_UP = "the server gave the request up"
_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)


class EngineLoop:
    """The loop that steps a core until a Stop command. ``commands`` and ``events`` are connected sockets;
    ``step_clock`` says when the running step began."""

    def __init__(
        self,
        core: EngineCore,
        commands: zmq.Socket[bytes],
        events: zmq.Socket[bytes],
        recorder: Recorder | None = None,
        kv_events: KvEventFeed | None = None,
    ) -> None:
        self.step_clock = StepClock()
        self._core = core
        self._recorder = recorder
        self._kv_events = kv_events
        self._commands = commands
        self._events = events
        self._stopping = False
        store = core.stats().store
        tier = core.store
        self._peers = tier.store if tier is not None and isinstance(tier.store, PeerStore) else None
        self._has_bucket = store is not None and bool(store.store.remote)
        self._grammar_queue = GrammarQueue(core.grammars, core.sizes.queue_max)
        self._adapter_queue = AdapterQueue(core.adapters, core.sizes.queue_max)
        self._submit_numbers: dict[str, int] = {}
        """Numbers of submits that wait for a grammar or an adapter, by request."""
        self._standstill = Standstill(core)
        self._pin_queue = PinQueue(core)
        self._replies: list[Reply] = []
        self._step_tokens: list[int] = []
        self._handoffs: dict[str, str] = {}
        self._step_count = 0
        self._computed: dict[str, int] = {}
        """Requests whose prompt was computed for another engine, with the step after which the prefix is in the
        tree."""
        self._stats_due_s = 0.0
        self._follower: SnapshotFollower | None = None
        self._full_report_due = False
        self._poller = zmq.Poller()
        self._poller.register(commands, zmq.POLLIN)
        for descriptor in () if core.processes is None else core.processes.descriptors:
            self._poller.register(descriptor, zmq.POLLIN)
        if kv_events is not None and kv_events.replay is not None:
            self._poller.register(kv_events.replay, zmq.POLLIN)

    def run(self) -> None:
        """Run until a Stop command. Raise the error that ends the engine: of the executor, or of an audit."""
        audited = True
        while not self._stopping:
            self._replies += self._standstill.look() + self._pin_queue.look(self._step_count)
            for number, request in self._standstill.released():
                self._submit(number, request)
            self._report_when_idle()
            if self._core.has_work:
                self._take_commands()
                if self._replies:  # before a step that may be the last
                    self._report([])
                self._report(self._step())
                if self._core.failure is not None:
                    raise self._core.failure
                audited = False
                continue
            store = self._core.store
            if self._grammar_queue.busy or self._adapter_queue.busy:
                self._wait(_GRAMMAR_LOOK_MS)
            elif store is not None and (store.is_waiting or self._has_orders):
                self._wait(_HANDOFF_LOOK_MS if self._has_orders else _STORE_LOOK_MS)
                self._core.poll_store()
            else:
                if not audited and not self._wait(_AUDIT_AFTER_MS):
                    self._core.audit()
                    audited = True
                    trim_heap(TRIM_EVERY_S)
                holds = self._peers is not None and bool(self._peers.inbox.held_bytes)
                if not self._wait(_IDLE_LOOK_MS if self._has_bucket or holds else None):
                    self._core.poll_store()
                    self._report([])
            self._take_commands()
            self._report_when_idle()
        self._grammar_queue.close()
        self._adapter_queue.close()

    @property
    def _has_orders(self) -> bool:
        return self._peers is not None and self._peers.open

    def _wait(self, limit_ms: int | None = None) -> bool:
        """Wait for a command, and return whether one arrived. Raise the error of another process that the executor
        needs."""
        ready = dict(self._poller.poll(limit_ms))
        if self._kv_events is not None:
            self._kv_events.answer()
            ready.pop(self._kv_events.replay, None)
        if self._core.processes is not None and any(source is not self._commands for source in ready):
            self._core.processes.check()
        return self._commands in ready

    def _report_when_idle(self) -> None:
        if self._computed and not self._core.has_work:
            self._follow_orders([])
        if self._peers is not None:
            self._handoffs |= dict(self._peers.ended())
        if (self._replies or self._full_report_due or self._handoffs) and not self._core.has_work:
            self._report([])

    def _step(self) -> list[TokenEvent]:
        computed_before = self._core.computed_tokens
        self.step_clock.begin()
        events = self._core.step()
        self.step_clock.end()
        self._step_count += 1
        computed = self._core.computed_tokens - computed_before
        if computed:  # otherwise the step only freed memory
            self._step_tokens.append(computed)
        return events

    def _take_commands(self) -> None:
        for request, refusal in self._grammar_queue.ready():
            self._submit(self._submit_numbers.pop(request.request_id), request, refusal)
        for numbers, requests, wrong in self._adapter_queue.answers():
            self._replies += [Reply.of(number) if wrong is None else Reply.refused(number, wrong) for number in numbers]
            for request in requests:
                self._submit(self._submit_numbers.pop(request.request_id), request, wrong)
        while True:
            try:
                raw = self._commands.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._obey(_commands.decode(raw))

    def _obey(self, command: Command) -> None:
        if isinstance(command, Submit):
            self._submit(command.number, command.request)
        elif isinstance(command, Cancel):
            if self._recorder is not None:
                self._recorder.cancelled(command.request_id, command.index)
            self._grammar_queue.cancel(command.request_id)
            self._adapter_queue.cancel(command.request_id)
            self._standstill.cancel(command.request_id)
            self._submit_numbers.pop(command.request_id, None)
            self._core.cancel(command.request_id, command.index)
            if self._peers is not None and command.index is None:
                self._peers.cancel(command.request_id)
        elif isinstance(command, Flush):
            self._core.flush_cache(store=command.store)
            self._replies.append(Reply.of(command.number))
        elif isinstance(command, GetCacheShape):
            self._replies.append(Reply.of(command.number, self._core.cache_shape()))
        elif isinstance(command, Sleep | Wake | Pause | Resume | UpdateWeights):
            self._replies += self._standstill.take(command)
        elif isinstance(command, PinPrefixes | UnpinPrefixes):
            self._replies += self._pin_queue.take(command, self._step_count)
        elif isinstance(command, LoadAdapter):
            self._load_adapter(command)
        elif isinstance(command, UnloadAdapter):
            self._replies.append(Reply.of(command.number, self._core.adapters.drop(command.digest)))
        elif isinstance(command, Follow):
            if self._follower is None:
                self._follower = self._core.memory.follow_snapshots(pages=command.pages)
            self._full_report_due = True
        elif isinstance(command, Reset):
            self._reset(command.number)
        else:
            self._stopping = True

    def _reset(self, number: int) -> None:
        """Drop all requests, because the server has given them up."""
        for request_id in self._submit_numbers:
            self._grammar_queue.cancel(request_id)
            self._adapter_queue.cancel(request_id)
        self._submit_numbers.clear()
        self._standstill.forget()
        self._pin_queue.forget()
        self._handoffs.clear()
        if self._peers is not None:
            self._peers.forget_orders()
            self._computed.clear()
        self._core.cancel_all(_GIVEN_UP)
        dropped: list[TokenEvent] = []
        while self._core.has_work and self._core.failure is None:
            dropped += self._step()
        if self._core.failure is not None:
            raise self._core.failure
        if self._recorder is not None:
            self._recorder.events(dropped)
        self._replies = [Reply.of(number)]

    def _load_adapter(self, command: LoadAdapter) -> None:
        if self._core.adapters.find(command.adapter):
            self._replies.append(Reply.of(command.number))
        else:
            self._adapter_queue.ask(command.number, command.adapter)

    def _submit(self, number: int, request: Request, refusal: WeftError | None = None) -> None:
        """Submit a request. ``refusal``: the error of its grammar or its adapter."""
        try:
            if refusal is not None:
                raise refusal
            if self._standstill.waits and self._standstill.hold(number, request):
                return
            if request.adapter is not None and self._kv_events is not None:
                self._kv_events.name(request.adapter)
            if (request.adapter is not None and self._adapter_queue.take(request)) or (
                request.sampling.grammar is not None and self._grammar_queue.take(request)
            ):
                self._submit_numbers[request.request_id] = number
                return
            self._core.submit(self._in_chunks(request))
        except WeftError as error:
            self._replies.append(Reply.refused(number, error))
        else:
            self._replies.append(Reply.of(number))
            if request.handoff is not None:
                self._order(request, request.handoff)
            if self._recorder is not None:
                self._recorder.accepted(request)

    def _in_chunks(self, request: Request) -> Request:
        """Return ``request``, changed so that states are saved after each chunk of the prompt, if another engine will
        continue it and the link is slow compared with prefills: then each chunk is sent while the next one is
        computed."""
        if request.handoff is None or self._peers is None:
            return request
        start, end, costs = request.handoff.start, len(request.prompt_tokens), self._core.meter.cost()
        compute_s = 0.0 if costs is None else costs.prefill_s(start, end)
        ends = self._peers.link_stats().chunk_ends(start, end, compute_s)
        return msgspec.structs.replace(request, boundaries=[*request.boundaries, *ends])

    def _order(self, request: Request, handoff: Handoff) -> None:
        if self._peers is None:
            self._handoffs[request.request_id] = "this engine sends no records"
            return
        from weft.pictures import request_keys

        keys = np.asarray(request_keys(request), np.int32)  # keys of pictures are negative
        self._peers.order(request.request_id, handoff.peer, request.salt, keys, handoff.start)
        if self._core.store is not None:
            self._core.store.seek(request.request_id, computed=False)

    def _report(self, events: list[TokenEvent]) -> None:
        if self._recorder is not None:
            self._recorder.events(events)
        if self._has_orders or self._computed:
            self._follow_orders(events)
        now_s = time.monotonic()
        stats = None
        # Counters travel with replies and ends: a client that saw a request begin or end must see it counted.
        news = bool(self._replies) or any(event.finish_reason is not None for event in events)
        if news or now_s >= self._stats_due_s or not self._core.has_work:
            stats = self._core.stats()
            self._stats_due_s = now_s + _STATS_EVERY_S
        snapshots = self._snapshots()
        if self._kv_events is not None:
            self._kv_events.publish()
            self._kv_events.answer()
            if stats is not None:
                stats = msgspec.structs.replace(stats, kv_events=self._kv_events.stats())
        if events or stats is not None or snapshots is not None or self._handoffs:
            send(
                self._events,
                StepReport(
                    replies=self._replies,
                    events=events,
                    step_tokens=self._step_tokens,
                    stats=stats,
                    snapshots=snapshots,
                    handoffs=self._handoffs,
                ),
            )
            self._replies, self._step_tokens, self._handoffs = [], [], {}

    def _follow_orders(self, events: list[TokenEvent]) -> None:
        assert self._core.store is not None
        for event in events:
            if event.finish_reason is not None and event.request_id not in self._core.streams.by_request:
                self._computed[event.request_id] = self._step_count + _STEPS_TO_CLOSE
        for request_id, step in list(self._computed.items()):
            if self._step_count >= step or not self._core.has_work:
                del self._computed[request_id]
                self._core.store.seek(request_id, computed=True)

    def _snapshots(self) -> SnapshotReport | None:
        if self._follower is None:
            return None
        if self._full_report_due:
            self._full_report_due = False
            return self._follower.full_report()
        return self._follower.take()


def start_recording(launch: Launch, assembled: Any) -> Recorder | None:
    """Start the recording, if one is wanted. Raise ConfigError where the file cannot be created."""
    if launch.record is None:
        return None
    from weft.rpc.recorder import Recorder

    target = launch.record
    return Recorder(
        Path(target.file),
        assembled.core,
        model=assembled.info.name,
        clock=time.monotonic,
        snapshots=str(launch.config.get("snapshots", "auto")),
        limit_bytes=target.limit_bytes,
        has_tokens=target.has_tokens,
    )


def start_kv_events(launch: Launch, core: EngineCore, context: zmq.Context[zmq.Socket[bytes]]) -> KvEventFeed | None:
    """Return the feed of KV events that ``launch`` asks for, if any. Raise ConfigError."""
    if launch.place.kv_events is None:
        return None
    from weft.rpc.kv_publisher import KvEventFeed

    if not core.memory.caches:
        raise ConfigError(f"{FLAG} needs the prefix cache, and --no-prefix-cache turns it off", param=FLAG)
    return KvEventFeed(core.memory, context, launch.place.kv_events, launch.place.rank)


def send(socket: zmq.Socket[bytes], report: Report) -> None:
    socket.send(_encoder.encode(report))


def build(launch: Launch, events: zmq.Socket[bytes]) -> Any:
    """Return the factory's result: an object with ``core`` (EngineCore) and ``info`` (ModelInfo)."""

    def assemble() -> Any:  # the imports too, which take seconds of a core
        assembled = pkgutil.resolve_name(launch.factory)(
            EngineConfig(**launch.config), on_progress=lambda text: send(events, Progress(str(text)))
        )
        with contextlib.suppress(RequestError):  # a model without grammars refuses them per request
            assembled.core.grammars.warm()
        return assembled

    if not launch.place.background:
        return assemble()
    own_group()
    assembled = in_background(assemble)
    if (native := sys.modules.get("weft.tensor.native")) is not None:
        native.set_threads(1)  # start the kernels' threads again: threads from the load would keep their low priority
        native.set_threads(assembled.info.threads)
    return assembled


def plug_link(assembled: Any, launch: Launch, context: zmq.Context[zmq.Socket[bytes]]) -> ModelInfo:
    """Return the engine's info; with handoffs, including the address for other engines. Raise ConfigError."""
    tier = assembled.core.store
    info: ModelInfo = assembled.info
    if tier is None or not isinstance(tier.store, PeerStore):
        return info
    from weft.rpc.peer_link import PeerLink

    peers = tier.store
    try:
        peers.plug(PeerLink(context, launch.folder, peers.inbox.accept, launch.place.peers))
    except zmq.ZMQError as error:
        where = "" if launch.place.peers is None else f" {launch.place.peers.host}:{launch.place.peers.port}"
        raise ConfigError(f"--peer-address{where}: {error.strerror}", param="--peer-address") from None
    return msgspec.structs.replace(info, peer=peers.wire.address if peers.wire else "")


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    launch = read_launch(sys.stdin.buffer, Launch)
    die_with_parent(sys.stdin.fileno(), launch.folder)
    set_up_child_logging("engine")
    use_part_of_host(launch.place.cores, launch.place.ram_share, launch.place.memory_turn, launch.place.memory_bytes)
    context = zmq.Context()
    commands, events = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    commands.connect(launch.commands_address)
    events.connect(launch.events_address)
    try:
        assembled = build(launch, events)
        recorder = start_recording(launch, assembled)
        kv_events = start_kv_events(launch, assembled.core, context)
        end_memory_turn()
        end_start()
        send(events, Ready(plug_link(assembled, launch, context), assembled.core.stats()))
        loop = EngineLoop(assembled.core, commands, events, recorder, kv_events)
        stop_beating = start_beating(context, launch.events_address, loop.step_clock, launch.beat_s)
        try:
            loop.run()
        finally:
            stop_beating()
            last = assembled.core.close()
            if recorder is not None:
                recorder.events(last)
                recorder.close()
        return 0
    except UserError as error:
        send(events, Fatal(message=error.message, refusal=Refusal.of(error)))
        return 2
    except RankLostError as error:
        _log.error(error.message)
        send(events, Fatal(message=error.message))
        return 1
    except BaseException as error:
        _log.critical("the engine ends: %s", error, exc_info=True)
        send(events, Fatal(message=f"{type(error).__name__}: {error}", traceback=traceback.format_exc()))
        return 1
    finally:
        context.destroy(linger=_LINGER_MS)


if __name__ == "__main__":
    gc.disable()
    _code = main()
    sys.stderr.flush()
    os._exit(_code)  # unloading torch module by module takes a second or two
