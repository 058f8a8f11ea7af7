// Tiles of bfloat16 packed into 12 bits a weight, and unpacked again. twelve_bit.hpp multiplies them.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kernels.hpp"

namespace weft {

// A matrix of bfloat16 comes as the addresses of its rows, 16 for each tile, which may lie in a mapped file. Null: a row
// of zeros, which fills the last tile.

// The odd words of each tile: place in the tile << 16 | bits, ordered by place.
class OddWords {
 public:
  explicit OddWords(int64_t tiles) : of_tile_(static_cast<size_t>(tiles)) {}

  std::vector<int64_t>& of(int64_t tile) { return of_tile_[static_cast<size_t>(tile)]; }
  // Writes for each tile the index in ``out`` of the tile's first word, and then the words of each tile and an end word.
  void write(int64_t* out) const;
  // The number of int64 that ``write`` writes.
  int64_t size() const;

 private:
  std::vector<std::vector<int64_t>> of_tile_;
};

// Packs each tile while it is in a core's own cache: ``highs`` [tiles][16], its sixteen most frequent upper bytes, and
// ``units`` [tiles / 2][in / 8][2][192], of an even number of ``tiles``. None: more than ``odd_most`` words are odd,
// or ``finite`` is asked for and a word is NaN or infinite; the units are unfinished then.
std::optional<OddWords> pack_twelve_bit(const uint16_t* const* rows, int64_t tiles, int64_t in, int64_t odd_most,
                                        bool finite, uint8_t* highs, uint8_t* units);

// Plain tiles [tiles][in / 2][16][2], of an even ``in``.
void pack_tiles(const uint16_t* const* rows, int64_t tiles, int64_t in, uint16_t* out);

// ``rows`` [count] of a weight -> out [count][in]: of dense rows, of tiles, and of tiles in 12 bits.
void table_rows(const Weight& weight, const int64_t* rows, int64_t count, void* out);

}  // namespace weft
