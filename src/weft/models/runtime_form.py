"""Form of a matrix in memory: plain, in an order that is fast to multiply with, int8 or int4.

                     --quantize none          int8           int4                          w8a8
    float matrices   tiled or plain           int8           int4                          w8a8
    experts          tiled or plain           int8           int4                          int8
    the head, steps  tiled or plain           int8           int8 (errors there cost most) w8a8
    of Mamba-1
    codes of files   as they are              as they are    as they are                   int8 ones: w8a8
    fp8 of files     as it is, inputs too     int8           int4                          w8a8
                     on GPUs; see below
    nf4, fp4         as they are on CPUs      int8           int4                          w8a8

Inputs of matrices in fp8 are rounded to fp8 where torch multiplies fp8 by blocks (``device.multiplies_fp8``). They are
not if ``debug.quantize_inputs`` is off, if the checkpoint says that only weights are rounded
(``StoredForm.rounds_inputs``), and in experts.

CPUs keep fp8, nf4 and fp4 of bfloat16 models as codes where a kernel multiplies by them (``coded_tiles``);
elsewhere they are widened.

Never rounded: embeddings, norms, convolutions, routers and gates of one row, and everything that a family reads with
``TensorSource.tensor``. A head tied to the embedding is rounded as a copy: every step reads all of the head and few
rows of the embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.config import QuantizeChoice
from weft.tensor import native
from weft.tensor.ops.linear import Matrix
from weft.tensor.weights.quantized import Codes, in_tiles
from weft.tensor.weights.rounded import rounded
from weft.tensor.weights.tiles import InTiles, can_be_tiled, coded_tiles, has_float_table, in_best_tiles, tiled

_BITS: dict[QuantizeChoice, int] = {"int8": 8, "int4": 4, "w8a8": 8}


@dataclass(frozen=True, slots=True)
class RuntimeForm:
    """Form of a model's matrices. ``exact_inputs``: quantised layers read their inputs unrounded. ``packs``: whether
    plain matrices may be put into another order. ``twelve_bit``: whether tiles of bfloat16 may be kept in 12 bits a
    weight. ``on_gpu_kernels``: the Triton kernels will multiply. ``fp8_inputs``: inputs of matrices in fp8 are rounded
    to fp8. ``coded_tiles``: a CPU multiplies by codes of fp8, nf4 and fp4, and the model is in bfloat16.
    """

    quantize: QuantizeChoice = "none"
    exact_inputs: bool = False
    packs: bool = True
    twelve_bit: bool = True
    on_gpu_kernels: bool = False
    fp8_inputs: bool = False
    coded_tiles: bool = False

    @property
    def keeps_fp8(self) -> bool:
        """Return whether matrices that are stored in fp8 stay so."""
        return self.quantize == "none" and (self.on_gpu_kernels or self.coded_tiles)

    @property
    def keeps_float_tables(self) -> bool:
        """Return whether matrices in nf4 and fp4 stay so."""
        return self.quantize == "none" and self.coded_tiles

    def of_values(self, weight: torch.Tensor, *, finer: bool = False) -> Matrix:
        """Return the form of ``weight`` [out, in], which the caller gives away. ``finer``: in 8 bits where others are
        in 4.
        """
        bits = _BITS.get(self.quantize)
        if bits is not None:
            return self.rounded(weight, 8 if finer else bits)
        return (in_best_tiles(weight, twelve_bit=self.twelve_bit) if self.packs else None) or weight

    def of_exact(self, weight: torch.Tensor) -> Matrix:
        """Return the form of ``weight`` [out, in] with every bit: a router, a gate."""
        return (tiled(weight) if self.packs else None) or weight

    def of_table(self, table: torch.Tensor) -> Matrix:
        """Return the form of an embedding [vocab, hidden] that is also the head."""
        return self.of_values(table) if self.quantize == "none" else table

    def tiles_experts(self, device: torch.device, dtype: torch.dtype, columns: int) -> bool:
        """Return whether experts go into tiles, each by itself."""
        return self.quantize == "none" and self.packs and can_be_tiled(device, dtype, columns)

    def of_expert(self, weight: torch.Tensor, count: int) -> InTiles:
        """Return the form of one of ``count`` experts that go into tiles."""
        tiles = in_best_tiles(weight, twelve_bit=self.twelve_bit, copies=count)
        assert tiles is not None, "asked for tiles where they do not serve"
        return tiles

    @property
    def keeps_twelve_bits(self) -> bool:
        """Whether plain matrices of bfloat16 go into 12 bits a weight if possible."""
        return self.quantize == "none" and self.packs and self.twelve_bit

    def in_coded_tiles(self, codes: Codes) -> bool:
        """Return whether ``codes`` go into ``CodedTiles``, each matrix of a stack by itself."""
        return self.coded_tiles and (codes.fp8 or has_float_table(codes))

    def of_codes(self, codes: Codes, dtype: torch.dtype = torch.float32) -> Matrix:
        """Return the form of ``codes``; ``dtype``: of the rows of a table."""
        if self.in_coded_tiles(codes):
            return coded_tiles(codes) or self.of_values(codes.dense().to(torch.bfloat16))
        rounds = self.fp8_inputs if codes.fp8 else self.quantize == "w8a8"
        return in_tiles(codes, exact=self.exact_inputs, byte_inputs=rounds, dtype=dtype)

    def note(self) -> str | None:
        """Return a sentence for the user about this machine and the form."""
        if self.quantize != "w8a8" or (native.in_use() and native.extension().has_byte_products()):
            return None
        return (
            "--quantize w8a8: this machine does not multiply bytes (that takes the C++ kernels on a CPU with "
            "AVX512-VNNI), so products are computed in floats: the results are the same, but "
            "--quantize int8 is faster"
        )

    def rounded(self, weight: torch.Tensor, bits: int | None = None) -> Matrix:
        """Return ``weight`` [..., out, in] in ``bits``, by default those of ``--quantize``."""
        return self.of_codes(rounded(weight, bits or _BITS[self.quantize]))
