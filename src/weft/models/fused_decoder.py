"""All layers of a decode step in one call into the kernels, for a model of fused blocks.

    layer by layer   norm, fused, add and norm, fused, add and norm, ...     one call each
    fused decoder    x -> [ norm fused  add norm fused  ...  add norm ] -> hidden

Kernels, order and roundings are the same as in ``CausalModel.forward``, so every bit of the result is too. The decoder
takes steps of few rows, all with output, of models whose layers are plain residual blocks: a norm before each mixer and
SwiGlu, and nothing else. Products include the additions of adapters, in the order of ``AdaptedProduct``; an adapter
that trained a full matrix is not served. Everything else goes layer by layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import torch

from weft.families.mixers.attention import Rope
from weft.models.blocks.attention import AttentionBlock
from weft.models.blocks.feed_forward import SwiGlu
from weft.models.blocks.linear import Norm
from weft.models.blocks.recurrent import RecurrentBlock, ShortConvBlock
from weft.models.layer import DecoderLayer, ResidualBlock
from weft.tensor import native
from weft.tensor.fused_block import MOST_ROWS, FusedBlock
from weft.tensor.inputs import LayerCache, Runs, StepInputs
from weft.tensor.ops.attention_layer import CosSin
from weft.tensor.replay_log import LoggedRuns, ReplayLog

_FEW_ROWS = 16
"""Rows from which on products with quantised weights may use other kernels."""
_BINDINGS = 4
"""Bindings kept at a time: one or two of one executor."""
_MIXERS = (AttentionBlock, RecurrentBlock, ShortConvBlock)


class _Seen(NamedTuple):
    dtype: torch.dtype
    few: bool
    instruction_set: str


class _Last(NamedTuple):
    """Binding of the step before, with the properties and the first and last cache of that step."""

    # Weak references: a view keeps the arena, which must be given back before a sleep.

    seen: _Seen
    first: weakref.ref[LayerCache]
    last: weakref.ref[LayerCache]
    bound: list[Any]

    def are(self, caches: list[LayerCache]) -> bool:
        return self.first() is caches[0] and self.last() is caches[-1]


class FusedDecoder:
    """Decoder of plain layers in one call. ``scale``: factor on the additions to the stream; ``ropes``: rotary settings
    of each layer's mixer; ``unfused``: adapters whose steps go layer by layer.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        ropes: Sequence[Rope | None],
        final_norm: Norm,
        scale: float,
        unfused: AbstractSet[str] = frozenset(),
    ) -> None:
        self._layers = layers if layers[0].blocks and all(map(_plain, layers)) else ()
        self._ropes = ropes
        self._rotated = [rope for rope in dict.fromkeys(ropes) if rope is not None]
        self._final_norm, self._scale, self._unfused = final_norm, scale, unfused
        self._bindings: dict[tuple[Any, ...], list[Any]] = {}
        self._last: _Last | None = None
        self._room: torch.Tensor | None = None

    def run(
        self,
        x_TD: torch.Tensor,
        inputs: StepInputs,
        caches: list[LayerCache],
        rotated: Mapping[Rope | None, CosSin | None],
    ) -> torch.Tensor | None:
        """Return hidden [T, D] after the final norm of the embedded tokens [T, D], valid until the next step; None, and
        nothing is done, if the decoder does not take the step.
        """
        if not self._layers or inputs.output_rows is not None or not 0 < x_TD.shape[0] <= MOST_ROWS:
            return None
        if not native.fits(x_TD):
            return None
        whose = None if inputs.adapters is None else inputs.adapters.by_count[x_TD.shape[0]]
        if whose is not None and not self._unfused.isdisjoint(group.digest for group in whose.groups):
            return None
        bound = self._bound(x_TD, caches)[0]
        if bound is None:
            return None
        # The same memory in each step: in a small step new memory takes more time than a layer's kernels.
        out_TD = self._room
        if out_TD is None or out_TD.shape != x_TD.shape or out_TD.dtype != x_TD.dtype:
            out_TD = self._room = torch.empty(x_TD.shape, dtype=x_TD.dtype)
        runs = inputs.runs
        if runs.log is not None:
            _log(bound, runs, runs.log, x_TD.dtype)
        bound.run(
            native.runs_of(runs),
            native.projected_of(x_TD),
            [_addresses(rotated[rope]) for rope in self._rotated],
            *native.page_table_of(runs),
            None if whose is None else native.adapter_rows_of(whose),
            out_TD.data_ptr(),
        )
        return out_TD

    def _bound(self, x_TD: torch.Tensor, caches: list[LayerCache]) -> list[Any]:
        """Return the binding for steps of this kind. It is nearly always the binding of the step before."""
        now = _Seen(x_TD.dtype, x_TD.shape[0] < _FEW_ROWS, native.extension().instruction_set())
        last, first = self._last, _first_fused(self._layers[0])
        if last is not None and last.seen == now and last.are(caches) and first.stays:
            return last.bound
        # The C++ object keeps addresses of weights and of the arena's views, which change in a sleep.
        key = (*now, id(caches), _lies(caches[0]), _lies(caches[-1]), id(first.bound(x_TD)))
        if key not in self._bindings:
            if len(self._bindings) == _BINDINGS:
                self._bindings.clear()
            self._bindings[key] = self._bind(x_TD, caches)
        bound = self._bindings[key]
        self._last = None
        if bound[0] is not None:
            self._last = _Last(now, weakref.ref(caches[0]), weakref.ref(caches[-1]), bound)
        return bound

    def _bind(self, x_TD: torch.Tensor, caches: list[LayerCache]) -> list[Any]:
        """Return the C++ decoder, then the objects whose addresses it holds; [None] if a layer cannot be fused."""
        width, stages, norms = x_TD.shape[1], [], []
        for layer, cache, rope in zip(self._layers, caches, self._ropes, strict=False):
            for norm, block in ((residual.norm, residual.block) for residual in layer.residuals):
                assert isinstance(block, (SwiGlu, *_MIXERS))
                staged = block.staged(x_TD) if isinstance(block, SwiGlu) else block.staged(x_TD, cache)
                if staged is None or norm is None:
                    return [None]
                assert staged.fused.first.columns == staged.fused.second.rows == width
                stages.append((staged, -1 if rope is None else self._rotated.index(rope)))
                norms.append(norm)
        if not all(_servable(norm, width) for norm in (*norms, self._final_norm)):
            return [None]
        bound = native.extension().FusedDecoder(self._scale, _norm_of(self._final_norm), self._final_norm.plus_one)
        parts = [bound]
        for norm, (staged, rope_index) in zip(norms, stages, strict=True):
            fused = staged.fused.bound(x_TD)
            bound.add(
                _norm_of(norm),
                norm.plus_one,
                fused,
                staged.core,
                staged.layer,
                staged.conv,
                staged.first,
                staged.second,
                staged.scales,
                staged.number,
                rope_index,
            )
            parts += fused, staged.layer
        return parts


def _log(bound: Any, runs: Runs, log: ReplayLog, dtype: torch.dtype) -> None:
    """Let the next run of ``bound`` fill ``log``, and replay it in one call."""
    code, rows = native.DTYPES[dtype], log.rows
    room = torch.empty(rows * bound.log_token_bytes(code), dtype=torch.uint8)
    bound.log(native.runs_of(runs), code, room.data_ptr())

    def replay(again: LoggedRuns) -> None:
        bound.replay(
            native.extension().Runs(
                again.rows, again.starts, again.lengths, again.slots, [False] * len(again.slots), []
            ),
            code,
            room.data_ptr(),
            rows,
        )

    log.fill(replay, room)


def _plain(layer: DecoderLayer) -> bool:
    """Return whether the layer is residual blocks that may be fused blocks."""
    return all(
        type(block) is ResidualBlock
        and block.out_norm is None
        and isinstance(block.block, (SwiGlu, *_MIXERS))
        and block.block.fused is not None
        for block in layer.blocks
    )


def _first_fused(layer: DecoderLayer) -> FusedBlock:
    fused = layer.residuals[0].block.fused
    assert isinstance(fused, FusedBlock)
    return fused


def _servable(norm: Norm, width: int) -> bool:
    return (
        norm.usual
        and norm.weight.dtype in native.DTYPES
        and norm.weight.shape == (width,)
        and norm.weight.is_contiguous()
        and width % native.LANES == 0
    )


def _norm_of(norm: Norm) -> tuple[int, int, float]:
    return norm.weight.data_ptr(), native.DTYPES[norm.weight.dtype], norm.eps


def _lies(cache: LayerCache) -> tuple[tuple[int, int, torch.dtype], ...]:
    """Return the addresses of the views of a layer."""
    views = [view for view in (cache.k, cache.v, *cache.state.values()) if view is not None]
    return tuple((view.data_ptr(), view.stride(0), view.dtype) for view in views)


def _addresses(cos_sin: CosSin | None) -> tuple[int, int, int]:
    assert cos_sin is not None
    cos_TD, sin_TD = cos_sin
    assert cos_TD.dtype == sin_TD.dtype == torch.float32
    assert cos_TD.is_contiguous()
    assert sin_TD.is_contiguous()
    return cos_TD.data_ptr(), sin_TD.data_ptr(), cos_TD.shape[1]
