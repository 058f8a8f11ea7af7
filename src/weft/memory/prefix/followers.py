"""Changes of the prefix cache, followed by a router and by publishers of KV events.

    tree     note_change --> a set of nodes for each follower             nothing without followers
    take     what each changed node has now  -  what was reported of it   --> SnapshotReport, or KV events

A report is the difference between two states of the tree. So a snapshot that came and went between two reports is
in none. A step that changes nothing costs nothing. The digest of a node is computed from that of its parent
(``weft.prefix_digests``).

**SnapshotFollower** reports to weft's own router the places at which a request can resume. A model with states resumes
at snapshots only (law L8). For a model without them, and for a router that asks for ``pages``, it reports every fourth
page of a span and the span's end. At most OFFERED_MAX places are reported at once.

**BlockFollower** reports to readers of vLLM's events (``weft.kv_events``) every whole page, and every state as a kind
of its own. It holds eight bytes for each page that it has reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.adapters import salt_parts
from weft.kv_events import (
    ATTENTION_GROUP,
    ATTENTION_KIND,
    MEDIUM,
    STATE_GROUP,
    STATE_KIND,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
)
from weft.memory.prefix.edge import COMPRESSED, Node
from weft.memory.prefix.tree import PrefixTree, salt_of
from weft.memory.values import NodeId
from weft.prefix_digests import Digests, Int32s, extended_digests, partial_digest, salt_digest
from weft.snapshot_report import RemovedSnapshot, ReportedSnapshot, SnapshotReport
from weft.units import CHUNK_TOKENS, PAD, PAGE_TOKENS

OFFERED_MAX = 200_000
COMPRESSED_RESTORE_S = 1e-3
"""A guess: restoring a state takes about as long as writing it."""
RUN_BLOCKS_MAX = 1024
"""Most blocks of one BlockStored event."""

_Key = tuple[int, tuple[int, ...]]
"""Digest and tail."""
_NO_DIGESTS: Digests = np.empty(0, np.uint64)
Bools = npt.NDArray[np.bool_]
UInt32s = npt.NDArray[np.uint32]


class TreeWatch:
    """The nodes of ``tree`` that changed since the last look, and digests of prefixes. The first look has all."""

    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        self.digests: dict[NodeId, int] = {}
        self._changed: set[NodeId] = set(tree.by_id)
        tree.watches.append(self._changed)

    def __bool__(self) -> bool:
        return bool(self._changed)

    def take(self) -> list[NodeId]:
        """Return the changed nodes, in an order that equal runs share."""
        changed = sorted(self._changed)
        self._changed.clear()
        for node_id in changed:
            self.digests.pop(node_id, None)
        return changed

    def stop(self) -> None:
        """Stop the tree's notes of changes for this follower."""
        self.tree.watches[:] = [changed for changed in self.tree.watches if changed is not self._changed]

    def digest_at(self, node: Node) -> int:
        """Return the digest at the end of ``node``, whose end is that of a page."""
        path: list[Node] = []
        ancestor = node
        while ancestor.parent is not None and ancestor.id not in self.digests:
            path.append(ancestor)
            ancestor = ancestor.parent
        if ancestor.parent is None:
            digest = salt_digest(salt_of(self.tree, ancestor))
        else:
            digest = self.digests[ancestor.id]
        if path:
            tokens = np.frombuffer(b"".join(step.tokens for step in reversed(path)), dtype=np.int32)
            digest = int(extended_digests(digest, tokens, ancestor.end // PAGE_TOKENS)[-1])
            self.digests[node.id] = digest
        return digest


class SnapshotFollower:
    """A follower for weft's router. ``pages``: it reports every place where KV ends, and not only states."""

    def __init__(self, tree: PrefixTree, *, pages: bool) -> None:
        self.number = 0
        """Reports so far."""
        self.offered_count = 0
        self.watch = TreeWatch(tree)
        self._pages = pages
        self._offers: dict[NodeId, dict[_Key, ReportedSnapshot]] = {}
        """Snapshots that each node offered at the last report."""
        self._changes()

    def take(self) -> SnapshotReport | None:
        """Return the changes since the last report, None without any."""
        if not self.watch:
            return None
        added, removed = self._changes()
        if not added and not removed:
            return None
        self.number += 1
        return SnapshotReport(number=self.number, added=added, removed=removed)

    def full_report(self) -> SnapshotReport:
        """Return everything."""
        self._changes()
        self.number += 1
        everything = [offer for offers in self._offers.values() for offer in offers.values()]
        return SnapshotReport(number=self.number, added=everything, is_full=True)

    def _changes(self) -> tuple[list[ReportedSnapshot], list[RemovedSnapshot]]:
        came: dict[_Key, ReportedSnapshot] = {}
        went: set[_Key] = set()
        for node_id in self.watch.take():
            old = self._offers.pop(node_id, {})
            self.offered_count -= len(old)
            node = self.watch.tree.by_id.get(node_id)
            new = {} if node is None or self.offered_count >= OFFERED_MAX else self._offered_by(node)
            if new:
                self._offers[node_id] = new
                self.offered_count += len(new)
            came.update((key, offer) for key, offer in new.items() if old.get(key) != offer)
            went.update(key for key in old if key not in new)
        return list(came.values()), [RemovedSnapshot(*key) for key in went if key not in came]

    def _offered_by(self, node: Node) -> dict[_Key, ReportedSnapshot]:
        if node.parent is None:
            return {}
        if self._pages:
            return self._pages_of(node)
        if node.slot == PAD:
            return {}
        tail: tuple[int, ...] = ()
        base = node
        if node.is_tail:
            tail = tuple(_tokens_of(node).tolist())
            base = node.parent
        digest = self.watch.digest_at(base)
        if node.slot == COMPRESSED:
            return {(digest, tail): ReportedSnapshot(digest, node.end, tail, "compressed", COMPRESSED_RESTORE_S)}
        return {(digest, tail): ReportedSnapshot(digest, node.end, tail)}

    def _pages_of(self, node: Node) -> dict[_Key, ReportedSnapshot]:
        if node.is_tail or node.parent is None:
            return {}
        first = node.start // PAGE_TOKENS
        digests = extended_digests(self.watch.digest_at(node.parent), _tokens_of(node), first)
        if not digests.size:
            return {}
        self.watch.digests[node.id] = int(digests[-1])
        ends = [
            end
            for end in range(node.start + PAGE_TOKENS, node.end + 1, PAGE_TOKENS)
            if end % CHUNK_TOKENS == 0 or end == node.end
        ]
        offers: dict[_Key, ReportedSnapshot] = {}
        for end in ends:
            digest = int(digests[end // PAGE_TOKENS - first - 1])
            offers[digest, ()] = ReportedSnapshot(digest, end)
        return offers


class _Held(NamedTuple):
    """The reported part of a node. ``blocks``: digests of its pages. ``state``: that of its snapshot, or None;
    ``before``: that of the whole pages before the state's last page, None without such pages."""

    blocks: Digests
    state: int | None
    before: int | None


class BlockFollower:
    """A follower for readers of KV events. ``adapter_name`` returns the name of the adapter with a digest."""

    def __init__(self, tree: PrefixTree, adapter_name: Callable[[str], str]) -> None:
        self.watch = TreeWatch(tree)
        self._adapter_name = adapter_name
        self._held: dict[NodeId, _Held] = {}
        self.take()

    def take(self) -> list[KvEvent]:
        """Return the changes since the last look: removals first, then blocks from the shortest prefix on."""
        if not self.watch:
            return []
        old, nodes = [], []
        for node_id in self.watch.take():
            entry, node = self._held.pop(node_id, None), self.watch.tree.by_id.get(node_id)
            if entry is not None:
                old.append(entry)
            if node is not None and node.parent is not None:
                nodes.append(node)
        nodes.sort(key=lambda node: (node.start, node.id))
        new = [self._hold(node) for node in nodes]
        had, has = _blocks_of(old), _blocks_of(new)
        had_states = {entry.state for entry in old if entry.state is not None}
        has_states = {entry.state for entry in new if entry.state is not None}
        events: list[KvEvent] = []
        for group, gone in (
            (ATTENTION_GROUP, np.setdiff1d(had, has).tolist()),
            (STATE_GROUP, sorted(had_states - has_states)),
        ):
            if gone:
                events.append(BlockRemoved(gone, MEDIUM, group))
        for node, entry in zip(nodes, new, strict=True):
            events += self._stored(node, entry, ~np.isin(entry.blocks, had), entry.state not in had_states)
        return events

    def everything(self) -> Iterator[KvEvent]:
        """Yield AllBlocksCleared and the whole cache; the changes so far are in it."""
        self.take()
        yield AllBlocksCleared()
        by_id = self.watch.tree.by_id
        for node in sorted((by_id[node_id] for node_id in self._held), key=lambda node: (node.start, node.id)):
            entry = self._held[node.id]
            yield from self._stored(node, entry, np.ones(entry.blocks.size, np.bool_), True)

    def _hold(self, node: Node) -> _Held:
        assert node.parent is not None
        above, tokens, first = self.watch.digest_at(node.parent), _tokens_of(node), node.start // PAGE_TOKENS
        before: int | None = above if node.start else None
        if node.is_tail:
            end, blocks = partial_digest(above, tokens, first), _NO_DIGESTS
        else:
            blocks = extended_digests(above, tokens, first)
            end = self.watch.digests[node.id] = int(blocks[-1])
            before = int(blocks[-2]) if blocks.size > 1 else before
        entry = _Held(blocks if self.watch.tree.paged else _NO_DIGESTS, end if node.slot != PAD else None, before)
        if entry.blocks.size or entry.state is not None:
            self._held[node.id] = entry
        return entry

    def _stored(self, node: Node, entry: _Held, new: Bools, state_is_new: bool) -> Iterator[KvEvent]:
        """Yield the blocks of ``node`` that ``new`` marks, by runs, and its state."""
        assert node.parent is not None
        if not new.any() and (entry.state is None or not state_is_new):
            return
        above = self.watch.digest_at(node.parent) if node.start else None
        salt, tokens = salt_of(self.watch.tree, node), _tokens_of(node).view(np.uint32)
        for first, end in _runs(new):
            parent = int(entry.blocks[first - 1]) if first else above
            yield self._event(
                entry.blocks[first:end].tolist(), parent, tokens[first * PAGE_TOKENS : end * PAGE_TOKENS], salt, False
            )
        if entry.state is not None and state_is_new:
            last = (tokens.size - 1) // PAGE_TOKENS * PAGE_TOKENS
            yield self._event([entry.state], entry.before, tokens[last:], salt, True)

    def _event(self, hashes: list[int], parent: int | None, tokens: UInt32s, salt: str, is_state: bool) -> KvEvent:
        digest, cache_salt = salt_parts(salt)
        name = None if digest is None else self._adapter_name(digest)
        of_adapter = () if digest is None or name is None else (name, f"sha256:{digest}")
        of_first = (*of_adapter, cache_salt) if cache_salt and parent is None else of_adapter
        keys = [of_first or None, *[of_adapter or None] * (len(hashes) - 1)]
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=parent,
            token_ids=tokens.tolist(),
            block_size=PAGE_TOKENS,
            lora_id=None,
            medium=MEDIUM,
            lora_name=name,
            extra_keys=keys if any(keys) else None,
            group_idx=STATE_GROUP if is_state else ATTENTION_GROUP,
            kv_cache_spec_kind=STATE_KIND if is_state else ATTENTION_KIND,
        )


def _tokens_of(node: Node) -> Int32s:
    return np.frombuffer(node.tokens, dtype=np.int32)


def _blocks_of(entries: Iterable[_Held]) -> Digests:
    return np.concatenate([_NO_DIGESTS, *(entry.blocks for entry in entries)])


def _runs(marked: Bools) -> Iterator[tuple[int, int]]:
    """Yield first and end of each run of marks, in runs of at most RUN_BLOCKS_MAX."""
    edges = np.flatnonzero(np.diff(marked, prepend=False, append=False)).tolist()
    for first, end in zip(edges[::2], edges[1::2], strict=True):
        for start in range(first, end, RUN_BLOCKS_MAX):
            yield start, min(end, start + RUN_BLOCKS_MAX)
