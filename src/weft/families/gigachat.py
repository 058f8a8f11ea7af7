"""GigaChat 3.5: gated delta nets and latent attention, with every norm gated by its own output.

    norm(x)      n = rms(x) (1 + w)        n factor sigmoid(out(silu(into(n))))        over a bottleneck of 16
    a layer      x += norm(mixer(norm(x)))          x += norm(feed(norm(x)))
    attention    positions stretched by YaRN in pairs of neighbours; the output times sigmoid(gate x)
                 the norms inside give sqrt(hidden / rank) times more  (alpha_q, alpha_kv)
    delta net    that of Qwen3-Next, whose output is normed and multiplied by 2 sigmoid(z)
    experts      as DeepSeek-V3, with limits on gate and up

Sources: ai-sage's releases as vLLM and SGLang compute them (``gigachat3_5.py``, ``gigachat35.py``), for the
defaults that of vLLM; transformers has no class.
"""

from __future__ import annotations

from dataclasses import replace

from weft.families.architecture import Architecture
from weft.families.config_keys import ConfigKeys, fail, read_rope
from weft.families.delta import (
    FeedDefaults,
    mtp_behind,
    read_gated_delta,
    read_kimi_feed_forwards,
    read_latent_attention,
    scale_of_rope,
)
from weft.families.mixers.delta import GatedDelta
from weft.families.mixers.feed_forward import Dense, Experts
from weft.families.mixers.latent_attention import LatentAttention
from weft.families.names import Names
from weft.families.reading import Family, build_architecture, layer_kinds
from weft.families.residuals import Residual
from weft.families.tensors import NormGate

GATE_RANK = 16
"""Width of the bottleneck of a norm's gate, numbers: no configuration names it."""
_FEED = FeedDefaults(3, 18_432, 256, 2048, 2.5, 1, 1)
_SERVED = {
    "norm_type": "ZeroCenteredGatedNorm",
    "layernorm_type": "pre_post",
    "attention_type": "LlamaLatentAttention",
    "linear_attention_type": "Qwen3NextGatedDeltaNet",
    "linear_use_legacy_qkvz_layout": False,
    "linear_use_short_conv": True,
    "rope_interleave": True,
    "num_krope_heads": 1,
    "use_shared_expert_sigmoid": False,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
"""Settings of which one value is served; silence means that value too."""
_GATES = ("gated_rmsnorm", "gated_rmsnorm_sigmoid", "gated_rmsnorm_sigmoid_zero_centered")


def read_gigachat3_5(family: str, keys: ConfigKeys) -> Architecture:
    keys.only(**_SERVED)
    rank = {} if keys.has("q_lora_rank") else {"q_lora_rank": 1536}  # null means no bottleneck
    keys = keys.with_defaults(
        vocab_size=128_256,
        hidden_size=7168,
        num_hidden_layers=40,
        num_attention_heads=64,
        max_position_embeddings=131_072,
        num_experts=keys.integer("n_routed_experts", _FEED.experts),
        **rank,
    )
    hidden, eps = keys.integer("hidden_size"), keys.number("rms_norm_eps", 1e-6)
    gate = NormGate(GATE_RANK, keys.number("layernorm_gating_weight", 2.0))
    residual = Residual(out_norms=True, gate=gate)
    attention, delta = _attention(keys, hidden, eps, gate), _delta(keys, eps)
    kinds = layer_kinds(keys, lambda count: _kinds(keys, count))
    limit = keys.number("swiglu_limit", 0.0)
    feeds = [replace(feed, limit=limit) for feed in read_kimi_feed_forwards(keys, len(kinds), _FEED)]
    dense = Dense(keys.integer("intermediate_size", _FEED.dense_width), limit=limit)
    of_head = feeds[-1] if keys.boolean("nextn_is_sparse", False) else dense
    return build_architecture(
        family,
        keys,
        [attention if kind == "attention" else delta for kind in kinds],
        feeds,
        residual=residual,
        mtp=mtp_behind(keys, attention, of_head, residual),
    )


def _kinds(keys: ConfigKeys, count: int) -> list[str]:
    full = keys.get("full_attention_layers", [])
    if not isinstance(full, list) or not set(full) <= set(range(count)):
        fail("full_attention_layers", full, f"it must list layers, counted from 0, of the {count}")
    return ["attention" if layer in full else "recurrent" for layer in range(count)]


def _attention(keys: ConfigKeys, hidden: int, eps: float, gate: NormGate) -> LatentAttention:
    latent = read_latent_attention(keys)
    scaled = keys.boolean("use_mla_scaling_factor", True)
    query = (hidden / latent.query_rank) ** 0.5 if scaled and latent.query_rank else 1.0
    return replace(
        latent,
        rope=read_rope(keys, latent.shared_dim, theta=1e5, partial=1.0),
        norm_eps=eps,
        norm_gate=gate,
        scale=latent.scale * scale_of_rope(keys),
        gated=keys.boolean("gated_attention", True),
        query_factor=query,
        latent_factor=(hidden / latent.latent_dim) ** 0.5 if scaled else 1.0,
    )


def _delta(keys: ConfigKeys, eps: float) -> GatedDelta:
    if (own := keys.number("linear_attn_o_norm_eps", eps)) != eps:
        fail("linear_attn_o_norm_eps", own, f"it must be rms_norm_eps, {eps}")
    kind = keys.get("linear_gating_type", _GATES[-1])
    if kind not in _GATES:
        fail("linear_gating_type", kind, f"{', '.join(_GATES)} are served")
    delta = read_gated_delta(keys, k_heads=32, v_heads=64)
    if kind == _GATES[0]:
        return delta
    return replace(
        delta,
        sigmoid_gate=True,
        gate_scale=keys.number("linear_sigmoid_gate_scale", 2.0),
        norm_plus_one=kind == _GATES[-1],
    )


_NAMES = Names(
    {GatedDelta: "self_attn", LatentAttention: "self_attn"},
    swiglu=False,
    plus_one=True,
    shared="shared_experts",
    out_norms=("post_self_attn_layernorm", "post_feedforward_layernorm"),
    spelled={GatedDelta: {"names": "by_key_head"}, Experts: {"exact_router": True}},
)
FAMILIES = (Family("gigachat3_5", ("gigachat3_5",), read_gigachat3_5, names=_NAMES),)
