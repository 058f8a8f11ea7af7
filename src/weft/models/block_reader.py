"""Reader of blocks from a checkpoint: the tables of ``families.tensors``, read under the names of a family.

``models.families`` gives the name of each block and puts the layers together. All of it runs twice: against the check,
then for real.

    read = BlockReader(architecture, source)
    read.mixer(shape, {Attention: "layers.3.self_attn", Mamba2: "layers.3.mamba"})
    read.swiglu(feed, "layers.3.mlp")
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from weft.families.architecture import Architecture
from weft.families.mixers import BlockShape
from weft.families.tensors import Table
from weft.models.blocks.linear import Norm
from weft.models.table_reader import TableReader
from weft.models.weights import TensorSource


def function(name: str) -> Callable[..., Any]:
    """Return the function that ``name``, "module:function", refers to."""
    module, _, attribute = name.partition(":")
    reader: Callable[..., Any] = getattr(import_module(module), attribute)
    return reader


class BlockReader:
    """Reads the blocks of ``architecture`` from ``source``. ``plus_one``: norms of the stream and of attention are
    stored as the distance from 1."""

    def __init__(self, architecture: Architecture, source: TensorSource) -> None:
        self.architecture = architecture
        self.source = source
        self.plus_one = architecture.names.plus_one
        self.hidden, self.eps = architecture.hidden_size, architecture.norm_eps
        self.banks: dict[int, Any] = {}
        """Blocks that several layers use, by their number in the architecture."""
        self._ones = torch.ones(self.hidden, dtype=source.dtype, device=source.device)
        """Weight of all norms without one."""

    def table(self, table: Table, name: str) -> TableReader:
        return TableReader(self.source, table, name)

    def block(self, shape: BlockShape, name: str, /, **spelled: Any) -> Any:
        """Return the block of ``shape``, whose tensors are under ``name``. ``spelled``: as its reader takes it."""
        return function(shape.reader)(self, shape, name, **spelled)

    def ones(self, width: int) -> torch.Tensor:
        """Return the weight [width] of a norm without one, a part of the same tensor where it is not wider."""
        return self._ones[:width] if width <= self.hidden else torch.ones(width).to(self._ones)

    @property
    def plain_norm(self) -> Norm:
        """A norm of the stream without a weight."""
        return Norm(self._ones, self.eps)

    def norm(self, name: str, width: int | None = None, *, eps: float = 0.0) -> Norm:
        """Return a norm of the stream; ``width``: of several streams; ``eps``: its epsilon, 0 for that of all."""
        residual, width = self.architecture.residual, width or self.hidden
        table = self.table(residual.norm_table(width, name), "")
        weight, gate = table.get("norm"), table.gate("norm", residual.gate)
        plus_one, offset = self.plus_one, self.architecture.names.norm_offsets.get(name.rpartition(".")[2])
        if weight is None:
            weight, plus_one = self._ones, False
        elif offset is not None:
            # Not of a meta tensor, whose arithmetic imports torch's compiler.
            weight, plus_one = weight if weight.is_meta else weight + offset, False
        return Norm(
            weight, eps or self.eps, plus_one, gate=gate, centred=bool(residual.centred), bias=table.get("norm.bias")
        )

    def out_name(self, name: str) -> str:
        """Return the name of the output projection of a Kimi or Ling layer."""
        return "dense" if self.source.has(f"{name}.dense.weight") else "o_proj"
