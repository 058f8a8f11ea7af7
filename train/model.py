"""The model that is trained: gated delta net and gated attention layers, as Qwen3.5-text computes them.

Written again here because the stock training path is several times slower on one core. And a model of 200
lines can be corrupted on purpose (see `train/score.py`). Names of parameters are those of the checkpoint, so
the export is a cast and nothing else; `tests/train` holds the logits against `transformers`.

    x -> norm -> delta net | attention -> + -> norm -> MLP (gated) -> +      for each layer

Precision: with `dtype=bfloat16` the matmuls run in bf16 and everything that accumulates over time (the
residual stream, norms, decays, the state) stays fp32. With `dtype=float32` it is an oracle.

Shape suffixes: B rows, L tokens, D hidden, H heads, K head dim, N chunks, C chunk size, M = B * H.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.native import conv_heads, unit_lower_inverse

CHUNK = 64
EPS = 1e-6
LINEAR, FULL = "linear_attention", "full_attention"

# Called at every chunk border with (layer, position, state); what it returns is the state that goes on.
StateHook = Callable[[int, int, Tensor], Tensor]
# Called with (layer, keys, values) before attention; keys and values are [B, heads, L, K].
KvHook = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, under the names that config.json uses for them."""

    vocab_size: int
    layer_types: tuple[str, ...]
    hidden_size: int
    intermediate_size: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    partial_rotary_factor: float = 0.25
    rope_theta: float = 10_000.0

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass
class Corruption:
    """What to spoil while a model runs; nothing by default."""

    state: StateHook | None = None
    kv: KvHook | None = None


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


class Norm(nn.Module):
    """RMS norm with the weight stored as its distance from one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), 1.0 + self.weight, EPS).to(dtype)


def _weight(rows: int, columns: int, std: float | None = None) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * (std or 1.0 / math.sqrt(3 * columns)))


class Projection(nn.Module):
    """A matrix under the name `<something>.weight`, as checkpoints have it."""

    def __init__(self, rows: int, columns: int, std: float | None = None) -> None:
        super().__init__()
        self.weight = _weight(rows, columns, std)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


def chunked_delta_rule(
    q_BLHK: Tensor, k_BLHK: Tensor, v_BLHK: Tensor, g_BLH: Tensor, beta_BLH: Tensor, hook: StateHook | None, layer: int
) -> Tensor:
    """S <- exp(g) S + beta k (v - S^T k exp(g))^T, out = S^T q, in batched matmuls over chunks.

    Only the two products that need the state run chunk after chunk; the rest is one batched matmul each.
    """
    batch, length, heads, _ = v_BLHK.shape
    chunks, rows, low = length // CHUNK, batch * heads, v_BLHK.dtype

    def chunked(x: Tensor) -> Tensor:  # [B, L, H, *] -> [N * M, C, *]
        x = x.unflatten(1, (chunks, CHUNK))
        order = (1, 0, 3, 2, 4) if x.dim() == 5 else (1, 0, 3, 2)
        return x.permute(order).flatten(0, 2)

    q, k, v = chunked(q_BLHK), chunked(k_BLHK), chunked(v_BLHK)
    decay, beta = chunked(g_BLH).cumsum(-1), chunked(beta_BLH).unsqueeze(-1)
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).tril().exp().tril()
    keys_met = torch.bmm(k, k.transpose(1, 2)).float() * (between * beta)
    inverse = unit_lower_inverse(keys_met.tril(-1), exact=low == torch.float32)
    grown = decay.exp().unsqueeze(-1)
    written = torch.bmm(inverse, (v * beta).to(low))
    read_before = torch.bmm(inverse, (k * (beta * grown)).to(low))
    met = (torch.bmm(q, k.transpose(1, 2)).float() * between).to(low)
    k_left = (k * (decay[:, -1:] - decay).exp().unsqueeze(-1)).to(low).transpose(1, 2)
    kept = decay[:, -1].exp()[:, None, None]

    state = v.new_zeros(rows, k.shape[-1], v.shape[-1], dtype=torch.float32)
    states, news = [], []
    pieces = zip(written.split(rows), read_before.split(rows), k_left.split(rows), kept.split(rows), strict=True)
    for index, (u, w, key, keep) in enumerate(pieces):
        if hook is not None:
            state = hook(layer, index * CHUNK, state)
        before = state.to(low)
        new = torch.baddbmm(u, w, before, alpha=-1)
        states.append(before)
        news.append(new)
        state = state * keep + torch.bmm(key, new).float()
    out = torch.baddbmm(torch.bmm(met, torch.cat(news)), (q * grown).to(low), torch.cat(states))
    out = out.unflatten(0, (chunks, batch, heads)).permute(1, 0, 3, 2, 4)
    return out.reshape(batch, length, heads, -1)


class DeltaNet(nn.Module):
    def __init__(self, shape: Shape, layer: int, out_std: float) -> None:
        super().__init__()
        self.layer = layer
        self.k_heads, self.v_heads = shape.linear_num_key_heads, shape.linear_num_value_heads
        self.k_dim, self.v_dim = shape.linear_key_head_dim, shape.linear_value_head_dim
        self.key_size, self.value_size = self.k_heads * self.k_dim, self.v_heads * self.v_dim
        channels = 2 * self.key_size + self.value_size
        hidden = shape.hidden_size
        self.in_proj_qkv = Projection(channels, hidden)
        self.in_proj_z = Projection(self.value_size, hidden)
        self.in_proj_b = Projection(self.v_heads, hidden)
        self.in_proj_a = Projection(self.v_heads, hidden)
        self.conv1d = Projection(channels, 4, 0.2)
        with torch.no_grad():
            self.conv1d.weight[:, -1] += 0.7
        # Memories of 10 to 1,000 tokens; the library default forgets almost at once.
        steps = torch.logspace(-3, -1, self.v_heads)
        self.dt_bias = nn.Parameter(torch.log(torch.expm1(steps)))
        self.A_log = nn.Parameter(torch.zeros(self.v_heads))
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(self.v_dim))
        self.out_proj = Projection(hidden, self.value_size, out_std)

    def forward(self, x_BLD: Tensor, spoil: Corruption) -> Tensor:
        mixed = conv_heads(
            self.in_proj_qkv(x_BLD), self.conv1d.weight.t(), 2 * self.key_size, self.key_size, self.k_dim,
            self.k_dim**-0.5,
        )  # fmt: skip
        q, k, v = mixed.split([self.key_size, self.key_size, self.value_size], -1)
        q, k = (x.unflatten(-1, (self.k_heads, self.k_dim)) for x in (q, k))
        if self.v_heads != self.k_heads:
            q, k = (x.repeat_interleave(self.v_heads // self.k_heads, 2) for x in (q, k))
        v = v.unflatten(-1, (self.v_heads, self.v_dim))
        beta = self.in_proj_b(x_BLD).float().sigmoid()
        decay = -self.A_log.exp() * F.softplus(self.in_proj_a(x_BLD).float() + self.dt_bias)
        out = chunked_delta_rule(q, k, v, decay, beta, spoil.state, self.layer)
        z = self.in_proj_z(x_BLD).unflatten(-1, (self.v_heads, self.v_dim))
        out = F.rms_norm(out.float(), (self.v_dim,), self.norm.weight, EPS).to(x_BLD.dtype) * F.silu(z)
        return self.out_proj(out.flatten(-2))


class Attention(nn.Module):
    def __init__(self, shape: Shape, layer: int, out_std: float) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, shape.head_dim
        self.heads, self.kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        hidden = shape.hidden_size
        self.q_proj = Projection(self.heads * self.head_dim * 2, hidden)
        self.k_proj = Projection(self.kv_heads * self.head_dim, hidden)
        self.v_proj = Projection(self.kv_heads * self.head_dim, hidden)
        self.o_proj = Projection(hidden, self.heads * self.head_dim, out_std)
        self.q_norm, self.k_norm = Norm(self.head_dim), Norm(self.head_dim)

    def forward(self, x_BLD: Tensor, rotary: tuple[Tensor, Tensor], spoil: Corruption) -> Tensor:
        batch, length, _ = x_BLD.shape
        q, gate = self.q_proj(x_BLD).view(batch, length, self.heads, 2 * self.head_dim).chunk(2, -1)
        k = self.k_proj(x_BLD).view(batch, length, self.kv_heads, self.head_dim)
        v = self.v_proj(x_BLD).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        q = rotate(self.q_norm(q, x_BLD.dtype).transpose(1, 2), *rotary)
        k = rotate(self.k_norm(k, x_BLD.dtype).transpose(1, 2), *rotary)
        if spoil.kv is not None:
            k, v = spoil.kv(self.layer, k, v)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.o_proj((out * gate.sigmoid()).reshape(batch, length, -1))


def rotary_tables(shape: Shape, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    size = int(shape.head_dim * shape.partial_rotary_factor)
    frequencies = 1.0 / shape.rope_theta ** (torch.arange(0, size, 2).float() / size)
    angles = torch.arange(length).float()[:, None] * frequencies
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position on the first dims of each head, half against half."""
    size = cos.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)


class Mlp(nn.Module):
    def __init__(self, shape: Shape, out_std: float) -> None:
        super().__init__()
        self.gate_proj = Projection(shape.intermediate_size, shape.hidden_size)
        self.up_proj = Projection(shape.intermediate_size, shape.hidden_size)
        self.down_proj = Projection(shape.hidden_size, shape.intermediate_size, out_std)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        # Scaled down so that the residual stream starts with the variance of one layer, not of all.
        depth = math.sqrt(2 * len(shape.layer_types))
        inner = shape.linear_num_value_heads * shape.linear_value_head_dim
        self.input_layernorm = Norm(shape.hidden_size)
        self.post_attention_layernorm = Norm(shape.hidden_size)
        self.full = shape.layer_types[layer] == FULL
        if self.full:
            inner = shape.num_attention_heads * shape.head_dim
            self.self_attn = Attention(shape, layer, 1.0 / math.sqrt(3 * inner) / depth)
        else:
            self.linear_attn = DeltaNet(shape, layer, 1.0 / math.sqrt(3 * inner) / depth)
        self.mlp = Mlp(shape, 1.0 / math.sqrt(3 * shape.intermediate_size) / depth)

    def forward(self, x_BLD: Tensor, rotary: tuple[Tensor, Tensor], dtype: torch.dtype, spoil: Corruption) -> Tensor:
        normed = self.input_layernorm(x_BLD, dtype)
        mixed = self.self_attn(normed, rotary, spoil) if self.full else self.linear_attn(normed, spoil)
        x_BLD = x_BLD + mixed
        return x_BLD + self.mlp(self.post_attention_layernorm(x_BLD, dtype))


class Model(nn.Module):
    """Tied embeddings, the layers, a last norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = Projection(shape.vocab_size, shape.hidden_size, 0.02)
        self.layers = nn.ModuleList(Layer(shape, index) for index in range(len(shape.layer_types)))
        self.norm = Norm(shape.hidden_size)

    def forward(
        self,
        tokens_BL: Tensor,
        *,
        dtype: torch.dtype = torch.bfloat16,
        spoil: Corruption | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Logits of all positions, or of the flat positions in `wanted` only: most need none."""
        length = tokens_BL.shape[1]
        tokens_BL = F.pad(tokens_BL, (0, -length % CHUNK))
        rotary = rotary_tables(self.shape, tokens_BL.shape[1], dtype)
        x = F.embedding(tokens_BL, self.embed_tokens.weight)
        for layer in self.layers:
            x = layer(x, rotary, dtype, spoil or Corruption())
        x = x[:, :length]
        if wanted is not None:
            x = x.reshape(-1, x.shape[-1])[wanted]
        return linear(self.norm(x, dtype), self.embed_tokens.weight).float()
