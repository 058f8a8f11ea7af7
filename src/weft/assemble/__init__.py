"""Composition root: the only folder that knows all parts of an engine and puts them together (see ``assembly``)."""

from weft.assemble.assembly import EMBEDDED_MODEL, Assembled, OnProgress, assemble, find_model, overlaps
from weft.info import MemoryRow, ModelInfo

__all__ = ["EMBEDDED_MODEL", "Assembled", "MemoryRow", "ModelInfo", "OnProgress", "assemble", "find_model", "overlaps"]
