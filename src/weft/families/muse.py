"""Muse Glimmer: the layer of Gemma 2 with gated attention, whose queries and keys have norms without weights.

Queries have a constant factor next to the usual scale. Every fourth layer, counted from the last, sees the whole text
and has no positions. The embedding passes a norm without a weight; norms after blocks have an epsilon of their own.

Source: transformers ``MuseGlimmerTextConfig`` and ``MuseGlimmerTextModel`` (5.24); their defaults are used here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.families.architecture import Architecture
from weft.families.config_keys import ConfigKeys, fail, read_rope
from weft.families.decoders import FULL_KIND, Decoder, sizes
from weft.families.mixers.attention import Attention
from weft.families.names import Names
from weft.families.reading import WINDOW_KIND, Family
from weft.families.residuals import NormedEmbedding


def _still(count: int) -> list[bool]:
    """Return which layers see the whole text, and have no positions, where config.json does not say."""
    return [(count - 1 - layer) % 4 == 0 for layer in range(count)]


def _turning(keys: ConfigKeys, count: int) -> list[bool]:
    """Return which layers have positions. transformers turns all of them by ``rope_theta``, whatever base is listed."""
    listed = keys.get("layer_rope_theta")
    if listed is None:
        return [not still for still in _still(count)]
    if not isinstance(listed, list) or len(listed) != count:
        fail("layer_rope_theta", listed, f"it must list a base for each of the {count} layers")
    theta = read_rope(keys, keys.integer("head_dim"), theta=10_000.0, partial=1.0).theta
    for base in listed:
        if base not in (0, theta):
            fail("layer_rope_theta", base, f"a layer turns by rope_theta {theta:g}, or not at all (0)")
    return [bool(base) for base in listed]


def _query_scale(keys: ConfigKeys, default: float) -> Mapping[str, Any]:
    head_dim = keys.integer("head_dim")
    return {"scale": head_dim**-0.5 * keys.number("qk_scale_factor", default)}


def _logits(keys: ConfigKeys, default: float) -> Mapping[str, Any]:
    factor, cap = keys.number("output_multiplier", default), keys.number("final_logit_softcapping", 20.0)
    for key, value in (("output_multiplier", factor), ("final_logit_softcapping", cap)):
        if value <= 0:
            fail(key, value, "it must be above 0")
    return {"logits_divisor": 1 / factor, "logits_cap": cap}


def read_glimmer(family: str, keys: ConfigKeys) -> Architecture:
    decoder = Decoder(
        defaults=sizes(202_048, 6656, 19_968, 52, 32, 2, 131_072)
        | {"head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 2048},
        attention={"qk_norm": True, "norm_plain": True, "gated": True},
        attention_of=lambda keys: _query_scale(keys, 3.87),
        kinds=lambda keys, count: [FULL_KIND if still else WINDOW_KIND for still in _still(count)],
        residual=lambda keys: NormedEmbedding(out_norms=True, out_eps=keys.number("post_norm_eps", 1e-8)),
        more=lambda keys: _logits(keys, 0.19611613513818404),
        only={"hidden_activation": "silu", "attention_bias": False, "mlp_bias": False},
    )
    architecture, mixers = decoder(family, keys), []
    turning = _turning(decoder.keys(keys), architecture.layer_count)
    for mixer, turns in zip(architecture.mixers, turning, strict=True):
        assert isinstance(mixer, Attention)
        mixers.append(mixer if turns else replace(mixer, rope=None))
    return replace(architecture, mixers=tuple(mixers))


FAMILIES = (
    Family(
        "muse_glimmer",
        ("muse_glimmer_text",),
        read_glimmer,
        names=Names(
            {Attention: "self_attn"},
            feed_norm="pre_feedforward_layernorm",
            out_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
            plus_one=True,
            norm_offsets={"norm": 0.0},
            spelled={Attention: {"gate": "gate_proj"}},
            ends_reader="weft.models.blocks.plain:normed_embedding",
        ),
        released=((r"^model\.(vision_adapter|vision_projection)\.", r"vision_tower.\1."),),
    ),
)
