"""N-gram tables: embeddings of the last tokens, added to the residual streams before a layer.

    tokens --window--> the last n - 1 of each --hash--> rows of the tables --> e_TE
    e --project--> [ key of each stream | value ]
    gate_s = sigmoid(root(norm(key_s) . norm(x_s) / sqrt(D)));    v_s = gate_s value
    x += v + silu(conv(norm(v)))                                  the convolution's tokens are n apart

The last tokens are the window of a convolution as well. The window holds digits, which every dtype represents exactly,
and adds nothing up: so snapshots, drafts and moves need no special rule. Zeros, as in a new sequence, mean no token.

Source: transformers ``Qwen4ExpTextPLELayer``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from weft.families.mixers.ngrams import Ngrams
from weft.families.residuals import Streams
from weft.models.block_reader import BlockReader
from weft.models.blocks.linear import Norm, Projection
from weft.models.embedding import Embedding, Lookup
from weft.models.layer import LayerStep, ResidualStream
from weft.spec import HISTORY_BASE, HISTORY_CHANNELS
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.conv import causal_conv
from weft.tensor.ops.norm import rms_norm

_DIGITS = 3


@dataclass(slots=True)
class NgramsBlock:
    """N-grams of one layer. ``table``: [table rows, width] of all tables; ``project``: rows keys [S D], value [D];
    norms: over D, with weights for all streams; ``conv``: [S D, kernel].
    """

    shape: Ngrams
    table: Lookup
    project: Projection
    key_norm: Norm
    query_norm: Norm
    conv_norm: Norm
    conv: torch.Tensor
    streams: int
    _spread: torch.Tensor = field(init=False, repr=False)
    """``conv`` with zeros between its tokens: [S D, reach + 1]."""
    _shifts: torch.Tensor = field(init=False, repr=False)
    """[channels, size]: the convolution whose output is its input of one token, of two tokens, ... before."""
    _hash: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = field(init=False, repr=False)
    """int64: multipliers [size], rows of each table [tables], its first row [tables]."""

    def __post_init__(self) -> None:
        shape, device = self.shape, self.conv.device
        self._spread = self.conv.new_zeros(self.conv.shape[0], shape.reach + 1)
        self._spread[:, :: shape.size] = self.conv
        self.conv = self._spread[:, :: shape.size]  # a view: only one copy is in memory
        self._shifts = self.conv.new_zeros(HISTORY_CHANNELS, shape.size)
        for shift in range(1, shape.size):
            self._shifts[_DIGITS * (shift - 1) : _DIGITS * shift, shape.size - 1 - shift] = 1.0
        rows_H = torch.tensor(shape.rows, device=device)
        self._hash = torch.tensor(shape.multipliers, device=device), rows_H, rows_H.cumsum(0) - rows_H

    def __call__(self, stream: ResidualStream, step: LayerStep) -> None:
        x_TN = stream.summed()
        stream.x_TD = x_TN + self.added(x_TN, step.whole, step.cache)

    def added(self, x_TN: torch.Tensor, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        """Return the addition to the streams."""
        width = x_TN.shape[1] // self.streams

        def normed(norm: Norm, y_TN: torch.Tensor) -> torch.Tensor:
            return rms_norm(y_TN, norm.weight, norm.eps, plus_one=norm.plus_one, group_size=width)

        rows_TH = self._rows(inputs, cache, x_TN.dtype)
        e_TE = self.table.rows_at(rows_TH.flatten()).view(len(rows_TH), -1)
        keys_TN, value_TD = torch.split(self.project(e_TE), [x_TN.shape[1], width], dim=-1)
        both_TSD = (normed(self.key_norm, keys_TN) * normed(self.query_norm, x_TN)).view(-1, self.streams, width)
        gate_TS1 = both_TSD.sum(-1, keepdim=True) / width**0.5
        gate_TS1 = torch.sigmoid(gate_TS1.abs().clamp_min(1e-6).sqrt() * gate_TS1.sign())
        v_TN = (gate_TS1 * value_TD[:, None]).flatten(1)
        return v_TN + causal_conv(
            normed(self.conv_norm, v_TN), self._spread, None, "silu", cache.state["conv.values"], inputs.runs
        )

    def _rows(self, inputs: StepInputs, cache: LayerCache, dtype: torch.dtype) -> torch.Tensor:
        """Return int64 [T, tables]: the rows of each token's n-grams."""
        (multipliers, rows_H, firsts_H), shape = self._hash, self.shape
        tables, mixed_T = len(shape.rows) // (shape.size - 1), inputs.tokens_T * multipliers[0]
        earlier, parts = self._earlier(inputs, cache, dtype), []
        for shift in range(1, shape.size):
            mixed_T = mixed_T ^ earlier[shift - 1] * multipliers[shift]
            own = slice(tables * (shift - 1), tables * shift)
            parts.append(torch.remainder(mixed_T[:, None], rows_H[own]) + firsts_H[own])
        return torch.cat(parts, dim=1)

    def _earlier(self, inputs: StepInputs, cache: LayerCache, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return int64 [T]: the tokens one, two, ... before; ``end`` where the text or an end is in between."""
        left_T, digits = inputs.tokens_T + 1, []
        for _ in range(_DIGITS):
            digits.append(left_T % HISTORY_BASE)
            left_T = left_T // HISTORY_BASE
        digits_TC = torch.stack(digits, 1).repeat(1, self.shape.size - 1).to(dtype)
        digits_TC = torch.nn.functional.pad(digits_TC, (0, HISTORY_CHANNELS - digits_TC.shape[1]))
        window_SCW = cache.state["conv.tokens"]
        seen_TC = causal_conv(digits_TC, self._shifts, None, None, window_SCW, inputs.runs).long()
        earlier, ended_T = [], torch.zeros_like(inputs.tokens_T, dtype=torch.bool)
        for shift in range(self.shape.size - 1):
            of_shift = seen_TC[:, _DIGITS * shift : _DIGITS * (shift + 1)]
            token_T = sum(of_shift[:, place] * HISTORY_BASE**place for place in range(_DIGITS)) - 1
            ended_T = ended_T | (token_T < 0) | (token_T == self.shape.end)
            earlier.append(torch.where(ended_T, self.shape.end, token_T))
        return earlier


def read_ngrams(read: BlockReader, shape: Ngrams, name: str) -> NgramsBlock:
    source, inner = read.source, f"{name}.ple_embedding"
    shards = 0
    while source.has(f"{inner}.ngram_embedding.shard_{shards}.weight"):
        shards += 1
    stored = read.table(shape.table(read.hidden, shards=shards), name)
    rows_H = torch.tensor(shape.rows)
    source.leave(f"{inner}.layer_multipliers", torch.tensor(shape.multipliers), "seed, vocab_size, ple_layer_ids")
    source.leave(f"{inner}.ngram_heads_vocab_sizes", rows_H, "ngram_vocab_size_base")
    source.leave(f"{inner}.ngram_heads_offsets", rows_H.cumsum(0) - rows_H, "ngram_vocab_size_base")
    first = stored.table["table"][0]
    parts = [(full, rows) for full, (rows, _) in map(stored.declared, stored.table["table"])]
    table = (
        source.rows(parts, stored.declared(first)[1][1])
        if shards
        # codes of a GGUF file stay
        else source.table(parts[0][0], first, is_head=False)
    )
    streams = read.architecture.residual
    assert isinstance(streams, Streams)
    key, query, conv = (
        Norm(stored.tensor(f"{norm}_norm"), read.eps, read.plus_one) for norm in ("key", "query", "conv")
    )
    return NgramsBlock(
        shape, Embedding(table), source.summed(stored.linear("project")), key, query, conv, stored.conv(), streams.count
    )
