"""The streams of a step's decodes as columns: settling one more decode costs only a few entries of lists.

    stream        S0   S1   S2   S3 ...    in the order of runs; None: its sequence has ended
    answer        []   []   []   []        the list that its tokens are appended to
    tokens left    7  120    1   40        with 1, the next token ends the answer by its length
    event fields  request id, index, counts: the same in every step

Most decodes bring one token and nothing else. ``settle`` appends their tokens and builds their events by calls that
walk whole columns inside the interpreter. ``rare`` returns the few runs that are settled one by one: a token that may
be an end, the last token of an answer, logprobs, a stream that ended.

The same decodes run in step after step, so the columns are kept until one joins, leaves or ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from weft.engine.streams import Stream, StreamTable
from weft.request import TokenEvent
from weft.units import PAD, SeqId


class DecodeColumns:
    """Columns of the decodes ``seqs``, in the order of runs. They count the steps since they were created, so ``rare``
    is called once for each step, and no step is left out."""

    __slots__ = (
        "_answers",
        "_cached_tokens",
        "_ended_count",
        "_indexes",
        "_least_left",
        "_left",
        "_preemptions",
        "_rare_runs",
        "_rare_tokens",
        "_recomputed_tokens",
        "_request_ids",
        "_steps",
        "_streams",
        "_table",
        "seqs",
    )

    def __init__(self, seqs: tuple[SeqId, ...], table: StreamTable) -> None:
        self.seqs = seqs
        self._streams = list(map(table.by_seq.get, seqs))
        self._table, self._ended_count = table, table.ended_count
        self._rare_runs = {run for run, stream in enumerate(self._streams) if stream is None or not stream.plain}
        # A stream that has ended keeps its place, with the entries of another one: a rare run reads none.
        some = next((stream for stream in self._streams if stream is not None), None)
        filled = [] if some is None else [stream if stream is not None else some for stream in self._streams]
        self._answers = [stream.generated for stream in filled]
        self._left = [stream.new_tokens_max - len(stream.generated) for stream in filled]
        self._least_left, self._steps = min(self._left, default=0), 0
        self._rare_tokens = frozenset((PAD,)).union(*{stream.stop_ids for stream in filled})
        self._request_ids = [stream.request_id for stream in filled]
        self._indexes = [stream.index for stream in filled]
        self._cached_tokens = [stream.cached_tokens for stream in filled]
        self._preemptions = [stream.seq.preemption_count for stream in filled]
        self._recomputed_tokens = [stream.seq.recomputed_tokens for stream in filled]

    def fit(self, seqs: tuple[SeqId, ...]) -> bool:
        """Return whether these are still the columns of the decodes ``seqs``: none of them has ended since."""
        return self._ended_count == self._table.ended_count and (self.seqs is seqs or self.seqs == seqs)

    def streams_of(self, first: int, end: int) -> Iterator[tuple[int, Stream]]:
        """Yield the streams of the runs from ``first`` up to ``end``, none of them rare."""
        for run in range(first, end):
            stream = self._streams[run]
            assert stream is not None
            yield run, stream

    def rare(self, tokens: list[int], failures: Iterable[int]) -> list[int]:
        """Return the runs, in order, that are settled one by one and not by ``settle``. ``tokens``: the token of each
        decode, chosen in this step. ``failures``: runs whose sequence cannot go on."""
        runs = self._rare_runs.union(failures)
        if not self._rare_tokens.isdisjoint(tokens):
            runs.update([run for run, token in enumerate(tokens) if token in self._rare_tokens])
        if self._least_left - self._steps <= 1:
            runs.update([run for run, left in enumerate(self._left) if left - self._steps <= 1])
        self._steps += 1
        return sorted(runs)

    def settle(self, tokens: list[int], first: int, end: int, outbox: list[TokenEvent]) -> None:
        """Settle the runs from ``first`` up to ``end``, none of them rare: append each token to its answer, and an
        event for it to ``outbox``.
        """
        new = tokens[first:end]
        deque(map(list.append, self._answers[first:end], new), maxlen=0)
        outbox += map(
            TokenEvent,
            self._request_ids[first:end],
            self._indexes[first:end],
            [[token] for token in new],
            self._cached_tokens[first:end],
            self._preemptions[first:end],
            self._recomputed_tokens[first:end],
        )
