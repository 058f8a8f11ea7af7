"""Jet-Nemotron: delta nets whose values pass a convolution that each token makes itself; some attention.

    layer_types   "jet"    DynamicDelta; its settings are efficient_attention_config.jet
                  "attn"   attention, with biases on q, k and v
                  "swa"    the same over a window, efficient_attention_config.swa.window_size

Source: Gu et al., "Jet-Nemotron: Efficient Language Model with Post Neural Architecture Search" (2025);
NVIDIA's ``JetNemotronConfig`` and ``JetBlockConfig``, whose defaults are used here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft import spec
from weft.families.architecture import Architecture
from weft.families.config_keys import INTEGER_MAX, ConfigKeys, fail
from weft.families.mixers import Mixer
from weft.families.mixers.attention import Attention
from weft.families.mixers.feed_forward import Dense
from weft.families.names import Names
from weft.families.reading import Family, build_architecture, kinds_with_windows, read_attention, windowed
from weft.families.tensors import Table, Tensor, Units, exact, norm_weight, product
from weft.spec import LayerSpec

_KERNELS = "dynamic_conv1d.kernel_generator"


@dataclass(frozen=True, slots=True)
class DynamicDelta(Mixer):
    """The gated delta rule where only v is convolved, by kernels that each token makes through a bottleneck of
    ``kernel_rank`` numbers. ``norm_eps``: of the gated norm."""

    reader = "weft.models.more.jet_nemotron:read_dynamic_delta"

    heads: int
    k_dim: int
    v_dim: int
    conv_kernel: int
    kernel_rank: int
    norm_eps: float

    def layer_spec(self) -> LayerSpec:
        return spec.dynamic_delta(self.heads, self.k_dim, self.v_dim, self.conv_kernel)

    def table(self, hidden: int) -> Table:
        """Return the tensors. The rows of beta and decay are never quantised in files. Every rank has all of the first
        product that makes kernels; the second is divided: its rows are by channel, then by place in the kernel."""
        key, value, heads = Units(self.heads, self.k_dim), Units(self.heads, self.v_dim), Units(self.heads)
        table = product("project", hidden, ("q_proj", key), ("k_proj", key), ("v_proj", value), ("g_proj", value))
        table["project"] += tuple(Tensor(f"{part}_proj.weight", (heads, hidden), "plain") for part in "ba")
        table["project"] += (Tensor(f"{_KERNELS}.w1.weight", (self.kernel_rank, hidden)),)
        rows = Units(self.heads, self.v_dim * self.conv_kernel)
        return (
            table
            | product("kernels", self.kernel_rank, (f"{_KERNELS}.w2", rows), bias=True)
            | exact("A_log", "dt_bias", dims=(heads,))
            | norm_weight("norm", self.v_dim, "o_norm")
            | product("out", value, ("o_proj", hidden))
        )


def read_jet_nemotron(family: str, keys: ConfigKeys) -> Architecture:
    keys = keys.with_defaults(
        vocab_size=151_936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
    )
    count = keys.integer("num_hidden_layers")
    kinds = kinds_with_windows(keys, ("jet", "attn", "swa"), ["attn"] * count)
    settings = keys.inner("efficient_attention_config") or ConfigKeys({}, fallback={})
    full = replace(read_attention(keys, theta=1e6), bias=True, out_bias=False)
    mixers: dict[str, Mixer] = {"attn": full}
    for kind in sorted({*kinds} - {"attn"}):
        own = settings.inner(kind)
        if own is None:
            fail(f"efficient_attention_config.{kind}", None, f"layer_types has layers of the kind {kind}")
        mixers[kind] = (
            _jet(own) if kind == "jet" else windowed(full, keys.over({"sliding_window": own.integer("window_size")}))
        )
    return build_architecture(
        family,
        keys,
        [mixers[kind] for kind in kinds],
        [Dense(keys.integer("intermediate_size"))] * count,
        tied=keys.boolean("tie_word_embeddings", True),
    )


def _jet(keys: ConfigKeys) -> DynamicDelta:
    heads, k_dim = keys.integer("num_heads", 6), keys.integer("head_dim", 256)
    factor = keys.number("expand_v", 2.0)
    if not 1 <= k_dim * factor <= INTEGER_MAX or int(heads * k_dim * factor) != heads * int(k_dim * factor):
        fail("expand_v", factor, f"times head_dim {k_dim} it must be a whole number, at least 1")
    v_dim = int(k_dim * factor)
    kernel = keys.integer("conv_size", 4, least=2)
    eps = keys.get("norm_eps", 1e-5)
    if isinstance(eps, str):  # as released: YAML reads 1e-5 as a text
        try:
            keys = keys.over({"norm_eps": float(eps)})
        except ValueError:
            fail("norm_eps", eps, "it must be a number")
    # With a reduction of null the bottleneck is as wide as the values that kernels convolve.
    rank = heads * v_dim // keys.integer("dconv_generator_reduction", 1 if keys.has("dconv_generator_reduction") else 8)
    if not rank:
        fail("dconv_generator_reduction", keys.get("dconv_generator_reduction"), f"at most {heads * v_dim}")
    return DynamicDelta(heads, k_dim, v_dim, kernel, rank, keys.number("norm_eps", 1e-5))


_NAMES = Names({Attention: "self_attn", DynamicDelta: "self_attn"})
FAMILIES = (Family("jet_nemotron", ("jet_nemotron",), read_jet_nemotron, names=_NAMES),)
