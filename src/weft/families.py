"""``config.json`` -> Architecture and ModelSpec: the table of what weft serves, and the dialects it reads.

    model_type        family           mixers                         feed-forward
    qwen3             qwen3            attention                      dense
    qwen3_5[_text]    qwen3_5          gated delta + gated attention  dense
    qwen3_5_moe[_text] qwen3_5         gated delta + gated attention  experts + gated shared expert
    qwen3_next        qwen3_next       gated delta + gated attention  experts + gated shared expert
    lfm2              lfm2             short convolution + attention  dense
    granitemoehybrid  granite_hybrid   Mamba-2 + attention            (experts +) shared dense

Dialects, all read the same: a multimodal wrapper with ``text_config`` (its text part is served);
``torch_dtype`` and ``dtype``; ``rope_theta`` / ``rope_scaling`` / ``partial_rotary_factor`` at top level and
``rope_parameters``; layer kinds by ``layer_types``, ``layers_block_type``, ``full_attention_interval`` or
``full_attn_idxs``; "mamba"/"attention" and "linear_attention"/"full_attention".

What is not understood is an error that names the key: a default silently taken for a setting that the
checkpoint does have would serve wrong numbers. Sources for the defaults: the configuration classes of
transformers for each ``model_type``. Pure: no I/O, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.architecture import (
    Architecture,
    Attention,
    Dense,
    Experts,
    FeedForward,
    GatedDelta,
    Mamba2,
    Mixer,
    ShortConv,
)
from weft.config_keys import ConfigKeys, fail, read_rope
from weft.errors import UnknownArchitectureError
from weft.spec import DTypeName, ModelSpec

_KIND = {"full_attention": "attention", "attention": "attention",
         "linear_attention": "recurrent", "mamba": "recurrent", "mamba2": "recurrent",
         "conv": "recurrent", "short_conv": "recurrent"}


def read_spec(config: Mapping[str, Any]) -> ModelSpec:
    """What memory needs of the model that ``config`` (the parsed config.json) describes.

    Raises UnknownArchitectureError for a ``model_type`` outside SUPPORTED, and CheckpointError naming the
    key for a setting that is missing, malformed, or not served.
    """
    return read_architecture(config).spec()


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """As ``read_spec``, with everything the model code needs besides."""
    model_type = config.get("model_type")
    row = _TABLE.get(model_type) if isinstance(model_type, str) else None
    if row is None:
        named = ", ".join(str(name) for name in config.get("architectures") or ())
        raise UnknownArchitectureError(
            f"config.json has model_type {model_type!r}{f' ({named})' if named else ''}; "
            f"weft serves {', '.join(SUPPORTED)}", param="model")
    keys = ConfigKeys(text_config(config), fallback=config)
    _refuse_what_is_not_served(keys)
    return row.read(row.family, keys)


def named_dtype(config: Mapping[str, Any]) -> DTypeName | None:
    """The dtype that config.json names for its weights, None where it is silent (then the tensors decide)."""
    return ConfigKeys(text_config(config), fallback=config).dtype()


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language part of a multimodal configuration; the configuration itself for any other."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def _refuse_what_is_not_served(keys: ConfigKeys) -> None:
    if keys.get("quantization_config"):
        method = keys.get("quantization_config").get("quant_method", "unknown")
        fail("quantization_config", method, "quantised checkpoints are not served; use the bf16 release")
    activation = keys.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        fail("hidden_act", activation, "only silu is served")


def _layer_kinds(keys: ConfigKeys, fallback: Callable[[int], Sequence[str]]) -> list[str]:
    """"attention" or "recurrent" for each layer, from the names the checkpoint uses, else ``fallback``."""
    count = keys.integer("num_hidden_layers")
    name = "layer_types" if keys.get("layer_types") is not None else "layers_block_type"
    listed = keys.get(name)
    if listed is None:
        return list(fallback(count))
    if not isinstance(listed, list) or len(listed) != count:
        fail(name, listed, f"it must list the kind of each of the {count} layers")
    for kind in listed:
        if kind not in _KIND:
            fail(name, kind, f"the layer kinds served are {', '.join(sorted(_KIND))}")
    return [_KIND[kind] for kind in listed]


def _every_nth_attention(keys: ConfigKeys) -> Callable[[int], Sequence[str]]:
    interval = keys.integer("full_attention_interval", 4)
    return lambda count: ["attention" if (i + 1) % interval == 0 else "recurrent" for i in range(count)]


def _attention(keys: ConfigKeys, *, rotary: bool = True, partial: float = 1.0, theta: float = 10000.0,
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


def _architecture(family: str, keys: ConfigKeys, mixers: Sequence[Mixer],
                  feed_forwards: Sequence[FeedForward], *, tied: bool = False, eps: float = 1e-6,
                  max_positions: int | None = None, **multipliers: float) -> Architecture:
    return Architecture(
        family=family, vocab_size=keys.integer("vocab_size"), hidden_size=keys.integer("hidden_size"),
        max_positions=keys.integer("max_position_embeddings", max_positions),
        dtype=keys.dtype() or "float32",
        norm_eps=eps, tied_embeddings=tied, mixers=tuple(mixers), feed_forwards=tuple(feed_forwards),
        **multipliers)


def _read_qwen3(family: str, keys: ConfigKeys) -> Architecture:
    kinds = _layer_kinds(keys, lambda count: ["attention"] * count)
    if "recurrent" in kinds:
        fail("layer_types", kinds, "every layer of qwen3 is full attention")
    if keys.boolean("use_sliding_window", False) and keys.get("sliding_window") is not None:
        fail("use_sliding_window", True, "sliding windows are not served")
    attention = _attention(keys, qk_norm=True, head_dim=128)
    dense = Dense(keys.integer("intermediate_size"))
    return _architecture(family, keys, [attention] * len(kinds), [dense] * len(kinds),
                         tied=keys.boolean("tie_word_embeddings", False),
                         eps=keys.number("rms_norm_eps", 1e-6))


def _read_qwen_hybrid(family: str, keys: ConfigKeys) -> Architecture:
    """Qwen3-Next and Qwen3.5 differ in how tensors are stored, not in geometry."""
    kinds = _layer_kinds(keys, _every_nth_attention(keys))
    attention = _attention(keys, qk_norm=True, gated=True, partial=0.25, head_dim=256)
    if not keys.boolean("attn_output_gate", True):
        fail("attn_output_gate", False, "only the gated attention of the released checkpoints is served")
    delta = GatedDelta(k_heads=keys.integer("linear_num_key_heads", 16),
                       v_heads=keys.integer("linear_num_value_heads", 32),
                       k_dim=keys.integer("linear_key_head_dim", 128),
                       v_dim=keys.integer("linear_value_head_dim", 128),
                       conv_kernel=keys.integer("linear_conv_kernel_dim", 4))
    if delta.v_heads % delta.k_heads:
        fail("linear_num_value_heads", delta.v_heads,
             f"it must be a multiple of linear_num_key_heads {delta.k_heads}")
    return _architecture(family, keys, [attention if kind == "attention" else delta for kind in kinds],
                         [_qwen_feed_forward(keys, layer) for layer in range(len(kinds))],
                         tied=keys.outer_boolean("tie_word_embeddings", False),
                         eps=keys.number("rms_norm_eps", 1e-6))


def _qwen_feed_forward(keys: ConfigKeys, layer: int) -> FeedForward:
    count = keys.integer("num_experts", 0, least=0)
    sparse = count > 0 and (layer + 1) % keys.integer("decoder_sparse_step", 1) == 0
    if not sparse or layer in (keys.get("mlp_only_layers") or ()):
        return Dense(keys.integer("intermediate_size"))
    return Experts(count=count, per_token=_chosen(keys, count), width=keys.integer("moe_intermediate_size"),
                   normalized=keys.boolean("norm_topk_prob", True),
                   shared_width=keys.integer("shared_expert_intermediate_size"), shared_gate=True)


def _chosen(keys: ConfigKeys, count: int) -> int:
    chosen = keys.integer("num_experts_per_tok")
    if chosen > count:
        fail("num_experts_per_tok", chosen, f"the model has {count} experts")
    return chosen


def _read_lfm2(family: str, keys: ConfigKeys) -> Architecture:
    chosen = keys.get("full_attn_idxs")
    kinds = _layer_kinds(keys, lambda count: [
        "attention" if chosen is None or i in chosen else "recurrent" for i in range(count)])
    hidden = keys.integer("hidden_size")
    attention = _attention(keys, qk_norm=True, theta=1e6)
    conv = ShortConv(hidden, keys.integer("conv_L_cache", 3), keys.boolean("conv_bias", False))
    dense = Dense(_lfm2_width(keys))
    return _architecture(family, keys, [attention if kind == "attention" else conv for kind in kinds],
                         [dense] * len(kinds),
                         tied=keys.boolean("tie_embedding", keys.boolean("tie_word_embeddings", True)),
                         eps=keys.number("norm_eps", keys.number("block_norm_eps", 1e-5)),
                         max_positions=128_000)


def _lfm2_width(keys: ConfigKeys) -> int:
    """LFM2 names the width before SwiGLU's third matrix is paid for: 2/3 of it, rounded up to a multiple."""
    width = keys.integer("block_ff_dim", keys.integer("intermediate_size", 0, least=0))
    if not keys.boolean("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    if keys.get("block_ffn_dim_multiplier", 1.0) is not None:
        width = int(keys.number("block_ffn_dim_multiplier", 1.0) * width)
        multiple = keys.integer("block_multiple_of", 256)
        width = -(-width // multiple) * multiple
    return width


def _read_granite(family: str, keys: ConfigKeys) -> Architecture:
    kinds = _layer_kinds(keys, lambda count: ["recurrent"] * count)
    position = keys.get("position_embedding_type")
    if position not in (None, "nope", "rope"):
        fail("position_embedding_type", position, "null, 'nope' and 'rope' are served")
    attention = _attention(keys, rotary=position == "rope", scale=keys.number("attention_multiplier", 1.0))
    mamba = _granite_mamba(keys)
    shared = keys.integer("shared_intermediate_size", 1024)
    count = keys.integer("num_local_experts", 8, least=0)
    feed: FeedForward = Dense(shared)
    if count:
        feed = Experts(count=count, per_token=_chosen(keys, count), width=keys.integer("intermediate_size"),
                       normalized=True, shared_width=shared)
    return _architecture(family, keys, [attention if kind == "attention" else mamba for kind in kinds],
                         [feed] * len(kinds), tied=keys.boolean("tie_word_embeddings", False),
                         eps=keys.number("rms_norm_eps", 1e-6), max_positions=2048,
                         embedding_multiplier=keys.number("embedding_multiplier", 1.0),
                         residual_multiplier=keys.number("residual_multiplier", 1.0),
                         logits_divisor=keys.number("logits_scaling", 1.0))


def _granite_mamba(keys: ConfigKeys) -> Mamba2:
    heads = keys.integer("mamba_n_heads", 128)
    groups = keys.integer("mamba_n_groups", 1)
    inner = keys.integer("mamba_expand", 2) * keys.integer("hidden_size")
    stated = keys.get("mamba_d_head", "auto")
    head_dim = inner // heads if stated == "auto" else keys.integer("mamba_d_head")
    if heads * head_dim != inner:
        fail("mamba_n_heads", heads,
             f"{heads} heads of {head_dim} are not mamba_expand x hidden_size = {inner}")
    if heads % groups:
        fail("mamba_n_groups", groups, f"it must divide mamba_n_heads {heads}")
    return Mamba2(heads=heads, head_dim=head_dim, groups=groups,
                  state_dim=keys.integer("mamba_d_state", 256), conv_kernel=keys.integer("mamba_d_conv", 4),
                  conv_bias=keys.boolean("mamba_conv_bias", True),
                  projection_bias=keys.boolean("mamba_proj_bias", False),
                  dt_limit=keys.limits("time_step_limit", (0.0, float("inf"))))


@dataclass(frozen=True, slots=True)
class _Family:
    family: str
    read: Callable[[str, ConfigKeys], Architecture]


_TABLE: dict[str, _Family] = {
    "qwen3": _Family("qwen3", _read_qwen3),
    "qwen3_5": _Family("qwen3_5", _read_qwen_hybrid),
    "qwen3_5_text": _Family("qwen3_5", _read_qwen_hybrid),
    "qwen3_5_moe": _Family("qwen3_5", _read_qwen_hybrid),
    "qwen3_5_moe_text": _Family("qwen3_5", _read_qwen_hybrid),
    "qwen3_next": _Family("qwen3_next", _read_qwen_hybrid),
    "lfm2": _Family("lfm2", _read_lfm2),
    "granitemoehybrid": _Family("granite_hybrid", _read_granite),
}

SUPPORTED: tuple[str, ...] = tuple(_TABLE)
"""The ``model_type`` values of config.json that weft serves."""
