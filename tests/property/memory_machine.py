"""Memory beside a dull model of it: sets, dicts and counting, on arenas of one to eight items.

The model knows nothing of stacks, buckets or walks. It keeps who owns what, and for each frame the kind
of bytes it last held, and recomputes from that whatever it has to say: what fits, which frames must be
zeroed, which page may be next. ``Pair`` applies each verb to both and compares what they answer;
``Pair.check`` audits and compares what they hold, and that while a transaction is open memory's state is
equal, in every list and counter, what they were when it began (law L2).

Two drivers: ``MemoryMachine`` gives hypothesis the choices, which shrinks what it finds to a few steps;
``walk`` takes them from a seeded generator, which goes deeper for the same time. Both leave out a random
subset of the optional verbs in each run.
"""

from __future__ import annotations

from collections.abc import Set
from random import Random
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.memory.geometry import open_in, picture, small_memory
from weft.memory.reservation import Reservation
from weft.memory.transaction import Transaction
from weft.memory.values import FrameKind
from weft.units import PAD, PageId, SeqId, SlotId

ITEMS_MAX = 8
GEOMETRIES = [
    (n, m, frames)
    for n in range(ITEMS_MAX + 1)
    for m in range(ITEMS_MAX + 1)
    for frames in range(1, ITEMS_MAX + 1)
    if 1 <= max(n, m) * frames <= ITEMS_MAX
]
"""(pages per frame, slots per frame, frames), models without pages or without slots among them."""

ONE_FRAME = [geometry for geometry in GEOMETRIES if geometry[2] == 1]
ONE_KIND = [geometry for geometry in GEOMETRIES if not (geometry[0] and geometry[1])]
TWO_KINDS = [(n, m, frames) for n, m, frames in GEOMETRIES if n and m and frames > 2]
"""Where a frame can change kind: both kinds hold one, and a third goes back and forth."""
MANY_HOLES = [(3, 1, 4), (4, 2, 4), (3, 0, 4), (0, 3, 4), (2, 3, 4)]
"""A little more than eight items: partly used frames of different fullness beside each other."""

SEQS = 8
OPTIONAL_VERBS = frozenset(("extend", "save", "drop", "stale", "misuse"))

GROUPS = (TWO_KINDS, TWO_KINDS, MANY_HOLES, ONE_KIND, ONE_FRAME, GEOMETRIES)
SHORT, LONG = 33, 16 * ITEMS_MAX + 1
BURST = 12


class Dull:
    """Who owns what. ``pages`` and ``slots`` are by sequence; ``bytes_of`` by frame, absent: untouched."""

    def __init__(self, n: int, m: int, frames: int) -> None:
        self.n, self.m, self.frames = n, m, frames
        self.pages: dict[SeqId, list[PageId]] = {}
        self.slots: dict[SeqId, SlotId] = {}
        self.bytes_of: dict[int, FrameKind] = {}

    def copy(self) -> Dull:
        other = Dull(self.n, self.m, self.frames)
        other.pages = {seq: list(pages) for seq, pages in self.pages.items()}
        other.slots, other.bytes_of = dict(self.slots), dict(self.bytes_of)
        return other

    @property
    def owned(self) -> set[int]:
        return {page for pages in self.pages.values() for page in pages}

    def used_by_frame(self, kind: FrameKind) -> dict[int, int]:
        per_frame = self.n if kind is FrameKind.PAGES else self.m
        used: dict[int, int] = {}
        for item in self.owned if kind is FrameKind.PAGES else set(self.slots.values()):
            used[item // per_frame] = used.get(item // per_frame, 0) + 1
        return used

    @property
    def free_frames(self) -> set[int]:
        taken = self.used_by_frame(FrameKind.PAGES) | (self.used_by_frame(FrameKind.SLOTS) if self.m else {})
        return set(range(self.frames)) - set(taken)

    def fits(self, pages: int, *, with_slot: bool) -> bool:
        free = len(self.free_frames)
        if with_slot and self.m and len(self.slots) == self.m * len(self.used_by_frame(FrameKind.SLOTS)):
            free -= 1
        holes = self.n * len(self.used_by_frame(FrameKind.PAGES)) - len(self.owned)
        return free >= 0 and (not self.n or pages <= holes + free * self.n)

    def may_be_next(self, kind: FrameKind, item: int) -> None:
        """``item`` is free and from the fullest partly used frame, or from the free frame that costs
        least zeroing when there is none."""
        per_frame = self.n if kind is FrameKind.PAGES else self.m
        frame, used = item // per_frame, self.used_by_frame(kind)
        assert item not in (self.owned if kind is FrameKind.PAGES else set(self.slots.values()))
        assert frame < self.frames
        partly = {f: count for f, count in used.items() if count < per_frame}
        if partly:
            assert partly.get(frame) == max(partly.values())
            return
        assert frame in self.free_frames
        ranks = {kind: 0, None: 1}
        best = min(ranks.get(self.bytes_of.get(f), 2) for f in self.free_frames)
        assert ranks.get(self.bytes_of.get(frame), 2) == best

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // 16) if self.n else 0


class Pair:
    """Memory and the model, side by side."""

    def __init__(self, geometry: tuple[int, int, int], left_out: Set[str]) -> None:
        self.memory = small_memory(*geometry)
        self.dull = Dull(*geometry)
        self.verbs = OPTIONAL_VERBS - left_out
        self.transaction: Transaction | None = None
        self.planned = self.dull
        self.closing: list[SeqId] = []
        self.before: dict[str, Any] = {}
        self.commits = 0
        self.shelf: list[tuple[int, Reservation]] = []
        self.old_claims: list[tuple[SlotId, int]] = []
        self.peak_pages = self.peak_slots = 0
        self.refused = self.dropped = 0

    def pending(self) -> Transaction:
        if self.transaction is None:
            self.transaction = self.memory.transaction()
            self.planned = self.dull.copy()
            self.closing = []
            self.before = picture(self.memory)
        return self.transaction

    @property
    def alive(self) -> list[SeqId]:
        """Sequences that the transaction, or the one that would begin now, may extend and close."""
        if self.transaction is None:
            return sorted(self.dull.pages)
        return sorted(set(self.planned.pages) - set(self.closing))

    @property
    def absent(self) -> list[SeqId]:
        held = self.dull if self.transaction is None else self.planned
        return [SeqId(seq) for seq in range(SEQS) if seq not in held.pages]

    def open(self, seq: SeqId, tokens: int, headroom: int) -> None:
        transaction, model = self.pending(), self.planned
        pages, sealed = model.pages_for(tokens), transaction.seal()
        opened = open_in(transaction, self.memory, seq, tokens, headroom)
        assert opened == model.fits(pages + headroom, with_slot=True)
        if not opened:
            self.refused += 1
            assert transaction.seal() == sealed
            assert transaction.new_pages(seq) == []
            return
        slot = transaction.slot_of(seq)
        if model.m:
            model.may_be_next(FrameKind.SLOTS, slot)
            model.slots[seq] = slot
        else:
            assert slot == PAD
        model.pages[seq] = []
        self.gain(seq, transaction.new_pages(seq), pages)

    def extend(self, seq: SeqId, tokens: int) -> None:
        transaction, model = self.pending(), self.planned
        missing = max(0, model.pages_for(tokens) - len(model.pages[seq]))
        sealed, gained = transaction.seal(), len(transaction.new_pages(seq))
        extended = transaction.extend(seq, tokens)
        assert extended == (not missing or model.fits(missing, with_slot=False))
        if not extended or not missing:
            assert transaction.seal() == sealed
        else:
            self.gain(seq, transaction.new_pages(seq)[gained:], missing)

    def gain(self, seq: SeqId, pages: list[PageId], count: int) -> None:
        assert len(pages) == count
        for page in pages:
            self.planned.may_be_next(FrameKind.PAGES, page)
            self.planned.pages[seq].append(page)

    def close(self, seq: SeqId) -> None:
        self.pending().close(seq)
        self.closing.append(seq)

    def misuse(self, transaction: Transaction) -> None:
        """Whatever must not be asked of each sequence now is caught, and takes nothing."""
        sealed = transaction.seal()
        for seq in map(SeqId, range(SEQS)):
            if seq in self.planned.pages:
                with pytest.raises(AssertionError, match=r"has a lease|was opened"):
                    open_in(transaction, self.memory, seq, 1)
            if seq not in self.alive:
                for verb in (transaction.close, transaction.slot_of, lambda seq: transaction.extend(seq, 1)):
                    with pytest.raises(AssertionError, match=r"has no lease|was closed"):
                        verb(seq)
            elif "save" in self.verbs:
                assert transaction.save(seq, 16) is None
        assert transaction.seal() == sealed

    def settle(self, *, drop: bool) -> None:
        transaction = self.pending()
        if "misuse" in self.verbs:
            self.misuse(transaction)
        if drop and "drop" in self.verbs:
            self.shelf.append((self.commits, transaction.seal()))
            self.dropped += bool(self.shelf[-1][1].pages)
            self.transaction = None
            return
        self.commit(transaction, self.planned)
        if "stale" in self.verbs:
            self.commit_what_is_stale()

    def commit(self, transaction: Transaction, model: Dull) -> None:
        reservation = transaction.seal()
        claimed: dict[int, FrameKind] = {}
        for kind in FrameKind:
            if model.n if kind is FrameKind.PAGES else model.m:
                new = set(model.used_by_frame(kind)) - set(self.dull.used_by_frame(kind))
                claimed |= dict.fromkeys(new, kind)
        assert {claim.frame: claim.kind for claim in reservation.frames} == claimed
        to_zero = [frame for frame, kind in claimed.items() if model.bytes_of.get(frame) is not kind]
        assert sorted(reservation.arena_work.zero_frames) == sorted(to_zero), "each once, and no other"
        assert set(to_zero) <= self.dull.free_frames, "never under what somebody holds"
        self.peak_pages = max(self.peak_pages, len(model.owned))
        self.peak_slots = max(self.peak_slots, len(model.slots))
        epochs = list(self.memory._state.slots.epochs)
        self.memory.commit(reservation)
        model.bytes_of |= claimed
        for seq in self.closing:
            del model.pages[seq]
            if seq in model.slots:
                slot = model.slots.pop(seq)
                self.old_claims.append((slot, epochs[slot]))
        self.dull, self.transaction = model, None
        self.shelf.append((self.commits, reservation))
        self.commits += 1

    def commit_what_is_stale(self) -> None:
        before = picture(self.memory)
        for commits, reservation in self.shelf[-3:]:
            assert commits < self.commits
            with pytest.raises(AssertionError, match="was committed to version"):
                self.memory.commit(reservation)
        assert picture(self.memory) == before

    def check(self) -> None:
        self.memory.audit()
        if self.transaction is not None:
            assert picture(self.memory) == self.before, "a transaction changes nothing"
        self.leases_are_what_the_model_says()
        self.usage_is_what_the_model_counts()
        for slot, epoch in self.old_claims[-5:]:
            with pytest.raises(AssertionError, match="stale claim"):
                self.memory._state.slots.check(slot, epoch)

    def leases_are_what_the_model_says(self) -> None:
        leases = self.memory._state.leases
        assert {seq: lease.pages for seq, lease in leases.items()} == self.dull.pages
        assert {seq: lease.slot for seq, lease in leases.items() if lease.slot != PAD} == self.dull.slots
        for lease in leases.values():
            if lease.slot != PAD:
                self.memory._state.slots.check(lease.slot, lease.epoch)

    def usage_is_what_the_model_counts(self) -> None:
        usage, plan, model = self.memory.usage(), self.memory.plan, self.dull
        free = len(model.free_frames)
        assert (usage.pages_held, usage.slots_held) == (len(model.owned), len(model.slots))
        assert usage.page_bytes == len(model.owned) * plan.page_bytes
        assert usage.slot_bytes == len(model.slots) * plan.slot_stride_bytes
        assert usage.free_bytes == free * plan.frame_bytes
        assert usage.page_bytes + usage.slot_bytes + usage.open_bytes + usage.free_bytes == usage.arena_bytes
        assert usage.frames_of_pages + usage.frames_of_slots + free == model.frames
        assert usage.leases == len(model.pages)
        assert model.fits(usage.pages_available, with_slot=False)
        assert not model.n or not model.fits(usage.pages_available + 1, with_slot=False)
        assert (usage.pages_held_max, usage.slots_held_max) == (self.peak_pages, self.peak_slots)

    def end(self) -> None:
        """When all have left, everything is free again, and one sequence alone fits (law L3)."""
        transaction = self.memory.transaction()
        for seq in self.dull.pages:
            transaction.close(seq)
        self.memory.commit(transaction.seal())
        self.memory.audit()
        usage, model = self.memory.usage(), self.dull
        assert usage.free_bytes == usage.arena_bytes
        pages = (model.frames - (model.m > 0)) * model.n
        if pages or not model.n:
            assert open_in(self.memory.transaction(), self.memory, 0, 16 * pages)
        assert not model.n or not open_in(self.memory.transaction(), self.memory, 0, 16 * pages + 1)


def pick(seqs: list[SeqId], number: int) -> SeqId:
    return seqs[number % len(seqs)]


numbers = st.integers(0, SEQS - 1)
tokens = st.one_of(st.integers(1, SHORT), st.integers(1, SHORT), st.integers(0, LONG))


class MemoryMachine(RuleBasedStateMachine):
    pair: Pair

    @initialize(
        geometry=st.one_of(*map(st.sampled_from, GROUPS)),
        left_out=st.sets(st.sampled_from(sorted(OPTIONAL_VERBS)), max_size=3),
    )
    def make(self, geometry: tuple[int, int, int], left_out: set[str]) -> None:
        self.pair = Pair(geometry, left_out)

    @precondition(lambda self: self.pair.absent)
    @rule(number=numbers, tokens=tokens, headroom=st.sampled_from((0, 0, 1, 2)))
    def open(self, number: int, tokens: int, headroom: int) -> None:
        self.pair.open(pick(self.pair.absent, number), tokens, headroom)

    @precondition(lambda self: "extend" in self.pair.verbs and self.pair.alive)
    @rule(number=numbers, tokens=tokens)
    def extend(self, number: int, tokens: int) -> None:
        self.pair.extend(pick(self.pair.alive, number), tokens)

    @precondition(lambda self: self.pair.alive)
    @rule(number=numbers)
    def close(self, number: int) -> None:
        self.pair.close(pick(self.pair.alive, number))

    @precondition(lambda self: self.pair.transaction is not None)
    @rule(drop=st.sampled_from((False, False, False, True)))
    def settle(self, drop: bool) -> None:
        self.pair.settle(drop=drop)

    @invariant()
    def the_pair_agrees(self) -> None:
        self.pair.check()

    def teardown(self) -> None:
        if getattr(self, "pair", None) is not None:
            self.pair.end()


def walk(seed: int, steps: int = 72) -> Pair:
    """One run of random verbs that are a function of ``seed``: in turns more openings and more closings,
    of sequences that are short (mostly slots) or long (mostly pages)."""
    random = Random(seed)
    left_out = set(random.sample(sorted(OPTIONAL_VERBS), random.randrange(4)))
    pair = Pair(random.choice(random.choice(GROUPS)), left_out)
    longest = LONG
    for step in range(steps):
        if step % BURST == 0:
            longest = random.choice((0, 1, SHORT, LONG))
        growing = step // BURST % 2 == 0
        verb = random.choices(("open", "extend", "close", "settle"), (4 if growing else 1, 2, 1 if growing else 4, 3))[
            0
        ]
        if verb == "open" and pair.absent:
            pair.open(random.choice(pair.absent), random.randint(0, longest), random.choice((0, 0, 1, 2)))
        elif verb == "extend" and pair.alive and "extend" in pair.verbs:
            pair.extend(random.choice(pair.alive), random.randint(0, longest + 16))
        elif verb == "close" and pair.alive:
            pair.close(random.choice(pair.alive))
        elif verb == "settle":
            pair.settle(drop=random.random() < 0.3)
        pair.check()
    pair.end()
    return pair
