"""A sequence: the prompt, the generated tokens and the state of one answer. A request with ``n`` choices has n
sequences.

                 admitted                     last token, or cancelled
    WAITING  ----------------->  RUNNING  ------------------------------->  FINISHED
       ^                            |                                          ^
       '--------- preempted --------'          cancelled while waiting --------'
                  (tokens kept, memory not)

A sequence knows its tokens and its rank. For a running sequence, the row table knows the state on the device and how
far it is computed. ``rank`` orders everything: the best-ranked sequence is admitted first, gets memory first and is
preempted last. Lower ``priority`` comes first, then the order of arrival, then the index within the request. The rank
never changes, so a preempted sequence returns to its own place in the queue.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np

from weft.pictures import prompt_keys
from weft.request import PlacedPicture, Pooling, SamplingParams
from weft.schedule.plan import CompiledGrammar, Int32s
from weft.units import SeqId

Rank = tuple[int, int, int]

UNBOUNDED = int(np.iinfo(np.int32).max)
"""Position beyond those of any sequence."""


class SeqState(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One sequence. ``prompt``: int32 [n], never changed. ``generated``: a list, because it grows by one a step."""

    __slots__ = (
        "_prompt_keys",
        "accepted_drafts",
        "adapter",
        "boundaries",
        "computed_before",
        "computed_max",
        "generated",
        "grammar",
        "id",
        "key",
        "marks",
        "pictures",
        "pictures_due",
        "pooling",
        "prediction",
        "preemption_count",
        "prompt",
        "prompt_logprobs_due",
        "rank",
        "recomputed_tokens",
        "rejected_drafts",
        "salt",
        "sampling",
        "seed",
        "state",
        "stop_ids",
    )

    def __init__(
        self,
        seq: SeqId,
        *,
        prompt: Int32s,
        sampling: SamplingParams,
        seed: int,
        stop_ids: tuple[int, ...],
        rank: Rank,
        salt: str = "",
        key: str = "",
        boundaries: tuple[int, ...] = (),
        marks: tuple[int, ...] = (),
        grammar: CompiledGrammar | None = None,
        new_tokens_max: int = UNBOUNDED,
        prediction: tuple[int, ...] | None = None,
        adapter: str = "",
        pictures: tuple[PlacedPicture, ...] = (),
        pooling: Pooling | None = None,
    ) -> None:
        assert prompt.size > 0, "an empty prompt is refused where requests are accepted"
        self.id = seq
        self.prompt = prompt
        self.sampling = sampling
        self.seed = seed
        self.stop_ids = stop_ids
        self.rank = rank
        self.salt = salt
        self.key = key
        """The API key to whose share it counts; empty without keys."""
        self.boundaries = boundaries
        self.marks = marks
        self.grammar = grammar
        self.adapter = adapter
        """The digest of its adapter, empty for the base model."""
        self.prediction = prediction
        """The client's guess of the complete answer, a source of drafts."""
        self.pictures = pictures
        self.pictures_due = bool(pictures)
        """Whether the rows of its pictures are not encoded: it waits, and no other sequence waits for it."""
        self.pooling = pooling
        """Pooling of the prompt, instead of an answer."""
        self._prompt_keys = prompt_keys(prompt, pictures)
        self.computed_max = min(int(prompt.size) + new_tokens_max - 1, UNBOUNDED)
        """Most tokens that are ever computed: all but the last of ``new_tokens_max`` generated ones."""
        self.generated: list[int] = []
        self.state = SeqState.WAITING
        self.preemption_count = 0
        self.computed_before = 0
        """Tokens that were in memory when it was preempted, until it runs again."""
        self.recomputed_tokens = 0
        """Tokens that had left memory when the sequence came back, in all."""
        self.accepted_drafts = 0
        self.rejected_drafts = 0
        """Drafts that were verified for it: right, and wrong."""
        self.prompt_logprobs_due = sampling.prompt_logprobs is not None
        """Whether the request wants logprobs of the prompt and they are not complete: the prefill must report them."""

    @property
    def known_count(self) -> int:
        """Number of known tokens: prompt and generated. All but the newest are computed when decoding."""
        return int(self.prompt.size) + len(self.generated)

    @property
    def samples(self) -> bool:
        """Whether the end of the prefill chooses a token; with ``max_tokens`` 0 nothing is chosen."""
        return self.sampling.max_tokens != 0

    def reusable(self, known: Int32s) -> Int32s:
        """Return how much of the front of ``known`` may come from the cache. Results for later positions need
        their hidden rows, which no cache has (decision 0069)."""
        if self.prompt_logprobs_due:
            return known[:0]
        if self.pooling is not None and self.pooling.kind != "last":
            return known[: self.pooling.skip]
        return known

    def pools(self, start: int, end: int) -> bool:
        """Return whether a run over [``start``, ``end``) has hidden rows that the request wants."""
        if self.pooling is None:
            return False
        if self.pooling.kind in ("first", "token"):
            return start == 0 or self.pooling.kind == "token"
        return end == self.known_count or (self.pooling.kind == "mean" and end > self.pooling.skip)

    def resume(self, tokens: list[int]) -> None:
        """Take the ``tokens`` of another engine that ended. The sequence has never run here, and goes on as after a
        preemption: all its tokens count as computed before."""
        assert self.state is SeqState.WAITING
        assert not self.generated
        self.generated += tokens
        self.computed_before = self.known_count - 1
        self.prompt_logprobs_due = False

    def known(self) -> Int32s:
        """Return prompt and generated tokens, int32 [known_count], which an admission has to compute."""
        if not self.generated:
            return self.prompt
        return np.concatenate([self.prompt, np.asarray(self.generated, dtype=np.int32)])

    def keyed(self, known: Int32s) -> Int32s:
        """Return ``known`` tokens, with the keys of pictures at their rows: the form that is compared with other
        sequences, in the cache and everywhere."""
        if not self.pictures:
            return known
        return np.concatenate([self._prompt_keys, known[self.prompt.size :]])

    def keys(self) -> Int32s:
        return self.keyed(self.known())

    def __repr__(self) -> str:
        return (
            f"Sequence({self.id}, {self.state.value}, rank={self.rank}, prompt={self.prompt.size}, "
            f"generated={len(self.generated)})"
        )


class RankedQueue:
    """A queue in the order of ``Sequence.rank``; ranks are unique. Iteration is best first."""

    # A sorted list: to move a thousand pointers costs less than one step's bookkeeping in a heap. A heap cannot remove
    # from its middle, and a queue of tombstones has no bound (law L11).

    __slots__ = ("_ranks", "_seqs")

    def __init__(self) -> None:
        self._ranks: list[Rank] = []
        self._seqs: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs)

    def after(self, seq: Sequence) -> Iterator[Sequence]:
        """Yield the sequences after ``seq``, best first."""
        for index in range(bisect_left(self._ranks, seq.rank) + 1, len(self._seqs)):
            yield self._seqs[index]

    def __contains__(self, seq: Sequence) -> bool:
        index = bisect_left(self._ranks, seq.rank)
        return index < len(self._seqs) and self._seqs[index] is seq

    def add(self, seq: Sequence) -> None:
        index = bisect_left(self._ranks, seq.rank)
        assert index == len(self._ranks) or self._ranks[index] != seq.rank, f"rank {seq.rank} is taken"
        self._ranks.insert(index, seq.rank)
        self._seqs.insert(index, seq)

    def remove(self, seq: Sequence) -> None:
        index = bisect_left(self._ranks, seq.rank)
        assert index < len(self._seqs), f"{seq} is not queued here"
        assert self._seqs[index] is seq, f"{seq} is not queued here"
        del self._ranks[index]
        del self._seqs[index]

    def audit(self) -> None:
        assert self._ranks == sorted(set(self._ranks))
        assert self._ranks == [seq.rank for seq in self._seqs]
