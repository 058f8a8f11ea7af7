"""Dense decoders that everybody has: Qwen 2, Phi 3 and 4, Granite 3, GLM 4, OLMo 1 and 2, EXAONE 4, Cohere and others.

Each is Llama but for the row that it has here. Sources: the configuration class and the model of transformers 5.24 for
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
from weft.families.decoders import FULL_KIND, WINDOW_KIND, Decoder, every, swiglu, ungated
from weft.families.mixers.attention import Attention
from weft.families.mixers.feed_forward import Dense
from weft.families.names import Names
from weft.families.reading import Family
from weft.families.residuals import Residual

_JOINED = ("gate_up_proj", "down_proj")
_BIAS = "use_bias"


def sizes(vocab: int, hidden: int, width: int, layers: int, heads: int, kv_heads: int, positions: int) -> dict[str, int]:
    """Return the defaults that every family has."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
    }


def granite_multipliers(keys: ConfigKeys) -> Mapping[str, Any]:
    return {
        "embedding_multiplier": keys.number("embedding_multiplier", 1.0),
        "logits_divisor": keys.number("logits_scaling", 1.0),
    }


def granite_residual(keys: ConfigKeys) -> Residual:
    return Residual(scale=keys.number("residual_multiplier", 1.0))


def granite_scale(keys: ConfigKeys) -> Mapping[str, Any]:
    return {"scale": keys.number("attention_multiplier", 1.0)}


def _logit_scale(keys: ConfigKeys) -> Mapping[str, Any]:
    scale = keys.number("logit_scale", 0.0625)
    if scale == 0:
        fail("logit_scale", scale, "it must not be 0")
    return {"logits_divisor": 1 / scale}


def _cohere(**more: Any) -> Decoder:
    """Mixer and feed-forward read the same norm, which subtracts the mean."""
    return Decoder(
        defaults=sizes(256_000, 8192, 22_528, 40, 64, 64, 8192) | {"tie_word_embeddings": True, "layer_norm_eps": 1e-5} | more,
        renamed={"rms_norm_eps": "layer_norm_eps"},
        residual=lambda keys: Residual(centred="weight", parallel="one"),
        more=_logit_scale,
        only={"use_qk_norm": False},
    )


def _exaone_kinds(keys: ConfigKeys, count: int) -> list[str]:
    """``sliding_window_pattern``: a number, or letters such as LLLG; the last layer is then full."""
    if keys.get("sliding_window") is None:
        return [FULL_KIND] * count
    pattern = keys.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):
        if not pattern or set(pattern) - set("LG"):
            fail("sliding_window_pattern", pattern, "letters are L and G")
        kinds = [WINDOW_KIND if pattern[layer % len(pattern)] == "L" else FULL_KIND for layer in range(count)]
        return [*kinds[:-1], FULL_KIND]
    return every(keys.integer("sliding_window_pattern", 4))(keys, count)


def read_exaone4(family: str, keys: ConfigKeys) -> Architecture:
    """Full layers have no positions where others have a window, and norms follow blocks."""
    windows = reading.states_window(keys)
    decoder = Decoder(
        defaults=sizes(102_400, 4096, 16_384, 32, 32, 32, 2048) | {"rms_norm_eps": 1e-5}
        | ({} if keys.has("sliding_window") else {"sliding_window": 4096}),
        attention={"qk_norm": True},
        kinds=_exaone_kinds,
        unturned=(FULL_KIND,) if windows else (),
        residual=lambda keys: OUT_NORMED,
        only={"attention_bias": False},
    )
    return decoder(family, keys)


def _out_bias(key: str, default: bool) -> Any:
    return lambda keys: {"out_bias": keys.boolean(key, default)}


def _all_biased(keys: ConfigKeys) -> Mapping[str, Any]:
    return {"bias": keys.boolean(_BIAS, False)}


_GLM = Decoder(
    defaults=sizes(151_552, 4096, 13_696, 40, 32, 2, 131_072)
    | {"head_dim": 128, "rms_norm_eps": 1.5625e-07, "attention_bias": True},
    partial=0.5,
    attention={"out_bias": False},
)
_OLMO_1 = {"residual": lambda keys: Residual(centred="plain"), "only": {"clip_qkv": None}}
_GRANITE = Decoder(
    defaults=sizes(32_000, 4096, 11_008, 32, 32, 32, 2048),
    attention_of=granite_scale,
    residual=granite_residual,
    more=granite_multipliers,
)
_PHI3 = Decoder(
    defaults=sizes(32_064, 3072, 8192, 32, 32, 32, 4096) | {"rms_norm_eps": 1e-5}, attention={"bias": False}
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
_OLMO = Decoder(
    defaults=sizes(50_304, 4096, 11_008, 32, 32, 32, 2048) | {"rms_norm_eps": 1e-5},
    residual=lambda keys: Residual(centred="plain"),
    attention_of=lambda keys: {"clip": keys.number("clip_qkv", 0.0)},
)
_ERNIE = Decoder(
    defaults=sizes(103_424, 1024, 3072, 18, 16, 2, 131_072)
    | {"head_dim": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    theta=500_000.0,
    attention_of=_all_biased,
    feed=lambda keys, layer: Dense(keys.integer("intermediate_size"), bias=keys.boolean(_BIAS, False)),
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
_STARCODER2 = Decoder(
    defaults=sizes(49_152, 3072, 12_288, 30, 24, 2, 4096) | {"use_bias": True, "tie_word_embeddings": True, "norm_epsilon": 1e-5},
    renamed={"rms_norm_eps": "norm_epsilon", "mlp_bias": _BIAS},
    attention_of=_all_biased,
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
)
_NEMOTRON = Decoder(
    defaults=sizes(256_000, 6144, 24_576, 32, 48, 48, 4096) | {"norm_eps": 1e-5},
    renamed={"rms_norm_eps": "norm_eps"},
    partial=0.5,
    feed=ungated("relu2"),
    residual=lambda keys: Residual(centred="bias"),
)
_PAIRED = replace(NAMES, spelled={Attention: {"paired": True}})
_UNGATED = replace(NAMES, swiglu=False)
FAMILIES = (
    Family("qwen2", ("qwen2",), partial(read_qwen, qk_norm=False), names=NAMES),
    Family("phi3", ("phi3",), _PHI3, names=replace(
        NAMES, spelled={Attention: {"joined": "qkv_proj"}, Dense: {"names": _JOINED}})),
    Family("granite_dense", ("granite",), _GRANITE, names=NAMES),
    Family("glm", ("glm",), _GLM, names=replace(
        NAMES, spelled={Attention: {"paired": True}, Dense: {"names": _JOINED}})),
    Family("glm4", ("glm4",), replace(_GLM, residual=lambda keys: Residual(out_norms=True)), names=replace(
        NAMES, spelled={Attention: {"paired": True}, Dense: {"names": _JOINED}},
        out_norms=("post_self_attn_layernorm", "post_mlp_layernorm"))),
    Family("cohere", ("cohere",), replace(_cohere(), theta=500_000.0), names=_PAIRED),
    Family("cohere2", ("cohere2",), replace(
        _cohere(head_dim=128, sliding_window=4096), kinds=every(4), unturned=(FULL_KIND,)), names=_PAIRED),
    Family("olmo", ("olmo",), _OLMO, names=NAMES),
    Family("olmo2", ("olmo2",), _OLMO2, names=OUT_NAMES),
    Family("exaone4", ("exaone4",), read_exaone4, names=OUT_NAMES),
    Family("ministral", ("ministral",), _MINISTRAL, names=NAMES),
    Family("seed_oss", ("seed_oss",), _SEED_OSS, names=NAMES),
    Family("arcee", ("arcee",), _ARCEE, "relu2", _UNGATED),
    Family("ernie4_5", ("ernie4_5",), _ERNIE, names=_PAIRED),
    Family("helium", ("helium",), _HELIUM, names=_PAIRED),
    Family("cwm", ("cwm",), _CWM, names=NAMES),
    Family("starcoder2", ("starcoder2",), _STARCODER2, "gelu_pytorch_tanh", replace(
        NAMES, swiglu=False, spelled={Dense: {"names": ("c_fc", "c_proj")}})),
    Family("stablelm", ("stablelm",), _STABLELM, names=NAMES),
    Family("nemotron", ("nemotron",), _NEMOTRON, "relu2", replace(_UNGATED, plus_one=True)),
)  # fmt: skip
