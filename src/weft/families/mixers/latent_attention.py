"""Latent attention: one latent for all heads, in pages without a V block. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from weft import spec
from weft.families.mixers import Mixer
from weft.families.mixers.attention import Index, Rope, index_tables
from weft.families.tensors import Dim, NormGate, Table, Tensor, Units, exact, norm_gate, norm_weight, product
from weft.spec import LayerSpec


@dataclass(frozen=True, slots=True)
class LatentAttention(Mixer):
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values of all heads come from one latent of
    ``latent_dim`` numbers per token. The cache has the latent, and ``shared_dim`` numbers of key that all heads share.
    ``own_dim`` and ``value_dim``: numbers of key and of value that each head makes of the latent. ``query_rank``: width
    of the bottleneck of queries, None for a plain projection. ``rope`` turns the shared part; None for no positions
    (Kimi). ``head_gated``: the output is multiplied by the sigmoid of one number per head (Ling 3); ``gated``: of a
    number for each number of the output (GigaChat 3.5, Kimi K3). ``index``: tokens see only chosen blocks (GLM 5);
    ``reuses_choice``: those that the last layer with an index chose. ``norm_eps``
    and ``norm_gate``: epsilon and gate of the norms inside; ``query_factor`` and ``latent_factor``: factors on the
    outputs of these norms. ``interleaved``: positions turn pairs of neighbours, otherwise halves (MiniCPM 3).
    ``sinks``: each head has a learned score that adds to the sum of the softmax (Hy4). ``query_gated``: the gates are
    rows of the projection of queries, which reads the bottleneck both normed and not (A.X K2). ``shared_normed``: the
    shared key passes a norm before it turns; ``window``: a token sees itself and the ``window`` - 1 before (dots 3)."""

    reader = "weft.models.blocks.latent_attention:read_latent_attention"
    part = "attention"

    heads: int
    latent_dim: int
    shared_dim: int
    own_dim: int
    value_dim: int
    scale: float
    query_rank: int | None = None
    bias: bool = False
    rope: Rope | None = None
    head_gated: bool = False
    index: Index | None = None
    norm_eps: float = 1e-6
    gated: bool = False
    norm_gate: NormGate | None = None
    query_factor: float = 1.0
    latent_factor: float = 1.0
    interleaved: bool = True
    reuses_choice: bool = False
    sinks: bool = False
    query_gated: bool = False
    shared_normed: bool = False
    window: int | None = None

    @property
    def index_width(self) -> int:
        return 0 if self.index is None else self.index.row_width

    @property
    def key_dim(self) -> int:
        return self.own_dim + self.shared_dim

    @property
    def gate_width(self) -> int:
        """Gate numbers of each head: the output is multiplied by their sigmoid."""
        return self.value_dim if self.gated else int(self.head_gated)

    def layer_spec(self) -> LayerSpec:
        return spec.latent_attention(self.latent_dim + self.shared_dim)

    def table(self, hidden: int, *, out: str = "o_proj", gate: str = "") -> Table:
        """Return the tensors. Gates have no bias. ``gate``: their name, by default one for each form."""
        rank, latent = self.query_rank, self.latent_dim
        into: tuple[tuple[str, Dim], ...] = (("kv_a_proj_with_mqa", latent + self.shared_dim),)
        queries = Units(self.heads, self.key_dim + self.value_dim * self.query_gated)
        if rank is None:
            table = product("query", hidden, ("q_proj", queries))
        else:
            table = (
                product("query", rank * (1 + self.query_gated), ("q_b_proj", queries))
                | norm_weight("query_norm", rank, "q_a_layernorm")
                | norm_gate("query_norm", self.norm_gate, rank, "q_a_layernorm")
            )
            into = (("q_a_proj", rank), *into)
        table |= product("latent", hidden, *into, bias=self.bias)
        if self.gate_width:
            gates = f"{gate or ('gate_proj' if self.gated else 'g_proj')}.weight"
            table["latent"] += (Tensor(gates, (Units(self.heads, self.gate_width), hidden)),)
        if self.sinks:
            table |= exact("sinks", dims=(Units(self.heads),))
        if self.shared_normed:
            table |= norm_weight("shared_norm", self.shared_dim, "k_rope_only_layernorm")
        return (
            table
            | norm_weight("latent_norm", latent, "kv_a_layernorm")
            | norm_gate("latent_norm", self.norm_gate, latent, "kv_a_layernorm")
            | product("expansion", latent, ("kv_b_proj", Units(self.heads, self.own_dim + self.value_dim)))
            | product("out", Units(self.heads, self.value_dim), (out, hidden), bias=self.bias)
        )

    def tables(self, hidden: int) -> list[Table]:
        return [self.table(hidden), *index_tables(self.index, hidden, self.query_rank or 0)]
