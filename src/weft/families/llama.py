"""Llama and Mistral: attention in every layer and SwiGLU; Mistral's first releases with a window."""

from __future__ import annotations

from weft.families.architecture import Architecture, Dense
from weft.families.config_keys import ConfigKeys, fail
from weft.families.reading import Family, build_architecture, read_attention, states_window, windowed


def read_llama(family: str, keys: ConfigKeys) -> Architecture:
    if keys.boolean("mlp_bias", False):
        fail("mlp_bias", True, "feed-forwards with a bias are not served")
    return _read(family, keys, window=False, max_positions=2048)


def read_mistral(family: str, keys: ConfigKeys) -> Architecture:
    """``sliding_window`` is 4096 where config.json is silent, and none where it says null."""
    return _read(family, keys, window=states_window(keys), max_positions=131_072)


def _read(family: str, keys: ConfigKeys, *, window: bool, max_positions: int) -> Architecture:
    count = keys.integer("num_hidden_layers")
    attention = read_attention(keys)
    if window:
        attention = windowed(attention, keys, default=4096, max_positions=max_positions)
    dense = Dense(keys.integer("intermediate_size"))
    return build_architecture(family, keys, [attention] * count, [dense] * count,
                              tied=keys.boolean("tie_word_embeddings", False),
                              eps=keys.number("rms_norm_eps", 1e-6), max_positions=max_positions)


FAMILIES = (
    Family("llama", ("llama",), read_llama, builder="llama"),
    Family("llama", ("mistral",), read_mistral, builder="llama"),
)
