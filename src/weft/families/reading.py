"""What the readers of all families share: layer kinds, attention, and the record they fill.

Layer kinds come by many names (``layer_types``, ``layers_block_type``; "mamba" / "attention",
"linear_attention" / "full_attention"); they are "attention" or "recurrent" from here on. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.architecture import Architecture, Attention, FeedForward, Mixer
from weft.config_keys import ConfigKeys, fail, read_rope

KINDS = {"full_attention": "attention", "attention": "attention",
         "linear_attention": "recurrent", "mamba": "recurrent", "mamba2": "recurrent",
         "conv": "recurrent", "short_conv": "recurrent"}


def layer_kinds(keys: ConfigKeys, fallback: Callable[[int], Sequence[str]]) -> list[str]:
    """"attention" or "recurrent" for each layer, from the names the checkpoint uses, else ``fallback``."""
    count = keys.integer("num_hidden_layers")
    name = "layer_types" if keys.get("layer_types") is not None else "layers_block_type"
    listed = keys.get(name)
    if listed is None:
        return list(fallback(count))
    if not isinstance(listed, list) or len(listed) != count:
        fail(name, listed, f"it must list the kind of each of the {count} layers")
    for kind in listed:
        if kind not in KINDS:
            fail(name, kind, f"the layer kinds served are {', '.join(sorted(KINDS))}")
    return [KINDS[kind] for kind in listed]


def every_nth_attention(keys: ConfigKeys) -> Callable[[int], Sequence[str]]:
    interval = keys.integer("full_attention_interval", 4)
    return lambda count: ["attention" if (i + 1) % interval == 0 else "recurrent" for i in range(count)]


def read_attention(keys: ConfigKeys, *, rotary: bool = True, partial: float = 1.0, theta: float = 10000.0,
               scale: float | None = None, head_dim: int | None = None, qk_norm: bool = False,
               gated: bool = False) -> Attention:
    heads = keys.integer("num_attention_heads")
    kv_heads = keys.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        fail("num_key_value_heads", kv_heads, f"it must divide num_attention_heads {heads}")
    head_dim = keys.integer("head_dim", head_dim or keys.integer("hidden_size") // heads)
    rope = read_rope(keys, head_dim, theta=theta, partial=partial) if rotary else None
    return Attention(heads, kv_heads, head_dim, scale if scale is not None else head_dim**-0.5, rope,
                     qk_norm=qk_norm, gated=gated, bias=keys.boolean("attention_bias", False))


def build_architecture(family: str, keys: ConfigKeys, mixers: Sequence[Mixer],
                  feed_forwards: Sequence[FeedForward], *, tied: bool = False, eps: float = 1e-6,
                  max_positions: int | None = None, **multipliers: float) -> Architecture:
    return Architecture(
        family=family, vocab_size=keys.integer("vocab_size"), hidden_size=keys.integer("hidden_size"),
        max_positions=keys.integer("max_position_embeddings", max_positions),
        dtype=keys.dtype() or "float32",
        norm_eps=eps, tied_embeddings=tied, mixers=tuple(mixers), feed_forwards=tuple(feed_forwards),
        **multipliers)


def experts_per_token(keys: ConfigKeys, count: int) -> int:
    chosen = keys.integer("num_experts_per_tok")
    if chosen > count:
        fail("num_experts_per_tok", chosen, f"the model has {count} experts")
    return chosen
