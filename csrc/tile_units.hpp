// Units of tiles in few bits: 8 columns of 16 rows, of two tiles in turn, and rows of x in blocks. For products of
// 12 bits (twelve_bit.hpp), of codes (coded_tiles.hpp), and for pieces of a matrix unit (matrix_pieces.hpp), which are
// three files of a table.
#pragma once

#include "tiles.hpp"

namespace weft {
namespace {

#if defined(__AVX512F__)
constexpr int kUnitPairs = 4;
constexpr int64_t kPairWords = 2 * kTile;
constexpr int64_t kUnitWords = kUnitPairs * kPairWords;
constexpr int64_t kUnitBytes = kUnitWords * 3 / 2;
constexpr int kUnitColumns = 2 * kUnitPairs;
constexpr int kTwelveBitTiles = 2;
constexpr int64_t kStepBytes = kTwelveBitTiles * kUnitBytes;  // from a unit to the next of its tile

// name(body) calls body(0), body(1), ... with constants. Sums with the index of a loop would be kept in memory.
#define WEFT_EACH(name, part)                                                      \
  template <class Body, int... I>                                                  \
  part inline void name##_of(const Body& body, std::integer_sequence<int, I...>) { \
    (body(std::integral_constant<int, I>{}), ...);                                 \
  }                                                                                \
  template <int COUNT, class Body>                                                 \
  part inline void name(const Body& body) {                                        \
    name##_of(body, std::make_integer_sequence<int, COUNT>{});                     \
  }
#define WEFT_WIDE_PART __attribute__((always_inline))
WEFT_EACH(each, WEFT_BF16_PART)
WEFT_EACH(each_wide, WEFT_WIDE_PART)

// Two pairs of columns, half a unit.
struct Half {
  __m512i pairs[2];
};

// HALF: 0 or 1. ``highs``: the tile's sixteen upper bytes, four times.
template <int HALF>
WEFT_INLINE Half unpacked(const uint8_t* unit, __m512i highs) {
  const __m512i codes = _mm512_loadu_si512(unit + 128), lows = _mm512_loadu_si512(unit + HALF * 64);
  const __m512i code = _mm512_and_si512(HALF ? _mm512_srli_epi16(codes, 4) : codes, _mm512_set1_epi8(15));
  const __m512i high = _mm512_shuffle_epi8(highs, code);
  return {{_mm512_unpacklo_epi8(lows, high), _mm512_unpackhi_epi8(lows, high)}};
}

// One tile of a 12-bit weight.
struct SqueezedTile {
  const uint8_t *units, *highs;
  const int64_t* odd;

  SqueezedTile(const Weight& weight, int64_t tile)
      : units(static_cast<const uint8_t*>(weight.data) + tile / 2 * (weight.in / kUnitColumns) * kStepBytes +
              tile % 2 * kUnitBytes),
        highs(static_cast<const uint8_t*>(weight.scales) + tile * 16),
        odd(weight.odd + weight.odd[tile]) {}

  WEFT_INLINE __m512i upper_bytes() const {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(highs)));
  }
};

// Unpacks a unit that has odd weights, from ``odd`` on -> words, and the next unit's. Out of line, so that this rare
// case sends no other unit through memory.
__attribute__((noinline, cold, unused)) const int64_t* unpack_odd(const SqueezedTile& tile, const int64_t* odd,
                                                                  int64_t unit, Half* halves) {
  halves[0] = unpacked<0>(tile.units + unit * kStepBytes, tile.upper_bytes());
  halves[1] = unpacked<1>(tile.units + unit * kStepBytes, tile.upper_bytes());
  uint16_t* const words = reinterpret_cast<uint16_t*>(halves);
  for (; *odd >> 16 < (unit + 1) * kUnitWords; ++odd) {
    const uint16_t bits = static_cast<uint16_t>(*odd);
    std::memcpy(words + ((*odd >> 16) - unit * kUnitWords), &bits, sizeof bits);
  }
  return odd;
}

// Rows [first, first + count) of ``args.x``, and where they are as a block: [in / 8][count][8].
template <class X>
struct Block {
  int64_t first, count;
  const X* x;
};

template <int ROWS>
WEFT_INLINE void store_twelve_bit(const LinearArgs& args, int64_t tile, int64_t first,
                                  const f32x16 (&sums)[ROWS][kTwelveBitTiles]) {
  const int64_t at = tile * kTile, all = args.weight.out;
  const TileOut<bf16> out = {static_cast<bf16*>(args.out) + first * all + at, all, all - at,
                             args.bias ? args.bias + at : nullptr};
  store_sums<bf16, ROWS, kTwelveBitTiles>(out, sums);
}

constexpr int64_t blocks_of(int64_t rows, int64_t most) { return (rows + most - 1) / most; }

// The rows of x in blocks of at most ``most``, copied to [rows][in] where there are several. ``each``: how jobs are done.
template <class X, class Each>
void set_blocks(const LinearArgs& args, int64_t most, Block<X>* blocks, X* copies, const Each& each) {
  const int64_t count = blocks_of(args.rows, most), in = args.weight.in;
  if (args.rows == 1) {
    blocks[0] = {0, 1, static_cast<const X*>(args.x)};
    return;
  }
  each(count, [&](int64_t i) {
    const int64_t first = args.rows * i / count, rows = args.rows * (i + 1) / count - first;
    X* to = copies + first * in;
    blocks[i] = {first, rows, to};
    for (int64_t column = 0; column < in; column += kUnitColumns)
      for (int64_t row = first; row < first + rows; ++row, to += kUnitColumns)
        std::memcpy(to, static_cast<const X*>(args.x) + row * args.x_stride + column, kUnitColumns * sizeof(X));
  });
}

// Bytes that the body of an item takes for ``rows`` rows of x: the item unpacked, and the rows in blocks.
template <class X>
int64_t item_scratch(const Weight& weight, int64_t rows) {
  return scratch_bytes<Half>(kOutTiles * (weight.in / kUnitColumns) * 2) + scratch_bytes<Block<X>>(rows) +
         scratch_bytes<X>(rows * weight.in);
}

// ``set_blocks`` inside of a job. Returns the blocks.
template <class X>
const Block<X>* own_blocks(const LinearArgs& args, int64_t most, Scratch& scratch) {
  Block<X>* const blocks = scratch.take<Block<X>>(blocks_of(args.rows, most));
  X* const copies = args.rows == 1 ? nullptr : scratch.take<X>(args.rows * args.weight.in);
  set_blocks(args, most, blocks, copies, [](int64_t count, const auto& job) {
    for (int64_t i = 0; i < count; ++i) job(i);
  });
  return blocks;
}
#endif

}  // namespace
}  // namespace weft
