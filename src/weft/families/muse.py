"""Muse Glimmer and Muse Spark: the layer of Gemma 2 with gated attention, whose queries and keys have norms without
weights.

Queries have a constant factor next to the usual scale. Every fourth layer, counted from the last, sees the whole text
and has no positions. The embedding passes a norm without a weight; norms after blocks have an epsilon of their own.

Muse Spark also norms the output of each head, adds blocks by learned shares (``residuals.GatedSums``), and has experts
in a latent width, whose outputs are normed one by one.

Sources: transformers ``MuseGlimmerTextConfig`` and ``MuseGlimmerTextModel``, ``MuseSparkTextConfig`` and
``MuseSparkTextModel`` (5.24); their defaults are used here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from weft.families.architecture import Architecture
from weft.families.config_keys import ConfigKeys, fail, read_rope
from weft.families.decoders import FULL_KIND, Decoder, sizes
from weft.families.mixers.attention import Attention
from weft.families.mixers.feed_forward import Dense, Experts, FeedForward
from weft.families.names import Names
from weft.families.reading import WINDOW_KIND, Family, experts_per_token
from weft.families.residuals import GatedSums, NormedEmbedding


def _still(count: int) -> list[bool]:
    """Return which layers see the whole text, and have no positions, where config.json does not say."""
    return [(count - 1 - layer) % 4 == 0 for layer in range(count)]


def _turning(keys: ConfigKeys, count: int, theta: float) -> list[bool]:
    """Return which layers have positions. transformers turns all of them by ``rope_theta``, whatever base is listed."""
    listed = keys.get("layer_rope_theta")
    if listed is None:
        return [not still for still in _still(count)]
    if not isinstance(listed, list) or len(listed) != count:
        fail("layer_rope_theta", listed, f"it must list a base for each of the {count} layers")
    theta = read_rope(keys, keys.integer("head_dim"), theta=theta, partial=1.0).theta
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


_GLIMMER = Decoder(
    defaults=sizes(202_048, 6656, 19_968, 52, 32, 2, 131_072)
    | {"head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 2048},
    attention={"qk_norm": True, "norm_plain": True, "gated": True},
    attention_of=lambda keys: _query_scale(keys, 3.87),
    kinds=lambda keys, count: [FULL_KIND if still else WINDOW_KIND for still in _still(count)],
    residual=lambda keys: NormedEmbedding(out_norms=True, out_eps=keys.number("post_norm_eps", 1e-8)),
    more=lambda keys: _logits(keys, 0.19611613513818404),
    only={"hidden_activation": "silu", "attention_bias": False, "mlp_bias": False},
)


def _gated_sums(keys: ConfigKeys) -> GatedSums:
    temperature = keys.number("residual_gate_temperature", 0.3)
    if temperature <= 0:
        fail("residual_gate_temperature", temperature, "it must be above 0")
    return GatedSums(out_norms=True, out_eps=keys.number("post_norm_eps", 1e-8), temperature=temperature)


def _spark_feed(keys: ConfigKeys, layer: int) -> FeedForward:
    layers = keys.integer("num_hidden_layers")
    kinds = keys.get("mlp_layer_types", ["sparse"] * layers)
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {"dense", "sparse"}:
        fail("mlp_layer_types", kinds, f"it must say dense or sparse for each of the {layers} layers")
    if kinds[layer] == "dense":
        return Dense(keys.integer("intermediate_size"))
    count = keys.integer("num_local_experts", 256)
    return Experts(
        count,
        experts_per_token(keys, count, 8),
        keys.integer("moe_intermediate_size", 4096),
        normalized=True,
        scoring="sigmoid",
        choice_bias=True,
        scale=keys.number("routed_scaling_factor", 1.0),
        normalizer_eps=1e-15,
        latent_width=keys.integer("moe_hidden_size", 4096),
        each_normed=True,
        score_factor=keys.number("output_multiplier", _SPARK_LOGITS),
    )


_SPARK_LOGITS = 0.1767766952966369
_SPARK = replace(
    _GLIMMER,
    defaults=sizes(202_048, 8192, 16_384, 62, 128, 16, 1_048_576)
    | {"head_dim": 64, "rms_norm_eps": 1e-5, "sliding_window": 2048},
    theta=500_000.0,
    attention={**_GLIMMER.attention, "out_normed": True},
    attention_of=lambda keys: _query_scale(keys, 5.4730064863875),
    residual=_gated_sums,
    more=lambda keys: _logits(keys, _SPARK_LOGITS),
    only={"attention_bias": False},
    feed=_spark_feed,
)


def read_muse(family: str, keys: ConfigKeys, decoder: Decoder) -> Architecture:
    """Read either, of whose layers those without a base have no positions."""
    architecture, mixers = decoder(family, keys), []
    turning = _turning(decoder.keys(keys), architecture.layer_count, decoder.theta)
    for mixer, turns in zip(architecture.mixers, turning, strict=True):
        assert isinstance(mixer, Attention)
        mixers.append(mixer if turns else replace(mixer, rope=None))
    return replace(architecture, mixers=tuple(mixers))


_NAMES = Names(
    {Attention: "self_attn"},
    feed_norm="pre_feedforward_layernorm",
    out_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    plus_one=True,
    norm_offsets={"norm": 0.0},
    spelled={Attention: {"gate": "gate_proj"}},
    ends_reader="weft.models.blocks.plain:normed_embedding",
)
_TOWERS = (r"^model\.(vision_adapter|vision_projection)\.", r"vision_tower.\1.")
FAMILIES = (
    Family(
        "muse_glimmer", ("muse_glimmer_text",), partial(read_muse, decoder=_GLIMMER), names=_NAMES, released=(_TOWERS,)
    ),
    Family(
        "muse_spark",
        ("muse_spark_text",),
        partial(read_muse, decoder=_SPARK),
        names=replace(
            _NAMES,
            norm_offsets={"norm": 0.0, "post_feedforward_layernorm": 1.0},
            spelled={**_NAMES.spelled, Experts: {"exact_router": True}},
            layer_reader="weft.models.blocks.gated_sums:gated_layers",
        ),
        released=(
            _TOWERS,
            (r"\.pre_expert_proj\.", ".fc1_latent_proj."),
            (r"\.post_expert_proj\.", ".fc2_latent_proj."),
        ),
    ),
)
