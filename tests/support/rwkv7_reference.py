"""RWKV-7 by its formulas, token by token, instead of a class that transformers does not have.

It is a model of transformers in name: ``AutoModelForCausalLM`` makes, saves and loads it, under the names of
the flash-linear-attention library. The arithmetic is that of Peng et al., "RWKV-7 Goose" (2025), section 4,
one token at a time, with S [values, keys] as the paper has it; nothing of weft is used.

    S_t = S_(t-1) (diag(w_t) - kk_t^T (a_t * kk_t)) + v_t^T k_t          o_t = S_t r_t

``tests/oracle/test_rwkv7.py`` compares it with numbers of the published code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers.modeling_outputs import ModelOutput

from tests.support.naive_model import NaiveModel, register


class Rwkv7Config(transformers.PretrainedConfig):
    model_type = "rwkv7"

    def __init__(
        self,
        hidden_size: int = 64,
        num_hidden_layers: int = 2,
        head_dim: int = 16,
        intermediate_size: int = 96,
        decay_low_rank_dim: int = 8,
        a_low_rank_dim: int = 8,
        gate_low_rank_dim: int = 8,
        v_low_rank_dim: int = 8,
        norm_eps: float = 1e-5,
        vocab_size: int = 512,
        **kwargs: Any,
    ) -> None:
        self.hidden_size, self.num_hidden_layers, self.head_dim = hidden_size, num_hidden_layers, head_dim
        self.intermediate_size, self.norm_eps, self.vocab_size = intermediate_size, norm_eps, vocab_size
        self.decay_low_rank_dim, self.a_low_rank_dim = decay_low_rank_dim, a_low_rank_dim
        self.gate_low_rank_dim, self.v_low_rank_dim = gate_low_rank_dim, v_low_rank_dim
        self.hidden_act, self.norm_first, self.norm_bias, self.attn = "sqrelu", True, True, None
        super().__init__(**kwargs)


@dataclass
class _State:
    """The state of one layer: the last inputs of both parts [B, D], and S [B, heads, D, D]."""

    time: torch.Tensor
    channel: torch.Tensor
    matrix: torch.Tensor


class _LowRank(nn.Module):
    def __init__(self, hidden: int, rank: int, middle: nn.Module, bias: bool = True) -> None:
        super().__init__()
        self.lora = nn.Sequential(nn.Linear(hidden, rank, bias=False), middle, nn.Linear(rank, hidden, bias=bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lora(x)
        return out


class _TimeMix(nn.Module):
    def __init__(self, config: Rwkv7Config, layer: int) -> None:
        super().__init__()
        width, self.layer, self.head_dim = config.hidden_size, layer, config.head_dim
        self.heads = width // config.head_dim
        for name in "rwkvag":
            setattr(self, f"x_{name}", nn.Parameter(torch.zeros(1, 1, width)))
        self.k_k, self.k_a = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))
        self.r_k = nn.Parameter(torch.zeros(self.heads, self.head_dim))
        for name in "rkvo":
            setattr(self, f"{name}_proj", nn.Linear(width, width, bias=False))
        self.w_lora = _LowRank(width, config.decay_low_rank_dim, nn.Tanh())
        if layer:
            self.v_lora = _LowRank(width, config.v_low_rank_dim, nn.Identity())
        self.a_lora = _LowRank(width, config.a_low_rank_dim, nn.Identity())
        self.g_lora = _LowRank(width, config.gate_low_rank_dim, nn.Sigmoid(), bias=False)
        self.g_norm = nn.GroupNorm(self.heads, width, eps=config.head_dim * config.norm_eps)

    def forward(
        self, x: torch.Tensor, state: _State, v_first: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output for tokens [B, T, D], and the values of the first layer. Only S is computed token by
        token.
        """
        before, state.time = _shifted(x, state.time), x[:, -1]

        def mixed(name: str) -> torch.Tensor:
            share = getattr(self, f"x_{name}")[0, 0]
            return x * (1 - share) + before * share

        r, k, v = self.r_proj(mixed("r")), self.k_proj(mixed("k")), self.v_proj(mixed("v"))
        w = torch.exp(-math.exp(-0.5) / (1 + torch.exp(-self.w_lora(mixed("w")))))
        a = torch.sigmoid(self.a_lora(mixed("a")))
        g = self.g_lora(mixed("g"))
        if v_first is None:
            v_first = v
        else:
            share = torch.sigmoid(self.v_lora(mixed("v")))
            v = v * (1 - share) + v_first * share
        kk, k = k * self.k_k, k * (1 - self.k_a + a * self.k_a)
        r, w, k, v, kk, a = (part.unflatten(-1, (self.heads, -1)) for part in (r, w, k, v, kk, a))
        kk = kk / kk.norm(dim=-1, keepdim=True)
        read = []
        for r_t, w_t, k_t, v_t, kk_t, akk_t in zip(*(part.unbind(1) for part in (r, w, k, v, kk, a * kk)), strict=True):
            # S (diag(w) - kk (a kk)^T) + v k^T
            turned = (state.matrix @ kk_t[..., None]) * akk_t[..., None, :]
            state.matrix = state.matrix * w_t[..., None, :] - turned + v_t[..., None] * k_t[..., None, :]
            read.append((state.matrix @ r_t[..., None]).flatten(1))
        out = self.g_norm(torch.cat(read)).view(x.shape[1], *x[:, 0].shape).transpose(0, 1)
        out = out + ((r * k * self.r_k).sum(-1, keepdim=True) * v).flatten(2)
        return self.o_proj(out * g), v_first


def _shifted(x: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return the input before each token."""
    return torch.cat((last[:, None], x[:, :-1]), 1)


class _ChannelMix(nn.Module):
    def __init__(self, config: Rwkv7Config) -> None:
        super().__init__()
        self.x_k = nn.Parameter(torch.zeros(config.hidden_size))
        self.key = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.value = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, state: _State) -> torch.Tensor:
        inner = torch.relu(self.key(x * (1 - self.x_k) + _shifted(x, state.channel) * self.x_k))
        state.channel = x[:, -1]
        out: torch.Tensor = self.value(inner * inner)
        return out


class _Layer(nn.Module):
    def __init__(self, config: Rwkv7Config, layer: int) -> None:
        super().__init__()
        if not layer:
            self.pre_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.attn_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = _TimeMix(config, layer)
        self.ffn_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.ffn = _ChannelMix(config)

    def forward(
        self, x: torch.Tensor, state: _State, v_first: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if hasattr(self, "pre_norm"):
            x = self.pre_norm(x)
        mixed, v_first = self.attn(self.attn_norm(x), state, v_first)
        x = x + mixed
        return x + self.ffn(self.ffn_norm(x), state), v_first


class Rwkv7Model(nn.Module):
    def __init__(self, config: Rwkv7Config) -> None:
        super().__init__()
        self.config = config
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([_Layer(config, number) for number in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)

    def states(self, rows: int) -> list[_State]:
        hidden, dim = self.config.hidden_size, self.config.head_dim
        zeros = self.norm.weight.new_zeros
        return [
            _State(zeros(rows, hidden), zeros(rows, hidden), zeros(rows, hidden // dim, dim, dim)) for _ in self.layers
        ]

    def forward(self, input_ids: torch.Tensor, states: list[_State]) -> torch.Tensor:
        x, v_first = self.embeddings(input_ids), None
        for layer, state in zip(self.layers, states, strict=True):
            x, v_first = layer(x, state, v_first)
        return self.norm(x)


@dataclass
class Rwkv7Output(ModelOutput):
    logits: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    cache: Any = None


class Rwkv7ForCausalLM(NaiveModel):
    """RWKV-7 with states: generating one more token needs no text before it."""

    config_class, trunk, embedding = Rwkv7Config, Rwkv7Model, "embeddings"
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}

    def _init_weights(self, module: nn.Module) -> None:
        """Leave weights as they are: the fixtures fill them."""

    def forward(self, input_ids: torch.Tensor, cache: list[_State] | None = None, **kwargs: Any) -> Rwkv7Output:
        states = self.model.states(len(input_ids)) if cache is None else cache
        hidden = self.model(input_ids, states)
        return Rwkv7Output(logits=self.lm_head(hidden), hidden_states=(hidden,), cache=states)

    @torch.inference_mode()
    def generate(self, input_ids: torch.Tensor, *, max_new_tokens: int, **kwargs: Any) -> torch.Tensor:
        """Generate the most likely tokens."""
        out = self(input_ids)
        tokens = [input_ids]
        for _ in range(max_new_tokens):
            tokens.append(out.logits[:, -1:].argmax(-1))
            out = self(tokens[-1], cache=out.cache)
        return torch.cat(tokens, 1)


register(Rwkv7Config, Rwkv7ForCausalLM)
