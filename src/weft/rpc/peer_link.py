"""``PeerLink``: a ``Wire`` of parcels between engine processes, with its own thread.

    sender    DEALER for each peer  -- ticket | size of the head | place | frames -->  ROUTER   receiver
              <------------------------ ticket | reason, empty if verified ----------
    frames          of the head, which is the parcel, and of the bytes of each record
    one machine     ipc, and the bytes are in shared memory: the message has its place   /proc/PID/fd/N
    two machines    tcp with CURVE, with the keys of the fleet's token; the bytes are in the message

An address is "ipc://FOLDER/peers tcp://HOST:PORT". A process that sees the folder is on the same machine; other
processes use the second part. Nothing listens on tcp without a token. The shared memory has no name, so the system
frees it with its last process, also after kill -9. A receiver that cannot open it reports that, and gets the bytes in a
message.

Each send has one outcome. If a link breaks, a key is refused, or no answer comes for SILENT_S, all sends under way on
the link fail. ZeroMQ delivers a message completely or not at all, so a sender that vanishes in the middle of a record
leaves nothing. The parcels of a handoff are sent one after the other. If a receiver has no room, the send is repeated
for up to ROOM_S.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from weft.rpc.link import LinkKeys, dial, ending_of, frames, listen
from weft.rpc.messages import PeerKeys
from weft.store.inbox import FULL, ROOM_S, Parcel
from weft.store.peer_store import Outcome

SILENT_S = 5.0
"""Seconds without an answer after which a receiver counts as vanished."""
_AGAIN_S = 0.02
_LOOK_MS = 200
_NO_MEMORY = b"no shared memory"
_encoder = msgspec.msgpack.Encoder()
_parcels = msgspec.msgpack.Decoder(Parcel)
Accept = Callable[[Parcel, memoryview], str]


class _Memory(msgspec.Struct, frozen=True):
    """Location of bytes in shared memory: a process and a descriptor of it."""

    process: int
    descriptor: int
    nbytes: int


@dataclass(slots=True)
class _Send:
    """One parcel under way. ``memory``: the descriptor that the receiver maps, -1 for bytes in a message. ``began_s``:
    time of the last try; ``asked_s``: time of the first."""

    ticket: int
    parcel: Parcel
    payloads: Sequence[memoryview]
    asked_s: float = 0.0
    began_s: float = 0.0
    memory: int = -1

    def drop_memory(self) -> None:
        if self.memory >= 0:
            os.close(self.memory)
            self.memory = -1


@dataclass(slots=True)
class _Peer:
    """One connection. ``is_near``: over ipc."""

    address: str
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    is_near: bool
    sends: dict[int, _Send] = field(default_factory=dict)


class PeerLink:
    """A ``Wire`` between engines. ``folder``: private, of this process. ``accept`` takes a parcel and its bytes, and
    returns the reason of a refusal, else nothing; the link's thread calls it. ``keys``: None without other machines.
    Raises zmq.ZMQError for a port that is in use."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], folder: str, accept: Accept, keys: PeerKeys | None = None
    ) -> None:
        self._context = context
        self._accept = accept
        self._keys = None if keys is None else LinkKeys.of(keys.token)
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._wishes: queue.SimpleQueue[tuple[str, _Send] | None] = queue.SimpleQueue()
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_in, False)
        self._peers: dict[str, _Peer] = {}
        self._queues: dict[str, deque[tuple[str, _Send]]] = {}
        """Sends by handoff, with addresses: the first is under way, or waits for room at the receiver."""
        self._roomless: list[tuple[float, str, _Send]] = []
        """Times at which sends without room are tried again."""
        self._authenticator: ThreadAuthenticator | None = None
        self._near, self.address = listen(context, f"ipc://{folder}/peers", None)
        self._far: zmq.Socket[bytes] | None = None
        if keys is not None:
            self._listen(keys)
        self._thread = threading.Thread(target=self._run, name="peer-link", daemon=True)
        self._thread.start()

    def _listen(self, keys: PeerKeys) -> None:
        assert self._keys is not None
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=self._keys)
        self._far, endpoint = listen(self._context, f"tcp://{keys.host}:{keys.port}", self._keys)
        self.address += f" tcp://{keys.host}:{endpoint.rpartition(':')[2]}"

    # ------------------------------------------------------------------ the engine's thread

    def send(self, ticket: int, address: str, parcel: Parcel, payloads: Sequence[memoryview]) -> None:
        self._wish((address, _Send(ticket, parcel, payloads)))

    def outcomes(self) -> list[Outcome]:
        outcomes: list[Outcome] = []
        while not self._outcomes.empty():
            outcomes.append(self._outcomes.get())
        return outcomes

    def close(self) -> None:
        self._wish(None)
        self._thread.join(SILENT_S)
        if self._authenticator is not None:
            self._authenticator.stop()

    def _wish(self, wish: tuple[str, _Send] | None) -> None:
        self._wishes.put(wish)
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so the thread will wake anyway
            os.write(self._wake_in, b"!")

    # ------------------------------------------------------------------ the link's thread

    def _run(self) -> None:
        listeners = [self._near, *(() if self._far is None else (self._far,))]
        goes_on = True
        while goes_on:
            poller = zmq.Poller()
            for source in (
                self._wake_out,
                *listeners,
                *(peer.socket for peer in self._peers.values()),
                *(peer.monitor for peer in self._peers.values()),
            ):
                poller.register(source, zmq.POLLIN)
            ready = dict(poller.poll(int(_AGAIN_S * 1000) if self._roomless else _LOOK_MS))
            if self._wake_out in ready:
                os.read(self._wake_out, 4096)
            for listener in listeners:
                if listener in ready:
                    self._receive(listener)
            for peer in list(self._peers.values()):
                if peer.socket in ready:
                    self._take_answers(peer)
                if peer.monitor in ready:
                    self._watch(peer)
                self._end_silent(peer)
            self._ask_again()
            goes_on = self._take_wishes()
        for peer in list(self._peers.values()):
            self._break(peer, "this engine ends")
        for _, send in [waiting[0] for waiting in self._queues.values()]:  # sends that wait for room
            self._end(send, "this engine ends")
        for listener in listeners:
            listener.close(0)

    def _take_wishes(self) -> bool:
        """Return whether the link goes on."""
        while not self._wishes.empty():
            wish = self._wishes.get()
            if wish is None:
                return False
            queue = self._queues.setdefault(wish[1].parcel.handoff, deque())
            queue.append(wish)
            if len(queue) == 1:
                self._try(*wish)
        return True

    def _ask_again(self) -> None:
        now_s = time.monotonic()
        due = [waiting for waiting in self._roomless if waiting[0] <= now_s]
        self._roomless = [waiting for waiting in self._roomless if waiting[0] > now_s]
        for _, address, send in due:
            self._try(address, send)

    def _try(self, address: str, send: _Send) -> None:
        try:
            peer = self._peers.get(address) or self._connect(address)
            self._put(peer, send, near=peer.is_near)
        except (zmq.ZMQError, OSError) as error:
            if address in self._peers:
                self._peers[address].sends.pop(send.ticket, None)
            self._end(send, f"{address}: {error}")

    def _connect(self, address: str) -> _Peer:
        near, _, far = address.partition(" ")
        is_near = os.path.exists(near.removeprefix("ipc://"))
        if not is_near and (not far or self._keys is None):
            raise OSError("the engine is gone, or on another machine without --token")
        socket, monitor = dial(self._context, *((near, None) if is_near else (far, self._keys)))
        peer = self._peers[address] = _Peer(address, socket, monitor, is_near)
        return peer

    def _put(self, peer: _Peer, send: _Send, *, near: bool) -> None:
        parcel = _encoder.encode(send.parcel)
        head = [send.ticket.to_bytes(8, "little"), len(parcel).to_bytes(8, "little")]
        peer.sends[send.ticket] = send
        send.began_s = time.monotonic()
        send.asked_s = send.asked_s or send.began_s
        if near and hasattr(os, "memfd_create"):
            if send.memory < 0:
                send.memory = _shared(send.payloads, send.parcel.nbytes)
            place = _Memory(os.getpid(), send.memory, send.parcel.nbytes)
            peer.socket.send_multipart([*head, _encoder.encode(place), *frames(parcel)], zmq.NOBLOCK)
        else:
            peer.socket.send_multipart([*head, b"", *frames(parcel, *send.payloads)], zmq.NOBLOCK)

    def _receive(self, listener: zmq.Socket[bytes]) -> None:
        """Receive a parcel of another engine."""
        with contextlib.suppress(zmq.Again):
            while True:
                sender, ticket, head_bytes, place, *pieces = listener.recv_multipart(zmq.NOBLOCK)
                content = memoryview(b"".join(pieces))
                head = int.from_bytes(head_bytes, "little")
                try:
                    answer = self._accepted(content[:head], place, content[head:]).encode()
                except msgspec.MsgspecError:
                    answer = b"a message of another version"
                except OSError:
                    answer = _NO_MEMORY
                with contextlib.suppress(zmq.ZMQError):  # the sender is gone
                    listener.send_multipart([sender, ticket, answer], zmq.NOBLOCK)

    def _accepted(self, head: memoryview, place: bytes, payloads: memoryview) -> str:
        parcel = _parcels.decode(head)
        if not place:
            return self._accept(parcel, payloads)
        memory = msgspec.msgpack.decode(place, type=_Memory)
        descriptor = os.open(f"/proc/{memory.process}/fd/{memory.descriptor}", os.O_RDONLY)
        try:
            if os.fstat(descriptor).st_size < max(1, memory.nbytes):
                return "records that do not fit together"
            with (
                mmap.mmap(descriptor, max(1, memory.nbytes), prot=mmap.PROT_READ) as mapped,
                memoryview(mapped) as whole,
                whole[: memory.nbytes] as content,
            ):
                return self._accept(parcel, content)
        finally:
            os.close(descriptor)

    def _take_answers(self, peer: _Peer) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                ticket, reason = peer.socket.recv_multipart(zmq.NOBLOCK)
                send = peer.sends.pop(int.from_bytes(ticket, "little"), None)
                if send is None:
                    continue
                now_s = time.monotonic()
                if reason == FULL.encode() and now_s - send.asked_s < ROOM_S:
                    self._roomless.append((now_s + _AGAIN_S, peer.address, send))
                elif reason == _NO_MEMORY:
                    send.drop_memory()
                    self._put(peer, send, near=False)
                else:
                    self._end(send, reason.decode("utf-8", "replace"))

    def _watch(self, peer: _Peer) -> None:
        with contextlib.suppress(zmq.Again):
            while peer.address in self._peers:
                ending = ending_of(recv_monitor_message(peer.monitor, zmq.NOBLOCK))
                if ending == "refused":
                    self._break(peer, "the other engine refuses the key: its fleet has another --token")
                elif ending is not None:
                    self._break(peer, "the other engine is gone")

    def _end_silent(self, peer: _Peer) -> None:
        now_s = time.monotonic()
        if any(now_s - send.began_s > SILENT_S for send in peer.sends.values()):
            self._break(peer, f"the other engine has not answered for {SILENT_S:g} s")

    def _break(self, peer: _Peer, reason: str) -> None:
        """Fail the sends of a connection that is over; the next send opens another one."""
        if self._peers.pop(peer.address, None) is None:
            return
        peer.socket.disable_monitor()
        peer.monitor.close(0)
        peer.socket.close(0)
        for send in peer.sends.values():
            self._end(send, reason)

    def _end(self, send: _Send, reason: str) -> None:
        """End ``send``, the first of its handoff. If it failed, the later sends of the handoff fail too."""
        queue = self._queues[send.parcel.handoff]
        while queue and (queue[0][1] is send or reason):
            _, ended = queue.popleft()
            ended.drop_memory()
            self._outcomes.put(Outcome(ended.ticket, reason, time.monotonic() - ended.began_s))
        if queue:
            self._try(*queue[0])
        else:
            del self._queues[send.parcel.handoff]


def _shared(payloads: Sequence[memoryview], nbytes: int) -> int:
    """Return a descriptor of shared memory with these bytes."""
    descriptor = os.memfd_create("weft-parcel")
    try:
        os.ftruncate(descriptor, max(1, nbytes))
        with mmap.mmap(descriptor, max(1, nbytes)) as mapped:
            for payload in payloads:
                mapped.write(payload)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
