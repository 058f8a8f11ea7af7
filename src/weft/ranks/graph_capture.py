"""Graphs of decode steps over several ranks: all record the same sizes at the same time, or none does.

    rank 0   warm runs and recording of a size  --.             .-- recorded by all: each keeps its graph
    rank r   the same                           --+-- gather ---+
                                                  '             '-- refused by one: refused by all

A recorded step has the collectives of its layers inside: NCCL's kernels are nodes of the graph. A replay is a
collective operation like a launched step, so every rank has to replay the same size. The scheduler's plan
decides the size, and each rank pads it to the sizes that it recorded. So these must be equal on all ranks.

Recording runs the collectives of the step too. All ranks therefore record in the same order. The order of
work on a device is that of one stream, on which the recorded collectives wait for the layer before them.

A rank that fails inside of a recording leaves the others in a collective. They fail after
``limits.rank_timeout``, and so does the exchange here: the engine does not start.

Rejected: a message to rank 0 and back (the collectives are there, and all ranks take part anyway).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.runner.graphs import Capture, Replay, first_line, refusals
from weft.tensor.collectives import Collectives


class RankedCapture:
    """``own``: of this rank."""

    def __init__(self, own: Capture, collectives: Collectives) -> None:
        self._own = own
        self._collectives = collectives

    @property
    def reads_host(self) -> bool:
        return self._own.reads_host

    def capture(self, run: Callable[[], torch.Tensor]) -> Replay:
        """Raises the refusal of this rank, or RuntimeError that names the ranks that refused."""
        refusal, replay = None, None
        try:
            replay = self._own.capture(run)
        except refusals() as error:
            refusal = error
        refused = torch.tensor([refusal is not None], dtype=torch.int64, device=self._collectives.device)
        ranks = [str(rank) for rank, one in enumerate(self._collectives.gather(refused)) if int(one[0])]
        if refusal is not None:
            raise RuntimeError(first_line(refusal)) from refusal
        if ranks or replay is None:
            raise RuntimeError(f"rank {', '.join(ranks)} cannot record it")
        return replay
