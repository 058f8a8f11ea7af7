"""Drafts of the model's own head as CUDA graphs: one replay for each draft.

    fixed     hidden [W, D] | tokens [W]     of the last right token of each run; then of the draft before
    block     positions, contexts, rows      ``graph_shapes``: PAD if a run has no page there
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
from weft.runner.graph_shapes import BLOCK_FIELDS, GraphShape, stride_of
from weft.runner.step_graphs import GraphSet, StepBlock, StepGraphs
from weft.tensor.inputs import LayerCache, StepInputs
from weft.units import PAD


class HeadGraphs:
    """Drafts of the head by graphs. ``graphs``: those of the executor, which hold the drafts as a set. ``caches``: of
    the head's layer. ``pad_row``: the row of PAD. ``dtype``: of hidden states.
    """

    def __init__(
        self,
        head: MtpHead,
        graphs: StepGraphs,
        caches: list[LayerCache],
        pad_row: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shapes = [shape for shape in graphs.shapes if shape.decodes_alone]
        most = max((shape.decodes for shape in shapes), default=0)
        self._head, self._graphs, self._pad_row = head, graphs, pad_row
        self._hidden_WD = torch.zeros((most, head.width), dtype=dtype, device=device)
        self._tokens_W = torch.zeros(most, dtype=torch.int64, device=device)
        self._numbers_W2 = torch.zeros((most, 2), dtype=torch.float64, device=device)
        self.drafting = GraphSet("draft", shapes, self._draft, caches)
        """The drafts to record."""

    def shape_of(self, runs: int) -> GraphShape | None:
        """Return the shape of the smallest graph for ``runs``."""
        return next((shape for shape in self._graphs.recorded("draft") if shape.decodes >= runs), None)

    def block(self, shape: GraphShape, starts: Sequence[int], rows: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the block of one draft: each row's position, PAD for a run that drafts no further."""
        block = np.full((BLOCK_FIELDS, stride_of(shape.decodes)), PAD, np.int64)
        block[0] = block[4] = 0  # tokens, contexts
        block[5] = self._pad_row
        starts_W = np.array(starts, np.int64)
        live = np.flatnonzero(starts_W != PAD)
        block[1, live] = block[2, live] = starts_W[live]
        block[4, live] = starts_W[live] + 1
        block[5, live] = np.array(rows, np.int64)[live]
        return block.ravel()

    def drafts(
        self, shape: GraphShape, hidden_XD: torch.Tensor, tokens_X: torch.Tensor, blocks: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return float64 [drafts, W, 2]: tokens and chances. ``blocks``: of each draft, on the device."""
        self._hidden_WD[: len(hidden_XD)].copy_(hidden_XD)
        self._tokens_W[: len(tokens_X)].copy_(tokens_X)
        numbers_CW2 = self._numbers_W2.new_empty((len(blocks), shape.decodes, 2))
        for draft, block in enumerate(blocks):
            numbers_CW2[draft].copy_(self._graphs.replay(StepBlock(shape, block), "draft"))
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
