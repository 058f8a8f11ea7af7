"""Kimi delta attention next to other attention: Kimi Linear, Kimi K3, AliceAI.

    Kimi Linear   KDA + latent attention                           experts
    Kimi K3       the same; gates, a floor of decays               experts in a latent width, norm of their sum; situ
    AliceAI       KDA + gated attention                            experts by sigmoids, a gated shared one

Blocks of the last two read an attention over sums of earlier layers (``residuals.AttentionResiduals``). The attention
of Kimi is latent and has no positions. Its released configurations keep the delta layers' numbers in
``linear_attn_config`` and count layers from 1; transformers writes them at top level, with ``layer_types`` and
``mlp_layer_types``. Both are read.

Sources: transformers' class of Kimi Linear; mlx-lm's ``kimi_k3`` and vLLM's ``alice_ai``, with their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weft.families.architecture import Architecture
from weft.families.attention import qwen_feed_forward
from weft.families.config_keys import ConfigKeys, fail
from weft.families.delta import KIMI_NAMES, read_kimi_feed_forwards, read_latent_attention
from weft.families.mixers.attention import Attention
from weft.families.mixers.delta import KimiDelta
from weft.families.mixers.feed_forward import Dense, Experts, FeedForward
from weft.families.mixers.latent_attention import LatentAttention
from weft.families.names import Names
from weft.families.reading import Family, build_architecture, every_nth_attention, layer_kinds, read_attention
from weft.families.residuals import PLAIN, AttentionResiduals, Residual


def read_kimi_linear(family: str, keys: ConfigKeys) -> Architecture:
    """Read Kimi Linear, whose settings are a part of Kimi K3's."""
    settings = keys.get("linear_attn_config") or {}
    inner = ConfigKeys(settings if isinstance(settings, Mapping) else {}, fallback={})
    floor = inner.number("gate_lower_bound", 0.0)
    if floor > 0:
        fail("linear_attn_config.gate_lower_bound", floor, "a floor of log decays is below 0")
    delta = KimiDelta(
        heads=inner.integer("num_heads", keys.integer("linear_num_heads", 32)),
        head_dim=inner.integer("head_dim", keys.integer("linear_head_dim", 128)),
        conv_kernel=inner.integer("short_conv_kernel_size", keys.integer("linear_conv_kernel_dim", 4)),
        wide_gate=inner.boolean("use_full_rank_gate", False),
        decay_floor=floor or None,
    )
    kinds = layer_kinds(keys, lambda count: _kimi_kinds(inner, count))
    if not keys.boolean("mla_use_nope", True):
        fail("mla_use_nope", False, "latent attention of this family with positions is not served")
    attention = replace(read_latent_attention(keys), gated=keys.boolean("mla_use_output_gate", False))
    return build_architecture(
        family,
        keys,
        [attention if kind == "attention" else delta for kind in kinds],
        [_as_k3_says(keys, feed) for feed in read_kimi_feed_forwards(keys, len(kinds))],
        default_eps=1e-5,
        max_positions=keys.integer("model_max_length", 1_048_576),
        residual=_residual(keys, "attn_res_block_size", eps=1e-5, first=True),
    )


_K3 = {
    "vocab_size": 163_840,
    "hidden_size": 7168,
    "num_hidden_layers": 93,
    "num_attention_heads": 96,
    "intermediate_size": 33_792,
    "hidden_act": "situ",
    "num_experts_per_token": 16,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
}


def read_kimi_k3(family: str, keys: ConfigKeys) -> Architecture:
    return read_kimi_linear(family, keys.with_defaults(**_K3))


def _as_k3_says(keys: ConfigKeys, feed: FeedForward) -> FeedForward:
    """Return ``feed`` with the activation and the latent width that ``keys`` state."""
    if keys.get("hidden_act", "silu") == "situ":
        caps = keys.number("activation_situ_beta", 1.0), keys.number("activation_situ_linear_beta", 0.0)
        feed = replace(feed, activation="situ", caps=caps)
    if isinstance(feed, Dense) or keys.get("routed_expert_hidden_size") is None:
        return feed
    normed = keys.boolean("latent_moe_use_norm", False)
    return replace(feed, latent_width=keys.integer("routed_expert_hidden_size"), latent_normed=normed)


def _residual(keys: ConfigKeys, key: str, *, eps: float, first: bool) -> Residual:
    """Return attention residuals over groups of the number of layers under ``key``; the usual form where it is null.
    ``first``: as of ``AttentionResiduals``."""
    if keys.get(key) is None:
        return PLAIN
    every = keys.integer(key)
    return AttentionResiduals(every=every, eps=keys.number("rms_norm_eps", eps), weighed=True, first=first)


def _kimi_kinds(inner: ConfigKeys, count: int) -> list[str]:
    full = inner.get("full_attn_layers")
    if full is None:
        return ["attention" if i and i % 4 == 0 else "recurrent" for i in range(count)]
    kinds = ["attention" if i + 1 in full else "recurrent" for i in range(count)]
    delta = inner.get("kda_layers", [i + 1 for i in range(count) if i + 1 not in full])
    if sorted([*full, *delta]) != list(range(1, count + 1)):
        fail(
            "linear_attn_config",
            {"full_attn_layers": full, "kda_layers": delta},
            f"together they must name each of the {count} layers once, counted from 1",
        )
    return kinds


def read_alice_ai(family: str, keys: ConfigKeys) -> Architecture:
    """Read AliceAI: every fourth layer is Qwen3-Next's attention. Its head for multi-token prediction reads the stream
    before the last norm, and is not read."""
    keys = keys.with_defaults(
        vocab_size=129_024, hidden_size=2048, num_hidden_layers=48, num_attention_heads=16, num_key_value_heads=2,
        max_position_embeddings=262_144, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512,
        shared_expert_intermediate_size=512, block_attn_res_block_size=4)  # fmt: skip
    keys.only(attn_output_gate=True, kda_allow_negative_eigenvalues=False, decoder_sparse_step=1)
    keys.only(router_score_function="sigmoid", router_bias_correction=True)
    if keys.get("mlp_only_layers"):
        fail("mlp_only_layers", keys.get("mlp_only_layers"), "every layer of this model has experts")
    heads, head_dim = keys.integer("linear_num_key_heads", 32), keys.integer("linear_key_head_dim", 128)
    keys.only(linear_num_value_heads=heads, linear_value_head_dim=head_dim)
    delta = KimiDelta(heads, head_dim, keys.integer("linear_conv_kernel_dim", 4))
    attention = read_attention(keys, qk_norm=True, gated=True, partial=0.25, head_dim=256, theta=1e6)
    kinds = layer_kinds(keys, every_nth_attention(keys))
    experts = qwen_feed_forward(keys, 0, shared=True, normalized=True)
    assert isinstance(experts, Experts)
    return build_architecture(
        family,
        keys,
        [attention if kind == "attention" else delta for kind in kinds],
        [replace(experts, scoring="sigmoid", choice_bias=True)] * len(kinds),
        residual=_residual(keys, "block_attn_res_block_size", eps=1e-6, first=False),
    )


_NAMES = replace(
    KIMI_NAMES,
    ends_reader="weft.models.spellings:sums_ends",
    mixes=("self_attention_res", "mlp_res"),
    last_mix="output_attn_res",
    spelled={LatentAttention: {"gate": "g_proj"}},
)
_K3_NAMES = replace(_NAMES, swiglu=False, spelled={**_NAMES.spelled, KimiDelta: {"flat": True}})
_ALICE_NAMES = Names(
    {Attention: "self_attn", KimiDelta: "linear_attn"},
    shared="shared_expert",
    plus_one=True,
    layer_reader="weft.models.spellings:summing_layers",
    ends_reader="weft.models.spellings:sums_ends",
    mixes=("attn_res", "mlp_res"),
    last_mix="attnres_final.res",
    spelled={KimiDelta: {"flat": True}},
)
FAMILIES = (
    Family("kimi_linear", ("kimi_linear",), read_kimi_linear, names=_NAMES),
    Family(
        "kimi_k3",
        ("kimi_k3",),
        read_kimi_k3,
        "situ",
        _K3_NAMES,
        (
            (r"^mm_projector\.", "multi_modal_projector."),
            (r"_res\.(proj|norm)_weight$", r"_res_\1.weight"),
            (r"\.routed_expert_down_proj\.", ".fc1_latent_proj."),
            (r"\.routed_expert_up_proj\.", ".fc2_latent_proj."),
            (r"\.routed_expert_norm\.", ".latent_norm."),
        ),
    ),
    Family(
        "alice_ai",
        ("alice_ai",),
        read_alice_ai,
        names=_ALICE_NAMES,
        released=((r"\.a_log_bias$", ".A_log"), (r"res_norm_weight$", "res_norm.weight")),
    ),
)
