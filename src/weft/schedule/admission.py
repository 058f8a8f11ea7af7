"""Admission: which waiting sequences join the step, in queue order, and which running ones give way when memory is
short.

    waiting   [ A ] [ B ] [ C ] [ D ] ...
                |     |     '-- does not fit: the cache makes room, and D waits too
                |     '-------- its prefix is being computed (prefix_sharing.py) or fetched (restores.py):
                |               skipped for this step
                '-------------- fits: a row, a lease for all known tokens, and the first chunk

    running   [ A ]  [ B short ]  [ C ]  [ D ]  [ E short ]     *short*: needs one more page; there is none
              best                           ^ victims are always a tail of this list; the best is never one

A sequence is admitted with memory for all of its known tokens, and with some pages of headroom left for the sequences
that run. It starts after its cached prefix. If a sequence does not fit, admission stops for this step: a large request
is not starved by the smaller ones after it. The cache makes room for the sequence, and for later ones that would fit
into the same step. Otherwise only one short request would join in each step once the cache has filled the arena. The
prefix on which the first sequence would resume is not evicted for this while other sequences run.

A victim loses its memory, not its tokens. The freed memory can be used from the next step on, and the victim's prefix
in the cache is evicted last (reuse.py). The best sequence is never a victim, gets memory before any other, and fits by
itself: so it finishes (law L3). The worst sequence preempts no other one: computed work is never lost for a sequence of
lower rank.

Laws: L3 (no room is a plan without that sequence), L8 (cached tokens are those of the match).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import islice

from weft.config import Sizes
from weft.memory.values import Match
from weft.schedule.budget import Budget
from weft.schedule.fair_queue import FairQueue
from weft.schedule.plan import Admission, Int32s
from weft.schedule.plan_builder import PlanBuilder
from weft.schedule.prefix_sharing import PrefixProducers
from weft.schedule.restores import AHEAD_MAX, FetchState, StoreLook
from weft.schedule.reuse import PREFIX_WAITS_MAX, Reuse
from weft.schedule.rows import RowTable
from weft.schedule.sequence import Sequence
from weft.schedule.store_tier import StoreTier
from weft.units import PAGE_TOKENS, RowId, SeqId, pages_for

_DOUBLINGS_MAX = 2


def victim_count(pages_held: Seq[int], short: Seq[bool], pages_freed: int) -> int:
    """Return the number of running sequences, from the worst up, that must give their memory back.

    ``pages_held`` and ``short`` are by rank, best first. ``pages_freed``: pages of sequences that finished in
    this step. At most all but the best.
    """
    assert len(pages_held) == len(short)
    claims = sum(short[:-1])  # the worst claims nothing
    victims = 0
    freed = pages_freed
    while freed < claims:
        victims += 1
        assert victims < len(short), "the best sequence cannot run and no other sequence is left to give way"
        freed += pages_held[-victims]
        if victims > 1 and short[-victims]:
            claims -= 1
    return victims


def headroom_pages(running_count: int, preemption_count: int) -> int:
    """Return pages that must stay free at an admission: one for each running sequence, doubled for each preemption
    of the admitted one, up to 4-fold. 0 when no other sequence runs.

    Measured with 60 sequences in pools of 30 to 200 pages: one page for each halves the recomputed tokens, and doubling
    saves another tenth. More only makes sequences wait longer."""
    return running_count << min(preemption_count, _DOUBLINGS_MAX)


class AdmissionPlanner:
    """The planner of admissions. It reads the queues and rows of the scheduler and writes only into the plan
    builder."""

    def __init__(
        self,
        sizes: Sizes,
        rows: RowTable,
        reuse: Reuse,
        waiting: FairQueue,
        running: FairQueue,
        store: StoreTier | None = None,
    ) -> None:
        self._sizes = sizes
        self._rows = rows
        self._reuse = reuse
        self._waiting = waiting
        self._running = running
        self._store = store

    def plan(
        self, step: PlanBuilder, budget: Budget, closing: Iterable[Sequence], needy: frozenset[str] = frozenset()
    ) -> dict[SeqId, Match]:
        """Admit sequences that fit. Returns the cache match of each admitted sequence. ``needy``: keys that have fewer
        rows than their share; if any has, only these keys get rows."""
        matches: dict[SeqId, Match] = {}
        if not len(self._waiting):
            return matches
        rows = sorted([*self._rows.free_rows(), *step.rows_cleared])
        if not rows:
            return matches
        prefills = self._running if step.decode_batch.rows.size < len(self._running) else ()
        producers = self._reuse.producers(step, prefills, closing)
        waits = 0
        for seq in self._waiting:
            last = seq
            if len(matches) == len(rows) or waits == PREFIX_WAITS_MAX:
                break
            if seq.pictures_due or (needy and seq.key not in needy):
                continue
            known = seq.keys()
            if self._waits_for_read(seq, known, producers):
                waits += 1
                continue
            match = self._reuse.match(seq, known)
            wait = producers.wait_for(seq, known, match.cached_tokens)
            if wait is not None:
                waits += 1
                step.request_tap(wait.producer, wait.tap)
                continue
            if self._store is not None:
                look = self._store.restores.look(seq, known, match, step.fetch_wishes, self._others)
                match = look.match
                if look.wish is not None or look.fetch is not None:
                    waits += 1
                    if not self._plan_restore(step, look, seq, len(rows) - len(matches)):
                        break
                    continue
            match = producers.with_not_ready(seq, known, match)
            end = budget.chunk_end(match.cached_tokens, known.size, seq.key)
            if end == match.cached_tokens:
                break
            if not self._admit(step, seq, rows[len(matches)], match, end):
                self._make_room(step, seq, match, len(rows) - len(matches))
                break
            budget.spend(match.cached_tokens, end, seq.key)
            matches[seq.id] = match
            producers.admitted(seq, known, match.cached_tokens)
        self._look_ahead(step, last)
        return matches

    @property
    def _others(self) -> int:
        """The number of requests that run or wait, less the waiting one that is looked at."""
        return len(self._running) + len(self._waiting) - 1

    def _waits_for_read(self, seq: Sequence, known: Int32s, producers: PrefixProducers) -> bool:
        """Return whether ``seq`` waits for bytes that have not arrived, and for nothing else."""
        # No match is looked up, so a plan in which this request keeps waiting is cheap.
        fetch = None if self._store is None else self._store.restores.fetch_of(seq.id)
        if fetch is None or fetch.state is not FetchState.READING:
            return False
        cached = self._reuse.cached_tokens(seq, known)
        return fetch.reaches(cached) and producers.wait_for(seq, known, cached) is None

    def _look_ahead(self, step: PlanBuilder, last: Sequence) -> None:
        """Begin a fetch for one of the requests from ``last`` on, which are not admitted in this step."""
        if self._store is None or step.fetch_wishes or not self._store.restores.may_look_ahead:
            return
        for seq in islice(self._waiting.after(last), AHEAD_MAX):
            if self._store.restores.is_known(seq):
                continue
            if seq.pictures_due:
                continue
            known = seq.keys()
            cached = self._reuse.cached_tokens(seq, known)
            wish = self._store.restores.wish_ahead(seq, known, cached, self._others)
            if wish is not None:
                step.fetch_wishes.append(wish)
                return

    def _admit(self, step: PlanBuilder, seq: Sequence, row: RowId, match: Match, end: int) -> bool:
        """Admit ``seq`` with a lease for all known tokens, or return False and change nothing."""
        start, known = match.cached_tokens, seq.known()
        assert start < known.size
        if not step.transaction.open(seq.id, match, known.size, headroom_pages=self._headroom(step, seq)):
            return False
        step.admissions.append(
            Admission(
                row=row,
                seq=seq.id,
                tokens=known,
                prompt_tokens=int(seq.prompt.size),
                sampling=seq.sampling,
                seed=seq.seed,
                stop_ids=seq.stop_ids,
                grammar=seq.grammar,
                adapter=seq.adapter,
                pictures=seq.pictures,
                pooling=seq.pooling,
            )
        )
        transaction = step.transaction
        step.write_table(row, 0, [*transaction.shared_pages(seq.id), *transaction.new_pages(seq.id)])
        step.add_prefill(seq, row, start, end, transaction.slot_of(seq.id), known)
        return True

    def _plan_restore(self, step: PlanBuilder, look: StoreLook, seq: Sequence, rows_free: int) -> bool:
        """Plan the read of a sequence that waits for the store in this step; perhaps its prefix is loaded now. False:
        the load does not fit, and the cache makes room for it."""
        if look.wish is not None:
            step.fetch_wishes.append(look.wish)
        if look.fetch is None or look.fetch.state is not FetchState.READY:
            return True
        key = look.fetch.key
        if key in step.loads:
            return True
        load = look.fetch.load
        if not step.transaction.open(look.fetch.lease, look.match, load.position, load=load):
            self._make_room(step, seq, look.match, rows_free)
            return False
        step.loads.append(key)
        return True

    def _headroom(self, step: PlanBuilder, seq: Sequence) -> int:
        return headroom_pages(len(self._running) + len(step.admissions), seq.preemption_count)

    def _make_room(self, step: PlanBuilder, seq: Sequence, match: Match, rows_free: int) -> None:
        """Make room for ``seq``, which does not fit, and for the later sequences that would join the same step, or else
        only for ``seq``."""
        # Room for later ones too: otherwise only one short request would join in each step once the cache is full. The
        # prefix on which `seq` resumes is spared while others run: computing it again costs more than the wait.
        own, awaited = match.anchor, self._reuse.awaited()
        step.transaction.evict_last([own, *awaited])
        cached = match.cached_tokens
        pages = pages_for(seq.known_count) - cached // PAGE_TOKENS + match.restore_pages + self._headroom(step, seq)
        tokens = seq.known_count - cached
        more_pages = more = 0
        for other in islice(self._waiting.after(seq), rows_free - 1):
            tokens += other.known_count
            if tokens > self._sizes.step_tokens_max:
                break
            more_pages += pages_for(other.known_count) + 1
            more += 1
        if more and step.reclaim(pages=pages + more_pages, slots=1 + more, sparing=(own, *awaited)):
            return
        alone = not len(self._running) and not step.admissions
        step.reclaim(pages=pages, slots=1, sparing=() if alone else (own,))
