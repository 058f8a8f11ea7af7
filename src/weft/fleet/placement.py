"""The place of each live request: held, or on a replica. Requests are submitted, placed, taken back, and ended.

                          router.choose
    submit --> held ---------------------> replica 0   [engine process]  --events--> stream of the client
                ^                          replica 1   [engine process]      |
                |                                                            '--> tokens so far
                '--------- the requests of a replica whose engine ended ------------'

A request is held while no replica can take it. Held requests go out in the order of their arrival. New ones are held up
to the bound of the engine's own queue (law L11); accepted requests are never refused for a full queue. A new request
that one replica refuses for its full queue is offered to the others.

A request may be split: one replica computes the prompt and the first token, and sends the records to another replica,
where the request is placed next (``live_request``). If either replica ends, the request is held like any other.

A request without a seed gets one here, so that every engine draws the same tokens. Placing is synchronous, so no
request can be lost between two states.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from weft.config import EngineConfig
from weft.errors import EngineUnavailableError, QueueFullError, WeftError
from weft.fleet.live_request import EventSink, LiveRequest, RequestStream
from weft.fleet.replica import Replica
from weft.handoff import Handoff
from weft.request import Request, TokenEvent, split_seed
from weft.router.protocol import ReplicaLoad, Route, Router
from weft.rpc.client import EngineClient

_REFUSED_RETRY_S = 0.2
"""Seconds before an accepted request is offered again to an engine whose queue was full."""
_log = logging.getLogger("weft.server")


class Placement:
    """The live requests of a fleet."""

    def __init__(self, config: EngineConfig, replicas: Sequence[Replica], router: Router) -> None:
        self.resume_count = 0
        """Resumes of requests, for the metrics."""
        self.deadly_count = 0
        """Requests that were refused because engines died while they computed them."""
        self.handoff_count = 0
        """Requests whose prompt and answer were computed by different engines."""
        self.admitted_count = 0
        """Requests whose first event has come."""
        self._config = config
        self._replicas = replicas
        self._router = router
        self._closed: WeftError | None = None
        self._lives: dict[str, LiveRequest] = {}
        self._streams: dict[str, EventSink] = {}
        self._acceptances: dict[str, asyncio.Future[None]] = {}
        self._held: list[LiveRequest] = []
        self._placed: defaultdict[int, dict[str, LiveRequest]] = defaultdict(dict)
        self._loads: defaultdict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
        """Sequences and tokens that the requests of each replica brought."""
        self._request_count = 0
        self._offers: dict[str, asyncio.Task[None]] = {}

    @property
    def held_count(self) -> int:
        """Number of answers of requests that wait for a replica."""
        return sum(live.open_count for live in self._held)

    # ------------------------------------------------------------------ requests

    async def submit(self, requests: list[Request]) -> RequestStream:
        """Place ``requests`` with a new stream, and return the stream."""
        stream = RequestStream([request.request_id for request in requests])
        await self.place(requests, stream)
        return stream

    async def place(self, requests: list[Request], stream: EventSink) -> None:
        """Place requests, and return when engines have accepted them, all or none. ``stream`` gets the events. Raise
        the first refusal, QueueFullError, or EngineUnavailableError."""
        if self._closed is not None:
            raise self._closed
        self._check_held(sum(request.sampling.n for request in requests))
        acceptances = []
        for request in requests:
            live = LiveRequest(seeded(request, self._config.seed, self._request_count), self._request_count)
            self._request_count += 1
            self._lives[live.id], self._streams[live.id] = live, stream
            acceptance = self._acceptances[live.id] = asyncio.get_running_loop().create_future()
            acceptances.append(acceptance)
            self._held.append(live)
        self.dispatch()
        try:
            await asyncio.gather(*acceptances)
        except BaseException:
            for request in requests:
                self.cancel(request.request_id)
            raise

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """Cancel an answer, or all of a request, at any time; never waits. Unknown ids are ignored."""
        live = self._lives.get(request_id)
        if live is None:
            return
        live.cancel(index)
        if live.replica is not None:
            self._replicas[live.replica].engine.cancel(request_id, index)
        if not live.open_count:
            self._forget(live)

    def close(self, stream: RequestStream) -> None:
        """Close ``stream``: its later events are dropped."""
        for request_id in stream.request_ids:
            self._streams.pop(request_id, None)

    def abandon(self, stream: EventSink) -> None:
        """Cancel all requests whose events go to ``stream``."""
        for request_id in [request_id for request_id, sink in self._streams.items() if sink is stream]:
            self.cancel(request_id)

    def _check_held(self, new: int) -> None:
        waiting, limit = self.held_count, self._config.max_queued_requests
        if waiting and waiting + new > limit:
            raise QueueFullError(
                f"{waiting} sequences wait for an engine to restart and this request brings {new}; the limit is "
                f"{limit} (limits.max_queued_requests). Try again later",
                param="limits.max_queued_requests",
                code="queue_full",
            )

    # ------------------------------------------------------------------ placing

    def count_on(self, number: int) -> int:
        """Return the number of sequences of the requests on a replica."""
        return self._loads[number][0]

    def lost(self, replica: Replica, *, blamed: bool = True) -> None:
        """Hold the requests of a replica whose engine has ended for another one. ``blamed``: by a death."""
        for live in list(self._placed[replica.number].values()):
            self._take_back(live)
            try:
                live.lost(blamed=blamed)
            except WeftError as error:
                self.deadly_count += 1
                self._fail(live, error)
            else:
                self.resume_count += live.accepted
                self._held.append(live)
        self._held.sort(key=lambda live: live.number)
        self.dispatch()

    def close_all(self, error: WeftError) -> None:
        """Fail all requests with ``error``, and later ones too, as no engine is left."""
        self._closed = EngineUnavailableError(error.message)
        for live in list(self._lives.values()):
            self._fail(live, self._closed)
        self._held.clear()

    def dispatch(self) -> None:
        """Place the held requests that a replica can take now."""
        if not self._held or self._closed is not None:
            return
        waiting, self._held = self._held, []
        is_blocked = False
        """Whether every replica has a suspect. Hundreds of requests may wait then, and each end of a request calls
        this."""
        for live in waiting:
            if live.id not in self._lives:
                continue
            candidates = [] if live.strikes and is_blocked else list(self._candidates(live))
            if candidates:
                self._place(live, candidates)
            else:
                is_blocked |= bool(live.strikes) and not live.full_replicas
                self._held.append(live)

    def _candidates(self, live: LiveRequest) -> Iterator[ReplicaLoad]:
        for replica in self._replicas:
            placed, load = self._placed[replica.number], self._loads[replica.number]
            if (
                not replica.ready
                or replica.number in live.full_replicas
                or (live.strikes and any(other.suspect for other in placed.values()))
            ):
                continue
            info, stats = replica.engine.info, replica.engine.stats
            assert info is not None
            costs, link = (None, None) if stats is None else (stats.costs, stats.link)
            yield ReplicaLoad(replica.number, *load, info.sizes.rows_max, costs, replica.role, link)

    def _place(self, live: LiveRequest, candidates: list[ReplicaLoad], decode: int | None = None) -> None:
        """Place a request. ``decode``: the replica with the request's records, if it is one of ``candidates``."""
        routed = live.routed()
        if any(load.replica == decode for load in candidates):
            assert decode is not None
            choice = Route(decode, len(routed.tokens) - 1, moved=True)
        else:
            choice = self._router.choose(routed, candidates)
        number = choice.replica
        live.placed(number, choice.boundaries, self._handoff(live, choice), choice.decode)
        self._placed[number][live.id] = live
        self._add_load(number, live, 1)
        self._router.placed(routed, choice)
        self._offers[live.id] = asyncio.get_running_loop().create_task(self._offer(live, self._replicas[number].engine))

    def _handoff(self, live: LiveRequest, choice: Route) -> Handoff | None:
        """Return the handoff for the engine of a prompt; None where one engine computes all of the request."""
        if choice.decode is None:
            return None
        info = self._replicas[choice.decode].engine.info
        assert info is not None
        if len(live.request.prompt_tokens) + 1 >= info.sizes.max_model_len:
            return None  # the first token is the last one
        return Handoff(info.peer, choice.decode_tokens)

    def handed(self, number: int, request_id: str, reason: str) -> None:
        """Note that replica ``number`` has sent the records of a request; ``reason``: why it failed, empty for
        success."""
        live = self._lives.get(request_id)
        if live is None or live.replica != number or live.handoff is None:
            return
        live.handoff_end = reason
        if reason and live.decode is not None:
            self._router.handoff_failed(number, live.decode)
            _log.warning(
                "engine %d sent the records of a prompt to engine %d in vain: %s; the request is served another way",
                number,
                live.decode,
                reason,
            )
        self._move(live)

    def _move(self, live: LiveRequest) -> None:
        """Move a request to the replica that continues it, once the prompt is computed and the records have arrived."""
        if not live.is_handed:
            return
        self.handoff_count += not live.handoff_end
        decode = None if live.handoff_end else live.decode
        self._take_back(live)
        live.moved()
        candidates = list(self._candidates(live))
        if candidates:
            self._place(live, candidates, decode)
        else:
            self._hold(live)

    async def _offer(self, live: LiveRequest, engine: EngineClient) -> None:
        """Give the request to an engine, and tell ``submit`` the outcome."""
        try:
            await engine.submit(live.resumable())
        except WeftError as error:
            if engine.death is not None:
                return  # requests are taken back when the engine ends
            number = live.replica
            assert number is not None
            self._take_back(live)
            if error.code != "queue_full":
                self._fail(live, error)
            elif live.accepted:
                asyncio.get_running_loop().call_later(_REFUSED_RETRY_S, self._hold, live)
            else:
                live.full_replicas.add(number)
                candidates = list(self._candidates(live))
                if candidates:
                    self._place(live, candidates)
                else:
                    self._fail(live, error)
        else:
            self._accept(live)

    def _accept(self, live: LiveRequest) -> None:
        """Note that an engine has accepted the request. An event may show that before the reply is read."""
        live.accepted = live.begun = True
        live.full_replicas.clear()
        acceptance = self._acceptances.pop(live.id, None)
        if acceptance is not None and not acceptance.done():
            acceptance.set_result(None)

    def _hold(self, live: LiveRequest) -> None:
        if live.id in self._lives:
            self._held.append(live)
            self.dispatch()

    def _take_back(self, live: LiveRequest) -> None:
        """Take a request back from its replica."""
        number = live.replica
        assert number is not None
        offer = self._offers.pop(live.id)
        if offer is not asyncio.current_task():
            offer.cancel()
        del self._placed[number][live.id]
        self._add_load(number, live, -1)
        self._router.ended(live.id)
        live.replica = None

    def _add_load(self, number: int, live: LiveRequest, sign: int) -> None:
        sequences, tokens = self._loads[number]
        self._loads[number] = sequences + sign * live.load[0], tokens + sign * live.load[1]

    def _forget(self, live: LiveRequest) -> None:
        """Forget a request that has ended, which may make room for a held request."""
        del self._lives[live.id]
        self._streams.pop(live.id, None)
        acceptance = self._acceptances.pop(live.id, None)
        if acceptance is not None:
            acceptance.cancel()  # ends ``place`` if another task than its caller cancelled the request
        if live.replica is not None:
            self._take_back(live)
        self.dispatch()

    def _fail(self, live: LiveRequest, error: WeftError) -> None:
        acceptance, stream = self._acceptances.get(live.id), self._streams.get(live.id)
        if acceptance is not None:
            if not acceptance.done():
                acceptance.set_exception(error)
        elif stream is not None:
            stream.fail(live.id, error)
        self._forget(live)

    # ------------------------------------------------------------------ events

    def take(self, events: Sequence[TokenEvent]) -> None:
        """Pass on the events of one report. Each token of the fleet passes here, so the work for a first event is done
        only once."""
        lives, streams = self._lives, self._streams
        met: dict[EventSink, None] = {}
        for event in events:
            live = lives.get(event.request_id)
            if live is None:
                continue
            if not live.begun:
                self._accept(live)
            was_suspect = live.suspect if live.strikes else False
            said = live.take(event)
            if said is None:
                continue
            stream = streams.get(event.request_id)
            if stream is not None:
                stream.put(said)
                met[stream] = None
            if not live.admitted:
                live.admitted = True
                self.admitted_count += 1
                self._router.admitted(live.id, event.cached_tokens)
            if said.finish_reason is not None and not live.open_count:
                self._forget(live)
            elif live.handoff is not None:
                self._move(live)
            elif was_suspect and not live.suspect:
                self.dispatch()
        for stream in met:
            stream.deliver()


def seeded(request: Request, engine_seed: int, number: int) -> Request:
    """Return ``request`` with a seed, if it names none."""
    if request.sampling.seed is not None:
        return request
    sampling = msgspec.structs.replace(request.sampling, seed=split_seed(engine_seed, number))
    return msgspec.structs.replace(request, sampling=sampling)
