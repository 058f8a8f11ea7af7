"""The texts of Muse Glimmer and Muse Spark as models of their own: transformers has classes of them only inside the
wrappers, whose head this repeats.

    logits = T tanh(head(x) output_multiplier / T),   T = final_logit_softcapping
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.muse_glimmer import modeling_muse_glimmer as glimmer
from transformers.models.muse_spark import modeling_muse_spark as spark


class WithHead:
    """A ``model`` of text and its head."""

    _keys_to_ignore_on_load_missing = ()
    text: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.model = self.text(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[attr-defined]

    def forward(self, *args: Any, logits_to_keep: int = 0, **settings: Any) -> CausalLMOutputWithPast:
        found = self.model(*args, **settings)
        hidden = found.last_hidden_state[:, -logits_to_keep:] if logits_to_keep else found.last_hidden_state
        cap = self.config.final_logit_softcapping  # type: ignore[attr-defined]
        logits = cap * torch.tanh(self.lm_head(hidden) * self.config.output_multiplier / cap)  # type: ignore[attr-defined]
        return CausalLMOutputWithPast(logits=logits, past_key_values=found.cache)


class MuseGlimmerForCausalLM(WithHead, glimmer.MuseGlimmerPreTrainedModel, transformers.GenerationMixin):
    config_class = transformers.MuseGlimmerTextConfig
    text = glimmer.MuseGlimmerTextModel


class MuseSparkForCausalLM(WithHead, spark.MuseSparkPreTrainedModel, transformers.GenerationMixin):
    config_class = transformers.MuseSparkTextConfig
    text = spark.MuseSparkTextModel


for model in (MuseGlimmerForCausalLM, MuseSparkForCausalLM):
    transformers.AutoModelForCausalLM.register(model.config_class, model, exist_ok=True)
