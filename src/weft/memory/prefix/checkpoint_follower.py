"""What changed in the prefix cache since the last report, for a router: checkpoints that came and went.

    tree    node gets or loses a checkpoint, is cut or removed  -->  its id goes into ``tree.changed_nodes``
    take    for each of these nodes: what it offers now  -  what was reported of it  -->  CheckpointReport

So a report is a difference between two states of the tree. A checkpoint that came and went between two
reports is in none. A step that changes nothing costs nothing. Without a follower the tree notes nothing.

A model with states resumes at checkpoints only (law L8): a node offers the one at its end. A model without
states resumes at any page: a node offers every fourth page of its span, and its end. The same is reported of
a model with states if a router asks for ``pages``: KV pages are what other routers know.

Digests go down the tree by sums (``weft.checkpoint_report``), so a node costs its own tokens. They are stored
for nodes that offer something, and dropped with them.

Law L11: at most OFFERED_MAX checkpoints are reported at once. Later ones wait until others go.

Rejected: an event at each place that changes a checkpoint (six places, and events that cancel out); a walk of
the tree at each report (100,000 nodes).
"""

from __future__ import annotations

import numpy as np

from weft.checkpoint_report import CheckpointReport, RemovedCheckpoint, ReportedCheckpoint
from weft.memory.prefix.edge import COMPRESSED, Node
from weft.memory.prefix.tree import PrefixTree, namespace_of
from weft.memory.values import NodeId
from weft.prefix_digests import extended_digests, salt_digest
from weft.units import CHUNK_TOKENS, PAD, PAGE_TOKENS

OFFERED_MAX = 200_000
COMPRESSED_RESTORE_S = 1e-3
"""A guess: unpacking a state takes about as long as writing it."""

_Key = tuple[int, tuple[int, ...]]
"""Digest and tail."""


class CheckpointFollower:
    """``pages``: every place where KV ends is reported, and not only states. One for a tree."""

    def __init__(self, tree: PrefixTree, *, pages: bool) -> None:
        self.number = 0
        """Reports so far."""
        self.offered_count = 0
        self._tree = tree
        self._pages = pages
        self._digests: dict[NodeId, int] = {}
        self._offers: dict[NodeId, dict[_Key, ReportedCheckpoint]] = {}
        """What each node offered at the last report."""
        tree.changed_nodes = set(tree.by_id)
        self._changes()

    def take(self) -> CheckpointReport | None:
        """What changed since the last report or snapshot; None for nothing."""
        if not self._tree.changed_nodes:
            return None
        added, removed = self._changes()
        if not added and not removed:
            return None
        self.number += 1
        return CheckpointReport(number=self.number, added=added, removed=removed)

    def snapshot(self) -> CheckpointReport:
        """Everything."""
        self._changes()
        self.number += 1
        everything = [one for offers in self._offers.values() for one in offers.values()]
        return CheckpointReport(number=self.number, added=everything, is_snapshot=True)

    def stop(self) -> None:
        """The tree notes no further changes."""
        self._tree.changed_nodes = None

    def _changes(self) -> tuple[list[ReportedCheckpoint], list[RemovedCheckpoint]]:
        """In the order of nodes, so equal runs have equal reports."""
        changed, self._tree.changed_nodes = self._tree.changed_nodes or set(), set()
        came: dict[_Key, ReportedCheckpoint] = {}
        went: set[_Key] = set()
        for node_id in changed:
            self._digests.pop(node_id, None)
        for node_id in sorted(changed):
            old = self._offers.pop(node_id, {})
            self.offered_count -= len(old)
            node = self._tree.by_id.get(node_id)
            new = {} if node is None or self.offered_count >= OFFERED_MAX else self._offered_by(node)
            if new:
                self._offers[node_id] = new
                self.offered_count += len(new)
            came.update((key, one) for key, one in new.items() if old.get(key) != one)
            went.update(key for key in old if key not in new)
        return list(came.values()), [RemovedCheckpoint(*key) for key in went if key not in came]

    def _offered_by(self, node: Node) -> dict[_Key, ReportedCheckpoint]:
        if node.parent is None:
            return {}
        if self._pages:
            return self._pages_of(node)
        if node.slot == PAD:
            return {}
        tail: tuple[int, ...] = ()
        at = node
        if node.is_tail:
            tail = tuple(np.frombuffer(node.tokens, dtype=np.int32).tolist())
            at = node.parent
        digest = self._digest_at(at)
        if node.slot == COMPRESSED:
            return {(digest, tail): ReportedCheckpoint(digest, node.end, tail, "compressed",
                                                       COMPRESSED_RESTORE_S)}
        return {(digest, tail): ReportedCheckpoint(digest, node.end, tail)}

    def _pages_of(self, node: Node) -> dict[_Key, ReportedCheckpoint]:
        if node.is_tail or node.parent is None:
            return {}
        first = node.start // PAGE_TOKENS
        digests = extended_digests(self._digest_at(node.parent), np.frombuffer(node.tokens, dtype=np.int32),
                                   first)
        if not digests.size:
            return {}
        self._digests[node.id] = int(digests[-1])
        ends = [end for end in range(node.start + PAGE_TOKENS, node.end + 1, PAGE_TOKENS)
                if end % CHUNK_TOKENS == 0 or end == node.end]
        offers: dict[_Key, ReportedCheckpoint] = {}
        for end in ends:
            digest = int(digests[end // PAGE_TOKENS - first - 1])
            offers[digest, ()] = ReportedCheckpoint(digest, end)
        return offers

    def _digest_at(self, node: Node) -> int:
        """The digest at the end of ``node``, whose end is that of a page."""
        path: list[Node] = []
        at = node
        while at.parent is not None and at.id not in self._digests:
            path.append(at)
            at = at.parent
        if at.parent is None:
            digest = salt_digest(namespace_of(self._tree, at))
        else:
            digest = self._digests[at.id]
        if path:
            tokens = np.frombuffer(b"".join(step.tokens for step in reversed(path)), dtype=np.int32)
            digest = int(extended_digests(digest, tokens, at.end // PAGE_TOKENS)[-1])
            self._digests[node.id] = digest
        return digest
