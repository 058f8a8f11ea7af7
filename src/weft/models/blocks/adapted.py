"""Additions of adapters to the products of a model: y = W x + scale B A x, for the rows of a step that ask for it.

    rows of a step        r0  r1  r2  r3  r4            a: rows 0, 3       b: row 2       base: rows 1, 4
    product               y = x W                       all rows at once, in any form of W
    group a               y[0, 3] += (x[0, 3] A_a) B_a
    group b               y[2]    += (x[2] A_b) B_b     rows 1 and 4 keep their bits: nothing touches them

The base weights stay as they are (12 bits, int8, int4, GGUF): no copy of a matrix is merged. A and B are tiles of the
same kernels as W, in which a row's bits do not depend on other rows. So a row of an adapter has the same bits in any
batch, whichever adapters are in it. All groups of a product are one call (csrc/adapters.hpp), which the fused decoder
makes itself.

A product may be one matrix of several stored ones (q, k and v). Its A's are stacked, and each range of rows has a B. A
change may also scale the product (DoRA), shift it (biases), or replace it (a matrix of which all numbers were trained).
The adapter of each row is set once a step (``ActiveAdapters.step``). A product finds its rows by the number of rows
that it gets (``tensor.adapter_rows``).

Rejected: rows as an argument of each product (sixty calls that hand it on, for one model in a hundred);
merged copies of the weights (one model's bytes for each adapter); a factor as wide as all parts of a product,
with zeros between (half of its bytes are zeros).

Sources: Hu et al., 2021; Liu et al., 2024 (DoRA); Chen et al., 2023 (Punica) for groups of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F

from weft.tensor import gpu, native
from weft.tensor.adapter_rows import LINES, ActiveAdapters, AdapterRows, RowGroups, number_of
from weft.tensor.ops.linear import dense, product
from weft.tensor.weights.tiles import TiledWeight, tiled

Change = TypeVar("Change")

LOW_WIDTH = 512
"""Most ranks of one adapter on one product, all parts together, that the Triton kernels take."""


@dataclass(frozen=True, slots=True)
class Factor:
    """One factor [rows, columns], in tiles if the kernels serve; ``columns`` is padded to an even number then."""

    weight: torch.Tensor | TiledWeight

    @classmethod
    def of(cls, values: torch.Tensor) -> Factor:
        return cls(tiled(values, apart=True) or values.contiguous())

    @property
    def held_bytes(self) -> int:
        return (self.weight.tiles if isinstance(self.weight, TiledWeight) else self.weight).nbytes

    def plain(self) -> torch.Tensor:
        """Return the factor as [rows, columns]."""
        return dense(self.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return product(x, self.weight)


@dataclass(slots=True)
class Part:
    """Change of rows [first, last) of a product. ``up``: B times the scale, of columns [begin, end) of the A's of the
    product. ``whole``: replaces the product. ``gain`` and ``shift`` [rows]: y gain + shift, of the product without B.
    """

    first: int
    last: int
    up: Factor | None = None
    begin: int = 0
    end: int = 0
    whole: Factor | None = None
    gain: torch.Tensor | None = None
    shift: torch.Tensor | None = None

    @property
    def held_bytes(self) -> int:
        factors = sum(factor.held_bytes for factor in (self.up, self.whole) if factor is not None)
        return factors + sum(row.numel() * row.itemsize for row in (self.gain, self.shift) if row is not None)

    def native(self) -> tuple[Any, ...] | None:
        """Return the part as the C++ kernels take it; None if they do not."""
        if self.whole is not None or not (self.up is None or isinstance(self.up.weight, TiledWeight)):
            return None
        assert all(row is None or row.is_contiguous() for row in (self.gain, self.shift))
        up = None if self.up is None else self.up.weight.native()  # type: ignore[union-attr]
        return (
            self.first,
            self.last - self.first,
            self.begin,
            up,
            native.address_of(self.gain),
            native.address_of(self.shift),
        )


@dataclass(slots=True)
class ProductChange:
    """Change of one product by one adapter. ``down``: the A's of its parts, stacked."""

    down: Factor | None
    parts: tuple[Part, ...]
    dtype: torch.dtype

    @property
    def held_bytes(self) -> int:
        down_bytes = 0 if self.down is None else self.down.held_bytes
        return down_bytes + sum(part.held_bytes for part in self.parts)

    def native(self) -> tuple[Any, ...] | None:
        """Return the factors as the C++ kernels take them; None if torch multiplies."""
        tiled = self.down is None or isinstance(self.down.weight, TiledWeight)
        parts = [part.native() for part in self.parts]
        if not tiled or None in parts or self.dtype not in native.DTYPES or not native.in_use():
            return None
        down = None if self.down is None else self.down.weight.native()  # type: ignore[union-attr]
        return down, parts

    def line(self) -> tuple[int, ...] | None:
        """Return the factors as a line of the Triton kernels' table; None if torch multiplies."""
        from weft.tensor.kernels import adapters as kernels

        down = None if self.down is None else self.down.weight
        if isinstance(down, TiledWeight) or any(part.whole is not None for part in self.parts):
            return None
        ranks = 0 if down is None else down.shape[0]
        if len(self.parts) > kernels.PARTS_MOST or ranks > LOW_WIDTH:
            return None
        line = [native.address_of(down), ranks, len(self.parts)]
        for part in self.parts:
            up = None if part.up is None else part.up.weight
            assert up is None or isinstance(up, torch.Tensor)
            line += [
                part.first,
                part.last - part.first,
                part.begin,
                part.end - part.begin,
                native.address_of(up),
                native.address_of(part.gain),
                native.address_of(part.shift),
            ]
        return (*line, *[0] * (kernels.FIELDS - len(line)))

    def add(self, x: torch.Tensor, y: torch.Tensor, rows: slice | torch.Tensor) -> None:
        """Add the change for ``x`` [T, in] to ``rows`` of ``y`` [T, out]."""
        # A step of only one adapter, as of one stream, slices nothing: a slice takes the time of a product.
        if isinstance(rows, slice) and rows.stop - rows.start == len(x):
            self._add_all(x, y)
            return
        own = self._cast(x[rows])
        low = None if self.down is None else self.down(own)
        for part in self.parts:
            into = y[:, part.first : part.last]
            if part.whole is not None:
                into[rows] = part.whole(own).to(y.dtype)
            if part.gain is not None:
                into[rows] *= part.gain
            if part.shift is not None:
                into[rows] += part.shift
            if part.up is not None:
                assert low is not None
                added = part.up(low[:, part.begin : part.end]).to(y.dtype)
                if isinstance(rows, slice):
                    into[rows] += added
                else:
                    into.index_add_(0, rows.to(into.device), added)

    def _add_all(self, x: torch.Tensor, y: torch.Tensor) -> None:
        x = self._cast(x)
        low = None if self.down is None else self.down(x)
        single = len(self.parts) == 1
        for part in self.parts:
            into = y if part.last - part.first == y.shape[1] else y[:, part.first : part.last]
            if part.whole is not None:
                into.copy_(part.whole(x))
            if part.gain is not None:
                into *= part.gain
            if part.shift is not None:
                into += part.shift
            if part.up is not None:
                assert low is not None
                into += part.up(low if single else low[:, part.begin : part.end])

    def _cast(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` in the factors' dtype: routers are float32 in models of bfloat16."""
        return x if x.dtype == self.dtype else x.to(self.dtype)


@dataclass(slots=True)
class AdaptedProduct:
    """Changes of one product, by adapter. ``active``: the adapters of the model, None until an adapter changes this
    product.
    """

    active: ActiveAdapters | None = None
    changes: dict[str, ProductChange] = field(default_factory=dict)
    _plain: set[str] = field(default_factory=set, repr=False)
    """Digests in ``changes`` that torch computes."""
    _native: Any = field(default=None, repr=False)
    _table: torch.Tensor | None = field(default=None, repr=False)
    """int64 [LINES, FIELDS], for the Triton kernels."""
    _dtype: torch.dtype | None = None
    """Dtype of the factors: a router of another dtype is multiplied by torch."""

    def native(self) -> Any:
        """Return the C++ object of this product, always the same, since fused blocks hold it."""
        if self._native is None:
            self._native = native.extension().AdaptedProduct()
        return self._native

    def install(
        self, digest: str, change: ProductChange, active: ActiveAdapters, line: torch.Tensor | None = None
    ) -> None:
        """Install ``change``. ``line``: the line of ``change``, if it is on the device already."""
        self.active, self.changes[digest], self._dtype = active, change, change.dtype
        if self._table is None:
            factors = change.native()
            if factors is not None:
                self.native().set(number_of(digest), *factors)
        else:
            factors = change.line() if digest in active.lines else None
            if factors is not None:
                self._table[active.lines[digest]] = (
                    torch.tensor(factors, device=self._table.device) if line is None else line
                )
        if factors is None:
            self._plain.add(digest)
            active.unfused.add(digest)

    def open(self, active: ActiveAdapters, dtype: torch.dtype, device: torch.device) -> None:
        """Make a table for the Triton kernels, in memory that graphs may read at every replay."""
        if self._table is None:
            from weft.tensor.kernels import adapters as kernels

            self.active, self._dtype = active, dtype
            self._table = torch.zeros((LINES, kernels.FIELDS), dtype=torch.int64, device=device)

    def remove(self, digest: str) -> None:
        if self.changes.pop(digest, None) is not None:
            self._plain.discard(digest)
            if self._native is not None:
                self._native.erase(number_of(digest))
            if self._table is not None and self.active is not None and digest in self.active.lines:
                self._table[self.active.lines[digest]] = 0

    def added(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return ``y`` with the additions of this step's adapters, in place. [..., in] and [..., out]."""
        if self.active is None or self.active.step is None:
            return y
        whose = self.active.of(x.shape[0])
        plain = self._plain if self._by_kernels(x, y, whose) else self.changes
        for group in whose.groups:
            # An adapter may be removed while a step is launched in which its last row has already ended.
            change = self.changes.get(group.digest) if group.digest in plain else None
            if change is not None:
                change.add(x, y, group.rows)
        return y

    def _by_kernels(self, x: torch.Tensor, y: torch.Tensor, whose: RowGroups) -> bool:
        """Return whether kernels have added the changes that they support."""
        if x.ndim != 2 or not x.dtype == y.dtype == self._dtype:
            return False
        if self._table is not None and whose.device is not None and gpu.fits(x, y, self._table):
            from weft.tensor.kernels.adapters import add_factors

            add_factors(x, y, whose.device, self._table, LOW_WIDTH)
            return True
        if self._native is None or not native.fits(x, y):
            return False
        if whose.groups:
            rows = x if x.stride(1) == 1 else x.contiguous()
            assert y.stride(1) == 1
            self._native.add(native.adapter_rows_of(whose), native.projected_of(rows), y.data_ptr(), y.stride(0))
        return True


@dataclass(slots=True)
class TableChange:
    """Change of an embedding. ``low`` [vocab, r] with ``up`` [D, r], or a ``whole`` table [vocab, D]."""

    low: torch.Tensor | None = None
    up: Factor | None = None
    whole: torch.Tensor | None = None

    @property
    def held_bytes(self) -> int:
        tables = sum(table.numel() * table.itemsize for table in (self.low, self.whole) if table is not None)
        return tables + (0 if self.up is None else self.up.held_bytes)


@dataclass(slots=True)
class AdaptedTable:
    active: ActiveAdapters
    changes: dict[str, TableChange] = field(default_factory=dict)

    def added(self, tokens_T: torch.Tensor, x_TD: torch.Tensor) -> torch.Tensor:
        """Return embedded tokens [T, D], changed for adapters with another embedding."""
        for group in self.active.groups(x_TD.shape[0]):
            change = self.changes.get(group.digest)
            if change is None:
                continue
            own = tokens_T[group.rows]
            if change.whole is not None:
                x_TD[group.rows] = F.embedding(own, change.whole)
            if change.low is not None:
                assert change.up is not None
                x_TD[group.rows] += change.up(F.embedding(own, change.low))
        return x_TD


@dataclass(slots=True)
class ExpertsChange:
    """Change of the experts of one layer: [into, down] by expert. None: that expert keeps its product."""

    into: dict[int, ProductChange]
    down: dict[int, ProductChange]

    @property
    def held_bytes(self) -> int:
        return sum(part.held_bytes for side in (self.into, self.down) for part in side.values())

    def product(self, side: str, expert: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        change = (self.into if side == "into" else self.down).get(expert)
        if change is not None:
            change.add(x, y, slice(0, len(x)))
        return y


@dataclass(slots=True)
class LatentChange:
    """Change of the matrix that makes keys and values of latents. ``low`` [r, latent]; ``keys`` [heads, own, r] and
    ``values`` [heads, r, value]: B of each head. ``gain_HO`` and ``gain_HV``: of its rows without B.
    """

    low: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    gain_HO: torch.Tensor | None = None
    gain_HV: torch.Tensor | None = None

    @property
    def held_bytes(self) -> int:
        tensors = (self.low, self.keys, self.values, self.gain_HO, self.gain_HV)
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors if tensor is not None)

    def query_change(self, own_THO: torch.Tensor) -> torch.Tensor:
        """Return the addition to queries in latents, [T, heads, latent]."""
        return ((own_THO.transpose(0, 1) @ self.keys) @ self.low).transpose(0, 1)

    def output_change(self, o_THC: torch.Tensor) -> torch.Tensor:
        """Return the addition to outputs of latents, [T, heads, value]."""
        return ((o_THC.transpose(0, 1) @ self.low.T) @ self.values).transpose(0, 1)


@dataclass(slots=True)
class AdaptedBlock(Generic[Change]):
    """Changes, by adapter, of matrices that a block multiplies itself."""

    active: ActiveAdapters
    changes: dict[str, Change] = field(default_factory=dict)

    def of_step(self, rows: int) -> list[tuple[AdapterRows, Change]]:
        return [
            (group, self.changes[group.digest]) for group in self.active.groups(rows) if group.digest in self.changes
        ]
