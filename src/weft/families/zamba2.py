"""Zamba2: Mamba-2 in every layer, and in some of them a transformer block that they share.

The step is not clamped: ``time_step_min`` only bounds the initialisation, as Nemotron-H's.
"""

from __future__ import annotations

from weft.families.architecture import Architecture
from weft.families.config_keys import ConfigKeys, fail, read_rope
from weft.families.mixers import Mixer
from weft.families.mixers.attention import Attention
from weft.families.mixers.combined import SharedBlock
from weft.families.mixers.feed_forward import Dense
from weft.families.mixers.mamba import Mamba2
from weft.families.names import Names
from weft.families.reading import Family, build_architecture, check_mamba2

_SHARED_KINDS = {"mamba": False, "linear_attention": False, "hybrid": True}
"""Layer kinds -> whether the layer has a shared block."""


_ZAMBA2_SHARED = [layer in (6, 12, 18, 24, 30, 36, 42, 47, 51) for layer in range(54)]


def read_zamba2(family: str, keys: ConfigKeys) -> Architecture:
    if keys.boolean("use_long_context", False):
        fail("use_long_context", True, "the context this model was trained on is served")
    hidden = keys.integer("hidden_size")
    rotary = keys.boolean("use_mem_rope", False)
    mamba, attention = _zamba2_mamba(keys, hidden), zamba_attention(keys, hidden, rotary=rotary)
    # Sizes that follow from others.
    keys.only(attention_hidden_size=2 * hidden, attention_head_dim=attention.head_dim, mamba_headdim=mamba.head_dim)
    dense = Dense(keys.integer("intermediate_size", 4 * hidden), "gelu", bias=keys.boolean("add_bias_linear", False))
    blocks, rank = keys.integer("num_mem_blocks", 1), keys.integer("adapter_rank", 128)
    adapted = keys.boolean("use_shared_attention_adapter", False)
    mixers: list[Mixer] = []
    use = 0
    for shared in shared_beside(keys, _ZAMBA2_SHARED):
        if shared:
            mixers.append(
                SharedBlock(
                    attention, mamba, dense, block=use % blocks, use=use, adapter_rank=rank, adapted_attention=adapted
                )
            )
            use += 1
        else:
            mixers.append(mamba)
    return build_architecture(
        family,
        keys,
        mixers,
        [None] * len(mixers),
        max_positions=4096,
        tied=keys.boolean("tie_word_embeddings", True),
        default_eps=1e-5,
    )


def shared_beside(keys: ConfigKeys, default: list[bool]) -> list[bool]:
    """Return for each layer whether it has a shared block."""
    name = "layers_block_type" if keys.get("layers_block_type") is not None else "layer_types"
    count = keys.integer("num_hidden_layers", len(default))
    listed = keys.get(name, ["hybrid" if shared else "mamba" for shared in default])
    if not isinstance(listed, list) or len(listed) != count:
        fail(name, listed, f"it must list the kind of each of the {count} layers")
    for kind in listed:
        if kind not in _SHARED_KINDS:
            fail(name, kind, f"the layer kinds served are {', '.join(_SHARED_KINDS)}")
    return [_SHARED_KINDS[kind] for kind in listed]


def zamba_attention(keys: ConfigKeys, hidden: int, *, rotary: bool = False) -> Attention:
    """Read the attention of a shared block. It sees stream and embedding side by side, so heads are twice as wide; the
    scale is of half of that."""
    heads = keys.integer("num_attention_heads", 32)
    kv_heads = keys.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        fail("num_key_value_heads", kv_heads, f"it must divide num_attention_heads {heads}")
    if 2 * hidden % heads:
        fail("num_attention_heads", heads, f"it must divide twice the hidden size {hidden}")
    head_dim = 2 * hidden // heads
    rope = read_rope(keys, head_dim, theta=10000.0, partial=1.0) if rotary else None
    return Attention(heads, kv_heads, head_dim, (head_dim / 2) ** -0.5, rope)


def _zamba2_mamba(keys: ConfigKeys, hidden: int) -> Mamba2:
    heads, inner = keys.integer("n_mamba_heads", 8), keys.integer("mamba_expand", 2) * hidden
    bias = keys.boolean("add_bias_linear", False)
    mamba = Mamba2(
        heads=heads,
        head_dim=inner // heads,
        groups=keys.integer("mamba_ngroups", 1),
        state_dim=keys.integer("mamba_d_state", 64),
        conv_kernel=keys.integer("mamba_d_conv", 4),
        conv_bias=True,
        projection_bias=bias,
        dt_limit=(0.0, float("inf")),
    )
    return check_mamba2(mamba, inner, "mamba_expand x hidden_size", heads="n_mamba_heads", groups="mamba_ngroups")


_ZAMBA2 = Names(
    layer_reader="weft.models.blocks.combined:zamba2_layers",
    ends_reader="weft.models.blocks.combined:ends_reader",
    final_norm="final_layernorm",
)
FAMILIES = (Family("zamba2", ("zamba2",), read_zamba2, "gelu", _ZAMBA2),)
