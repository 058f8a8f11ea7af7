"""Text parts of multimodal models that are rows of other families, but for a default or a name: GLM-OCR, HunyuanOCR,
PaddleOCR-VL, Cosmos3 Edge, North Micro Vision, DeepSeek-OCR 2, Emu3, Llama 3.2 Vision, Phi-4-multimodal, Apertus 1.5.

A family has the name of the one that it is a row of. Sources: the configuration class and the model of transformers
5.24 for each ``model_type``; their defaults are in the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.families.architecture import Architecture
from weft.families.attention import NAMES
from weft.families.centred import logit_scale
from weft.families.config_keys import ConfigKeys, fail
from weft.families.decoders import FULL_KIND, Decoder, sizes, ungated
from weft.families.deepseek import SHARED_NAMES, V2_SIZES, experts_of_v2
from weft.families.dense import (
    APERTUS,
    APERTUS_NAMES,
    ERNIE,
    GLM4_NAMES,
    GLM4V,
    HUNYUAN,
    HUNYUAN_NAMES,
    PHI3,
    PHI3_NAMES,
)
from weft.families.mixers.attention import Attention
from weft.families.mixers.feed_forward import Dense
from weft.families.reading import Family, build_architecture, read_attention, whole_or_proportional
from weft.families.residuals import Residual

_GLM_OCR = replace(
    GLM4V,
    defaults=sizes(59_392, 1024, 4096, 16, 16, 8, 131_072) | {"rms_norm_eps": 1e-5},
    keys_of=lambda keys: keys,
    only={"attention_bias": False},
)
_PHI4 = replace(PHI3, defaults=sizes(200_064, 3072, 8192, 32, 32, 8, 131_072) | {"rms_norm_eps": 1e-5})
_COSMOS = Decoder(
    defaults=sizes(131_072, 2048, 9216, 28, 16, 8, 131_072) | {"head_dim": 128, "rms_norm_eps": 1e-5},
    theta=1e8,
    feed=ungated("relu2"),
)
_EMU = Decoder(defaults=sizes(184_622, 4096, 14_336, 32, 32, 8, 9216) | {"rms_norm_eps": 1e-5}, theta=1e6)
_LLAMA_VISION = Decoder(
    defaults=sizes(128_256, 4096, 14_336, 40, 32, 8, 131_072) | {"rms_norm_eps": 1e-5}, theta=500_000.0
)


def _hunyuan_keys(keys: ConfigKeys) -> ConfigKeys:
    """Return ``keys``, whose rotary settings have the words of the dense model."""
    name = "rope_scaling" if isinstance(keys.get("rope_scaling"), Mapping) else "rope_parameters"
    stated = keys.get(name)
    if isinstance(stated, Mapping) and "xdrope" in (stated.get("type"), stated.get("rope_type")):
        keys = keys.over({name: {**stated, "type": "dynamic", "rope_type": "dynamic"}})
    return HUNYUAN.keys_of(keys)


_HUNYUAN_VL = replace(
    HUNYUAN,
    defaults={**HUNYUAN.defaults, "tie_word_embeddings": True},
    renamed={"head_dim": "attention_head_dim"},
    keys_of=_hunyuan_keys,
)


def read_deepseek_ocr2(family: str, keys: ConfigKeys) -> Architecture:
    """Read a model with the experts of DeepSeek V2 and usual attention."""
    keys = keys.with_defaults(**{name: size for name, size in V2_SIZES.items() if name != "num_key_value_heads"})
    count = keys.integer("num_hidden_layers")
    kinds = keys.get("mlp_layer_types")
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= {"dense", "sparse"}:
        fail("mlp_layer_types", kinds, f"it must say dense or sparse of each of the {count} layers")
    dense, sparse = Dense(keys.integer("intermediate_size")), experts_of_v2(keys)
    feeds = [dense if kind == "dense" else sparse for kind in kinds]
    return build_architecture(family, keys, [read_attention(keys)] * count, feeds)


def read_llama_vision(family: str, keys: ConfigKeys) -> Architecture:
    """Read a Llama whose layers of cross-attention have nothing to see in a text, and are left out. The embedding has
    eight tokens more than the head."""
    keys = _LLAMA_VISION.keys(keys)
    stated = keys.get("cross_attention_layers", list(range(3, keys.integer("num_hidden_layers"), 5)))
    if not isinstance(stated, list) or 0 in stated:
        fail("cross_attention_layers", stated, "it must list layers by their numbers, and not the first")
    model = _LLAMA_VISION(family, keys)
    in_text = [layer not in stated for layer in range(model.layer_count)]
    return replace(
        model,
        vocab_size=model.vocab_size + 8,
        head_tokens=model.vocab_size,
        mixers=tuple(mixer if own else None for mixer, own in zip(model.mixers, in_text, strict=True)),
        feed_forwards=tuple(feed if own else None for feed, own in zip(model.feed_forwards, in_text, strict=True)),
    )


def _logit_scale(keys: ConfigKeys) -> Mapping[str, Any]:
    return {} if keys.get("logit_scale") is None else logit_scale(keys)


def read_compass(family: str, keys: ConfigKeys) -> Architecture:
    """Read a text of Command whose kinds of layers each have positions of their own, or none (null)."""
    stated = keys.get("rope_parameters")
    decoder = Decoder(
        defaults=sizes(256_000, 8192, 22_528, 40, 64, 64, 8192) | {"layer_norm_eps": 1e-5, "sliding_window": 4096},
        renamed={"rms_norm_eps": "layer_norm_eps"},
        kinds=lambda keys, count: [FULL_KIND] * count,
        residual=lambda keys: Residual(centred="weight", parallel="one"),
        more=lambda keys: {**_logit_scale(keys), "tied": keys.outer_boolean("tie_word_embeddings", True)},
    )
    kinds = set(keys.get("layer_types") or [FULL_KIND])
    if not isinstance(stated, Mapping) or not kinds <= stated.keys():
        fail(
            "rope_parameters", stated, f"it must have settings, or null, for layers that are {', '.join(sorted(kinds))}"
        )
    still = tuple(sorted(kind for kind in kinds if stated[kind] is None))
    whole = {kind: (10_000.0, 1.0) for kind in sorted(kinds) if kind not in still}
    architecture = replace(decoder, ropes=whole, unturned=still)(family, keys)
    heads, hidden = keys.integer("num_attention_heads", 64), architecture.hidden_size
    for mixer in architecture.mixers:
        assert isinstance(mixer, Attention)
        if mixer.head_dim != hidden // heads:
            fail("head_dim", mixer.head_dim, f"it must be hidden_size / num_attention_heads = {hidden // heads}")
        if mixer.rope is not None:
            whole_or_proportional(mixer.rope, mixer.head_dim)
    return architecture


def _known_tokens(keys: ConfigKeys) -> Mapping[str, Any]:
    known, count = keys.integer("output_vocab_size", keys.integer("vocab_size")), keys.integer("vocab_size")
    if known > count:
        fail("output_vocab_size", known, f"vocab_size is {count}")
    return {"head_tokens": known if known < count else 0}


_APERTUS_1_5 = replace(APERTUS, defaults={**APERTUS.defaults, "vocab_size": 266_752}, more=_known_tokens)
FAMILIES = (
    Family("glm4", ("glm_ocr_text",), _GLM_OCR, names=GLM4_NAMES),
    Family("hunyuan", ("hunyuan_vl_text",), _HUNYUAN_VL, names=HUNYUAN_NAMES,
           released=((r"^(?:model\.)?vit\.", "vision_tower."),)),
    Family("ernie4_5", ("paddleocr_vl_text",), ERNIE, names=NAMES),
    Family("phi3", ("phi4_multimodal",), _PHI4, names=PHI3_NAMES, released=(
        (r"^(model\.embed_tokens_extend\.|.*\.lora_[AB]\.)", r"vision_tower.\1"), (r"\.base_layer\.", "."))),
    Family("llama", ("cosmos3_edge_text",), _COSMOS, "relu2", replace(
        NAMES, swiglu=False, spelled={Dense: {"names": ("fc1", "fc2")}}), (
        (r"^(embed_tokens|norm|layers)\.", r"model.language_model.\1."),
        (r"\.self_attn\.to_([qkv])\.", r".self_attn.\1_proj."),
        (r"\.self_attn\.to_out\.", ".self_attn.o_proj."),
        (r"\.mlp\.up_proj\.", ".mlp.fc1."),
        (r"\.mlp\.down_proj\.", ".mlp.fc2."))),
    Family("llama", ("emu3_text_model",), _EMU, names=NAMES),
    Family("llama", ("mllama_text_model",), read_llama_vision, names=NAMES),
    Family("deepseek_v2", ("deepseek_ocr2_text",), read_deepseek_ocr2, names=SHARED_NAMES,
           released=((r"^model\.(projector|sam_model|qwen2_model|view_sep[ae]rator)", r"vision_tower.\1"),)),
    Family("cohere2", ("cohere_compass_text",), read_compass, names=NAMES),
    Family("apertus", ("apertus1p5_text",), _APERTUS_1_5, "xielu", APERTUS_NAMES),
)  # fmt: skip
