"""Nemotron-H: layers of one block each, Mamba-2 or attention or a feed-forward.

``hybrid_override_pattern`` (M, *, -, E) or a list of names says which a layer has. ``block_configs`` (Puzzle) has the
sizes of each layer where they differ. The step is clamped to
``time_step_limit``, for prompts and for single tokens alike. ``time_step_min`` only bounds the initialisation.
transformers clamps prompts (only) to it; the models were trained without, and perplexity suffers from it
(docs/models.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from weft.families.architecture import Architecture, MtpLayer
from weft.families.config_keys import ConfigKeys, fail
from weft.families.mixers import Mixer
from weft.families.mixers.attention import Attention
from weft.families.mixers.feed_forward import Dense, Experts, FeedForward
from weft.families.mixers.mamba import Mamba2
from weft.families.names import Names
from weft.families.reading import (
    Family,
    build_architecture,
    check_mamba2,
    expert_groups,
    experts_per_token,
    read_attention,
)
from weft.families.residuals import Residual

_PATTERN = {"M": "recurrent", "*": "attention", "-": "dense", "E": "experts"}


_NAMES = {
    "mamba": "recurrent",
    "linear_attention": "recurrent",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "dense",
    "moe": "experts",
}


def read_nemotron_h(family: str, keys: ConfigKeys) -> Architecture:
    keys.only(mlp_hidden_act="relu2", mamba_hidden_act="silu")
    own = _blocks(keys, "block_configs")
    kinds = _nemotron_kinds(keys) if own is None else _kinds_of(own, "block_configs")
    blocks = [_READERS[kind](of) for kind, of in zip(kinds, own or [keys] * len(kinds), strict=True)]
    return build_architecture(
        family,
        keys,
        [block if isinstance(block, Mixer) else None for block in blocks],
        [None if isinstance(block, Mixer) else block for block in blocks],
        eps=keys.number("layer_norm_epsilon", keys.number("rms_norm_eps", 1e-5)),
        max_positions=4096,
        residual=Residual(float32=keys.boolean("residual_in_fp32", False)),
        mtp=_nemotron_mtp(keys),
    )


def _blocks(keys: ConfigKeys, name: str) -> list[ConfigKeys] | None:
    """Return the keys of each block of the list ``name``, over those of the model (Puzzle); None without a list."""
    listed = keys.get(name)
    if listed is None:
        return None
    if not isinstance(listed, list) or not listed or not all(isinstance(block, Mapping) for block in listed):
        fail(name, listed, "it must list the settings of each layer")
    return [keys.over({key: value for key, value in block.items() if value is not None}) for block in listed]


def _kinds_of(blocks: Sequence[ConfigKeys], name: str) -> list[str]:
    kinds = [block.get("block_type") for block in blocks]
    for kind in kinds:
        if kind not in _NAMES:
            fail(f"{name}.block_type", kind, f"the layer kinds served are {', '.join(_NAMES)}")
    return [_NAMES[kind] for kind in kinds]


def _nemotron_mtp(keys: ConfigKeys) -> MtpLayer | None:
    """Return the head of Nemotron 3, of an attention layer and an experts layer; None for other heads, which are not
    served."""
    own = _blocks(keys, "mtp_block_configs") or []
    if keys.integer("num_nextn_predict_layers", int(bool(own)), least=0) != 1:
        return None
    if own:
        kinds = _kinds_of(own, "mtp_block_configs")
    else:
        listed = keys.get("mtp_layers_block_type", keys.get("mtp_hybrid_override_pattern", ""))
        kinds = [(_NAMES if isinstance(listed, list) else _PATTERN).get(kind, "") for kind in listed]
    if kinds != ["attention", "experts"]:
        return None
    attends, chooses = own or (keys, keys)
    return MtpLayer(_nemotron_attention(attends), _nemotron_experts(chooses))


def _nemotron_attention(keys: ConfigKeys) -> Attention:
    if keys.get("sliding_window") is not None:
        fail("sliding_window", keys.get("sliding_window"), "only full attention is served in this family")
    # Older files call the size of a head so.
    return read_attention(keys, rotary=False, head_dim=keys.integer("attention_head_dim", 128))


def _nemotron_dense(keys: ConfigKeys) -> Dense:
    width = keys.integer("intermediate_size", 21504)
    return Dense(width, "relu2", gated=False, bias=keys.boolean("mlp_bias", False))


def _nemotron_kinds(keys: ConfigKeys) -> list[str]:
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


def _nemotron_mamba(keys: ConfigKeys) -> Mamba2:
    def first(new: str, old: str) -> str:
        return old if keys.get(old) is not None else new

    groups = first("n_groups", "mamba_n_groups")
    mamba = Mamba2(
        heads=keys.integer("mamba_num_heads", 128),
        head_dim=keys.integer("mamba_head_dim", 64),
        groups=keys.integer(groups, 8),
        state_dim=keys.integer("ssm_state_size", 128),
        conv_kernel=keys.integer(first("conv_kernel", "mamba_d_conv"), 4),
        conv_bias=keys.boolean(first("use_conv_bias", "mamba_conv_bias"), True),
        projection_bias=keys.boolean("use_bias", False),
        dt_limit=keys.limits(first("time_step_limit", "mamba_dt_limit"), (0.0, float("inf"))),
    )
    return check_mamba2(
        mamba, mamba.inner_width, "mamba_num_heads x mamba_head_dim", heads="mamba_num_heads", groups=groups
    )


def _nemotron_experts(keys: ConfigKeys) -> Experts:
    count = keys.integer("n_routed_experts", 8)
    groups, chosen = expert_groups(keys, count, "n_group", keys.integer("n_group", 1))
    latent = keys.integer("moe_latent_size", 0, least=0)
    if latent and keys.boolean("mlp_bias", False):
        fail("mlp_bias", True, "a bias on latent projections is not served")
    return Experts(
        count=count,
        per_token=experts_per_token(keys, count, default=2),
        width=keys.integer("moe_intermediate_size", 7688),
        normalized=keys.boolean("norm_topk_prob", True),
        shared_width=keys.integer("moe_shared_expert_intermediate_size", 7688),
        scoring="sigmoid",
        choice_bias=True,
        scale=keys.number("routed_scaling_factor", 1.0),
        normalizer_eps=1e-20,
        groups=groups,
        groups_chosen=chosen,
        activation="relu2",
        gated=False,
        latent_width=latent,
    )


_READERS: dict[str, Callable[[ConfigKeys], Mixer | FeedForward]] = {
    "recurrent": _nemotron_mamba,
    "attention": _nemotron_attention,
    "dense": _nemotron_dense,
    "experts": _nemotron_experts,
}
# Each layer is one block. Hub releases keep each expert by itself; transformers saves two tensors.
_NEMOTRON = Names(
    {Attention: "mixer", Mamba2: "mixer"},
    feed="mixer",
    mixer_norm="norm",
    feed_norm="norm",
    final_norm="norm_f",
    embeddings=("embeddings",),
    swiglu=False,
    shared="shared_experts",
    spelled={Experts: {"exact_router": True}},
)
_TYPES = ("nemotron_h", "nemotron_h_puzzle")
FAMILIES = (Family("nemotron_h", _TYPES, read_nemotron_h, names=_NEMOTRON),)
