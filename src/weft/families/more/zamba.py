"""Zamba: Mamba-1 by head in every layer, and a transformer block that some layers share.

Source: transformers ``ZambaConfig`` and ``ZambaForCausalLM``, whose defaults are used here.
"""

from __future__ import annotations

from weft.families.architecture import Architecture
from weft.families.config_keys import ConfigKeys, fail
from weft.families.mamba import every_nth, step_rank
from weft.families.mixers.combined import SharedBlock
from weft.families.mixers.feed_forward import Dense
from weft.families.mixers.mamba import Mamba1
from weft.families.names import Names
from weft.families.reading import Family, build_architecture
from weft.families.zamba2 import shared_beside, zamba_attention


def read_zamba(family: str, keys: ConfigKeys) -> Architecture:
    keys = keys.with_defaults(
        hidden_size=3712, num_hidden_layers=76, num_attention_heads=16, vocab_size=32_000, n_mamba_heads=2
    )
    hidden, count = keys.integer("hidden_size"), keys.integer("num_hidden_layers")
    keys.only(hidden_mamba_act="silu")
    attention = zamba_attention(keys, hidden)
    for key, served in (("attention_hidden_size", 2 * hidden), ("attention_head_dim", attention.head_dim)):
        if keys.get(key) is not None and keys.integer(key) != served:
            fail(key, keys.integer(key), f"only {served} is served: the block reads stream and embedding")
    heads, inner = keys.integer("n_mamba_heads"), keys.integer("mamba_expand", 2) * hidden
    if inner % heads:
        fail("n_mamba_heads", heads, f"it must divide mamba_expand x hidden_size = {inner}")
    mamba = Mamba1(
        channels=inner,
        state_dim=keys.integer("mamba_d_state", 16),
        dt_rank=step_rank(keys, "mamba_dt_rank", hidden),
        conv_kernel=keys.integer("mamba_d_conv", 4),
        conv_bias=keys.boolean("mamba_conv_bias", True),
        projection_bias=keys.boolean("mamba_proj_bias", False),
        heads=heads,
    )
    dense = Dense(keys.integer("intermediate_size", 14_848), "gelu")
    attends = every_nth(keys, "attn_layer", 6, 4)
    beside = shared_beside(keys, [layer == 2 or (layer > 2 and attends(layer - 3)) for layer in range(count)])
    mixers = [
        SharedBlock(attention, mamba, dense, block=0, use=sum(beside[:layer])) if shared else mamba
        for layer, shared in enumerate(beside)
    ]
    return build_architecture(
        family,
        keys,
        mixers,
        [None] * count,
        max_positions=4096,
        tied=keys.boolean("tie_word_embeddings", True),
        default_eps=1e-5,
    )


_NAMES = Names(
    layer_reader="weft.models.blocks.combined:zamba_layers",
    ends_reader="weft.models.blocks.combined:ends_reader",
    final_norm="final_layernorm",
)
FAMILIES = (Family("zamba", ("zamba",), read_zamba, "gelu", _NAMES),)
