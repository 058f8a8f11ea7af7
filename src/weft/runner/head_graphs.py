"""Drafts of the model's own head as CUDA graphs: one replay for each draft.

    fixed     hidden [W, D] | tokens [W]     of the last right token of each run; then of the draft before
    block     positions, contexts, rows      ``graphs.DecodeGraphs``: PAD if a run has no page there
                 |
                 v
    graph of W rows: join -> layer -> head -> hidden, tokens, and (token, chance) [W, 2]

A draft of a dense head is some fifty launches from Python. Recorded, it is two copies and a replay. A graph ends by
writing the inputs of the next draft, so all drafts of a step have one graph. Its rows keep their places: a run that
drafts no further is a PAD row, which writes no key.

All recordings share one pool: the first replay overwrites the hidden states of the trunk. So the states that the head
reads are copied before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from weft.models.mtp import MtpHead
from weft.runner.graphs import BLOCK_FIELDS, Capture, DecodeBlock, DecodeGraphs, stride_of
from weft.tensor.inputs import LayerCache, StepInputs
from weft.units import PAD


class HeadGraphs:
    """Graphs of the head's drafts. ``table``, ``chosen``, ``widths``, ``deltas``: as for ``DecodeGraphs``. ``dtype``:
    of hidden states.
    """

    def __init__(
        self,
        head: MtpHead,
        table: torch.Tensor,
        chosen: torch.Tensor,
        widths: Sequence[int],
        capture: Capture,
        deltas: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        most = max(widths, default=0)
        self._head = head
        self._pad_row = table.shape[0] - 1
        self._hidden_WD = torch.zeros((most, head.width), dtype=dtype, device=table.device)
        self._tokens_W = torch.zeros(most, dtype=torch.int64, device=table.device)
        self._numbers_W2 = torch.zeros((most, 2), dtype=torch.float64, device=table.device)
        self._graphs = DecodeGraphs(table, chosen, widths, capture, deltas)

    def record(self, caches: list[LayerCache]) -> None:
        """Record a draft at all widths. ``caches``: of the head's layer."""
        self._graphs.record(self._draft, caches)

    def warm(self) -> None:
        """Replay each graph once, on PAD rows."""
        for width in self._graphs.recorded_widths:
            self._graphs.idle(width)

    def refused_in_words(self) -> str | None:
        refused = self._graphs.refused_in_words()
        return None if refused is None else f"drafts of the model's head, {refused}"

    def width_of(self, runs: int) -> int | None:
        """Return the rows of the smallest graph for ``runs``."""
        return next((width for width in self._graphs.recorded_widths if width >= runs), None)

    def block(self, width: int, starts: Sequence[int], rows: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the block of one draft: each row's position, PAD for a run that drafts no further."""
        block = np.full((BLOCK_FIELDS, stride_of(width)), PAD, np.int64)
        block[0] = block[4] = 0  # tokens, contexts
        block[5] = self._pad_row
        starts_W = np.array(starts, np.int64)
        live = np.flatnonzero(starts_W != PAD)
        block[1, live] = block[2, live] = starts_W[live]
        block[4, live] = starts_W[live] + 1
        block[5, live] = np.array(rows, np.int64)[live]
        return block.ravel()

    def drafts(
        self,
        width: int,
        hidden_XD: torch.Tensor,
        tokens_X: torch.Tensor,
        blocks: Sequence[torch.Tensor],
        starts: Sequence[list[int]],
    ) -> torch.Tensor:
        """Return float64 [drafts, width, 2]: tokens and chances. ``blocks``: of each draft, on the device; ``starts``:
        their positions on the host.
        """
        self._hidden_WD[: len(hidden_XD)].copy_(hidden_XD)
        self._tokens_W[: len(tokens_X)].copy_(tokens_X)
        numbers_CW2 = self._numbers_W2.new_empty((len(blocks), width, 2))
        for draft, block in enumerate(blocks):
            listed = np.array([*starts[draft], *[PAD] * (width - len(starts[draft]))], np.int64)
            numbers_CW2[draft].copy_(self._graphs.replay(DecodeBlock(width, block, listed, np.full(width, PAD))))
        return numbers_CW2

    def _draft(self, inputs: StepInputs, caches: list[LayerCache]) -> torch.Tensor:
        width = len(inputs.tokens_T)
        hidden_WD, tokens_W = self._hidden_WD[:width], self._tokens_W[:width]
        numbers_W2 = self._numbers_W2[:width]
        drafted_WD = self._head.draft(self._head.joined(hidden_WD, tokens_W), inputs, caches)
        best_W, chances_W = self._head.best(drafted_WD)
        hidden_WD.copy_(drafted_WD)
        tokens_W.copy_(best_W)
        numbers_W2[:, 0].copy_(best_W)
        numbers_W2[:, 1].copy_(chances_W)
        return numbers_W2
