"""Mamba, Mamba-2, and one of both. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from weft import spec
from weft.families.mixers import Mixer
from weft.families.tensors import Table, Tensor, Units, conv, exact, norm_weight, product
from weft.spec import LayerSpec

GatedNorm = Literal["gate_first", "gate_last", "none"]
"""Orders of norm and gate on a Mamba-2 output y: norm(y silu(gate)), norm(y) silu(gate), y silu(gate)."""


@dataclass(frozen=True, slots=True)
class Mamba2(Mixer):
    """Mamba-2 (Dao and Gu, 2024). ``dt_limit`` clamps the step after softplus. ``multipliers``: factors on
    the five parts of the input projection (gate, x, B, C, dt), Falcon-H1's; empty for none. ``output_bias``:
    the output projection has a bias; None is as ``projection_bias``. ``group_copies``: ranks that hold the
    same groups, where there are fewer groups than ranks."""

    reader = "weft.models.blocks.mamba:read_mamba2"
    copied = ("groups", "group_copies")

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

    def table(self, hidden: int) -> Table:
        inner, heads = Units(self.heads, self.head_dim), Units(self.heads)
        group = Units(self.groups, self.state_dim, self.group_copies)
        out_bias = self.projection_bias if self.output_bias is None else self.output_bias
        table = (
            product("project", hidden, ("in_proj", (inner, inner, group, group, heads)), bias=self.projection_bias)
            | conv((inner, group, group), self.conv_kernel, bias=self.conv_bias)
            | exact("A_log", "D", "dt_bias", dims=(heads,))
            | product("out", inner, ("out_proj", hidden), bias=out_bias)
        )
        return table if self.norm == "none" else table | norm_weight("norm", inner)


InnerNorms = Literal["none", "plain", "weighted"]
"""RMS norms of a Mamba-1 layer's dt, B and C: none (Mamba), without weights (Falcon-Mamba), with (Jamba)."""


@dataclass(frozen=True, slots=True)
class Mamba1(Mixer):
    """Mamba (Gu and Dao, 2023). ``dt_rank``: width of the bottleneck that makes the steps. ``heads``: number of heads
    whose steps, B and C are made only of the head's own channels (Zamba); 0: of all channels."""

    reader = "weft.models.blocks.mamba:read_mamba1"

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

    def table(self, hidden: int) -> Table:
        channels, rank, width = Units(self.channels), self.dt_rank, self.state_dim
        if self.heads:
            return self._table_by_head(hidden)
        table = (
            product("project", hidden, ("in_proj", (channels, channels)), bias=self.projection_bias)
            | conv(channels, self.conv_kernel, bias=self.conv_bias)
            | product("select", channels, ("x_proj", rank + 2 * width))
            | product("step", rank, ("dt_proj", channels))
            | exact("A_log", dims=(channels, width))
            | exact("D", dims=(channels,))
            | {"dt_bias": (Tensor("dt_proj.bias", (channels,), "float32"),)}
            | product("out", channels, ("out_proj", hidden), bias=self.projection_bias)
        )
        if self.inner_norms == "weighted":
            for name, size in (("dt", rank), ("b", width), ("c", width)):
                table |= norm_weight(f"{name}_layernorm", size)
        return table

    def _table_by_head(self, hidden: int) -> Table:
        """Return the tensors. Rows of x and gate take turns. The projections to steps, B and C are tensors of all
        heads."""
        rank, width, own = self.dt_rank, self.state_dim, self.channels // self.heads
        heads, channels, rows = Units(self.heads), Units(self.heads, own), Units(self.heads, 2 * own)
        table: Table = {
            "select": (Tensor("x_proj_weight", (heads, rank + 2 * width, own), "plain"),),
            "step": (Tensor("dt_proj_weight", (heads, own, rank), "plain"),),
            "dt_bias": (Tensor("dt_proj_bias", (heads, own), "float32"),),
        }
        return (
            table
            | exact("A_log", dims=(heads, own, width))
            | exact("D", dims=(heads, own))
            | conv(channels, self.conv_kernel, bias=self.conv_bias)
            | product("project", hidden, ("in_proj", rows), bias=self.projection_bias)
            | product("out", channels, ("out_proj", hidden), bias=self.projection_bias)
        )


@dataclass(frozen=True, slots=True)
class SelectiveMamba2(Mixer):
    """Mamba-2 with one group, whose B, C and steps are made of the convolved channels, as in Mamba-1. ``dt_rank``:
    width of the bottleneck that makes the steps."""

    reader = "weft.models.blocks.mamba:read_selective_mamba2"

    heads: int
    head_dim: int
    state_dim: int
    dt_rank: int
    conv_kernel: int

    def layer_spec(self) -> LayerSpec:
        # No group passes the convolution: B and C are made after it.
        channels = self.heads * self.head_dim
        like = spec.mamba2(self.heads, self.head_dim, 0, self.state_dim, self.conv_kernel)
        return replace(like, logged=(2 * channels + self.heads + 2 * self.state_dim, 0))

    def table(self, hidden: int) -> Table:
        """Return the tensors. Rows of gate and x take turns by head."""
        heads, channels, width = Units(self.heads), Units(self.heads, self.head_dim), self.state_dim
        norms: Table = {
            part: (Tensor(f"{part}_norm_weight", (size,), "plain"),)
            for part, size in (("B", width), ("C", width), ("dt", self.dt_rank))
        }
        return (
            product("project", hidden, ("in_proj", Units(self.heads, 2 * self.head_dim)))
            | conv(channels, self.conv_kernel)
            | product("select", channels, ("bcdt_proj", 2 * width + self.dt_rank))
            | product("step", self.dt_rank, ("dt_proj", heads))
            | exact("A_log", "D", "dt_bias", dims=(heads,))
            | norms
            | product("out", channels, ("out_proj", hidden))
        )
