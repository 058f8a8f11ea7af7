"""A naive model as a model of transformers, for families without a class in that library.

    class Model(NaiveModel):
        config_class, base_model_prefix, trunk, embedding = Config, "model", Trunk, "word_embeddings"

    register(Config, Model)

``trunk``: a module of a configuration with an embedding, ``layers`` of [T, D] -> [T, D] and a ``norm``.
Nothing is cached, and nothing is fast.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import transformers
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast


class NaiveModel(transformers.PreTrainedModel, transformers.GenerationMixin):
    base_model_prefix = "model"
    trunk: ClassVar[type[nn.Module]]
    embedding: ClassVar[str] = "embed_tokens"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = self.trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return getattr(self.model, self.embedding)

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, **_: Any) -> CausalLMOutputWithPast:
        rows = []
        for tokens_T in input_ids:
            rows.append(self.lm_head(self.model.norm(self.stream(self.get_input_embeddings()(tokens_T)))))
        return CausalLMOutputWithPast(logits=torch.stack(rows))

    def stream(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the stream after all layers, of embeddings."""
        for layer in self.model.layers:
            x_TD = layer(x_TD)
        return x_TD

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, attention_mask: Any = None, **_: Any
    ) -> dict[str, Any]:
        return {"input_ids": input_ids}

    def _prepare_cache_for_generation(self, *_: Any, **__: Any) -> None:
        """Prepare no cache: the library would choose one by kinds of layers, of which it does not know all."""

    def set_experts_implementation(self, name: str) -> None:
        """Ignore the name: only one implementation exists."""


NAIVE_TYPES: list[str] = []
"""``model_type`` of each naive model."""


def register(config: type[transformers.PreTrainedConfig], model: type[NaiveModel]) -> None:
    NAIVE_TYPES.append(config.model_type)
    transformers.AutoConfig.register(config.model_type, config)
    transformers.AutoModelForCausalLM.register(config, model)


def sine_of_places(parameter: torch.Tensor, number: int) -> torch.Tensor:
    """Return numbers of the shape of ``parameter``, float64, the same on every machine, for published or pinned
    results.
    """
    places = torch.arange(parameter.numel(), dtype=torch.float64)
    wave = torch.sin((places % 1009) ** 2 * 0.37 + places * (0.7 + 0.013 * number) + number)
    return wave.view(parameter.shape)
