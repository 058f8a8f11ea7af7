"""Parameters and bytes of the weights, counted from the architecture: the shapes the model code asks for.

    Architecture of one rank  -->  pieces: (part, elements, how they are stored)  -->  bytes

    matrix     products of the stream: in the model's dtype, or quantised with a scale per group
    plain      embedding, head, norms, convolutions, routers: the model's dtype, never quantised
    float32    decay rates and steps of recurrent layers, kept exact

A row per kind of mixer, as ``models`` has a file for it; a test counts every tiny checkpoint both ways. Under
tensor parallelism the architecture is a rank's already (``ranks``) and only the vocabulary is cut here.

Rejected: the file sizes on the hub, which are not there before a download, know no ``--tp``, and count vision
towers; and running the model code without weights, which needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from weft.errors import CheckpointError
from weft.families.architecture import (
    Architecture,
    Attention,
    Dense,
    Experts,
    FeedForward,
    GatedDelta,
    KimiDelta,
    LatentAttention,
    Mamba1,
    Mamba2,
    Mixer,
    Parallel,
    SharedBlock,
    ShortConv,
)
from weft.spec import ITEM_BYTES, DTypeName
from weft.units import ceil_div

Stored = Literal["matrix", "plain", "float32"]
Pieces = Iterator[tuple[Stored, int]]
"""(how it is stored, elements), one per tensor."""


@dataclass(frozen=True, slots=True)
class WeightForm:
    """How matrices are stored: ``bits`` per element, ``scale_bits`` for each group of ``group`` elements.
    ``twelve_bit``: bfloat16 on a CPU that keeps large matrices, a tied embedding and the head in 12 bits."""

    name: str
    bits: int
    group: int = 0
    scale_bits: int = 0
    twelve_bit: bool = False

    def matrix_bytes(self, elements: int, columns: int = 0) -> int:
        if self.twelve_bit and elements >= TWELVE_BIT_ELEMENTS:
            # For 16 rows: 16 upper bytes, where its odd weights begin, and their end.
            return elements * 3 // 2 + 2 * ceil_div(elements, columns) + int(8 * ODD_SHARE * elements)
        scales = ceil_div(elements, self.group) * self.scale_bits if self.group else 0
        return ceil_div(elements * self.bits + scales, 8)


TWELVE_BIT_ELEMENTS = 1 << 19
"""The smallest matrix that a CPU keeps in 12 bits: ``TWELVE_BIT_SIZE_MIN`` of the tensor plane."""
ODD_SHARE = 1e-4
"""Weights that are stored whole beside 12 bits: one in some ten thousand of a trained layer."""
TWELVE_BIT = WeightForm("bfloat16 in 12 bits", 16, twelve_bit=True)

FORMS: dict[str, WeightForm] = {
    "fp8": WeightForm("fp8", 8, 128 * 128, 32),     # of files: e4m3, a float32 scale for 128 x 128
    "int8": WeightForm("int8", 8, 128, 16),         # a 16-bit scale for each 128
    "w8a8": WeightForm("w8a8", 8, 128, 16),         # the codes of int8
    "int4": WeightForm("int4", 4, 128, 16 + 4),     # AWQ, GPTQ: a 16-bit scale and a 4-bit zero for each 128
}
"""What ``--quantize`` of a plan may name."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Of one device. ``parts``: bytes by what they belong to. ``parameters``: of the whole model."""

    parameters: int
    rank_bytes: int
    form: str
    parts: Mapping[str, int] = field(default_factory=dict)


def count_weights(whole: Architecture, rank: Architecture, tp: int, form: WeightForm, *,
                  mtp: bool = False) -> Weights:
    """Weights of ``whole``, of which ``rank`` is one device's share among ``tp``. ``mtp``: with the head for
    multi-token prediction, which is no part of ``parameters``."""
    parts: dict[str, int] = {}
    for part, stored, elements in (*_pieces(rank, tp), *(_mtp_pieces(rank) if mtp else ())):
        head = part == "head" or (part == "embedding" and rank.tied_embeddings)
        kind: Stored = "matrix" if head and form.twelve_bit else stored
        parts[part] = parts.get(part, 0) + _bytes(kind, elements, rank, form)
    return Weights(parameters=sum(elements for _, _, elements in _pieces(whole, 1)),
                   rank_bytes=sum(parts.values()), form=form.name, parts=parts)


def form_of(config: Mapping[str, Any], dtype: DTypeName, asked: str | None, *,
            twelve_bit: bool = False) -> WeightForm:
    """How the matrices are kept in memory: as ``asked`` (a name of FORMS), as config.json says, or in
    ``dtype``. ``twelve_bit``: a CPU that keeps large matrices of bfloat16 in 12 bits.

    Raises CheckpointError for a quantisation that config.json names and this does not know.
    """
    if asked is not None:
        return FORMS[asked]
    settings = config.get("quantization_config")
    if not isinstance(settings, Mapping) or not settings:
        if twelve_bit and dtype == "bfloat16":
            return TWELVE_BIT
        return WeightForm(dtype, 8 * ITEM_BYTES[dtype])
    method = str(settings.get("quant_method", "unknown"))
    if method == "fp8":
        _, columns = settings.get("weight_block_size") or (1, 1 << 20)
        if twelve_bit and dtype == "bfloat16":      # a CPU widens it
            return TWELVE_BIT
        return WeightForm("fp8", 8, 16 * int(columns), 32)  # in memory a scale is of 16 rows
    scheme: Any = {"num_bits": settings.get("bits"), "group_size": settings.get("group_size")}
    if method == "compressed-tensors":
        groups = settings.get("config_groups") or {}
        scheme = next((group.get("weights") for group in groups.values()), None) or {}
    bits = scheme.get("num_bits")
    if bits not in (4, 8):
        raise CheckpointError(f"config.json: quantization_config is of method {method!r}, whose sizes are "
                              f"not known here: say how weights are stored with --quantize fp8, int8 or int4",
                              param="--quantize")
    size = scheme.get("group_size") or 0        # -1 or none: a scale for each row
    return WeightForm(f"{method} {bits}-bit", bits, size if size > 0 else 4096, 16 if bits == 8 else 20)


def _bytes(stored: Stored, elements: int, rank: Architecture, form: WeightForm) -> int:
    if stored == "matrix":
        return form.matrix_bytes(elements, rank.hidden_size)
    return elements * ITEM_BYTES["float32" if stored == "float32" else rank.dtype]


def _pieces(architecture: Architecture, tp: int) -> Iterator[tuple[str, Stored, int]]:
    hidden = architecture.hidden_size
    table = ceil_div(architecture.vocab_size, tp) * hidden
    yield "embedding", "plain", table
    if not architecture.tied_embeddings:
        yield "head", "plain", table
    yield "norms", "plain", hidden
    shared_seen: set[int] = set()
    for mixer, feed in zip(architecture.mixers, architecture.feed_forwards, strict=True):
        for record in (mixer, feed):
            if record is None:
                continue
            yield "norms", "plain", hidden * (1 + architecture.sandwich_norms)
            part = _PART[type(record)]
            for stored, elements in _record_pieces(record, hidden):
                yield part, stored, elements
        if isinstance(mixer, SharedBlock) and mixer.block not in shared_seen:
            shared_seen.add(mixer.block)
            for stored, elements in _shared_weights(mixer, hidden):
                yield "attention", stored, elements


def _mtp_pieces(architecture: Architecture) -> Iterator[tuple[str, Stored, int]]:
    """Norms of its two inputs, of its layer and of its output; the join of the inputs; the layer. Embedding
    and output matrix are the trunk's."""
    assert architecture.mtp is not None
    hidden = architecture.hidden_size
    yield "draft head", "plain", 5 * hidden
    yield "draft head", "matrix", 2 * hidden * hidden
    for record in (architecture.mtp.attention, architecture.mtp.feed_forward):
        for stored, elements in _record_pieces(record, hidden):
            yield "draft head", stored, elements


def _record_pieces(record: Mixer | FeedForward, hidden: int) -> Pieces:
    count: Callable[[Any, int], Pieces] = _COUNTED[type(record)]
    return count(record, hidden)


def _attention(shape: Attention, hidden: int, *, inputs: int | None = None) -> Pieces:
    """``inputs``: width of what it reads, where that is not the stream."""
    inputs = inputs or hidden
    q_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rows = q_width * (2 if shape.gated else 1) + 2 * kv_width
    yield "matrix", rows * inputs
    yield "matrix", hidden * q_width
    if shape.head_gated:
        yield "matrix", shape.heads * inputs
    if shape.bias:
        yield "plain", rows + hidden
    if shape.qk_norm:
        yield "plain", q_width + kv_width if shape.norm_whole else 2 * shape.head_dim


def _latent_attention(shape: LatentAttention, hidden: int) -> Pieces:
    queries = shape.heads * shape.key_dim
    if shape.query_rank is None:
        yield "matrix", queries * hidden
    else:
        yield "matrix", shape.query_rank * hidden + queries * shape.query_rank
        yield "plain", shape.query_rank
    yield "matrix", (shape.latent_dim + shape.shared_dim) * hidden
    yield "plain", shape.latent_dim
    yield "matrix", shape.heads * (shape.own_dim + shape.value_dim) * shape.latent_dim
    yield "matrix", hidden * shape.heads * shape.value_dim
    if shape.bias:
        yield "plain", (shape.query_rank or 0) + shape.latent_dim + shape.shared_dim + hidden


def _gated_delta(shape: GatedDelta, hidden: int) -> Pieces:
    channels = 2 * shape.key_width + shape.value_width
    yield "matrix", (channels + shape.value_width) * hidden
    yield "plain", 2 * shape.v_heads * hidden
    yield "plain", channels * shape.conv_kernel
    yield "float32", 2 * shape.v_heads
    yield "plain", shape.v_dim
    yield "matrix", hidden * shape.value_width


def _kimi_delta(shape: KimiDelta, hidden: int) -> Pieces:
    yield "matrix", 3 * shape.width * hidden
    yield "plain", 3 * shape.width * shape.conv_kernel
    yield "matrix", 2 * shape.head_dim * (hidden + shape.width)
    yield "plain", shape.heads * hidden
    yield "float32", shape.heads + shape.width
    yield "plain", shape.head_dim
    yield "matrix", hidden * shape.width


def _mamba2(shape: Mamba2, hidden: int) -> Pieces:
    channels = shape.inner_width + 2 * shape.group_width
    rows = shape.inner_width + channels + shape.heads
    yield "matrix", rows * hidden
    yield "plain", channels * (shape.conv_kernel + shape.conv_bias)
    yield "float32", 3 * shape.heads
    if shape.norm != "none":
        yield "plain", shape.inner_width
    yield "matrix", hidden * shape.inner_width
    if shape.projection_bias:
        yield "plain", rows
    if shape.projection_bias if shape.output_bias is None else shape.output_bias:
        yield "plain", hidden


def _mamba1(shape: Mamba1, hidden: int) -> Pieces:
    width = shape.dt_rank + 2 * shape.state_dim
    yield "matrix", 2 * shape.channels * hidden
    yield "plain", shape.channels * (shape.conv_kernel + shape.conv_bias)
    yield "matrix", width * shape.channels
    yield "matrix", shape.channels * shape.dt_rank
    yield "float32", shape.channels * (shape.state_dim + 2)
    if shape.inner_norms == "weighted":
        yield "plain", width
    yield "matrix", hidden * shape.channels
    if shape.projection_bias:
        yield "plain", 2 * shape.channels + hidden


def _short_conv(shape: ShortConv, hidden: int) -> Pieces:
    yield "matrix", 4 * shape.channels * hidden
    yield "plain", shape.channels * shape.conv_kernel
    if shape.bias:
        yield "plain", 4 * shape.channels + hidden


def _parallel(shape: Parallel, hidden: int) -> Pieces:
    yield from _attention(shape.attention, hidden)
    yield from _mamba2(shape.mamba, hidden)


def _shared_use(shape: SharedBlock, hidden: int) -> Pieces:
    """What a layer has of its own: its Mamba-2, the projection into it, and adapters."""
    yield from _mamba2(shape.mamba, hidden)
    yield "matrix", hidden * hidden
    rank, wide = shape.adapter_rank, shape.attention.heads * shape.attention.head_dim
    yield "matrix", rank * (hidden + 2 * shape.feed_forward.width)
    if shape.adapted_attention:
        yield "matrix", 3 * rank * (2 * hidden + wide)


def _shared_weights(shape: SharedBlock, hidden: int) -> Pieces:
    """What all uses of a block share: its attention over [x, embedding], its feed-forward, their norms."""
    yield from _attention(shape.attention, hidden, inputs=2 * hidden)
    yield from _dense(shape.feed_forward, hidden)
    yield "plain", 3 * hidden


def _dense(shape: Dense, hidden: int) -> Pieces:
    into = 2 * shape.width if shape.gated else shape.width
    yield "matrix", (into + shape.width) * hidden
    if shape.bias:
        yield "plain", into + hidden


def _experts(shape: Experts, hidden: int) -> Pieces:
    inner = shape.latent_width or hidden
    matrices = 3 if shape.gated else 2
    yield "plain", shape.count * hidden
    yield "matrix", matrices * (shape.own_count or shape.count) * shape.width * inner
    if shape.latent_width:
        yield "matrix", 2 * shape.latent_width * hidden
    if shape.choice_bias:
        yield "float32", shape.count
    yield "matrix", matrices * shape.shared_width * hidden
    if shape.shared_gate:
        yield "plain", hidden


_COUNTED: dict[type, Callable[[Any, int], Pieces]] = {
    Attention: _attention, LatentAttention: _latent_attention, GatedDelta: _gated_delta,
    KimiDelta: _kimi_delta, Mamba2: _mamba2, Mamba1: _mamba1, ShortConv: _short_conv, Parallel: _parallel,
    SharedBlock: _shared_use, Dense: _dense, Experts: _experts,
}
_PART: dict[type, str] = dict.fromkeys(_COUNTED, "recurrent") | {
    Attention: "attention", LatentAttention: "attention", Dense: "feed-forward", Experts: "experts"}
