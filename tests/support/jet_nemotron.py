"""Jet-Nemotron from its formulas, token by token, as a model of transformers, which has no class for it.

    config = AutoConfig.for_model("jet_nemotron", ...)
    model = AutoModelForCausalLM.from_config(config)          once this module is imported

Names of parameters are those of the release. Nothing is cached, and nothing is fast: the delta rule is its
recurrence, and each token multiplies the last inputs of v by a kernel that it makes itself.

    jet     q, k = silu of products of x;  K [C, W] = w2 silu(w1 x) + b
            v_c = silu(sum_w K[c, w] u_c[t - W + 1 + w]),  u a product of x
            S <- e^g S;  S <- S + k (beta (v - S^T k))^T;  y = out(norm(S^T q / sqrt(D)) silu(gate x))
            of q and k with length 1;  g = -exp(A_log) softplus(a x + dt_bias);  beta = sigmoid(b x)
    attn    attention with positions; biases on q, k and v
    swa     the same, over the last ``window_size`` tokens

``tests/oracle/test_jet_nemotron.py`` compares it with numbers of the released code.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn

from tests.support.ling_2_5 import FeedForward, RmsNorm
from tests.support.naive_model import NaiveModel, register


class JetNemotronConfig(transformers.PreTrainedConfig):
    model_type = "jet_nemotron"

    def validate(self) -> None:
        """Accept the names of layers, which transformers does not know."""


class KernelGenerator(nn.Module):
    def __init__(self, hidden: int, rank: int, rows: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(hidden, rank, bias=False), nn.Linear(rank, rows)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x_TD)))


class DynamicConvolution(nn.Module):
    def __init__(self, hidden: int, channels: int, kernel: int, reduction: int) -> None:
        super().__init__()
        self.kernel, self.channels = kernel, channels
        self.kernel_generator = KernelGenerator(hidden, channels // reduction, channels * kernel)

    def forward(self, v_TC: torch.Tensor, x_TD: torch.Tensor) -> torch.Tensor:
        kernels_TCW = self.kernel_generator(x_TD).view(len(x_TD), self.channels, self.kernel)
        padded = torch.cat((v_TC.new_zeros(self.kernel - 1, self.channels), v_TC))
        windows_TWC = torch.stack([padded[t : t + self.kernel] for t in range(len(v_TC))])
        return F.silu((windows_TWC * kernels_TCW.transpose(1, 2)).sum(1))


class JetBlock(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        of, hidden = config.efficient_attention_config["jet"], config.hidden_size
        self.heads, self.key_dim = of["num_heads"], of["head_dim"]
        self.value_dim = int(of["head_dim"] * of["expand_v"])
        keys, values = self.heads * self.key_dim, self.heads * self.value_dim
        self.q_proj, self.k_proj = (nn.Linear(hidden, keys, bias=False) for _ in range(2))
        self.v_proj, self.g_proj = (nn.Linear(hidden, values, bias=False) for _ in range(2))
        self.b_proj, self.a_proj = (nn.Linear(hidden, self.heads, bias=False) for _ in range(2))
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        self.dt_bias = nn.Parameter(torch.zeros(self.heads))
        self.dynamic_conv1d = DynamicConvolution(hidden, values, of["conv_size"], of["dconv_generator_reduction"])
        self.o_norm = RmsNorm(self.value_dim, float(of["norm_eps"]))
        self.o_proj = nn.Linear(values, hidden, bias=False)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        q, k = (F.silu(product(x_TD)).unflatten(1, (self.heads, -1)) for product in (self.q_proj, self.k_proj))
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        v = self.dynamic_conv1d(self.v_proj(x_TD), x_TD).unflatten(1, (self.heads, -1))
        kept = torch.exp(-self.A_log.exp() * F.softplus(self.a_proj(x_TD) + self.dt_bias))
        beta = torch.sigmoid(self.b_proj(x_TD))
        state, read = x_TD.new_zeros(self.heads, self.key_dim, self.value_dim), []
        for t in range(len(x_TD)):
            state = state * kept[t, :, None, None]
            known = (k[t, :, None] @ state)[:, 0]
            state = state + k[t, :, :, None] * (beta[t, :, None] * (v[t] - known))[:, None]
            read.append((q[t, :, None] @ state)[:, 0] * self.key_dim**-0.5)
        gate = F.silu(self.g_proj(x_TD)).unflatten(1, (self.heads, -1))
        return self.o_proj((self.o_norm(torch.stack(read)) * gate).flatten(1))


def turned(x_THD: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate pairs of halves. Angles are float32 in the released code, in any dtype of the model."""
    tokens, _, dim = x_THD.shape
    rates = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = torch.arange(tokens, dtype=torch.float32)[:, None, None] * rates
    cos, sin = angles.cos().to(x_THD.dtype), angles.sin().to(x_THD.dtype)
    first, second = x_THD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class JetAttention(nn.Module):
    def __init__(self, config: Any, window: int | None) -> None:
        super().__init__()
        self.config, self.window, hidden = config, window, config.hidden_size
        self.dim = hidden // config.num_attention_heads
        queries, keys = hidden, config.num_key_value_heads * self.dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, rows) for rows in (queries, keys, keys))
        self.o_proj = nn.Linear(queries, hidden, bias=False)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        config, tokens = self.config, len(x_TD)
        q, k, v = (product(x_TD).unflatten(1, (-1, self.dim)) for product in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (turned(part, config.rope_theta) for part in (q, k))
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.dim**-0.5
        places = torch.arange(tokens)
        behind = places[:, None] - places
        unseen = (behind < 0) if self.window is None else (behind < 0) | (behind >= self.window)
        seen = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        return self.o_proj(torch.einsum("hqk,khd->qhd", seen, v).flatten(1))


class Layer(nn.Module):
    def __init__(self, config: Any, kind: str) -> None:
        super().__init__()
        window = config.efficient_attention_config["swa"]["window_size"] if kind == "swa" else None
        self.self_attn = JetBlock(config) if kind == "jet" else JetAttention(config, window)
        self.mlp = FeedForward(config.hidden_size, config.intermediate_size)
        self.input_layernorm, self.post_attention_layernorm = (
            RmsNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD))
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))


class Trunk(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.layer_types)
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)


class JetNemotronForCausalLM(NaiveModel):
    config_class, trunk = JetNemotronConfig, Trunk
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}


register(JetNemotronConfig, JetNemotronForCausalLM)
