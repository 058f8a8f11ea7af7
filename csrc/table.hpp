// The kernels of one instruction set, WEFT_TABLE, in several files that compile in parallel:
//
//     table_attention.cpp     attention over pages
//     table_delta.cpp         the gated delta rule
//     table_mamba2.cpp        Mamba-2
//     table_channels.cpp      convolutions with a window, Mamba-1: layers with a state for each channel
//     table_products.cpp      matrix products of float tiles by vectors, and of all forms by a matrix unit; experts
//     table_twelve_bit.cpp    products of bfloat16 in 12 bits, by vectors
//     table_coded.cpp         those of fp8 and of tables of 4 bits, by vectors
//     table_codes.cpp         those of plain rows and of int8, int6 and int4, by vectors
//     table_adapters.cpp      products of adapters
//     table_rows.cpp          norms and the small operations between
//     table.cpp               the table itself
//
// Each includes its kernels as headers, whose code is local to it: no code of one set can be linked into another.
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

#define WEFT_KERNEL(name, Args) void name(const Args& args);
#define WEFT_ABILITY(name) bool name();
WEFT_EACH_KERNEL(WEFT_KERNEL)
WEFT_EACH_ABILITY(WEFT_ABILITY)
#undef WEFT_KERNEL
#undef WEFT_ABILITY
void attention_dots(const AttentionArgs& args);  // where WEFT_DOT_TABLE
void linear_codes(const LinearArgs& args);       // parts of linear
void linear_twelve_bit(const LinearArgs& args);  //   where has_twelve_bit_products
void linear_coded(const LinearArgs& args);       //   where has_coded_tiles
void moe_codes(const MoeArgs& args);             // part of moe

// bfloat16 tiles of an item, by one thread: those from ``tile`` on times rows [first, last) of x, and tiles [tile, end)
// times all rows. ``wide``: x is float32 and not bfloat16. ``next``: the tiles that this thread takes next, or null.
void item_of_tiles(const LinearArgs& args, int64_t tile, int64_t first, int64_t last, const char* next, bool wide);
void item_twelve_bit(const LinearArgs& args, int64_t tile, int64_t end, bool wide);
void item_coded(const LinearArgs& args, int64_t tile, int64_t end, bool wide);

// Units [unit, end) of one coded tile -> ``to``, as they are in tiles.hpp.
void unpack_coded(const Weight& weight, int64_t tile, int64_t unit, int64_t end, uint16_t* to);

}  // namespace weft::tables::WEFT_TABLE

// Inside that namespace: its ``name`` is the kernel that a header has under this name.
#define WEFT_GIVES(name, Args) \
  void name(const Args& args) { weft::name(args); }
