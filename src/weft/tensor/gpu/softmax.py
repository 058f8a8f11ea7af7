"""An online softmax over blocks of keys, and the epilogue that stores its output.

    softmax_start  the softmax of no keys: (highest score, sum of weights, weighted values)
    softmax_step   a block of keys and values into the three
    finish         gates, scale of fp8 values, the one rounding, the store
    combine        a kernel: merges the outputs of programs that each saw one split of the keys

Scores are float32 in powers of two (``qk_scale`` has log2 e in it).

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao et al., "FlashAttention" (2022)
and "Flash-Decoding" (2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weft.tensor.gpu.products import after_previous

COMBINED_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Gates:
    """Factors of an output: ``gate_TC`` [T, heads x D] and ``head_gate_TH`` [T, heads], both through a sigmoid, and
    ``value_scale_H`` [kv_heads]; and ``sinks_TH`` [T, heads], which take part in its sum.
    """

    gate_TC: torch.Tensor | None = None
    head_gate_TH: torch.Tensor | None = None
    value_scale_H: torch.Tensor | None = None
    sinks_TH: torch.Tensor | None = None


def gates_of(
    gates: Gates | None,
) -> tuple[torch.Tensor | None, int, torch.Tensor | None, int, torch.Tensor | None, torch.Tensor | None]:
    if gates is None:
        return None, 0, None, 0, None, None
    for gate in (gates.gate_TC, gates.head_gate_TH):
        assert gate is None or gate.stride(1) == 1 or gate.shape[1] == 1
    return (
        gates.gate_TC,
        0 if gates.gate_TC is None else gates.gate_TC.stride(0),
        gates.head_gate_TH,
        0 if gates.head_gate_TH is None else gates.head_gate_TH.stride(0),
        gates.value_scale_H,
        gates.sinks_TH,
    )


def sink_stride(sinks_TH: torch.Tensor | None) -> int:
    """Return the stride of tokens in ``sinks_TH``; 0 if all have the same."""
    # Not the stride of a single row, which may be any: it would be another kernel.
    return 0 if sinks_TH is None or sinks_TH.stride(0) == 0 else sinks_TH.shape[1]


@triton.jit
def softmax_start(ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return ``top``, ``total`` and ``out`` of ROWS queries that have seen no key."""
    return (
        tl.full((ROWS,), float("-inf"), tl.float32),
        tl.zeros((ROWS,), tl.float32),
        tl.zeros((ROWS, BLOCK_D), tl.float32),
    )


@triton.jit
def softmax_step(
    scores,
    values,
    k_scale,
    v_scale,
    top,
    total,
    out,
    position,
    last,
    qk_scale,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
    profiles=None,
    row=None,
    row_mask=None,
    EXTENT: tl.constexpr = 0,
):
    """Add a block of keys to a running softmax. ``scores`` [M, N]: products of queries and keys. The keys are at
    ``position`` [N]. A query sees keys up to ``last`` [M] and within its WINDOW, or all keys unless MASKED. ``values``
    [N, BLOCK_D]; ``k_scale``, ``v_scale`` [N] or None. The last four are those of ``bias_of``; ``profiles`` may be
    None. Returns ``top`` [M], ``total`` [M], ``out`` [M, BLOCK_D].
    """
    scores *= qk_scale
    if k_scale is not None:
        scores *= k_scale[None, :]
    if profiles is not None:
        scores += bias_of(profiles, row, row_mask, position, last, EXTENT)
    if MASKED:
        seen = position[None, :] <= last[:, None]
        some = position <= tl.max(last, 0)
        if WINDOW:
            seen = seen & (position[None, :] > last[:, None] - WINDOW)
            some = some & (position > tl.min(last, 0) - WINDOW)
        # Selects: unwritten memory, NaN too, is replaced and never multiplied (L6).
        scores = tl.where(seen, scores, float("-inf"))
        values = tl.where(some[:, None], values, tl.zeros_like(values))
        if v_scale is not None:
            v_scale = tl.where(some, v_scale, 0.0)
    base = tl.maximum(top, tl.max(scores, 1))
    # A query that has seen no key yet has no highest score.
    from_top = tl.where(base == float("-inf"), 0.0, base) if MASKED else base
    weights = tl.exp2(scores - from_top[:, None])
    rescale = tl.exp2(top - from_top)
    total = total * rescale + tl.sum(weights, 1)
    if v_scale is not None:
        weights *= v_scale[None, :]
    out = tl.dot(weights.to(PRODUCT), values, out * rescale[:, None], input_precision=PRECISION)
    return base, total, out


@triton.jit
def bias_of(profiles, row, row_mask, position, last, EXTENT: tl.constexpr):
    """Return [M, N], in powers of two: the bias of each query (``row`` [M] of ``profiles``) for its distance from
    ``last`` [M] back to the keys at ``position`` [N].
    """
    distance = last[:, None] - position[None, :]
    near = row_mask[:, None] & (distance >= 0) & (distance < EXTENT)
    bias = tl.load(profiles + (row * EXTENT)[:, None] + distance, mask=near, other=0.0)
    return bias.to(tl.float32) * 1.4426950408889634


@triton.jit
def with_sinks(total, top, sinks, place, row_mask):
    """Return ``total`` [M], the sums of weights relative to ``top``, with the sink at ``place`` [M] for each row."""
    sink = tl.load(sinks + place, mask=row_mask, other=0.0) * 1.4426950408889634
    return total + tl.exp2(sink - top)


@triton.jit
def finish(
    x,
    token,
    head,
    row_mask,
    out,
    gate,
    gate_stride,
    head_gate,
    head_gate_stride,
    value_scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Apply the gates to float32 [M, BLOCK_D] and store it as the rows of tokens ``token`` and heads ``head`` in
    ``row_mask``.
    """
    d = tl.arange(0, BLOCK_D)
    stored = row_mask[:, None] & (d < D)[None, :]
    if value_scale is not None:
        x *= tl.load(value_scale + head // GROUP, mask=row_mask, other=1.0).to(tl.float32)[:, None]
    if head_gate is not None:
        by = tl.load(head_gate + token * head_gate_stride + head, mask=row_mask, other=0.0).to(tl.float32)
        x *= tl.sigmoid(by)[:, None]
    if gate is not None:
        by = tl.load(gate + (token * gate_stride + head * D)[:, None] + d[None, :], mask=stored, other=0.0)
        x *= tl.sigmoid(by.to(tl.float32))
    tl.store(out + ((token * HEADS + head) * D)[:, None] + d[None, :], x.to(out.dtype.element_ty), mask=stored)


@triton.jit
def kv_splits_of(seen, WINDOW: tl.constexpr, SPLITS_MAX: tl.constexpr, PAGES: tl.constexpr, SPLIT_PAGES: tl.constexpr):
    """Return (first page, end page, pages of a split, at least SPLIT_PAGES) of a row that sees ``seen`` tokens."""
    first = 0
    if WINDOW:
        first = tl.maximum(seen - WINDOW, 0) // 16
    end = tl.cdiv(seen, 16)
    each = tl.cdiv(tl.cdiv(end - first, SPLITS_MAX), PAGES) * PAGES
    return first, end, tl.maximum(each, SPLIT_PAGES)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["context"])
def combine(
    out,
    gate,
    gate_stride,
    head_gate,
    head_gate_stride,
    value_scale,
    sinks,
    context,
    partial,
    logs,
    splits,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGES: tl.constexpr,
    SPLITS_MAX: tl.constexpr,
    SPLIT_PAGES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the outputs of a decode row's splits. Grid: rows, heads.

    ``partial`` float32 [rows, heads, splits, BLOCK_D] and ``logs`` float32 [rows, heads, splits] (base 2): output
    and log of the sum of weights of each split. ``context`` int64 [rows]: tokens that a row sees. ``out`` [rows,
    heads, D]. ``gate`` to ``sinks``: the tensors of ``Gates`` and their row strides, or None.
    """
    after_previous(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token, heads = tl.full((1,), 0, tl.int64) + row, tl.full((1,), 0, tl.int32) + head
    row_mask = tl.full((1,), 1, tl.int1)
    seen = tl.load(context + row).to(tl.int32)
    if seen <= 0:
        finish(
            tl.zeros((1, BLOCK_D), tl.float32),
            token,
            heads,
            row_mask,
            out,
            None,
            0,
            None,
            0,
            None,
            HEADS,
            GROUP,
            D,
            BLOCK_D,
        )
        return
    first, end, each = kv_splits_of(seen, WINDOW, SPLITS_MAX, PAGES, SPLIT_PAGES)
    live = tl.cdiv(end - first, each)
    offset = (row * HEADS + head) * splits
    every = tl.arange(0, SPLITS_MAX)
    log_all = tl.load(logs + offset + every, mask=every < live, other=float("-inf"))
    highest = tl.max(log_all, 0)
    total = tl.sum(tl.exp2(log_all - highest), 0)
    if sinks is not None:
        total = with_sinks(total, highest, sinks, row * SINKS + head, True)
    weighted = tl.zeros((BLOCK_D,), tl.float32)
    d = tl.arange(0, BLOCK_D)
    for begin in range(0, live, AT_ONCE):
        split = begin + tl.arange(0, AT_ONCE)
        weight = tl.exp2(tl.load(logs + offset + split, mask=split < live, other=float("-inf")) - highest)
        x = tl.load(partial + (offset + split)[:, None] * BLOCK_D + d[None, :], mask=(split < live)[:, None], other=0.0)
        weighted += tl.sum(x * weight[:, None], 0)
    finish(
        (weighted / total)[None, :],
        token,
        heads,
        row_mask,
        out,
        gate,
        gate_stride,
        head_gate,
        head_gate_stride,
        value_scale,
        HEADS,
        GROUP,
        D,
        BLOCK_D,
    )
