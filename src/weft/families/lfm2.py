"""LFM2: short convolution + attention."""

from __future__ import annotations

from weft.architecture import Architecture, Dense, ShortConv
from weft.config_keys import ConfigKeys
from weft.families.reading import build_architecture, layer_kinds, read_attention


def read_lfm2(family: str, keys: ConfigKeys) -> Architecture:
    chosen = keys.get("full_attn_idxs")
    kinds = layer_kinds(keys, lambda count: [
        "attention" if chosen is None or i in chosen else "recurrent" for i in range(count)])
    hidden = keys.integer("hidden_size")
    attention = read_attention(keys, qk_norm=True, theta=1e6)
    conv = ShortConv(hidden, keys.integer("conv_L_cache", 3), keys.boolean("conv_bias", False))
    dense = Dense(_lfm2_width(keys))
    return build_architecture(family, keys, [attention if kind == "attention" else conv for kind in kinds],
                         [dense] * len(kinds),
                         tied=keys.boolean("tie_embedding", keys.boolean("tie_word_embeddings", True)),
                         eps=keys.number("norm_eps", keys.number("block_norm_eps", 1e-5)),
                         max_positions=128_000)


def _lfm2_width(keys: ConfigKeys) -> int:
    """LFM2 names the width before SwiGLU's third matrix is paid for: 2/3 of it, rounded up to a multiple."""
    width = keys.integer("block_ff_dim", keys.integer("intermediate_size", 0, least=0))
    if not keys.boolean("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    if keys.get("block_ffn_dim_multiplier", 1.0) is not None:
        width = int(keys.number("block_ffn_dim_multiplier", 1.0) * width)
        multiple = keys.integer("block_multiple_of", 256)
        width = -(-width // multiple) * multiple
    return width
