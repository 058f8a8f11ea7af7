"""Writes a section of docs/models.md: the decoders of the installed transformers that weft does not serve, and what
their configurations have that it lacks.

    python -m tests.oracle.decoders_left

It goes through each class of transformers that predicts the next token and has no encoder, and through the text parts
of wrappers. Parts are told by the keys of the default configuration: a key that the reader of some served family asks
for is a part that weft has; any other is a part that it lacks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from tests.fixtures.checkpoints import CHECKPOINTS
from weft.families import REFUSED, all_families, served, text_config
from weft.families.config_keys import ConfigKeys
from weft.families.known_keys import OF_FAMILY, is_harmless

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TITLE, NEXT = "## Decoders that are not served\n", "## The checkpoint directory\n"
SHOWN = 4

ENCODERS = (
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
)
"""Tables of transformers: a class that is in one of them is not a decoder alone."""
SIDE_PARTS = ("assistant", "musicgen", "trocr", "moshi", "encoder", "decoder", "git", "marian", "bert")
"""Words in names of decoders that are parts of something else: drafters, sound, captions, translation."""

HAS: dict[str, str] = {
    "kv_lora_rank": "latent attention",
    "n_group": "groups of experts",
    "num_experts": "experts",
    "num_local_experts": "experts",
    "n_routed_experts": "experts",
    "moe_num_experts": "experts",
    "n_shared_experts": "shared experts",
    "shared_expert_intermediate_size": "shared experts",
    "sliding_window": "windows",
    "partial_rotary_factor": "partial rotary",
    "final_logit_softcapping": "caps on logits",
    "attn_logit_softcapping": "caps on scores",
    "linear_num_value_heads": "delta nets",
    "hc_mult": "several streams",
    "embedding_multiplier": "multipliers",
    "no_rope_layers": "layers without positions",
    "layer_norm_eps": "norms that subtract the mean",
    "index_topk": "an index",
    "compress_ratios": "entries of tokens",
    "compress_rates": "entries of tokens",
}
"""Key -> the part of it that weft has."""
LACKS: dict[str, str] = {
    "alibi": "biases by distance (ALiBi)",
    "mup_scale": "multipliers of its own",
    "multi_query": "joined keys of all heads",
    "mamba_d_state": "",
}
"""Key -> the part of it that weft lacks, in words; "" for none."""
BY_CLASS: dict[str, str] = {
    "bitnet": "norms inside of attention and feed-forward; activations rounded by token (decision 0084)",
    "doge": "a mask that each layer learns",
    "beam": "sums scaled by depth, gates with a bias, queries that grow by a power",
    "diffusion_gemma_text": "blocks of tokens that are denoised together",
    "embedding_gemma2_text": "no head: it embeds, in both directions",
    "ernie4_5_vl_moe_text": "experts of pictures in the same stacks of a file",
    "t5gemma2_text": "an encoder that it reads",
    "unlimited_ocr_text": "windows next to which a token sees all of the prompt",
    "voxtral_realtime_text": "a factor after norms, of the delay of the sound",
    "openai-gpt": "norms after the sum with the stream",
}
"""What no key says, as the class of transformers computes it."""


def is_decoder(model_type: str) -> bool:
    """Return whether transformers has it as a decoder alone."""
    elsewhere = {name for table in ENCODERS for name in getattr(modeling_auto, table)}
    return model_type not in elsewhere and not any(word in model_type for word in SIDE_PARTS)


@cache
def default_of(model_type: str) -> Mapping[str, Any] | None:
    """Return the text part of the default configuration; None where the class makes none."""
    try:
        stated: Mapping[str, Any] = text_config(CONFIG_MAPPING[model_type]().to_dict())
    except Exception:
        return None
    return stated


@cache
def wrappers() -> tuple[tuple[str, str], ...]:
    """(``model_type`` of a wrapper, that of its text part), of those whose text part is a decoder."""
    made, known = [], {*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *served()}
    for model_type in CONFIG_MAPPING_NAMES:
        parts = getattr(CONFIG_MAPPING[model_type], "sub_configs", None) or {}
        stated = default_of(model_type) if "text_config" in parts else None
        text = str(stated.get("model_type")) if stated else ""
        if text in known or text.endswith("_text"):
            made.append((model_type, text))
    return tuple(made)


@cache
def decoders() -> tuple[str, ...]:
    """Return the ``model_type`` of each decoder, text parts of wrappers included."""
    alone = [name for name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if is_decoder(name)]
    of_wrappers = {name for name, _ in wrappers()}
    texts = [text for _, text in wrappers() if is_decoder(text)]
    return tuple(sorted({*alone, *texts} - (of_wrappers - set(texts))))


@cache
def asked() -> frozenset[str]:
    """Return the keys that the reader of some family asks for."""
    seen: set[str] = set()
    family_of = {model_type: family for family in all_families() for model_type in family.model_types}
    for model_type, settings in CHECKPOINTS.values():
        config = transformers.AutoConfig.for_model(model_type, **(settings | {"eos_token_id": 2})).to_dict() | {
            "dtype": "float32"
        }
        family = family_of[model_type]
        family.read(family.name, ConfigKeys(text_config(config), fallback=config, seen=seen))
    return frozenset(seen | {key for keys in OF_FAMILY.values() for key in keys})


def lacks(model_type: str, stated: Mapping[str, Any]) -> list[str]:
    """Return what weft lacks of it, by the keys that say something and that no family asks for."""
    if model_type in BY_CLASS:
        return [BY_CLASS[model_type]]
    usual = (None, False, 0, 0.0, 1.0, "", [], {})
    keys = [
        key
        for key, value in stated.items()
        if key not in (*asked(), "hidden_act")
        and not is_harmless("", key)
        and value not in usual
        and not key.endswith("token_id")
    ]
    words = dict.fromkeys(LACKS.get(key, f"`{key}`") for key in sorted(keys, key=lambda key: key not in LACKS))
    named = [word for word in words if word]
    return named or ["nothing that its keys say: its class was not read"]


def has(stated: Mapping[str, Any]) -> list[str]:
    """Return the parts of it that weft has."""
    return list(dict.fromkeys(word for key, word in HAS.items() if stated.get(key) not in (None, 0, False)))


def row(model_type: str) -> str:
    stated = default_of(model_type) or {}
    missing = lacks(model_type, stated)
    more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
    return f"| `{model_type}` | {', '.join(has(stated)) or 'attention'} | {', '.join(missing[:SHOWN])}{more} |"


def section() -> str:
    every = decoders()
    here = set(served())  # looks through all installed packages
    left = [name for name in every if name not in here]
    unread = sorted(name for name, text in wrappers() if text in here and name not in (*here, *REFUSED))
    listed = ", ".join(f"`{name}`" for name in unread)
    return f"""{TITLE}
`python -m tests.oracle.decoders_left` writes this section. transformers {transformers.__version__} has {len(every)}
decoders without an encoder, those in wrappers included. weft serves {len(every) - len(left)} of them, and not these
{len(left)}. Parts are judged by the keys of default configurations: a row says where to begin, and may not name all.

| `model_type` | parts that weft has | parts that it lacks, or their keys |
|---|---|---|
{chr(10).join(map(row, left))}

{_filled(f"The text of {len(unread)} more wrappers is served, without pictures and sound: {listed}.")}

"""


def _filled(text: str) -> str:
    """Return ``text`` in lines of at most 120 characters."""
    return "\n".join(line.rstrip() for line in re.findall(r"(?:.{1,119})(?: |$)", text))


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    above, _, rest = page.partition(TITLE) if TITLE in page else page.partition(NEXT)
    behind = rest.partition(NEXT)[2] if TITLE in page else rest
    PAGE.write_text(above + section() + NEXT + behind, encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
