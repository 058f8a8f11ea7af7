"""Reading of the tensors of one table of ``families.tensors``, role by role.

    read = TableReader(source, tensors.latent_attention(shape, hidden), "layers.3.self_attn")
    read.linear("latent")       the tensors of a role as one product
    read.norm("latent_norm", eps)

Each tensor is declared under its full name before it is asked for: so ranks know their part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from weft.families.tensors import NormGate, Table, Tensor
from weft.models.blocks.linear import Linear, LowRankGate, Norm, NormFactor
from weft.models.weights import Order, TensorSource


class TableReader:
    """Reader of the tensors of ``table``, whose names begin with ``name``."""

    def __init__(self, source: TensorSource, table: Table, name: str) -> None:
        self.source = source
        self.table = table
        self.name = name

    def linear(
        self,
        role: str,
        *,
        orders: Mapping[str, Order] | None = None,
        bias: torch.Tensor | None = None,
        finer: bool = False,
    ) -> Linear:
        """Return the tensors of ``role`` as one product. ``orders``: by the name of a tensor. ``bias``: used instead
        of the stored one. ``finer``: at least 8 bits, if matrices are rounded.
        """
        orders, parts = orders or {}, []
        for tensor in self.table[role]:
            full, (rows, columns) = self.declared(tensor)
            parts.append((full, rows, orders[tensor.name]) if tensor.name in orders else (full, rows))
        return self.source.linear(parts, columns, self.get(f"{role}.bias") if bias is None else bias, finer=finer)

    def plain(self, role: str, dtype: torch.dtype | None = None) -> Linear:
        """Return a product with a matrix that is never quantised: a router, a gate."""
        [tensor] = self.table[role]
        full, shape = self.declared(tensor)
        product = Linear(self.source.exact(full, *shape, dtype=dtype), self.get(f"{role}.bias"))
        self.source.note(full, product, *shape)
        return product

    def tensor(self, role: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        first, *others = self.table[role]
        if others:
            return self.source.rows([(full, rows) for full, (rows,) in map(self.declared, (first, *others))])
        full, shape = self.declared(first)
        return self.source.tensor(full, *shape, dtype=torch.float32 if first.form == "float32" else dtype)

    def numbers(self, role: str) -> torch.Tensor:
        """Return whole numbers, int32."""
        [tensor] = self.table[role]
        full, shape = self.declared(tensor)
        return self.source.numbers(full, *shape)

    def get(self, role: str) -> torch.Tensor | None:
        """Return the tensor of ``role``, None if the table does not have it."""
        return self.tensor(role) if role in self.table else None

    def norm(
        self, role: str, eps: float, *, plus_one: bool = False, gate: LowRankGate | NormFactor | None = None
    ) -> Norm:
        return Norm(self.tensor(role), eps, plus_one, gate=gate)

    def qk_norms(self, eps: float, *, plus_one: bool = False) -> Iterator[Norm | None]:
        """Yield the norms of queries, then of keys; None for one that the table does not have."""
        for role in ("q_norm", "k_norm"):
            yield self.norm(role, eps, plus_one=plus_one) if role in self.table else None

    def gate(self, role: str, shape: NormGate | None, factor: float = 1.0) -> LowRankGate | NormFactor | None:
        """Return the gate of the norm of ``role``, with a further ``factor``; only the factor if the table has no gate,
        None if that is 1.
        """
        if shape is None or f"{role}.into" not in self.table:
            return None if factor == 1.0 else NormFactor(factor)
        return LowRankGate(self.plain(f"{role}.into"), self.plain(f"{role}.out"), shape.factor * factor)

    def conv(self) -> torch.Tensor:
        """Return the convolution, [channels, kernel]."""
        return self.tensor("conv").squeeze(1)

    def qkv_conv(self) -> torch.Tensor:
        """Return the convolution, [channels of q, k and v, kernel]: one tensor (``conv1d``) or three (``q_conv1d``
        ...).
        """
        source, [whole] = self.source, self.table["conv"]
        if source.has(f"{self.name}.{whole.name}"):
            return self.conv()
        divided = whole.spans(source.place)
        assert divided is not None
        spans, widths = divided[1], [span.total for span in divided[1]]
        names = [f"{self.name}.{part}_conv1d.weight" for part in "qkv"]
        # Transformers saves three by cutting its one into equal parts, independent of the widths: only the sum counts.
        stored = [source.stored_rows(name) for name in names]
        counts = stored if sum(stored) == sum(widths) else widths
        conv = source.rows(list(zip(names, counts, strict=True)), *whole.shape(source.place)[1:]).squeeze(1)
        if source.share is None:
            return conv
        return torch.cat(
            [
                part[span.begin : span.begin + span.count]
                for part, span in zip(torch.split(conv, widths), spans, strict=True)
            ]
        )

    def decay(self) -> torch.Tensor:
        """Return the decay -exp(A_log)."""
        # A meta tensor has a shape only. Torch's Python form of arithmetic on it would import its compiler
        # first, which takes seconds of every start.
        log = self.tensor("A_log")
        return log if log.is_meta else -log.exp()

    def declared(self, tensor: Tensor) -> tuple[str, tuple[int, ...]]:
        full = f"{self.name}.{tensor.name}" if self.name else tensor.name
        self.source.declare(self.source.checkpoint.prefix + full, tensor)
        return full, tensor.shape(self.source.place)
