"""Ling 2.5 from its formulas, token by token, as a model of transformers, which has no class for it.

    config = AutoConfig.for_model("bailing_moe_v2_5", ...)
    model = AutoModelForCausalLM.from_config(config)          once this module is imported

Names of parameters are those of the release. Nothing is cached, and nothing is fast: lightning attention is
its recurrence, latent attention makes keys and values of all heads, and experts compute one token at a time.

    lightning   q, k, v of x;  q, k <- rotary(norm(q)), rotary(norm(k));  S <- e^-slope S + k v^T
                y = out(sigmoid(gate x) norm_by_group(S^T q / sqrt(D)))
    latent      keys and values of norm(latent of x), one key part that all heads share and positions turn
    experts     those of the best groups whose sigmoid(router x) + bias is largest; weights without the bias

Source: ``modeling_bailing_moe_v2_5.py`` of inclusionAI's repository Ring-V2.5, read for its formulas.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn

from tests.support.naive_model import NaiveModel, register


class BailingMoeV2_5Config(transformers.PreTrainedConfig):
    model_type = "bailing_moe_v2_5"
    norm_topk_prob = True


def turned(x_THD: torch.Tensor, positions: int, theta: float, *, neighbours: bool) -> torch.Tensor:
    """Rotate every dim, in pairs of neighbours or of halves."""
    half = x_THD.shape[-1] // 2
    rates = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(positions, dtype=torch.float64)[:, None, None] * rates
    cos, sin = angles.cos().to(x_THD.dtype), angles.sin().to(x_THD.dtype)
    if neighbours:
        first, second = x_THD[..., 0::2], x_THD[..., 1::2]
    else:
        first, second = x_THD[..., :half], x_THD[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class RmsNorm(nn.Module):
    def __init__(self, width: int, eps: float, groups: int = 1) -> None:
        super().__init__()
        self.weight, self.eps, self.groups = nn.Parameter(torch.ones(width)), eps, groups

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.unflatten(-1, (self.groups, -1))
        return (parts / (parts.square().mean(-1, keepdim=True) + self.eps).sqrt()).flatten(-2) * self.weight


class LightningAttention(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.config, width = config, config.num_attention_heads * config.head_dim
        self.query_key_value = nn.Linear(config.hidden_size, 3 * width, bias=False)
        self.query_layernorm = RmsNorm(config.head_dim, config.rms_norm_eps)
        self.key_layernorm = RmsNorm(config.head_dim, config.rms_norm_eps)
        self.g_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.g_norm = RmsNorm(width, config.rms_norm_eps, config.group_norm_size)
        self.dense = nn.Linear(width, config.hidden_size, bias=False)
        self.depth = 1 - (layer - 1) / (config.num_hidden_layers - 1) + 1e-5

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        config, tokens = self.config, len(x_TD)
        heads, dim = config.num_attention_heads, config.head_dim
        q, k, v = self.query_key_value(x_TD).view(tokens, 3, heads, dim).unbind(1)
        q, k = self._turned(self.query_layernorm(q)), self._turned(self.key_layernorm(k))
        rates = 2.0 ** (-8.0 * torch.arange(1, heads + 1, dtype=x_TD.dtype) / heads) * self.depth
        state, read = x_TD.new_zeros(heads, dim, dim), []
        for t in range(tokens):
            state = state * torch.exp(-rates)[:, None, None] + k[t, :, :, None] * v[t, :, None, :]
            read.append((q[t, :, None, :] @ state)[:, 0] * dim**-0.5)
        return self.dense(self.g_norm(torch.stack(read).flatten(1)) * torch.sigmoid(self.g_proj(x_TD)))

    def _turned(self, x_THD: torch.Tensor) -> torch.Tensor:
        part = int(self.config.head_dim * self.config.partial_rotary_factor)
        first = turned(x_THD[..., :part], len(x_THD), self.config.rope_theta, neighbours=False)
        return torch.cat((first, x_THD[..., part:]), dim=-1)


class LatentAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, heads, hidden = config, config.num_attention_heads, config.hidden_size
        self.own, self.shared, self.value = (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim)
        queries, rank, latent = heads * (self.own + self.shared), config.q_lora_rank, config.kv_lora_rank
        if rank is None:
            self.q_proj = nn.Linear(hidden, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, rank, bias=False)
            self.q_a_layernorm = RmsNorm(rank, 1e-6)
            self.q_b_proj = nn.Linear(rank, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, latent + self.shared, bias=False)
        self.kv_a_layernorm = RmsNorm(latent, 1e-6)
        self.kv_b_proj = nn.Linear(latent, heads * (self.own + self.value), bias=False)
        self.dense = nn.Linear(heads * self.value, hidden, bias=False)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        config, tokens, heads = self.config, len(x_TD), self.config.num_attention_heads
        asked = (
            self.q_proj(x_TD) if config.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TD)))
        )
        q_own, q_shared = asked.view(tokens, heads, -1).split([self.own, self.shared], dim=-1)
        latent, k_shared = self.kv_a_proj_with_mqa(x_TD).split([config.kv_lora_rank, self.shared], dim=-1)
        made = self.kv_b_proj(self.kv_a_layernorm(latent)).view(tokens, heads, -1)
        k_own, v = made.split([self.own, self.value], dim=-1)
        q_shared, k_shared = (
            turned(part, tokens, config.rope_theta, neighbours=True) for part in (q_shared, k_shared[:, None])
        )
        scores = (
            torch.einsum("qhd,khd->hqk", q_own, k_own) + torch.einsum("qhd,kd->hqk", q_shared, k_shared[:, 0])
        ) * (self.own + self.shared) ** -0.5
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        seen = scores.masked_fill(later, -torch.inf).softmax(-1)
        return self.dense(torch.einsum("hqk,khd->qhd", seen, v).flatten(1))


class FeedForward(nn.Module):
    """The feed-forward part. ``limit``: the most of the gate, and of the other factor on both sides."""

    def __init__(self, hidden: int, width: int, limit: float = torch.inf) -> None:
        super().__init__()
        self.limit = limit
        self.gate_proj, self.up_proj = (nn.Linear(hidden, width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.limit < torch.inf:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.down_proj(F.silu(gate) * up)


class Router(nn.Module):
    def __init__(self, count: int, hidden: int, bias: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, hidden))
        self.register_buffer(bias, torch.zeros(count))


class Experts(nn.Module):
    """The experts. ``bias``: the name of the router's bias."""

    def __init__(self, config: Any, bias: str = "expert_bias", limit: float = torch.inf) -> None:
        super().__init__()
        self.config, hidden, width = config, config.hidden_size, config.moe_intermediate_size
        self.experts = nn.ModuleList(FeedForward(hidden, width, limit) for _ in range(config.num_experts))
        self.gate, self.bias = Router(config.num_experts, hidden, bias), bias
        self.shared_experts = FeedForward(hidden, width * config.num_shared_experts, limit)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        config, out_TD = self.config, self.shared_experts(x_TD)
        scores_TE = torch.sigmoid(x_TD @ self.gate.weight.T)
        by_group = (scores_TE + getattr(self.gate, self.bias)).view(len(x_TD), config.n_group, -1)
        best = by_group.topk(2, dim=-1).values.sum(-1).topk(config.topk_group).indices
        others = torch.ones(by_group.shape[:2], dtype=torch.bool).scatter(1, best, False)
        chosen_TK = (
            by_group.masked_fill(others[..., None], -torch.inf).flatten(1).topk(config.num_experts_per_tok).indices
        )
        weights_TK = scores_TE.gather(1, chosen_TK)
        if config.norm_topk_prob:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        weights_TK = weights_TK * config.routed_scaling_factor
        for number, expert in enumerate(self.experts):
            tokens, places = (chosen_TK == number).nonzero(as_tuple=True)
            out_TD = out_TD.index_add(0, tokens, expert(x_TD[tokens]) * weights_TK[tokens, places, None])
        return out_TD


class Layer(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        every, count = config.layer_group_size, config.num_hidden_layers
        latent = (layer + 1) % every == 0 or layer >= count // every * every
        self.attention = LatentAttention(config) if latent else LightningAttention(config, layer)
        dense = layer < config.first_k_dense_replace
        self.mlp = FeedForward(config.hidden_size, config.intermediate_size) if dense else Experts(config)
        self.input_layernorm, self.post_attention_layernorm = (
            RmsNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        x_TD = x_TD + self.attention(self.input_layernorm(x_TD))
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))


class Trunk(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)


class BailingMoeV2_5ForCausalLM(NaiveModel):
    config_class, trunk, embedding = BailingMoeV2_5Config, Trunk, "word_embeddings"


register(BailingMoeV2_5Config, BailingMoeV2_5ForCausalLM)
