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
from weft.families.mixing import ChannelMix, TimeMix
from weft.families.vision import VisionTower
from weft.spec import DTypeName, LayerSpec, ModelSpec

RopeKind = Literal["default", "linear", "llama3", "yarn", "proportional"]

RING_TOKENS_MAX = 1024
"""Windows up to this many tokens are a ring in the state slot; wider ones stay in pages and are masked.
Why: decision 0008."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding over the first ``rotary_dim`` dims of a head.

    ``factor`` and what follows belong to the scaled kinds and are ignored by "default".
    ``original_positions`` is the context length before scaling. ``attention_factor`` multiplies cos and sin.
    ``turning_dim``: of "proportional", which spaces its frequencies over all of ``rotary_dim`` and then lets
    only the fastest ``turning_dim / 2`` of them turn.
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
    turning_dim: int = 0


@dataclass(frozen=True, slots=True)
class Index:
    """What lets attention see ``chosen`` blocks of ``block`` tokens and the unfinished block behind them.
    Each block has one key of ``key_dim`` numbers, made of a row that each token keeps; ``queries`` of the
    same width score it, and the sum of what is above 0 counts. ``learned``: how tokens weigh in their block's
    key, and queries in the sum, is learned, and queries come of the bottleneck (GLM 5); else both are means,
    and keys turn by their block's first position (Qwen4). Every rank has all of it."""

    queries: int
    key_dim: int
    block: int
    chosen: int
    learned: bool = False

    @property
    def row_width(self) -> int:
        """Numbers that a token keeps: its key, and how it weighs."""
        return self.key_dim * (2 if self.learned else 1)


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention with grouped KV heads. ``gated``: the output is multiplied by sigmoid of a gate that
    the query projection makes too; ``head_gated``: by sigmoid of one number per head, of a projection of its
    own. ``qk_norm``: queries and keys pass an RMS norm before rotary, per head or (``norm_whole``) over all
    heads. ``window``: a token sees itself and the ``window - 1`` tokens before it; None: all of them.
    ``sinks``: each head has a learned score that takes part in the softmax's sum and adds nothing (gpt-oss).
    ``kv_copies``: ranks that hold the same KV heads, where there are fewer heads than ranks.
    ``values_normed``: values pass an RMS norm without a weight; ``values_are_keys``: they are the keys before
    their norm. ``kv_of``: the layer whose pages this one reads, having no keys of its own; ``shared``: later
    layers read this one's, so they are in pages whatever the window (Gemma 4). ``out_bias``: the output
    projection has a bias; None is as ``bias``. ``index``: it sees chosen blocks alone (Qwen4)."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None
    qk_norm: bool = False
    gated: bool = False
    bias: bool = False
    window: int | None = None
    head_gated: bool = False
    norm_whole: bool = False
    sinks: bool = False
    kv_copies: int = 1
    values_normed: bool = False
    values_are_keys: bool = False
    kv_of: int | None = None
    shared: bool = False
    out_bias: bool | None = None
    index: Index | None = None

    @property
    def ring(self) -> bool:
        """Whether keys and values live in a ring of ``window`` tokens in the state slot, not in pages."""
        # A ring is overwritten as it is read: a second reader would find the step's first tokens gone.
        return (self.window is not None and self.window <= RING_TOKENS_MAX and not self.shared
                and self.kv_of is None)

    @property
    def own_kv_heads(self) -> int:
        """KV heads that it makes itself."""
        return self.kv_heads if self.kv_of is None else 0

    @property
    def usual(self) -> bool:
        """Whether it has keys and values of its own, as products give them: what the fused kernels know."""
        return self.kv_of is None and not self.values_normed and not self.values_are_keys

    def layer_spec(self) -> LayerSpec:
        if self.kv_of is not None:
            return spec.reading(self.kv_of)
        if self.window is not None and self.ring:
            return spec.window_attention(self.kv_heads, self.head_dim, self.window)
        return spec.attention(self.kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values of all heads come from one latent
    of ``latent_dim`` numbers per token. Only the latent is cached, with ``shared_dim`` numbers of key that
    all heads share. ``own_dim``: the part of a key that each head makes of the latent; ``value_dim``: its
    value. ``query_rank``: width of the query's own bottleneck, None for a plain projection. ``rope`` turns
    the shared part, None for no positions (Kimi); ``head_gated``: the output is multiplied by sigmoid of one
    number per head (Ling 3). ``index``: it sees chosen blocks alone (GLM 5). ``norm_eps``: of the norms
    inside."""

    heads: int
    latent_dim: int
    shared_dim: int
    own_dim: int
    value_dim: int
    scale: float
    query_rank: int | None = None
    bias: bool = False
    rope: Rope | None = None
    head_gated: bool = False
    index: Index | None = None
    norm_eps: float = 1e-6

    @property
    def key_dim(self) -> int:
        return self.own_dim + self.shared_dim

    def layer_spec(self) -> LayerSpec:
        return spec.latent_attention(self.latent_dim + self.shared_dim)


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Gated delta net (Yang et al., 2024). ``beta_scale``: the write strength is sigmoid times this; 2 lets
    the state's eigenvalues be negative (OLMo hybrid). ``sigmoid_gate``: the output's gate is a sigmoid, not a
    silu (Qwen4)."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv_kernel: int
    beta_scale: float = 1.0
    sigmoid_gate: bool = False

    @property
    def key_width(self) -> int:
        return self.k_heads * self.k_dim

    @property
    def value_width(self) -> int:
        return self.v_heads * self.v_dim

    def layer_spec(self) -> LayerSpec:
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

    @property
    def rope(self) -> Rope | None:
        return self.attention.rope

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

    @property
    def rope(self) -> Rope | None:
        return self.attention.rope

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
    def rope(self) -> Rope | None:
        return self.attention.rope

    @property
    def reach(self) -> int:
        """Tokens behind its own that the convolutions see."""
        return self.first_kernel + self.second_kernel - 2

    def layer_spec(self) -> LayerSpec:
        of = self.attention
        shifts = spec.shifts((of.heads + of.kv_heads) * of.head_dim, self.delayed, self.reach)
        return spec.together("convolved_attention", of.layer_spec(), shifts)


@dataclass(frozen=True, slots=True)
class ShortConv:
    """Double-gated short convolution of LFM2."""

    channels: int
    conv_kernel: int
    bias: bool

    def layer_spec(self) -> LayerSpec:
        return spec.short_conv(self.channels, self.conv_kernel)


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
    slope of head h of n is 2 ^ (-8 (h + 1) / n) times ``factor``, which is of the layer."""

    heads: int
    head_dim: int
    factor: float

    def layer_spec(self) -> LayerSpec:
        return spec.lightning(self.heads, self.head_dim)


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


Mixer = (Attention | LatentAttention | ConvolvedAttention | GatedDelta | KimiDelta | Mamba2 | Mamba1
         | ShortConv | RgLru | Lightning | TimeMix | ChannelMix | Parallel | SharedBlock | WithNgrams)


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
    ``router_continues``: there is a layer before."""

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

    @property
    def shared(self) -> Dense:
        """The expert that every token passes."""
        return Dense(self.shared_width, self.activation, self.gated, limit=self.limit)


FeedForward = Dense | Experts


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """The layer of a multi-token prediction head. Its KV lies in the pages, as that of any other layer."""

    attention: Attention
    feed_forward: FeedForward

    def layer_spec(self) -> LayerSpec:
        return replace(self.attention.layer_spec(), kind="mtp")


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
    their own, and the embedding has one (RWKV).
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

    @property
    def indexed(self) -> tuple[int, ...]:
        """The layers whose attention sees chosen blocks. What their tokens keep is a layer of ``spec`` each,
        in this order, behind those of the depth."""
        return tuple(number for number, mixer in enumerate(self.mixers)
                     if getattr(mixer, "index", None) is not None)

    @property
    def layer_count(self) -> int:
        return len(self.mixers)

    @property
    def turn_sections(self) -> tuple[int, ...]:
        """Of a model that turns by the places of pictures; see ``VisionTower.sections``."""
        return () if self.vision is None else self.vision.sections

    def spec(self, *, mtp: bool = False) -> ModelSpec:
        """``mtp``: with the layer of the head, behind all others."""
        assert self.mtp is not None or not mtp, f"{self.family} has no head for multi-token prediction"
        heads = (self.mtp.layer_spec(),) if mtp and self.mtp is not None else ()
        return ModelSpec(family=self.family, vocab_size=self.vocab_size, hidden_size=self.hidden_size,
                         max_positions=self.max_positions, dtype=self.dtype,
                         layers=tuple(mixer.layer_spec() if mixer is not None else spec.stateless()
                                      for mixer in self.mixers) + self._index_specs() + heads)

    def _index_specs(self) -> tuple[LayerSpec, ...]:
        indexes: list[Index] = [getattr(self.mixers[number], "index") for number in self.indexed]  # noqa: B009
        return tuple(spec.index_rows(index.row_width) for index in indexes)
