"""Lightning attention beside softmax attention: MiniMax-Text-01.

A state for each head that forgets at a rate of its own, the same for every token: the later the layer and the
head, the slower. Queries, keys and values pass a silu; a norm over all heads and a gate follow. The stream is
what the norm in front of a block gives, so a layer forgets what came in before it.

    x = norm(x);   x = alpha x + beta block(x)

Source: Qin et al., "Lightning Attention-2" (2024); transformers ``MiniMaxConfig`` and ``MiniMaxForCausalLM``,
whose defaults stand here.
"""

from __future__ import annotations

from dataclasses import replace

from weft.families import reading
from weft.families.architecture import Architecture, Experts, Lightning
from weft.families.config_keys import ConfigKeys, fail
from weft.families.reading import Family, build_architecture, read_attention, windowed


def read_minimax(family: str, keys: ConfigKeys) -> Architecture:
    keys = keys.with_defaults(
        vocab_size=32_000, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131_072, num_local_experts=8,
        num_experts_per_tok=2)
    count = keys.integer("num_hidden_layers")
    kinds = reading.layer_kinds(keys, lambda count: [
        "recurrent" if i % 2 else "attention" for i in range(count)])
    head_dim = keys.integer("head_dim", keys.integer("hidden_size") // keys.integer("num_attention_heads"))
    turning = keys.integer("rotary_dim", head_dim)
    if turning > head_dim:
        fail("rotary_dim", turning, f"heads have {head_dim} dims")
    full = replace(read_attention(keys, theta=1e6, partial=turning / head_dim), bias=False)
    if keys.get("sliding_window") is not None:
        full = windowed(full, keys)
    factors = [1 - layer / (count - 1 + 1e-5) + 1e-5 for layer in range(count)]
    experts = keys.integer("num_local_experts", keys.integer("num_experts", 8))
    feed = Experts(count=experts, per_token=reading.experts_per_token(keys, experts),
                   width=keys.integer("intermediate_size"), normalized=True)

    def pair(name: str) -> tuple[float, float]:
        return keys.number(f"{name}_alpha_factor", 1.0), keys.number(f"{name}_beta_factor", 1.0)

    of_kind = {"attention": pair("full_attn"), "recurrent": pair("linear_attn")}
    mixers = [full if kind == "attention" else Lightning(full.heads, full.head_dim, factor)
              for kind, factor in zip(kinds, factors, strict=True)]
    return build_architecture(family, keys, mixers, [feed] * count, default_eps=1e-5,
                              normed_stream=tuple((*of_kind[kind], *pair("mlp")) for kind in kinds))


FAMILIES = (
    Family("minimax", ("minimax",), read_minimax),
)
