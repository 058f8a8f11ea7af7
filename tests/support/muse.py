"""The text of Muse Glimmer as a model of its own: transformers has a class of it only inside the wrapper, whose head
this repeats.

    logits = T tanh(head(x) output_multiplier / T),   T = final_logit_softcapping
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.muse_glimmer import modeling_muse_glimmer as glimmer


class MuseGlimmerForCausalLM(glimmer.MuseGlimmerPreTrainedModel, transformers.GenerationMixin):
    config_class = transformers.MuseGlimmerTextConfig
    _keys_to_ignore_on_load_missing = ()

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = glimmer.MuseGlimmerTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, *args: Any, logits_to_keep: int = 0, **settings: Any) -> CausalLMOutputWithPast:
        found = self.model(*args, **settings)
        hidden = found.last_hidden_state[:, -logits_to_keep:] if logits_to_keep else found.last_hidden_state
        cap = self.config.final_logit_softcapping
        logits = cap * torch.tanh(self.lm_head(hidden) * self.config.output_multiplier / cap)
        return CausalLMOutputWithPast(logits=logits, past_key_values=found.cache)


transformers.AutoModelForCausalLM.register(transformers.MuseGlimmerTextConfig, MuseGlimmerForCausalLM, exist_ok=True)
