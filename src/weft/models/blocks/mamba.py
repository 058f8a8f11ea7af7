"""Mamba: a projection, a convolution, a state space, a projection.

    Mamba-2           x_TD --in--> [ gate | x | B | C | dt ]
                                     causal conv + silu over x B C (window state)
                                     state space over (x, dt, A, B, C, D); dt = softplus(dt + bias)
                                     RMS norm of (y * silu(gate)), per group --out--> y_TD

    Mamba-1           x_TD --in--> [ x | gate ]
                                     causal conv + silu over x (window state)
                                     x --select--> [ dt (rank) | B | C ], normed in Jamba and Falcon-Mamba
                                     dt --step--> one step per channel
                                     scan over (x, dt, A, B, C, D), times silu(gate) --out--> y_TD
                                     (in Zamba each head selects of its own channels)

    PLaMo 2           x_TD --in--> [ gate | x ]         stored head by head
                                     causal conv + silu over x (window state)
                                     x --select--> [ B | C | dt (rank) ], each normed; one group for all heads
                                     dt --step--> one step per head
                                     Mamba-2's state space over them, times silu(gate) --out--> y_TD

Papers: Mamba-2 (Dao and Gu, 2024); Mamba (Gu and Dao, 2023). In transformers: ``GraniteMoeHybridMambaLayer``,
``FalconH1Mixer``, ``MambaMixer``, ``JambaMambaMixer``, ``ZambaMambaMixer``. PLaMo 2: PFN's ``modeling_plamo.py``,
whose steps have no limits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from weft.errors import CheckpointError
from weft.families.mixers.mamba import Mamba1, Mamba2, SelectiveMamba2
from weft.models.block_reader import BlockReader
from weft.models.blocks.attention import separate_gate
from weft.models.blocks.linear import Linear, Norm, Projection, by_head, by_turns
from weft.models.blocks.recurrent import RecurrentBlock
from weft.models.table_reader import TableReader
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.attention_layer import CosSin
from weft.tensor.ops.conv import causal_conv
from weft.tensor.ops.mamba1 import mamba1
from weft.tensor.ops.mamba2 import mamba2
from weft.tensor.ops.recurrent_layers import MAMBA2, Mamba2Weights


@dataclass(slots=True)
class SelectiveScan:
    """Scan over a Mamba-1 layer's channels, or over one head's. ``step``: [channels, rank], without its bias, which is
    ``dt_bias``; ``a`` (-exp(A_log)): float32 [channels, N]; ``d``, ``dt_bias``: float32 [channels]; ``norms``: of dt,
    B and C, None for a layer without.
    """

    shape: Mamba1
    select: Projection
    step: Linear
    a: torch.Tensor
    d: torch.Tensor
    dt_bias: torch.Tensor
    norms: tuple[Norm, Norm, Norm] | None = None

    def __call__(self, x_TC: torch.Tensor, state_SCN: torch.Tensor, inputs: StepInputs, layer: int) -> torch.Tensor:
        shape = self.shape
        parts = torch.split(self.select(x_TC), [shape.dt_rank, shape.state_dim, shape.state_dim], dim=-1)
        if self.norms is not None:
            parts = tuple(norm(part) for norm, part in zip(self.norms, parts, strict=True))
        dt, b_TN, c_TN = parts
        return mamba1(
            x_TC, self.step(dt), self.a, b_TN, c_TN, self.d, self.dt_bias, state_SCN, inputs.runs, layer=layer
        )


@dataclass(slots=True)
class Mamba1Block:
    """Mamba-1. ``conv``: [channels, kernel], ``conv_bias``: [channels] or None. ``scans``: of heads, whose channels
    and states are contiguous.
    """

    project: Linear
    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    scans: tuple[SelectiveScan, ...]
    out: Linear

    def __call__(
        self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
    ) -> torch.Tensor:
        x_TC, gate_TC = self.project(x_TD).chunk(2, dim=-1)
        x_TC = causal_conv(x_TC, self.conv, self.conv_bias, "silu", cache.state["conv"], inputs.runs)
        heads = len(self.scans)
        parts = [
            scan(own_TC, state_SCN, inputs, cache.layer)
            for scan, own_TC, state_SCN in zip(
                self.scans, x_TC.chunk(heads, dim=-1), cache.state["recurrent"].chunk(heads, dim=1), strict=True
            )
        ]
        y_TC = parts[0] if heads == 1 else torch.cat(parts, dim=-1)
        return self.out(inputs.asked_of(y_TC) * F.silu(inputs.asked_of(gate_TC)))


@dataclass(slots=True)
class SelectiveMamba2Block:
    """PLaMo 2's Mamba. ``project``: rows gate, x; ``conv``: [channels, kernel]; ``norms``: of B, C and dt; ``decay``:
    -exp(A_log), float32 [heads]; ``skip`` (D) and ``dt_bias``: float32 [heads].
    """

    shape: SelectiveMamba2
    project: Linear
    conv: torch.Tensor
    select: Projection
    norms: tuple[Norm, ...]
    step: Linear
    decay: torch.Tensor
    skip: torch.Tensor
    dt_bias: torch.Tensor
    out: Linear

    def __call__(
        self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
    ) -> torch.Tensor:
        shape = self.shape
        gate_TC, x_TC = self.project(x_TD).chunk(2, dim=-1)
        x_TC = causal_conv(x_TC, self.conv, None, "silu", cache.state["conv"], inputs.runs)
        parts = torch.split(self.select(x_TC), [shape.state_dim, shape.state_dim, shape.dt_rank], dim=-1)
        b_TN, c_TN, dt_TR = (norm(part) for norm, part in zip(self.norms, parts, strict=True))
        y_THP = mamba2(
            by_head(x_TC, shape.heads),
            self.step(dt_TR),
            self.decay,
            b_TN[:, None],
            c_TN[:, None],
            self.skip,
            self.dt_bias,
            cache.state["recurrent"],
            inputs.runs,
            layer=cache.layer,
        )
        return self.out(inputs.asked_of(y_THP.flatten(1)) * F.silu(inputs.asked_of(gate_TC)))


def read_mamba2(read: BlockReader, shape: Mamba2, name: str, *, eps: float | None = None) -> RecurrentBlock:
    """Read Mamba-2. ``eps``: of the gated norm, if it differs."""
    source, eps = read.source, read.eps if eps is None else eps
    table = read.table(shape.table(read.hidden), name)
    norm = table.get("norm")
    out: Projection = table.linear("out")
    groups = shape.groups * source.place.size // shape.group_copies
    if source.share is not None and norm is not None and groups < source.place.size:
        if shape.norm == "gate_last":
            raise CheckpointError(
                f"--tp is {source.place.size}, and the Mamba-2 layers of this model, "
                f"which are normed before their gate, have {groups} groups; use --tp "
                f"{groups} or less",
                param="--tp",
            )
        out, norm = source.share.normed_group(groups, Norm(norm, eps), out), None
    weights = Mamba2Weights(
        table.conv(),
        table.get("conv.bias"),
        table.decay(),
        table.tensor("D"),
        table.tensor("dt_bias"),
        norm,
        eps,
        shape,
    )
    return RecurrentBlock(MAMBA2, weights, table.linear("project"), out, _factors(read, shape))


def _factors(read: BlockReader, shape: Mamba2) -> torch.Tensor | None:
    """Return the factors of the rows of the input projection."""
    if not shape.multipliers or set(shape.multipliers) == {1.0}:
        return None
    widths = (shape.inner_width, shape.inner_width, shape.group_width, shape.group_width, shape.heads)
    return torch.cat(
        [
            torch.full((width,), factor, dtype=read.source.dtype, device=read.source.device)
            for width, factor in zip(widths, shape.multipliers, strict=True)
        ]
    )


def read_mamba1(read: BlockReader, shape: Mamba1, name: str) -> Mamba1Block:
    source = read.source
    table = read.table(shape.table(read.hidden), name)
    if shape.heads:
        return _read_mamba1_by_head(read, shape, table)

    def norm(part: str, width: int) -> Norm:
        if shape.inner_norms == "weighted":
            return Norm(table.tensor(f"{part}_layernorm"), shape.inner_eps)
        return Norm(torch.ones(width, dtype=source.dtype, device=source.device), shape.inner_eps)

    norms = None
    if shape.inner_norms != "none":
        norms = norm("dt", shape.dt_rank), norm("b", shape.state_dim), norm("c", shape.state_dim)
    scan = SelectiveScan(
        shape,
        select=source.summed(table.linear("select", finer=True)),
        step=table.linear("step", finer=True),
        a=table.decay(),
        d=table.tensor("D"),
        dt_bias=table.tensor("dt_bias"),
        norms=norms,
    )
    return Mamba1Block(
        table.linear("project"),
        conv=table.conv(),
        conv_bias=table.get("conv.bias"),
        scans=(scan,),
        out=table.linear("out"),
    )


def _read_mamba1_by_head(read: BlockReader, shape: Mamba1, table: TableReader) -> Mamba1Block:
    bias = table.get("project.bias")
    exact = read.source.runtime.of_exact
    scans = tuple(
        SelectiveScan(shape, Linear(exact(select)), Linear(exact(step)), a, d, dt_bias)
        for select, step, a, d, dt_bias in zip(
            table.tensor("select"),
            table.tensor("step"),
            table.decay(),
            table.tensor("D"),
            table.tensor("dt_bias"),
            strict=True,
        )
    )
    return Mamba1Block(
        table.linear("project", orders={"in_proj.weight": by_turns}, bias=None if bias is None else by_turns(bias)),
        conv=table.conv(),
        conv_bias=table.get("conv.bias"),
        scans=scans,
        out=table.linear("out"),
    )


def read_selective_mamba2(read: BlockReader, shape: SelectiveMamba2, name: str) -> SelectiveMamba2Block:
    table = read.table(shape.table(read.hidden), name)
    order = partial(separate_gate, heads=shape.heads, head_dim=shape.head_dim)
    return SelectiveMamba2Block(
        shape,
        table.linear("project", orders={"in_proj.weight": order}),
        table.conv(),
        read.source.summed(table.linear("select", finer=True)),
        tuple(table.norm(part, read.eps) for part in ("B", "C", "dt")),
        table.linear("step", finer=True),
        table.decay(),
        table.tensor("D"),
        table.tensor("dt_bias"),
        table.linear("out"),
    )
