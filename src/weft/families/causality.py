"""Models whose tokens see later ones: embedders made of a decoder, whose config.json says so.

    is_causal: false                      attention of any family: every token of the prompt, or those of a window
                                          on either side; recurrent layers stay as they are
    Lfm2Bidirectional... (architectures)  LFM2.5-Embedding: attention as above, and convolutions are centred
    use_bidirectional_attention (Gemma)   read by the family, as its windows change too

Such a model generates no text. Each prompt is computed in one step, and no prefix is kept: a token's
keys depend on tokens that come after it (``spec.ModelSpec.causal``). Layers that hold attention in a form of their
own (latents, chosen blocks, shared pages) are refused by name.

Source: ``create_causal_mask`` and ``create_bidirectional_sliding_window_mask`` of transformers 5.24, which read the
key for every family; ``Lfm2BidirectionalModel`` of transformers for the convolutions. Pure.
"""

from __future__ import annotations

from dataclasses import replace

from weft.families.architecture import Architecture
from weft.families.config_keys import ConfigKeys, fail
from weft.families.mixers import Mixer
from weft.families.mixers.attention import Attention
from weft.families.mixers.short_conv import ShortConv

CENTRED = "Lfm2Bidirectional"
"""Prefix of the names of classes whose convolutions are centred."""


def as_causality_says(architecture: Architecture, keys: ConfigKeys) -> Architecture:
    """Return ``architecture`` with the attention that ``is_causal`` and ``architectures`` ask for.

    Raises CheckpointError for a model that is not served so.
    """
    causal, outer = keys.boolean("is_causal", True), keys.outer
    if outer.boolean("is_causal", causal) != causal:
        fail("is_causal", outer.get("is_causal"), f"text_config says {str(causal).lower()}")
    named = [str(name) for name in outer.get("architectures") or () if "Bidirectional" in str(name)]
    centred = keys.get("model_type") == "lfm2_bidirectional" or any(name.startswith(CENTRED) for name in named)
    if causal and not centred:
        if named and architecture.causal:
            fail("architectures", named[0], "of such classes LFM2's are served, and others with is_causal false")
        return architecture
    key, value = ("architectures", named[0] if named else keys.get("model_type")) if centred else ("is_causal", False)
    if architecture.vision is not None:
        fail(key, value, "models that see pictures are served only with causal attention")
    mixers = [_both_ways(mixer, key, value, centred=centred) for mixer in architecture.mixers]
    if all(getattr(mixer, "causal", True) for mixer in mixers):
        fail(key, value, "the model has no attention that could see later tokens")
    return replace(architecture, mixers=tuple(mixers), mtp=None)


def _both_ways(mixer: Mixer | None, key: str, value: object, *, centred: bool) -> Mixer | None:
    if isinstance(mixer, Attention) and mixer.index is None and mixer.kv_of is None and not mixer.shared:
        return replace(mixer, causal=False)
    if isinstance(mixer, ShortConv):
        return replace(mixer, centred=centred)
    if mixer is not None and (mixer.layer_spec().cached_heads or isinstance(mixer, Attention)):
        fail(key, value, f"{type(mixer).__name__} is served with causal attention")
    return mixer
