"""The prefix cache in a world that has contents: a dull device, and a dictionary of what was kept.

Each position of each page, and each slot, holds the tokens that it was computed from; a frame that changes
hands holds nothing. ``World`` does with a reservation what an executor would: zero, copy, patch the table,
then compute runs that write pages, the running slot and taps. So that whatever memory says can be compared
with what is there:

    a lease          its pages hold its tokens, its slot the state after the last computed one
    a node           its pages hold the tokens of its path, its snapshot the state after them
    a match          the longest front that the dictionary has
    a compressed state   its pages hold it, in pieces
    a write          goes to pages and slots that nobody else can see (law L7)

Nothing here knows nodes, splits, recency or pins. What was evicted is read from the reservation, as the
choice is the policy's, and then struck from the dictionaries by tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from random import Random

import numpy as np

from tests.property.rounding import Rounded, Share, compress_kv, records_in, restore_kv
from tests.property.test_tree_model import tokens_to
from tests.unit.memory.geometry import picture, small_memory
from weft.memory.prefix.edge import COMPRESSED, Node
from weft.memory.prefix.eviction import EVICTIONS_PER_STEP
from weft.memory.prefix.policies import POLICIES
from weft.memory.reservation import Reservation
from weft.memory.transaction import Transaction
from weft.memory.values import NO_SLOT, FrameKind, Match
from weft.units import PAD, PAGE_TOKENS, PageId, SeqId, SlotId

Tokens = tuple[int, ...]
Key = tuple[str, Tokens]

GEOMETRIES = [
    (1, 1, 6),
    (2, 1, 6),
    (3, 1, 8),
    (4, 2, 5),
    (2, 3, 5),
    (1, 4, 6),
    (4, 4, 4),
    (3, 0, 5),
    (0, 2, 4),
    (6, 1, 3),
]
ROOMY = [(2, 1, 24), (2, 2, 16), (4, 3, 12), (3, 0, 12), (0, 3, 5)]
SCATTERED = [(3, 2, 24), (4, 3, 20), (6, 4, 12), (5, 1, 24)]
COMPRESSION = [(8, 1, 7), (6, 1, 9), (12, 2, 6), (9, 2, 8), (12, 1, 4)]
LONG = [(12, 1, 7), (10, 2, 9), (16, 3, 5), (9, 1, 10)]
"""(pages per frame, slots per frame, frames): where everything is short, where prefixes live on, where frames
have many items, so that what is left of many sequences lies apart, where states weigh
many pages, and where prompts are long."""

VERBS = frozenset(("extend", "run", "save", "publish", "close", "keep", "flush", "drop", "reclaim", "salt", "compact"))
SEQS = 10


@dataclass(frozen=True)
class Piece:
    """What a page of a compressed state has."""

    state: object
    index: int


@dataclass
class Running:
    salt: str
    tokens: Tokens
    computed: int
    taps: dict[int, SlotId] = field(default_factory=dict)
    """Saved and not yet published, as this world remembers it."""
    table: list[PageId] = field(default_factory=list)
    slot: SlotId = NO_SLOT
    """Where the device was told that its state is."""


@dataclass
class Plans:
    """What an open transaction will do once it is committed."""

    opened: dict[SeqId, Running] = field(default_factory=dict)
    more: dict[SeqId, Tokens] = field(default_factory=dict)
    runs: dict[SeqId, int] = field(default_factory=dict)
    taps: dict[SeqId, dict[int, SlotId]] = field(default_factory=dict)
    published: dict[SeqId, Tokens] = field(default_factory=dict)
    kept: dict[SeqId, Tokens] = field(default_factory=dict)
    closed: list[SeqId] = field(default_factory=list)


class World:
    def __init__(
        self,
        geometry: tuple[int, int, int],
        left_out: Set[str] = frozenset(),
        *,
        cache: bool = True,
        compressed_pages: int = 0,
        compressed_kv_share: float = 0,
        policy: str = "lru",
    ) -> None:
        """``compressed_pages``: of a compressed state, where the model has both kinds.
        ``compressed_kv_share``: the share of a page that its compressed form takes. ``policy``: its name."""
        self.n, self.m, self.frames = geometry
        compressed_pages = min(compressed_pages, self.n) if self.m else 0
        self.memory = small_memory(
            *geometry,
            cache=cache,
            compressed_pages=compressed_pages,
            policy=policy,
            compressed_kv_share=compressed_kv_share if self.m else 0,
        )
        self.cache = cache
        self.verbs = VERBS - left_out
        self.seqs: dict[SeqId, Running] = {}
        self.cells: dict[int, list[object]] = {}
        self.states: dict[int, object] = {}
        self.kept: set[Key] = set()
        self.kv: set[Key] = set()
        self.last: dict[SeqId, Running] = {}
        self.transaction: Transaction | None = None
        self.plans = Plans()
        self.before: dict[str, object] = {}
        self.seen: dict[str, int] = dict.fromkeys(
            (
                "hit",
                "tail",
                "copy",
                "patch",
                "state",
                "trim",
                "kv",
                "tap",
                "refused",
                "shared",
                "dropped",
                "moved page",
                "moved slot",
                "moved sequence",
                "compressed",
                "restored",
                "compressed state",
                "moved piece",
                "compressed kv",
                "restored kv",
                "cut",
                "moved share",
                "inexact",
            ),
            0,
        )
        self.rounded = Rounded()

    # ------------------------------------------------------------------ verbs, on a transaction

    def pending(self) -> Transaction:
        if self.transaction is None:
            self.transaction = self.memory.transaction()
            self.plans, self.before = Plans(), picture(self.memory)
        return self.transaction

    @property
    def absent(self) -> list[SeqId]:
        taken = set(self.seqs) | set(self.plans.opened if self.transaction else ())
        return [SeqId(seq) for seq in range(SEQS) if seq not in taken]

    @property
    def alive(self) -> list[SeqId]:
        closed = self.plans.closed if self.transaction else []
        return [seq for seq in self.seqs if seq not in closed]

    def expected(self, salt: str, tokens: Tokens) -> int:
        """Tokens that a lookup must find: the longest front with a snapshot, the last token left out."""
        known = self.kept if self.m else self.kv
        return max((end for end in range(1, len(tokens)) if (salt, tokens[:end]) in known), default=0)

    def match(self, salt: str, tokens: Tokens) -> Match:
        match = self.memory.match(np.asarray(tokens, dtype=np.int32), salt=salt)
        assert match.cached_tokens == self.expected(salt, tokens)
        kv = max((end for end in range(1, len(tokens)) if (salt, tokens[:end]) in self.kv), default=0)
        if self.n:
            assert match.kv_tokens == max(kv, match.cached_tokens)
            lost = match.lost.no_checkpoint + match.lost.evicted_state
            assert lost == match.kv_tokens - match.cached_tokens
        return match

    def open(self, seq: SeqId, salt: str, tokens: Tokens, room: int = 0, *, reclaim: bool = True) -> bool:
        salt = salt if "salt" in self.verbs else ""
        transaction, match = self.pending(), self.match(salt, tokens)
        sealed = transaction.seal()
        if not transaction.open(seq, match, len(tokens) + room):
            self.seen["refused"] += 1
            assert transaction.seal() == sealed
            if reclaim and "reclaim" in self.verbs:
                if seq % 2:  # what it would begin on, and what another began on, go last, or not for it
                    others = [lease.shared_node for lease in self.memory._state.leases.values()]
                    transaction.evict_last([match.anchor, *others])
                transaction.reclaim(
                    pages=self.memory.plan.pages_for(len(tokens) + room),
                    slots=1,
                    sparing=[match.anchor] if seq % 4 == 1 else (),
                )
            return False
        self.plans.opened[seq] = Running(salt, tokens, match.cached_tokens)
        self.seen["hit"] += match.cached_tokens > 0
        self.seen["tail"] += match.cached_tokens % PAGE_TOKENS > 0
        pages = [*transaction.shared_pages(seq), *transaction.new_pages(seq)]
        assert len(pages) == self.memory.plan.pages_for(len(tokens) + room)
        return True

    def extend(self, seq: SeqId, more: Tokens) -> None:
        running, transaction = self.seqs[seq], self.pending()
        if "extend" not in self.verbs or seq in self.plans.more:
            return
        if transaction.extend(seq, len(running.tokens) + len(more)):
            self.plans.more[seq] = more
        elif "reclaim" in self.verbs:
            transaction.reclaim(pages=1)

    def run(self, seq: SeqId, count: int, tap_at: int) -> None:
        """Compute up to ``count`` tokens in this step; perhaps with a tap at the page ``tap_at`` on."""
        transaction, plans = self.pending(), self.plans
        running = plans.opened.get(seq) or self.seqs.get(seq)
        if running is None or seq in plans.closed or seq in plans.runs:
            return
        end = min(running.computed + count, len(running.tokens))
        plans.runs[seq] = end
        position = (running.computed // PAGE_TOKENS + tap_at) * PAGE_TOKENS
        if "save" in self.verbs and tap_at and running.computed < position <= end:
            slot = transaction.save(seq, position)
            assert self.m or slot is None
            if slot is not None:
                plans.taps.setdefault(seq, {})[position] = slot
                self.seen["tap"] += 1

    def publish(self, seq: SeqId) -> None:
        running = self.seqs[seq]
        if "publish" not in self.verbs or seq in self.plans.published or not running.computed:
            return
        tokens = running.tokens[: running.computed]
        self.pending().publish(seq, np.asarray(tokens, dtype=np.int32))
        self.plans.published[seq] = tokens[: len(tokens) // PAGE_TOKENS * PAGE_TOKENS]

    def close(self, seq: SeqId, *, keep: bool) -> None:
        running, transaction = self.seqs[seq], self.pending()
        if seq in self.plans.runs:
            return
        if keep and "keep" in self.verbs:
            tokens = running.tokens[: running.computed]
            transaction.close(seq, keep=np.asarray(tokens, dtype=np.int32))
            self.plans.kept[seq] = tokens
        else:
            transaction.close(seq)
        self.plans.closed.append(seq)

    def settle(self, *, drop: bool = False, flush: bool = False, compact: bool = False) -> None:
        transaction = self.pending()
        if compact and "compact" in self.verbs:
            transaction.compact()
        if flush and "flush" in self.verbs:
            transaction.flush()
        reservation = transaction.seal()
        assert reservation == transaction.seal(), "sealing is a reading"
        hash(reservation)
        assert picture(self.memory) == self.before, "a transaction changes nothing"
        if drop and "drop" in self.verbs:
            self.transaction = None
            self.seen["dropped"] += 1
            return
        assert flush or len(reservation.evicted) <= EVICTIONS_PER_STEP
        evicted = [
            (eviction, *self.place(self.memory._state.cache.tree.by_id[eviction.node]))
            for eviction in reservation.evicted
        ]
        compressed = set(self.memory._state.cache.compressed_states.pages)
        self.memory.commit(reservation)
        self.transaction = None
        self.execute(reservation)
        self.remember()
        for eviction, salt, tokens, start in evicted:
            self.forget(eviction.what, salt, tokens, start + eviction.pages_left * PAGE_TOKENS)
            self.seen["trim" if eviction.pages_left else eviction.what] += 1
            self.seen["compressed state"] += eviction.node in compressed and eviction.what == "state"

    # ------------------------------------------------------------------ the dull device

    def execute(self, reservation: Reservation) -> None:
        plans = self.plans
        for seq, more in plans.more.items():
            self.seqs[seq].tokens += more
        for opening in reservation.opened:
            self.seqs[opening.seq] = plans.opened[opening.seq]
            self.seqs[opening.seq].table = list(opening.pages)
            self.seqs[opening.seq].slot = opening.slot
        for extension in reservation.extended:
            self.seqs[extension.seq].table += extension.pages
        for seq in plans.closed:
            del self.seqs[seq]
        for claim in reservation.frames:
            frame = int(claim.frame)
            if claim.kind is FrameKind.SLOTS:
                for page in range(frame * self.n, (frame + 1) * self.n):
                    self.cells.pop(page, None)
            else:
                for slot in range(frame * self.m, (frame + 1) * self.m):
                    self.states.pop(slot, None)
        self.compress_and_restore(reservation)
        copied = [(copy.dst, self.cells.get(copy.src)) for copy in reservation.arena_work.page_copies]
        copied_states = [(copy.dst, self.states.get(copy.src)) for copy in reservation.arena_work.slot_copies]
        for page in (copy.src for copy in reservation.moves.pages):
            cell = (self.cells.pop(page, None) or [None])[0]
            self.seen["moved piece"] += isinstance(cell, Piece)
            self.seen["moved share"] += isinstance(cell, Share)
            self.seen["moved page"] += 1
        for slot in (copy.src for copy in reservation.moves.slots):
            self.states.pop(slot, None)
            self.seen["moved slot"] += 1
        for page, cells in copied:
            self.cells[page] = [None] * PAGE_TOKENS if cells is None else list(cells)
            self.seen["copy"] += 1
        self.states.update(copied_states)
        for patch in reservation.table_patches:
            table = self.seqs[patch.seq].table
            table[patch.first_index : patch.first_index + len(patch.pages)] = patch.pages
            self.seen["patch"] += 1
        for slot_patch in reservation.moves.slot_patches:
            self.seqs[slot_patch.seq].slot = slot_patch.slot
            self.seen["moved sequence"] += 1
        for seq, end in plans.runs.items():
            self.compute(seq, end)

    def compress_and_restore(self, reservation: Reservation) -> None:
        """A compressed state is in pieces, a page each. What is read was there before this step."""
        work = reservation.arena_work
        for restore in work.state_restores:
            self.states[restore.slot] = self.compressed_in(restore.pages)
            self.seen["restored"] += 1
        for compress in work.state_compressions:
            state = self.states.pop(compress.slot)
            for index, page in enumerate(compress.pages):
                self.cells[page] = [Piece(state, index)] * PAGE_TOKENS
            self.seen["compressed"] += 1
        for kv_restore in work.kv_restores:
            restore_kv(self.memory.plan, self.cells, kv_restore)
            self.seen["restored kv"] += 1
        for kv_compress in work.kv_compressions:
            compress_kv(self.memory.plan, self.cells, kv_compress)
            self.seen["compressed kv"] += 1
        self.rounded.memory(reservation)

    def compressed_in(self, pages: Sequence[PageId]) -> object:
        """The state whose pieces ``pages`` have, all of them and in order."""
        assert len(pages) == self.memory.plan.compressed_pages
        [first, *others] = [self.cells[page][0] for page in pages]
        assert isinstance(first, Piece), "what is restored is no compressed state"
        assert first.index == 0
        assert others == [Piece(first.state, index) for index in range(1, len(pages))]
        return first.state

    def compute(self, seq: SeqId, end: int) -> None:
        running = self.seqs[seq]
        start = running.computed
        if self.m and start:
            before = running.salt, running.tokens[:start]
            assert self.states[running.slot] == before, "the state to go on from"
        read_only = {page for node in self.memory._state.cache.tree.nodes() for page in node.pages}
        cache = self.memory._state.cache
        read_only |= {page for pages in cache.compressed_states.pages.values() for page in pages}
        read_only |= {page for one in cache.compressed_kv.by_node.values() for page in one.pages}
        for position in range(start, end):
            if self.n:
                page = running.table[position // PAGE_TOKENS]
                assert page not in read_only, f"L7: position {position} is written to a page of the tree"
                cell = self.cells.get(page, [])
                if not cell or isinstance(cell[0], Share):
                    cell = self.cells[page] = [None] * PAGE_TOKENS
                cell[position % PAGE_TOKENS] = (running.salt, running.tokens[: position + 1])
        if self.m:
            self.states[running.slot] = (running.salt, running.tokens[:end])
            for position, slot in self.plans.taps.get(seq, {}).items():
                assert slot != running.slot
                self.states[slot] = (running.salt, running.tokens[:position])
        self.rounded.compute(
            running.table, running.slot, self.plans.taps.get(seq, {}).values(), start, end, PAGE_TOKENS
        )
        running.computed = end

    # ------------------------------------------------------------------ the dull dictionary

    def remember(self) -> None:
        plans = self.plans
        for seq, tokens in plans.published.items():
            self.remember_one(self.gone(seq), tokens, ends=False)
        for seq, tokens in plans.kept.items():
            if tokens:
                self.remember_one(self.gone(seq), tokens, ends=True)
        for seq, taps in plans.taps.items():
            if seq in self.seqs:
                self.seqs[seq].taps |= taps
        self.last = dict(self.seqs)

    def gone(self, seq: SeqId) -> Running:
        return self.seqs.get(seq) or self.last[seq]

    def remember_one(self, running: Running, tokens: Tokens, *, ends: bool) -> None:
        if not self.cache:
            return
        taps = [position for position in running.taps if position <= len(tokens)]
        for position in taps:
            del running.taps[position]
            self.kept.add((running.salt, tokens[:position]))
        if ends and self.m:
            self.kept.add((running.salt, tokens))
        if self.n:
            for end in range(PAGE_TOKENS, len(tokens) + 1, PAGE_TOKENS):
                self.kv.add((running.salt, tokens[:end]))

    def forget(self, what: str, salt: str, tokens: Tokens, kv_kept: int) -> None:
        if what == "state":
            self.kept.discard((salt, tokens))
            return
        for end in range(kv_kept + PAGE_TOKENS, len(tokens) + 1, PAGE_TOKENS):
            self.kv.remove((salt, tokens[:end]))

    def place(self, node: Node) -> tuple[str, Tokens, int]:
        root = node
        while root.parent is not None:
            root = root.parent
        [salt] = [salt for salt, at in self.memory._state.cache.tree.roots.items() if at is root]
        return salt, tokens_to(node), node.start

    # ------------------------------------------------------------------ what must be true

    def check(self) -> None:
        memory, plan = self.memory, self.memory.plan
        memory.audit()
        if self.transaction is not None:
            return
        assert set(memory._state.leases) == set(self.seqs)
        for seq, running in self.seqs.items():
            lease = memory.lease(seq)
            assert lease.pages == running.table, "patches and openings tell the device everything"
            assert lease.slot == running.slot
            read = lease.pages[: running.computed // PAGE_TOKENS]
            assert lease.inexact or self.rounded.pages.isdisjoint(read)
            assert lease.inexact or not running.computed or running.slot not in self.rounded.slots
            assert len(lease.pages) >= plan.pages_for(len(running.tokens))
            assert sorted(held.position for held in lease.snapshots) == sorted(running.taps)
            self.holds(lease.pages, 0, running.salt, running.tokens[: running.computed])
            if self.m and running.computed:
                assert self.states[lease.slot] == (running.salt, running.tokens[: running.computed])
            self.seen["shared"] += lease.shared_tokens > 0
        states, kv = set(), set()
        for node in memory._state.cache.tree.nodes():
            salt, tokens, start = self.place(node)
            self.holds_node(node, start, salt, tokens)
            if node.slot != PAD:
                state = (
                    self.states[node.slot]
                    if node.slot != COMPRESSED
                    else self.compressed_in(memory._state.cache.compressed_states.pages[node.id])
                )
                assert state == (salt, tokens), "a snapshot is the state of its path"
                states.add((salt, tokens))
            if self.n and not node.is_tail:
                ends = range(start + PAGE_TOKENS, len(tokens) + 1, PAGE_TOKENS)
                kv |= {(salt, tokens[:end]) for end in ends}
        assert states == self.kept
        assert kv == self.kv
        usage = memory.usage()
        private = sum(len(lease.pages) - plan.pages_for(lease.shared_tokens) for lease in memory._state.leases.values())
        assert usage.pages_held == private + usage.pages_cached
        taps = sum(len(running.taps) for running in self.seqs.values())
        assert usage.slots_held == len(self.seqs) * (self.m > 0) + taps + usage.slots_cached

    def holds_node(self, node: Node, start: int, salt: str, tokens: Tokens) -> None:
        compressed = self.memory._state.cache.compressed_kv.by_node.get(node.id)
        if compressed is None:
            self.holds(node.pages, start, salt, tokens)
            assert node.kv_inexact or self.rounded.pages.isdisjoint(node.pages), "inexact KV, not marked"
        else:
            self.seen["cut"] += compressed.cut > 0 or compressed.skip_bytes > 0
            wide = records_in(self.memory.plan, self.cells, compressed.pages, compressed.skip_bytes, compressed.count)
            assert [cell for page in wide for cell in page] == [
                (salt, tokens[:end]) for end in range(start + 1, len(tokens) + 1)
            ]
        assert node.state_inexact or node.slot not in self.rounded.slots, "an inexact state, not marked"
        self.seen["inexact"] += node.kv_inexact and compressed is None

    def holds(self, pages: list[PageId], start: int, salt: str, tokens: Tokens) -> None:
        for position in range(start, len(tokens) if self.n else start):
            cell = self.cells[pages[(position - start) // PAGE_TOKENS]]
            assert cell[position % PAGE_TOKENS] == (salt, tokens[: position + 1]), f"position {position}"

    def end(self) -> None:
        """Liveness (law L3): the last sequence can have the whole arena, whatever is cached, in bounded
        steps of which each evicts; and when nothing runs, a flush leaves nothing."""
        self.settle()
        for seq in self.alive[1:]:
            self.close(seq, keep=seq % 3 > 0)
        self.settle()
        whole = (self.frames - (self.m > 0)) * self.n * PAGE_TOKENS or 64
        if not self.seqs:
            self.grow(lambda: self.open(SeqId(0), "", (0,) * 20, whole - 20, reclaim=False), whole, slots=1)
        [seq] = self.seqs
        if self.seqs[seq].computed:
            computed = self.seqs[seq].tokens[: self.seqs[seq].computed]
            self.pending().publish(seq, np.asarray(computed, dtype=np.int32))
            self.plans.published[seq] = computed[: len(computed) // PAGE_TOKENS * PAGE_TOKENS]
        self.settle()
        missing = whole - PAGE_TOKENS * len(self.memory.lease(seq).pages)
        self.grow(lambda: self.pending().extend(seq, whole), missing)
        self.close(seq, keep="keep" in self.verbs)
        self.settle()
        self.check()
        self.settle(flush=True)
        self.memory.flush()
        self.memory.audit()
        usage = self.memory.usage()
        assert usage.free_bytes == usage.arena_bytes
        assert usage.cached_bytes == usage.cache_nodes == 0

    def grow(self, attempt: Callable[[], bool], tokens: int, *, slots: int = 0) -> None:
        for _ in range(200):
            if attempt():
                self.settle()
                return
            pages = self.memory.plan.pages_for(tokens)
            assert self.pending().reclaim(pages=pages, slots=slots), "alone, and it does not fit"
            reservation = self.pending().seal()
            assert reservation.evicted or reservation.moves or reservation.arena_work.state_compressions, (
                "a step that gives nothing up, compresses nothing and moves nothing"
            )
            self.settle()
            self.check()
        raise AssertionError("a sequence that is alone waits for ever")


def some_tokens(random: Random, longest: int) -> Tokens:
    """Pages of one letter, of two; so that fronts are shared, and end anywhere in a page."""
    pages = [(random.choice((0, 0, 1)),) * PAGE_TOKENS for _ in range(random.randint(0, longest))]
    rest = (random.choice((0, 1)),) * random.choice((0, 0, 1, 5, 15))
    return tuple(token for page in pages for token in page) + rest or (0,)


def compressed_pages_of(seed: int) -> int:
    """Of a compressed state in the run of ``seed``; in every other run states are never compressed."""
    return (0, 1, 0, 2)[seed // 3 % 4]


def compressed_kv_share_of(seed: int) -> float:
    """Of a page, when it is compressed, in the run of ``seed``; in some runs KV is never compressed."""
    return (0, 0.5, 0.5625, 0.3125)[seed // 2 % 4]


def policy_of(seed: int) -> str:
    return tuple(POLICIES)[seed % len(POLICIES)]


def walk(seed: int, steps: int = 60, *, cache: bool = True) -> World:
    """One run of random verbs that are a function of ``seed``."""
    random = Random(seed)
    left_out = frozenset(random.sample(sorted(VERBS), random.randrange(4)))
    compressed_pages = compressed_pages_of(seed)
    among = COMPRESSION if compressed_pages else random.choice((GEOMETRIES, ROOMY))
    world = World(
        random.choice(among),
        left_out,
        cache=cache,
        compressed_pages=compressed_pages,
        compressed_kv_share=compressed_kv_share_of(seed),
        policy=policy_of(seed),
    )
    longest = max(2, min(8, world.n * world.frames // 2))
    for _ in range(steps):
        verb = random.choices(("open", "extend", "run", "publish", "close", "settle"), (4, 1, 4, 2, 2, 5))[0]
        if verb == "open" and world.absent:
            tokens = some_tokens(random, longest)
            if world.kept and random.random() < 0.6:
                salt, front = random.choice(sorted(world.kept))
                tokens = front + tokens[:PAGE_TOKENS]
            else:
                salt = random.choice(("", "", "a"))
            world.open(random.choice(world.absent), salt, tokens, random.choice((0, 0, 16)))
        elif verb == "settle":
            world.settle(drop=random.random() < 0.15, flush=random.random() < 0.02, compact=random.random() < 0.4)
        elif verb == "run":
            for seq in list(world.seqs) + list(world.plans.opened if world.transaction else ()):
                world.run(seq, random.choice((3, 16, 64, 128)), random.choice((0, 1, 1, 2)))
        elif world.alive:
            seq = random.choice(world.alive)
            if verb == "extend":
                world.extend(seq, (random.choice((0, 1)),) * random.choice((1, 1, 9)))
            elif verb == "publish":
                world.publish(seq)
            else:
                world.close(seq, keep=random.random() < 0.75)
        world.check()
    world.end()
    return world


def scatter(seed: int, rounds: int = 5) -> World:
    """One run in which much lies apart: many sequences on a few fronts come together, half of them leave,
    some of what they leave behind is evicted, and everything is moved together while the others go on."""
    random = Random(seed)
    world = World(
        random.choice(SCATTERED),
        policy=policy_of(seed // 10),
        compressed_kv_share=compressed_kv_share_of(seed // 10 * 2),
    )
    fronts = [(letter,) * (PAGE_TOKENS * random.randint(1, 3)) for letter in (2, 3, 4)]

    def step(**more: bool) -> None:
        for seq in world.alive:
            if random.random() < 0.3:
                world.extend(seq, (1,) * random.choice((1, 9, 16)))
            world.run(seq, random.choice((3, 16, 64)), random.choice((0, 1, 2)))
        world.settle(**more)
        world.check()

    for _ in range(rounds):
        for seq in world.absent:
            if random.random() < 0.8:
                own = (random.choice((0, 1)),) * random.choice((1, 5, 16, 20, 40))
                world.open(seq, "", random.choice(fronts) + own, random.choice((0, 0, 16)))
                world.run(seq, random.choice((3, 16, 64)), random.choice((0, 1, 2)))
        step()
        for seq in world.alive:
            if random.random() < 0.6:
                world.publish(seq)
        step(compact=random.random() < 0.3)
        for seq in world.alive:
            if random.random() < 0.5:
                world.close(seq, keep=random.random() < 0.6)
        step(compact=random.random() < 0.3)
        if random.random() < 0.3:
            step(flush=True)
        for _ in range(3):
            step(compact=True, drop=random.random() < 0.1)
    world.end()
    return world


def turns(seed: int, rounds: int = 30) -> World:
    """One run in which answers come back: each request goes on from a state that was kept, or begins anew,
    and leaves one; so memory is full of states, and of little else."""
    random = Random(seed)
    world = World(
        random.choice(COMPRESSION),
        compressed_pages=1 + seed // 10 % 2,
        compressed_kv_share=compressed_kv_share_of(seed // 10 * 2),
    )
    for _ in range(rounds):
        for seq in world.absent[: random.choice((1, 1, 2, 3))]:
            salt, front = "", ()
            if world.kept and random.random() < 0.6:
                salt, front = random.choice(sorted(world.kept))
            letters = (random.choice((0, 1, 2, 3, 4)),) * random.choice((1, 9, 16, 20))
            world.open(seq, salt, (*front[: 5 * PAGE_TOKENS], *letters), random.choice((0, 0, 16)))
            world.run(seq, 128, random.choice((0, 1)))
        world.settle(compact=random.random() < 0.4, drop=random.random() < 0.05)
        world.check()
        for seq in world.alive:
            if random.random() < 0.7:
                world.close(seq, keep=random.random() < 0.9)
            elif random.random() < 0.5:
                world.publish(seq)
        world.settle(compact=random.random() < 0.4)
        world.check()
    world.end()
    return world


def returns(seed: int, rounds: int = 25) -> World:
    """One run of long prompts on a few fronts, some of which part in the middle of what another left: most of
    memory is KV that nobody reads, until somebody does."""
    random = Random(seed)
    world = World(
        random.choice(LONG),
        compressed_pages=random.choice((0, 2)),
        policy=policy_of(seed // 10),
        compressed_kv_share=random.choice((0.3125, 0.5, 0.5625, 0.75)),
    )
    fronts = [(letter,) * (PAGE_TOKENS * random.randint(3, 9)) for letter in (2, 3, 4)]
    for _ in range(rounds):
        for seq in world.absent[: random.choice((1, 2, 3))]:
            front = random.choice(fronts)
            if world.kept and random.random() < 0.5:
                _, front = random.choice(sorted(world.kept))
            else:
                front = front[: random.randint(1, len(front))]
            own = (random.choice((0, 1)),) * random.choice((1, 16, 20, 60))
            world.open(seq, "", (*front[: 10 * PAGE_TOKENS], *own), random.choice((0, 0, 16)))
            world.run(seq, 256, random.choice((0, 1, 3)))
        for seq in world.alive:
            if seq not in world.plans.runs and random.random() < 0.3:
                world.publish(seq)
        world.settle(compact=random.random() < 0.2, drop=random.random() < 0.1)
        world.check()
        for seq in world.alive:
            if random.random() < 0.8:
                world.close(seq, keep=random.random() < 0.9)
        if random.random() < 0.6:
            world.settle(compact=random.random() < 0.3)
            world.check()
    world.end()
    return world


def run_of(seed: int) -> World:
    """One run of any kind."""
    return {0: scatter, 5: turns, 2: returns, 7: returns}.get(seed % 10, walk)(seed)
