"""Replay log: the inputs of the recurrent ops in a step's verify runs, so that the ops can run over them again.

    decode            S --op--> S'                    the state is read and written
    verify            S --op--> (dropped)             the state is read; inputs go into the log
      tokens chosen   the first n tokens of the verify run are the sequence's own
    replay            S --op, n logged rows--> S'     the same op, without the rest of the layer

A verify run is a run of a chosen token and drafts of the next ones. The step that computes it cannot know
which drafts are right, so it does not write the slot. Once the tokens are chosen, the same op consumes the logged
inputs up to the last right draft. With the C++ kernels the bits are those of decodes, because their recurrences
go token by token.

The log lives for one step, outside the arena, so a slot always holds the state of the computed positions. Preemption,
donation, snapshots and moves need no special rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Replay = Callable[..., object]
"""Function of (rows of each logged input, runs): the op, bound to the states that it advances."""


@dataclass(frozen=True, slots=True)
class LoggedRuns:
    """Right parts of verify runs in a log. By run: the row of its first token, its position, the number of right
    tokens, the slot.
    """

    rows: list[int]
    starts: list[int]
    lengths: list[int]
    slots: list[int]


class ReplayLog:
    """Log of the ``rows`` rows of T from ``first`` on: those of all verify runs, one after the other."""

    def __init__(self, first: int, rows: int) -> None:
        self.first, self.rows = first, rows
        self._entries: list[tuple[Replay, tuple[torch.Tensor, ...]]] = []
        self._filled: list[tuple[Callable[[LoggedRuns], None], torch.Tensor]] = []

    @property
    def nbytes(self) -> int:
        """Return bytes of the logged inputs."""
        return sum(x.nbytes for _, inputs in self._entries for x in inputs) + sum(
            room.nbytes for _, room in self._filled
        )

    @property
    def has_notes(self) -> bool:
        """Return whether single ops noted their inputs."""
        return bool(self._entries)

    def note(self, replay: Replay, *inputs_T: torch.Tensor) -> None:
        """Log ``inputs_T`` [T, ...], which an op consumes now; ``replay`` is the same op."""
        rows = slice(self.first, self.first + self.rows)
        # A copy: later layers reuse the memory of these rows within the step.
        self._entries.append((replay, tuple(x[rows].clone() for x in inputs_T)))

    def room(self, replay: Replay, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return [rows, width], which a kernel fills with the inputs of ``replay``."""
        room = torch.empty((self.rows, width), dtype=dtype)
        self._entries.append((replay, (room,)))
        return room

    def fill(self, replay: Callable[[LoggedRuns], None], room: torch.Tensor) -> None:
        """Register ``room``, which a decoder fills with the rows of all its layers; ``replay`` is all their ops."""
        self._filled.append((replay, room))

    def replay_filled(self, runs: LoggedRuns) -> None:
        """Replay every decoder."""
        for replay, _ in self._filled:
            replay(runs)

    def replay(self, rows: torch.Tensor | slice, runs: object) -> None:
        """Replay every op over the logged ``rows`` (an int64 index or a slice): the tokens of ``runs``."""
        for replay, inputs in self._entries:
            replay(*(x[rows] for x in inputs), runs)
