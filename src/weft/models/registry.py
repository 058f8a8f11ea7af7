"""Family name -> the function that builds it from tensors. One line per family; see docs/models.md."""

from __future__ import annotations

from collections.abc import Callable

from weft.architecture import Architecture
from weft.models import granite_hybrid, lfm2, qwen3, qwen3_5, qwen3_next
from weft.models.decoder import CausalModel
from weft.models.weights import TensorSource

Build = Callable[[Architecture, TensorSource], CausalModel]

FAMILIES: dict[str, Build] = {
    "qwen3": qwen3.build,
    "qwen3_5": qwen3_5.build,
    "qwen3_next": qwen3_next.build,
    "lfm2": lfm2.build,
    "granite_hybrid": granite_hybrid.build,
}
