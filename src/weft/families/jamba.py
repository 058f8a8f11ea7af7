"""Jamba: Mamba-1 + attention, experts in every other layer."""

from __future__ import annotations

from collections.abc import Callable

from weft.families.architecture import Architecture, Dense, Experts, FeedForward, Mamba1
from weft.families.config_keys import ConfigKeys, fail
from weft.families.reading import Family, build_architecture, experts_per_token, layer_kinds, read_attention
from weft.units import ceil_div


def read_jamba(family: str, keys: ConfigKeys) -> Architecture:
    attends = _every(keys, "attn_layer", 8, 4)
    kinds = layer_kinds(keys, lambda count: [
        "attention" if attends(i) else "recurrent" for i in range(count)])
    hidden = keys.integer("hidden_size")
    rank = ceil_div(hidden, 16) if keys.get("mamba_dt_rank", "auto") == "auto" \
        else keys.integer("mamba_dt_rank")
    eps = keys.number("rms_norm_eps", 1e-6)
    attention = read_attention(keys, rotary=False)
    mamba = Mamba1(channels=keys.integer("mamba_expand", 2) * hidden, dt_rank=rank,
                   state_dim=keys.integer("mamba_d_state", 16), conv_kernel=keys.integer("mamba_d_conv", 4),
                   conv_bias=keys.boolean("mamba_conv_bias", True),
                   projection_bias=keys.boolean("mamba_proj_bias", False), inner_norms="weighted",
                   inner_eps=eps)
    return build_architecture(family, keys, [attention if kind == "attention" else mamba for kind in kinds],
                              _feed_forwards(keys, len(kinds)), eps=eps, max_positions=262_144,
                              tied=keys.boolean("tie_word_embeddings", False))


def _feed_forwards(keys: ConfigKeys, layers: int) -> list[FeedForward]:
    width, count = keys.integer("intermediate_size", 14336), keys.integer("num_experts", 16)
    dense = Dense(width)
    if count == 1:
        # One expert is a dense layer, and has no router in the files.
        return [dense] * layers
    sparse = Experts(count=count, per_token=experts_per_token(keys, count, default=2), width=width,
                     normalized=False)
    chosen = _every(keys, "expert_layer", 2, 1)
    return [sparse if chosen(layer) else dense for layer in range(layers)]


def _every(keys: ConfigKeys, what: str, period: int, offset: int) -> Callable[[int], bool]:
    """Whether a layer is one of every ``what``_period layers, the first of them at ``what``_offset."""
    period = keys.integer(f"{what}_period", period)
    offset = keys.integer(f"{what}_offset", offset, least=0)
    if offset >= period:
        fail(f"{what}_offset", offset, f"it must be smaller than {what}_period {period}")
    return lambda layer: layer % period == offset


FAMILIES = (
    Family("jamba", ("jamba",), read_jamba, builder="jamba"),
)
