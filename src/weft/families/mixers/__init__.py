"""What layers are made of, as data: a file for each kind of mixer, one for feed-forwards.

    class Lightning(Mixer)         numbers of a configuration, divided by ``sharding`` for a rank
      layer_spec()                 what memory keeps of it, over the primitives of ``spec``
      table(hidden)                its tensors: names, shapes, what ranks divide
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
    """A mixer or a feed-forward. ``reader``: "module:function" of what makes its block, called with a ``BlockReader``,
    the record, the name under which its tensors are stored and spellings. ``part``: what plans count its weights as.
    ``copied``: the field that ranks share once it is less than ranks, and the field that says how many share one."""

    __slots__ = ()
    reader: ClassVar[str]
    part: ClassVar[str] = "recurrent"
    copied: ClassVar[tuple[str, str]] = ("", "")

    @property
    def further_norms(self) -> int:
        """Norms of the stream that it has beside those of any block."""
        return 0

    @abstractmethod
    def table(self, hidden: int) -> Table:
        """Return the tensors under its name, for a stream of ``hidden`` numbers. Spellings are further arguments."""

    def tables(self, hidden: int) -> list[Table]:
        """Return all tables that are its own."""
        return [self.table(hidden)]


class Mixer(BlockShape):
    """What moves information between the tokens of a sequence."""

    __slots__ = ()

    @abstractmethod
    def layer_spec(self) -> LayerSpec:
        """Return what memory keeps of each token and of each sequence."""
