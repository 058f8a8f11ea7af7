// Tiles of bfloat16 packed into 12 bits a weight, and unpacked again. twelve_bit.inl multiplies them.
#pragma once

#include <cstdint>

#include "kernels.hpp"

namespace weft {

// ``words`` [tiles][in / 2][16][2]: the sixteen most frequent upper bytes of each tile -> highs [tiles][16], and the number
// of words with none of them -> counts [tiles].
void choose_highs(const uint16_t* words, int64_t tiles, int64_t in, uint8_t* highs, int64_t* counts);

// ``units`` [tiles / 2][in / 8][2][192], of an even number of ``tiles``. ``odd``: for each tile the index in this array where
// its odd words begin, then room for those words and one that ends them.
void pack_twelve_bit(const uint16_t* words, int64_t tiles, int64_t in, const uint8_t* highs, uint8_t* units, int64_t* odd);

// ``rows`` [count] of a 12-bit weight -> out [count][in].
void twelve_bit_rows(const Weight& weight, const int64_t* rows, int64_t count, uint16_t* out);

}  // namespace weft
