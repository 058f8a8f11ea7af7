"""Mamba, Falcon-Mamba and Mamba-2: recurrent layers only, without feed-forwards and without positions.

Nothing limits how long their texts are: the state has one size, and KV takes no memory. ``POSITIONS`` is what
is served unless ``--max-model-len`` says less.
"""

from __future__ import annotations

from weft.families.architecture import Architecture, InnerNorms, Mamba1, Mamba2
from weft.families.config_keys import ConfigKeys
from weft.families.reading import Family, build_architecture, check_mamba2
from weft.units import ceil_div

POSITIONS = 1 << 20


def read_mamba(family: str, keys: ConfigKeys) -> Architecture:
    """Falcon-Mamba is Mamba with norms inside. ``intermediate_size`` wins over ``expand``: Falcon-Mamba 7B
    states both, and they differ."""
    hidden = keys.integer("hidden_size")
    rank = ceil_div(hidden, 16) if keys.get("time_step_rank", "auto") == "auto" \
        else keys.integer("time_step_rank")
    norms: InnerNorms = "plain" if family == "falcon_mamba" else "none"
    mixer = Mamba1(channels=keys.integer("intermediate_size", int(keys.number("expand", 2.0) * hidden)),
                   state_dim=keys.integer("state_size", 16), dt_rank=rank,
                   conv_kernel=keys.integer("conv_kernel", 4),
                   conv_bias=keys.boolean("use_conv_bias", True),
                   projection_bias=keys.boolean("use_bias", False), inner_norms=norms,
                   inner_eps=keys.number("mixer_rms_eps", 1e-6))
    return _only(family, keys, mixer, tied=True)


def read_mamba2_alone(family: str, keys: ConfigKeys) -> Architecture:
    mixer = Mamba2(heads=keys.integer("num_heads", 128), head_dim=keys.integer("head_dim", 64),
                   groups=keys.integer("n_groups", 8), state_dim=keys.integer("state_size", 128),
                   conv_kernel=keys.integer("conv_kernel", 4), conv_bias=keys.boolean("use_conv_bias", True),
                   projection_bias=keys.boolean("use_bias", False),
                   dt_limit=keys.limits("time_step_limit", (0.0, float("inf"))))
    inner = int(keys.number("expand", 2.0) * keys.integer("hidden_size"))
    check_mamba2(mixer, inner, "expand x hidden_size", heads="num_heads", groups="n_groups")
    return _only(family, keys, mixer, tied=False)


def _only(family: str, keys: ConfigKeys, mixer: Mamba1 | Mamba2, *, tied: bool) -> Architecture:
    count = keys.integer("num_hidden_layers")
    return build_architecture(family, keys, [mixer] * count, [None] * count,
                              tied=keys.boolean("tie_word_embeddings", tied),
                              eps=keys.number("layer_norm_epsilon", 1e-5), max_positions=POSITIONS,
                              residual_float32=keys.boolean("residual_in_fp32", True))


FAMILIES = (
    Family("mamba2", ("mamba2",), read_mamba2_alone, builder="mamba"),
    Family("mamba", ("mamba",), read_mamba, builder="mamba"),
    Family("falcon_mamba", ("falcon_mamba",), read_mamba, builder="mamba"),
)
