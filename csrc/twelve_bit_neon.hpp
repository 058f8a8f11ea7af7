// 12-bit tiles (twelve_bit.hpp) by vectors of 16 bytes, for Arm. A tile is unpacked into the L1 cache and multiplied there.
//
//     16 bytes of codes      a lookup of 16 bytes gives the upper bytes of 32 weights, as vqtbl1q_u8 does
//     with 32 lower bytes    interleaved: 64 bytes of plain tile (two pairs of columns of four rows, twice)
//     odd weights            written over, by place
//
//     item    4 tiles, one after the other, for a part of the rows of x that stays in the L2 cache
//
// A tile of 1,024 columns is 32 KB. Products are those of tiles.hpp over it, so they have the bits of plain tiles.
//
// Rejected: unpacking in registers, as AVX-512 does. Four registers of 16 bytes hold a line, and 24 hold sums.
#pragma once

#include "twelve_bit.hpp"

namespace weft {
namespace {

#if defined(__aarch64__)
constexpr int64_t kUnitColumns = 8, kPairWords = 2 * kTile, kUnitWords = kUnitColumns / 2 * kPairWords;
constexpr int64_t kUnitBytes = kUnitWords * 3 / 2, kStepBytes = 2 * kUnitBytes;  // units of two tiles take turns
constexpr int64_t kUnitsAhead = 4096;  // bytes ahead that are prefetched into the L2 cache

// One tile -> [in / 2][16][2].
void unpack_tile(const Weight& weight, int64_t tile, uint16_t* to) {
  const int64_t units = weight.in / kUnitColumns;
  const uint8_t* from =
      static_cast<const uint8_t*>(weight.data) + tile / 2 * units * kStepBytes + tile % 2 * kUnitBytes;
  const uint8x16_t highs = vld1q_u8(static_cast<const uint8_t*>(weight.scales) + tile * 16);
  uint8_t* bytes = reinterpret_cast<uint8_t*>(to);
  for (int64_t unit = 0; unit < units; ++unit, from += kStepBytes, bytes += kUnitWords * 2) {
    for (int line = 0; line < 3; ++line) __builtin_prefetch(from + kUnitsAhead + line * 64, 0, 2);
    for (int rows = 0; rows < 4; ++rows) {  // four of them
      const uint8x16_t codes = vld1q_u8(from + 128 + rows * 16);
      for (int half = 0; half < 2; ++half) {
        const uint8x16_t code = half ? vshrq_n_u8(codes, 4) : vandq_u8(codes, vdupq_n_u8(15));
        const uint8x16_t high = vqtbl1q_u8(highs, code), low = vld1q_u8(from + half * 64 + rows * 16);
        uint8_t* const pairs = bytes + half * 128 + rows * 16;
        vst1q_u8(pairs, vzip1q_u8(low, high));
        vst1q_u8(pairs + 64, vzip2q_u8(low, high));
      }
    }
  }
  const int64_t words = weight.in * kTile;
  for (const int64_t* odd = weight.odd + weight.odd[tile]; *odd >> 16 < words; ++odd)
    to[*odd >> 16] = static_cast<uint16_t>(*odd);
}

// Tiles [tile, end) times rows [first, last) of x, by one thread.
template <class X>
void squeezed_tiles(const LinearArgs& args, int64_t tile, int64_t end, int64_t first, int64_t last) {
  static thread_local std::vector<f32x16> room;
  const size_t lines = static_cast<size_t>(args.weight.in * kTile * 2 + 63) / 64;
  if (room.size() < lines) room.resize(lines);
  uint16_t* const words = reinterpret_cast<uint16_t*>(room.data());
  const int64_t blocks = (last - first + kTileRows - 1) / kTileRows;
  for (; tile < end; ++tile) {
    unpack_tile(args.weight, tile, words);
    for (int64_t block = 0, row = first; block < blocks; ++block) {
      const int64_t stop = first + (last - first) * (block + 1) / blocks;
      tile_rows_at<bf16, X, 1, 0>(args, reinterpret_cast<const bf16*>(words), tile, row, static_cast<int>(stop - row),
                                  nullptr);
      row = stop;
    }
  }
}

template <class X>
void twelve_bit_products_of(const LinearArgs& args) {
  const int64_t tiles = (args.weight.out + kTile - 1) / kTile, items = (tiles + kOutTiles - 1) / kOutTiles;
  const int64_t x_bytes = args.weight.in * static_cast<int64_t>(sizeof(X));
  const int64_t parts = (args.rows * x_bytes + tuning.unpacked_part_bytes - 1) / tuning.unpacked_part_bytes;
  const double words = static_cast<double>(kOutRows * args.weight.in);
  // Some 20 GB of weights, or 200 billion products, in a second.
  const double nanoseconds = words * (0.075 + 0.005 * static_cast<double>(args.rows) / static_cast<double>(parts));
  Pool::instance().for_each(items * parts, nanoseconds, [&](int64_t at) {
    const int64_t tile = at % items * kOutTiles, part = at / items;
    squeezed_tiles<X>(args, tile, tile + kOutTiles < tiles ? tile + kOutTiles : tiles, args.rows * part / parts,
                      args.rows * (part + 1) / parts);
  });
}

// Tiles [tile, end) of an item times all rows of x, by one thread.
template <class X>
void twelve_bit_tiles(const LinearArgs& args, int64_t tile, int64_t end) {
  squeezed_tiles<X>(args, tile, end, 0, args.rows);
}

void twelve_bit_products(const LinearArgs& args) {
  if (has_bf16_dot()) return twelve_bit_products_of<bf16>(args);
  with_widened_rows(args, twelve_bit_products_of<float>);
}
#endif

}  // namespace
}  // namespace weft
