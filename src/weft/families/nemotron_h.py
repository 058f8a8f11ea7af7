"""Nemotron-H: layers that are one thing each, Mamba-2, attention, squared-relu feed-forward or experts.

Which is which stands in ``hybrid_override_pattern`` (M, *, -, E) or in a list of names.

The step of its Mamba-2 layers is clamped to ``time_step_limit``, for prompts and for single tokens alike.
``time_step_min`` bounds the initialisation alone. transformers clamps prompts (only) to it; the model was
trained without, and perplexity suffers from it (docs/models.md).
"""

from __future__ import annotations

from weft.families.architecture import (
    Architecture,
    Attention,
    Dense,
    Experts,
    FeedForward,
    Mamba2,
    Mixer,
    MtpLayer,
)
from weft.families.config_keys import ConfigKeys, fail
from weft.families.reading import Family, build_architecture, check_mamba2, experts_per_token, read_attention

_PATTERN = {"M": "recurrent", "*": "attention", "-": "dense", "E": "experts"}
_NAMES = {"mamba": "recurrent", "linear_attention": "recurrent", "attention": "attention",
          "full_attention": "attention", "mlp": "dense", "moe": "experts"}


def read_nemotron_h(family: str, keys: ConfigKeys) -> Architecture:
    for key in ("mlp_hidden_act", "mamba_hidden_act"):
        served = "relu2" if key == "mlp_hidden_act" else "silu"
        if keys.get(key, served) != served:
            fail(key, keys.get(key), f"only {served} is served")
    if keys.get("sliding_window") is not None:
        fail("sliding_window", keys.get("sliding_window"), "only full attention is served in this family")
    kinds, attention = _kinds(keys), _attention(keys)
    mixers: dict[str, Mixer] = {"recurrent": _mamba(keys), "attention": attention}
    feeds: dict[str, FeedForward] = {}
    if "dense" in kinds:
        feeds["dense"] = Dense(keys.integer("intermediate_size", 21504), "relu2", gated=False,
                               bias=keys.boolean("mlp_bias", False))
    if "experts" in kinds:
        feeds["experts"] = _experts(keys)
    return build_architecture(family, keys, [mixers.get(kind) for kind in kinds],
                              [feeds.get(kind) for kind in kinds],
                              tied=keys.boolean("tie_word_embeddings", False),
                              eps=keys.number("layer_norm_epsilon", keys.number("rms_norm_eps", 1e-5)),
                              max_positions=4096, residual_float32=keys.boolean("residual_in_fp32", False),
                              mtp=_mtp(keys, attention))


def _mtp(keys: ConfigKeys, attention: Attention) -> MtpLayer | None:
    """Nemotron 3: one head of an attention layer and an experts layer. Other heads are not served."""
    if keys.integer("num_nextn_predict_layers", 0, least=0) != 1:
        return None
    kinds = keys.get("mtp_layers_block_type", keys.get("mtp_hybrid_override_pattern", ""))
    names = [(_NAMES if isinstance(kinds, list) else _PATTERN).get(kind) for kind in kinds]
    return MtpLayer(attention, _experts(keys)) if names == ["attention", "experts"] else None


def _kinds(keys: ConfigKeys) -> list[str]:
    pattern = keys.get("hybrid_override_pattern")
    listed = keys.get("layers_block_type", keys.get("layer_types"))
    name, table, kinds = "layers_block_type", _NAMES, listed
    if listed is None:
        name, table, kinds = "hybrid_override_pattern", _PATTERN, pattern
    if not isinstance(kinds, (str, list)) or not kinds:
        fail(name, kinds, "it must give the kind of each layer")
    for kind in kinds:
        if kind not in table:
            fail(name, kind, f"the layer kinds served are {', '.join(table)}")
    return [table[kind] for kind in kinds]


def _attention(keys: ConfigKeys) -> Attention:
    """Older files say ``attention_head_dim``. No positions."""
    return read_attention(keys, rotary=False, head_dim=keys.integer("attention_head_dim", 128))


def _mamba(keys: ConfigKeys) -> Mamba2:
    def first(new: str, old: str) -> str:
        return old if keys.get(old) is not None else new

    groups = first("n_groups", "mamba_n_groups")
    mamba = Mamba2(heads=keys.integer("mamba_num_heads", 128), head_dim=keys.integer("mamba_head_dim", 64),
                   groups=keys.integer(groups, 8), state_dim=keys.integer("ssm_state_size", 128),
                   conv_kernel=keys.integer(first("conv_kernel", "mamba_d_conv"), 4),
                   conv_bias=keys.boolean(first("use_conv_bias", "mamba_conv_bias"), True),
                   projection_bias=keys.boolean("use_bias", False),
                   dt_limit=keys.limits(first("time_step_limit", "mamba_dt_limit"), (0.0, float("inf"))))
    return check_mamba2(mamba, mamba.inner_width, "mamba_num_heads x mamba_head_dim",
                        heads="mamba_num_heads", groups=groups)


def _experts(keys: ConfigKeys) -> Experts:
    count = keys.integer("n_routed_experts", 8)
    groups = keys.integer("n_group", 1)
    if count % groups:
        fail("n_group", groups, f"it must divide n_routed_experts {count}")
    latent = keys.integer("moe_latent_size", 0, least=0)
    if latent and keys.boolean("mlp_bias", False):
        fail("mlp_bias", True, "a bias on latent projections is not served")
    return Experts(count=count, per_token=experts_per_token(keys, count, default=2),
                   width=keys.integer("moe_intermediate_size", 7688),
                   normalized=keys.boolean("norm_topk_prob", True),
                   shared_width=keys.integer("moe_shared_expert_intermediate_size", 7688),
                   scoring="sigmoid", choice_bias=True, scale=keys.number("routed_scaling_factor", 1.0),
                   normalizer_eps=1e-20, groups=groups, groups_chosen=keys.integer("topk_group", 1),
                   activation="relu2", gated=False, latent_width=latent)


FAMILIES = (
    Family("nemotron_h", ("nemotron_h",), read_nemotron_h, builder="nemotron_h"),
)
