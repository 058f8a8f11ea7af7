"""The other ranks, as rank 0 sees them: child processes, sockets to them, and how each process ended.

    Peers.start     size - 1 processes of ``python -m weft.assemble.rank_process``
    launch, lay_out load weights, allocate the arena: rank 0 does the same in the meantime
    tell            a plan to all; no reply
    share           a transfer buffer to all; no reply
    await_stores    the reply to a plan that stores
    ask             sleep, wake: a reply of each
    failure         after a collective failed: the rank that is to blame, in one line

Rank 0 never waits longer than ``timeout_s``: a reply, a full socket and a collective all end with an error that names
``limits.rank_timeout``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any, TypeVar

from weft.config import EngineConfig, Sizes
from weft.errors import ConfigError, RankLostError, WeftError
from weft.host import exit_reason
from weft.memory.frames.plan import ArenaPlan
from weft.ranks import messages

RANK_PROCESS = "weft.assemble.rank_process"
START_TIMEOUT_S = 600.0
"""Seconds that loading weights may take; a rank that dies meanwhile is noticed at once."""
_log = logging.getLogger("weft.engine")
_END_S = 5.0
_LOOK_S = 0.5
"""Seconds to wait for the reason of a rank that failed: it closes its connections first."""
Answer = TypeVar("Answer")


class Peer:
    """Rank ``rank``, running in a process of its own."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.lost_others = False
        own, theirs = socket.socketpair()
        # Ranks on one machine share its cores: a thread that waits must not spin.
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
        with theirs:
            # A rank ends when its socket closes, so none outlives rank 0. A separate session keeps the terminal's
            # signals away.
            self.process = subprocess.Popen(
                [sys.executable, "-m", RANK_PROCESS, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
            )
        self._socket = own
        self.connection: Connection[Any, Any] = Connection(os.dup(own.fileno()))

    def limit_sends(self, seconds: float) -> None:
        """Make a send that the rank does not accept within ``seconds`` raise BlockingIOError."""
        whole = int(seconds)
        self._socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", whole, int((seconds - whole) * 1e6))
        )

    def answer(self, kind: type[Answer], timeout_s: float) -> Answer:
        """Return the next message. Raises the error that the rank sent, RankLostError if it died or is silent."""
        try:
            if not self.connection.poll(timeout_s):
                raise RankLostError(
                    f"rank {self.rank} has not answered for {timeout_s:g} s (limits.rank_timeout)",
                    param="limits.rank_timeout",
                )
            message = self.connection.recv()
            if isinstance(message, messages.RankRoom) and kind is messages.RankReady:
                message = self.connection.recv()  # an answer to a start that rank 0 had given up
        except (EOFError, OSError) as error:
            raise RankLostError(f"rank {self.rank} {self.ending()}") from error
        if isinstance(message, messages.RankFailed):
            raise failure_of(self.rank, message)
        assert isinstance(message, kind), f"rank {self.rank} sent {type(message).__name__}"
        return message

    def ending(self) -> str:
        """Return how the process ended, as the rest of a sentence."""
        try:
            return exit_reason(self.process.wait(_LOOK_S))
        except subprocess.TimeoutExpired:
            return "closed its connection and still runs"

    def close(self) -> None:
        """End the process, with SIGKILL if needed. Idempotent."""
        self.connection.close()
        self._socket.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Peers:
    """Ranks 1 to ``size`` - 1 of one engine. ``folder``: directory in which the ranks of the present launch meet."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.ranks = [Peer(rank) for rank in range(1, size)]
        for peer in self.ranks:
            peer.limit_sends(timeout_s)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.end_watch: Callable[[], None] = lambda: None
        """Ends the calls of ``check_alive`` while the device is waited for."""

    def launch(self, config: EngineConfig, directory: Path | Sequence[Path], *, shares_choice: bool) -> Path:
        """Let all ranks load ``directory`` (or one each); returns the folder where rank 0 meets them, once
        all are on their way there."""
        if self._folder is not None:
            self._folder.cleanup()
        self._folder = tempfile.TemporaryDirectory(prefix="weft-ranks-")
        folder = Path(self._folder.name)
        directories = [directory] * self.size if isinstance(directory, Path) else directory
        for peer in self.ranks:
            self._send(
                peer, messages.RankLaunch(peer.rank, self.size, config, directories[peer.rank], folder, shares_choice)
            )
        for peer in self.ranks:
            peer.answer(messages.RankPresent, START_TIMEOUT_S)
        return folder

    def loaded(self, identity: Mapping[str, str]) -> list[messages.RankLoaded]:
        """Return the answer of each rank after all have loaded. Raises ConfigError if a rank differs from
        ``identity``, which is rank 0's, in model, dtype or version.
        """
        answers = [peer.answer(messages.RankLoaded, START_TIMEOUT_S) for peer in self.ranks]
        for peer, answer in zip(self.ranks, answers, strict=True):
            differ = [name for name in identity if answer.identity.get(name) != identity[name]]
            if differ:
                said = "; ".join(f"{name} {answer.identity.get(name)}, rank 0 has {identity[name]}" for name in differ)
                raise ConfigError(f"rank {peer.rank} differs from rank 0 in {said}", param="--tp")
        return answers

    def rooms(self) -> list[messages.RankRoom]:
        return [peer.answer(messages.RankRoom, START_TIMEOUT_S) for peer in self.ranks]

    def check_alive(self) -> None:
        """Raise RankLostError, or the error that it gave, if the process of a rank has ended."""
        if any(peer.process.poll() is not None for peer in self.ranks):
            raise self.failure(RuntimeError("a rank has ended"))

    def lay_out(self, arena: ArenaPlan, sizes: Sizes) -> None:
        self.tell(messages.RankLayout(arena, sizes))

    def ready(self) -> list[messages.RankReady]:
        return [peer.answer(messages.RankReady, START_TIMEOUT_S) for peer in self.ranks]

    def tell(self, message: object) -> None:
        for peer in self.ranks:
            self._send(peer, message)

    def share(self, message: messages.RankBuffer | messages.RankMemory, descriptor: int | None) -> None:
        """Let all ranks map the memory of ``descriptor``; None: ``message`` needs none."""
        for peer in self.ranks:
            self._send(peer, message)
            if descriptor is None:
                continue
            try:
                send_handle(peer.connection, descriptor, peer.process.pid)
            except OSError as error:
                raise self.failure(error) from error

    def await_stores(self) -> None:
        """Return when all ranks have done the stores of a plan."""
        for peer in self.ranks:
            peer.answer(messages.RankStored, self.timeout_s)

    def ask(self, kind: type[Answer]) -> list[Answer]:
        """Return the reply of each rank to its last message."""
        return [peer.answer(kind, START_TIMEOUT_S) for peer in self.ranks]

    @property
    def descriptors(self) -> list[int]:
        """Descriptors that are readable once a rank has ended or failed: between steps no rank sends anything else."""
        return [peer.connection.fileno() for peer in self.ranks]

    def check(self) -> None:
        """Raise RankLostError, or the error of a failed rank, if one of ``descriptors`` is readable."""
        if any(peer.connection.poll(0) for peer in self.ranks):
            raise self.failure(RuntimeError("a rank sent a message between two steps"))

    def failure(self, error: BaseException) -> WeftError:
        """Return the error that ended a step, after ``error`` in a collective of rank 0."""
        # Ranks that lost another one fail too: look first for the rank that ended by itself.
        deadline_s = time.monotonic() + _LOOK_S
        while time.monotonic() < deadline_s:
            for peer in self.ranks:
                if (reason := self._reason(peer)) is not None:
                    return reason
            time.sleep(_LOOK_S / 20)
        if "imed out" in str(error):
            return RankLostError(
                f"a rank has not answered for {self.timeout_s:g} s (limits.rank_timeout)", param="limits.rank_timeout"
            )
        return RankLostError(f"the ranks lost each other: {error}")

    def _reason(self, peer: Peer) -> WeftError | None:
        with contextlib.suppress(EOFError, OSError):
            while peer.connection.poll(0):
                message = peer.connection.recv()
                if isinstance(message, messages.RankFailed):
                    peer.lost_others = message.lost_others
                    if not message.lost_others:
                        return failure_of(peer.rank, message)
        if peer.process.poll() is not None and not peer.lost_others:
            return RankLostError(f"rank {peer.rank} {peer.ending()}")
        return None

    def _send(self, peer: Peer, message: object) -> None:
        try:
            peer.connection.send(message)
        except BlockingIOError as error:
            raise RankLostError(
                f"rank {peer.rank} has not taken a plan for {self.timeout_s:g} s (limits.rank_timeout)",
                param="limits.rank_timeout",
            ) from error
        except OSError as error:
            raise self.failure(error) from error

    def free(self) -> None:
        """Let all ranks drop their model and wait for another launch. They answer with RankReady of 0 bytes."""
        self.tell(messages.RankClose())
        self.ready()

    def close(self) -> None:
        """End the processes. Idempotent."""
        self.end_watch()
        for peer in self.ranks:
            with contextlib.suppress(OSError):
                peer.connection.close()
        for peer in self.ranks:
            peer.close()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def failure_of(rank: int, failed: messages.RankFailed) -> WeftError:
    if failed.refused:
        return ConfigError(f"rank {rank}: {failed.message}", param=failed.param)
    _log.error("rank %d failed: %s\n%s", rank, failed.message, failed.traceback)
    return RankLostError(f"rank {rank} failed: {failed.message}")
