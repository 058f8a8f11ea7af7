"""Zamba2: Mamba-2 in every layer, and beside some of them one of a few transformer blocks that they share.

As in Nemotron-H, ``time_step_min`` bounds the initialisation of the steps, not the steps: transformers clamps
those of prompts to it, and those of single tokens not (docs/models.md).
"""

from __future__ import annotations

from weft.families.architecture import Architecture, Attention, Dense, Mamba2, Mixer, SharedBlock
from weft.families.config_keys import ConfigKeys, fail, read_rope
from weft.families.reading import Family, build_architecture, check_mamba2

_KINDS = {"mamba": False, "linear_attention": False, "hybrid": True}
"""Layer kinds -> whether a shared block stands beside."""
_DEFAULT = tuple(["mamba"] + (["mamba"] * 5 + ["hybrid"]) * 7 + ["mamba"] * 4 + ["hybrid"] + ["mamba"] * 3
                 + ["hybrid"] + ["mamba"] * 2)


def read_zamba2(family: str, keys: ConfigKeys) -> Architecture:
    if keys.boolean("use_long_context", False):
        fail("use_long_context", True, "the context this model was trained on is served")
    hidden = keys.integer("hidden_size")
    mamba, attention = _mamba(keys, hidden), _attention(keys, hidden)
    dense = Dense(keys.integer("intermediate_size", 4 * hidden), "gelu",
                  bias=keys.boolean("add_bias_linear", False))
    blocks, rank = keys.integer("num_mem_blocks", 1), keys.integer("adapter_rank", 128)
    adapted = keys.boolean("use_shared_attention_adapter", False)
    mixers: list[Mixer] = []
    use = 0
    for shared in _shared(keys):
        if shared:
            mixers.append(SharedBlock(attention, mamba, dense, block=use % blocks, use=use, adapter_rank=rank,
                                      adapted_attention=adapted))
            use += 1
        else:
            mixers.append(mamba)
    return build_architecture(family, keys, mixers, [None] * len(mixers), max_positions=4096,
                              tied=keys.boolean("tie_word_embeddings", True),
                              eps=keys.number("rms_norm_eps", 1e-5))


def _shared(keys: ConfigKeys) -> list[bool]:
    """For each layer, whether a shared block stands beside it."""
    name = "layers_block_type" if keys.get("layers_block_type") is not None else "layer_types"
    listed = keys.get(name, list(_DEFAULT))
    count = keys.integer("num_hidden_layers", len(_DEFAULT))
    if not isinstance(listed, list) or len(listed) != count:
        fail(name, listed, f"it must list the kind of each of the {count} layers")
    for kind in listed:
        if kind not in _KINDS:
            fail(name, kind, f"the layer kinds served are {', '.join(_KINDS)}")
    return [_KINDS[kind] for kind in listed]


def _attention(keys: ConfigKeys, hidden: int) -> Attention:
    """It sees stream and embedding side by side, so heads are twice as wide; the scale is of half of that."""
    heads = keys.integer("num_attention_heads", 32)
    kv_heads = keys.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        fail("num_key_value_heads", kv_heads, f"it must divide num_attention_heads {heads}")
    if 2 * hidden % heads:
        fail("num_attention_heads", heads, f"it must divide twice the hidden size {hidden}")
    head_dim = 2 * hidden // heads
    rotary = keys.boolean("use_mem_rope", False)
    rope = read_rope(keys, head_dim, theta=10000.0, partial=1.0) if rotary else None
    return Attention(heads, kv_heads, head_dim, (head_dim / 2) ** -0.5, rope)


def _mamba(keys: ConfigKeys, hidden: int) -> Mamba2:
    heads, inner = keys.integer("n_mamba_heads", 8), keys.integer("mamba_expand", 2) * hidden
    bias = keys.boolean("add_bias_linear", False)
    mamba = Mamba2(heads=heads, head_dim=inner // heads, groups=keys.integer("mamba_ngroups", 1),
                   state_dim=keys.integer("mamba_d_state", 64), conv_kernel=keys.integer("mamba_d_conv", 4),
                   conv_bias=True, projection_bias=bias, dt_limit=(0.0, float("inf")))
    return check_mamba2(mamba, inner, "mamba_expand x hidden_size", heads="n_mamba_heads",
                        groups="mamba_ngroups")


FAMILIES = (
    Family("zamba2", ("zamba2",), read_zamba2, builder="zamba2", activation="gelu"),
)
