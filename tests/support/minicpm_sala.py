"""MiniCPM-SALA from its published code, as a model of transformers, which has no class for it.

    config = AutoConfig.for_model("minicpm_sala", ...)
    model = AutoModelForCausalLM.from_config(config)          once this module is imported

Names of parameters are those of the release. Nothing is cached. Each token sees the same positions as when the
published code decodes it: everything up to ``dense_len`` tokens, then blocks. All tokens are computed at once, with
square masks:

    lightning   y_t = sum over s <= t of e^(-slope (t - s)) (q_t . k_s) v_s
    blocks      means of ``kernel_size`` keys, each ``kernel_stride`` later; four times as many for the sum of
                the softmax; added over the queries of a KV head; the largest of those that touch a block

Source: ``modeling_minicpm_sala.py`` of openbmb's repository MiniCPM-SALA, and the tests of sgl-kernel for the kernels
of its package ``infllm_v2``, read for their formulas.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from tests.support.ling_2_5 import FeedForward, RmsNorm, turned
from tests.support.naive_model import NaiveModel, register


class MiniCPMSALAConfig(transformers.PreTrainedConfig):
    model_type = "minicpm_sala"


def causal(tokens: int) -> torch.Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


class SparseAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, hidden = config, config.hidden_size
        queries, keys = (count * config.head_dim for count in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(hidden, queries, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(hidden, keys, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(queries, hidden, bias=False)
        if config.attn_use_output_gate:
            self.o_gate = nn.Linear(hidden, queries, bias=False)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        config, tokens = self.config, len(x_TD)
        q, k, v = (
            project(x_TD).view(tokens, -1, config.head_dim) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if config.attn_use_rope:
            q, k = (turned(part, tokens, config.rope_theta, neighbours=False) for part in (q, k))
        group, seen = q.shape[1] // k.shape[1], self.seen(q, k)
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * config.head_dim**-0.5
        weights = scores.masked_fill(~seen.repeat_interleave(group, 0), -torch.inf).softmax(-1)
        o_TC = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1)).flatten(1)
        return self.o_proj(o_TC * torch.sigmoid(self.o_gate(x_TD)) if config.attn_use_output_gate else o_TC)

    def seen(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Return the mask of visible keys, [KV heads, T, T]."""
        sparse, tokens = self.config.sparse_config, len(q)
        all_before = causal(tokens).expand(k.shape[1], -1, -1)
        if sparse is None or tokens < sparse["dense_len"]:
            return all_before
        chosen = torch.stack([self.chosen(q_TGD, k[:, head]) for head, q_TGD in enumerate(q.chunk(k.shape[1], 1))])
        long = torch.arange(1, tokens + 1)[:, None] >= sparse["dense_len"]
        return all_before & (chosen.repeat_interleave(sparse["block_size"], 2)[..., :tokens] | ~long)

    def chosen(self, q_TGD: torch.Tensor, k_TD: torch.Tensor) -> torch.Tensor:
        """Return the chosen blocks for the queries of one KV head, [T, blocks]."""
        sparse, tokens = self.config.sparse_config, len(q_TGD)
        size, stride, block = (sparse[key] for key in ("kernel_size", "kernel_stride", "block_size"))
        near, each = sparse["window_size"] // block, block // stride
        scores, ended = self.compressed(q_TGD, k_TD, size, stride)
        wide, wide_ended = self.compressed(q_TGD, k_TD, 4 * size, 4 * stride)
        total = wide.masked_fill(~wide_ended[:, None], -torch.inf).logsumexp(-1, keepdim=True)
        shares = (scores - total).exp().masked_fill(~ended[:, None], 0.0).sum(1)
        numbers = torch.arange(-(-tokens // block))
        pooled = torch.full((tokens, len(numbers)), -torch.inf, dtype=shares.dtype)
        for number in numbers.tolist():
            touching = shares[:, max(0, number * each - 1) : number * each + each]
            if touching.shape[1]:
                pooled[:, number] = touching.amax(1)
        own = torch.arange(tokens)[:, None] // block
        always = (numbers < sparse["init_blocks"]) | ((numbers <= own) & (numbers >= own - near))
        pooled = pooled.masked_fill(always, torch.inf).masked_fill(numbers > own, -torch.inf)
        # A window between two blocks may give both their score: the earlier one wins.
        best = pooled.sort(descending=True, stable=True).indices[:, : sparse["topk"] + near]
        return torch.zeros_like(pooled, dtype=torch.bool).scatter(1, best, True)

    def compressed(
        self, q_TGD: torch.Tensor, k_TD: torch.Tensor, size: int, stride: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of means of ``size`` keys, [T, G, means], and whether they have ended, [T, means]."""
        starts = list(range(0, len(k_TD) - size + 1, stride))
        means = torch.stack([k_TD[start : start + size].mean(0) for start in starts])
        ended = torch.tensor(starts) + size <= torch.arange(1, len(k_TD) + 1)[:, None]
        return torch.einsum("tgd,md->tgm", q_TGD, means) * self.config.head_dim**-0.5, ended


class LightningAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, hidden, width = config, config.hidden_size, config.num_attention_heads * config.head_dim
        self.q_proj, self.k_proj, self.v_proj, self.z_proj = (nn.Linear(hidden, width, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = (RmsNorm(config.head_dim, config.rms_norm_eps) for _ in range(2))
        self.o_norm, self.o_proj = RmsNorm(width, config.rms_norm_eps), nn.Linear(width, hidden, bias=False)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        config, tokens, heads = self.config, len(x_TD), self.config.num_attention_heads
        q, k, v = (project(x_TD).view(tokens, heads, -1) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.q_norm(q), self.k_norm(k)
        if config.lightning_use_rope:
            q, k = (turned(part, tokens, config.rope_theta, neighbours=False) for part in (q, k))
        slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, dtype=x_TD.dtype) / heads)
        places = torch.arange(tokens, dtype=x_TD.dtype)
        apart = (places[:, None] - places).clamp(min=0)
        decay = (-slopes[:, None, None] * apart).exp() * causal(tokens)
        power = {"1/sqrt(d)": -0.5, "1/d": -1.0}.get(config.lightning_scale, 0.0)
        weights = torch.einsum("qhd,khd->hqk", q, k) * decay * config.head_dim**power
        y_TC = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        return self.o_proj(self.o_norm(y_TC) * torch.sigmoid(self.z_proj(x_TD)))


class Layer(nn.Module):
    def __init__(self, config: Any, kind: str) -> None:
        super().__init__()
        self.self_attn = SparseAttention(config) if kind == "minicpm4" else LightningAttention(config)
        self.mlp = FeedForward(config.hidden_size, config.intermediate_size)
        self.input_layernorm, self.post_attention_layernorm = (
            RmsNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )
        self.scale = config.scale_depth / config.num_hidden_layers**0.5

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD)) * self.scale
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD)) * self.scale


class ScaledEmbedding(nn.Embedding):
    scale = 1.0

    def forward(self, tokens_T: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens_T) * self.scale


class DividedNorm(RmsNorm):
    divisor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / self.divisor


class Trunk(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = ScaledEmbedding(config.vocab_size, config.hidden_size)
        self.embed_tokens.scale = config.scale_emb
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.mixer_types)
        self.norm = DividedNorm(config.hidden_size, config.rms_norm_eps)
        self.norm.divisor = config.hidden_size / config.dim_model_base


class MiniCPMSALAForCausalLM(NaiveModel):
    config_class, trunk = MiniCPMSALAConfig, Trunk
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}


register(MiniCPMSALAConfig, MiniCPMSALAForCausalLM)
