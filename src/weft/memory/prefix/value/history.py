"""The history: a second prefix tree, of tokens only, that also remembers evicted states.

    live tree      pages and states in memory                       of the memory, exact, audited
    history        tokens of recent prompts and answers,             of the policy, bounded, a hint
                   with a record at each state, live or evicted (a *ghost*)

          [0 ......... 512) --+-- [512 ...... 2048) o  ghost: a request that returns to it computes it again
                              '-- [512 .. 900) o  in memory

A lookup says how far a prompt was seen before, even if its KV is evicted, and which record it would have
used. A span without a record and without a running request is forgotten at once. So the bound is one on
ghosts and their tokens, and the policy keeps it. It mirrors the verbs of the live tree, lease by lease, and
never reads it. If the two disagree, a record is not added, and nothing else happens.
"""

from __future__ import annotations

from weft.memory.prefix.edge import PAGE_KEY_BYTES, TOKEN_BYTES, Node
from weft.memory.prefix.tree import PrefixTree
from weft.units import PAD, SeqId, SlotId


class History:
    """A tree of recent tokens. Records are numbers, kept where the live tree has slots. ``token_count``: tokens of all
    edges."""

    __slots__ = ("_held", "_tree", "token_count")

    def __init__(self) -> None:
        self._tree = PrefixTree(paged=False)
        self._held: dict[SeqId, Node] = {}
        self.token_count = 0

    def find(self, salt: str, tokens: bytes) -> tuple[int, int]:
        """Return how far ``tokens`` was seen, in complete pages, and the deepest record on the path, PAD without
        one."""
        match = self._tree.find(salt, tokens)
        if match is None:
            return 0, PAD
        return match.kv_tokens, match.anchor.slot if match.anchor is not None else PAD

    def opened(self, seq: SeqId, place: Node) -> None:
        """Note that ``seq`` opens at ``place``; its new tokens follow the complete pages of it."""
        node = place.parent if place.is_tail else place
        if node is not None and node.parent is not None:
            self._hold(seq, node)

    def published(self, seq: SeqId, salt: str, start: int, tokens: bytes) -> None:
        """Add ``tokens`` (int32 bytes; complete pages count) that ``seq`` computed from ``start`` on."""
        base = self._held.get(seq)
        if (base.end if base is not None else 0) < start:
            return
        if base is None:
            base = self._tree.root(salt)
        data = tokens[(base.end - start) * TOKEN_BYTES :]
        node, known_end = self._tree.insert(base, data[: len(data) // PAGE_KEY_BYTES * PAGE_KEY_BYTES], [])
        self.token_count += node.end - known_end
        if node is not base:
            self._hold(seq, node)

    def place(self, seq: SeqId, position: int, rest: bytes) -> Node | None:
        """Return the place of a state after ``position`` tokens of ``seq``; ``rest``: its tokens past complete pages.
        None if the path was forgotten."""
        path = self._held.get(seq)
        if path is None:
            return None
        if position <= path.end:
            return self._tree.node_ending(path, position)
        if position != path.end + len(rest) // TOKEN_BYTES:
            return None
        tail = path.children.get(rest) or self._tree.add_tail(path, rest, [])
        assert tail is not None
        self.token_count += 0 if tail.slot != PAD else position - path.end
        return tail

    def record(self, node: Node, record: int) -> None:
        self._tree.set_slot(node, SlotId(record), 0)

    def forget(self, node: Node) -> None:
        """Remove the record at ``node``, and the spans that only it needs."""
        self._tree.take_slot(node)
        self._prune(node)

    def closed(self, seq: SeqId) -> None:
        node = self._held.pop(seq, None)
        if node is not None:
            self._tree.release(node)
            self._prune(node)

    def _hold(self, seq: SeqId, node: Node) -> None:
        before = self._held.get(seq)
        self._tree.hold(node)
        self._held[seq] = node
        if before is not None:
            self._tree.release(before)

    def _prune(self, node: Node) -> None:
        ancestor = node
        while ancestor.bare and ancestor.parent is not None:
            parent = ancestor.parent
            self.token_count -= ancestor.end - ancestor.start
            self._tree.remove(ancestor)
            ancestor = parent
