"""Matrices of a checkpoint in the form that a model multiplies with; the file that model code knows.

A model states what it needs exactly once, as the code that builds it from a ``TensorSource``. Running that
code against ``TensorCheck`` costs milliseconds and reports *all* faults before a byte of weights is read;
running it again against ``TensorReader`` builds the model. No second list of names has to be kept in step.

    source.linear([("q_proj.weight", 64), ("k_proj.weight", 32)], 128)
      each stored as values          -> one matrix [96, 128]  -> tiled, packed, or rounded by ``runtime_form``
      each stored as codes (forms)   -> one matrix of codes, as they are
      some of each                   -> ``JoinedWeight``: neighbours of one kind are one matrix

``linear``, ``experts`` and ``head`` give what is multiplied with, in the form that ``runtime_form`` decides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.families.tensors import Tensor
from weft.models.blocks.linear import JoinedWeight, Linear, PlainWeight
from weft.models.forms.stored_form import Grouping
from weft.models.tensor_source import Part, TensorAccess
from weft.tensor.ops.moe import ExpertWeights
from weft.tensor.weights.expert_tiles import ExpertTiles
from weft.tensor.weights.quantized import Codes, QuantizedWeight, stacked
from weft.tensor.weights.twelve_bit import InTiles

_HEADS = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")


class TensorSource(TensorAccess):
    """Matrices, beside the tensors of ``TensorAccess``."""

    def linear(self, parts: Sequence[Part], columns: int, bias: torch.Tensor | None = None) -> Linear:
        """Projections of the same input as one product: matrices [rows_i, columns] one below the other.

        Neighbours that are stored in the same form become one matrix; where forms differ, each run of
        neighbours is one."""
        weights: list[PlainWeight] = []
        for grouping, run in _runs([(self._grouping(part[0], columns), part) for part in parts]):
            if grouping is None:
                packed = self._packed(run, columns)
                if packed is not None:
                    weights.append(packed)
                    continue
                dense = self._rows([(part[0], part[1]) for part in run], (columns,))
                first = 0
                for part in run:
                    if len(part) == 3:
                        dense[first:first + part[1]] = part[2](dense[first:first + part[1]])
                    first += part[1]
                weights.append(self.runtime.of_values(dense))
            else:
                weights.append(self.runtime.of_codes(_joined([self._codes(part, columns) for part in run])))
        return self._linear(weights, bias)

    def table(self, name: str, tensor: Tensor, *, is_head: bool) -> torch.Tensor | InTiles:
        """The embedding. ``is_head``: logits are made with it as well."""
        self.declare(self.checkpoint.prefix + name, tensor)
        rows, columns = tensor.shape(self.place)
        if not is_head:
            return self.tensor(name, rows, columns)
        packed = self._packed([(name, rows)], columns)
        table = self.runtime.of_table(self._rows([(name, rows)], (columns,))) if packed is None else packed
        self._count(table)
        return table

    def head(self, tensor: Tensor, tied: torch.Tensor | InTiles | None = None) -> Linear:
        """The output projection, which wrappers keep beside the language model, not in it. ``tied``: the
        embedding, where that is the head as well."""
        if tied is not None:
            if isinstance(tied, InTiles) or self.runtime.quantize == "none":
                return Linear(tied)
            return self._linear([self.runtime.of_values(tied, head=True)], None)
        name = next((name for name in _HEADS if self._known(name)), _HEADS[0])
        self.declare(name, tensor)
        rows, columns = tensor.shape(self.place)
        if self.form.holds(name) and self.form.grouping(name, columns) is not None:
            codes = self.form.read(self._stored, name, (rows, columns))
            assert isinstance(codes, Codes)
            return self._linear([self.runtime.of_codes(codes)], None)
        out = self._empty((rows, columns), None)
        self._fill(out, name)
        return self._linear([self.runtime.of_values(out, head=True)], None)

    def experts(self, names: Sequence[Sequence[str]], rows: int, columns: int) -> ExpertWeights:
        """[len(names), len(names[0]) * rows, columns]: for each entry its matrices [rows, columns] one below
        the other. In tiles each expert is by itself; else experts stored one by one become one tensor."""
        kinds = {self._grouping(name, columns) for group in names for name in group}
        if kinds == {None} and self.runtime.quantize == "none":
            return self._float_experts(names, rows, columns)
        each = []
        for group in names:
            if None not in kinds and len(kinds) == 1:
                each.append(self.runtime.of_codes(_joined([self._codes((name, rows), columns)
                                                           for name in group])))
            elif self.runtime.quantize == "none":
                return self._float_experts(names, rows, columns)
            else:
                each.append(self.runtime.rounded(self._rows([(name, rows) for name in group], (columns,))))
        return self._held_codes(stacked(each))

    def all_experts(self, name: str, count: int, rows: int, columns: int) -> ExpertWeights:
        """The same of one stored tensor [count, rows, columns]."""
        if self._grouping(name, columns) is not None:
            return self._held_codes(self.runtime.of_codes(self._codes((name, rows), columns, count)))
        tiles = self.runtime.tiles_experts(self.device, self.dtype, count * rows, columns)
        packed = self._packed_experts(name, count, rows, columns) if tiles else None
        if packed is not None:
            return self._counted_experts(packed)
        out = self._empty((count, rows, columns), None)
        self._fill(out, self.checkpoint.prefix + name)
        if tiles:
            return self._counted_experts([self.runtime.of_expert(one, count) for one in out])
        if self.runtime.quantize == "none":
            return self._counted(out)
        return self._held_codes(stacked([self.runtime.rounded(one) for one in out]))

    def _grouping(self, name: str, columns: int) -> Grouping | None:
        """How the codes of a matrix are grouped; None where it is stored as values."""
        full = self.checkpoint.prefix + name
        return self.form.grouping(full, columns) if self.form.holds(full) else None

    def _codes(self, part: Part, columns: int, *stack: int) -> Codes:
        codes = self.form.read(self._stored, self.checkpoint.prefix + part[0], (*stack, part[1], columns))
        assert isinstance(codes, Codes)
        return codes.reordered(part[2]) if len(part) == 3 else codes

    def _float_experts(self, names: Sequence[Sequence[str]], rows: int, columns: int) -> ExpertWeights:
        count = len(names)
        if not self.runtime.tiles_experts(self.device, self.dtype, count * len(names[0]) * rows, columns):
            return self._counted(self._stack(names, rows, columns))
        each: list[InTiles] = []
        for group in names:
            parts = [(name, rows) for name in group]
            packed = self._packed(parts, columns)
            each.append(self.runtime.of_expert(self._rows(parts, (columns,)), count) if packed is None
                        else packed)
        return self._counted_experts(each)

    def _counted_experts(self, experts: Sequence[InTiles]) -> ExpertTiles:
        for expert in experts:
            self._count(expert)
        return ExpertTiles.of(experts)

    def _stack(self, names: Sequence[Sequence[str]], rows: int, columns: int) -> torch.Tensor:
        out = self._empty((len(names), len(names[0]) * rows, columns), None)
        for index, group in enumerate(names):
            for part, name in enumerate(group):
                self._fill(out[index, part * rows:(part + 1) * rows], self.checkpoint.prefix + name)
        return out

    def _linear(self, weights: Sequence[PlainWeight], bias: torch.Tensor | None) -> Linear:
        for weight in weights:
            self._count(weight)
        if len(weights) == 1:
            quantized = isinstance(weights[0], QuantizedWeight)
            return Linear(weights[0], bias.float() if quantized and bias is not None else bias)
        return Linear(JoinedWeight(tuple(weights)), bias)

    def _held_codes(self, weight: QuantizedWeight) -> QuantizedWeight:
        self._count(weight)
        return weight


def _runs(parts: Sequence[tuple[Grouping | None, Part]]) -> list[tuple[Grouping | None, list[Part]]]:
    """Neighbours of the same kind together."""
    runs: list[tuple[Grouping | None, list[Part]]] = []
    for grouping, part in parts:
        if runs and runs[-1][0] == grouping:
            runs[-1][1].append(part)
        else:
            runs.append((grouping, [part]))
    return runs


def _joined(parts: Sequence[Codes]) -> Codes:
    """One below the other; a middle zero is written out if others have zeros of their own."""
    return parts[0] if len(parts) == 1 else parts[0].above(*parts[1:])
