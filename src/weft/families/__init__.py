"""``config.json`` -> Architecture and ModelSpec: the models that weft serves, and the dialects that it reads.

    model_type        family           mixers                         feed-forward
    llama, mistral    llama            attention                      dense
    diffllama         diffllama        differential attention         dense
    qwen3, qwen3_moe  qwen3            attention                      dense or experts
    smollm3           smollm3          attention, some without rotary dense
    qwen2, phi3 ...   dense, centred   attention                      dense (a row for each)
    gpt2, opt ...     gpt2             attention                      dense; positions at the embedding, or turning
    bloom, mpt        alibi            attention with a bias by distance dense
    mixtral ...       routed           attention                      experts
    dbrx              dbrx             attention                      experts, stored as the rows of one matrix
    jetmoe            jetmoe           attention by experts           experts
    glm_ocr_text ...  texts            rows of other families         (text parts)
    hy_v3 ...         sparse           attention, latent or not       dense in the first layers, then experts
    llama4_text ...   mixed            attention: windows, chunks, gates dense or experts
    muse_glimmer_text muse_glimmer     gated attention, windows       dense
    muse_spark_text   muse_spark       gated attention, windows       experts in a latent width, or dense
    deepseek_v3 ...   deepseek         attention, latent or not       dense in the first layers, then experts
    longcat_flash     longcat_flash    latent attention               dense, experts added a layer later
    minimax_m3_vl_text chosen          attention over chosen blocks   dense in the first layers, then experts
    axk2, hy_v4 ...   latent_chosen    latent attention over chosen tokens; gated norms or several streams
                                                                      dense in the first layer, then experts
    deepseek_v4       deepseek_v4      attention over the last tokens and over entries; several streams
                                                                      experts + shared expert
    qwen3_5[_text]    qwen3_5          gated delta + gated attention  dense
    qwen3_5_moe[_text] qwen3_5         gated delta + gated attention  experts + gated shared expert
    interns2_mobius[_text]             the same, banks of experts that layers share
    qwen3_next        qwen3_next       gated delta + gated attention  experts + gated shared expert
    qwen4_exp[_text]  qwen4_exp        gated delta, some with n-grams, + attention over chosen blocks;
                                       several streams                experts + gated shared expert
    glm5_next[_text]  glm5_next        Kimi delta + latent attention over chosen blocks; several streams
                                                                      dense or experts + shared expert
    lfm2              lfm2             short convolution + attention  dense
    lfm2_moe          lfm2             short convolution + attention  dense in the first layers, then experts
    lfm2_vl           lfm2             as lfm2, with a vision tower (more of them: ``towers``)
    lfm2_bidirectional lfm2            as lfm2, both reading later tokens (``causality``)
    lfm3              lfm3             short conv. + attention, windows dense
    lfm3_vl           lfm3             as lfm3, with a vision tower
    olmo3             olmo3            attention, some with a window  dense
    olmo_hybrid       olmo_hybrid      gated delta + attention        dense
    kimi_linear       kimi_linear      Kimi delta + latent attention  dense or experts + shared expert
    kimi_k3           kimi_k3          the same, gated; attention residuals; experts in a latent width
    alice_ai          alice_ai         Kimi delta + gated attention; attention residuals
                                                                      experts + gated shared expert
    bailing_hybrid    ling             Kimi delta + latent attention  dense or experts + shared expert
    bailing_hybrid,   ling             lightning + latent attention   dense or experts + shared expert
    bailing_moe_v2_5                   (Ling and Ring 2.5)
    gigachat3_5       gigachat3_5      gated delta + latent attention, gated norms
                                                                      dense or experts + shared expert
    gpt_oss           gpt_oss          attention with sinks, windows  experts with biases
    gemma, gemma2     gemma            attention, caps and windows    dense
    gemma3[_text]     gemma3           attention, windows             dense
    gemma3n[_text]    gemma3n          attention, windows, shared KV; several streams
                                                                      dense
    gemma4[_text]     gemma4           attention, windows, shared KV  dense, or experts and dense
    minimax           minimax          lightning + attention          experts
    granitemoehybrid  granite_hybrid   Mamba-2 + attention            (experts +) shared dense
    bamba             bamba            Mamba-2 + attention            dense
    falcon_h1         falcon_h1        Mamba-2 and attention at once  dense
    nemotron_h,       nemotron_h       Mamba-2 or attention or none   dense or experts in layers without mixer
    nemotron_h_puzzle
    nemotron-nas      nemotron_nas     attention or none              dense or none
    jamba             jamba            Mamba-1 + attention            dense or experts
    plamo2, plamo3    plamo2, plamo3   selective Mamba-2 + attention, or attention, windows
                                                                      dense
    zamba2            zamba2           Mamba-2, some with a shared transformer block
    mamba2            mamba2           Mamba-2                        none
    mamba             mamba            Mamba-1                        none
    falcon_mamba      falcon_mamba     Mamba-1                        none
    rwkv7             rwkv7            time mixing (WKV7), channel mixing, in turns

Related families share a file here, over ``reading.py``. Further families are found by the entry point group
``weft.families``, by name of their ``model_type``, and are imported when a checkpoint names them: those in ``more``,
which are rarely served, and those of other packages (docs/adding-a-model.md).

Dialects, all read the same: a multimodal wrapper with ``text_config`` (its text part is served, and the towers of
``towers``); ``torch_dtype`` and ``dtype``;
``rope_theta`` / ``rope_scaling`` / ``partial_rotary_factor`` at top level and ``rope_parameters``; layer
kinds by ``layer_types``, ``layers_block_type``, ``full_attention_interval`` or ``full_attn_idxs``.

Sources for the defaults: the configuration classes of transformers for each ``model_type``. Pure: no I/O, no
torch.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from difflib import SequenceMatcher
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from weft.errors import CheckpointError, UnknownArchitectureError
from weft.families import (
    alibi,
    attention,
    centred,
    chosen,
    dbrx,
    deepseek,
    deepseek_v4,
    delta,
    dense,
    gemma,
    gemma3n,
    gigachat,
    gpt2,
    gpt_oss,
    granite,
    indexed,
    jetmoe,
    kimi,
    latent_chosen,
    lfm2,
    lightning,
    longcat,
    mamba,
    mixed,
    muse,
    nemotron_h,
    nemotron_nas,
    plamo,
    routed,
    rwkv,
    sparse,
    texts,
    zamba2,
)
from weft.families.architecture import Architecture
from weft.families.causality import as_causality_says
from weft.families.config_keys import ConfigKeys, fail
from weft.families.known_keys import is_harmless
from weft.families.mixers.feed_forward import Experts
from weft.families.reading import Family
from weft.spec import DTypeName, ModelSpec

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def read_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Return the part of a model's geometry that memory needs. ``config``: the parsed config.json.

    Raises UnknownArchitectureError for a ``model_type`` outside ``served``, and CheckpointError naming the key for a
    setting that is missing, malformed, or not served.
    """
    return read_architecture(config).spec()


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Return the whole geometry of a model, for the model code. Raises as ``read_spec``."""
    model_type = config.get("model_type")
    family = _family_of(config)
    if family is None:
        named = ", ".join(str(name) for name in config.get("architectures") or ())
        raise UnknownArchitectureError(
            f"config.json has model_type {model_type!r}{f' ({named})' if named else ''}; {_nearest(config)}"
            f"weft serves {', '.join(served())}",
            param="model",
        )
    keys = ConfigKeys(text_config(config), fallback=text_parts(config))
    _refuse_what_is_not_served(keys, family.activation)
    return as_causality_says(replace(family.read(family.name, keys), names=family.names), keys)


REFUSED: dict[str, str] = {
    "bitnet": "it rounds activations to 8 bits by one scale for a token, and weft by one for 128 columns, which is "
    "another model (decision 0084)",
    "paligemma": "its prompts are read in both directions",
    "jev": "it has a head of decisions and writes no text",
}
"""Models that are not served although their parts may be, and the reason; wrappers of served text among them."""


def _family_of(config: Mapping[str, Any]) -> Family | None:
    """Return the family of ``config``, or that of the text part of a wrapper that weft does not know."""
    model_type, inner = config.get("model_type"), text_config(config)
    family = find_family(model_type)
    if family is not None:
        return family
    if str(model_type) in REFUSED:
        fail("model_type", model_type, REFUSED[str(model_type)])
    return None if inner is config else find_family(inner.get("model_type"))


def is_text_alone(config: Mapping[str, Any]) -> bool:
    """Return whether ``config`` describes a wrapper of which weft knows only the text part."""
    return text_config(config) is not config and find_family(config.get("model_type")) is None


def text_parts(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``config``, without its other parts where only the text is served."""
    if not is_text_alone(config):
        return config
    return {key: value for key, value in config.items() if not key.endswith("_config") or key == "quantization_config"}


_KEYS_LEAST, _KEYS_SHOWN, _TRIES = 3, 12, 8


def _nearest(config: Mapping[str, Any]) -> str:
    """Return words that name the family which leaves the fewest keys of ``config`` unread; "" if it reads too few."""
    stated = text_config(config)
    own = {key for key, value in stated.items() if value not in (None, False) and not is_harmless("", key)}
    if len(own) < _KEYS_LEAST:
        return ""

    def order(family: Family) -> tuple[int, float]:
        likeness = SequenceMatcher(None, str(config.get("model_type")), family.name).ratio()
        return len(_unread(family, stated, own)), -likeness

    nearest = min(all_families(), key=order)
    left = sorted(_unread(nearest, stated, own))
    more = f" and {len(left) - _KEYS_SHOWN} more" if len(left) > _KEYS_SHOWN else ""
    missing = f", which does not serve {', '.join(left[:_KEYS_SHOWN])}{more}" if left else ""
    return f"by its keys the nearest is {nearest.name}{missing}; "


def _unread(family: Family, stated: Mapping[str, Any], own: set[str]) -> set[str]:
    """Return the keys among ``own`` that the family does not read, or refuses."""
    refused = {"hidden_act"} if stated.get("hidden_act", family.activation) != family.activation else set()
    for _ in range(_TRIES):
        rest = {key: value for key, value in stated.items() if key not in refused}
        keys = ConfigKeys(rest, fallback=rest, seen={"hidden_act"} - refused)
        try:
            family.read(family.name, keys)
        except CheckpointError as error:
            key = error.message.removeprefix("config.json: ").partition(" ")[0]
            if key in rest:
                refused.add(key)
                continue
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            pass  # the value is meant for another family, and may have any form
        break
    return own & refused | own - keys.seen


def name_here(config: Mapping[str, Any]) -> Callable[[str], str]:
    """Return a function from the name of a tensor in released files to its name here."""
    family = _family_of(config)

    def renamed(name: str) -> str:
        for pattern, here in family.released if family is not None else ():
            name = re.sub(pattern, here, name)
        return name

    return renamed


EACH_EXPERT = "{e}"
"""Number of an expert, in the name here of a tensor that has the rows of all experts, one below the other."""


def most_experts(config: Mapping[str, Any]) -> int:
    """Return the number of experts in the layer that has the most; 0 for a model without. Raises as ``read_spec``."""
    feeds = read_architecture(config).feed_forwards
    return max((feed.count for feed in feeds if isinstance(feed, Experts)), default=0)


def stores_transposed(config: Mapping[str, Any]) -> Callable[[str], bool]:
    """Return a function that says, by the name of a tensor here, whether files store it as [columns, rows]."""
    family = _family_of(config)
    if family is None or not family.transposed:
        return lambda name: False
    pattern = re.compile(family.transposed)
    return lambda name: pattern.search(name) is not None


def named_dtype(config: Mapping[str, Any]) -> DTypeName | None:
    """Return the dtype that config.json names for its weights; None if it is missing (then the tensors decide)."""
    return ConfigKeys(text_config(config), fallback=config).dtype()


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language part of a multimodal configuration, also of one whose thinker is multimodal (Qwen's Omni) and
    of LFM2-Audio; the configuration itself for any other."""
    thinker = config.get("thinker_config")
    part = "lfm" if config.get("model_type") == "lfm_audio" else "text_config"
    inner = (thinker if isinstance(thinker, Mapping) else config).get(part)
    return inner if isinstance(inner, Mapping) else config


QUANTIZATIONS = (
    "fp8",
    "compressed-tensors",
    "gptq",
    "awq",
    "auto-round",
    "modelopt",
    "quark",
    "mxfp4",
    "bitsandbytes",
    "torchao",
    "gguf",
)
"""The ``quant_method`` values of config.json whose weights are read (``weft.models.forms``)."""


# Refused by name: using a default for a setting that the checkpoint has would silently serve wrong numbers.
def _refuse_what_is_not_served(keys: ConfigKeys, served: str) -> None:
    if quantization := keys.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        if method not in QUANTIZATIONS:
            fail("quantization_config", method, f"weft reads {', '.join(QUANTIZATIONS)}; or use the bf16 one")
    activation = keys.get("hidden_act", served)
    if activation != served and (served, activation) not in (("silu", "swish"), ("swigluoai", "silu")):
        fail("hidden_act", activation, f"only {served} is served")


FAMILIES: tuple[Family, ...] = tuple(
    family
    for module in (
        alibi,
        attention,
        centred,
        chosen,
        dbrx,
        deepseek,
        deepseek_v4,
        delta,
        dense,
        gemma,
        gemma3n,
        gigachat,
        gpt2,
        gpt_oss,
        granite,
        indexed,
        jetmoe,
        latent_chosen,
        kimi,
        lfm2,
        lightning,
        longcat,
        mamba,
        mixed,
        muse,
        nemotron_h,
        nemotron_nas,
        plamo,
        routed,
        rwkv,
        sparse,
        texts,
        zamba2,
    )
    for family in module.FAMILIES
)
_OF_MODEL_TYPE = {model_type: family for family in FAMILIES for model_type in family.model_types}
GROUP = "weft.families"
"""Entry points of further families. An entry point has the name of a ``model_type``, and refers to a tuple of families,
one of which serves that type."""


def _further() -> Mapping[str, EntryPoint]:
    """Return the entry points of further families by ``model_type``, without importing any."""
    return _on_path(tuple(sys.path))


@lru_cache(maxsize=4)
def _on_path(path: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    """Return the entry points of packages on ``path``, which is ``sys.path``, as they are when first asked for."""
    # Most checkpoints need neither the module nor a walk over all installed packages.
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=GROUP) if point.name not in _OF_MODEL_TYPE}


def _load(point: EntryPoint) -> Family:
    """Return the family that ``point`` names. Raises CheckpointError naming the package if it has no such family."""
    try:
        families: tuple[Family, ...] = point.load()
        return next(family for family in families if point.name in family.model_types)
    except (ImportError, AttributeError, TypeError, StopIteration) as error:
        package = point.dist.name if point.dist else "an unknown package"
        raise CheckpointError(
            f"the family {point.name} of {package} ({GROUP}: {point.value}) cannot be imported: "
            f"{error or 'no family there has this model_type'}",
            param="model",
        ) from error


def find_family(model_type: object) -> Family | None:
    """Return the family of ``model_type``, here or of an entry point; None where there is none."""
    if not isinstance(model_type, str) or model_type in _OF_MODEL_TYPE:
        return _OF_MODEL_TYPE.get(str(model_type))
    point = _further().get(model_type)
    return None if point is None else _load(point)


def served() -> tuple[str, ...]:
    """Return the ``model_type`` values of config.json that weft serves, those of entry points last."""
    return (*_OF_MODEL_TYPE, *sorted(_further()))


def all_families() -> tuple[Family, ...]:
    """Return all families, except those of packages that cannot be imported."""
    families = dict.fromkeys(FAMILIES)
    for point in _further().values():
        with suppress(CheckpointError):
            families[_load(point)] = None
    return tuple(families)
