"""The vision towers of multimodal configurations: ``vision_config`` to a ``VisionTower``.

    lfm2_vl                  siglip2_vision_model               projector_* in the wrapper
    qwen3_5, qwen3_5_moe     qwen3_5_vision                     mrope_section in the text's rotary settings
    lfm3_vl                  lfm3_vl_vision                     projector_* in the wrapper

A wrapper without ``vision_config`` has only the text part. Defaults are those of transformers'
configuration classes. Pure: no I/O, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from weft.families.config_keys import ConfigKeys, fail
from weft.families.vision import GeluKind, GridLayers, Projector, VisionTower

QWEN_MODELS = ("qwen3_5_vision", "qwen3_5_moe_vision", "qwen3_5", "qwen3_5_moe")
"""Spellings of one tower: releases name it as the wrapper."""
MERGER_EPS = 1e-6
"""Epsilon of every norm of Qwen's tower, and of LFM3's projector, which config.json does not name."""


def read_siglip2(outer: ConfigKeys) -> VisionTower | None:
    """Read a tower; None without one. The defaults are those of transformers' Siglip2VisionConfig and Lfm2VlConfig."""
    keys = outer.inner("vision_config")
    if keys is None:
        return None
    keys.only("vision_config.", model_type="siglip2_vision_model", num_channels=3)
    outer.only(vision_feature_layer=-1)
    hidden, heads = keys.integer("hidden_size", 768), keys.integer("num_attention_heads", 12)
    positions = keys.integer("num_patches", 256)
    _check(hidden, ("num_attention_heads", heads), ("num_patches", positions))
    projector = Projector(
        width=outer.integer("projector_hidden_size", 2560),
        activation=_gelu("projector_hidden_act", outer.get("projector_hidden_act", "gelu")),
        bias=outer.boolean("projector_bias", True),
        norm=outer.boolean("projector_use_layernorm", True),
        downsample_factor=outer.integer("downsample_factor", 2),
    )
    return VisionTower(
        hidden_size=hidden,
        layer_count=keys.integer("num_hidden_layers", 12),
        heads=heads,
        width=keys.integer("intermediate_size", 3072),
        patch_size=keys.integer("patch_size", 16),
        positions=positions,
        eps=keys.number("layer_norm_eps", 1e-6),
        activation=_gelu("vision_config.hidden_act", keys.get("hidden_act", "gelu_pytorch_tanh")),
        projector=projector,
        image_token_id=outer.integer("image_token_id", outer.get("image_token_index", 396), least=0),
    )


def read_qwen3_5_tower(keys: ConfigKeys) -> VisionTower | None:
    """Read a tower; None without one. ``keys``: of the text part. The patch merger norms each patch, joins four
    neighbours side by side, and applies two products: it is a projector whose norm is before the tower's neighbours
    are joined."""
    outer, vision = keys.outer, keys.outer.inner("vision_config")
    if vision is None:
        return None
    name = vision.get("model_type", QWEN_MODELS[0])
    if name not in QWEN_MODELS:
        fail("vision_config.model_type", name, f"the towers served here are {', '.join(QWEN_MODELS[:2])}")
    vision.only("vision_config.", in_channels=3, temporal_patch_size=2, deepstack_visual_indexes=[])
    hidden, heads = vision.integer("hidden_size", 1152), vision.integer("num_heads", 16)
    positions = vision.integer("num_position_embeddings", 2304)
    _check(hidden, ("num_heads", heads), ("num_position_embeddings", positions))
    if hidden % (4 * heads):
        fail(
            "vision_config.num_heads",
            heads,
            f"the {hidden // heads} dims of a head turn by rows and columns: they must be a multiple of 4",
        )
    factor = vision.integer("spatial_merge_size", 2)
    return VisionTower(
        hidden_size=hidden,
        layer_count=vision.integer("depth", 27),
        heads=heads,
        width=vision.integer("intermediate_size", 4304),
        patch_size=vision.integer("patch_size", 16),
        positions=positions,
        eps=MERGER_EPS,
        activation=_gelu("vision_config.hidden_act", vision.get("hidden_act", "gelu_pytorch_tanh")),
        projector=Projector(hidden * factor**2, "gelu", bias=True, norm=False, downsample_factor=factor),
        image_token_id=outer.integer("image_token_id", 248_056, least=0),
        kind="qwen3_5",
        frames=2,
        theta=_theta(vision),
        sections=_sections(keys),
        video_token_id=outer.integer("video_token_id", 248_057, least=0),
    )


def read_lfm3_tower(outer: ConfigKeys) -> VisionTower | None:
    """Read a tower; None without one. The defaults are those of transformers' Lfm3VlVisionConfig and Lfm3VlConfig. The
    projector's norm is before its neighbours are joined, as in Qwen3.5."""
    keys = outer.inner("vision_config")
    if keys is None:
        return None
    keys.only("vision_config.", model_type="lfm3_vl_vision", in_channels=3, temporal_patch_size=2)
    count = keys.integer("num_hidden_layers", 14)
    kinds = keys.get("layer_types", ["conv" if layer < 2 or layer % 2 else "full_attention" for layer in range(count)])
    if not isinstance(kinds, list) or len(kinds) != count or set(kinds) - {"conv", "full_attention"}:
        fail("vision_config.layer_types", kinds, f"it must list conv or full_attention for each of the {count} layers")
    hidden, heads = keys.integer("hidden_size", 1024), keys.integer("num_attention_heads", 16)
    kv_heads, kernel = keys.integer("num_key_value_heads", 8), keys.integer("conv_kernel_size", 3)
    if hidden % (4 * heads):
        fail("vision_config.num_attention_heads", heads, f"hidden_size {hidden} must be a multiple of 4 of them")
    if heads % kv_heads:
        fail("vision_config.num_key_value_heads", kv_heads, f"it must divide num_attention_heads {heads}")
    if kernel % 2 == 0:
        fail("vision_config.conv_kernel_size", kernel, "it must be odd")
    projector = Projector(
        width=outer.integer("projector_hidden_size", 4096),
        activation=_gelu("projector_hidden_act", outer.get("projector_hidden_act", "gelu")),
        bias=outer.boolean("projector_bias", True),
        norm=False,
        downsample_factor=keys.integer("spatial_merge_size", 2),
        norm_eps=MERGER_EPS,
    )
    return VisionTower(
        hidden_size=hidden,
        layer_count=count,
        heads=heads,
        width=keys.integer("intermediate_size", 2560),
        patch_size=keys.integer("patch_size", 16),
        positions=0,
        eps=keys.number("norm_eps", 1e-5),
        activation="swiglu",
        projector=projector,
        image_token_id=outer.integer("image_token_id", 125_030, least=0),
        kind="lfm3",
        frames=2,
        theta=_theta(keys, 1e6, "axial"),
        video_token_id=outer.integer("video_token_id", 125_029, least=0),
        grid_layers=GridLayers(tuple(kind == "conv" for kind in kinds), kernel, kv_heads),
    )


def _theta(vision: ConfigKeys, default: float = 10_000.0, kind: str | None = None) -> float:
    stated = ConfigKeys(vision.get("rope_parameters") or {}, fallback={})
    if kind is not None:
        stated.only("vision_config.rope_parameters.", rope_type=kind)
    return stated.number("rope_theta", default)


def _sections(keys: ConfigKeys) -> tuple[int, ...]:
    stated = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    inner = ConfigKeys(stated if isinstance(stated, Mapping) else {}, fallback={})
    sections = inner.get("mrope_section", [11, 11, 10])
    if not (
        isinstance(sections, list | tuple)
        and len(sections) == 3
        and all(isinstance(size, int) and 0 <= size <= 1024 for size in sections)
    ):
        fail("rope_parameters.mrope_section", sections, "it must be three counts: of time, rows and columns")
    if not inner.boolean("mrope_interleaved", True):
        fail("rope_parameters.mrope_interleaved", False, "only interleaved sections are served")
    return tuple(sections)


def _check(hidden: int, heads: tuple[str, int], positions: tuple[str, int]) -> None:
    """Raise CheckpointError where heads do not divide ``hidden``, or positions are not a square grid. Both come with
    the names of their keys."""
    if hidden % heads[1]:
        fail(f"vision_config.{heads[0]}", heads[1], f"it must divide hidden_size {hidden}")
    if math.isqrt(positions[1]) ** 2 != positions[1]:
        fail(f"vision_config.{positions[0]}", positions[1], "positions must be a square grid")


def _gelu(name: str, value: object) -> GeluKind:
    kinds: dict[object, GeluKind] = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
    if value not in kinds:
        fail(name, value, f"{' and '.join(map(str, kinds))} are served")
    return kinds[value]
