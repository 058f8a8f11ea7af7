"""The geometry of a model, read once from ``config.json`` and never looked up again.

    config.json (any age, any spelling)  --weft.families-->  Architecture  --.spec()-->  ModelSpec
                                                                 |
                                                                 +--> weft.models.<family> builds blocks

A checkpoint's configuration comes in dialects: keys were renamed, moved and nested as transformers grew.
Everything downstream sees only these values, so that a dialect is an entry in one file and not an ``if`` in
every layer. ``ModelSpec`` is what memory needs of it (bytes per token, bytes per sequence); ``Architecture``
is what the model code needs besides (rotary, norms, feed-forward, multipliers).

A token mixer is one of four records; a layer has one mixer and one feed-forward. Pure data, no torch.
Rejected: handing the raw dict to the model code, where a default forgotten in one place gives wrong
numbers instead of an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft import spec
from weft.spec import DTypeName, LayerSpec, ModelSpec

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding over the first ``rotary_dim`` dims of a head.

    ``factor`` and what follows belong to the scaled kinds and are ignored by "default".
    ``original_positions`` is the context length before scaling. ``attention_factor`` multiplies cos and sin.
    """

    theta: float
    rotary_dim: int
    kind: RopeKind = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Attention:
    """Full attention with grouped KV heads. ``gated``: the output is multiplied by sigmoid of a gate that the
    query projection makes too. ``qk_norm``: queries and keys pass an RMS norm per head before rotary."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None
    qk_norm: bool = False
    gated: bool = False
    bias: bool = False

    def layer_spec(self) -> LayerSpec:
        return spec.attention(self.kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Gated delta net (Yang et al., 2024)."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv_kernel: int

    @property
    def key_width(self) -> int:
        return self.k_heads * self.k_dim

    @property
    def value_width(self) -> int:
        return self.v_heads * self.v_dim

    def layer_spec(self) -> LayerSpec:
        return spec.gated_delta(self.k_heads, self.v_heads, self.k_dim, self.v_dim, self.conv_kernel)


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Mamba-2 (Dao and Gu, 2024). ``dt_limit`` clamps the step after softplus."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    conv_kernel: int
    conv_bias: bool
    projection_bias: bool
    dt_limit: tuple[float, float]

    @property
    def inner_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def group_width(self) -> int:
        return self.groups * self.state_dim

    def layer_spec(self) -> LayerSpec:
        return spec.mamba2(self.heads, self.head_dim, self.groups, self.state_dim, self.conv_kernel)


@dataclass(frozen=True, slots=True)
class ShortConv:
    """Double-gated short convolution of LFM2."""

    channels: int
    conv_kernel: int
    bias: bool

    def layer_spec(self) -> LayerSpec:
        return spec.short_conv(self.channels, self.conv_kernel)


Mixer = Attention | GatedDelta | Mamba2 | ShortConv


@dataclass(frozen=True, slots=True)
class Dense:
    """SwiGLU feed-forward; ``width`` is the inner size."""

    width: int


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts. ``width`` is the inner size of one expert. ``shared_width`` is that of the expert
    every token passes (0: none); ``shared_gate``: its output is multiplied by sigmoid of a learned gate.
    ``normalized``: the weights of the chosen experts sum to 1."""

    count: int
    per_token: int
    width: int
    normalized: bool
    shared_width: int = 0
    shared_gate: bool = False


FeedForward = Dense | Experts


@dataclass(frozen=True, slots=True)
class Architecture:
    """``mixers`` and ``feed_forwards`` are in depth order, one of each per layer.

    The multipliers are Granite's; 1 everywhere else. ``logits_divisor`` divides the logits.
    """

    family: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    dtype: DTypeName
    norm_eps: float
    tied_embeddings: bool
    mixers: tuple[Mixer, ...]
    feed_forwards: tuple[FeedForward, ...]
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0

    @property
    def layer_count(self) -> int:
        return len(self.mixers)

    def spec(self) -> ModelSpec:
        return ModelSpec(family=self.family, vocab_size=self.vocab_size, hidden_size=self.hidden_size,
                         max_positions=self.max_positions, dtype=self.dtype,
                         layers=tuple(mixer.layer_spec() for mixer in self.mixers))
