"""JetMoE: attention whose queries and outputs are by experts, and a mixture of experts after it.

    a token's choice of experts --> a query for each of its experts and KV heads; K and V are the same for all
    an output of each expert    --> summed by the weights of the choice, plus a bias

Source: Shen et al., "JetMoE: Reaching Llama2 Performance with 0.1M Dollars" (2024); the configuration class and the
model of transformers 5.24.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.families.architecture import Architecture
from weft.families.config_keys import ConfigKeys, read_rope
from weft.families.decoders import sizes
from weft.families.mixers import Mixer
from weft.families.mixers.attention import Attention, Rope
from weft.families.mixers.feed_forward import Experts
from weft.families.names import Names
from weft.families.reading import Family, build_architecture, experts_per_token
from weft.families.tensors import Table, Tensor, Units, product
from weft.spec import LayerSpec


@dataclass(frozen=True, slots=True)
class ExpertAttention(Mixer):
    """Attention with ``count`` experts, of which each token has ``per_token``. ``heads``: KV heads, each of which has
    one query of each chosen expert."""

    reader = "weft.models.blocks.expert_attention:read_expert_attention"
    part = "attention"

    heads: int
    head_dim: int
    count: int
    per_token: int
    rope: Rope

    @property
    def attention(self) -> Attention:
        """The attention of the queries of all chosen experts."""
        return Attention(self.heads * self.per_token, self.heads, self.head_dim, self.head_dim**-0.5, self.rope)

    @property
    def choices(self) -> int:
        """Number of choices of the router."""
        return self.count

    def layer_spec(self) -> LayerSpec:
        return self.attention.layer_spec()

    def table(self, hidden: int) -> Table:
        heads = Units(self.heads, self.head_dim)
        stacks = {
            role: (Tensor(f"experts.{own.name}", (self.count, *own.dims)),)
            for role, (own,) in self.expert_table(hidden).items()
        }
        return (
            {"router": (Tensor("experts.router.layer.weight", (self.count, hidden), "plain"),)}
            | product("kv", hidden, ("kv_proj", (heads, heads)))
            | stacks
            | {"out.bias": (Tensor("experts.bias", (hidden,), "plain", of_first=True),)}
        )

    def expert_table(self, hidden: int) -> Table:
        """Return the tensors of one expert, which files have in stacks of all, or each separately."""
        heads = Units(self.heads, self.head_dim)
        return product("query", hidden, ("input_linear", heads)) | product("out", heads, ("output_linear", hidden))


def read_jetmoe(family: str, keys: ConfigKeys) -> Architecture:
    keys = keys.with_defaults(
        **sizes(32_000, 2048, 5632, 12, 16, 16, 4096), num_key_value_heads=16, tie_word_embeddings=True
    )
    keys.only(activation_function="silu")
    heads, head_dim = keys.integer("num_key_value_heads"), keys.integer("kv_channels", 128)
    count, layers = keys.integer("num_local_experts", 8), keys.integer("num_hidden_layers")
    chosen = experts_per_token(keys, count, 2)
    rope = read_rope(keys, head_dim, theta=10_000.0, partial=1.0)
    mixer = ExpertAttention(heads, head_dim, count, chosen, rope)
    feed = Experts(count, chosen, keys.integer("intermediate_size"), normalized=True, sum_bias=True)
    return build_architecture(family, keys, [mixer] * layers, [feed] * layers)


_SPELLED = {"router": "router.layer.weight", "stacks": ("input_linear.weight", "output_linear.weight")}
FAMILIES = (
    Family("jetmoe", ("jetmoe",), read_jetmoe, names=Names(
        {ExpertAttention: "self_attention"}, spelled={Experts: _SPELLED},
        layer_reader="weft.models.blocks.expert_attention:jetmoe_layers")),
)  # fmt: skip
