"""Inkling: attention with a bias by distance, four short convolutions in a layer, experts that share weights.

    k, v = conv(k), conv(v)             scores = (q . k + r . bank[distance]) / scale          no rotary
    x   += conv(attention(norm(x)))     x     += conv(feed(norm(x)))                conv(y) = y + filter(y)
    experts: sigmoid scores of the chosen and of those that every token passes, as shares of their sum

Sources: transformers ``InklingTextConfig`` and ``InklingForCausalLM``, whose defaults are used here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from weft import spec
from weft.families import reading
from weft.families.architecture import Architecture
from weft.families.config_keys import ConfigKeys, fail
from weft.families.mixers import Mixer
from weft.families.mixers.attention import Attention
from weft.families.mixers.feed_forward import Dense, Experts, FeedForward
from weft.families.names import Names
from weft.families.reading import Family, build_architecture, kinds_with_windows
from weft.families.residuals import ModelShape, Residual
from weft.families.tensors import Table, Tensor, Units, exact
from weft.spec import LayerSpec


@dataclass(frozen=True, slots=True)
class EmbeddingNorm(Residual):
    """Residual whose embedding is normed."""

    adapts_embedding = False

    def tables(self, model: ModelShape) -> Iterator[tuple[str, Table]]:
        yield from Residual.tables(self, model)
        yield "norms", self.norm_table(model.hidden)


@dataclass(frozen=True, slots=True)
class RelativeAttention(Mixer):
    """Attention whose scores have a bias by distance, of each query's own (Inkling, and with more Inkling 2):
    ``states`` numbers of a query's head, times a bank of profiles over ``extent`` distances; 0 for keys farther away.
    Keys and values pass a short convolution of ``conv_kernel`` tokens. So do the outputs of the layer and of its
    feed-forward, of ``stream`` channels each; every rank has all of those. From position ``floor`` on queries
    and biases are multiplied by 1 + ``growth`` log((position + 1) / ``floor``); 0: they are not."""

    reader = "weft.models.more.inkling:read_relative_attention"
    part = "attention"
    outputs = ("attn_sconv", "mlp_sconv")
    """Names of the convolutions of the outputs of its layer's two blocks."""

    attention: Attention
    states: int
    extent: int
    conv_kernel: int
    stream: int
    floor: int = 0
    growth: float = 0.0

    def layer_spec(self) -> LayerSpec:
        return spec.together("relative_attention", self.attention.layer_spec(), self.convolutions())

    def convolutions(self) -> LayerSpec:
        of = self.attention
        return spec.convolutions(
            self.conv_kernel, kv=2 * of.kv_heads * of.head_dim, mixer=self.stream, feed=self.stream
        )

    def table(self, hidden: int) -> Table:
        of = self.attention
        table = of.table(hidden)
        table["qkv"] += (Tensor("r_proj.weight", (Units(of.heads, self.states), hidden)),)
        keys = Units(of.kv_heads, of.head_dim, of.kv_copies)
        for part in "kv":
            name, dims = f"{part}_sconv.conv1d.weight", (keys, 1, self.conv_kernel)
            table[f"{part}_conv"] = (Tensor(name, dims, "float32"),)
        return table | exact("rel_logits_proj.proj", dims=(self.states, self.extent))

    def tables(self, hidden: int) -> list[Table]:
        return [self.table(hidden), self.around_table(hidden), *self.further_tables(hidden)]

    def around_table(self, hidden: int) -> Table:
        """Return the convolutions of the outputs of its layer's two blocks."""
        return {
            part: (Tensor(f"{name}.conv1d.weight", (hidden, 1, self.conv_kernel), "float32"),)
            for part, name in zip(("mixer", "feed"), self.outputs, strict=True)
        }

    def further_tables(self, hidden: int) -> list[Table]:
        """Return what else the layer has: a factor on the output of its feed-forward."""
        return [feed_scale("mlp.global_scale")]


def feed_scale(name: str) -> Table:
    return {"scale": (Tensor(name, (1,), "float32"),)}


SLIDING = "hybrid_sliding"
"""Kind of a layer with a window."""
INKLING_NAMES = {
    "sliding_window": "sliding_window_size",
    "num_local_experts": "n_routed_experts",
    "sconv_kernel_size": "conv_kernel_size",
    "model_max_length": "max_position_embeddings",
}
"""Keys that releases have, and their names here."""


def with_old_names(keys: ConfigKeys, names: Mapping[str, str]) -> ConfigKeys:
    """Return ``keys``, with the values of ``names``, keys of releases, under their names here."""
    return keys.over({here: keys.get(name) for name, here in names.items() if keys.get(name) is not None})


def read_inkling(family: str, keys: ConfigKeys) -> Architecture:
    stated, keys = {}, with_old_names(keys, INKLING_NAMES)
    dense_width = keys.get("dense_intermediate_size")
    if dense_width is not None:  # then intermediate_size is the width of an expert
        stated = {"moe_intermediate_size": keys.get("intermediate_size"), "intermediate_size": dense_width}
    keys = keys.over(stated).with_defaults(
        vocab_size=201_024,
        hidden_size=6144,
        num_hidden_layers=66,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        swa_num_attention_heads=64,
        swa_num_key_value_heads=16,
        swa_head_dim=128,
        sliding_window_size=512,
        max_position_embeddings=131_072,
    )
    count = keys.integer("num_hidden_layers")
    if not keys.boolean("shared_expert_sink", True):
        fail("shared_expert_sink", False, "the router of this family scores the shared experts too")
    local = keys.get("local_layer_ids", [layer for layer in range(count) if (layer + 1) % 6])
    if not isinstance(local, list):
        fail("local_layer_ids", local, "it must list layers by their numbers")
    kinds = kinds_with_windows(
        keys, ("hybrid", SLIDING), [SLIDING if layer in local else "hybrid" for layer in range(count)]
    )
    near, full = (RelativeAttention(**fields) for fields in near_and_full(keys))
    unpadded = keys.integer("unpadded_vocab_size", keys.integer("vocab_size"))
    return build_architecture(
        family,
        keys,
        [near if kind == SLIDING else full for kind in kinds],
        _feeds(keys, count),
        tied=False,
        logits_divisor=keys.number("logits_mup_width_multiplier", 24.0),
        residual=EmbeddingNorm(),
        head_tokens=unpadded if unpadded < keys.integer("vocab_size") else 0,
    )


def near_and_full(keys: ConfigKeys) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of ``RelativeAttention`` in layers with a window, and in full layers."""
    window = keys.integer("sliding_window_size")
    floor = 0 if keys.get("log_scaling_n_floor") is None else keys.integer("log_scaling_n_floor")
    shared = {
        "states": keys.integer("d_rel", 16),
        "conv_kernel": keys.integer("conv_kernel_size", 4, least=2),
        "stream": keys.integer("hidden_size"),
    }
    near = _read_heads(keys, "swa_")
    if window < keys.integer("max_position_embeddings"):
        near = replace(near, window=window)
    return {"attention": near, "extent": window, **shared}, {
        "attention": _read_heads(keys, ""),
        "extent": keys.integer("rel_extent", 1024),
        "floor": floor,
        "growth": keys.number("log_scaling_alpha", 0.1) if floor else 0.0,
        **shared,
    }


def _read_heads(keys: ConfigKeys, prefix: str) -> Attention:
    """Return the attention whose keys begin with ``prefix``."""
    heads, kv_heads, dim = (
        keys.integer(f"{prefix}{name}") for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    if heads % kv_heads:
        fail(f"{prefix}num_key_value_heads", kv_heads, f"it must divide {prefix}num_attention_heads {heads}")
    return Attention(heads, kv_heads, dim, 1 / dim, None, qk_norm=True)


def _feeds(keys: ConfigKeys, count: int) -> list[FeedForward]:
    first = keys.integer("dense_mlp_idx", 0, least=0)
    kinds = keys.get("mlp_layer_types", ["dense" if layer < first else "sparse" for layer in range(count)])
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= {"dense", "sparse"}:
        fail("mlp_layer_types", kinds, f"it must say dense or sparse of each of the {count} layers")
    experts, width = keys.integer("n_routed_experts", 256), keys.integer("moe_intermediate_size", 3072)
    feed = Experts(
        count=experts,
        per_token=reading.experts_per_token(keys, experts, 6),
        width=width,
        normalized=False,
        scoring="sigmoid",
        choice_bias=True,
        scale=keys.number("route_scale", 8.0),
        shared_width=width,
        shared_count=keys.integer("n_shared_experts", 2),
    )
    dense = Dense(keys.integer("intermediate_size", 24_576))
    return [dense if kind == "dense" else feed for kind in kinds]


RELEASED = (
    (r"^model\.llm\.unembed\.", "lm_head."),
    (r"^model\.llm\.embed\.", "model.language_model.embed_tokens."),
    (r"^model\.llm\.embed_norm\.", "model.language_model.embed_tokens.embed_norm."),
    (r"^model\.llm\.", "model.language_model."),
    (r"^model\.audio\.", "model.audio_tower."),
    (r"\.attn\.w([qkv])_d[uv]\.", r".self_attn.\1_proj."),
    (r"\.attn\.wr_du\.", ".self_attn.r_proj."),
    (r"\.attn\.wo_ud\.", ".self_attn.o_proj."),
    (r"\.attn\.([kv]_sconv)\.weight$", r".self_attn.\1.conv1d.weight"),
    (r"\.attn\.", ".self_attn."),
    (r"\.((?:attn|mlp)_sconv)\.weight$", r".\1.conv1d.weight"),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.mlp_norm\.", ".post_attention_layernorm."),
    (r"\.mlp\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.mlp\.w2_md\.", ".mlp.down_proj."),
)
"""Patterns of names of releases, and those that transformers has in memory."""

_NAMES = Names(layer_reader="weft.models.more.inkling:layer_reader", ends_reader="weft.models.more.inkling:ends_reader")
FAMILIES = (Family("inkling", ("inkling_mm_model", "inkling_text"), read_inkling, names=_NAMES, released=RELEASED),)
