"""Attention in every layer: Llama and Mistral, Qwen3 (dense and sparse), OLMo 3. Some layers with a window.

OLMo's attention norms queries and keys over all heads at once, and what comes out of a layer.
"""

from __future__ import annotations

from dataclasses import replace

from weft.families import reading
from weft.families.architecture import Architecture, Attention, Dense, Experts, FeedForward
from weft.families.config_keys import ConfigKeys, fail, read_rope
from weft.families.reading import WINDOW_KIND, Family, build_architecture, read_attention, windowed


def read_llama(family: str, keys: ConfigKeys) -> Architecture:
    if keys.boolean("mlp_bias", False):
        fail("mlp_bias", True, "feed-forwards with a bias are not served")
    return _llama(family, keys, window=False, max_positions=2048)


def read_mistral(family: str, keys: ConfigKeys) -> Architecture:
    """``sliding_window`` is 4096 where config.json is silent, and none where it says null."""
    return _llama(family, keys, window=reading.states_window(keys), max_positions=131_072)


def _llama(family: str, keys: ConfigKeys, *, window: bool, max_positions: int) -> Architecture:
    count = keys.integer("num_hidden_layers")
    attention = read_attention(keys)
    if window:
        attention = windowed(attention, keys, default=4096)
    dense = Dense(keys.integer("intermediate_size"))
    return build_architecture(family, keys, [attention] * count, [dense] * count, max_positions=max_positions)


def read_qwen3(family: str, keys: ConfigKeys) -> Architecture:
    """Dense and mixture of experts. Windows, where ``use_sliding_window`` says so: the layers that
    ``layer_types`` names, or those from ``max_window_layers`` on; in the sparse models all."""
    count = keys.integer("num_hidden_layers")
    sparse = _expert_count(keys) > 0
    full = read_attention(keys, qk_norm=True, head_dim=None if sparse else 128)
    windows = keys.boolean("use_sliding_window", False) and reading.states_window(keys)
    first = 0 if sparse else keys.integer("max_window_layers", 28, least=0)
    kinds = reading.kinds_with_windows(
        keys,
        ("full_attention", WINDOW_KIND),
        [WINDOW_KIND if windows and i >= first else "full_attention" for i in range(count)],
    )
    if WINDOW_KIND in kinds and not windows:
        fail("layer_types", WINDOW_KIND, "use_sliding_window and sliding_window say that there is no window")
    window = windowed(full, keys, default=4096) if windows else full
    return build_architecture(
        family,
        keys,
        [window if kind == WINDOW_KIND else full for kind in kinds],
        [qwen_feed_forward(keys, layer, shared=False) for layer in range(count)],
        max_positions=32768,
    )


def _expert_count(keys: ConfigKeys) -> int:
    return keys.integer("num_experts", keys.integer("num_local_experts", 0, least=0), least=0)


def qwen_feed_forward(keys: ConfigKeys, layer: int, *, shared: bool) -> FeedForward:
    """``shared``: the families with a shared expert; they normalise weights where config.json is silent."""
    count = _expert_count(keys)
    sparse = count > 0 and (layer + 1) % keys.integer("decoder_sparse_step", 1) == 0
    if not sparse or layer in (keys.get("mlp_only_layers") or ()):
        return Dense(keys.integer("intermediate_size"))
    return Experts(
        count=count,
        per_token=reading.experts_per_token(keys, count),
        width=keys.integer("moe_intermediate_size"),
        normalized=keys.boolean("norm_topk_prob", shared),
        shared_width=keys.integer("shared_expert_intermediate_size") if shared else 0,
        shared_gate=shared,
    )


def read_olmo3(family: str, keys: ConfigKeys) -> Architecture:
    """The rotary scaling of a release is for its full layers; window layers turn at the plain base."""
    count = keys.integer("num_hidden_layers")
    kinds = reading.kinds_with_windows(
        keys,
        ("full_attention", WINDOW_KIND),
        ["full_attention" if (i + 1) % 4 == 0 else WINDOW_KIND for i in range(count)],
    )
    plain = read_attention(keys, rotary=False, qk_norm=True)

    def turned(kind: str, *, scaled: bool) -> Attention:
        rope = read_rope(keys, plain.head_dim, theta=500_000.0, partial=1.0, layer_kind=kind, scaled=scaled)
        return replace(plain, rope=rope, norm_whole=True)

    full = turned("full_attention", scaled=True)
    window = windowed(turned(WINDOW_KIND, scaled=False), keys, default=4096)
    dense = Dense(keys.integer("intermediate_size"))
    return build_architecture(
        family,
        keys,
        [window if kind == WINDOW_KIND else full for kind in kinds],
        [dense] * count,
        default_eps=1e-5,
        max_positions=2048,
    )


FAMILIES = (
    Family("llama", ("llama",), read_llama),
    Family("llama", ("mistral",), read_mistral),
    Family("qwen3", ("qwen3", "qwen3_moe"), read_qwen3),
    Family("olmo3", ("olmo3",), read_olmo3),
)
