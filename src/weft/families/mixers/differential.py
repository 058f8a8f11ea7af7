"""Differential attention: the difference of two softmax attentions over the same values, with a learned factor.

    o = norm((softmax(q1 k1) - factor softmax(q2 k2)) [v1 | v2]) (1 - first)

Pairs of heads become heads of twice the width: keys and values of a pair follow each other, and a query has zeros where
the other key of its pair is. So attention over pages computes both parts, and a token keeps as much as in Llama.

Source: Ye et al., "Differential Transformer", 2024; transformers ``DiffLlamaAttention``. Pure data, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.families.mixers import Mixer
from weft.families.mixers.attention import Attention, Rope
from weft.families.tensors import Table, Units, exact, product
from weft.spec import LayerSpec

PARTS = ("q1", "k1", "q2", "k2")
"""Names of the vectors of the learned factor: exp(q1 k1) - exp(q2 k2) + ``first``."""


@dataclass(frozen=True, slots=True)
class DifferentialAttention(Mixer):
    """Differential attention. ``heads``, ``kv_heads``: pairs of heads, the n-th of the first half of all heads with the
    n-th of the second half; ``head_dim``: of one of them. ``first``: the factor without its learned part, by which the
    output is scaled too."""

    reader = "weft.models.blocks.differential:read_differential"
    part = "attention"
    copied = ("kv_heads", "kv_copies")

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    first: float
    bias: bool = False
    kv_copies: int = 1

    @property
    def attention(self) -> Attention:
        """Attention of the pairs over pages."""
        return Attention(2 * self.heads, self.kv_heads, 2 * self.head_dim, self.head_dim**-0.5, self.rope)

    def layer_spec(self) -> LayerSpec:
        return self.attention.layer_spec()

    def table(self, hidden: int) -> Table:
        queries, keys = Units(self.heads, self.head_dim), Units(self.kv_heads, self.head_dim, self.kv_copies)
        both = (("q_proj", (queries, queries)), ("k_proj", (keys, keys)), ("v_proj", (keys, keys)))
        return (
            product("qkv", hidden, *both, bias=self.bias)
            | exact(*(f"lambda_{part}" for part in PARTS), dims=(self.head_dim,))
            | product("out", Units(self.heads, 2 * self.head_dim), ("o_proj", hidden), bias=self.bias)
        )
