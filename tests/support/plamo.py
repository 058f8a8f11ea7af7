"""PLaMo 2 and 3 from their formulas, token by token, as models of transformers, which has no classes for them.

    config = AutoConfig.for_model("plamo2", ...)
    model = AutoModelForCausalLM.from_config(config)          once this module is imported

Names of parameters are those of the release. Nothing is cached, and nothing is fast.

    norm        x / rms(x) (weight + offset), before a block and after it
    mamba       z, x of each head = in(u);  x = silu(conv(x));  B, C, r = norms of a product of x
                d = softplus(step(r) + dt_bias);  S <- e^(-d e^A_log) S + d x B^T;  y = out((S C + D x) silu(z))
    attention   q, k with a norm of each head by itself, turned; a token sees itself and ``window`` tokens before
    PLaMo 3     one norm for all heads, YaRN in layers that see the whole text

Source: ``modeling_plamo.py`` of PFN's repositories plamo-2-8b, plamo-2-translate and plamo-3-nict-8b, in the forms that
vLLM, SGLang, mlx-lm and plamo-translate-cli have of it, read for its formulas. ``benchmarks.peers.mlx``
compares weft with mlx-lm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn

from tests.support.ling_2_5 import turned
from tests.support.naive_model import NaiveModel, register


class Plamo2Config(transformers.PreTrainedConfig):
    model_type = "plamo2"


def normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


class OffsetNorm(nn.Module):
    """An RMS norm whose weight is stored as the distance from ``offset``."""

    def __init__(self, width: int, eps: float, offset: float = 1.0) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = nn.Parameter(torch.zeros(width)), eps, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normed(x, self.eps) * (self.weight + self.offset)


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: int | None) -> torch.Tensor:
    """Return attention of [T, heads, D]. ``seen``: most tokens that a token sees, itself among them; None for all."""
    tokens, group = len(q), q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(group, 1) for part in (k, v))
    places = torch.arange(tokens)
    apart = places[:, None] - places
    unseen = (apart < 0) | (apart >= (tokens if seen is None else seen))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, -torch.inf).softmax(-1), v).flatten(1)


class Attention(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        heads, keys, dim = config.num_attention_heads, config.num_key_value_heads, config.hidden_size_per_head
        self.widths, self.dim = [heads * dim, keys * dim, keys * dim], dim
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.widths), bias=False)
        self.o_proj = nn.Linear(heads * dim, config.hidden_size, bias=False)
        self.q_weight, self.k_weight = nn.Parameter(torch.ones(heads, dim)), nn.Parameter(torch.ones(keys, dim))
        full = layer in config.full_attention_idx
        self.seen = None if full else config.attention_window_size + 1
        self.theta = config.rope_theta if full else config.rope_local_theta

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        parts = self.qkv_proj(x_TD).split(self.widths, dim=-1)
        q, k, v = (part.unflatten(1, (-1, self.dim)) for part in parts)
        q, k = normed(q, 1e-6) * self.q_weight, normed(k, 1e-6) * self.k_weight
        q, k = (turned(part, len(x_TD), self.theta, neighbours=False) for part in (q, k))
        return self.o_proj(attended(q, k, v, self.seen))


class Mamba(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.heads, self.dim, self.state = config.mamba_num_heads, config.hidden_size_per_head, config.mamba_d_state
        hidden, channels, rank = config.hidden_size, self.heads * self.dim, max(64, config.hidden_size // 16)
        self.kernel, self.eps, self.rank = config.mamba_d_conv, config.rms_norm_eps, rank
        self.in_proj = nn.Linear(hidden, 2 * channels, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, self.kernel, groups=channels, bias=False)
        self.bcdt_proj = nn.Linear(channels, 2 * self.state + rank, bias=False)
        self.dt_proj = nn.Linear(rank, self.heads, bias=False)
        self.dt_bias, self.A_log, self.D = (nn.Parameter(torch.ones(self.heads)) for _ in range(3))
        self.dt_norm_weight = nn.Parameter(torch.ones(rank))
        self.B_norm_weight, self.C_norm_weight = (nn.Parameter(torch.ones(self.state)) for _ in range(2))
        self.out_proj = nn.Linear(channels, hidden, bias=False)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        z, x = self.in_proj(x_TD).unflatten(1, (self.heads, 2, self.dim)).unbind(2)
        padded_CT = F.pad(x.flatten(1).T, (self.kernel - 1, 0))
        x_TC = F.silu(self.conv1d(padded_CT[None])[0].T)
        b, c, rank = self.bcdt_proj(x_TC).split([self.state, self.state, self.rank], dim=-1)
        b, c = normed(b, self.eps) * self.B_norm_weight, normed(c, self.eps) * self.C_norm_weight
        step_TH = F.softplus(self.dt_proj(normed(rank, self.eps) * self.dt_norm_weight) + self.dt_bias)
        x, state = x_TC.unflatten(1, (self.heads, self.dim)), x_TD.new_zeros(self.heads, self.dim, self.state)
        read = []
        for t in range(len(x_TD)):
            kept_H = torch.exp(-step_TH[t] * self.A_log.exp())
            state = state * kept_H[:, None, None] + (step_TH[t, :, None] * x[t])[..., None] * b[t]
            read.append(state @ c[t] + self.D[:, None] * x[t])
        return self.out_proj((torch.stack(read) * F.silu(z)).flatten(1))


class JoinedFeedForward(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden, 2 * width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, config: Any, mixer: nn.Module) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.mixer, self.mlp = mixer, JoinedFeedForward(hidden, config.intermediate_size)
        self.pre_mixer_norm, self.pre_mlp_norm = (OffsetNorm(hidden, eps) for _ in range(2))
        self.post_mixer_norm = OffsetNorm(hidden, eps, 1 / 5)
        self.post_mlp_norm = OffsetNorm(hidden, eps, 1 / 5**1.5)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        x_TD = x_TD + self.post_mixer_norm(self.mixer(self.pre_mixer_norm(x_TD)))
        return x_TD + self.post_mlp_norm(self.mlp(self.pre_mlp_norm(x_TD)))


class Decoder(nn.Module):
    """The list of layers, under ``layers.layers`` in files."""

    def __init__(self, layers: Iterator[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.layers)


def is_mamba(config: Any, layer: int) -> bool:
    if not config.mamba_enabled:
        return False
    if config.num_hidden_layers <= config.mamba_step // 2:
        return layer != config.num_hidden_layers - 1
    return layer % config.mamba_step != config.mamba_step // 2


class Trunk2(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        mixers = (
            Mamba(config) if is_mamba(config, layer) else Attention(config, layer)
            for layer in range(config.num_hidden_layers)
        )
        self.layers = Decoder(Layer(config, mixer) for mixer in mixers)
        self.norm = OffsetNorm(config.hidden_size, config.rms_norm_eps)


class Plamo3Config(transformers.PreTrainedConfig):
    model_type = "plamo3"


def yarn(x_THD: torch.Tensor, theta: float, factor: float, original: int) -> torch.Tensor:
    """Rotate pairs of halves. Rates between 32 and 1 turns in ``original`` tokens change step by step from those of the
    model to those divided by ``factor`` (Peng et al., 2023).
    """
    half = x_THD.shape[-1] // 2
    rates = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    first, last = (half * math.log(original / (turns * 2 * math.pi)) / math.log(theta) for turns in (32, 1))
    first, last = max(first, 0.0), min(last, 2 * half - 1.0)
    slow = ((torch.arange(half, dtype=torch.float64) - first) / (last - first)).clamp(0, 1)
    angles = torch.arange(len(x_THD), dtype=torch.float64)[:, None, None] * (rates * (1 - slow) + rates / factor * slow)
    larger = 1 + 0.1 * math.log(factor)
    cos, sin = ((part * larger).to(x_THD.dtype) for part in (angles.cos(), angles.sin()))
    first_half, second = x_THD.chunk(2, dim=-1)
    return torch.cat((first_half * cos - second * sin, second * cos + first_half * sin), dim=-1)


class Attention3(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.config, heads, keys, dim = config, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.widths, self.dim = [heads * dim, keys * dim, keys * dim], dim
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.widths), bias=False)
        self.o_proj = nn.Linear(heads * dim, config.hidden_size, bias=False)
        self.q_norm, self.k_norm = (OffsetNorm(dim, config.rms_norm_eps) for _ in range(2))
        self.full = (layer + 1) % config.sliding_window_pattern == 0
        self.seen = None if self.full else config.window_size + (config.rope_scaling_factor is None)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        parts = self.qkv_proj(x_TD).split(self.widths, dim=-1)
        q, k, v = (part.unflatten(1, (-1, self.dim)) for part in parts)
        q, k = (self.turned(norm(part)) for norm, part in ((self.q_norm, q), (self.k_norm, k)))
        return self.o_proj(attended(q, k, v, self.seen))

    def turned(self, x_THD: torch.Tensor) -> torch.Tensor:
        config = self.config
        if self.full and config.rope_scaling_factor not in (None, 1):
            return yarn(x_THD, config.rope_theta, config.rope_scaling_factor, config.initial_context_length)
        theta = config.rope_theta if self.full else config.rope_local_theta
        return turned(x_THD, len(x_THD), theta, neighbours=False)


class ScaledEmbedding(nn.Embedding):
    factor = 1.0

    def forward(self, tokens_T: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens_T) * self.factor


class Trunk3(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = ScaledEmbedding(config.vocab_size, config.hidden_size)
        self.embed_tokens.factor = config.hidden_size**0.5 if config.scale_embedding else 1.0
        mixers = (Attention3(config, layer) for layer in range(config.num_hidden_layers))
        self.layers = Decoder(Layer(config, mixer) for mixer in mixers)
        self.norm = OffsetNorm(config.hidden_size, config.rms_norm_eps)


class Plamo2ForCausalLM(NaiveModel):
    config_class, trunk = Plamo2Config, Trunk2
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}


class Plamo3ForCausalLM(NaiveModel):
    config_class, trunk = Plamo3Config, Trunk3
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}


register(Plamo2Config, Plamo2ForCausalLM)
register(Plamo3Config, Plamo3ForCausalLM)
