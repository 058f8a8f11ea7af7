"""gpt-oss: attention with sinks in every layer, every other layer over a window; experts with biases.

A sink is a score that each head has learned. It takes part in the sum of the softmax and adds no value, so a
head may look at nothing. Experts multiply (up + 1) by a clamped, gated activation.

Source: transformers ``GptOssConfig`` and ``GptOssForCausalLM``; its defaults are used here.
"""

from __future__ import annotations

from dataclasses import replace

from weft.families import reading
from weft.families.architecture import Architecture
from weft.families.config_keys import ConfigKeys, fail, read_rope
from weft.families.mixers.attention import Attention, Rope
from weft.families.mixers.feed_forward import Experts
from weft.families.names import Names
from weft.families.reading import WINDOW_KIND, Family, build_architecture, read_attention, windowed

MAX_POSITIONS = 131_072
SERVED = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""Settings of ``clamped_swiglu`` that its kernels have as constants."""


def read_gpt_oss(family: str, keys: ConfigKeys) -> Architecture:
    count = keys.integer("num_hidden_layers", 36)
    keys.only(**SERVED)
    kinds = reading.kinds_with_windows(
        keys, ("full_attention", WINDOW_KIND), ["full_attention" if i % 2 else WINDOW_KIND for i in range(count)]
    )
    plain = read_attention(keys, rotary=False, head_dim=64)
    full = replace(plain, rope=_rope(keys, plain.head_dim), sinks=True, bias=keys.boolean("attention_bias", True))
    window = full
    if reading.states_window(keys):
        window = windowed(full, keys, default=128)
    elif WINDOW_KIND in kinds:
        fail("layer_types", WINDOW_KIND, "sliding_window says that there is no window")
    experts = keys.integer("num_local_experts", keys.integer("num_experts", 128))
    chosen = reading.experts_per_token(keys, experts, keys.integer("experts_per_token", 4))
    feed = Experts(
        count=experts,
        per_token=chosen,
        width=keys.integer("intermediate_size", 2880),
        normalized=True,
        activation="clamped_swiglu",
        bias=True,
    )
    return build_architecture(
        family,
        keys,
        [window if kind == WINDOW_KIND else full for kind in kinds],
        [feed] * count,
        default_eps=1e-5,
        max_positions=MAX_POSITIONS,
    )


def _rope(keys: ConfigKeys, head_dim: int) -> Rope:
    """Return the rotary settings: if config.json does not say, YaRN with a factor of 32 over 4,096 positions."""
    theta = 150_000.0
    if keys.get("rope_scaling") or keys.get("rope_parameters"):
        return read_rope(keys, head_dim, theta=theta, partial=1.0)
    silent = ConfigKeys(
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
                "rope_theta": keys.number("rope_theta", theta),
            },
            "max_position_embeddings": keys.integer("max_position_embeddings", MAX_POSITIONS),
        },
        fallback={},
    )
    return read_rope(silent, head_dim, theta=theta, partial=1.0)


_NAMES = Names({Attention: "self_attn"}, spelled={Experts: {"router": "router.weight", "paired": True}})
FAMILIES = (Family("gpt_oss", ("gpt_oss",), read_gpt_oss, names=_NAMES),)
