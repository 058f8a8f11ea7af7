"""The geometry of a model, read once from ``config.json`` and never looked up again.

    config.json (any age, any spelling)  --weft.families-->  Architecture  --.spec()-->  ModelSpec
                                                                 |
                                                                 +--> weft.models.<family> builds blocks

A checkpoint's configuration comes in dialects: keys were renamed, moved and nested as transformers grew.
Everything downstream sees only these values. ``ModelSpec`` is the part that memory needs;
``Architecture`` has everything that the model code needs.

A layer has one mixer and one feed-forward, or only one of the two. Pure data, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from weft import spec
from weft.families.mixers import Mixer
from weft.families.mixers.attention import Attention
from weft.families.mixers.combined import Again
from weft.families.mixers.feed_forward import FeedForward
from weft.families.mixers.latent_attention import LatentAttention
from weft.families.names import Names
from weft.families.residuals import PLAIN, ModelShape, Residual
from weft.families.tensors import Table
from weft.families.vision import VisionTower
from weft.spec import DTypeName, LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """The layer of a multi-token prediction head. Its attention caches in the pages, as that of any other layer.
    ``residual``: with several residual streams the head reads and carries those of the trunk (Qwen4); otherwise it
    reads the trunk's hidden state."""

    attention: Attention | LatentAttention
    feed_forward: FeedForward
    residual: Residual = PLAIN

    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """Return the spec of its attention, and that of its index."""
        width = self.attention.index_width
        return replace(self.attention.layer_spec(), kind="mtp"), *([spec.index_rows(width)] if width else [])


@dataclass(frozen=True, slots=True)
class Architecture:
    """Geometry of a model. ``mixers`` and ``feed_forwards`` are in depth order, one of each per layer; None for a
    layer without.

    The multipliers are 1 in most families (Granite and Falcon-H1 have others). ``logits_divisor`` divides the logits.
    ``rounded_multiplier``: that of the embedding is rounded to the model's dtype first (Gemma). ``logits_cap``: logits
    are cap x tanh(logits / cap); 0 for none. ``mtp``: the head that drafts next tokens, of families whose checkpoints
    may have one. ``vision``: the tower that makes rows of pictures; None for a text-only model. ``head_tokens``:
    tokens that the head knows, the first ones, where it is padded or has fewer rows; 0: all. ``head_bias``: the head
    has a bias. ``residual``: how blocks are joined to the stream. ``names``: where a checkpoint has the blocks."""

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
    logits_divisor: float = 1.0
    rounded_multiplier: bool = False
    logits_cap: float = 0.0
    mtp: MtpLayer | None = None
    vision: VisionTower | None = None
    head_tokens: int = 0
    head_bias: bool = False
    residual: Residual = PLAIN
    names: Names = field(default_factory=Names, compare=False, repr=False)

    @property
    def indexed(self) -> tuple[int, ...]:
        """Numbers of the layers whose attention sees chosen blocks. ``spec`` has a further layer for the index rows of
        each, in this order, after the layers of the model."""
        return tuple(number for number, mixer in enumerate(self.mixers) if getattr(mixer, "index", None) is not None)

    @property
    def why_no_gpu(self) -> str:
        """Feature of the model that no GPU computes, as a verb phrase; "" if GPUs compute the model."""
        if any(getattr(mixer, "out_groups", 0) for mixer in self.mixers):
            return "attends over entries of tokens"
        return ""

    @property
    def causal(self) -> bool:
        """Whether no token sees a later one. Other models embed text and generate none; each of their prompts is
        computed in one step."""
        return all(getattr(mixer, "causal", True) for mixer in self.mixers)

    @property
    def layer_count(self) -> int:
        return len(self.mixers)

    @property
    def stored_layers(self) -> tuple[int, ...]:
        """For each layer, its number in the files. A layer that runs again has the number of the first run."""
        first_runs = [number for number, mixer in enumerate(self.mixers) if not isinstance(mixer, Again)]
        stored = {number: place for place, number in enumerate(first_runs)}
        return tuple(
            mixer.layer if isinstance(mixer, Again) else stored[number] for number, mixer in enumerate(self.mixers)
        )

    @property
    def tables_beside(self) -> Iterator[tuple[str, Table]]:
        """All tables outside the blocks, except embedding, head and towers, each with the name under which plans count
        it."""
        mixers = [mixer for mixer in self.mixers if not isinstance(mixer, Again)]
        records = tuple(record for record in (*mixers, *self.feed_forwards) if record is not None)
        return self.residual.tables(ModelShape(self.hidden_size, self.vocab_size, len(mixers), records))

    @property
    def turn_sections(self) -> tuple[int, ...]:
        """Sections of a model that turns by the places of pictures, see ``VisionTower.sections``; () for any other."""
        return () if self.vision is None else self.vision.sections

    def spec(self, *, mtp: bool = False) -> ModelSpec:
        """Return the geometry that memory needs. ``mtp``: with the layer of the head and its index, after all
        others."""
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
