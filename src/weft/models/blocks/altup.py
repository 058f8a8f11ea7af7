"""Gemma 3n's layer: streams that are predicted, computed in part, and corrected.

    x_TN = S streams of D numbers; a is the first one

    before    p_j = x_j + sum over i of predict(m(a))_ji x_i           m(a) = tanh(router(norm(a) / D))
    inside    h = norm(p_0);  y = (p_0 + norm(attention(h)) + h + norm(right(left(h)))) / sqrt(2)
              y += norm(feed-forward(norm(y)))
    after     x_j = p_j + (1 + correct(m(y))_j) (y - p_0)
              x_j += the token's own numbers, gated by scale * x_0, for all but the first     (``per_layer``)

    ends      x_j = project_j(embedding) as long as the embedding;  mean of x_0 and of join_j(x_j) as long as x_0

Sources: AltUp (Baykal et al., 2023); LAuReL (Menghani et al., 2024); transformers ``Gemma3nTextAltUp``,
``Gemma3nTextDecoderLayer``, ``Gemma3nTextModel``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from weft.families.gemma3n import AltUp
from weft.families.mixers import Mixer
from weft.families.mixers.feed_forward import FeedForward
from weft.models.block_reader import BlockReader
from weft.models.blocks import per_layer
from weft.models.blocks.linear import Linear, Norm
from weft.models.blocks.per_layer import OwnNumbers
from weft.models.blocks.plain import plain_layer
from weft.models.layer import (
    Carried,
    DecoderLayer,
    LayerStep,
    OnStream,
    ReadLayer,
    ResidualBlock,
    ResidualStream,
    StreamBlock,
    normed,
)
from weft.tensor.ops.elementwise import each

_PREDICTED = "predicted streams"
_LEAST_SQUARE = 1e-5
"""Least mean square of a projected stream, as in transformers."""


@dataclass(slots=True)
class AltUpMix:
    """Prediction and correction of the streams of a layer. ``norm``: over D; ``router``: [S, D]; ``predict``: [S S, S];
    ``correct``: [S, S].
    """

    count: int
    norm: Norm
    router: Linear
    predict: Linear
    correct: Linear

    def predicted(self, x_TN: torch.Tensor) -> torch.Tensor:
        """Return the streams [T, S, D] that the layer should make of ``x_TN``."""
        x_TSD = torch.unflatten(x_TN, 1, (self.count, -1))
        weights_TSS = torch.unflatten(self.predict(self._mode(x_TSD[:, 0].contiguous())), 1, (self.count, -1))
        return torch.baddbmm(x_TSD, weights_TSS, x_TSD)

    def corrected(self, predicted_TSD: torch.Tensor, y_TD: torch.Tensor) -> torch.Tensor:
        """Return ``predicted_TSD``, corrected where ``y_TD`` is the true first stream."""
        weights_TS = self.correct(self._mode(y_TD)) + 1.0
        return predicted_TSD + weights_TS[..., None] * (y_TD - predicted_TSD[:, 0])[:, None]

    def _mode(self, x_TD: torch.Tensor) -> torch.Tensor:
        routed_TS = self.router(self.norm(x_TD) * x_TD.shape[1] ** -1.0)
        return each(torch.tanh, routed_TS.float()).to(x_TD.dtype)


@dataclass(slots=True)
class PredictedBlock(ResidualBlock):
    """Attention of the first of the streams, which are predicted before it, and the product of low rank next to it."""

    mix: AltUpMix = field(kw_only=True)
    left: Linear = field(kw_only=True)
    right: Linear = field(kw_only=True)
    low_rank_norm: Norm = field(kw_only=True)

    def enter(self, stream: ResidualStream, step: LayerStep) -> tuple[torch.Tensor, Carried]:
        predicted_TSD = self.mix.predicted(stream.summed())
        seen_TD = normed(self.norm, predicted_TSD[:, 0].contiguous())
        return seen_TD, (predicted_TSD, seen_TD + self.low_rank_norm(self.right(self.left(seen_TD))))

    def leave(self, stream: ResidualStream, carried: Carried, y_TD: torch.Tensor) -> None:
        predicted_TSD, low_rank_TD = carried
        stream.rows[_PREDICTED] = predicted_TSD
        stream.x_TD = (predicted_TSD[:, 0] + y_TD + low_rank_TD) * 2.0**-0.5


@dataclass(slots=True)
class Correction:
    """Correction of all streams after a layer, and the addition of the token's own numbers. ``scale``: [D], of the
    first stream where it is their gate.
    """

    mix: AltUpMix
    scale: torch.Tensor
    own: OwnNumbers

    def __call__(self, stream: ResidualStream, step: LayerStep) -> None:
        x_TSD = self.mix.corrected(stream.rows.pop(_PREDICTED), stream.summed())
        x_TSD[:, 1:] += self.own(x_TSD[:, 0] * self.scale, stream)[:, None]
        stream.x_TD = x_TSD.flatten(1)


def layer_reader(read: BlockReader) -> ReadLayer:
    shape, hidden = read.architecture.residual, read.hidden
    assert isinstance(shape, AltUp)

    def layer(name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        attended, fed = plain_layer(read, name, mixer, feed).residuals
        table = read.table(shape.mix_table(hidden), f"{name}.altup")
        norm = table.norm("router_norm", read.eps)
        mix = AltUpMix(shape.count, norm, table.plain("router"), table.plain("predict"), table.plain("correct"))
        laurel = read.table(shape.low_rank_table(hidden), f"{name}.laurel")
        first = PredictedBlock(
            attended.norm,
            attended.block,
            attended.out_norm,
            mix=mix,
            left=laurel.linear("left"),
            right=laurel.linear("right"),
            low_rank_norm=laurel.norm("norm", read.eps),
        )
        own = per_layer.read_own(read, read.table(shape.after_layer_table(hidden), name))
        return DecoderLayer([first, fed, Correction(mix, table.tensor("scale"), own)])

    return layer


def _as_long(x_TSD: torch.Tensor, as_TD: torch.Tensor) -> torch.Tensor:
    """Return the rows of ``x_TSD``, each with the mean square of the row of ``as_TD``."""
    square_TS1 = x_TSD.float().square().mean(-1, keepdim=True).clamp_min(_LEAST_SQUARE)
    length_T11 = as_TD.float().square().mean(-1, keepdim=True)[:, None].sqrt()
    return (x_TSD * (length_T11 * square_TS1.rsqrt())).to(x_TSD.dtype)


def ends_reader(read: BlockReader) -> tuple[list[StreamBlock], list[StreamBlock]]:
    shape = read.architecture.residual
    assert isinstance(shape, AltUp)
    count, table = shape.count, read.table(shape.ends_table(read.hidden), "")
    expand = table.linear("expand")
    joins = [table.linear(f"join.{other}") for other in range(count - 1)]

    def expanded(x_TD: torch.Tensor) -> torch.Tensor:
        others_TSD = _as_long(torch.unflatten(expand(x_TD), 1, (count - 1, -1)), x_TD)
        return torch.cat((x_TD, others_TSD.flatten(1)), dim=1)

    def joined(x_TN: torch.Tensor) -> torch.Tensor:
        first_TD, *others = torch.unflatten(x_TN, 1, (count, -1)).unbind(1)
        rows = [join(other_TD.contiguous()) for join, other_TD in zip(joins, others, strict=True)]
        others_TSD = _as_long(torch.stack(rows, dim=1), first_TD)
        return torch.cat((first_TD[:, None], others_TSD), dim=1).mean(1)

    own, _ = per_layer.ends_reader(read)
    return [*own, OnStream(expanded)], [OnStream(joined)]
