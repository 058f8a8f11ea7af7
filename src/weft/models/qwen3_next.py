"""Qwen3-Next: the layers of Qwen3.5 with mixture of experts and a shared expert behind a gate.

Its delta projections are stored as two tensors (``in_proj_qkvz``, ``in_proj_ba``) whose rows are grouped by
key head; they are put in the order of Qwen3.5 once, at load, so that one block serves both.
Source: transformers ``qwen3_next``.
"""

from __future__ import annotations

from weft.families.architecture import Architecture, GatedDelta
from weft.models.blocks.gated_delta import ungroup_ba, ungroup_qkvz
from weft.models.blocks.linear import Linear
from weft.models.decoder import CausalModel
from weft.models.qwen3_5 import build_hybrid
from weft.models.weights import TensorSource


def build(architecture: Architecture, source: TensorSource) -> CausalModel:
    """Read every tensor of the model from ``source``."""
    return build_hybrid(architecture, source, _projection)


def _projection(source: TensorSource, shape: GatedDelta, name: str, hidden: int) -> Linear:
    wide = 2 * (shape.key_width + shape.value_width)
    return source.linear([
        (f"{name}.in_proj_qkvz.weight", wide, lambda rows: ungroup_qkvz(rows, shape)),
        (f"{name}.in_proj_ba.weight", 2 * shape.v_heads, lambda rows: ungroup_ba(rows, shape))], hidden)
