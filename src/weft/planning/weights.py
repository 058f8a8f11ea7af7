"""Parameters and bytes of the weights, counted from the tables by which the model code reads tensors.

    Architecture of one rank  --families.tensors-->  (part, elements, how they are stored)  -->  bytes

A test counts every tiny checkpoint both ways. Under tensor parallelism the architecture is a rank's already
(``families.sharding``), and only tensors that are divided by number are divided here.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weft.errors import CheckpointError
from weft.families import text_config
from weft.families.architecture import Architecture
from weft.families.mixers.combined import SharedBlock
from weft.families.mixers.feed_forward import banks
from weft.families.tensors import Form, Table, head_bias, vocabulary
from weft.families.tower_tensors import vision_ends, vision_layers, vision_projector
from weft.spec import ITEM_BYTES, DTypeName
from weft.units import ceil_div


@dataclass(frozen=True, slots=True)
class WeightForm:
    """Storage form of matrices: ``bits`` per element, ``scale_bits`` for each group of ``group`` elements.
    ``twelve_bit``: bfloat16 on a CPU that keeps large matrices, a tied embedding and the head in 12 bits. ``tables``:
    form of embedding and head; None: the model's dtype. ``experts``: form of experts, if they have another.
    ``coded_share``: share of matrices in this form, if files are known; the others are in the form ``left``.
    """

    name: str
    bits: int
    group: int = 0
    scale_bits: int = 0
    twelve_bit: bool = False
    tables: WeightForm | None = None
    experts: WeightForm | None = None
    coded_share: float = 1.0
    left: WeightForm | None = None

    def matrix_bytes(self, elements: int, columns: int = 0) -> int:
        if self.left is not None:
            codes = replace(self, left=None).matrix_bytes(round(elements * self.coded_share), columns)
            return codes + round(max(0.0, 1 - self.coded_share) * self.left.matrix_bytes(elements, columns))
        if self.twelve_bit and elements >= TWELVE_BIT_ELEMENTS:
            # A tile of 16 rows also has 16 upper bytes, and two indices: first and end of its odd weights.
            return elements * 3 // 2 + 2 * ceil_div(elements, columns) + int(8 * ODD_SHARE * elements)
        scales = ceil_div(elements, self.group) * self.scale_bits if self.group else 0
        return ceil_div(elements * self.bits + scales, 8)


TWELVE_BIT_ELEMENTS = 1 << 19
"""The smallest matrix that a CPU keeps in 12 bits: ``TWELVE_BIT_SIZE_MIN`` of the tensor plane."""
ODD_SHARE = 1e-4
"""Share of weights that are stored exactly next to 12 bits: one in some ten thousand of a trained layer."""
TWELVE_BIT = WeightForm("bfloat16 in 12 bits", 16, twelve_bit=True)

FORMS: dict[str, WeightForm] = {
    "fp8": WeightForm("fp8", 8, 128 * 128, 32),  # of files: e4m3, a float32 scale for 128 x 128
    "int8": WeightForm("int8", 8, 128, 16),  # a 16-bit scale for each 128
    "w8a8": WeightForm("w8a8", 8, 128, 16),  # the codes of int8
    "int4": WeightForm("int4", 4, 128, 16 + 4),  # AWQ, GPTQ: a 16-bit scale and a 4-bit zero for each 128
}
"""Names that ``--quantize`` of a plan takes."""

GGUF_BITS: dict[str, float] = {
    "Q8_0": 8.5,
    "Q4_0": 4.5,
    "Q1_0": 4.5,
    "Q4_1": 5,
    "Q5_0": 6.5,
    "Q5_1": 7,
    "IQ4_NL": 4.5,
    "IQ4_XS": 4.3125,
    "MXFP4": 4.25,
    "Q4_K": 4.625,
    "Q5_K": 6.625,
    "Q6_K": 6.5625,
    "Q3_K": 4.5625,
    "Q2_K": 5.125,
}
"""Bytes of an element of a GGUF file in a CPU's memory; other forms are widened. A test compares them with tiles."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of one device. ``parts``: bytes by part of the model. ``parameters``: number in the undivided model."""

    parameters: int
    rank_bytes: int
    form: str
    parts: Mapping[str, int] = field(default_factory=dict)


def count_weights(whole: Architecture, rank: Architecture, tp: int, form: WeightForm, *, mtp: bool = False) -> Weights:
    """Return the weights of ``whole``, of which ``rank`` is one device's share among ``tp``. ``mtp``: with the head
    for multi-token prediction, which is not counted in ``parameters``.
    """
    parts: dict[str, int] = {}
    for part, stored, elements in (*_pieces(rank, tp), *(_mtp_pieces(rank, tp) if mtp else ())):
        if form.tables is not None and part in ("embedding", "head", _NGRAMS):
            parts[part] = parts.get(part, 0) + form.tables.matrix_bytes(elements)
            continue
        head = part == "head" or (part == "embedding" and rank.tied_embeddings)
        kind: Form = "matrix" if head and form.twelve_bit else stored
        of_part = form.experts if part == "experts" and form.experts is not None else form
        parts[part] = parts.get(part, 0) + _bytes(kind, elements, rank, of_part)
    return Weights(
        parameters=sum(elements for _, _, elements in _pieces(whole, 1)),
        rank_bytes=sum(parts.values()),
        form=form.name,
        parts=parts,
    )


def _quantization(config: Mapping[str, Any]) -> Any:
    """Return the settings of the quantisation, which a wrapper may have in its text part (Kimi K3)."""
    return config.get("quantization_config") or text_config(config).get("quantization_config")


def form_of(
    config: Mapping[str, Any],
    dtype: DTypeName,
    requested: str | None,
    *,
    twelve_bit: bool = False,
    coded_tiles: bool = False,
) -> WeightForm:
    """Return the form of matrices in memory: ``requested`` (a name of FORMS), the form that config.json says, or
    ``dtype``. ``twelve_bit``: a CPU that keeps large matrices of bfloat16 in 12 bits. ``coded_tiles``: a CPU that
    keeps fp8, nf4 and fp4 of models in bfloat16.

    Raises CheckpointError for a quantisation that config.json names and this function does not know.
    """
    if requested is not None:
        return FORMS[requested]
    settings = _quantization(config)
    if isinstance(settings, Mapping) and settings.get("quant_method") == "gguf":
        return _of_gguf(settings.get("elements") or {}, dtype)
    if not isinstance(settings, Mapping) or not settings:
        if twelve_bit and dtype == "bfloat16":
            return TWELVE_BIT
        return WeightForm(dtype, 8 * ITEM_BYTES[dtype])
    method = str(settings.get("quant_method", "unknown"))
    if config.get("expert_dtype", settings.get("expert_dtype")) == "fp4":  # DeepSeek V4
        rest = {key: value for key, value in settings.items() if key != "expert_dtype"}
        others, experts = (
            form_of({"quantization_config": own}, dtype, None, twelve_bit=twelve_bit, coded_tiles=coded_tiles)
            for own in (rest, {"quant_method": "mxfp4"})
        )
        return replace(others, name=f"{others.name}, experts {experts.name}", experts=experts)
    stored, group = _stored_form(method, settings)
    if twelve_bit and stored in ("nvfp4", "mxfp4"):  # of CPUs
        return WeightForm(f"{stored} as int4 codes", 4, group, 8)
    if twelve_bit and stored == "int4 with float zeros":
        return WeightForm(f"{method} 4-bit", 4, group, 32)
    as_codes = coded_tiles and dtype == "bfloat16"
    if as_codes and stored == "nf4 or fp4":
        return WeightForm(stored, 4, 64, 32)
    if stored in _WIDENED or (stored in _FP8 and (twelve_bit or coded_tiles) and not as_codes):
        if twelve_bit and dtype == "bfloat16":
            return replace(TWELVE_BIT, name=f"{stored}, widened to bfloat16 in 12 bits")
        return WeightForm(f"{stored}, widened to {dtype}", 8 * ITEM_BYTES[dtype])
    if coded_tiles and stored == "mxfp8":
        return WeightForm(stored, 8, group, 8)
    if stored in _FP8:  # in memory a scale is of 16 rows where these share one
        return WeightForm(stored, 8, 16 * group if method == "fp8" else group, 32)
    if stored in ("int4", "int8"):
        bits = int(stored[-1])
        return WeightForm(f"{method} {bits}-bit", bits, group, 16 if bits == 8 else 20)
    if stored == "mxfp4":
        return WeightForm("mxfp4 as int8 codes", 8, 32, 16)  # of GPUs
    raise CheckpointError(
        f"config.json: quantization_config is of method {method!r}, whose sizes are not "
        f"known here: say how weights are stored with --quantize fp8, int8 or int4",
        param="--quantize",
    )


_FP8 = ("fp8", "mxfp8")
"""Forms that GPUs keep, and CPUs with ``coded_tiles``."""
_WIDENED = ("nvfp4", "nf4 or fp4", "int4 with float zeros")
_ROW = 4096
"""Columns of a scale that is for one row."""
_ALGORITHMS = {
    "MXFP8": "mxfp8",
    "MXFP4": "mxfp4",
    "W4A8_MXFP4_FP8": "mxfp4",
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "FP8_PB_WO": "fp8",
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "W4A8_NVFP4_FP8": "nvfp4",
    "MIXED_PRECISION": "nvfp4",
    "fp8_e4m3": "fp8",
    "fp4": "mxfp4",
    "mxfp4": "mxfp4",
}
"""Names of modelopt and quark. A mixed checkpoint is counted as its widest form."""


def _stored_form(method: str, settings: Mapping[str, Any]) -> tuple[str, int]:
    """Return (int8, int4, fp8, mxfp8, mxfp4 or a form that is widened; columns of a group). "": not known."""
    if method == "fp8":
        return "fp8", int((settings.get("weight_block_size") or (1, 1 << 20))[1])
    if method == "mxfp4":
        return "mxfp4", 32
    if method == "modelopt":
        kind = _ALGORITHMS.get(str(settings.get("quant_algo")), "")
        return kind, 16 if kind == "nvfp4" else 32
    if method == "quark":
        weight = (settings.get("global_quant_config") or {}).get("weight") or {}
        weight = weight[0] if isinstance(weight, list) else weight
        return _ALGORITHMS.get(str(weight.get("dtype")), ""), 32
    if method == "bitsandbytes":
        return ("nf4 or fp4" if settings.get("load_in_4bit") else "int8"), _ROW
    if method == "torchao":
        kind = str(settings.get("quant_type")).lower()
        columns = re.search(r"'group_size': (\d+)", kind)
        if "int4" in kind and not any(other in kind for other in ("float8weight", "int8", "intx")):
            return "int4 with float zeros", int(columns[1]) if columns else 128
        return ("fp8" if "float8weight" in kind else "int8" if "int8" in kind or "intx" in kind else ""), _ROW
    scheme: Any = {"num_bits": settings.get("bits"), "group_size": settings.get("group_size")}
    if method == "compressed-tensors":
        groups = settings.get("config_groups") or {}
        scheme = next((group.get("weights") for group in groups.values()), None) or {}
    bits, size = scheme.get("num_bits"), scheme.get("group_size") or 0  # -1 or none: a scale for each row
    group = size if size > 0 else _ROW
    if scheme.get("type") == "float":
        mx = size == 32
        return {4: "mxfp4" if mx else "nvfp4", 8: "mxfp8" if mx else "fp8"}.get(bits, ""), group
    return {4: "int4", 8: "int8"}.get(bits, ""), group


CODED = "coded"
"""Key of quantization_config that ``weft plan`` adds: ``Coded``."""
_ITEM_BITS = {"I32": 32, "I8": 8, "U8": 8, "F8_E4M3": 8}
_CODES = ("weight", "qweight", "weight_packed", "_weight_qdata")
_NOT_COUNTED = ("embed", "lm_head", "mtp.", "visual", "vision")
_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Coded:
    """Coded weights of a checkpoint's files: their bits, and the scales of groups (GPTQ, AWQ)."""

    bits: int
    scales: int


def coded(stored: Iterable[tuple[str, str, Sequence[int]]], layers: int) -> Coded:
    """Return the coded weights among ``stored`` (name, dtype, shape of each tensor), in the trunk of ``layers``. Tools
    leave matrices plain that config.json does not name (``ignore`` may be a pattern).
    """
    bits = scales = 0
    for name, dtype, shape in stored:
        layer = _LAYER.search(name)
        behind = layer is not None and int(layer[1]) >= layers
        # No header says how many columns of a GPU's tiles (torchao's 4d) are padding.
        if behind or len(shape) == 4 or any(part in name for part in _NOT_COUNTED):
            continue
        if name.rpartition(".")[2] in _CODES or name.endswith("_blocks"):
            bits += _ITEM_BITS.get(dtype, 0) * math.prod(shape)
        scales += math.prod(shape) if name.endswith(".scales") else 0
    return Coded(bits, scales)


def with_share_of_codes(
    form: WeightForm, config: Mapping[str, Any], whole: Architecture, *, twelve_bit: bool
) -> WeightForm:
    """Return ``form`` of the matrices that are codes in the files; others have the dtype of the ``whole`` model."""
    settings = _quantization(config)
    in_files = settings.get(CODED) if isinstance(settings, Mapping) else None
    if not isinstance(in_files, Coded) or not in_files.bits or form.bits >= 8 * ITEM_BYTES[whole.dtype]:
        return form
    if form.experts is not None:  # the bits of all codes do not tell whose they are
        return form
    matrices = sum(elements for _, stored, elements in _pieces(whole, 1) if stored == "matrix")
    plain = (
        TWELVE_BIT if twelve_bit and whole.dtype == "bfloat16" else WeightForm(whole.dtype, 8 * ITEM_BYTES[whole.dtype])
    )
    numbers = in_files.bits // (4 if form.name.startswith("mxfp4") else form.bits)
    if in_files.scales and form.group != _ROW:  # layers may have other bits than most
        numbers = in_files.scales * form.group
        of_group = form.group * in_files.bits / numbers + form.scale_bits
        form = replace(form, bits=0, scale_bits=round(of_group))
    return replace(form, coded_share=numbers / max(1, matrices), left=plain)


def _of_gguf(elements: Mapping[str, Mapping[str, int]], dtype: DTypeName) -> WeightForm:
    """Return the mean of a file's forms, as a CPU keeps them."""

    def mean(of: str) -> WeightForm:
        counts = elements.get(of) or {"plain": 1}
        bits = sum(count * GGUF_BITS.get(kind, 8 * ITEM_BYTES[dtype]) for kind, count in counts.items())
        names = sorted(counts, key=lambda kind: -counts[kind])
        return WeightForm(", ".join(names), 0, 256, round(256 * bits / sum(counts.values())))

    return replace(mean("layers"), tables=mean("tables"))


def _bytes(stored: Form, elements: int, rank: Architecture, form: WeightForm) -> int:
    if stored == "matrix":
        return form.matrix_bytes(elements, rank.hidden_size)
    return elements * ITEM_BYTES["float32" if stored == "float32" else rank.dtype]


def _pieces(architecture: Architecture, tp: int) -> Iterator[tuple[str, Form, int]]:
    """Yield (part, storage form, elements) of each product and each additional tensor."""
    hidden = architecture.hidden_size
    table = vocabulary(architecture.vocab_size, hidden).elements(tp)
    yield "embedding", "plain", table
    if not architecture.tied_embeddings:
        yield "head", "plain", table
    if architecture.head_bias:
        yield "head", "plain", head_bias(architecture.vocab_size).elements(tp)
    for part, beside in architecture.tables_beside:
        yield from _record_pieces(part, [beside], tp)
    shared_seen: set[int] = set()
    for shared in banks(architecture.feed_forwards):
        yield from _record_pieces(shared.part, [shared.routed.table(hidden)], tp)
    for mixer, feed in zip(architecture.mixers, architecture.feed_forwards, strict=True):
        for record in (mixer, feed):
            if record is None:
                continue
            yield from _record_pieces(record.part, record.tables(hidden), tp)
        if isinstance(mixer, SharedBlock) and mixer.block not in shared_seen:
            shared_seen.add(mixer.block)
            yield from _record_pieces("attention", mixer.block_tables(hidden), tp)
            yield "attention", "plain", 3 * hidden
    if architecture.vision is not None:  # all of it on the first rank
        tower = architecture.vision
        yield from _record_pieces(
            "vision", [vision_ends(tower), vision_projector(tower, hidden), *vision_layers(tower)], 1
        )


def _mtp_pieces(architecture: Architecture, tp: int) -> Iterator[tuple[str, Form, int]]:
    """Yield the norms of both inputs of the head, around its layer and over its output; the join of the inputs; the
    layer. Embedding and output matrix are the trunk's. Heads with several streams have mixes instead of inner norms.
    """
    assert architecture.mtp is not None
    hidden = architecture.hidden_size
    yield "draft head", "matrix", 2 * hidden * hidden
    yield from _record_pieces("draft head", architecture.mtp.residual.head_tables(hidden), tp)
    for record in (architecture.mtp.attention, architecture.mtp.feed_forward):
        yield from _record_pieces("draft head", record.tables(hidden), tp)


def _record_pieces(part: str, of_record: Iterable[Table], tp: int) -> Iterator[tuple[str, Form, int]]:
    """Yield the tensors of one role and one form as one matrix. Tables of n-grams are a separate part."""
    for table in of_record:
        for role, stored in table.items():
            elements: Counter[Form] = Counter()
            for tensor in stored:
                elements[tensor.form] += tensor.elements(tp)
            for form, count in elements.items():
                yield _NGRAMS if part == "recurrent" and role == "table" else part, form, count


_NGRAMS = "n-gram tables"
