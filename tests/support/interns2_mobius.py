"""Intern-S2-Mobius as a model of transformers, which has no class for it: its Qwen3.5 with layers that share experts.

    y = experts of bank (layer mod num_blocks)(x) + sigmoid(gate x) shared expert(x), the last two of the layer

Source: vLLM's ``interns2_mobius.py`` (Apache 2.0), whose formulas these are.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

from tests.support.naive_model import NAIVE_TYPES


class MobiusConfig(Qwen3_5MoeTextConfig):
    model_type = "interns2_mobius_text"

    def __init__(self, num_blocks: int = 4, **settings: Any) -> None:
        super().__init__(**settings)
        self.num_blocks = num_blocks


class Bank(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate, self.experts = qwen.Qwen3_5MoeTopKRouter(config), qwen.Qwen3_5MoeExperts(config)


class OwnExpert(nn.Module):
    def __init__(self, config: Any, bank: Bank) -> None:
        super().__init__()
        self.shared_expert = qwen.Qwen3_5MoeMLP(config, intermediate_size=config.shared_expert_intermediate_size)
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)
        self._bank = (bank,)  # no module of this one

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        [bank], x_TD = self._bank, x_BTD.flatten(0, 1)
        _, weights_TX, ids_TX = bank.gate(x_TD)
        y_TD = bank.experts(x_TD, ids_TX, weights_TX)
        y_TD = y_TD + self.shared_expert_gate(x_TD).sigmoid() * self.shared_expert(x_TD)
        return y_TD.view_as(x_BTD)


class MobiusForCausalLM(qwen.Qwen3_5MoeForCausalLM):
    config_class = MobiusConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        own = copy.deepcopy(config)
        own._experts_implementation = "eager"  # it takes float64
        self.model.meta_mlp = nn.ModuleList(Bank(own) for _ in range(config.num_blocks))
        for number, layer in enumerate(self.model.layers):
            layer.mlp = OwnExpert(config, self.model.meta_mlp[number % config.num_blocks])


transformers.AutoConfig.register("interns2_mobius_text", MobiusConfig)
transformers.AutoModelForCausalLM.register(MobiusConfig, MobiusForCausalLM)
NAIVE_TYPES.append("interns2_mobius_text")
