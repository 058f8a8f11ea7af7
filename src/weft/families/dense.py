"""Common dense decoders: Qwen 2, Phi 3 and 4, Granite 3, GLM 4, OLMo 1 and 2, EXAONE 4, Cohere and others.

Each is Llama, except for its row here. Sources: the configuration class and the model of transformers 5.24 for
each ``model_type``; their defaults are in the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from weft.families import reading
from weft.families.architecture import Architecture
from weft.families.attention import NAMES, OUT_NAMES, OUT_NORMED, read_qwen
from weft.families.config_keys import ConfigKeys, fail
from weft.families.decoders import BIAS, FULL_KIND, Decoder, all_biased, cut_rotary, every, patterned, sizes, ungated
from weft.families.mixers.attention import Attention, Growth
from weft.families.mixers.feed_forward import Dense
from weft.families.reading import WINDOW_KIND, Family
from weft.families.residuals import Residual

_JOINED = ("gate_up_proj", "down_proj")


def granite_multipliers(keys: ConfigKeys) -> Mapping[str, Any]:
    return {
        "embedding_multiplier": keys.number("embedding_multiplier", 1.0),
        "logits_divisor": keys.number("logits_scaling", 1.0),
    }


def granite_residual(keys: ConfigKeys) -> Residual:
    return Residual(scale=keys.number("residual_multiplier", 1.0))


def granite_scale(keys: ConfigKeys) -> Mapping[str, Any]:
    return {"scale": keys.number("attention_multiplier", 1.0)}


def exaone_attention(keys: ConfigKeys) -> Decoder:
    """Return a decoder whose full layers have no positions where others have a window."""
    windows = reading.states_window(keys)
    default = {} if keys.has("sliding_window") else {"sliding_window": 4096}
    return Decoder(
        defaults={**sizes(102_400, 4096, 16_384, 32, 32, 32, 2048), **default, "rms_norm_eps": 1e-5},
        attention={"qk_norm": True},
        kinds=patterned if windows else every(1),
        unturned=(FULL_KIND,) if windows else (),
        only={"attention_bias": False},
    )


def read_exaone4(family: str, keys: ConfigKeys) -> Architecture:
    """Read a model whose norms follow blocks."""
    return replace(exaone_attention(keys), residual=lambda keys: OUT_NORMED)(family, keys)


def _clova_residual(keys: ConfigKeys) -> Residual:
    return replace(granite_residual(keys), out_norms=keys.boolean("use_post_norm", True))


def _clova_multipliers(keys: ConfigKeys) -> Mapping[str, Any]:
    scaling = keys.number("logits_scaling", 1.0)
    if scaling == 0:
        fail("logits_scaling", scaling, "it must not be 0")
    return {**granite_multipliers(keys), "logits_divisor": 1 / scaling}


def _clova_scale(keys: ConfigKeys) -> Mapping[str, Any]:
    head_dim = keys.integer("head_dim", keys.integer("hidden_size") // keys.integer("num_attention_heads"))
    return {"scale": keys.number("attention_multiplier", head_dim**-0.5)}


def _out_bias(key: str, default: bool) -> Any:
    return lambda keys: {"out_bias": keys.boolean(key, default)}


def _with_alpha(keys: ConfigKeys) -> ConfigKeys:
    """Return ``keys``, whose rotary base holds the ``alpha`` of Hunyuan's "dynamic" scaling: it does not depend on the
    length of a text."""
    stated = keys.get("rope_scaling") or keys.get("rope_parameters") or {}
    inner = ConfigKeys(stated if isinstance(stated, Mapping) else {}, fallback={})
    if inner.get("rope_type", inner.get("type")) != "dynamic" or inner.get("alpha") is None:
        return keys
    dim = keys.integer("head_dim", keys.integer("hidden_size") // keys.integer("num_attention_heads"), least=4)
    theta = inner.number("rope_theta", keys.number("rope_theta", 10_000.0))
    grown = theta * inner.number("alpha", 1.0) ** (dim / (dim - 2))
    return keys.over({"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": grown}})


def _grown(keys: ConfigKeys) -> Mapping[str, Any]:
    stated = ConfigKeys(keys.get("rope_parameters") or {}, fallback={})
    factor = stated.number("llama_4_scaling_beta", 0.0)
    return {"growth": Growth(factor, stated.integer("original_max_position_embeddings"))} if factor else {}


def _phi3_positions(keys: ConfigKeys) -> ConfigKeys:
    """Return ``keys``, in which LongRoPE has its name: first files of Phi 3 call it yarn."""
    stated = cut_rotary(keys).get("rope_parameters") or {}
    if not isinstance(stated, Mapping) or stated.get("rope_type") != "yarn":
        return keys
    return keys.over({"rope_parameters": {**stated, "rope_type": "longrope"}})


def _glm4v_heads(keys: ConfigKeys) -> ConfigKeys:
    keys.only(head_dim=keys.integer("hidden_size") // keys.integer("num_attention_heads"))
    return keys


_YARN_3 = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_GLM = Decoder(
    defaults=sizes(151_552, 4096, 13_696, 40, 32, 2, 131_072)
    | {"head_dim": 128, "rms_norm_eps": 1.5625e-07, "attention_bias": True},
    partial=0.5,
    attention={"out_bias": False},
)
_GLM4 = replace(_GLM, residual=lambda keys: Residual(out_norms=True))
GLM4V = replace(
    _GLM4,
    defaults={key: value for key, value in _GLM.defaults.items() if key != "head_dim"} | {"rms_norm_eps": 1e-5},
    partial=1.0,
    keys_of=_glm4v_heads,
    only={"attention_bias": True},
)
_GRANITE = Decoder(
    defaults=sizes(32_000, 4096, 11_008, 32, 32, 32, 2048),
    attention_of=granite_scale,
    residual=granite_residual,
    more=granite_multipliers,
)
_CLOVA = replace(_GRANITE, attention_of=_clova_scale, residual=_clova_residual, more=_clova_multipliers)
PHI3 = Decoder(
    defaults=sizes(32_064, 3072, 8192, 32, 32, 32, 4096) | {"rms_norm_eps": 1e-5},
    attention={"bias": False},
    keys_of=_phi3_positions,
)
_MINISTRAL = Decoder(
    defaults=sizes(32_000, 4096, 14_336, 32, 32, 8, 131_072) | {"sliding_window": 4096},
    kinds=lambda keys, count: [WINDOW_KIND] * count,
)
_SEED_OSS = Decoder(
    defaults=sizes(155_136, 4096, 27_648, 64, 80, 8, 524_288) | {"head_dim": 128, "attention_bias": True},
    attention_of=_out_bias("attention_out_bias", False),
)
_ARCEE = Decoder(defaults=sizes(32_000, 2560, 18_432, 32, 32, 32, 4096) | {"rms_norm_eps": 1e-5}, feed=ungated("relu2"))
_OLMO2 = Decoder(
    defaults=sizes(50_304, 4096, 11_008, 32, 32, 32, 2048) | {"rms_norm_eps": 1e-5},
    attention={"qk_norm": True, "norm_whole": True},
    residual=lambda keys: OUT_NORMED,
)
ERNIE = Decoder(
    defaults=sizes(103_424, 1024, 3072, 18, 16, 2, 131_072)
    | {"head_dim": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    theta=500_000.0,
    attention_of=all_biased,
    feed=lambda keys, layer: Dense(keys.integer("intermediate_size"), bias=keys.boolean(BIAS, False)),
)
_HELIUM = Decoder(
    defaults=sizes(48_000, 2560, 7040, 24, 20, 20, 4096) | {"head_dim": 128, "rms_norm_eps": 1e-8},
    theta=100_000.0,
    attention={"out_bias": False},
)
_CWM = Decoder(
    defaults=sizes(128_256, 6144, 21_504, 64, 48, 8, 131_072)
    | {"head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 8192},
    theta=1e6,
    kinds=every(4, last=False),
    attention={"bias": False},
)
HUNYUAN = Decoder(
    defaults=sizes(290_943, 4096, 11_008, 32, 32, 32, 2048) | {"rms_norm_eps": 1e-5},
    attention={"qk_norm": True, "norm_after": True},
    keys_of=_with_alpha,
)
HUNYUAN_NAMES = replace(NAMES, spelled={Attention: {"norms": ("query_layernorm", "key_layernorm")}})
_MINISTRAL3 = Decoder(
    defaults=sizes(131_072, 4096, 14_336, 34, 32, 8, 262_144)
    | {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_parameters": _YARN_3},
    attention_of=_grown,
)
APERTUS = Decoder(
    defaults=sizes(131_072, 4096, 14_336, 32, 32, 32, 65_536) | {"rms_norm_eps": 1e-5, "rope_parameters": _LLAMA3},
    theta=12_000_000.0,
    attention={"qk_norm": True},
    feed=ungated("xielu"),
)
_EXAONE = Decoder(
    defaults=sizes(102_400, 4096, 14_336, 32, 32, 8, 4096) | {"rms_norm_eps": 1e-5},
    renamed={"num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon"},
    theta=500_000.0,
    only={"activation_function": "silu"},
)
_EXAONE_FILES = (
    (r"^transformer\.wte\.", "model.embed_tokens."),
    (r"^transformer\.ln_f\.", "model.norm."),
    (r"^transformer\.h\.", "model.layers."),
    (r"\.attn\.attention\.", ".self_attn."),
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.ln_1\.", ".input_layernorm."),
    (r"\.ln_2\.", ".post_attention_layernorm."),
    (r"\.mlp\.c_fc_0\.", ".mlp.gate_proj."),
    (r"\.mlp\.c_fc_1\.", ".mlp.up_proj."),
    (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
)
_INTERNLM3 = Decoder(
    defaults=sizes(128_512, 4096, 10_240, 48, 32, 2, 32_768) | {"head_dim": 128, "rms_norm_eps": 1e-5},
    renamed={"attention_bias": "qkv_bias", "mlp_bias": "bias"},
)
_IQUEST = Decoder(
    defaults=sizes(76_800, 5120, 27_648, 80, 40, 8, 131_072) | {"head_dim": 128, "rms_norm_eps": 1e-5},
    only={"clip_qkv": None, "use_sliding_window": False},
)
_PAIRED = replace(NAMES, spelled={Attention: {"paired": True}})
GLM4_NAMES = replace(
    NAMES,
    spelled={Attention: {"paired": True}, Dense: {"names": _JOINED}},
    out_norms=("post_self_attn_layernorm", "post_mlp_layernorm"),
)
PHI3_NAMES = replace(NAMES, spelled={Attention: {"joined": "qkv_proj"}, Dense: {"names": _JOINED}})
APERTUS_NAMES = replace(NAMES, swiglu=False, mixer_norm="attention_layernorm", feed_norm="feedforward_layernorm")
_UNGATED = replace(NAMES, swiglu=False)
_QWEN2 = ("qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_omni_text")
FAMILIES = (
    Family("qwen2", _QWEN2, partial(read_qwen, qk_norm=False), names=NAMES),
    Family("phi3", ("phi3",), PHI3, names=PHI3_NAMES),
    Family("granite_dense", ("granite", "granite_docling_text", "granite4_vision_text"), _GRANITE, names=NAMES),
    Family("hyperclovax", ("hyperclovax",), _CLOVA, names=replace(NAMES, out_norms=("post_norm1", "post_norm2"))),
    Family("glm", ("glm",), _GLM, names=replace(
        NAMES, spelled={Attention: {"paired": True}, Dense: {"names": _JOINED}})),
    Family("glm4", ("glm4",), _GLM4, names=GLM4_NAMES),
    Family("glm4", ("glm4v_text",), GLM4V, names=GLM4_NAMES),
    Family("olmo2", ("olmo2",), _OLMO2, names=OUT_NAMES),
    Family("exaone4", ("exaone4",), read_exaone4, names=OUT_NAMES),
    Family("hunyuan", ("hunyuan_v1_dense",), HUNYUAN, names=HUNYUAN_NAMES),
    Family("ministral3", ("ministral3",), _MINISTRAL3, names=NAMES),
    Family("apertus", ("apertus",), APERTUS, "xielu", APERTUS_NAMES),
    Family("ministral", ("ministral",), _MINISTRAL, names=NAMES),
    Family("seed_oss", ("seed_oss",), _SEED_OSS, names=NAMES),
    Family("arcee", ("arcee",), _ARCEE, "relu2", _UNGATED),
    Family("ernie4_5", ("ernie4_5",), ERNIE, names=_PAIRED),
    Family("helium", ("helium",), _HELIUM, names=_PAIRED),
    Family("cwm", ("cwm",), _CWM, names=NAMES),
    Family("exaone", ("exaone",), _EXAONE, names=NAMES, released=_EXAONE_FILES),
    Family("internlm3", ("internlm3",), _INTERNLM3, names=NAMES),
    Family("iquestcoder", ("iquestcoder",), _IQUEST, names=NAMES),
)  # fmt: skip
