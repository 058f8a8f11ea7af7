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

from dataclasses import dataclass, field, replace
from typing import Literal

from weft import spec
from weft.families.mixers import Mixer
from weft.families.mixers.attention import Attention
from weft.families.mixers.feed_forward import FeedForward
from weft.families.mixers.latent_attention import LatentAttention
from weft.families.names import Names
from weft.families.tensors import NormGate
from weft.families.vision import VisionTower
from weft.spec import DTypeName, LayerSpec, ModelSpec


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
    ``norm_gate``: of every norm of the stream (GigaChat 3.5). ``names``: where a checkpoint has the blocks.
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
    names: Names = field(default_factory=Names, compare=False, repr=False)

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
