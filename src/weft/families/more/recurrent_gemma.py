"""RecurrentGemma: two layers of RG-LRU for each with a window, GELU, biases, an embedding times the root of its width.

Source: De et al., "Griffin" (2024); transformers ``RecurrentGemmaConfig`` and its model, whose defaults are used here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

from weft import spec
from weft.families.architecture import Architecture
from weft.families.config_keys import ConfigKeys, fail
from weft.families.mixers import Mixer
from weft.families.mixers.attention import Attention
from weft.families.mixers.feed_forward import Dense
from weft.families.names import Names
from weft.families.reading import Family, build_architecture, read_attention
from weft.families.tensors import Table, Tensor, Units, conv, exact, product
from weft.spec import LayerSpec

POSITIONS = 1 << 20
"""Longest context, tokens, where ``--max-model-len`` says no less: no configuration names one."""


@dataclass(frozen=True, slots=True)
class RgLru(Mixer):
    """Real-gated linear recurrent unit (De et al., "Griffin", 2024), after a short convolution. Each head makes the
    two gates of its ``head_dim`` channels from those channels only."""

    reader = "weft.models.more.recurrent_gemma:read_rg_lru"

    heads: int
    head_dim: int
    conv_kernel: int

    def layer_spec(self) -> LayerSpec:
        return spec.rg_lru(self.heads * self.head_dim, self.conv_kernel)

    def table(self, hidden: int) -> Table:
        """Return the tensors. Files never quantise the gates, which decide how long the state keeps a value."""
        heads, channels, width = Units(self.heads), Units(self.heads, self.head_dim), self.head_dim
        table = (
            product("project", hidden, ("linear_y", channels), ("linear_x", channels), bias=True)
            | conv(channels, self.conv_kernel, "conv_1d", bias=True)
            | exact("rg_lru.recurrent_param", dims=(channels,))
            | product("out", channels, ("linear_out", hidden), bias=True)
        )
        for gate in ("input", "recurrent"):
            table[gate] = (Tensor(f"rg_lru.{gate}_gate_weight", (heads, width, width), "plain"),)
            table[f"{gate}.bias"] = (Tensor(f"rg_lru.{gate}_gate_bias", (heads, width), "plain"),)
        return table


def read_recurrent_gemma(family: str, keys: ConfigKeys) -> Architecture:
    keys = keys.with_defaults(
        hidden_size=2560,
        intermediate_size=7680,
        num_attention_heads=10,
        num_hidden_layers=26,
        vocab_size=256_000,
        attention_window_size=2048,
        max_position_embeddings=POSITIONS,
        hidden_activation="gelu_pytorch_tanh",
        block_types=["recurrent", "recurrent", "attention"],
    )
    keys.only(hidden_activation="gelu_pytorch_tanh")
    count, hidden = keys.integer("num_hidden_layers"), keys.integer("hidden_size")
    pattern = keys.get("block_types")
    if not isinstance(pattern, list) or not pattern or set(pattern) - {"recurrent", "attention"}:
        fail("block_types", pattern, "it must be a list of recurrent and attention")
    attended = replace(read_attention(keys, partial=0.5), window=keys.integer("attention_window_size"), out_bias=True)
    if attended.rope is not None and attended.rope.kind != "default":
        fail("rope_type", attended.rope.kind, "of RecurrentGemma only default is served, as in transformers")
    width = keys.integer("lru_width", hidden)
    if width % attended.heads:
        fail("lru_width", width, f"num_attention_heads {attended.heads} must divide it")
    recurrent = RgLru(attended.heads, width // attended.heads, keys.integer("conv1d_width", 4))
    mixers = [attended if pattern[i % len(pattern)] == "attention" else recurrent for i in range(count)]
    dense = Dense(keys.integer("intermediate_size") // 2, "gelu_tanh", bias=True)
    return build_architecture(
        family,
        keys,
        mixers,
        [dense] * count,
        tied=keys.boolean("tie_word_embeddings", True),
        embedding_multiplier=_bfloat16(hidden**0.5),
        logits_cap=keys.number("logits_soft_cap", 30.0),
    )


def _bfloat16(x: float) -> float:
    """Return ``x`` rounded to bfloat16, as this model rounds its factor whatever the dtype of the weights."""
    [bits] = struct.unpack("<I", struct.pack("<f", x))
    [rounded] = struct.unpack("<f", struct.pack("<I", (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000))
    return float(rounded)


_NAMES = Names(
    {Attention: "temporal_block", RgLru: "temporal_block"},
    feed="mlp_block",
    swiglu=False,
    mixer_norm="temporal_pre_norm",
    feed_norm="channel_pre_norm",
    final_norm="final_norm",
    plus_one=True,
)
FAMILIES = (Family("recurrent_gemma", ("recurrent_gemma",), read_recurrent_gemma, "gelu_pytorch_tanh", _NAMES),)
