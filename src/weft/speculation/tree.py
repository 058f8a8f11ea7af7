"""Drafts from the prefix tree: the sequence's own place in it, and the tokens that followed there before.

    root of the salt --[ prompt )--[ answer of an earlier request )
                             |  ^ the sequence is here: the rest of the edge is the draft
                             '--[ another answer )               of several children, the one used last

A cached answer to the same text is the best guess for the same question asked again: a retry, the next of n
answers, an agent that repeats a call, a rollout.

The follower copies the tokens after its place, a window at a time, and follows the copy. The tree may evict, cut or
add nodes between two steps, so no node is held. When the copy ends or differs, the follower looks up its place again.
That compares all tokens of the sequence (40 microseconds for 100,000), so after a lookup without a result it waits,
twice as long each time.

Tokens only come from the root of the sequence's own salt (law L10). The follower only reads: no lease, no recency and
no counter of the cache changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from weft.memory.prefix.edge import TOKEN_BYTES, Node, walk
from weft.memory.prefix.tree import PrefixTree
from weft.speculation.drafter import Proposal

_WINDOW_TOKENS = 128
_REFILL_TOKENS = 32
"""Tokens left of a full window below which the next window is copied."""
_CHILDREN_MAX = 64
_WAIT_TOKENS = 16
_WAIT_TOKENS_MAX = 256


class TreeFollower:
    """Follower of the tree. ``known``: tokens of the sequence so far, int32."""

    __slots__ = ("_copy", "_known", "_match", "_pending", "_place", "_salt", "_tree", "_wait", "_wait_next")

    def __init__(self, tree: PrefixTree, salt: str, known: npt.NDArray[np.int32]) -> None:
        self._tree = tree
        self._salt = salt
        self._known = known.astype(np.int32).tobytes()
        self._pending: list[int] = []
        self._copy: tuple[int, ...] = ()
        self._place = 0
        self._match = 0
        self._wait = 0
        """Tokens before the next lookup."""
        self._wait_next = _WAIT_TOKENS
        """The wait after a lookup without a result."""

    def extend(self, tokens: Sequence[int]) -> None:
        self._pending += tokens
        self._wait -= len(tokens)
        if not self._copy:
            return
        for token in tokens:
            if self._place < len(self._copy) and self._copy[self._place] == token:
                self._place += 1
                self._match += 1
            else:
                self._match, self._copy, self._place = 0, (), 0

    def propose(self, count: int) -> Proposal | None:
        left = len(self._copy) - self._place
        if self._wait <= 0 and (not left or (left < _REFILL_TOKENS and len(self._copy) == _WINDOW_TOKENS)):
            self._look_up()
        tokens = self._copy[self._place : self._place + count]
        return Proposal(tokens, self._match) if tokens else None

    def _look_up(self) -> None:
        if self._pending:
            self._known += np.asarray(self._pending, dtype=np.int32).tobytes()
            self._pending = []
        root = self._tree.roots.get(self._salt)
        following = b"" if root is None else _following(root, self._known, _WINDOW_TOKENS)
        self._copy, self._place = tuple(np.frombuffer(following, np.int32).tolist()), 0
        if self._copy:
            self._wait, self._wait_next = 0, _WAIT_TOKENS
        else:
            self._wait = self._wait_next
            self._wait_next = min(2 * self._wait_next, _WAIT_TOKENS_MAX)


def _following(root: Node, known: bytes, count: int) -> bytes:
    """Return int32 bytes of up to ``count`` tokens that the tree has after ``known``; empty if it does not have all of
    ``known``.
    """
    path = walk(root, known)
    rest = known[path.end * TOKEN_BYTES :]
    node = path.partly
    if node is not None:
        pieces = [node.edge.tokens_between(path.end, node.end)]
        if not pieces[0].startswith(rest):
            return b""
    else:
        node = path.passed[-1] if path.passed else root
        child = _newest_child(node, rest)
        if child is None:
            return b""
        node, pieces = child, [child.tokens]
    size = len(pieces[0]) - len(rest)
    while size < count * TOKEN_BYTES:
        child = _newest_child(node, b"")
        if child is None:
            break
        node = child
        pieces.append(child.tokens)
        size += len(pieces[-1])
    return b"".join(pieces)[len(rest) :][: count * TOKEN_BYTES]


def _newest_child(node: Node, rest: bytes) -> Node | None:
    """Return the most recently used child that continues ``rest``, among the CHILDREN_MAX newest."""
    best = None
    for key in islice(reversed(node.children), _CHILDREN_MAX):
        if len(key) > len(rest) and key.startswith(rest):
            child = node.children[key]
            if best is None or child.used_at > best.used_at:
                best = child
    return best
