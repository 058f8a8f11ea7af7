"""``config.json`` -> Architecture and ModelSpec: the table of what weft serves, and the dialects it reads.

    model_type        family           mixers                         feed-forward
    qwen3             qwen3            attention                      dense
    qwen3_5[_text]    qwen3_5          gated delta + gated attention  dense
    qwen3_5_moe[_text] qwen3_5         gated delta + gated attention  experts + gated shared expert
    qwen3_next        qwen3_next       gated delta + gated attention  experts + gated shared expert
    lfm2              lfm2             short convolution + attention  dense
    granitemoehybrid  granite_hybrid   Mamba-2 + attention            (experts +) shared dense

One file here for each kin of families, over ``reading.py``.

Dialects, all read the same: a multimodal wrapper with ``text_config`` (its text part is served);
``torch_dtype`` and ``dtype``; ``rope_theta`` / ``rope_scaling`` / ``partial_rotary_factor`` at top level and
``rope_parameters``; layer kinds by ``layer_types``, ``layers_block_type``, ``full_attention_interval`` or
``full_attn_idxs``; "mamba"/"attention" and "linear_attention"/"full_attention".

What is not understood is an error that names the key: a default silently taken for a setting that the
checkpoint does have would serve wrong numbers. Sources for the defaults: the configuration classes of
transformers for each ``model_type``. Pure: no I/O, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.architecture import Architecture
from weft.config_keys import ConfigKeys, fail
from weft.errors import UnknownArchitectureError
from weft.families import granite, lfm2, qwen
from weft.spec import DTypeName, ModelSpec


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


@dataclass(frozen=True, slots=True)
class _Family:
    family: str
    read: Callable[[str, ConfigKeys], Architecture]


_TABLE: dict[str, _Family] = {
    "qwen3": _Family("qwen3", qwen.read_qwen3),
    "qwen3_5": _Family("qwen3_5", qwen.read_qwen_hybrid),
    "qwen3_5_text": _Family("qwen3_5", qwen.read_qwen_hybrid),
    "qwen3_5_moe": _Family("qwen3_5", qwen.read_qwen_hybrid),
    "qwen3_5_moe_text": _Family("qwen3_5", qwen.read_qwen_hybrid),
    "qwen3_next": _Family("qwen3_next", qwen.read_qwen_hybrid),
    "lfm2": _Family("lfm2", lfm2.read_lfm2),
    "granitemoehybrid": _Family("granite_hybrid", granite.read_granite),
}

SUPPORTED: tuple[str, ...] = tuple(_TABLE)
"""The ``model_type`` values of config.json that weft serves."""
