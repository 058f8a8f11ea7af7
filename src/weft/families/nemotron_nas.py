"""Nemotron-NAS: Llama whose layers differ in KV heads and widths, or lack a block.

``block_configs`` has for each layer the number of heads that share a KV head, and the width of the feed-forward as a
factor. Source: NVIDIA's ``DeciLMConfig`` and ``modeling_decilm.py``, in the form of mlx-lm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.families.architecture import Architecture
from weft.families.attention import NAMES
from weft.families.config_keys import ConfigKeys, fail
from weft.families.mixers.attention import Attention
from weft.families.mixers.feed_forward import Dense
from weft.families.reading import Family, build_architecture, read_attention
from weft.units import ceil_div

_WIDTHS = 256
"""Widths of feed-forwards are multiples of this."""


def read_nemotron_nas(family: str, keys: ConfigKeys) -> Architecture:
    keys = keys.with_defaults(
        vocab_size=128_256,
        hidden_size=8192,
        num_hidden_layers=80,
        num_attention_heads=64,
        max_position_embeddings=131_072,
        rope_theta=500_000.0,
        rms_norm_eps=1e-5,
    )
    keys.only(mlp_bias=False)
    count, listed = keys.integer("num_hidden_layers"), keys.get("block_configs")
    if not isinstance(listed, list) or len(listed) != count:
        fail("block_configs", listed, f"it must list the settings of each of the {count} layers")
    return build_architecture(
        family,
        keys,
        [_attention(keys, _part(block, "attention")) for block in listed],
        [_feed_forward(keys, _part(block, "ffn")) for block in listed],
    )


def _part(block: Any, name: str) -> ConfigKeys | None:
    """Return the settings of one block of a layer; None where the layer lacks it."""
    stated = block.get(name) if isinstance(block, Mapping) else None
    if not isinstance(stated, Mapping):
        fail(f"block_configs.{name}", stated, "it must have the settings of the block")
    own = ConfigKeys(stated, fallback=stated)
    own.only(f"block_configs.{name}.", replace_with_linear=False, sparsify=None)
    return None if own.boolean("no_op", False) else own


def _attention(keys: ConfigKeys, own: ConfigKeys | None) -> Attention | None:
    if own is None:
        return None
    own.only("block_configs.attention.", window_length=None, num_sink_tokens=None, unshifted_sink=False)
    heads, group = keys.integer("num_attention_heads"), own.integer("n_heads_in_group")
    if heads % group:
        fail("block_configs.attention.n_heads_in_group", group, f"it must divide num_attention_heads {heads}")
    return read_attention(keys.over({"num_key_value_heads": heads // group}))


def _feed_forward(keys: ConfigKeys, own: ConfigKeys | None) -> Dense | None:
    if own is None:
        return None
    factor = own.number("ffn_mult", 0.0)
    if factor <= 0:
        fail("block_configs.ffn.ffn_mult", own.get("ffn_mult"), "it must be above 0")
    return Dense(_WIDTHS * ceil_div(int(2 * round(factor, 6) * keys.integer("hidden_size") / 3), _WIDTHS))


FAMILIES = (Family("nemotron_nas", ("nemotron-nas",), read_nemotron_nas, names=NAMES),)
