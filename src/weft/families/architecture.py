"""The geometry of a model, read once from ``config.json`` and never looked up again.

    config.json (any age, any spelling)  --weft.families-->  Architecture  --.spec()-->  ModelSpec
                                                                 |
                                                                 +--> weft.models.<family> builds blocks

A checkpoint's configuration comes in dialects: keys were renamed, moved and nested as transformers grew.
Everything downstream sees only these values. ``ModelSpec`` is what memory needs of it; ``Architecture`` is
what the model code needs besides.

A layer has one mixer and one feed-forward, or only one of the two. Pure data, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from weft import spec
from weft.families.attention_shapes import Attention as Attention
from weft.families.attention_shapes import Index as Index
from weft.families.attention_shapes import KeyIndex as KeyIndex
from weft.families.attention_shapes import LatentAttention as LatentAttention
from weft.families.attention_shapes import NormGate as NormGate
from weft.families.attention_shapes import Rope as Rope
from weft.families.attention_shapes import RopeKind as RopeKind
from weft.families.mixing import ChannelMix, TimeMix
from weft.families.vision import VisionTower
from weft.spec import DTypeName, LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Gated delta net (Yang et al., 2024). ``beta_scale``: the write strength is sigmoid times this; 2 lets
    the state's eigenvalues be negative (OLMo hybrid). ``sigmoid_gate``: the output's gate is a sigmoid, not a
    silu (Qwen4). ``kernel_rank``: only v is convolved, by a kernel that each token makes through so wide
    a bottleneck (Jet-Nemotron); 0: q, k and v are, by learned kernels. ``norm_eps``: of the gated norm,
    None as of others. ``gate_scale``: a factor on a sigmoid gate; ``norm_plus_one``: the weight of the gated
    norm is stored as the distance from 1 (GigaChat 3.5)."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv_kernel: int
    beta_scale: float = 1.0
    sigmoid_gate: bool = False
    kernel_rank: int = 0
    norm_eps: float | None = None
    gate_scale: float = 1.0
    norm_plus_one: bool = False

    @property
    def key_width(self) -> int:
        return self.k_heads * self.k_dim

    @property
    def value_width(self) -> int:
        return self.v_heads * self.v_dim

    def layer_spec(self) -> LayerSpec:
        if self.kernel_rank:
            return spec.dynamic_delta(self.v_heads, self.k_dim, self.v_dim, self.conv_kernel)
        return spec.gated_delta(self.k_heads, self.v_heads, self.k_dim, self.v_dim, self.conv_kernel)


@dataclass(frozen=True, slots=True)
class KimiDelta:
    """Kimi delta attention (2025): the gated delta rule with a decay for each key channel. ``wide_gates``:
    the forget gate and the output gate are one matrix each, without a bottleneck; ``decay_floor``: the least
    log decay, None for none (Ling 3 has both)."""

    heads: int
    head_dim: int
    conv_kernel: int
    wide_gates: bool = False
    decay_floor: float | None = None

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def layer_spec(self) -> LayerSpec:
        return spec.kimi_delta(self.heads, self.head_dim, self.conv_kernel)


GatedNorm = Literal["gate_first", "gate_last", "none"]
"""What becomes of a Mamba-2 output y and its gate: norm(y silu(gate)), norm(y) silu(gate), y silu(gate)."""


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Mamba-2 (Dao and Gu, 2024). ``dt_limit`` clamps the step after softplus. ``multipliers``: factors on
    the five parts of the input projection (gate, x, B, C, dt), Falcon-H1's; empty for none. ``output_bias``:
    the output projection has a bias; None is as ``projection_bias``. ``group_copies``: ranks that hold the
    same groups, where there are fewer groups than ranks."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    conv_kernel: int
    conv_bias: bool
    projection_bias: bool
    dt_limit: tuple[float, float]
    norm: GatedNorm = "gate_first"
    multipliers: tuple[float, ...] = ()
    output_bias: bool | None = None
    group_copies: int = 1

    @property
    def inner_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def group_width(self) -> int:
        return self.groups * self.state_dim

    def layer_spec(self) -> LayerSpec:
        return spec.mamba2(self.heads, self.head_dim, self.groups, self.state_dim, self.conv_kernel)


InnerNorms = Literal["none", "plain", "weighted"]
"""RMS norms of a Mamba-1 layer's dt, B and C: none (Mamba), without weights (Falcon-Mamba), with (Jamba)."""


@dataclass(frozen=True, slots=True)
class Mamba1:
    """Mamba (Gu and Dao, 2023). ``dt_rank``: width of the bottleneck that makes the steps. ``heads``: each
    makes steps, B and C of its own channels alone (Zamba); 0: all channels make those of all."""

    channels: int
    state_dim: int
    dt_rank: int
    conv_kernel: int
    conv_bias: bool
    projection_bias: bool
    inner_norms: InnerNorms = "none"
    inner_eps: float = 1e-6
    heads: int = 0

    def layer_spec(self) -> LayerSpec:
        return spec.mamba1(self.channels, self.state_dim, self.conv_kernel)


@dataclass(frozen=True, slots=True)
class Parallel:
    """Attention and Mamba-2 beside each other on the same normed input, their outputs added (Falcon-H1).
    Each branch has a factor on its input and one on its output."""

    attention: Attention
    mamba: Mamba2
    attention_in: float = 1.0
    attention_out: float = 1.0
    mamba_in: float = 1.0
    mamba_out: float = 1.0

    def layer_spec(self) -> LayerSpec:
        return spec.together("parallel", self.attention.layer_spec(), self.mamba.layer_spec())


@dataclass(frozen=True, slots=True)
class SharedBlock:
    """A Mamba layer beside a transformer block whose weights several layers share (Zamba, Zamba2): the block
    reads [x, embedding], and what it makes is added to the Mamba layer's input, not to the stream.

    ``block``: which of the shared blocks; ``use``: which of its uses in depth order this is, counted over all
    blocks: adapters of rank ``adapter_rank`` belong to the use, not to the block; 0: it has none.
    ``adapted_attention``: q, k and v have adapters, not only the feed-forward. Each use has its own KV."""

    attention: Attention
    mamba: Mamba1 | Mamba2
    feed_forward: Dense
    block: int
    use: int
    adapter_rank: int = 0
    adapted_attention: bool = False

    def layer_spec(self) -> LayerSpec:
        return spec.together("shared_block", self.attention.layer_spec(), self.mamba.layer_spec())


@dataclass(frozen=True, slots=True)
class ConvolvedAttention:
    """Attention whose queries and keys pass two causal convolutions (ZAYA): of ``first_kernel`` tokens
    channel by channel, then of ``second_kernel`` tokens within a head. Half of the values, ``delayed``
    numbers, are of the token before; every rank has all of them. ``k_heads``: the KV heads, which ranks do
    not copy: what is added to a key is the mean of its queries."""

    attention: Attention
    first_kernel: int
    second_kernel: int
    delayed: int
    k_heads: int

    @property
    def reach(self) -> int:
        """Tokens behind its own that the convolutions see."""
        return self.first_kernel + self.second_kernel - 2

    def layer_spec(self) -> LayerSpec:
        of = self.attention
        shifts = spec.shifts((of.heads + of.kv_heads) * of.head_dim, self.delayed, self.reach)
        return spec.together("convolved_attention", of.layer_spec(), shifts)


@dataclass(frozen=True, slots=True)
class RelativeAttention:
    """Attention whose scores have a bias by distance, of each query's own (Inkling): ``states`` numbers of a
    query's head, times a bank of profiles over ``extent`` distances; 0 for keys farther away. Keys and values
    pass a short convolution of ``conv_kernel`` tokens. So do the outputs of the layer and of its
    feed-forward, of ``stream`` channels each; every rank has those whole. From position ``floor`` on queries
    and biases are multiplied by 1 + ``growth`` log((position + 1) / ``floor``); 0: they are not."""

    attention: Attention
    states: int
    extent: int
    conv_kernel: int
    stream: int
    floor: int = 0
    growth: float = 0.0

    def layer_spec(self) -> LayerSpec:
        of = self.attention
        return spec.together(
            "relative_attention",
            of.layer_spec(),
            spec.convolutions(self.conv_kernel, kv=2 * of.kv_heads * of.head_dim, mixer=self.stream, feed=self.stream),
        )


@dataclass(frozen=True, slots=True)
class ShortConv:
    """Double-gated short convolution of LFM2. ``centred``: a token's output reads as many tokens after it as
    before it, and the layer keeps nothing (LFM2.5-Embedding)."""

    channels: int
    conv_kernel: int
    bias: bool
    centred: bool = False

    def layer_spec(self) -> LayerSpec:
        return spec.stateless() if self.centred else spec.short_conv(self.channels, self.conv_kernel)


@dataclass(frozen=True, slots=True)
class RgLru:
    """Real-gated linear recurrent unit (De et al., "Griffin", 2024), behind a short convolution. Each head
    makes the two gates of its ``head_dim`` channels of them alone."""

    heads: int
    head_dim: int
    conv_kernel: int

    def layer_spec(self) -> LayerSpec:
        return spec.rg_lru(self.heads * self.head_dim, self.conv_kernel)


@dataclass(frozen=True, slots=True)
class Lightning:
    """Lightning attention (Qin et al., 2024): a state for each head that decays by exp(-slope) a token. The
    slope of head h of n is 2 ^ (-8 (h + 1) / n) times ``factor``, which is of the layer. Queries, keys and
    values pass a silu (``silu``); or queries and keys pass a norm of each head, and are turned by ``rope``
    (Ling 2.5). ``scale``: of queries. ``norm_groups``: groups of heads, over all ranks, that the norm of the
    output takes one by one."""

    heads: int
    head_dim: int
    factor: float
    silu: bool = True
    qk_norm: bool = False
    rope: Rope | None = None
    scale: float = 1.0
    norm_groups: int = 1

    def layer_spec(self) -> LayerSpec:
        return spec.lightning(self.heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class MatrixLstm:
    """Matrix memory of xLSTM (Beck et al., 2024). Its input gate is an exponential, its forget gate a
    sigmoid; both pass a soft cap of ``gate_cap``. ``norm_eps``: of the norm of each head's output;
    ``floor``: what is added to the normaliser, relative to the largest input that the memory has."""

    heads: int
    key_dim: int
    value_dim: int
    gate_cap: float
    norm_eps: float
    floor: float

    def layer_spec(self) -> LayerSpec:
        return spec.matrix_lstm(self.heads, self.key_dim, self.value_dim)


@dataclass(frozen=True, slots=True)
class Ngrams:
    """What a layer adds for the last tokens (Qwen4). Each n-gram of 2 to ``size`` tokens has a row of
    ``width`` numbers in some tables, of ``rows`` rows each. A hash with ``multipliers`` finds it. A
    token ``end`` cuts n-grams. Values of the rows, gated by the streams (``stream_width`` numbers in all),
    pass a convolution of ``conv_kernel`` tokens that lie ``size`` apart. ``table_rows``: of all tables, and
    padding."""

    size: int
    width: int
    rows: tuple[int, ...]
    table_rows: int
    multipliers: tuple[int, ...]
    end: int
    stream_width: int
    conv_kernel: int

    @property
    def reach(self) -> int:
        """Tokens behind its own that the convolution sees."""
        return (self.conv_kernel - 1) * self.size

    def layer_spec(self) -> LayerSpec:
        return spec.ngrams(self.size, self.stream_width, self.reach)


@dataclass(frozen=True, slots=True)
class WithNgrams:
    """``mixer``, in front of which ``ngrams`` are added to the streams."""

    mixer: GatedDelta
    ngrams: Ngrams

    def layer_spec(self) -> LayerSpec:
        return spec.together("gated_delta", self.mixer.layer_spec(), self.ngrams.layer_spec())


@dataclass(frozen=True, slots=True)
class Streams:
    """``count`` residual streams beside each other (hyper-connections). Each block sees a mix of them, and
    each stream gets a share of what the block gives.

    ``rank``: of "gated" (Qwen4), the width between streams and gates: every number of every stream has a
    gate. "mixed" (GLM 5) has a weight for each stream, and mixes the streams by a matrix. Its rows and
    columns sum to 1 after ``rounds`` rounds of Sinkhorn's iteration."""

    kind: Literal["gated", "mixed"]
    count: int
    rank: int = 0
    rounds: int = 0
    eps: float = 0.0


Mixer = (
    Attention
    | LatentAttention
    | ConvolvedAttention
    | RelativeAttention
    | GatedDelta
    | KimiDelta
    | Mamba2
    | Mamba1
    | ShortConv
    | RgLru
    | Lightning
    | MatrixLstm
    | TimeMix
    | ChannelMix
    | Parallel
    | SharedBlock
    | WithNgrams
)

Activation = Literal["silu", "gelu", "relu2", "clamped_swiglu", "gelu_tanh"]
"""``relu2``: the square of relu. ``clamped_swiglu``: of gpt-oss's experts, gate and up together."""


@dataclass(frozen=True, slots=True)
class Dense:
    """Feed-forward; ``width`` is the inner size. ``gated``: down(act(gate(x)) * up(x)), else
    down(act(up(x))). ``multipliers``: factors on gate(x) and on the result, Falcon-H1's. ``limit``: gate(x)
    is at most this, and up(x) at most this on both sides (GLM 5); 0 for none."""

    width: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    multipliers: tuple[float, float] = (1.0, 1.0)
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts. ``width`` is the inner size of one expert. ``shared_width`` is that of the expert
    every token passes (0: none); ``shared_gate``: its output is multiplied by sigmoid of a learned gate.
    ``normalized``: the weights of the chosen experts sum to 1 (``normalizer_eps`` is added to their sum).
    ``scoring``: what makes a weight of a router's score. ``choice_bias``: a learned number per expert is
    added to choose, and not to weigh. ``scale`` multiplies the weights. ``groups``: experts come in so many
    groups, of which the ``groups_chosen`` with the best two scores in sum are chosen from. ``latent_width``:
    routed experts work on a projection of this width (0: on the stream itself). ``own_count``: most experts
    that a rank holds where ranks divide them (0: all). ``bias``: the router and both products of an expert
    have one. ``normed_apart``: the shared expert, the routed ones and the router have norms of their own, and
    each expert a factor on its weight (Gemma 4). ``limit``: as of ``Dense``. ``router_width``: the router is
    a feed-forward of this width over a state that layers hand on, and may choose none (ZAYA); 0: a product.
    ``router_continues``: there is a layer before. ``shared_count``: so many experts of ``shared_width`` that
    every token passes; the router scores them too, and weights are shares of the sum over them and the chosen
    ones (Inkling)."""

    count: int
    per_token: int
    width: int
    normalized: bool
    shared_width: int = 0
    shared_gate: bool = False
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    choice_bias: bool = False
    scale: float = 1.0
    normalizer_eps: float = 0.0
    groups: int = 1
    groups_chosen: int = 1
    activation: Activation = "silu"
    gated: bool = True
    latent_width: int = 0
    own_count: int = 0
    bias: bool = False
    normed_apart: bool = False
    limit: float = 0.0
    router_width: int = 0
    router_continues: bool = False
    shared_count: int = 0

    @property
    def shared(self) -> Dense:
        """The expert that every token passes."""
        return Dense(self.shared_width, self.activation, self.gated, limit=self.limit)


FeedForward = Dense | Experts


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """The layer of a multi-token prediction head. What its attention keeps lies in the pages, as that of any
    other layer. ``streams``: the head reads and carries so many residual streams (Qwen4); None for one, which
    is the trunk's hidden state."""

    attention: Attention | LatentAttention
    feed_forward: FeedForward
    streams: Streams | None = None

    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """Its own, and that of its index."""
        width = self.attention.index_width
        return replace(self.attention.layer_spec(), kind="mtp"), *([spec.index_rows(width)] if width else [])


@dataclass(frozen=True, slots=True)
class Architecture:
    """``mixers`` and ``feed_forwards`` are in depth order, one of each per layer; None for a layer without.

    The multipliers are Granite's and Falcon-H1's; 1 everywhere else. ``logits_divisor`` divides the logits.
    ``rounded_multiplier``: that of the embedding is rounded to the model's dtype first (Gemma).
    ``logits_cap``: logits are cap x tanh(logits / cap); 0 for none. ``per_layer_width``: numbers that a
    second embedding gives each token for each layer; ``layer_scalars``: a factor on the stream behind each
    layer (Gemma 4).
    ``normed_stream``: four factors for each layer, where the stream is what the norm before a block gives
    (MiniMax). They are on the stream and the mixer's output, then on the stream and the feed-forward's.
    ``sandwich_norms``: what comes out of each block is normed too (LFM3).
    ``residual_float32``: the residual stream is kept in float32 whatever the weights are in (Mamba).
    ``mtp``: the head that drafts next tokens, of families whose checkpoints may have one. ``vision``: what
    makes rows of pictures; None for a model of text alone. ``streams``: None for one residual stream.
    ``scaled_residual``: stream and output of a block have biases and factors of each channel where they are
    added, and the embedding has (ZAYA). ``layer_norms``: norms subtract the mean and have biases, blocks hold
    their own, and the embedding has one (RWKV). ``embedding_norm``: what is embedded is normed (Inkling).
    ``head_tokens``: tokens that the head knows, where it is padded to the vocabulary; 0: all.
    ``norm_gate``: of every norm of the stream (GigaChat 3.5).
    """

    family: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    dtype: DTypeName
    norm_eps: float
    tied_embeddings: bool
    mixers: tuple[Mixer | None, ...]
    feed_forwards: tuple[FeedForward | None, ...]
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    rounded_multiplier: bool = False
    logits_cap: float = 0.0
    per_layer_width: int = 0
    layer_scalars: bool = False
    normed_stream: tuple[tuple[float, float, float, float], ...] = ()
    residual_float32: bool = False
    sandwich_norms: bool = False
    mtp: MtpLayer | None = None
    vision: VisionTower | None = None
    streams: Streams | None = None
    scaled_residual: bool = False
    layer_norms: bool = False
    embedding_norm: bool = False
    head_tokens: int = 0
    norm_gate: NormGate | None = None

    @property
    def indexed(self) -> tuple[int, ...]:
        """The layers whose attention sees chosen blocks. What their tokens keep is a layer of ``spec`` each,
        in this order, behind those of the depth."""
        return tuple(number for number, mixer in enumerate(self.mixers) if getattr(mixer, "index", None) is not None)

    @property
    def why_no_gpu(self) -> str:
        """What it does that GPUs have no kernel for; nothing where they compute it."""
        return "attends over chosen blocks" if self.indexed else ""

    @property
    def causal(self) -> bool:
        """Whether no token sees a later one. Others embed text and generate none; their prompts are computed whole."""
        return all(getattr(mixer, "causal", True) for mixer in self.mixers)

    @property
    def layer_count(self) -> int:
        return len(self.mixers)

    @property
    def turn_sections(self) -> tuple[int, ...]:
        """Of a model that turns by the places of pictures; see ``VisionTower.sections``."""
        return () if self.vision is None else self.vision.sections

    def spec(self, *, mtp: bool = False) -> ModelSpec:
        """``mtp``: with the layer of the head and its index, behind all others."""
        assert self.mtp is not None or not mtp, f"{self.family} has no head for multi-token prediction"
        heads = self.mtp.layer_specs() if mtp and self.mtp is not None else ()
        return ModelSpec(
            family=self.family,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            max_positions=self.max_positions,
            dtype=self.dtype,
            layers=tuple(mixer.layer_spec() if mixer is not None else spec.stateless() for mixer in self.mixers)
            + self._index_specs()
            + heads,
            causal=self.causal,
        )

    def _index_specs(self) -> tuple[LayerSpec, ...]:
        widths: list[int] = [getattr(self.mixers[number], "index_width") for number in self.indexed]  # noqa: B009
        return tuple(map(spec.index_rows, widths))
