// The kernels of one instruction set, WEFT_TABLE, in several files that compile side by side:
//
//     table_attention.cpp     attention over pages
//     table_delta.cpp         the gated delta rule
//     table_mamba2.cpp        Mamba-2
//     table_channels.cpp      convolutions with a window, Mamba-1: what has a state for each channel
//     table_products.cpp      matrix products of tiles, by vectors and by a matrix unit; experts
//     table_codes.cpp         those of plain rows and of int8, int6 and int4, by vectors
//     table_adapters.cpp      products of adapters
//     table_rows.cpp          norms and the small things between
//     table.cpp               the table itself
//
// Each includes its kernels as .inl files, whose code is local to it: no code of one set can be linked into another.
// Instances of the standard library's templates are not local, and the linker takes the first of several. So the
// portable files come first (CMakeLists.txt).
#pragma once

#include <array>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels.hpp"
#include "simd.hpp"

namespace weft::tables::WEFT_TABLE {

void attention(const AttentionArgs& args);
void attention_dots(const AttentionArgs& args);  // where WEFT_DOT_TABLE
void gated_delta(const GatedDeltaArgs& args);
void mamba2(const Mamba2Args& args);
void mamba1(const Mamba1Args& args);
void conv(const ConvArgs& args);
void norm(const NormArgs& args);
void rotary(const RotaryArgs& args);
void write_kv(const WriteKvArgs& args);
void silu_mul(const SiluMulArgs& args);
void sigmoid_gate(const GateArgs& args);
void gelu_tanh(const GeluArgs& args);
void softmax(const SoftmaxArgs& args);
void linear(const LinearArgs& args);
void linear_codes(const LinearArgs& args);  // part of linear
void widen_weight(const WidenArgs& args);
bool has_byte_products();
bool has_twelve_bit_products();
bool has_coded_tiles();
void moe(const MoeArgs& args);
void moe_codes(const MoeArgs& args);  // part of moe
void adapt(const AdaptArgs& args);

}  // namespace weft::tables::WEFT_TABLE

// Inside that namespace: its ``name`` is the kernel that an .inl file has under this name.
#define WEFT_GIVES(name, Args) \
  void name(const Args& args) { weft::name(args); }
