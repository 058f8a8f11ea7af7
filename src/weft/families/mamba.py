"""Mamba without attention: Mamba, Falcon-Mamba, Mamba-2. Mamba with attention: Jamba.

The first three have no limit on the length of a text: the state has one size, and there is no KV. ``POSITIONS`` is the
limit unless ``--max-model-len`` is less.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.families.architecture import Architecture
from weft.families.config_keys import ConfigKeys, fail
from weft.families.mixers import Mixer
from weft.families.mixers.attention import Attention
from weft.families.mixers.combined import Parallel
from weft.families.mixers.feed_forward import Dense, Experts, FeedForward
from weft.families.mixers.mamba import InnerNorms, Mamba1, Mamba2
from weft.families.names import Names
from weft.families.reading import (
    Family,
    build_architecture,
    check_mamba2,
    experts_per_token,
    layer_kinds,
    read_attention,
)
from weft.families.residuals import Residual
from weft.units import ceil_div

POSITIONS = 1 << 20


def read_mamba(family: str, keys: ConfigKeys) -> Architecture:
    """Read Mamba or Falcon-Mamba, which is Mamba with norms inside. ``intermediate_size`` wins over ``expand``:
    Falcon-Mamba 7B states both, and they differ."""
    hidden = keys.integer("hidden_size")
    rank = step_rank(keys, "time_step_rank", hidden)
    norms: InnerNorms = "plain" if family == "falcon_mamba" else "none"
    mixer = Mamba1(
        channels=keys.integer("intermediate_size", int(keys.number("expand", 2.0) * hidden)),
        state_dim=keys.integer("state_size", 16),
        dt_rank=rank,
        conv_kernel=keys.integer("conv_kernel", 4),
        conv_bias=keys.boolean("use_conv_bias", True),
        projection_bias=keys.boolean("use_bias", False),
        inner_norms=norms,
        inner_eps=keys.number("mixer_rms_eps", 1e-6),
    )
    return _mamba_alone(family, keys, mixer, tied=True)


def read_mamba2_alone(family: str, keys: ConfigKeys) -> Architecture:
    mixer = Mamba2(
        heads=keys.integer("num_heads", 128),
        head_dim=keys.integer("head_dim", 64),
        groups=keys.integer("n_groups", 8),
        state_dim=keys.integer("state_size", 128),
        conv_kernel=keys.integer("conv_kernel", 4),
        conv_bias=keys.boolean("use_conv_bias", True),
        projection_bias=keys.boolean("use_bias", False),
        dt_limit=keys.limits("time_step_limit", (0.0, float("inf"))),
    )
    inner = int(keys.number("expand", 2.0) * keys.integer("hidden_size"))
    check_mamba2(mixer, inner, "expand x hidden_size", heads="num_heads", groups="n_groups")
    return _mamba_alone(family, keys, mixer, tied=False)


def _mamba_alone(family: str, keys: ConfigKeys, mixer: Mamba1 | Mamba2, *, tied: bool) -> Architecture:
    count = keys.integer("num_hidden_layers")
    return build_architecture(
        family,
        keys,
        [mixer] * count,
        [None] * count,
        tied=keys.boolean("tie_word_embeddings", tied),
        eps=keys.number("layer_norm_epsilon", 1e-5),
        max_positions=POSITIONS,
        residual=Residual(float32=keys.boolean("residual_in_fp32", True)),
    )


def read_jamba(family: str, keys: ConfigKeys) -> Architecture:
    attends = every_nth(keys, "attn_layer", 8, 4)
    kinds = layer_kinds(keys, lambda count: ["attention" if attends(i) else "recurrent" for i in range(count)])
    hidden = keys.integer("hidden_size")
    rank = step_rank(keys, "mamba_dt_rank", hidden)
    eps = keys.number("rms_norm_eps", 1e-6)
    attention = read_attention(keys, rotary=False)
    mamba = Mamba1(
        channels=keys.integer("mamba_expand", 2) * hidden,
        dt_rank=rank,
        state_dim=keys.integer("mamba_d_state", 16),
        conv_kernel=keys.integer("mamba_d_conv", 4),
        conv_bias=keys.boolean("mamba_conv_bias", True),
        projection_bias=keys.boolean("mamba_proj_bias", False),
        inner_norms="weighted",
        inner_eps=eps,
    )
    return build_architecture(
        family,
        keys,
        [attention if kind == "attention" else mamba for kind in kinds],
        _jamba_feed_forwards(keys, len(kinds)),
        eps=eps,
        max_positions=262_144,
    )


def _jamba_feed_forwards(keys: ConfigKeys, layers: int) -> list[FeedForward]:
    width, count = keys.integer("intermediate_size", 14336), keys.integer("num_experts", 16)
    dense = Dense(width)
    if count == 1:
        # One expert is a dense layer, and has no router in the files.
        return [dense] * layers
    sparse = Experts(count=count, per_token=experts_per_token(keys, count, default=2), width=width, normalized=False)
    chosen = every_nth(keys, "expert_layer", 2, 1)
    return [sparse if chosen(layer) else dense for layer in range(layers)]


def every_nth(keys: ConfigKeys, what: str, period: int, offset: int) -> Callable[[int], bool]:
    """Return a function that tells whether a layer is one of those at ``what``_offset and every ``what``_period layers
    after."""
    period = keys.integer(f"{what}_period", period)
    offset = keys.integer(f"{what}_offset", offset, least=0)
    if offset >= period:
        fail(f"{what}_offset", offset, f"it must be smaller than {what}_period {period}")
    return lambda layer: layer % period == offset


def step_rank(keys: ConfigKeys, name: str, hidden: int) -> int:
    return ceil_div(hidden, 16) if keys.get(name, "auto") == "auto" else keys.integer(name)


HYBRID: dict[type[Mixer], str] = {Attention: "self_attn", Mamba1: "mamba", Mamba2: "mamba", Parallel: ""}
BAMBA = Names(
    HYBRID,
    feed="feed_forward",
    feed_norm="pre_ff_layernorm",
    final_norm="final_layernorm",
    swiglu=False,
    spelled={Experts: {"router": "router.weight"}},
)
# Names of the original code.
_ALONE = Names({Mamba1: "mixer", Mamba2: "mixer"}, mixer_norm="norm", final_norm="norm_f", embeddings=("embeddings",))
FAMILIES = (
    Family("mamba2", ("mamba2",), read_mamba2_alone, names=_ALONE),
    Family("mamba", ("mamba",), read_mamba, names=_ALONE),
    Family("falcon_mamba", ("falcon_mamba",), read_mamba, names=_ALONE),
    Family("jamba", ("jamba",), read_jamba, names=BAMBA),
)
