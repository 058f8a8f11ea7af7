"""Pins: prefixes with names, which leave memory after all others and stay in the store.

    name --.
    name --+--> PinnedPrefix: salt, tokens      set and dropped between steps, by the owner of the engine
    name --'         |
                     '--> node                  its deepest snapshot; found again when it comes back

A pin holds no memory. Its snapshot belongs to the prefix tree like any other, with the KV of its path. Several names
of one prefix share the snapshot, so a second name costs no page. ``last`` has the pinned snapshots that fit into
``budget_bytes`` together, the most recently named first. Evictions take these after all other snapshots, but before a
request waits for memory (law L3). The prefix of an evicted pin is read from the store or computed again: the store does
not evict records of pinned prefixes (``weft.store.eviction``).

A prefix is *due* until its snapshot is on the way to the store: such a write has no price and no pace.

Laws: L3 (pins never refuse memory), L10 (a salt separates them), L11 (``budget_bytes`` and LAST_MAX).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from weft.memory.frames.plan import ArenaPlan
from weft.memory.prefix.edge import TOKEN_BYTES, Node
from weft.memory.prefix.tree import PrefixTree
from weft.memory.values import NO_NODE, NodeId
from weft.units import PAGE_TOKENS

LAST_MAX = 256
"""Pinned snapshots that are evicted last: a step that is short of memory looks at each of them."""
PinWrite = Literal["due", "begun", "written", "failed"]
"""State of a pinned prefix's write to the store."""
_Key = tuple[str, bytes]
Place = TypeVar("Place")


@dataclass(slots=True, eq=False)
class PinnedPrefix:
    """A prefix with names. ``tokens``: int32 bytes. ``position``: tokens up to its deepest snapshot in memory, 0
    without one.
    """

    salt: str
    tokens: bytes = field(repr=False)
    names: set[str]
    node: NodeId = NO_NODE
    position: int = 0
    write: PinWrite = "due"

    @property
    def length(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


class Pins:
    """The pins of one memory. ``tree`` is read, never changed. ``budget_bytes``: KV and states of all pinned snapshots
    that go last."""

    def __init__(self, tree: PrefixTree, plan: ArenaPlan, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._last: tuple[NodeId, ...] = ()
        self._held = 0, 0
        self._is_stale = False
        """Whether ``_last`` and ``_held`` are those of an older tree."""
        self._tree, self._plan = tree, plan
        self._prefixes: dict[_Key, PinnedPrefix] = {}
        """The most recently named last."""
        self._names: dict[str, _Key] = {}
        self._by_node: dict[NodeId, list[PinnedPrefix]] = {}
        self._lacking: dict[int, list[PinnedPrefix]] = {}
        """By the position where its snapshot is missing."""

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[PinnedPrefix]:
        """Yield each prefix once, the most recently named first."""
        return reversed(self._prefixes.values())

    @property
    def last(self) -> tuple[NodeId, ...]:
        """Nodes whose snapshots are evicted last, the first of them at the very end."""
        self._choose()
        return self._last

    @property
    def usage(self) -> tuple[int, int]:
        """Pages and slots of ``last``, each counted once."""
        self._choose()
        return self._held

    @property
    def held_bytes(self) -> int:
        pages, slots = self.usage
        return pages * self._plan.page_bytes + slots * self._plan.slot_stride_bytes

    def of(self, name: str) -> PinnedPrefix:
        return self._prefixes[self._names[name]]

    # ------------------------------------------------------------------ names

    def add(self, name: str, salt: str, tokens: bytes) -> PinnedPrefix:
        """Name this prefix ``name``, and no other one."""
        key = salt, tokens
        if self._names.get(name) != key:
            self.drop(name)
        prefix = self._prefixes.pop(key, None) or PinnedPrefix(salt, tokens, set())
        prefix.names.add(name)
        if prefix.write == "failed":
            prefix.write = "due"
        self._prefixes[key], self._names[name] = prefix, key
        self._find(prefix)
        return prefix

    def drop(self, name: str) -> bool:
        """Forget ``name``. Return whether it named a prefix."""
        key = self._names.pop(name, None)
        if key is None:
            return False
        prefix = self._prefixes[key]
        prefix.names.discard(name)
        if not prefix.names:
            self._unlink(prefix)
            del self._prefixes[key]
        return True

    # ------------------------------------------------------------------ the store

    @property
    def has_due(self) -> bool:
        return any(prefix.write == "due" for prefix in self._prefixes.values())

    def due(self, salt: str, tokens: bytes) -> PinnedPrefix | None:
        """Return the pinned prefix ``tokens``, if its snapshot is still to be written."""
        prefix = self._prefixes.get((salt, tokens))
        return prefix if prefix is not None and prefix.write == "due" else None

    def covers(self, salt: str, tokens: bytes) -> bool:
        """Return whether ``tokens`` begin with a pinned prefix, or are one."""
        return (salt, tokens) in self._prefixes or any(
            prefix.salt == salt and tokens.startswith(prefix.tokens) for prefix in self._prefixes.values()
        )

    # ------------------------------------------------------------------ by a commit

    def came(self, node: Node) -> None:
        """Note that ``node`` has a snapshot now."""
        for prefix in list(self._lacking.get(node.end, ())):
            self._find(prefix)

    def went(self, node: Node) -> None:
        """Note that the snapshot of ``node`` is gone, or that ``node`` was removed or cut."""
        for prefix in list(self._by_node.get(node.id, ())):
            self._find(prefix)

    def audit(self) -> None:
        """Raise AssertionError where a pin names a node that the tree lacks, or the budget is exceeded."""
        assert self.held_bytes <= self.budget_bytes, (
            f"pins hold {self.held_bytes} bytes of a budget of {self.budget_bytes}"
        )
        for node_id in self._by_node:
            assert node_id in self._tree.by_id, f"node {node_id} is pinned and gone"
        assert set(self.last) <= set(self._by_node), "a snapshot goes last that no name needs"

    def _find(self, prefix: PinnedPrefix) -> None:
        """Look for its deepest snapshot."""
        self._unlink(prefix)
        match = self._tree.find(prefix.salt, prefix.tokens)
        node = None
        if match is not None:
            node = match.anchor if self._plan.slots_per_frame else match.partly or match.node
        if node is not None and node.parent is not None:
            prefix.node, prefix.position = node.id, min(node.end, prefix.length)
            self._by_node.setdefault(node.id, []).append(prefix)
        if prefix.position < self._end_of(prefix):
            self._lacking.setdefault(self._end_of(prefix), []).append(prefix)
        self._is_stale = True

    def _end_of(self, prefix: PinnedPrefix) -> int:
        """Return the position of the snapshot that has all of it. A model without states has whole pages only."""
        return prefix.length if self._plan.slots_per_frame else prefix.length // PAGE_TOKENS * PAGE_TOKENS

    def _unlink(self, prefix: PinnedPrefix) -> None:
        _take_out(self._by_node, prefix.node, prefix)
        _take_out(self._lacking, self._end_of(prefix), prefix)
        prefix.node, prefix.position = NO_NODE, 0
        self._is_stale = True

    def _choose(self) -> None:
        """Choose the snapshots that go last: those of the most recent names that fit together."""
        if not self._is_stale:
            return
        self._is_stale = False
        plan, last = self._plan, dict[NodeId, None]()
        counted: set[NodeId] = set()
        pages = slots = 0
        for prefix in self:
            if prefix.node == NO_NODE or prefix.node in last:
                continue
            path: list[Node] = []
            node: Node | None = self._tree.by_id[prefix.node]
            while node is not None and node.id not in counted:
                path.append(node)
                node = node.parent
            more_pages = pages + sum(step.page_count for step in path)
            more_slots = slots + (plan.slots_per_frame > 0)
            size_bytes = more_pages * plan.page_bytes + more_slots * plan.slot_stride_bytes
            if size_bytes > self.budget_bytes or len(last) == LAST_MAX:
                continue
            pages, slots = more_pages, more_slots
            counted.update(step.id for step in path)
            last[prefix.node] = None
        self._last, self._held = tuple(last), (pages, slots)


def _take_out(places: dict[Place, list[PinnedPrefix]], place: Place, prefix: PinnedPrefix) -> None:
    left = [other for other in places.pop(place, ()) if other is not prefix]
    if left:
        places[place] = left
