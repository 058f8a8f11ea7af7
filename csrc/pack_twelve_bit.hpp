// Tiles of bfloat16 packed into 12 bits a weight, and unpacked again. twelve_bit.inl multiplies them.
#pragma once

#include <cstdint>

#include "kernels.hpp"

namespace weft {

// A matrix of bfloat16 comes as the addresses of its rows, 16 for each tile, which may lie in a mapped file. Null: a row
// of zeros, which fills the last tile.

// Of each tile: highs [tiles][16], its sixteen most frequent upper bytes; counts [tiles], the words with none of them;
// nonfinite [tiles], the NaN and infinite words.
void choose_highs(const uint16_t* const* rows, int64_t tiles, int64_t in, uint8_t* highs, int64_t* counts,
                  int64_t* nonfinite);

// ``units`` [tiles / 2][in / 8][2][192], of an even number of ``tiles``. ``odd``: for each tile the index in this array where
// its odd words begin, then room for those words and one that ends them.
void pack_twelve_bit(const uint16_t* const* rows, int64_t tiles, int64_t in, const uint8_t* highs, uint8_t* units,
                     int64_t* odd);

// Plain tiles [tiles][in / 2][16][2], of an even ``in``.
void pack_tiles(const uint16_t* const* rows, int64_t tiles, int64_t in, uint16_t* out);

// ``rows`` [count] of a 12-bit weight -> out [count][in].
void twelve_bit_rows(const Weight& weight, const int64_t* rows, int64_t count, uint16_t* out);

}  // namespace weft
