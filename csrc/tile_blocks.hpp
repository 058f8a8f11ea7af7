// Blocks of tile products (matrix_unit.hpp) over ``Tiles``: eight tiles, their loads, stores and products.
//
//     tiles 0-3   sums     0 = x0 w0   1 = x0 w1   2 = x1 w0   3 = x1 w1
//     tiles 4, 5  of x
//     tiles 6, 7  of W
//
// A step loads up to four tiles for up to four products. Sums stay in tiles for all steps of a block. Tiles of x pass by:
// they must not push those of W out of the L1 cache, which are there for the next rows. A tile is loaded for the next step
// as soon as its last product was issued, and each sum is stored after its last product (0.95 of the time of a step that
// begins with its loads: 512 rows, 1024 columns). Meanwhile lines of the next chunk of W are fetched into the L2 cache,
// a few at each step, and vectors do a part of other work (decision 0045 has the times).
#pragma once

#include "matrix_unit.hpp"

namespace weft {
namespace {

template <class Tiles, int X, int W>
void half_block(const HalfBlock& block) {
  constexpr int64_t kNumbers = kTileBytes / 2;
  float* const sums = block.sums;
  const uint16_t *x = block.x, *w = block.w;
  const char* ahead = block.ahead.data;
  const int64_t lines = (block.ahead.lines + block.steps - 1) / block.steps;  // a step
  Tiles::template load_passing<4>(x);
  Tiles::template load<6>(w);
  if constexpr (W == 2) Tiles::template load<7>(w + block.w_stride);
  if constexpr (X == 2) Tiles::template load_passing<5>(x + block.x_stride);
  if (block.first) {
    Tiles::template zero<0>();
    if constexpr (W == 2) Tiles::template zero<1>();
    if constexpr (X == 2) Tiles::template zero<2>();
    if constexpr (X == 2 && W == 2) Tiles::template zero<3>();
  } else {
    Tiles::template load<0>(sums);
    if constexpr (W == 2) Tiles::template load<1>(sums + kSumNumbers);
    if constexpr (X == 2) Tiles::template load<2>(sums + W * kSumNumbers);
    if constexpr (X == 2 && W == 2) Tiles::template load<3>(sums + 3 * kSumNumbers);
  }
  const Between between = block.between;
  for (int64_t step = 1; step < block.steps; ++step) {
    x += kNumbers;
    w += kNumbers;
    Tiles::template dot_halves<0, 4, 6>();
    if constexpr (W == 2) Tiles::template dot_halves<1, 4, 7>();
    Tiles::template load_passing<4>(x);
    if constexpr (X == 2) Tiles::template dot_halves<2, 5, 6>();
    Tiles::template load<6>(w);
    if constexpr (X == 2 && W == 2) Tiles::template dot_halves<3, 5, 7>();
    if constexpr (X == 2) Tiles::template load_passing<5>(x + block.x_stride);
    if constexpr (W == 2) Tiles::template load<7>(w + block.w_stride);
    for (const char* const end = ahead + lines * 64; ahead < end; ahead += 64) Tiles::fetch(ahead);
    if (between.work) between.work(between.of, step - 1);
  }
  if (between.work) between.work(between.of, block.steps - 1);
  Tiles::template dot_halves<0, 4, 6>();
  Tiles::template store<0>(sums);
  if constexpr (W == 2) Tiles::template dot_halves<1, 4, 7>();
  if constexpr (W == 2) Tiles::template store<1>(sums + kSumNumbers);
  if constexpr (X == 2) Tiles::template dot_halves<2, 5, 6>();
  if constexpr (X == 2) Tiles::template store<2>(sums + W * kSumNumbers);
  if constexpr (X == 2 && W == 2) Tiles::template dot_halves<3, 5, 7>();
  if constexpr (X == 2 && W == 2) Tiles::template store<3>(sums + 3 * kSumNumbers);
}

template <class Tiles, int X, int W>
void byte_block(const ByteBlock& block) {
  Tiles::template zero<0>();
  if constexpr (W == 2) Tiles::template zero<1>();
  if constexpr (X == 2) Tiles::template zero<2>();
  if constexpr (X == 2 && W == 2) Tiles::template zero<3>();
  for (int64_t step = 0; step < block.steps; ++step) {
    const int8_t *const x = block.x + step * kTileBytes, *const w = block.w + step * kTileBytes;
    Tiles::template load_passing<4>(x);
    Tiles::template load<6>(w);
    if constexpr (W == 2) Tiles::template load<7>(w + block.w_stride);
    if constexpr (X == 2) Tiles::template load_passing<5>(x + block.x_stride);
    Tiles::template dot_bytes<0, 4, 6>();
    if constexpr (W == 2) Tiles::template dot_bytes<1, 4, 7>();
    if constexpr (X == 2) Tiles::template dot_bytes<2, 5, 6>();
    if constexpr (X == 2 && W == 2) Tiles::template dot_bytes<3, 5, 7>();
  }
  int32_t* const sums = block.sums;
  Tiles::template store<0>(sums);
  if constexpr (W == 2) Tiles::template store<1>(sums + kSumNumbers);
  if constexpr (X == 2) Tiles::template store<2>(sums + W * kSumNumbers);
  if constexpr (X == 2 && W == 2) Tiles::template store<3>(sums + 3 * kSumNumbers);
}

// Attention has other shapes: tiles 0-3 sums of the rows of q, 4 q, 5 weights of a page (32 bytes), 6 a page's keys, 7 its
// values (8 rows). A page has 16 tokens, so half of the unit's columns meet values.
template <class Tiles>
void score_block(const ScoreBlock& block) {
  Tiles::template zero<0>();
  Tiles::template zero<1>();
  Tiles::template zero<2>();
  Tiles::template zero<3>();
  const auto dot = [&]<int PAGE>(int64_t step) {
    if (PAGE >= block.pages || !block.keys[PAGE]) return;
    Tiles::template load<6>(block.keys[PAGE] + step * (kTileBytes / 2));
    Tiles::template dot_halves<PAGE, 4, 6>();
  };
  for (int64_t step = 0; step < block.dim / 32; ++step) {
    Tiles::template load<4>(static_cast<const char*>(block.q) + step * 64, block.row_bytes);
    dot.template operator()<0>(step);
    dot.template operator()<1>(step);
    dot.template operator()<2>(step);
    dot.template operator()<3>(step);
  }
  const auto store = [&]<int PAGE>() {
    if (PAGE < block.pages && block.keys[PAGE]) Tiles::template store<PAGE>(block.scores + PAGE * kSumNumbers);
  };
  store.template operator()<0>();
  store.template operator()<1>();
  store.template operator()<2>();
  store.template operator()<3>();
}

// LINES times 16 channels from ``channel`` on.
template <class Tiles, int LINES>
void add_values(const ValueBlock& block, int64_t channel) {
  const int64_t acc_bytes = block.dim * 4;
  float* const acc = block.acc + channel;
  Tiles::template load<0>(acc, acc_bytes);
  Tiles::template load<1>(acc + 16, acc_bytes);
  if constexpr (LINES == 4) Tiles::template load<2>(acc + 32, acc_bytes);
  if constexpr (LINES == 4) Tiles::template load<3>(acc + 48, acc_bytes);
  for (int64_t page = 0; page < block.pages; ++page) {
    if (!block.values[page]) continue;
    const uint16_t* const v = block.values[page] + channel * 2;
    Tiles::template load<5>(block.weights + page * kTileSide, kPagesOfBlock * kTileSide * 2);
    Tiles::template load<7>(v, acc_bytes);  // 4 bytes for a channel of two tokens too
    Tiles::template dot_halves<0, 5, 7>();
    Tiles::template load<7>(v + 32, acc_bytes);
    Tiles::template dot_halves<1, 5, 7>();
    if constexpr (LINES == 4) {
      Tiles::template load<7>(v + 64, acc_bytes);
      Tiles::template dot_halves<2, 5, 7>();
      Tiles::template load<7>(v + 96, acc_bytes);
      Tiles::template dot_halves<3, 5, 7>();
    }
  }
  Tiles::template store<0>(acc, acc_bytes);
  Tiles::template store<1>(acc + 16, acc_bytes);
  if constexpr (LINES == 4) Tiles::template store<2>(acc + 32, acc_bytes);
  if constexpr (LINES == 4) Tiles::template store<3>(acc + 48, acc_bytes);
}

template <class Tiles>
void value_block(const ValueBlock& block) {
  int64_t channel = 0;
  for (; channel + 64 <= block.dim; channel += 64) add_values<Tiles, 4>(block, channel);
  if (channel < block.dim) add_values<Tiles, 2>(block, channel);
}

template <class Tiles>
void half_blocks(const HalfBlock& block) {
  if (block.x_tiles == 2) return block.w_tiles == 2 ? half_block<Tiles, 2, 2>(block) : half_block<Tiles, 2, 1>(block);
  return block.w_tiles == 2 ? half_block<Tiles, 1, 2>(block) : half_block<Tiles, 1, 1>(block);
}

template <class Tiles>
void byte_blocks(const ByteBlock& block) {
  if (block.x_tiles == 2) return block.w_tiles == 2 ? byte_block<Tiles, 2, 2>(block) : byte_block<Tiles, 2, 1>(block);
  return block.w_tiles == 2 ? byte_block<Tiles, 1, 2>(block) : byte_block<Tiles, 1, 1>(block);
}

template <class Tiles>
constexpr TileKernels kTileKernels = {&Tiles::begin,       &Tiles::begin_rows,  &Tiles::end,        &half_blocks<Tiles>,
                                      &byte_blocks<Tiles>, &score_block<Tiles>, &value_block<Tiles>};

}  // namespace
}  // namespace weft
