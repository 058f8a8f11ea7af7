"""Mamba alone, and beside attention: Mamba, Falcon-Mamba, Mamba-2; Jamba; Bamba, Falcon-H1, Granite 4 H;
Nemotron-H; Zamba, Zamba2.

Nothing limits how long texts of the first three are: the state has one size, and KV takes no memory.
``POSITIONS`` is what is served unless ``--max-model-len`` says less. Nemotron-H has layers that are one thing
each; which is which stands in ``hybrid_override_pattern`` (M, *, -, E) or in a list of names. Zamba has
Mamba-1 in every layer, and beside some of them a transformer block that they share; Zamba2 has Mamba-2, and
few such blocks.

The step of Nemotron-H and Zamba2 is clamped to ``time_step_limit``, for prompts and for single tokens alike.
``time_step_min`` bounds the initialisation alone. transformers clamps prompts (only) to it; the models were
trained without, and perplexity suffers from it (docs/models.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

from weft.families.architecture import Architecture, MtpLayer
from weft.families.config_keys import ConfigKeys, fail, read_rope
from weft.families.mixers import Mixer
from weft.families.mixers.attention import Attention
from weft.families.mixers.combined import Parallel, SharedBlock
from weft.families.mixers.feed_forward import Dense, Experts, FeedForward
from weft.families.mixers.mamba import GatedNorm, InnerNorms, Mamba1, Mamba2
from weft.families.names import Names
from weft.families.reading import (
    Family,
    build_architecture,
    check_mamba2,
    expert_groups,
    experts_per_token,
    layer_kinds,
    read_attention,
    read_mamba2,
)
from weft.families.residuals import Residual
from weft.units import ceil_div

POSITIONS = 1 << 20


def read_mamba(family: str, keys: ConfigKeys) -> Architecture:
    """Falcon-Mamba is Mamba with norms inside. ``intermediate_size`` wins over ``expand``: Falcon-Mamba 7B
    states both, and they differ."""
    hidden = keys.integer("hidden_size")
    rank = step_rank(keys, "timestep_rank", hidden)
    norms: InnerNorms = "plain" if family == "falcon_mamba" else "none"
    mixer = Mamba1(
        channels=keys.integer("intermediate_size", int(keys.number("expand", 2.0) * hidden)),
        state_dim=keys.integer("state_size", 16),
        dt_rank=rank,
        conv_kernel=keys.integer("conv_kernel", 4),
        conv_bias=keys.boolean("use_conv_bias", True),
        projection_bias=keys.boolean("use_bias", False),
        inner_norms=norms,
        inner_eps=keys.number("mixer_rms_eps", 1e-6),
    )
    return _mamba_alone(family, keys, mixer, tied=True)


def read_mamba2_alone(family: str, keys: ConfigKeys) -> Architecture:
    mixer = Mamba2(
        heads=keys.integer("num_heads", 128),
        head_dim=keys.integer("head_dim", 64),
        groups=keys.integer("n_groups", 8),
        state_dim=keys.integer("state_size", 128),
        conv_kernel=keys.integer("conv_kernel", 4),
        conv_bias=keys.boolean("use_conv_bias", True),
        projection_bias=keys.boolean("use_bias", False),
        dt_limit=keys.limits("time_step_limit", (0.0, float("inf"))),
    )
    inner = int(keys.number("expand", 2.0) * keys.integer("hidden_size"))
    check_mamba2(mixer, inner, "expand x hidden_size", heads="num_heads", groups="n_groups")
    return _mamba_alone(family, keys, mixer, tied=False)


def _mamba_alone(family: str, keys: ConfigKeys, mixer: Mamba1 | Mamba2, *, tied: bool) -> Architecture:
    count = keys.integer("num_hidden_layers")
    return build_architecture(
        family,
        keys,
        [mixer] * count,
        [None] * count,
        tied=keys.boolean("tie_word_embeddings", tied),
        eps=keys.number("layer_norm_epsilon", 1e-5),
        max_positions=POSITIONS,
        residual=Residual(float32=keys.boolean("residual_in_fp32", True)),
    )


def read_jamba(family: str, keys: ConfigKeys) -> Architecture:
    attends = every_nth(keys, "attn_layer", 8, 4)
    kinds = layer_kinds(keys, lambda count: ["attention" if attends(i) else "recurrent" for i in range(count)])
    hidden = keys.integer("hidden_size")
    rank = step_rank(keys, "mamba_dt_rank", hidden)
    eps = keys.number("rms_norm_eps", 1e-6)
    attention = read_attention(keys, rotary=False)
    mamba = Mamba1(
        channels=keys.integer("mamba_expand", 2) * hidden,
        dt_rank=rank,
        state_dim=keys.integer("mamba_d_state", 16),
        conv_kernel=keys.integer("mamba_d_conv", 4),
        conv_bias=keys.boolean("mamba_conv_bias", True),
        projection_bias=keys.boolean("mamba_proj_bias", False),
        inner_norms="weighted",
        inner_eps=eps,
    )
    return build_architecture(
        family,
        keys,
        [attention if kind == "attention" else mamba for kind in kinds],
        _jamba_feed_forwards(keys, len(kinds)),
        eps=eps,
        max_positions=262_144,
    )


def _jamba_feed_forwards(keys: ConfigKeys, layers: int) -> list[FeedForward]:
    width, count = keys.integer("intermediate_size", 14336), keys.integer("num_experts", 16)
    dense = Dense(width)
    if count == 1:
        # One expert is a dense layer, and has no router in the files.
        return [dense] * layers
    sparse = Experts(count=count, per_token=experts_per_token(keys, count, default=2), width=width, normalized=False)
    chosen = every_nth(keys, "expert_layer", 2, 1)
    return [sparse if chosen(layer) else dense for layer in range(layers)]


def every_nth(keys: ConfigKeys, what: str, period: int, offset: int) -> Callable[[int], bool]:
    """Whether a layer is one of every ``what``_period layers, the first of them at ``what``_offset."""
    period = keys.integer(f"{what}_period", period)
    offset = keys.integer(f"{what}_offset", offset, least=0)
    if offset >= period:
        fail(f"{what}_offset", offset, f"it must be smaller than {what}_period {period}")
    return lambda layer: layer % period == offset


def read_bamba(family: str, keys: ConfigKeys) -> Architecture:
    chosen = keys.get("attn_layer_indices") or ()
    kinds = layer_kinds(keys, lambda count: ["attention" if i in chosen else "recurrent" for i in range(count)])
    attention, mamba = read_attention(keys, partial=0.5), read_mamba2(keys)
    dense = Dense(keys.integer("intermediate_size", 14336), bias=keys.boolean("mlp_bias", False))
    return build_architecture(
        family,
        keys,
        [attention if kind == "attention" else mamba for kind in kinds],
        [dense] * len(kinds),
        default_eps=1e-5,
        max_positions=262_144,
    )


def read_falcon_h1(family: str, keys: ConfigKeys) -> Architecture:
    """The key's multiplier joins the attention scale; that of the head is a divisor of the logits here."""
    count = keys.integer("num_hidden_layers")
    attention = read_attention(keys)
    attention = replace(attention, scale=attention.scale * keys.number("key_multiplier", 1.0))
    norm: GatedNorm = "none"
    if keys.boolean("mamba_rms_norm", False):
        norm = "gate_last" if keys.boolean("mamba_norm_before_gate", True) else "gate_first"
    mamba = read_mamba2(
        keys,
        inner=keys.get("mamba_d_ssm") and keys.integer("mamba_d_ssm"),
        norm=norm,
        multipliers=keys.numbers("ssm_multipliers", (1.0,) * 5),
        output_bias=keys.boolean("projectors_bias", False),
    )
    mixer = Parallel(
        attention,
        mamba,
        attention_in=keys.number("attention_in_multiplier", 1.0),
        attention_out=keys.number("attention_out_multiplier", 1.0),
        mamba_in=keys.number("ssm_in_multiplier", 1.0),
        mamba_out=keys.number("ssm_out_multiplier", 1.0),
    )
    multipliers = cast(tuple[float, float], keys.numbers("mlp_multipliers", (1.0, 1.0)))
    dense = Dense(
        keys.integer("intermediate_size", 14336), bias=keys.boolean("mlp_bias", False), multipliers=multipliers
    )
    head = keys.number("lm_head_multiplier", 1.0)
    if head == 0:
        fail("lm_head_multiplier", head, "it must not be 0")
    return build_architecture(
        family,
        keys,
        [mixer] * count,
        [dense] * count,
        default_eps=1e-5,
        max_positions=8192,
        embedding_multiplier=keys.number("embedding_multiplier", 1.0),
        logits_divisor=1.0 / head,
    )


def read_granite(family: str, keys: ConfigKeys) -> Architecture:
    kinds = layer_kinds(keys, lambda count: ["recurrent"] * count)
    position = keys.get("position_embedding_type")
    if position not in (None, "nope", "rope"):
        fail("position_embedding_type", position, "null, 'nope' and 'rope' are served")
    attention = read_attention(keys, rotary=position == "rope", scale=keys.number("attention_multiplier", 1.0))
    mamba = read_mamba2(keys)
    shared = keys.integer("shared_intermediate_size", 1024)
    count = keys.integer("num_local_experts", 8, least=0)
    feed: FeedForward = Dense(shared)
    if count:
        feed = Experts(
            count=count,
            per_token=experts_per_token(keys, count),
            width=keys.integer("intermediate_size"),
            normalized=True,
            shared_width=shared,
        )
    return build_architecture(
        family,
        keys,
        [attention if kind == "attention" else mamba for kind in kinds],
        [feed] * len(kinds),
        max_positions=2048,
        embedding_multiplier=keys.number("embedding_multiplier", 1.0),
        residual=Residual(scale=keys.number("residual_multiplier", 1.0)),
        logits_divisor=keys.number("logits_scaling", 1.0),
    )


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
    if keys.get("sliding_window") is not None:
        fail("sliding_window", keys.get("sliding_window"), "only full attention is served in this family")
    kinds, attention = (
        _nemotron_kinds(keys),
        read_attention(keys, rotary=False, head_dim=keys.integer("attention_head_dim", 128)),
    )  # older files call it so
    mixers: dict[str, Mixer] = {"recurrent": _nemotron_mamba(keys), "attention": attention}
    feeds: dict[str, FeedForward] = {}
    if "dense" in kinds:
        feeds["dense"] = Dense(
            keys.integer("intermediate_size", 21504), "relu2", gated=False, bias=keys.boolean("mlp_bias", False)
        )
    if "experts" in kinds:
        feeds["experts"] = _nemotron_experts(keys)
    return build_architecture(
        family,
        keys,
        [mixers.get(kind) for kind in kinds],
        [feeds.get(kind) for kind in kinds],
        eps=keys.number("layer_norm_epsilon", keys.number("rms_norm_eps", 1e-5)),
        max_positions=4096,
        residual=Residual(float32=keys.boolean("residual_in_fp32", False)),
        mtp=_nemotron_mtp(keys, attention),
    )


def _nemotron_mtp(keys: ConfigKeys, attention: Attention) -> MtpLayer | None:
    """Nemotron 3: one head of an attention layer and an experts layer. Other heads are not served."""
    if keys.integer("num_nextn_predict_layers", 0, least=0) != 1:
        return None
    kinds = keys.get("mtp_layers_block_type", keys.get("mtp_hybrid_override_pattern", ""))
    names = [(_NAMES if isinstance(kinds, list) else _PATTERN).get(kind) for kind in kinds]
    return MtpLayer(attention, _nemotron_experts(keys)) if names == ["attention", "experts"] else None


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


_SHARED_KINDS = {"mamba": False, "linear_attention": False, "hybrid": True}
"""Layer kinds -> whether a shared block stands beside."""
_ZAMBA2_SHARED = [layer in (6, 12, 18, 24, 30, 36, 42, 47, 51) for layer in range(54)]


def step_rank(keys: ConfigKeys, name: str, hidden: int) -> int:
    return ceil_div(hidden, 16) if keys.get(name, "auto") == "auto" else keys.integer(name)


def read_zamba2(family: str, keys: ConfigKeys) -> Architecture:
    if keys.boolean("use_long_context", False):
        fail("use_long_context", True, "the context this model was trained on is served")
    hidden = keys.integer("hidden_size")
    rotary = keys.boolean("use_mem_rope", False)
    mamba, attention = _zamba2_mamba(keys, hidden), zamba_attention(keys, hidden, rotary=rotary)
    # Sizes that follow from others.
    keys.only(attention_hidden_size=2 * hidden, attention_head_dim=attention.head_dim, mamba_headdim=mamba.head_dim)
    dense = Dense(keys.integer("intermediate_size", 4 * hidden), "gelu", bias=keys.boolean("add_bias_linear", False))
    blocks, rank = keys.integer("num_mem_blocks", 1), keys.integer("adapter_rank", 128)
    adapted = keys.boolean("use_shared_attention_adapter", False)
    mixers: list[Mixer] = []
    use = 0
    for shared in shared_beside(keys, _ZAMBA2_SHARED):
        if shared:
            mixers.append(
                SharedBlock(
                    attention, mamba, dense, block=use % blocks, use=use, adapter_rank=rank, adapted_attention=adapted
                )
            )
            use += 1
        else:
            mixers.append(mamba)
    return build_architecture(
        family,
        keys,
        mixers,
        [None] * len(mixers),
        max_positions=4096,
        tied=keys.boolean("tie_word_embeddings", True),
        default_eps=1e-5,
    )


def shared_beside(keys: ConfigKeys, default: list[bool]) -> list[bool]:
    """For each layer, whether a shared block stands beside it."""
    name = "layers_block_type" if keys.get("layers_block_type") is not None else "layer_types"
    count = keys.integer("num_hidden_layers", len(default))
    listed = keys.get(name, ["hybrid" if shared else "mamba" for shared in default])
    if not isinstance(listed, list) or len(listed) != count:
        fail(name, listed, f"it must list the kind of each of the {count} layers")
    for kind in listed:
        if kind not in _SHARED_KINDS:
            fail(name, kind, f"the layer kinds served are {', '.join(_SHARED_KINDS)}")
    return [_SHARED_KINDS[kind] for kind in listed]


def zamba_attention(keys: ConfigKeys, hidden: int, *, rotary: bool = False) -> Attention:
    """It sees stream and embedding side by side, so heads are twice as wide; the scale is of half of that."""
    heads = keys.integer("num_attention_heads", 32)
    kv_heads = keys.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        fail("num_key_value_heads", kv_heads, f"it must divide num_attention_heads {heads}")
    if 2 * hidden % heads:
        fail("num_attention_heads", heads, f"it must divide twice the hidden size {hidden}")
    head_dim = 2 * hidden // heads
    rope = read_rope(keys, head_dim, theta=10000.0, partial=1.0) if rotary else None
    return Attention(heads, kv_heads, head_dim, (head_dim / 2) ** -0.5, rope)


def _zamba2_mamba(keys: ConfigKeys, hidden: int) -> Mamba2:
    heads, inner = keys.integer("n_mamba_heads", 8), keys.integer("mamba_expand", 2) * hidden
    bias = keys.boolean("add_bias_linear", False)
    mamba = Mamba2(
        heads=heads,
        head_dim=inner // heads,
        groups=keys.integer("mamba_ngroups", 1),
        state_dim=keys.integer("mamba_d_state", 64),
        conv_kernel=keys.integer("mamba_d_conv", 4),
        conv_bias=True,
        projection_bias=bias,
        dt_limit=(0.0, float("inf")),
    )
    return check_mamba2(mamba, inner, "mamba_expand x hidden_size", heads="n_mamba_heads", groups="mamba_ngroups")


_HYBRID = {Attention: "self_attn", Mamba1: "mamba", Mamba2: "mamba", Parallel: ""}
_BAMBA = Names(
    _HYBRID,
    feed="feed_forward",
    feed_norm="pre_ff_layernorm",
    final_norm="final_layernorm",
    swiglu=False,
    spelled={Experts: {"router": "router.weight"}},
)
# Names of the original code.
_ALONE = Names({Mamba1: "mixer", Mamba2: "mixer"}, mixer_norm="norm", final_norm="norm_f", embeddings=("embeddings",))
_GRANITE = Names(_HYBRID, feed_reader="weft.models.spellings:granite_feed")
# Each layer is one thing. Hub releases keep each expert by itself; transformers saves two tensors.
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
_ZAMBA2 = Names(
    layer_reader="weft.models.blocks.combined:zamba2_layers",
    ends_reader="weft.models.blocks.combined:ends_reader",
    final_norm="final_layernorm",
)
FAMILIES = (
    Family("mamba2", ("mamba2",), read_mamba2_alone, names=_ALONE),
    Family("mamba", ("mamba",), read_mamba, names=_ALONE),
    Family("falcon_mamba", ("falcon_mamba",), read_mamba, names=_ALONE),
    Family("jamba", ("jamba",), read_jamba, names=_BAMBA),
    Family("bamba", ("bamba",), read_bamba, names=_BAMBA),
    Family("falcon_h1", ("falcon_h1",), read_falcon_h1, names=_BAMBA),
    Family("granite_hybrid", ("granitemoehybrid",), read_granite, names=_GRANITE),
    Family("nemotron_h", ("nemotron_h",), read_nemotron_h, names=_NEMOTRON),
    Family("zamba2", ("zamba2",), read_zamba2, "gelu", _ZAMBA2),
)
