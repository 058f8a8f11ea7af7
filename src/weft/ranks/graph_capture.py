"""Graphs of decode steps over several ranks: all ranks record the same sizes at the same time, or none records.

    rank 0   warm runs and recording of a size  --.             .-- recorded by all: each keeps its graph
    rank r   the same                           --+-- gather ---+
                                                  '             '-- refused by one: refused by all

A recorded step has the collectives of its layers inside: NCCL's kernels are nodes of the graph. A replay is a
collective operation like a launched step, so every rank has to replay the same size. Recording runs the
collectives too, so all ranks record in the same order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.runner.graphs import Capture, Replay, first_line, refusals
from weft.tensor.collectives import Collectives


class RankedCapture:
    """Recording of graphs on all ranks at once. ``own``: the recording of this rank."""

    def __init__(self, own: Capture, collectives: Collectives) -> None:
        self._own = own
        self._collectives = collectives

    @property
    def reads_host(self) -> bool:
        return self._own.reads_host

    def capture(self, run: Callable[[], torch.Tensor]) -> Replay:
        """Record ``run`` on all ranks and return its replay. Raises the refusal of this rank, or RuntimeError that
        names the ranks that refused.
        """
        refusal, replay = None, None
        try:
            replay = self._own.capture(run)
        except refusals() as error:
            refusal = error
        refused = torch.tensor([refusal is not None], dtype=torch.int64, device=self._collectives.device)
        # If a rank fails inside of a recording, the others wait here until `limits.rank_timeout`.
        ranks = [str(rank) for rank, flag in enumerate(self._collectives.gather(refused)) if int(flag[0])]
        if refusal is not None:
            raise RuntimeError(first_line(refusal)) from refusal
        if ranks or replay is None:
            raise RuntimeError(f"rank {', '.join(ranks)} cannot record it")
        return replay
