"""RWKV-7: time mixing and channel mixing in turns, each over a token and the one before it.

A layer of the release is two layers here, as channel mixing keeps a state of its own: the last input. The
first time mixing hands its values to all later ones, in a second part of the residual stream.

    stream [ x | values of the first layer ]     x += time_mix(norm(x), values);   x += channel_mix(norm(x))

The length of a text has no limit: positions are not read, and their number in config.json comes from a converter.
``POSITIONS`` is the limit unless ``--max-model-len`` is less.

Source: Peng et al., "RWKV-7 Goose" (2025); the flash-linear-attention library's configuration, whose names
and defaults are used here.
"""

from __future__ import annotations

from dataclasses import replace

from weft.families.architecture import Architecture
from weft.families.config_keys import ConfigKeys, fail
from weft.families.mamba import POSITIONS
from weft.families.mixers import Mixer
from weft.families.mixers.mixing import ChannelMix, TimeMix
from weft.families.names import Names
from weft.families.reading import Family, build_architecture
from weft.families.residuals import LayerNorms
from weft.units import ceil_div


def read_rwkv7(family: str, keys: ConfigKeys) -> Architecture:
    keys = keys.with_defaults(hidden_size=2048, num_hidden_layers=24, head_dim=64, vocab_size=32_000).over(
        {"max_position_embeddings": POSITIONS}
    )
    hidden, count, head_dim = (keys.integer(key) for key in ("hidden_size", "num_hidden_layers", "head_dim"))
    if hidden % head_dim:
        fail("head_dim", head_dim, f"it must divide hidden_size {hidden}")
    _refuse(keys, hidden, hidden // head_dim)

    def rank(key: str, share: float) -> int:
        return keys.integer(key, max(32, round(share * hidden**0.5 / 32) * 32))

    wider = head_dim / 64
    first = TimeMix(
        hidden // head_dim,
        head_dim,
        hidden,
        rank("decay_low_rank_dim", 2.5 * wider),
        rank("a_low_rank_dim", 2.5 * wider),
        rank("gate_low_rank_dim", 5.0),
        0,
    )
    later = replace(first, value_rank=rank("v_low_rank_dim", 1.7 * wider))
    ratio = keys.number("hidden_ratio", 4.0)
    channels = ChannelMix(hidden, keys.integer("intermediate_size", ceil_div(int(hidden * ratio), 32) * 32))
    pair: list[Mixer] = [later, channels]
    mixers = [first, channels, *pair * (count - 1)]
    return build_architecture(
        family, keys, mixers, [None] * len(mixers), eps=keys.number("norm_eps", 1e-5), residual=LayerNorms()
    )


def _refuse(keys: ConfigKeys, hidden: int, heads: int) -> None:
    if keys.integer("num_heads", heads) != heads:
        fail("num_heads", keys.get("num_heads"), f"hidden_size {hidden} has {heads} heads of head_dim")
    keys.only(norm_first=True, norm_bias=True)
    if keys.get("attn") is not None:
        fail("attn", keys.get("attn"), "layers of attention are not served in this family")
    widths = keys.get("value_dim", hidden)
    if any(width != hidden for width in (widths if isinstance(widths, list) else [widths])):
        fail("value_dim", widths, f"values as wide as the stream are served, {hidden}")


_NAMES = Names(
    layer_reader="weft.models.blocks.rwkv:layer_reader",
    ends_reader="weft.models.blocks.rwkv:ends_reader",
    final_norm="",
    embeddings=("embeddings",),
)
FAMILIES = (Family("rwkv7", ("rwkv7",), read_rwkv7, "sqrelu", _NAMES),)
