"""Mamba layers as they lie in a checkpoint, under the names that all families agree on.

``in_proj``, ``conv1d`` ([C, 1, K]), ``A_log``, ``D``, ``out_proj`` belong to both kinds; Mamba-2 has
``dt_bias`` and ``norm`` besides, Mamba-1 ``x_proj``, ``dt_proj`` and sometimes ``dt_layernorm``,
``b_layernorm``, ``c_layernorm``. Families differ in what stands before these names.
"""

from __future__ import annotations

import torch

from weft.errors import CheckpointError
from weft.families.architecture import Mamba1, Mamba2
from weft.models.blocks.linear import Norm, Projection
from weft.models.blocks.mamba1 import Mamba1Block
from weft.models.blocks.mamba2 import Mamba2Block
from weft.models.tensor_source import decay_of
from weft.models.weights import TensorSource


def mamba2(source: TensorSource, shape: Mamba2, name: str, hidden: int, eps: float) -> Mamba2Block:
    """``eps``: of the gated norm."""
    inner, channels = shape.inner_width, shape.inner_width + 2 * shape.group_width
    rows = inner + channels + shape.heads
    out_bias = shape.projection_bias if shape.output_bias is None else shape.output_bias

    def per_head(part: str) -> torch.Tensor:
        return source.tensor(f"{name}.{part}", shape.heads, dtype=torch.float32)

    norm = source.tensor(f"{name}.norm.weight", inner) if shape.norm != "none" else None
    out: Projection = source.linear([(f"{name}.out_proj.weight", hidden)], inner,
                                    source.tensor(f"{name}.out_proj.bias", hidden) if out_bias else None)
    groups = _groups_in_all(source, shape, f"{name}.conv1d.weight")
    if source.share is not None and norm is not None and groups < source.share.place.size:
        if shape.norm == "gate_last":
            raise CheckpointError(f"--tp is {source.share.place.size}, and the Mamba-2 layers of this model, "
                                  f"which are normed before their gate, have {groups} groups; use --tp "
                                  f"{groups} or less", param="--tp")
        out, norm = source.share.normed_group(groups, Norm(norm, eps), out), None
    return Mamba2Block(
        shape,
        source.linear([(f"{name}.in_proj.weight", rows)], hidden,
                      source.tensor(f"{name}.in_proj.bias", rows) if shape.projection_bias else None),
        conv=source.tensor(f"{name}.conv1d.weight", channels, 1, shape.conv_kernel).squeeze(1),
        conv_bias=source.tensor(f"{name}.conv1d.bias", channels) if shape.conv_bias else None,
        a=decay_of(per_head("A_log")), d=per_head("D"), dt_bias=per_head("dt_bias"),
        norm=norm, norm_eps=eps, out=out, factors=_factors(shape, source.dtype, source.device))


def _groups_in_all(source: TensorSource, shape: Mamba2, conv: str) -> int:
    """Of the whole model: ``shape`` is a rank's, which has at least one. A convolution is never quantised."""
    if source.share is None:
        return shape.groups
    inner = shape.inner_width * source.share.place.size
    return (source.stored_rows(conv) - inner) // (2 * shape.state_dim)


def _factors(shape: Mamba2, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """On each row of the input projection."""
    if not shape.multipliers or set(shape.multipliers) == {1.0}:
        return None
    widths = (shape.inner_width, shape.inner_width, shape.group_width, shape.group_width, shape.heads)
    return torch.cat([torch.full((width,), factor, dtype=dtype, device=device)
                      for width, factor in zip(widths, shape.multipliers, strict=True)])


def mamba1(source: TensorSource, shape: Mamba1, name: str, hidden: int) -> Mamba1Block:
    channels, rank, width = shape.channels, shape.dt_rank, shape.state_dim

    def wide(part: str, *size: int) -> torch.Tensor:
        return source.tensor(f"{name}.{part}", *size, dtype=torch.float32)

    def bias(part: str, size: int, present: bool) -> torch.Tensor | None:
        return source.tensor(f"{name}.{part}.bias", size) if present else None

    return Mamba1Block(
        shape,
        source.linear([(f"{name}.in_proj.weight", 2 * channels)], hidden,
                      bias("in_proj", 2 * channels, shape.projection_bias)),
        conv=source.tensor(f"{name}.conv1d.weight", channels, 1, shape.conv_kernel).squeeze(1),
        conv_bias=bias("conv1d", channels, shape.conv_bias),
        select=source.summed(source.linear([(f"{name}.x_proj.weight", rank + 2 * width)], channels)),
        step=source.linear([(f"{name}.dt_proj.weight", channels)], rank),
        a=decay_of(wide("A_log", channels, width)), d=wide("D", channels),
        dt_bias=wide("dt_proj.bias", channels),
        out=source.linear([(f"{name}.out_proj.weight", hidden)], channels,
                          bias("out_proj", hidden, shape.projection_bias)),
        norms=_inner_norms(source, shape, name))


def _inner_norms(source: TensorSource, shape: Mamba1, name: str) -> tuple[Norm, Norm, Norm] | None:
    def norm(part: str, width: int) -> Norm:
        if shape.inner_norms == "plain":
            return Norm(torch.ones(width, dtype=source.dtype, device=source.device), shape.inner_eps)
        return Norm(source.tensor(f"{name}.{part}_layernorm.weight", width), shape.inner_eps)

    if shape.inner_norms == "none":
        return None
    return norm("dt", shape.dt_rank), norm("b", shape.state_dim), norm("c", shape.state_dim)
