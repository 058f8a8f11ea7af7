"""Graphs without a GPU: a capture that computes at every replay, and a step of nothing but PAD rows."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.runner import torch_executor
from weft.runner.graphs import Replay, pad_rows
from weft.runner.torch_executor import TorchExecutor


class EagerCapture:
    """Runs the recorded function at every replay, on the same static block with the same padding."""

    reads_host = True

    def capture(self, run: Callable[[], torch.Tensor]) -> Replay:
        return run


@torch.inference_mode()
def dummy_step(executor: TorchExecutor, width: int) -> None:
    """Run a decode step of at least ``width`` PAD rows on the way of real steps: it must read and write no page and
    no slot (laws L4, L5)."""
    with torch_executor.current(executor.arena.device):
        graphs = executor.graphs
        recorded = () if graphs is None else graphs.recorded()
        shape = next((one for one in recorded if one.decodes_alone and one.decodes >= width), None)
        if graphs is not None and shape is not None:
            graphs.idle(shape)
        else:
            executor._forward(pad_rows(width, executor.batches.rows.table.shape[1], executor.arena.device))
