"""A layer of a decoder: a list of blocks, each of which changes the residual stream.

    x = embed(tokens)
    for each layer, for each of its blocks:     block(stream, step)
        ResidualBlock       x += scale * out_norm(block(norm(x)))               (either norm may be absent)
        blocks.streams      several streams: a block sees a mix, and each stream gets a share of its output
        blocks.per_layer    x = after(x), of further numbers of each token                           (Gemma 4)
        blocks.combined     a block that layers share adds to the mixer's input                       (Zamba)
        ...                 a family with another kind of residual brings its own block

The loop over layers and the fused decoder both read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from weft.families.mixers import Mixer
from weft.families.mixers.attention import Rope
from weft.families.mixers.feed_forward import FeedForward
from weft.models.blocks.linear import Linear, Norm, NormOfScaled
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.attention_layer import CosSin
from weft.tensor.ops.norm import add_norm, finished

Carried = Sequence[torch.Tensor]
"""Rows of each token that ``ResidualBlock.enter`` hands to ``leave``."""


class MixerBlock(Protocol):
    """Block that moves information between the tokens of a sequence."""

    def __call__(
        self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None, /
    ) -> torch.Tensor: ...


class FeedForwardBlock(Protocol):
    """Block that works on each token separately. A mixture of experts reads no expert's weights for rows whose
    position is PAD; ``positions_T`` is None if no row is PAD. Others compute all rows.
    """

    def __call__(self, x_TD: torch.Tensor, positions_T: torch.Tensor | None = None, /) -> torch.Tensor: ...


def normed(norm: Norm | NormOfScaled | None, x_TD: torch.Tensor) -> torch.Tensor:
    return x_TD if norm is None else norm(x_TD)


@dataclass(slots=True)
class ResidualStream:
    """Residual stream of a step. ``y_TD`` is still to be added to ``x_TD``, times ``scale``, together with a norm of
    the sum; it may be unfinished (``finished``). ``dtype``: of the blocks' inputs. ``rows``: values of each token that
    blocks hand on to later ones.
    """

    x_TD: torch.Tensor
    dtype: torch.dtype
    scale: float = 1.0
    y_TD: torch.Tensor | None = None
    rows: dict[str, torch.Tensor] = field(default_factory=dict)

    def summed(self) -> torch.Tensor:
        """Return the stream with the outputs of all blocks."""
        if self.y_TD is not None:
            y_TD = finished(self.y_TD, self.dtype)
            self.x_TD = self.x_TD + (y_TD if self.scale == 1.0 else y_TD * self.scale)
            self.y_TD = None
        return self.x_TD

    def normed(self, norm: Norm | None) -> torch.Tensor:
        """Return the norm of the stream, taken in ``dtype``."""
        x_TD, y_TD = self.x_TD, self.y_TD
        fits = y_TD is not None and (y_TD.dtype == self.dtype or y_TD.ndim == 3) and x_TD.dtype == self.dtype
        if y_TD is not None and fits and norm is not None and not norm.centred:
            self.x_TD, normed_TD = add_norm(x_TD, y_TD, norm.weight, norm.eps, plus_one=norm.plus_one, scale=self.scale)
            self.y_TD = None
            return normed_TD if norm.gate is None else norm.gate(normed_TD)
        return normed(norm, self.summed().to(self.dtype))


@dataclass(slots=True)
class LayerStep:
    """Inputs of blocks other than the stream. ``whole``: ``inputs`` with output of all rows. ``cache`` and ``rope``:
    of the present layer. ``positions_T``: None if no row is PAD. ``turned``: rotary tables of inputs. ``readers``:
    layers follow the last one that writes, and read pages. ``streams_TN``: several streams, before they are one.
    """

    inputs: StepInputs
    whole: StepInputs
    rotated: dict[Rope | None, CosSin | None]
    cache: LayerCache
    positions_T: torch.Tensor | None = None
    rope: Rope | None = None
    readers: Callable[[StepInputs], Iterator[tuple[Rope, CosSin]]] | None = None
    streams_TN: torch.Tensor | None = None

    @property
    def cos_sin(self) -> CosSin | None:
        return self.rotated[self.rope]

    def cut(self, stream: ResidualStream, carried: Carried = ()) -> Carried:
        """Leave out the rows whose output is not needed. Call it once all KV and states are written: later layers only
        read pages, for the last token of each run. Return ``carried`` without these rows.
        """
        asked_of = self.inputs.asked_of
        if self.inputs.output_rows is None:
            return carried
        stream.x_TD = asked_of(stream.x_TD)
        stream.rows = {name: asked_of(rows) for name, rows in stream.rows.items()}
        self.positions_T = None if self.positions_T is None else asked_of(self.positions_T)
        if self.readers is not None:
            self.whole = self.inputs = self.inputs.of_output_rows()
            self.rotated.update(self.readers(self.inputs))
        return [asked_of(rows) for rows in carried]


class StreamBlock(Protocol):
    """Block that changes the stream."""

    def __call__(self, stream: ResidualStream, step: LayerStep, /) -> None: ...


@dataclass(slots=True)
class ResidualBlock:
    """Block whose output is added to the stream. Most families norm the input; OLMo's attention layers norm the
    output, LFM3 both. ``mixes``: ``block`` is a ``MixerBlock``, or else a ``FeedForwardBlock``. ``last``: no later one
    writes KV or a state.
    """

    norm: Norm | None
    block: Any
    out_norm: Norm | NormOfScaled | None = None
    mixes: bool = True
    last: bool = field(default=False, init=False)

    def leave_sums(self) -> None:
        """Let the block's last product leave the sum of its split columns to the add and norm that follow, where
        nothing in between reads it. Adapters and sums over ranks read it.
        """
        if type(self) is ResidualBlock and self.out_norm is None:
            product = getattr(self.block, "last_product", None)
            if isinstance(product, Linear):
                product.unfinished = True

    def __call__(self, stream: ResidualStream, step: LayerStep) -> None:
        seen_TD, carried = self.enter(stream, step)
        if self.mixes:
            y_TD = self.block(seen_TD, step.inputs if self.last else step.whole, step.cache, step.cos_sin)
        else:
            y_TD = self.block(seen_TD, step.positions_T)
        if self.last:
            carried = step.cut(stream, carried)
        self.leave(stream, carried, normed(self.out_norm, y_TD))

    def enter(self, stream: ResidualStream, step: LayerStep) -> tuple[torch.Tensor, Carried]:
        """Return the input of ``block``, and the rows that are carried past it."""
        return stream.normed(self.norm), ()

    def leave(self, stream: ResidualStream, carried: Carried, y_TD: torch.Tensor) -> None:
        """Add ``y_TD`` to the stream."""
        stream.y_TD = y_TD


@dataclass(slots=True)
class FirstOfTwo(ResidualBlock):
    """First of two parallel blocks: the next one (``SecondOfTwo``) reads the stream from before this block. ``same``:
    both have the same norm.
    """

    same: bool = field(kw_only=True)

    def enter(self, stream: ResidualStream, step: LayerStep) -> tuple[torch.Tensor, Carried]:
        seen_TD = stream.normed(self.norm)
        stream.rows[_SEEN] = seen_TD if self.same else stream.summed()
        return seen_TD, ()


@dataclass(slots=True)
class SecondOfTwo(ResidualBlock):
    """Second of two parallel blocks, which reads the same stream as the first."""

    def enter(self, stream: ResidualStream, step: LayerStep) -> tuple[torch.Tensor, Carried]:
        stream.summed()
        return normed(self.norm, stream.rows.pop(_SEEN)), ()


@dataclass(slots=True)
class Early(ResidualBlock):
    """Feed-forward whose output is added to the stream by a later block (``JoinedByEarly``); that of ``now``, which
    reads the same rows, is added at once.
    """

    now: FeedForwardBlock = field(kw_only=True)

    def enter(self, stream: ResidualStream, step: LayerStep) -> tuple[torch.Tensor, Carried]:
        seen_TD = stream.normed(self.norm)
        return seen_TD, (seen_TD,)

    def leave(self, stream: ResidualStream, carried: Carried, y_TD: torch.Tensor) -> None:
        stream.rows[_EARLY] = y_TD
        stream.y_TD = self.now(carried[0])


@dataclass(slots=True)
class JoinedByEarly(ResidualBlock):
    """Block with whose output that of the ``Early`` one before it is added to the stream."""

    def leave(self, stream: ResidualStream, carried: Carried, y_TD: torch.Tensor) -> None:
        stream.y_TD = y_TD + stream.rows.pop(_EARLY)


_SEEN, _EARLY = "seen", "early"


@dataclass(slots=True)
class OnStream:
    """Block that makes another stream of the full one."""

    make: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, stream: ResidualStream, step: LayerStep) -> None:
        stream.x_TD = self.make(stream.summed())


@dataclass(slots=True)
class DecoderLayer:
    """One layer. ``blocks``: in order. Mixer or feed-forward may be missing (Nemotron-H, Mamba)."""

    blocks: list[StreamBlock]

    @property
    def residuals(self) -> list[ResidualBlock]:
        return [block for block in self.blocks if isinstance(block, ResidualBlock)]

    @property
    def mixer(self) -> Any:
        """The first mixer, None without one."""
        return next((block.block for block in self.residuals if block.mixes), None)

    @property
    def feed_forward(self) -> Any:
        """The first feed-forward, None without one."""
        return next((block.block for block in self.residuals if not block.mixes), None)


ReadLayer = Callable[[str, Mixer | None, FeedForward | None], DecoderLayer]
"""Function that reads "layers.3" with its mixer and its feed-forward."""
