"""PLaMo 2 and 3: norms before and after each block, each stored as the distance from a number of its own.

    plamo2   Mamba-2 whose B, C and steps are made of the convolved channels; every ``mamba_step``-th layer
             is attention over a window, or over the whole text (``full_attention_idx``)
    plamo3   attention; every ``sliding_window_pattern``-th layer sees the whole text, the others a window

Sources: PFN's ``Plamo2Config`` and ``Plamo3Config``, whose defaults are used here, and the two ``modeling_plamo.py``,
as vLLM, SGLang, mlx-lm and plamo-translate-cli have them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.families.architecture import Architecture
from weft.families.config_keys import ConfigKeys, fail, read_rope
from weft.families.mixers.attention import Attention, Rope
from weft.families.mixers.feed_forward import Dense
from weft.families.mixers.mamba import SelectiveMamba2
from weft.families.names import Names
from weft.families.reading import Family, build_architecture, read_attention
from weft.families.residuals import Residual

POSITIONS = 10 << 20
"""Longest context of PLaMo 2 where config.json names none, tokens."""
_SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 13_312,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
"""Sizes where config.json names none, of both versions."""
_QK_EPS = 1e-6
"""Epsilon of the norms of queries and keys in PLaMo 2, whatever ``rms_norm_eps`` is."""


def read_plamo2(family: str, keys: ConfigKeys) -> Architecture:
    keys = keys.with_defaults(**_SIZES)
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


def read_plamo3(family: str, keys: ConfigKeys) -> Architecture:
    # Configurations from before scaled positions have other defaults, and count only tokens before a token in a window.
    newer = keys.get("rope_scaling_factor") is not None
    window = _one_window(keys)
    keys = keys.with_defaults(
        **_SIZES,
        head_dim=128,
        window_size=128 if newer else 2048,
        rope_theta=keys.get("rope_global_theta", 150_000 if newer else 1_000_000),
    ).over({} if window is None else {"window_size": window})
    keys.only(linear_type="normal", image_token_id=None, attention_bias=False, hidden_activation="swiglu")
    hidden, count, every = keys.integer("hidden_size"), keys.integer("num_hidden_layers"), _pattern(keys)
    plain = replace(read_attention(keys, rotary=False), qk_norm=True)
    full = replace(plain, rope=_scaled_rope(keys, plain.head_dim))
    near = Rope(keys.number("rope_local_theta", 10_000.0), plain.head_dim)
    windowed = replace(plain, rope=near, window=keys.integer("window_size") + (not newer))
    return build_architecture(
        family,
        keys,
        [windowed if (layer + 1) % every else full for layer in range(count)],
        [Dense(keys.integer("intermediate_size"))] * count,
        tied=keys.boolean("tie_word_embeddings", True),
        max_positions=2048,
        residual=Residual(out_norms=True),
        embedding_multiplier=hidden**0.5 if keys.boolean("scale_embedding", False) else 1.0,
    )


def _pattern(keys: ConfigKeys) -> int:
    return keys.integer("sliding_window_pattern", 8)


def _one_window(keys: ConfigKeys) -> int | None:
    """Return the window of an older configuration, which names one for each layer or one for all; None without."""
    stated = keys.get("sliding_window")
    sizes = {size for size in stated if size is not None} if isinstance(stated, list) else {stated}
    if len(sizes) > 1:
        fail("sliding_window", stated, "the windows of all layers must be one size")
    return sizes.pop() if sizes else None


def _scaled_rope(keys: ConfigKeys, head_dim: int) -> Rope:
    """Return the rotary settings of layers that see the whole text: YaRN where ``rope_scaling_factor`` is not 1."""
    factor = keys.number("rope_scaling_factor", 1.0)
    stated: dict[str, Any] = {"rope_theta": keys.number("rope_theta", 1e6)}
    if factor != 1.0:
        original = keys.integer("initial_context_length", least=2)
        stated |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        stated |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    flat = keys.over({"rope_scaling": None, "rope_parameters": stated}).with_defaults(max_position_embeddings=2048)
    return read_rope(flat, head_dim, theta=1e6, partial=1.0)


_OFFSETS = {"post_mixer_norm": 5**-1, "post_mlp_norm": 5**-1.5}
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
    norm_offsets={"pre_mixer_norm": 1.0, "pre_mlp_norm": 1.0, "norm": 1.0, **_OFFSETS},
)
_PLAMO3 = replace(
    _PLAMO2,
    mixers={Attention: "mixer"},
    plus_one=True,
    spelled={Attention: {"joined": "qkv_proj"}, Dense: _PLAMO2.spelled[Dense]},
    norm_offsets=_OFFSETS,
)
FAMILIES = (
    Family("plamo2", ("plamo2",), read_plamo2, names=_PLAMO2),
    Family("plamo3", ("plamo3",), read_plamo3, names=_PLAMO3),
)
