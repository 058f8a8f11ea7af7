"""The choice between torch's library and weft's own kernel for products of few rows, by measured seconds.

    weights of one shape --one graph of products for each side and number of rows--> least seconds of each
                         --GAIN--> the own kernel for all numbers of rows below 64, or the library for all

The own kernel has run on no GPU, and the library is as fast as memory on some and not on others: so neither is the
default. A start measures both on its own GPU and on its own weights, one after the other, so that none comes from the
cache. The choice changes last bits of logits, as any other library or GPU does.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Literal

import torch
import torch.nn.functional as F

from weft.host import usable_cores
from weft.runner.graphs import CudaCapture
from weft.runner.sleep import tensors_of
from weft.tensor import gpu
from weft.tensor.gpu import few_rows
from weft.tensor.gpu.few_rows import Shape
from weft.tensor.ops.linear import dense_linear

MEASURED_ROWS = (1, 16, 48)
ROUNDS = 5
GAIN = 0.04
"""Share of the library's seconds that the own kernel must save. Less is noise."""
WEIGHTS_BYTES_MIN = 1 << 30
"""Bytes of weights from which the measurement is a small part of the start."""
COLUMNS_MIN = 256
READ_BYTES = 1 << 30
"""Bytes of weights that a recorded graph reads, by which its seconds are far above those of a launch."""
_log = logging.getLogger("weft")

Choice = Literal["auto", "on", "off"]
Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Seconds = Callable[[list[torch.Tensor], int, Multiply], float]
"""Function of weights of one shape, rows of x and a product: the seconds of a product with each of them."""


def choose_products(choice: Choice, model: object, device: torch.device, tell: Callable[[str], None]) -> None:
    """Choose the shapes of ``model`` whose products of few rows the own kernel computes, for the entire process. A
    measurement that fails chooses none.
    """
    few_rows.use(())
    if choice == "off" or not gpu.reaches(device):
        return
    weights = weights_by_shape(model)
    if choice == "on":
        few_rows.use(weights)
        return
    if device.type != "cuda" or sum(w.nbytes for each in weights.values() for w in each) < WEIGHTS_BYTES_MIN:
        return
    try:
        _compile(weights, tell)
        chosen = faster(weights, _Measured(device))
    except Exception as error:  # an allocation, a compiler, a driver: the library serves all
        few_rows.use(())
        _log.warning("products of few rows are torch's; weft's could not be measured: %s", error)
        return
    few_rows.use(chosen)
    tell(
        f"products of few rows: weft's kernel for {len(chosen)} of {len(weights)} shapes of weights, torch's library "
        "for the others"
    )


def weights_by_shape(model: object) -> dict[Shape, list[torch.Tensor]]:
    """Return the plain matrices of 16 bits that ``model`` reaches, each once."""
    weights: dict[Shape, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors_of(model):
        if tensor.ndim == 2 and tensor.dtype in few_rows.DTYPES and tensor.is_contiguous():
            rows, columns = tensor.shape
            if columns >= COLUMNS_MIN:
                weights[rows, columns].append(tensor)
    return dict(weights)


def faster(weights: Mapping[Shape, list[torch.Tensor]], seconds: Seconds) -> Collection[Shape]:
    """Return the shapes whose products the own kernel computes sooner, all of MEASURED_ROWS together."""
    chosen = set[Shape]()
    for shape, each in weights.items():
        few_rows.use((shape,))
        own = sum(seconds(each, rows, dense_linear) for rows in MEASURED_ROWS)
        library = sum(seconds(each, rows, F.linear) for rows in MEASURED_ROWS)
        _log.info("products with weights of %s: own kernel %.1f us, library %.1f us", shape, 1e6 * own, 1e6 * library)
        if own < (1 - GAIN) * library:
            chosen.add(shape)
    return chosen


def _compile(weights: Mapping[Shape, list[torch.Tensor]], tell: Callable[[str], None]) -> None:
    from weft.tensor.gpu.ahead import compiled_ahead  # triton, which may be missing

    few_rows.use(weights)
    with compiled_ahead(usable_cores(), tell):
        for each in weights.values():
            dense_linear(each[0].new_zeros(1, each[0].shape[1]), each[0])


class _Measured:
    """``Seconds`` on a GPU, by graphs: a launch from Python takes longer than most products."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._capture = device, CudaCapture(device)

    def __call__(self, weights: list[torch.Tensor], rows: int, multiply: Multiply) -> float:
        first = weights[0]
        x = torch.randn(rows, first.shape[1], dtype=first.dtype, device=self._device)
        times = max(1, READ_BYTES // sum(weight.nbytes for weight in weights))

        def run() -> torch.Tensor:
            for _ in range(times):
                for weight in weights:
                    out = multiply(x, weight)
            return out

        replay, least = self._capture.capture(run), float("inf")
        for _ in range(ROUNDS):
            torch.cuda.synchronize(self._device)
            began_s = time.perf_counter()
            replay()
            torch.cuda.synchronize(self._device)
            least = min(least, time.perf_counter() - began_s)
        return least / (times * len(weights))
