"""Geometry of a model as memory needs it: for each layer, bytes per token and bytes per sequence.

A layer kind is a row of data over two primitives, not a subclass:

    kind           kv pages (grow with the text)      state slot (one per sequence, overwritten in place)
    attention      2 x kv_heads x head_dim            -
    latent         latent + shared key, no V block    -
    reading        another layer's                    -
    index          a row of numbers, no V block       -
    window         -                                  ring [2, kv_heads, W, head_dim]: last W keys, values
    compressed     a part of an entry, no V block     ring [1, 1, W, head_dim], waiting [3 parts, C] fp32, entry [1, C]
    gated_delta    -                                  conv [C, K-1], recurrent [v_heads, k_dim, v_dim] fp32
    dynamic_delta  -                                  recurrent [heads, k_dim, v_dim] fp32, conv.n [V, 1]
    kimi_delta     -                                  conv [C, K-1], recurrent [heads, dim, dim] fp32
    mamba2         -                                  conv [C, K-1], recurrent [heads, head_dim, N] fp32
    mamba1         -                                  conv [C, K-1], recurrent [C, N] fp32
    short_conv     -                                  conv [C, K-1]
    lightning      -                                  recurrent [heads, dim, dim] fp32
    matrix_lstm    -                                  recurrent [heads, v_dim + 1, k_dim] fp32, max [1, heads]
    wkv7           -                                  recurrent [heads, dim, dim] fp32, conv.1 [C, 1]
    shifts         -                                  conv.1 [C, 1]
    convolved      2 x kv_heads x head_dim            conv.1 [C + half of V, 1], conv.2 [C, 1]
    relative       2 x kv_heads x head_dim, or ring   conv.kv, conv.mixer, conv.feed [C, K-1]; conv.n [C, 1]
    rg_lru         -                                  conv [C, K-1], recurrent [C / 16, 16] fp32
    ngrams         -                                  conv.tokens [16, n-1], conv.values [C, reach]

A layer may have both (Falcon-H1) or neither (an MLP-only layer of Nemotron-H). Families turn a
``config.json`` into a ``ModelSpec`` (see ``weft.families``); nothing here or there imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from weft.units import ceil_div

DTypeName = Literal["float32", "bfloat16", "float16"]
"""Dtypes of weights and arithmetic."""
CacheDTypeName = Literal["float32", "bfloat16", "float16", "float8_e4m3", "int8"]
"""Dtypes of KV pages and states."""
ITEM_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "int8": 1}
KV_DTYPES: dict[str, CacheDTypeName] = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp8": "float8_e4m3",
    "int8": "int8",
}
"""Values of ``--kv-dtype`` in addition to auto."""
KvLayoutName = Literal["vnni", "rows"]
"""Order of the numbers inside a KV page: ``tensor.layout``."""
CompressedKvName = Literal["int8", "int4"]
COMPRESSED_KV_DTYPES: tuple[CompressedKvName, ...] = ("int8", "int4")
"""Values of ``cache.compress_kv``: dtypes of a compressed page of KV."""
STATE_DTYPES: tuple[CacheDTypeName, ...] = ("float32", "bfloat16", "float16")
"""Values of ``--state-dtype``."""
TOKEN_SCALE_BYTES: dict[str, int] = {"int8": 2}
"""Bytes of a scale by KV dtype, for dtypes whose pages hold a scale for each token and head."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a recurrent layer's state for one sequence.

    ``dtype`` is "float32" for accumulators (or as ``--state-dtype`` says), and "model" for the model's own dtype
    (convolution windows).
    """

    name: str
    shape: tuple[int, ...]
    dtype: CacheDTypeName | Literal["model"]

    @property
    def element_count(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    def dtype_in(self, model_dtype: DTypeName) -> CacheDTypeName:
        return model_dtype if self.dtype == "model" else self.dtype

    def part_bytes(self, model_dtype: DTypeName) -> int:
        return self.element_count * ITEM_BYTES[self.dtype_in(model_dtype)]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The geometry of one layer. ``has_values``: False for a layer whose pages have no V block, because values are made
    of the same numbers as keys (latent attention). ``reads``: for a layer without pages, the layer whose pages are
    read. ``logged``: numbers that a drafted token logs on the C++ kernels, in the model's dtype and in float32. Layers
    with a fused kernel log the projection without the output gate; other layers log the inputs of each op with a
    state."""

    kind: str
    kv_heads: int = 0
    head_dim: int = 0
    state: tuple[StatePart, ...] = ()
    has_values: bool = True
    reads: int | None = None
    logged: tuple[int, int] = (0, 0)

    @property
    def cached_heads(self) -> int:
        """KV heads whose keys the layer keeps, in pages or in a ring."""
        return self.kv_heads or next((part.shape[1] for part in self.state if part.name == "window"), 0)

    def kv_bytes_per_token(self, kv_dtype: CacheDTypeName) -> int:
        head_bytes = self.head_dim * ITEM_BYTES[kv_dtype] + TOKEN_SCALE_BYTES.get(kv_dtype, 0)
        return (1 + self.has_values) * self.kv_heads * head_bytes


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Geometry of one model on one rank. ``layers`` is in depth order; an index into ``layers`` names a layer
    everywhere (views, weights, error messages). ``causal``: False if tokens see later ones, so that a prompt must be
    computed in one step and its prefixes are not cached."""

    family: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    dtype: DTypeName
    layers: tuple[LayerSpec, ...]
    causal: bool = True

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.layers) if layer.kv_heads)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.layers) if layer.state)

    @property
    def state_dtype(self) -> CacheDTypeName:
        """Dtype of the accumulators; the model's dtype if there are none."""
        accumulators = [
            part.dtype
            for layer in self.layers
            for part in layer.state
            if part.dtype != "model" and part.name != "window"
        ]
        return accumulators[0] if accumulators else self.dtype

    def kv_bytes_per_token(self, kv_dtype: CacheDTypeName) -> int:
        return sum(layer.kv_bytes_per_token(kv_dtype) for layer in self.layers)

    def state_bytes_per_sequence(self, model_dtype: DTypeName) -> int:
        """Return the exact bytes, before alignment."""
        return sum(part.part_bytes(model_dtype) for layer in self.layers for part in layer.state)


def with_cache_dtypes(
    spec: ModelSpec, kv_dtype: CacheDTypeName | None, state_dtype: CacheDTypeName | None
) -> ModelSpec:
    """Return ``spec`` with its accumulators kept in ``state_dtype`` and its rings of keys and values in ``kv_dtype``
    (int8 rings stay in the model's dtype: a ring has no room for scales). None changes nothing; convolution windows
    always stay in the model's dtype."""

    def accumulators(layer: LayerSpec, part: StatePart) -> StatePart:
        if part.name == "window":
            return part if kv_dtype in (None, "int8") else replace(part, dtype=kv_dtype)
        return part if part.dtype == "model" or state_dtype is None else replace(part, dtype=state_dtype)

    return replace(
        spec,
        layers=tuple(
            replace(layer, state=tuple(accumulators(layer, part) for part in layer.state)) for layer in spec.layers
        ),
    )


def attention(kv_heads: int, head_dim: int) -> LayerSpec:
    return LayerSpec("attention", kv_heads=kv_heads, head_dim=head_dim)


def reading(layer: int) -> LayerSpec:
    """Return attention over the pages of an earlier layer."""
    return LayerSpec("shared_attention", reads=layer)


def latent_attention(width: int) -> LayerSpec:
    """Return a layer with one "head" of ``width`` numbers per token, and no V block."""
    return LayerSpec("latent_attention", kv_heads=1, head_dim=width, has_values=False)


def window_attention(kv_heads: int, head_dim: int, window: int) -> LayerSpec:
    """Return a layer whose ring holds position p at index p mod ``window``; [0] holds keys, [1] values."""
    return LayerSpec("window_attention", state=(StatePart("window", (2, kv_heads, window, head_dim), "model"),))


def compressed_attention(head_dim: int, window: int, group: int, parts: int, index_dim: int) -> LayerSpec:
    """Return a layer whose ring holds the row of position p at index p mod ``window``. Each token keeps its part of the
    entry of a ``group`` of tokens; group 0: there are no entries. The state has the sums of ``parts`` entries and the
    last whole entry, and the same for the keys of an index, of ``index_dim`` numbers; 0: there is none."""
    rows = LayerSpec("", state=(StatePart("window", (1, 1, window, head_dim), "model"),), logged=(head_dim, 0))
    if not group:
        return replace(rows, kind="compressed_attention")
    pages = LayerSpec("", kv_heads=1, head_dim=entry_part(head_dim, group), has_values=False)
    layer = together("", together("", pages, rows), _entries(head_dim, parts, ""))
    return together("compressed_attention", layer, _entries(index_dim, parts, ".index") if index_dim else stateless())


def entry_part(width: int, group: int) -> int:
    """Return the numbers that each of ``group`` tokens keeps of an entry of ``width`` numbers: a word of bytes or
    more."""
    return 4 * ceil_div(width, 4 * group)


def _entries(width: int, parts: int, end: str) -> LayerSpec:
    waiting = StatePart(f"waiting{end}", (3 * parts, width), "float32")
    entry = StatePart(f"entry{end}", (1, width), "model")
    return LayerSpec("", state=(waiting, entry), logged=(width, 2 * parts * width))


def kimi_delta(heads: int, head_dim: int, conv_kernel: int) -> LayerSpec:
    return LayerSpec(
        "kimi_delta",
        state=(
            StatePart("conv", (3 * heads * head_dim, conv_kernel - 1), "model"),
            StatePart("recurrent", (heads, head_dim, head_dim), "float32"),
        ),
        logged=(6 * heads * head_dim, heads * (head_dim + 1)),
    )


def gated_delta(k_heads: int, v_heads: int, k_dim: int, v_dim: int, conv_kernel: int) -> LayerSpec:
    channels = 2 * k_heads * k_dim + v_heads * v_dim
    return LayerSpec(
        "gated_delta",
        state=(
            StatePart("conv", (channels, conv_kernel - 1), "model"),
            StatePart("recurrent", (v_heads, k_dim, v_dim), "float32"),
        ),
        logged=(channels + 2 * v_heads, 0),
    )


def dynamic_delta(heads: int, k_dim: int, v_dim: int, conv_kernel: int) -> LayerSpec:
    """Return a layer whose window has the last inputs of v separately: each token has its own kernel of weights, so the
    window cannot be summed in advance."""
    recurrent = LayerSpec(
        "",
        state=(StatePart("recurrent", (heads, k_dim, v_dim), "float32"),),
        logged=(heads * (2 * k_dim + v_dim), 2 * heads),
    )
    return together("dynamic_delta", recurrent, shifts(heads * v_dim, 0, conv_kernel - 1))


def mamba2(heads: int, head_dim: int, groups: int, state_dim: int, conv_kernel: int) -> LayerSpec:
    channels = heads * head_dim + 2 * groups * state_dim
    return LayerSpec(
        "mamba2",
        state=(
            StatePart("conv", (channels, conv_kernel - 1), "model"),
            StatePart("recurrent", (heads, head_dim, state_dim), "float32"),
        ),
        logged=(channels + heads, 0),
    )


def short_conv(channels: int, conv_kernel: int) -> LayerSpec:
    return LayerSpec(
        "short_conv", state=(StatePart("conv", (channels, conv_kernel - 1), "model"),), logged=(2 * channels, 0)
    )


def mamba1(channels: int, state_dim: int, conv_kernel: int) -> LayerSpec:
    return LayerSpec(
        "mamba1",
        state=(
            StatePart("conv", (channels, conv_kernel - 1), "model"),
            StatePart("recurrent", (channels, state_dim), "float32"),
        ),
        logged=(3 * channels + 2 * state_dim, 0),
    )


def lightning(heads: int, head_dim: int) -> LayerSpec:
    return LayerSpec(
        "lightning",
        state=(StatePart("recurrent", (heads, head_dim, head_dim), "float32"),),
        logged=(heads * (3 * head_dim + 1), 0),
    )


def matrix_lstm(heads: int, key_dim: int, value_dim: int) -> LayerSpec:
    """Return a layer whose state has the head's normaliser in its last row; ``max``: the largest input gate, which
    decays as the memory does."""
    return LayerSpec(
        "matrix_lstm",
        state=(
            StatePart("recurrent", (heads, value_dim + 1, key_dim), "float32"),
            StatePart("max", (1, heads), "float32"),
        ),
        logged=(0, heads * (value_dim + 2 * key_dim + 4)),
    )


def wkv7(heads: int, head_dim: int) -> LayerSpec:
    return LayerSpec(
        "wkv7",
        state=(StatePart("recurrent", (heads, head_dim, head_dim), "float32"),),
        logged=(5 * heads * head_dim, heads * head_dim),
    )


def rg_lru(channels: int, conv_kernel: int) -> LayerSpec:
    """Return a layer with one number for each channel, in rows of 16, which share a scale in a compressed state."""
    rows = (channels // 16, 16) if channels % 16 == 0 else (1, channels)
    return LayerSpec(
        "rg_lru",
        state=(StatePart("conv", (channels, conv_kernel - 1), "model"), StatePart("recurrent", rows, "float32")),
        logged=(channels, 2 * channels + 2),
    )


def index_rows(width: int) -> LayerSpec:
    """Return the layer that holds an index's row of each token, appended after the model's layers."""
    return LayerSpec("index", kv_heads=1, head_dim=width, has_values=False)


HISTORY_CHANNELS = 16
HISTORY_BASE = 128
"""Base of the digits of a token's number: three digits, each an integer that every dtype of a window represents
exactly."""


def ngrams(size: int, width: int, reach: int) -> LayerSpec:
    """Return a layer with the last ``size - 1`` tokens, as digits in the window of a convolution, and the last
    ``reach`` inputs of another one."""
    return LayerSpec(
        "ngrams",
        state=(
            StatePart("conv.tokens", (HISTORY_CHANNELS, size - 1), "model"),
            StatePart("conv.values", (width, reach), "model"),
        ),
        logged=(HISTORY_CHANNELS + width, 0),
    )


def shifts(width: int, delayed: int, reach: int) -> LayerSpec:
    """Return a layer with the last ``reach`` inputs of ``width`` channels, and the last one of ``delayed`` channels."""
    return LayerSpec(
        "shifts",
        state=tuple(
            StatePart(f"conv.{number}", (width + (delayed if number == 1 else 0), 1), "model")
            for number in range(1, max(reach, 1) + 1)
        ),
        logged=(width * max(reach, 1) + delayed, 0),
    )


def convolutions(conv_kernel: int, **channels: int) -> LayerSpec:
    """Return a layer with several short convolutions of one length; ``channels``: their widths by name."""
    return LayerSpec(
        "convolutions",
        state=tuple(StatePart(f"conv.{name}", (count, conv_kernel - 1), "model") for name, count in channels.items()),
        logged=(sum(channels.values()), 0),
    )


def together(kind: str, attention: LayerSpec, recurrent: LayerSpec) -> LayerSpec:
    """Return a layer with the pages of the first, and the states of both."""
    (numbers, exact), (more, more_exact) = attention.logged, recurrent.logged
    logged = numbers + more, exact + more_exact
    return replace(attention, kind=kind, state=attention.state + recurrent.state, logged=logged)


def stateless() -> LayerSpec:
    """Return a layer without pages and state, such as a feed-forward."""
    return LayerSpec("feed_forward")
