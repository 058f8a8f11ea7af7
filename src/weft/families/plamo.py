"""PLaMo 2: norms before and after each block, each stored as the distance from a number of its own. Layers are Mamba-2
whose B, C and steps are made of the convolved channels; every ``mamba_step``-th is attention over a window, or over the
whole text (``full_attention_idx``).

Sources: PFN's ``Plamo2Config``, whose defaults are used here, and its ``modeling_plamo.py``, as vLLM, mlx-lm and
plamo-translate-cli have them.
"""

from __future__ import annotations

from dataclasses import replace

from weft.families.architecture import Architecture
from weft.families.config_keys import ConfigKeys, fail
from weft.families.mixers.attention import Attention, Rope
from weft.families.mixers.feed_forward import Dense
from weft.families.mixers.mamba import SelectiveMamba2
from weft.families.names import Names
from weft.families.reading import Family, build_architecture, read_attention
from weft.families.residuals import Residual

POSITIONS = 10 << 20
"""Longest context of PLaMo 2 where config.json names none, tokens."""
_QK_EPS = 1e-6
"""Epsilon of the norms of queries and keys in PLaMo 2, whatever ``rms_norm_eps`` is."""


def read_plamo2(family: str, keys: ConfigKeys) -> Architecture:
    keys = keys.with_defaults(
        vocab_size=32_000,
        hidden_size=4096,
        intermediate_size=13_312,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=4,
    )
    keys.only(linear_type="normal", image_token_id=None, rms_norm_eps=_QK_EPS, rope_scaling=None)
    mamba, count = _read_mamba(keys), keys.integer("num_hidden_layers")
    attends = _plamo2_attention(keys, count)
    return build_architecture(
        family,
        keys,
        [attends[layer] if _is_attention(keys, layer, count) else mamba for layer in range(count)],
        [Dense(keys.integer("intermediate_size"))] * count,
        tied=keys.boolean("tie_word_embeddings", True),
        max_positions=POSITIONS,
        residual=Residual(out_norms=True),
    )


def _is_attention(keys: ConfigKeys, layer: int, count: int) -> bool:
    step = keys.integer("mamba_step", 2, least=2)
    if not keys.boolean("mamba_enabled", True):
        return True
    return layer == count - 1 if count <= step // 2 else layer % step == step // 2


def _read_mamba(keys: ConfigKeys) -> SelectiveMamba2:
    return SelectiveMamba2(
        heads=keys.integer("mamba_num_heads", 64),
        head_dim=keys.integer("hidden_size_per_head", 128),
        state_dim=keys.integer("mamba_d_state", 64),
        dt_rank=max(64, keys.integer("hidden_size") // 16),
        conv_kernel=keys.integer("mamba_d_conv", 4, least=2),
    )


def _plamo2_attention(keys: ConfigKeys, count: int) -> list[Attention]:
    """Return the attention of each layer, used or not. A window counts the tokens before a token."""
    whole = keys.get("full_attention_idx", [])
    if not isinstance(whole, list) or not all(layer in range(count) for layer in whole):
        fail("full_attention_idx", whole, f"it must list layers below num_hidden_layers {count}")
    sized = keys.over({"head_dim": keys.integer("hidden_size_per_head", 128)})
    full = replace(read_attention(sized), qk_norm=True, norm_by_head=True)
    assert full.rope is not None
    near = Rope(keys.number("rope_local_theta", full.rope.theta), full.rope.rotary_dim)
    window = replace(full, rope=near, window=keys.integer("attention_window_size", 2048) + 1)
    return [full if layer in whole else window for layer in range(count)]


_PLAMO2 = Names(
    {Attention: "mixer", SelectiveMamba2: "mixer"},
    mixer_norm="pre_mixer_norm",
    feed_norm="pre_mlp_norm",
    out_norms=("post_mixer_norm", "post_mlp_norm"),
    stack="layers.layers",
    spelled={
        Attention: {"joined": "qkv_proj", "norms": ("q_weight", "k_weight")},
        Dense: {"names": ("gate_up_proj", "down_proj")},
    },
    norm_offsets={
        "pre_mixer_norm": 1.0,
        "pre_mlp_norm": 1.0,
        "norm": 1.0,
        "post_mixer_norm": 5**-1,
        "post_mlp_norm": 5**-1.5,
    },
)
FAMILIES = (Family("plamo2", ("plamo2",), read_plamo2, names=_PLAMO2),)
