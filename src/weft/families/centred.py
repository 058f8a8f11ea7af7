"""Decoders whose norms subtract the mean: Command R, OLMo 1, StarCoder 2, StableLM, Nemotron 4, Phi 1 and 2, GPT-NeoX,
Falcon, Persimmon. Those of nanochat have no weight.

In some, mixer and feed-forward are parallel. Sources: the configuration class and the model of transformers 5.24
for each ``model_type``; their defaults are in the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.families.architecture import Architecture
from weft.families.attention import NAMES
from weft.families.config_keys import ConfigKeys, fail
from weft.families.decoders import BIAS, FULL_KIND, Decoder, all_biased, cut_rotary, patterned, sizes, ungated
from weft.families.mixers.attention import Attention
from weft.families.mixers.feed_forward import Dense
from weft.families.reading import Family
from weft.families.residuals import PlainNorms, Residual


def logit_scale(keys: ConfigKeys) -> Mapping[str, Any]:
    scale = keys.number("logit_scale", 0.0625)
    if scale == 0:
        fail("logit_scale", scale, "it must not be 0")
    return {"logits_divisor": 1 / scale}


def _nanochat_cap(keys: ConfigKeys) -> Mapping[str, Any]:
    """Return the cap on logits: 15 where config.json is silent, none where it says null."""
    key = "final_logit_softcapping"
    return {"logits_cap": keys.number(key, 0.0 if keys.has(key) else 15.0)}


def centred_norms(keys: ConfigKeys, default: bool) -> Mapping[str, Any]:
    """Return the fields of norms of queries and keys that subtract the mean, where ``qk_layernorm`` asks for them."""
    return {"qk_norm": True, "norm_centred": "bias"} if keys.boolean("qk_layernorm", default) else {}


def _cohere(**more: Any) -> Decoder:
    """Return a decoder whose mixer and feed-forward share a norm that subtracts the mean."""
    return Decoder(
        defaults=sizes(256_000, 8192, 22_528, 40, 64, 64, 8192)
        | {"tie_word_embeddings": True, "layer_norm_eps": 1e-5}
        | more,
        renamed={"rms_norm_eps": "layer_norm_eps"},
        residual=lambda keys: Residual(centred="weight", parallel="one"),
        more=logit_scale,
        only={"use_qk_norm": False},
    )


def _cohere_norms(keys: ConfigKeys) -> Mapping[str, Any]:
    """Return the fields of norms by head, which Command R+ has."""
    normed = {"qk_norm": True, "norm_by_head": True, "norm_centred": "weight"}
    return normed if keys.boolean("use_qk_norm", False) else {}


_COHERE = replace(_cohere(), theta=500_000.0, attention_of=_cohere_norms, only={})
_OLMO = Decoder(
    defaults=sizes(50_304, 4096, 11_008, 32, 32, 32, 2048) | {"rms_norm_eps": 1e-5},
    residual=lambda keys: Residual(centred="plain"),
    attention_of=lambda keys: {"clip": keys.number("clip_qkv", 0.0)},
)
_STARCODER2 = Decoder(
    defaults=sizes(49_152, 3072, 12_288, 30, 24, 2, 4096)
    | {"use_bias": True, "tie_word_embeddings": True, "norm_epsilon": 1e-5},
    renamed={"rms_norm_eps": "norm_epsilon", "mlp_bias": BIAS},
    attention_of=all_biased,
    feed=ungated("gelu_tanh"),
    residual=lambda keys: Residual(centred="bias"),
)
_STABLELM = Decoder(
    defaults=sizes(50_304, 2560, 6912, 32, 32, 32, 4096) | {"layer_norm_eps": 1e-5},
    renamed={"rms_norm_eps": "layer_norm_eps"},
    partial=0.25,
    attention_of=lambda keys: {"bias": keys.boolean("use_qkv_bias", False), "out_bias": False},
    residual=lambda keys: Residual(
        centred="bias", parallel="one" if keys.boolean("use_parallel_residual", False) else ""
    ),
    only={"qk_layernorm": False},
    keys_of=cut_rotary,
)
_NEMOTRON = Decoder(
    defaults=sizes(256_000, 6144, 24_576, 32, 48, 48, 4096) | {"norm_eps": 1e-5},
    renamed={"rms_norm_eps": "norm_eps"},
    partial=0.5,
    feed=ungated("relu2"),
    residual=lambda keys: Residual(centred="bias"),
)
_JAIS2 = Decoder(
    defaults=sizes(150_272, 3328, 26_624, 32, 26, 26, 8192)
    | {"head_dim": 128, "layer_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True},
    renamed={"rms_norm_eps": "layer_norm_eps"},
    feed=ungated("relu2"),
    residual=lambda keys: Residual(centred="bias"),
)
_PHI = Decoder(
    defaults=sizes(51_200, 2048, 8192, 24, 32, 32, 2048) | {"layer_norm_eps": 1e-5},
    renamed={"rms_norm_eps": "layer_norm_eps"},
    partial=0.5,
    attention_of=lambda keys: {"bias": True, **centred_norms(keys, False)},
    feed=lambda keys, layer: Dense(keys.integer("intermediate_size"), "gelu_tanh", gated=False, bias=True),
    residual=lambda keys: Residual(centred="bias", parallel="one"),
    more=lambda keys: {"head_bias": True},
    keys_of=cut_rotary,
)
_NEOX = Decoder(
    defaults=sizes(50_432, 6144, 24_576, 44, 64, 64, 2048) | {"layer_norm_eps": 1e-5, "attention_bias": True},
    renamed={"rms_norm_eps": "layer_norm_eps", "rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    partial=0.25,
    attention_of=lambda keys: {"kv_heads": keys.integer("num_attention_heads"), "grouped": True},
    feed=lambda keys, layer: Dense(keys.integer("intermediate_size"), "gelu", gated=False, bias=True),
    residual=lambda keys: Residual(
        centred="bias", parallel="two" if keys.boolean("use_parallel_residual", True) else ""
    ),
)
_NEOX_JAPANESE = replace(
    _NEOX,
    defaults=sizes(32_000, 2560, 1, 32, 32, 32, 2048) | {"layer_norm_eps": 1e-5, "tie_word_embeddings": True},
    partial=1.0,
    feed=lambda keys, layer: Dense(
        keys.integer("hidden_size") * keys.integer("intermediate_multiple_size", 4), "gelu", gated=False
    ),
    residual=lambda keys: Residual(centred="bias"),
    keys_of=cut_rotary,
)


def _persimmon_attention(keys: ConfigKeys) -> Mapping[str, Any]:
    heads = keys.integer("num_attention_heads")
    return {"kv_heads": heads, "grouped": True, "bias": True, **centred_norms(keys, True)}


_PERSIMMON = Decoder(
    defaults=sizes(262_144, 4096, 16_384, 36, 64, 64, 16_384) | {"layer_norm_eps": 1e-5},
    renamed={"rms_norm_eps": "layer_norm_eps"},
    partial=0.5,
    attention_of=_persimmon_attention,
    feed=lambda keys, layer: Dense(keys.integer("intermediate_size"), "relu2", gated=False, bias=True),
    residual=lambda keys: Residual(centred="bias"),
    keys_of=cut_rotary,
)


def read_neox_japanese(family: str, keys: ConfigKeys) -> Architecture:
    """Read a model whose output of attention has a bias only in the last layer."""
    model = _NEOX_JAPANESE(family, keys)
    *before, last = model.mixers
    assert isinstance(last, Attention)
    return replace(model, mixers=(*before, replace(last, out_bias=True)))


_NEOX_FILES = (
    (r"^gpt_neox\.embed_in\.", "model.embed_tokens."),
    (r"^gpt_neox\.", "model."),
    (r"^embed_out\.", "lm_head."),
)


def _falcon_keys(keys: ConfigKeys) -> ConfigKeys:
    """Return ``keys`` with the KV heads of the one or the other kind of Falcon. Those with ALiBi are refused:
    they were trained with biases rounded to bfloat16."""
    if keys.boolean("alibi", False):
        fail("alibi", True, "the bias of this family is rounded by the place of a key, which is not served")
    grouped = keys.boolean("new_decoder_architecture", False)
    single = not grouped and keys.boolean("multi_query", True)
    heads = keys.integer("num_attention_heads")
    kv_heads = keys.integer("num_kv_heads", heads) if grouped else 1 if single else heads
    return keys.over({"num_key_value_heads": kv_heads, "intermediate_size": keys.integer(
        "ffn_hidden_size", 4 * keys.integer("hidden_size"))})  # fmt: skip


def _falcon_residual(keys: ConfigKeys) -> Residual:
    grouped, parallel = keys.boolean("new_decoder_architecture", False), keys.boolean("parallel_attn", True)
    norms = keys.integer("num_ln_in_parallel_attn", 2 if grouped else 1)
    if grouped and not parallel:
        fail("parallel_attn", False, "with new_decoder_architecture both blocks read the same stream")
    if norms > 2 or (norms == 2 and not grouped):
        fail("num_ln_in_parallel_attn", norms, "1 is served, and 2 with new_decoder_architecture")
    return Residual(centred="bias", parallel="" if not parallel else "two" if norms == 2 else "one")


_FALCON = Decoder(
    defaults={
        "vocab_size": 65_024,
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "max_position_embeddings": 2048,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    renamed={"rms_norm_eps": "layer_norm_epsilon"},
    attention_of=lambda keys: {"bias": keys.boolean("bias", False), "grouped": True},
    feed=lambda keys, layer: Dense(
        keys.integer("intermediate_size"), "gelu", gated=False, bias=keys.boolean("bias", False)
    ),
    residual=_falcon_residual,
    only={"activation": "gelu"},
    keys_of=_falcon_keys,
)
_FALCON_FILES = (
    (r"^transformer\.word_embeddings\.", "model.embed_tokens."),
    (r"^transformer\.ln_f\.", "model.norm."),
    (r"^transformer\.h\.", "model.layers."),
    (r"\.ln_attn\.", ".input_layernorm."),
    (r"\.ln_mlp\.", ".post_attention_layernorm."),
)
_NANOCHAT = Decoder(
    defaults=sizes(50_304, 768, 8192, 12, 6, 6, 2048),
    attention={"qk_norm": True, "norm_after": True, "norm_plain": True},
    feed=lambda keys, layer: Dense(keys.integer("intermediate_size"), "relu2", gated=False),
    residual=lambda keys: PlainNorms(),
    more=_nanochat_cap,
)
_PAIRED = replace(NAMES, spelled={Attention: {"paired": True}})
_UNGATED = replace(NAMES, swiglu=False)
_LAYERNORMS = ("q_layernorm", "k_layernorm")
FAMILIES = (
    Family("cohere", ("cohere",), _COHERE, names=replace(
        NAMES, spelled={Attention: {"paired": True, "norms": ("q_norm.weight", "k_norm.weight")}})),
    Family("cohere2", ("cohere2",), replace(
        _cohere(head_dim=128, sliding_window=4096), kinds=patterned, unturned=(FULL_KIND,)), names=_PAIRED),
    Family("olmo", ("olmo",), _OLMO, names=NAMES),
    Family("starcoder2", ("starcoder2",), _STARCODER2, "gelu_pytorch_tanh", replace(
        NAMES, swiglu=False, spelled={Dense: {"names": ("c_fc", "c_proj")}})),
    Family("phi", ("phi",), _PHI, "gelu_new", replace(
        _UNGATED, final_norm="final_layernorm", spelled={
            Attention: {"out": "dense", "norms": _LAYERNORMS}, Dense: {"names": ("fc1", "fc2")}})),
    Family("persimmon", ("persimmon",), _PERSIMMON, "relu2", replace(
        _UNGATED, final_norm="final_layernorm", spelled={
            Attention: {"joined": "query_key_value", "out": "dense", "norms": _LAYERNORMS},
            Dense: {"names": ("dense_h_to_4h", "dense_4h_to_h")}})),
    Family("gpt_neox", ("gpt_neox",), _NEOX, "gelu", replace(
        _UNGATED, mixers={Attention: "attention"}, final_norm="final_layer_norm", spelled={
            Attention: {"joined": "query_key_value", "out": "dense"},
            Dense: {"names": ("dense_h_to_4h", "dense_4h_to_h")}}), _NEOX_FILES),
    Family("gpt_neox_japanese", ("gpt_neox_japanese",), read_neox_japanese, "gelu", replace(
        _UNGATED, mixers={Attention: "attention"}, final_norm="final_layer_norm", spelled={
            Attention: {"joined": "query_key_value", "out": "dense"},
            Dense: {"names": ("dense_h_to_4h", "dense_4h_to_h")}}), (
        (r"^gpt_neox_japanese\.embed_in\.", "model.embed_tokens."), (r"^gpt_neox_japanese\.", "model."),
        (r"^embed_out\.", "lm_head."), (r"\.attention\.dense_bias$", ".attention.dense.bias"))),
    Family("falcon", ("falcon",), _FALCON, "gelu", replace(
        _UNGATED, mixers={Attention: "self_attention"}, spelled={
            Attention: {"joined": "query_key_value", "out": "dense"},
            Dense: {"names": ("dense_h_to_4h", "dense_4h_to_h")}}), _FALCON_FILES),
    Family("nanochat", ("nanochat",), _NANOCHAT, "relu2", replace(
        _UNGATED, embedding_norm="norm", spelled={
            Attention: {"backwards": True}, Dense: {"names": ("fc1", "fc2")}})),
    Family("jais2", ("jais2",), _JAIS2, "relu2", _UNGATED),
    Family("stablelm", ("stablelm",), _STABLELM, names=NAMES),
    Family("nemotron", ("nemotron",), _NEMOTRON, "relu2", replace(_UNGATED, plus_one=True)),
)  # fmt: skip
