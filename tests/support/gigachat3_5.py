"""GigaChat 3.5 from its formulas, token by token, as a model of transformers, which has no class for it.

    config = AutoConfig.for_model("gigachat3_5", ...)
    model = AutoModelForCausalLM.from_config(config)          once this module is imported

Names of parameters are those of the release.

    norm        n = (1 + w) x / rms(x);  n * factor * sigmoid(down(silu(up(n))))
    layer       x + norm(mixer(norm(x))), then x + norm(feed(norm(x)))
    delta       q, k, v = silu(conv(...));  S <- e^g S;  S <- S + beta k (v - S^T k)^T;  y = S^T q / sqrt(D)
                out((1 + w) y / rms(y) * scale * sigmoid(z))          unit q and k, g = -e^A softplus(a + dt)
    latent      keys and values of sqrt(D / rank) norm(latent of x), queries of sqrt(D / rank) norm(rank of x)
                out(softmax(q k scale) v * sigmoid(gate x))
    experts     of the best groups, those whose sigmoid(router x) + bias is largest; weights without the bias

Sources: vLLM's ``gigachat3_5.py`` and SGLang's ``gigachat35.py``, read for their formulas; positions as
transformers computes those of DeepSeek-V3.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.support.ling_2_5 import Experts, FeedForward
from tests.support.naive_model import NaiveModel, register


class GigaChat35Config(transformers.PreTrainedConfig):
    model_type = "gigachat3_5"
    max_position_embeddings = 4096
    attribute_map = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}


class SelfGated(nn.Module):
    """The norm. ``alpha``: a further factor."""

    def __init__(self, width: int, config: Any, alpha: float = 1.0) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(width)), config.rms_norm_eps
        self.gate_up_projection = nn.Linear(width, 16, bias=False)
        self.gate_down_projection = nn.Linear(16, width, bias=False)
        self.factor = getattr(config, "layernorm_gating_weight", 2.0) * alpha

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * (1 + self.weight)
        return n * self.factor * torch.sigmoid(self.gate_down_projection(F.silu(self.gate_up_projection(n))))


class PerHead(nn.Module):
    """The norm of a delta layer's output."""

    def __init__(self, width: int, config: Any) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(width)), config.rms_norm_eps
        kind = getattr(config, "linear_gating_type", "gated_rmsnorm_sigmoid_zero_centered")
        self.centre = 1.0 if kind.endswith("zero_centered") else 0.0
        self.sigmoid = "sigmoid" in kind
        self.scale = getattr(config, "linear_sigmoid_gate_scale", 2.0)

    def forward(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        n = y / (y.square().mean(-1, keepdim=True) + self.eps).sqrt() * (self.centre + self.weight)
        return n * (torch.sigmoid(z) * self.scale if self.sigmoid else F.silu(z))


class DeltaNet(nn.Module):
    """The delta layer. Projections have rows by key head: q and k of the head, v and z of its values; b of the head,
    a of its values.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.k_heads, self.k_dim = config.linear_num_key_heads, config.linear_key_head_dim
        self.v_heads, self.v_dim = config.linear_num_value_heads, config.linear_value_head_dim
        keys, values, hidden = self.k_heads * self.k_dim, self.v_heads * self.v_dim, config.hidden_size
        self.in_proj_qkvz = nn.Linear(hidden, 2 * keys + 2 * values, bias=False)
        self.in_proj_ba = nn.Linear(hidden, 2 * self.v_heads, bias=False)
        self.conv1d = nn.Conv1d(
            2 * keys + values, 2 * keys + values, config.linear_conv_kernel_dim, groups=2 * keys + values, bias=False
        )
        self.A_log, self.dt_bias = (nn.Parameter(torch.zeros(self.v_heads)) for _ in range(2))
        self.norm = PerHead(self.v_dim, config)
        self.out_proj = nn.Linear(values, hidden, bias=False)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        tokens, ratio = len(x_TD), self.v_heads // self.k_heads
        by_key = self.in_proj_qkvz(x_TD).view(tokens, self.k_heads, -1)
        q, k, v, z = by_key.split([self.k_dim, self.k_dim, ratio * self.v_dim, ratio * self.v_dim], dim=-1)
        b, a = self.in_proj_ba(x_TD).view(tokens, self.k_heads, -1).split([ratio, ratio], dim=-1)
        mixed = torch.cat([part.flatten(1) for part in (q, k, v)], dim=1).T
        mixed = F.silu(self.conv1d(F.pad(mixed, (self.conv1d.kernel_size[0] - 1, 0)))).T
        q, k, v = mixed.split([self.k_heads * self.k_dim] * 2 + [self.v_heads * self.v_dim], dim=1)
        q, k = (self._unit(part).repeat_interleave(ratio, dim=1) for part in (q, k))
        v, z = v.reshape(tokens, self.v_heads, -1), z.reshape(tokens, self.v_heads, -1)
        beta, kept = (
            torch.sigmoid(b.flatten(1)),
            torch.exp(-torch.exp(self.A_log) * F.softplus(a.flatten(1) + self.dt_bias)),
        )
        state, read = x_TD.new_zeros(self.v_heads, self.k_dim, self.v_dim), []
        for t in range(tokens):
            state = state * kept[t, :, None, None]
            error = (v[t, :, None] - k[t, :, None] @ state) * beta[t, :, None, None]
            state = torch.baddbmm(state, k[t, :, :, None], error)
            read.append(q[t, :, None] @ state)
        return self.out_proj(self.norm(torch.stack(read)[:, :, 0] * self.k_dim**-0.5, z).flatten(1))

    def _unit(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(len(x), self.k_heads, -1)
        return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


class LatentAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, heads, hidden = config, config.num_attention_heads, config.hidden_size
        self.own, self.shared, self.value = (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim)
        queries, rank, latent = heads * (self.own + self.shared), config.q_lora_rank, config.kv_lora_rank
        scaled = getattr(config, "use_mla_scaling_factor", True)
        if rank is None:
            self.q_proj = nn.Linear(hidden, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, rank, bias=False)
            self.q_a_layernorm = SelfGated(rank, config, (hidden / rank) ** 0.5 if scaled else 1.0)
            self.q_b_proj = nn.Linear(rank, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, latent + self.shared, bias=False)
        self.kv_a_layernorm = SelfGated(latent, config, (hidden / latent) ** 0.5 if scaled else 1.0)
        self.kv_b_proj = nn.Linear(latent, heads * (self.own + self.value), bias=False)
        self.o_proj = nn.Linear(heads * self.value, hidden, bias=False)
        if getattr(config, "gated_attention", True):
            self.gate_proj = nn.Linear(hidden, heads * self.value, bias=False)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        config, tokens, heads = self.config, len(x_TD), self.config.num_attention_heads
        asked = (
            self.q_proj(x_TD) if config.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TD)))
        )
        q_own, q_shared = asked.view(tokens, heads, -1).split([self.own, self.shared], dim=-1)
        latent, k_shared = self.kv_a_proj_with_mqa(x_TD).split([config.kv_lora_rank, self.shared], dim=-1)
        made = self.kv_b_proj(self.kv_a_layernorm(latent)).view(tokens, heads, -1)
        k_own, v = made.split([self.own, self.value], dim=-1)
        q_shared, k_shared = self._turned(q_shared), self._turned(k_shared[:, None])
        scores = (
            torch.einsum("qhd,khd->hqk", q_own, k_own) + torch.einsum("qhd,kd->hqk", q_shared, k_shared[:, 0])
        ) * self._scale()
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        seen = scores.masked_fill(later, -torch.inf).softmax(-1)
        y_TC = torch.einsum("hqk,khd->qhd", seen, v).flatten(1)
        return self.o_proj(y_TC * torch.sigmoid(self.gate_proj(x_TD)) if hasattr(self, "gate_proj") else y_TC)

    def _turned(self, x_THD: torch.Tensor) -> torch.Tensor:
        """Rotate pairs of neighbours."""
        config, (tokens, _, dim) = self.config, x_THD.shape
        if config.rope_parameters["rope_type"] == "default":
            rates = config.rope_parameters["rope_theta"] ** (-torch.arange(dim // 2) * 2 / dim)
            factor = 1.0
        else:
            rates, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
        angles = (torch.arange(tokens)[:, None] * rates.float())[:, None].double()  # rounded as there
        cos, sin = (angles.cos() * factor).to(x_THD.dtype), (angles.sin() * factor).to(x_THD.dtype)
        first, second = x_THD[..., 0::2], x_THD[..., 1::2]
        return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)

    def _scale(self) -> float:
        rope = self.config.rope_parameters
        stretch = 0.1 * rope.get("mscale_all_dim", 0.0) * math.log(rope.get("factor", 1.0)) + 1.0
        return (self.own + self.shared) ** -0.5 * stretch**2


class Layer(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        full, hidden = layer in config.full_attention_layers, config.hidden_size
        self.self_attn = LatentAttention(config) if full else DeltaNet(config)
        limit = config.swiglu_limit or torch.inf
        self.mlp = (
            FeedForward(hidden, config.intermediate_size, limit)
            if layer < config.first_k_dense_replace
            else Experts(config, "e_score_correction_bias", limit)
        )
        self.input_layernorm, self.post_self_attn_layernorm = (SelfGated(hidden, config) for _ in range(2))
        self.post_attention_layernorm, self.post_feedforward_layernorm = (SelfGated(hidden, config) for _ in range(2))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        x_TD = x_TD + self.post_self_attn_layernorm(self.self_attn(self.input_layernorm(x_TD)))
        return x_TD + self.post_feedforward_layernorm(self.mlp(self.post_attention_layernorm(x_TD)))


class Trunk(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = SelfGated(config.hidden_size, config)


class GigaChat35ForCausalLM(NaiveModel):
    config_class, trunk = GigaChat35Config, Trunk


register(GigaChat35Config, GigaChat35ForCausalLM)
