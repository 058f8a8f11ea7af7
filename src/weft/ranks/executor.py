"""Executor of an engine with several ranks: it sends the plan to all ranks, then computes the part of rank 0.

    engine --plan--> RankedExecutor --+-- pickled plan --> rank 1: TorchExecutor  -.
                                      |                                            |  collectives of the model
                                      +-- TorchExecutor of rank 0  <---------------'
                                                |
                                                +--> StepResult

All ranks have the same geometry in frames, pages and slots, so page ids, zeroing, taps, copies and moves mean
the same on each. Nothing but the plan is sent for a step; rows of pictures go before it. With a store,
transfer buffers are shared memory (``weft.ranks.shared_buffers``).

A rank that dies closes its connections, so rank 0's next collective fails at once. One that hangs lets it
fail after ``limits.rank_timeout``. Either way the step raises RankLostError with one line, and the engine
ends; a fleet restarts it, and its requests resume.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

from weft.adapters import Adapter
from weft.engine.stats import Part
from weft.errors import RankLostError, UserError, WeftError
from weft.models.adapters import LoadedAdapter
from weft.ranks.messages import RankCall, RankDone, RankPicture, for_other_ranks
from weft.ranks.peers import Peers
from weft.request import PlacedPicture
from weft.runner.pictures import PictureRows
from weft.runner.torch_executor import TorchExecutor
from weft.schedule.plan import StepPlan, StepResult
from weft.tensor.collectives import Collectives
from weft.tensor.device import is_remote

Result = TypeVar("Result")


class StepFence:
    """Fence that is passed once ``steps`` steps are computed."""

    def __init__(self, executor: RankedExecutor, steps: int) -> None:
        self._executor, self._steps = executor, steps

    def query(self) -> bool:
        return self._executor.steps_computed >= self._steps


class RankedPictures:
    """``weft.engine.pictures.PictureEncoder`` of all ranks: rank 0 encodes, and the other ranks get the rows before
    the next plan.
    """

    def __init__(self, own: PictureRows, peers: Peers) -> None:
        self._own, self._peers = own, peers
        self.row_bytes, self.picture_tokens = own.row_bytes, own.picture_tokens

    def check(self, picture: PlacedPicture) -> None:
        self._own.check(picture)

    def pieces(self, picture: PlacedPicture) -> Iterator[None]:
        yield from self._own.pieces(picture)
        self._peers.tell(RankPicture(picture.digest, *self._own.encoded(picture.digest)))

    def drop(self, digest: bytes) -> None:
        self._peers.tell(RankPicture(digest))
        self._own.drop(digest)


class RankedExecutor:
    """The executor of all ranks. ``own``: the executor of rank 0. ``peers``: the other ranks, laid out in the same
    arena; ``borrowed``: their processes outlive this executor. ``collectives``: the exchanges that the steps of rank 0
    take part in.
    """

    def __init__(self, own: TorchExecutor, peers: Peers, collectives: Collectives, *, borrowed: bool = False) -> None:
        self.own = own
        self.peers = peers
        self.collectives = collectives
        self.pictures = None if own.pictures is None else RankedPictures(own.pictures, peers)
        self._borrowed = borrowed
        self._closed = self._lost = False
        self._begun: deque[StepPlan] = deque()
        """Plans of the steps in flight."""
        self._steps_begun = self.steps_computed = 0
        """Steps with runs, in which every rank takes part."""

    def execute(self, plan: StepPlan) -> StepResult:
        self._tell(plan)
        return self._ended(plan, self._guarded(lambda: self.own.execute(plan)))

    def begin(self, plan: StepPlan) -> None:
        self._tell(plan)
        self._begun.append(plan)
        self.own.begin(plan)

    def finish(self) -> StepResult:
        result = self._guarded(self.own.finish)
        return self._ended(self._begun.popleft(), result)

    def _tell(self, plan: StepPlan) -> None:
        self.peers.tell(for_other_ranks(plan))
        self._steps_begun += bool(plan.run_count)

    def _ended(self, plan: StepPlan, result: StepResult) -> StepResult:
        self.steps_computed += bool(plan.run_count)
        if plan.arena_work.stores:
            # The store reads a transfer buffer only when every rank has written its part.
            self.peers.await_stores()
        return result

    def fence(self) -> StepFence:
        """Return a fence that is passed once the ranks have done everything that they were told so far."""
        return StepFence(self, self._steps_begun + 1)

    def transfers_done(self, step: int) -> bool:
        """Return whether the transfers of rank 0 are done. The other ranks wait for their stores within the step
        (``await_stores``), and for a load when a plan hands it over.
        """
        return self.own.transfers_done(step)

    def sleep(self, level: int) -> tuple[Part, ...]:
        self.peers.tell(RankCall("sleep", (level,)))
        missing = self.own.sleep(level)
        self.peers.ask(RankDone)
        return missing

    def read_from(self, directory: str) -> None:
        self.peers.tell(RankCall("read_from", (directory,)))
        self.own.read_from(directory)
        self.peers.ask(RankDone)

    def wake(self, part: Part) -> None:
        self.peers.tell(RankCall("wake", (part,)))
        try:
            self._guarded(lambda: self.own.wake(part))
        finally:
            self.peers.ask(RankDone)

    def read_adapter(self, adapter: Adapter) -> LoadedAdapter:
        return self.own.read_adapter(adapter)

    def install_adapter(self, loaded: LoadedAdapter) -> None:
        """Install the adapter between two steps: each rank reads its own share of the factors."""
        self.peers.tell(RankCall("change_adapter", (loaded.adapter, False)))
        self.own.install_adapter(loaded)
        self.peers.ask(RankDone)

    def remove_adapter(self, loaded: LoadedAdapter) -> None:
        self.peers.tell(RankCall("change_adapter", (loaded.adapter, True)))
        self.own.remove_adapter(loaded)
        self.peers.ask(RankDone)

    def close(self) -> None:
        """End the processes of the other ranks, or let them wait for another launch. Idempotent."""
        if not self._closed:
            self._closed = True
            self._part()
        # A collective that never ends holds the GPU until the process ends, so freeing memory would block for ever.
        if not (self._lost and is_remote(self.own.arena.device)):
            self.own.close()

    def _part(self) -> None:
        if self._borrowed:
            with contextlib.suppress(WeftError):  # a rank is lost: the others are of no use
                self.peers.free()
                return
        self.peers.close()

    def _guarded(self, compute: Callable[[], Result]) -> Result:
        """Return the result of ``compute``. If another rank caused ``compute`` to fail, raise that rank's error."""
        try:
            return compute()
        except (WeftError, UserError) as error:
            self._lost = isinstance(error, RankLostError)
            raise
        except RuntimeError as error:
            self._lost = True
            raise self.peers.failure(error) from error
