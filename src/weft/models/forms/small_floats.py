"""Matrices in floats of 8 and 4 bits: NVFP4, MXFP4, MXFP8, and fp8 with scales of any extent.

    form     codes                      scales                                   value
    NVFP4    U8 [rows, columns / 2]     F8_E4M3 [rows, columns / 16], one F32    e2m1 x (scale x global)
    MXFP4    U8 [rows, columns / 2]     U8 [rows, columns / 32]                  e2m1 x 2^(scale - 127)
    MXFP8    F8_E4M3 [rows, columns]    U8 [rows, columns / 32]                  e4m3 x 2^(scale - 127)
    fp8      F8_E4M3 [rows, columns]    of the matrix, rows, groups or blocks    e4m3 x scale

    method               codes          scales           the one scale
    modelopt             weight         weight_scale     weight_scale_2: times
    compressed-tensors   weight_packed  weight_scale     weight_global_scale: divided by     (compressed.py)
    quark                weight         weight_scale
    fp8                  weight         weight_scale_inv, for a block of 128 x 128 numbers; MXFP4 in bytes with a sign
    mxfp4 (gpt-oss)      x_blocks       x_scales         U8 [experts, rows, columns / 32, 16]

A byte of e2m1 holds two columns, the first in its low half. Twice a value is a whole number up to 12: a table of int4.
Scales stay bytes, with one halved float for a row. Recipes mix forms: the tensors of a matrix tell its form, and a
form that config.json does not name is an error.

Sources: the OCP Microscaling Formats specification 1.0; NVIDIA's ``modelopt.torch.quantization.qtensor``; the
compressed-tensors library's ``nvfp4``, ``mxfp4`` and ``mxfp8`` compressors; transformers ``integrations.mxfp4``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch

from weft.errors import CheckpointError
from weft.models.forms.stored_form import (
    FLOATS,
    Ask,
    Grouping,
    MatrixPiece,
    StoredForm,
    mapping,
    mappings,
    number,
    refuse,
)
from weft.tensor.weights.quantized import E2M1, LINE, ZERO_POINT, BlockNumbers, Codes

Kind = Literal["nvfp4", "mxfp4", "mxfp8", "fp8"]
POWERS = ("U8", "F8_E8M0")
"""Dtypes of scales that are powers of two: a byte is the exponent plus 127."""
_GROUPS: dict[Kind, int] = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}


class TensorNames(NamedTuple):
    """Names of the tensors of one matrix. ``global_scale``: the scale of scales, "" without; ``divides``: scales are
    divided by it. ``in_blocks``: codes are [..., columns / 32, 16].
    """

    codes: str
    scales: str
    global_scale: str = ""
    divides: bool = False
    in_blocks: bool = False


def kind_of(form: StoredForm, names: TensorNames) -> Kind | None:
    """Return the form that the headers tell; None for a matrix in none of them."""
    codes, scales = form.dtype_of(names.codes), form.dtype_of(names.scales)
    if codes == "F8_E4M3":
        return "mxfp8" if scales in POWERS else "fp8"
    if codes == "U8":
        return "nvfp4" if scales == "F8_E4M3" else "mxfp4"
    return "mxfp4" if codes == "I8" and scales in POWERS else None


def grouping_of(
    form: StoredForm, names: TensorNames, columns: int, block: tuple[int, int] | None = None
) -> Grouping | None:
    """Return the grouping of ``read_matrix``'s result; None if that is widened."""
    kind = kind_of(form, names)
    if kind == "fp8" or kind == "mxfp8":
        group = _fp8_group(form, names, columns, block)
        return Grouping(8, group, fp8=True) if form.keeps_fp8 and group % LINE == 0 else None
    group = _GROUPS[kind] if kind is not None else 0
    if form.keeps_blocks:
        return Grouping(4, group, by_blocks=True, table=E2M1) if group else None
    return Grouping(8, group) if group == LINE else None  # kernels of GPUs read no tables


def read_matrix(
    form: StoredForm, ask: Ask, names: TensorNames, shape: tuple[int, ...], block: tuple[int, int] | None = None
) -> Codes | torch.Tensor:
    """Read a matrix as codes or values. ``block``: rows and columns that share a scale in fp8, if that is a
    rectangle.
    """
    kind = kind_of(form, names)
    stored = (
        _fp8(form, ask, names, shape, block)
        if kind == "fp8" or kind == "mxfp8"
        else _fp4(form, ask, names, shape, kind or "mxfp4")
    )
    return stored if grouping_of(form, names, shape[-1], block) is not None else stored.dense()


def piece_of(
    form: StoredForm, name: str, ends: tuple[str, ...], block: tuple[int, int] | None = None, matrix_end: str = "weight"
) -> MatrixPiece | None:
    """Return the piece that ``name`` is of a matrix. ``ends``: ends of the names of codes and of scales, after that of
    the matrix.
    """
    header = form.headers.get(name)
    end = next((end for end in ends if name.endswith(f"{matrix_end}{end}")), None)
    if header is None or end is None or not header.shape:
        return None
    matrix = name.removesuffix(end) if end else name
    if not end and header.dtype != "U8":
        return None
    if block is not None and end in ("_scale", "_scale_inv"):
        return MatrixPiece(matrix, (-2, block[0]), (-1, block[1]))
    return MatrixPiece(matrix, (-2, 1), (-1, 0))


def _fp4(form: StoredForm, ask: Ask, names: TensorNames, shape: tuple[int, ...], kind: Kind) -> Codes:
    *stack, rows, columns = shape
    group = _GROUPS[kind]
    stored = (*stack, rows, -(-columns // 32), 16) if names.in_blocks else (*stack, rows, -(-columns // 2))
    packed = ask(names.codes, stored, ("U8", "I8")).view(torch.uint8).reshape(*stack, rows, -1)
    table = torch.tensor([value + ZERO_POINT[8] for value in E2M1], dtype=torch.uint8, device=packed.device)
    pairs = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :columns]
    of_groups = (*stack, rows, -(-columns // group))
    if kind == "mxfp4":
        half = torch.full((*stack, rows, 1), 0.5, device=packed.device)
        numbers = BlockNumbers(_powers(ask, names.scales, of_groups), half)
    else:
        scales = ask(names.scales, of_groups, ("F8_E4M3",))
        global_scale = _global_scale(form, ask, names.global_scale, of_groups).expand(*stack, rows, 1)
        # A half of the product, or of the quotient: exact.
        numbers = BlockNumbers(scales, global_scale * 2 if names.divides else global_scale / 2, names.divides)
        if not packed.is_meta and bool((scales.view(torch.uint8) & 128).any()):
            raise CheckpointError(f"tensor {names.scales} has scales below zero", param="model")
        _finite(names.global_scale, numbers.floats())
    codes = Codes(4, pairs, numbers, None, group, table=table)
    return codes if form.keeps_blocks else codes.in_bytes()


def _fp8(
    form: StoredForm, ask: Ask, names: TensorNames, shape: tuple[int, ...], block: tuple[int, int] | None
) -> Codes:
    rows, columns = shape[-2:]
    codes = ask(names.codes, shape, ("F8_E4M3",)).view(torch.uint8)
    if block is not None:
        high, wide = block
        of_blocks = (*shape[:-2], -(-rows // high), -(-columns // wide))
        scales = ask(names.scales, of_blocks, (*FLOATS, "F8_E8M0")).float()
        return Codes(8, codes, scales.repeat_interleave(high, dim=-2)[..., :rows, :], None, wide, fp8=True)
    if form.dtype_of(names.scales) in POWERS:
        powers = _powers(ask, names.scales, (*shape[:-1], -(-columns // _GROUPS["mxfp8"])))
        scales = powers if form.keeps_blocks else powers.float()
        return Codes(8, codes, scales, None, _GROUPS["mxfp8"], fp8=True)
    scales = scales_of(form, ask, names.scales, shape[:-1])
    return Codes(8, codes, scales, None, group_of(columns, scales.shape[-1]), fp8=True)


def _fp8_group(form: StoredForm, names: TensorNames, columns: int, block: tuple[int, int] | None) -> int:
    if block is not None:
        return block[1]
    return _GROUPS["mxfp8"] if form.dtype_of(names.scales) in POWERS else columns_of_group(form, names.scales, columns)


def columns_of_group(form: StoredForm, scales: str, columns: int) -> int:
    """Return the columns of a group by the stored scales; 0 for rows that are one group."""
    stored = form.tensors.get(scales)
    groups = stored.shape[-1] if stored is not None and len(stored.shape) >= 2 else 1
    return 0 if groups <= 1 else columns // groups


def scales_of(form: StoredForm, ask: Ask, name: str, rows: tuple[int, ...]) -> torch.Tensor:
    """Return float32 [*rows, groups], scales of the matrix, of rows or of groups. ``rows``: with experts before them,
    for a stack.
    """
    stored = _scale_shape(form, name, rows)
    return _by_row(ask(name, stored, FLOATS).float(), stored, rows)


def read_int8(form: StoredForm, ask: Ask, codes: str, scales: str, zeros: str, shape: tuple[int, ...]) -> Codes:
    """Read int8 codes. ``codes``, ``scales``, ``zeros``: the tensors of one matrix; the last may be missing."""
    *rows, columns = shape
    of_groups, zero_points = scales_of(form, ask, scales, tuple(rows)), None
    if zeros in form.tensors:
        stored = _scale_shape(form, scales, tuple(rows))
        zero_points = _by_row(_unsigned(ask(zeros, stored, ("I8",))), stored, tuple(rows))
    return Codes(
        8, _unsigned(ask(codes, shape, ("I8",))), of_groups, zero_points, group_of(columns, of_groups.shape[-1])
    )


def _by_row(numbers: torch.Tensor, stored: tuple[int, ...], rows: tuple[int, ...]) -> torch.Tensor:
    groups = stored[-1] if len(stored) > len(rows) else 1
    return numbers.reshape(*rows[:-1], -1, groups).expand(*rows, groups)


def _unsigned(codes: torch.Tensor) -> torch.Tensor:
    # Codes here are unsigned: the kernels' zero point is 128.
    return (codes.to(torch.int16) + ZERO_POINT[8]).to(torch.uint8)


def _scale_shape(form: StoredForm, name: str, rows: tuple[int, ...]) -> tuple[int, ...]:
    """Return the stored shape, if it is one that scales may have; else the shape by rows, which the error names."""
    stored, stack = form.tensors.get(name), rows[:-1]
    if stored is not None and (
        stored.shape in (stack, (*stack, 1), (*stack, 1, 1), rows)
        or (len(stored.shape) == len(rows) + 1 and stored.shape[:-1] == rows)
    ):
        return stored.shape
    return *rows, 1


def group_of(columns: int, groups: int) -> int:
    """Return the columns of a group; a row that is one group is padded to complete lines."""
    return columns // groups if groups > 1 else -(-columns // LINE) * LINE


def _powers(ask: Ask, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    exponents = ask(name, shape, POWERS).view(torch.uint8)
    if not exponents.is_meta and bool((exponents == 255).any()):
        raise CheckpointError(f"tensor {name} has scales of code 255, which is not a number", param="model")
    return exponents.view(torch.float8_e8m0fnu)


def _global_scale(form: StoredForm, ask: Ask, name: str, of_groups: tuple[int, ...]) -> torch.Tensor:
    """Return the one scale, for each matrix of a stack, to be multiplied with [..., rows, groups]."""
    stack, stored = of_groups[:-2], form.tensors.get(name)
    shape = stored.shape if stored is not None and stored.shape in ((*stack, 1), (*stack, 1, 1)) else stack
    return ask(name, shape, ("F32",)).reshape(*stack, 1, 1)


def _finite(name: str, scales: torch.Tensor) -> torch.Tensor:
    if not scales.is_meta and not bool(scales.isfinite().all()):
        raise CheckpointError(f"tensor {name} makes scales that are not finite numbers", param="model")
    return scales


class _Named(StoredForm):
    """Form of matrices that a checkpoint names ``x.weight``, with ``x.weight_scale``."""

    method = ""
    kinds: tuple[Kind, ...] = ()
    """Kinds that config.json names."""
    global_ending = ""  # of the name of the scale of scales, after the name of the matrix

    def holds(self, name: str) -> bool:
        return name.endswith("weight") and self.dtype_of(name) in ("U8", "F8_E4M3")

    def grouping(self, name: str, columns: int) -> Grouping | None:
        return grouping_of(self, self._names(name), columns, self._block(name))

    def piece(self, name: str) -> MatrixPiece | None:
        return piece_of(self, name, ("_scale", ""), self._block(name.removesuffix("_scale")))

    def read(self, ask: Ask, name: str, shape: tuple[int, ...]) -> Codes | torch.Tensor:
        names, kind = self._names(name), kind_of(self, self._names(name))
        if names.scales in self.tensors and kind not in self.kinds:
            raise CheckpointError(
                f"{name} is stored as {kind}; quantization_config of config.json "
                f"({self.method}) names {', '.join(self.kinds)}",
                param="model",
            )
        return read_matrix(self, ask, names, shape, self._block(name))

    def _names(self, name: str) -> TensorNames:
        return TensorNames(name, f"{name}_scale", f"{name}{self.global_ending}" if self.global_ending else "")

    def _block(self, name: str) -> tuple[int, int] | None:
        return None


class Modelopt(_Named):
    """modelopt's forms: ``quant_algo`` of config.json, or of the separate hf_quant_config.json
    (``checkpoint_files``).
    """

    left_ends = ("input_scale", "k_scale", "v_scale", "output_scale", "weight_scale_2")
    method, global_ending = "modelopt", "_scale_2"
    served: dict[str, tuple[Kind, ...]] = {
        "FP8": ("fp8",),
        "FP8_PER_CHANNEL_PER_TOKEN": ("fp8",),
        "FP8_PB_WO": ("fp8",),
        "NVFP4": ("nvfp4",),
        "W4A16_NVFP4": ("nvfp4",),
        "W4A8_NVFP4_FP8": ("nvfp4",),
        "MXFP8": ("mxfp8",),
        "MXFP4": ("mxfp4",),
        "W4A8_MXFP4_FP8": ("mxfp4",),
    }

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        algorithm = str(settings.get("quant_algo"))
        layers = mappings(self.method, "quantized_layers", settings.get("quantized_layers"))
        mixed = {str(layer.get("quant_algo")) for layer in layers.values()}
        names = (mixed or set(self.served)) if algorithm == "MIXED_PRECISION" else {algorithm}
        self.named = {name.upper() for name in names}
        for name in sorted(names):
            if name.upper() not in self.served:
                refuse(self.method, "quant_algo", name, f"weft reads {', '.join(self.served)}")
        self.kinds = tuple(sorted({kind for name in self.named for kind in self.served[name]}))

    @property
    def rounds_inputs(self) -> bool:
        return "FP8_PB_WO" not in self.named  # weights only

    def read(self, ask: Ask, name: str, shape: tuple[int, ...]) -> Codes | torch.Tensor:
        scaled = f"{name.removesuffix('weight')}pre_quant_scale"
        if scaled in self.tensors:
            raise CheckpointError(
                f"tensor {scaled} scales inputs (AWQ of modelopt), which weft does not do", param="model"
            )
        return super().read(ask, name, shape)

    def _block(self, name: str) -> tuple[int, int] | None:
        """Return the block by the shapes: blocks are stored as [rows / 128, columns / 128], equal in rows and
        columns.
        """
        codes, scale = self.headers.get(name), self.headers.get(f"{name}_scale")
        if codes is None or scale is None or len(scale.shape) != 2 or len(codes.shape) != 2:
            return None
        size = number(self.method, "group_size", self.settings.get("group_size") or None, 128)
        rows, columns = codes.shape
        return (
            (size, size)
            if codes.dtype == "F8_E4M3"
            and scale.dtype in FLOATS
            and scale.shape == (-(-rows // size), -(-columns // size))
            and scale.shape[0] != rows
            else None
        )


class BlockFp8(_Named):
    """fp8 with a scale for a block, as in the FP8 releases of Qwen3-Next, Qwen3.5 and DeepSeek; also MXFP4, for experts
    of DeepSeek V4. The name of the scale says inverse, of the scale that made the codes; codes are multiplied with it.
    Source: transformers ``finegrained_fp8``.
    """

    left_ends = ("activation_scale", "input_scale")
    method, kinds = "fp8", ("fp8", "mxfp8", "mxfp4")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        size = settings.get("weight_block_size")
        if not (isinstance(size, list | tuple) and len(size) == 2 and all(isinstance(n, int) for n in size)):
            refuse("fp8", "weight_block_size", size, "weft reads blocks of two sizes, such as [128, 128]")
        self.block = (int(size[0]), int(size[1]))

    @property
    def rounds_inputs(self) -> bool:
        return self.settings.get("activation_scheme", "dynamic") is not None

    def holds(self, name: str) -> bool:
        return self.dtype_of(name) == "F8_E4M3" or kind_of(self, self._names(name)) == "mxfp4"

    def piece(self, name: str) -> MatrixPiece | None:
        matrix = name.removesuffix("_scale_inv")
        if kind_of(self, self._names(matrix)) == "mxfp4":
            return MatrixPiece(matrix, (-2, 1), (-1, 2 if name == matrix else _GROUPS["mxfp4"]))
        return piece_of(self, name, ("_scale_inv",), self.block, matrix_end="")

    def _names(self, name: str) -> TensorNames:
        return TensorNames(name, f"{name}_scale_inv")

    def _block(self, name: str) -> tuple[int, int]:
        return self.block


class Quark(_Named):
    """AMD's forms: fp8 by matrices or rows, MXFP4."""

    left_ends = ("input_scale", "output_scale", "weight_zero_point", "input_zero_point")
    method = "quark"
    served: dict[str, Kind] = {"fp8_e4m3": "fp8", "fp4": "mxfp4", "mxfp4": "mxfp4"}

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        of_all = mapping(self.method, "global_quant_config", settings.get("global_quant_config"))
        configs = [
            of_all,
            *(
                own
                for key in ("layer_quant_config", "layer_type_quant_config")
                for own in mappings(self.method, key, settings.get(key)).values()
            ),
        ]
        kinds: set[Kind] = set()
        self.weights_only = any(config.get("weight") and not config.get("input_tensors") for config in configs)
        for config in configs:
            weight = config.get("weight")
            for part in weight if isinstance(weight, list) else [weight]:
                dtype = str(mapping(self.method, "weight", part).get("dtype"))
                if part is None:
                    continue
                if dtype not in self.served:
                    refuse(
                        self.method, "global_quant_config.weight.dtype", dtype, f"weft reads {', '.join(self.served)}"
                    )
                kinds.add(self.served[dtype])
        self.kinds = tuple(sorted(kinds))

    @property
    def rounds_inputs(self) -> bool:
        return not self.weights_only


class Mxfp4(StoredForm):
    """gpt-oss's form: experts of one layer as one tensor of blocks and one of scales."""

    def holds(self, name: str) -> bool:
        return f"{name}_blocks" in self.tensors

    def grouping(self, name: str, columns: int) -> Grouping | None:
        return grouping_of(self, _blocks(name), columns)

    def piece(self, name: str) -> MatrixPiece | None:
        """Return the piece: a stack is cut by experts, each with its own blocks, and by rows of all."""
        for end in ("_blocks", "_scales"):
            if name.endswith(end):
                return MatrixPiece(name.removesuffix(end), (1, 1), (2, LINE))
        return None

    def read(self, ask: Ask, name: str, shape: tuple[int, ...]) -> Codes | torch.Tensor:
        return read_matrix(self, ask, _blocks(name), shape)


def _blocks(name: str) -> TensorNames:
    return TensorNames(f"{name}_blocks", f"{name}_scales", in_blocks=True)
