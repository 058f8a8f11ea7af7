"""ZAYA1: attention over convolved queries and keys, experts whose router hands its state on.

    q, k = conv(q, k) + means of both        v = [ v1 of this token | v2 of the token before ]
    r = W x + s r of the layer before        expert = best of softmax(mlp(r)) + bias, or none

Source: "Compressed Convolutional Attention" (2025); transformers ``ZayaConfig`` and ``ZayaForCausalLM``,
whose defaults are used here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from weft import spec
from weft.families.architecture import Architecture
from weft.families.config_keys import ConfigKeys, fail, read_rope
from weft.families.mixers import Mixer
from weft.families.mixers.attention import Attention
from weft.families.mixers.feed_forward import Experts
from weft.families.names import Names
from weft.families.reading import Family, build_architecture, kinds_with_windows, read_attention
from weft.families.residuals import ModelShape, Residual
from weft.families.tensors import Table, Tensor, Units, product
from weft.spec import LayerSpec


@dataclass(frozen=True, slots=True)
class ScaledResidual(Residual):
    """Residual with a bias and a factor for each channel of the stream and of a block's output, where they are added;
    the embedding has them too."""

    def table(self, hidden: int) -> Table:
        """Return the biases and factors around one block."""
        names = ("hidden_states_bias", "hidden_states_scale", "residual_bias", "residual_scale")
        return {name: (Tensor(name, (hidden,), "plain"),) for name in names}

    def tables(self, model: ModelShape) -> Iterator[tuple[str, Table]]:
        yield from Residual.tables(self, model)
        for _ in range(2 * model.layers):
            yield "norms", self.table(model.hidden)
        yield "norms", {part: (Tensor(f"input_hidden_states_{part}", (model.hidden,), "plain"),) for part in _ENDS}


_ENDS = ("bias", "scale")


@dataclass(frozen=True, slots=True)
class ConvolvedAttention(Mixer):
    """Attention whose queries and keys pass two causal convolutions (ZAYA): of ``first_kernel`` tokens
    channel by channel, then of ``second_kernel`` tokens within a head. Half of the values, ``delayed``
    numbers, are of the token before; every rank has all of them. ``k_heads``: the KV heads, which ranks do
    not copy: the mean of its queries is added to a key."""

    reader = "weft.models.more.zaya:read_convolved_attention"
    part = "attention"

    attention: Attention
    first_kernel: int
    second_kernel: int
    delayed: int
    k_heads: int

    @property
    def reach(self) -> int:
        """Number of earlier tokens that the convolutions see."""
        return self.first_kernel + self.second_kernel - 2

    def layer_spec(self) -> LayerSpec:
        of = self.attention
        shifts = spec.shifts((of.heads + of.kv_heads) * of.head_dim, self.delayed, self.reach)
        return spec.together("convolved_attention", of.layer_spec(), shifts)

    def table(self, hidden: int) -> Table:
        of, dim, inside, delayed = self.attention, self.attention.head_dim, "qkv_proj.", self.delayed
        queries, keys = Units(of.heads, dim), Units(of.kv_heads, dim)
        table = product(
            "project",
            hidden,
            (f"{inside}q_proj", queries),
            (f"{inside}k_proj", keys),
            (f"{inside}v_proj_current", delayed),
            (f"{inside}v_proj_delayed", delayed),
        )
        for role, name, width, kernel in (
            ("first", "depthwise", 1, self.first_kernel),
            ("second", "grouped", dim, self.second_kernel),
        ):
            name, channels = f"{inside}conv_qk_{name}", (queries, keys)
            table[role] = (Tensor(f"{name}.weight", (channels, width, kernel), "plain"),)
            table[f"{role}.bias"] = (Tensor(f"{name}.bias", (channels,), "plain"),)
        table["factors"] = (Tensor("qk_norm.temp", (Units(of.kv_heads),), "plain"),)
        return table | product("out", queries, ("o_proj", hidden))


_THETA = {"hybrid": 5e6, "hybrid_sliding": 1e4}


def read_zaya(family: str, keys: ConfigKeys) -> Architecture:
    keys = keys.with_defaults(
        vocab_size=262_272,
        hidden_size=2048,
        num_hidden_layers=40,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=131_072,
        moe_intermediate_size=2048,
        num_experts=16,
        router_hidden_size=256,
        cca_time0=2,
        cca_time1=2,
    )
    keys.only(attention_bias=False, lm_head_bias=False, num_experts_per_tok=1)
    count = keys.integer("num_hidden_layers")
    kinds = kinds_with_windows(keys, tuple(_THETA), ["hybrid"] * count)
    attended = read_attention(keys, rotary=False)
    if attended.kv_heads * attended.head_dim % 2:
        fail("head_dim", attended.head_dim, "half of all values are of the token before")

    def mixer(kind: str) -> ConvolvedAttention:
        rope = read_rope(keys, attended.head_dim, theta=_THETA[kind], partial=0.5, layer_kind=kind)
        window = keys.integer("sliding_window") if kind == "hybrid_sliding" else None
        # In pages: a ring would be a second kind of state in a layer that has shifts.
        return ConvolvedAttention(
            replace(attended, rope=rope, window=window, shared=window is not None),
            keys.integer("cca_time0"),
            keys.integer("cca_time1"),
            attended.kv_heads * attended.head_dim // 2,
            attended.kv_heads,
        )

    feed = Experts(
        count=keys.integer("num_experts"),
        per_token=1,
        width=keys.integer("moe_intermediate_size"),
        normalized=False,
        choice_bias=True,
        router_width=keys.integer("router_hidden_size"),
    )
    feeds = [replace(feed, router_continues=layer > 0) for layer in range(count)]
    return build_architecture(
        family,
        keys,
        [mixer(kind) for kind in kinds],
        feeds,
        default_eps=1e-5,
        tied=keys.boolean("tie_word_embeddings", True),
        residual=ScaledResidual(float32=True),
    )


_NAMES = Names(layer_reader="weft.models.more.zaya:layer_reader", ends_reader="weft.models.more.zaya:ends_reader")
FAMILIES = (Family("zaya", ("zaya",), read_zaya, names=_NAMES),)
