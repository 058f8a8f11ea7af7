"""What the memory needs to know of a model: for each layer, bytes per token and bytes per sequence.

A layer kind is a row of data over two primitives, not a subclass:

    kind           kv pages (grow with the text)      state slot (one per sequence, overwritten in place)
    attention      2 x kv_heads x head_dim            -
    gated_delta    -                                  conv [C, K-1], recurrent [v_heads, k_dim, v_dim] fp32
    mamba2         -                                  conv [C, K-1], recurrent [heads, head_dim, N] fp32
    short_conv     -                                  conv [C, K-1]

A layer may have both (Falcon-H1) or neither (an MLP-only layer of Nemotron-H). Families turn a
``config.json`` into a ``ModelSpec`` (see ``weft.families``); nothing here or there imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DTypeName = Literal["float32", "bfloat16", "float16"]
ITEM_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a recurrent layer's state for one sequence.

    ``dtype`` is "float32" for accumulators, or "model" for what is kept in the model's own dtype
    (convolution windows).
    """

    name: str
    shape: tuple[int, ...]
    dtype: Literal["float32", "model"]

    @property
    def element_count(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    def dtype_in(self, model_dtype: DTypeName) -> DTypeName:
        return model_dtype if self.dtype == "model" else "float32"

    def part_bytes(self, model_dtype: DTypeName) -> int:
        return self.element_count * ITEM_BYTES[self.dtype_in(model_dtype)]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    kind: str
    kv_heads: int = 0
    head_dim: int = 0
    state: tuple[StatePart, ...] = ()

    def kv_bytes_per_token(self, kv_dtype: DTypeName) -> int:
        return 2 * self.kv_heads * self.head_dim * ITEM_BYTES[kv_dtype]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Geometry of one model on one rank. ``layers`` is in depth order; indices into it name a layer
    everywhere (views, weights, error messages)."""

    family: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    dtype: DTypeName
    layers: tuple[LayerSpec, ...]

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.layers) if layer.kv_heads)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.layers) if layer.state)

    def kv_bytes_per_token(self, kv_dtype: DTypeName) -> int:
        return sum(layer.kv_bytes_per_token(kv_dtype) for layer in self.layers)

    def state_bytes_per_sequence(self, model_dtype: DTypeName) -> int:
        """Exact bytes, before alignment."""
        return sum(part.part_bytes(model_dtype) for layer in self.layers for part in layer.state)


def attention(kv_heads: int, head_dim: int) -> LayerSpec:
    return LayerSpec("attention", kv_heads=kv_heads, head_dim=head_dim)


def gated_delta(k_heads: int, v_heads: int, k_dim: int, v_dim: int, conv_kernel: int) -> LayerSpec:
    channels = 2 * k_heads * k_dim + v_heads * v_dim
    return LayerSpec("gated_delta", state=(StatePart("conv", (channels, conv_kernel - 1), "model"),
                                           StatePart("recurrent", (v_heads, k_dim, v_dim), "float32")))


def mamba2(heads: int, head_dim: int, groups: int, state_dim: int, conv_kernel: int) -> LayerSpec:
    channels = heads * head_dim + 2 * groups * state_dim
    return LayerSpec("mamba2", state=(StatePart("conv", (channels, conv_kernel - 1), "model"),
                                      StatePart("recurrent", (heads, head_dim, state_dim), "float32")))


def short_conv(channels: int, conv_kernel: int) -> LayerSpec:
    return LayerSpec("short_conv", state=(StatePart("conv", (channels, conv_kernel - 1), "model"),))
