"""Parts of layers, as data: a file for each kind of mixer, one for feed-forwards.

    class Lightning(Mixer)         numbers of a configuration, divided by ``sharding`` for a rank
      layer_spec()                 the memory that it needs, over the primitives of ``spec``
      table(hidden)                its tensors: names, shapes, dims that ranks divide
      reader                       the function that makes its block, by name: only models import torch

A kind is two files, that of its record and that of its reader. Code that counts, divides or reads layers asks the
record, and no list of kinds exists. Pure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from weft.families.tensors import Table
from weft.spec import LayerSpec


class BlockShape(ABC):
    """A mixer or a feed-forward. ``reader``: "module:function" of the function that makes the block, called with a
    ``BlockReader``, the record, the name under which the tensors are stored, and spellings. ``part``: the name under
    which plans count the weights. ``copied``: the field whose units several ranks share if there are fewer units than
    ranks, and the field with the number of ranks that share one."""

    __slots__ = ()
    reader: ClassVar[str]
    part: ClassVar[str] = "recurrent"
    inputs: int = 1
    """Mixes of the stream that it reads, where the residual mixes it."""
    copied: ClassVar[tuple[str, str]] = ("", "")

    @property
    def further_norms(self) -> int:
        """Norms of the stream that it has in addition to those of any block."""
        return 0

    @abstractmethod
    def table(self, hidden: int) -> Table:
        """Return the tensors under its name, for a stream of ``hidden`` numbers. Spellings are further arguments."""

    def tables(self, hidden: int) -> list[Table]:
        """Return all tables of the block."""
        return [self.table(hidden)]


class Mixer(BlockShape):
    """A block that moves information between the tokens of a sequence."""

    __slots__ = ()

    @abstractmethod
    def layer_spec(self) -> LayerSpec:
        """Return the memory that it needs for each token and for each sequence."""
