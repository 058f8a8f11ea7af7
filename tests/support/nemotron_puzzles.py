"""Nemotron-H Puzzle and Nemotron-NAS, whose layers have sizes of their own, as models of transformers, which has no
classes for them.

    nemotron_h_puzzle   transformers' Nemotron-H, each block made of the settings that ``block_configs`` has for it
    nemotron-nas        Llama: KV heads are heads / n_heads_in_group, a feed-forward is 2/3 ffn_mult hidden wide, in
                        whole multiples of 256; a layer may lack either block

Sources: vLLM's ``NemotronHPuzzleConfig`` and llama.cpp's conversion for the first; NVIDIA's ``modeling_decilm.py`` for
the second, in the form of mlx-lm, with which ``benchmarks.peers.mlx`` compares weft.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHForCausalLM

from tests.support.ling_2_5 import FeedForward, RmsNorm, turned
from tests.support.naive_model import NAIVE_TYPES, NaiveModel, register
from tests.support.plamo import attended


class NemotronHPuzzleConfig(NemotronHConfig):
    model_type = "nemotron_h_puzzle"

    def __init__(self, block_configs: list[dict[str, Any]], **settings: Any) -> None:
        super().__init__(**({"layers_block_type": [block["block_type"] for block in block_configs]} | settings))
        self.block_configs = block_configs


class NemotronHPuzzleForCausalLM(NemotronHForCausalLM):
    config_class = NemotronHPuzzleConfig
    _supports_sdpa = False  # the blocks have configurations of their own, which a change would not reach

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for number, (layer, block) in enumerate(zip(self.model.layers, config.block_configs, strict=True)):
            own = copy.deepcopy(config)
            own._experts_implementation = "eager"  # it takes float64
            for key, value in block.items():
                setattr(own, key, value)
            layer.mixer = type(layer.mixer)(own, layer_idx=number)


class NemotronNasConfig(transformers.PreTrainedConfig):
    model_type = "nemotron-nas"
    max_position_embeddings = 131_072  # transformers reads it before the settings, where there is a rope_scaling


class Attention(nn.Module):
    def __init__(self, config: Any, group: int) -> None:
        super().__init__()
        self.config, hidden = config, config.hidden_size
        self.dim = hidden // config.num_attention_heads
        keys = config.num_attention_heads // group * self.dim
        self.q_proj, self.o_proj = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(hidden, keys, bias=False) for _ in range(2))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        q, k, v = (project(x_TD).unflatten(1, (-1, self.dim)) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (turned(part, len(x_TD), self.config.rope_theta, neighbours=False) for part in (q, k))
        return self.o_proj(attended(q, k, v, None))


class Layer(nn.Module):
    def __init__(self, config: Any, block: dict[str, Any]) -> None:
        super().__init__()
        hidden = config.hidden_size
        if not block["attention"].get("no_op"):
            self.self_attn = Attention(config, block["attention"]["n_heads_in_group"])
            self.input_layernorm = RmsNorm(hidden, config.rms_norm_eps)
        if not block["ffn"].get("no_op"):
            width = -(-int(2 * block["ffn"]["ffn_mult"] * hidden / 3) // 256) * 256
            self.mlp = FeedForward(hidden, width)
            self.post_attention_layernorm = RmsNorm(hidden, config.rms_norm_eps)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "self_attn"):
            x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD))
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD)) if hasattr(self, "mlp") else x_TD


class Trunk(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, block) for block in config.block_configs)
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)


class NemotronNasForCausalLM(NaiveModel):
    config_class, trunk = NemotronNasConfig, Trunk


register(NemotronNasConfig, NemotronNasForCausalLM)
transformers.AutoConfig.register("nemotron_h_puzzle", NemotronHPuzzleConfig)
transformers.AutoModelForCausalLM.register(NemotronHPuzzleConfig, NemotronHPuzzleForCausalLM)
NAIVE_TYPES.append("nemotron_h_puzzle")
