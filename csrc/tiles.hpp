// Matrix products y = x W^T of float weights in tiles, on every CPU. bfloat16 has two kernels: products of pairs
// (AVX512-BF16, FEAT_BF16 of Arm), or, elsewhere, weights widened to float32 in registers and rows of x widened before.
//
//     tile   column 0 of 16 rows | column 1 of 16 rows | ...       64 bytes each, one stream from memory
//            (bfloat16: columns 0-1, columns 2-3, ...)
//     item   64 rows of W: four tiles
//     block  6 rows of x times 4 tiles: 24 sums in registers for the full width of W     (AVX2, NEON: 6 rows, 1 tile)
//
//     part   the rows of x that stay in the L2 cache (96 at 1,024 columns of bfloat16); a prompt has several
//
//     per 64 bytes of a tile     4 vectors of W loaded, 6 numbers of x spread over the lanes, 24 products added
//                                and in the first blocks, 64 or 128 bytes of the thread's next item prefetched
//                                (widened bfloat16: the first of each pair, 24 products, the second, 24 products)
//
// A lane is a row of W: nothing is added across. Each sum adds column after column in one accumulator, so a row of x
// gives the same bits in any batch. The four tiles (128 KB at 1,024 columns of bfloat16) stay in the L2 cache for all
// blocks of a part. The part's rows stay there for all tiles. 32 rows and prompts alike run at some 95 % of the
// products of a core, and a single row at the speed of memory.
//
// Memory and arithmetic overlap only because a thread knows its next item (Pool::for_each_ahead) and prefetches it.
// Otherwise the first block of an item waits for memory while the other blocks leave memory idle. 32 rows then take
// the sum of both times. The hardware's prefetcher follows the tiles within an item, not into the next.
//
// Widened bfloat16 and products of pairs round differently. A CPU has one of them for all its rows, so bits do not depend
// on the batch.
//
// Rejected: cutting the columns into parts that fit the L1 cache (sums would go through memory; nothing gained up
// to 12,288 columns); blocks of 8 rows and 3 tiles (as fast, and 64 rows are not a multiple of them); all rows of a
// prompt for one item (x then comes out of the L3 cache, which is shared).
#pragma once

#include "linear_inputs.hpp"

namespace weft {
namespace {

#if defined(__AVX512F__)
constexpr int kTogether = 4;
#else
constexpr int kTogether = 1;
#endif
#if defined(__AVX512F__) || defined(__AVX2__) || defined(__aarch64__)
constexpr int kTileRows = 6;
#else
constexpr int kTileRows = 2;
#endif

constexpr int64_t kLeastBlocks = 8;  // of a part: prefetches stay below the bandwidth of memory

// Prefetches LINES lines of 64 bytes: those for column ``step`` (bfloat16: pair of columns) of a block.
template <int LINES>
WEFT_INLINE void fetch_ahead(const char* from, int64_t step) {
  for (int line = 0; line < LINES; ++line) __builtin_prefetch(from + (step * LINES + line) * 64, 0, 2);
}

// Destination of the sums of a block: ROWS rows from ``row`` on, and their columns from ``tile`` on.
template <class T>
struct TileOut {
  T* to;
  int64_t stride, count;  // columns that there are, from ``to`` on
  const float* bias;      // of those columns, or null
  WEFT_INLINE T* row(int64_t r) const { return to + r * stride; }
};

template <class T, int ROWS, int TILES>
WEFT_INLINE void store_sums(const TileOut<T>& out, const f32x16 (&sums)[ROWS][TILES]) {
  for (int t = 0; t < TILES; ++t) {
    const int64_t count = out.count - t * kTile;
    if (count <= 0) return;
    const f32x16 bias = out.bias ? load_some(out.bias + t * kTile, count) : splat(0);
    for (int r = 0; r < ROWS; ++r)
      store_some(out.to + r * out.stride + t * kTile, out.bias ? sums[r][t] + bias : sums[r][t], count);
  }
}

// ROWS rows of x times TILES tiles.
template <int ROWS, int TILES, int LINES, class Out>
WEFT_INLINE void tile_sums(const float* tiles, int64_t tile_stride, const float* x, int64_t x_stride, int64_t in,
                           const char* ahead, const Out& out) {
  f32x16 acc[ROWS][TILES] = {};
  for (int64_t i = 0; i < in; ++i) {
    f32x16 w[TILES];
    fetch_ahead<LINES>(ahead, i);
    for (int t = 0; t < TILES; ++t) w[t] = load(tiles + t * tile_stride + i * kTile);
    for (int r = 0; r < ROWS; ++r)
      for (int t = 0; t < TILES; ++t) acc[r][t] += w[t] * x[r * x_stride + i];
  }
  store_sums(out, acc);
}

// The first (0) or second (1) numbers of 16 pairs.
template <int WHICH>
WEFT_INLINE f32x16 widened(const bf16* pairs) {
  const u32x16 both = load_as<u32x16>(pairs);
  return WHICH ? (f32x16)(both & 0xFFFF0000u) : (f32x16)(both << 16);
}

template <int ROWS, int TILES, int LINES, class Out>
WEFT_INLINE void tile_sums(const bf16* tiles, int64_t tile_stride, const float* x, int64_t x_stride, int64_t in,
                           const char* ahead, const Out& out) {
  f32x16 acc[ROWS][TILES] = {};
  for (int64_t i = 0; i < in; i += 2) {
    f32x16 w[TILES];
    fetch_ahead<LINES>(ahead, i / 2);
    for (int t = 0; t < TILES; ++t) w[t] = widened<0>(tiles + t * tile_stride + i * kTile);
    for (int r = 0; r < ROWS; ++r)
      for (int t = 0; t < TILES; ++t) acc[r][t] += w[t] * x[r * x_stride + i];
    for (int t = 0; t < TILES; ++t) w[t] = widened<1>(tiles + t * tile_stride + i * kTile);
    for (int r = 0; r < ROWS; ++r)
      for (int t = 0; t < TILES; ++t) acc[r][t] += w[t] * x[r * x_stride + i + 1];
  }
  store_sums(out, acc);
}

constexpr int64_t kWidenedRows = 1024;  // at once: a thread's memory for them stays small

// product(args) with rows of x in float32, some at a time.
template <class Product>
void with_widened_rows(const LinearArgs& args, const Product& product) {
  static thread_local std::vector<float> room;
  const int64_t in = args.weight.in, most = args.rows < kWidenedRows ? args.rows : kWidenedRows;
  if (static_cast<int64_t>(room.size()) < most * in) room.resize(static_cast<size_t>(most * in));
  float* const to = room.data();
  for (int64_t first = 0; first < args.rows; first += most) {
    LinearArgs wide = args;
    wide.rows = args.rows - first < most ? args.rows - first : most;
    Pool::instance().for_each(wide.rows, 0.2 * static_cast<double>(in), [&](int64_t row) {
      const bf16* from = static_cast<const bf16*>(args.x) + (first + row) * args.x_stride;
      int64_t i = 0;
      for (; i + 16 <= in; i += 16) store(to + row * in + i, load(from + i));
      for (; i < in; ++i) to[row * in + i] = widen(from[i]);
    });
    wide.x = to;
    wide.x_stride = in;
    wide.out = static_cast<bf16*>(args.out) + first * args.weight.out;
    product(wide);
  }
}

#if defined(__AVX512F__)
template <int ROWS, int TILES, int LINES, class Out>
WEFT_BF16 void tile_sums(const bf16* tiles, int64_t tile_stride, const bf16* x, int64_t x_stride, int64_t in,
                         const char* ahead, const Out& out) {
  __m512 acc[ROWS][TILES] = {};
  for (int r = 0; r < ROWS; ++r)
    for (int t = 0; t < TILES; t += 2) __builtin_prefetch(out.row(r) + t * kTile, 1);
  for (int64_t pair = 0; pair < in / 2; ++pair) {
    __m512i w[TILES];
    fetch_ahead<LINES>(ahead, pair);
    for (int t = 0; t < TILES; ++t) w[t] = _mm512_loadu_si512(tiles + t * tile_stride + pair * 2 * kTile);
    for (int r = 0; r < ROWS; ++r) {
      int32_t two;
      std::memcpy(&two, x + r * x_stride + 2 * pair, sizeof two);
      const __m512i both = _mm512_set1_epi32(two);
      for (int t = 0; t < TILES; ++t) acc[r][t] = _mm512_dpbf16_ps(acc[r][t], (__m512bh)w[t], (__m512bh)both);
    }
  }
  f32x16 sums[ROWS][TILES];
  for (int r = 0; r < ROWS; ++r)
    for (int t = 0; t < TILES; ++t) sums[r][t] = (f32x16)acc[r][t];
  store_sums(out, sums);
}
#elif defined(__aarch64__)
// Adds the products of a pair of columns of four rows of W and a row of x.
WEFT_BF16 inline float32x4_t dot_of_pair(float32x4_t sums, uint32x4_t pairs, const bf16* x) {
  uint32_t two;
  std::memcpy(&two, x, sizeof two);
  return vbfdotq_f32(sums, vreinterpretq_bf16_u32(pairs), vreinterpretq_bf16_u32(vdupq_n_u32(two)));
}

// ROWS rows of x times a tile by products of pairs (FEAT_BF16). bfmmla multiplies 2 rows of x and 2 rows of W by 4
// columns: each sum is that of two bfdot, one after the other. So bfdot gives a last row or pair the same bits.
//
//     bfdot   sum = odd(sum + odd(x0 w0 + x1 w1))     odd: an inexact result ends in a 1; denormals are zeros
template <int ROWS, int TILES, int LINES, class Out>
WEFT_BF16 void tile_sums(const bf16* tiles, int64_t, const bf16* x, int64_t x_stride, int64_t in, const char* ahead,
                         const Out& out) {
  static_assert(TILES == 1);
  constexpr int kBoth = ROWS / 2, kQuarters = kTile / 4;
  float32x4_t blocks[kBoth ? kBoth : 1][2 * kQuarters];  // of two rows of x and two of W
  float32x4_t sums[ROWS][kQuarters];
  const uint32_t* line = reinterpret_cast<const uint32_t*>(tiles);
#pragma GCC unroll 8
  for (int both = 0; both < kBoth; ++both)
#pragma GCC unroll 8
    for (int of = 0; of < 2 * kQuarters; ++of) blocks[both][of] = vdupq_n_f32(0);
#pragma GCC unroll 4
  for (int q = 0; q < kQuarters; ++q) sums[ROWS - 1][q] = vdupq_n_f32(0);
  int64_t i = 0;
  for (; i + 4 <= in; i += 4, line += 2 * kTile) {
    fetch_ahead<LINES>(ahead, i / 2);
    fetch_ahead<LINES>(ahead, i / 2 + 1);
    bfloat16x8_t of_x[kBoth ? kBoth : 1];
#pragma GCC unroll 8
    for (int both = 0; both < kBoth; ++both) {
      uint64_t fours[2];
      std::memcpy(&fours[0], x + 2 * both * x_stride + i, sizeof fours[0]);
      std::memcpy(&fours[1], x + (2 * both + 1) * x_stride + i, sizeof fours[1]);
      of_x[both] = vreinterpretq_bf16_u64(vcombine_u64(vcreate_u64(fours[0]), vcreate_u64(fours[1])));
    }
#pragma GCC unroll 4
    for (int q = 0; q < kQuarters; ++q) {
      const uint32x4_t first = vld1q_u32(line + 4 * q), second = vld1q_u32(line + kTile + 4 * q);
      const bfloat16x8_t low = vreinterpretq_bf16_u32(vzip1q_u32(first, second));
      const bfloat16x8_t high = vreinterpretq_bf16_u32(vzip2q_u32(first, second));
#pragma GCC unroll 8
      for (int both = 0; both < kBoth; ++both) {
        blocks[both][2 * q] = vbfmmlaq_f32(blocks[both][2 * q], of_x[both], low);
        blocks[both][2 * q + 1] = vbfmmlaq_f32(blocks[both][2 * q + 1], of_x[both], high);
      }
      if constexpr (ROWS % 2) {
        sums[ROWS - 1][q] = dot_of_pair(sums[ROWS - 1][q], first, x + (ROWS - 1) * x_stride + i);
        sums[ROWS - 1][q] = dot_of_pair(sums[ROWS - 1][q], second, x + (ROWS - 1) * x_stride + i + 2);
      }
      __asm__ volatile("" ::: "memory");  // else the compiler loads all quarters first, and sums leave the registers
    }
  }
#pragma GCC unroll 8
  for (int both = 0; both < kBoth; ++both)
#pragma GCC unroll 4
    for (int q = 0; q < kQuarters; ++q) {
      const float64x2_t low = vreinterpretq_f64_f32(blocks[both][2 * q]);
      const float64x2_t high = vreinterpretq_f64_f32(blocks[both][2 * q + 1]);
      sums[2 * both][q] = vreinterpretq_f32_f64(vtrn1q_f64(low, high));
      sums[2 * both + 1][q] = vreinterpretq_f32_f64(vtrn2q_f64(low, high));
    }
  if (i < in)
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int q = 0; q < kQuarters; ++q)
        sums[r][q] = dot_of_pair(sums[r][q], vld1q_u32(line + 4 * q), x + r * x_stride + i);
  f32x16 rows[ROWS][TILES];
  std::memcpy(rows, sums, sizeof rows);
  store_sums(out, rows);
}
#endif

// ``rows`` rows of x times TILES tiles.
template <int TILES, int LINES, class T, class X, class Out>
void tile_block(const T* tiles, int64_t in, const X* x, int64_t x_stride, int rows, const char* ahead, const Out& out) {
  const int64_t stride = in * kTile;
  switch (rows) {
    case 1: tile_sums<1, TILES, LINES>(tiles, stride, x, x_stride, in, ahead, out); break;
    case 2: tile_sums<2, TILES, LINES>(tiles, stride, x, x_stride, in, ahead, out); break;
    case 3:
      if constexpr (kTileRows >= 3) tile_sums<3, TILES, LINES>(tiles, stride, x, x_stride, in, ahead, out);
      break;
    case 4:
      if constexpr (kTileRows >= 4) tile_sums<4, TILES, LINES>(tiles, stride, x, x_stride, in, ahead, out);
      break;
    case 5:
      if constexpr (kTileRows >= 5) tile_sums<5, TILES, LINES>(tiles, stride, x, x_stride, in, ahead, out);
      break;
    default:
      if constexpr (kTileRows >= 6) tile_sums<6, TILES, LINES>(tiles, stride, x, x_stride, in, ahead, out);
  }
}

// T: the dtype of weights and outputs, X: of x. Rows [row, row + rows) times TILES tiles that lie at ``tiles``; their rows of
// W begin with tile ``tile``.
template <class T, class X, int TILES, int LINES>
void tile_rows_at(const LinearArgs& args, const T* tiles, int64_t tile, int64_t row, int rows, const char* ahead) {
  const Weight& weight = args.weight;
  const int64_t at = tile * kTile;
  const X* x = static_cast<const X*>(args.x) + row * args.x_stride;
  const TileOut<T> out = {static_cast<T*>(args.out) + row * weight.out + at, weight.out, weight.out - at,
                          args.bias ? args.bias + at : nullptr};
  tile_block<TILES, LINES>(tiles, weight.in, x, args.x_stride, rows, ahead, out);
}

template <class T, class X, int TILES, int LINES>
void tile_rows(const LinearArgs& args, int64_t tile, int64_t row, int rows, const char* ahead) {
  const T* const tiles = static_cast<const T*>(args.weight.data) + tile * args.weight.in * kTile;
  tile_rows_at<T, X, TILES, LINES>(args, tiles, tile, row, rows, ahead);
}

// Rows [row, end) of x, in blocks of nearly one size (8 are 4 and 4), times the tiles of an item. ``next``: the tiles
// that this thread takes next, or null.
template <class T, class X>
void tiles_of_item(const LinearArgs& args, int64_t tile, int64_t row, int64_t end, const char* next) {
  const int64_t first = row, count = end - row, blocks = (count + kTileRows - 1) / kTileRows;
  const int64_t tiles = (args.weight.out + kTile - 1) / kTile - tile;
  const int64_t columns = args.weight.in * static_cast<int64_t>(sizeof(T)) / 4;  // steps of a block
  const int lines = blocks < 4 ? 2 : 1;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t stop = first + count * (block + 1) / blocks;
    const int rows = static_cast<int>(stop - row);
    if (rows > 1 && tiles >= kOutTiles) {
      for (int64_t t = 0; t < kOutTiles; t += kTogether) {
        const int64_t done = block * lines * columns * 64;
        if (next && done < kOutTiles * columns * 64) {
          if (lines == 2) tile_rows<T, X, kTogether, 2>(args, tile + t, row, rows, next + done);
          else tile_rows<T, X, kTogether, 1>(args, tile + t, row, rows, next + done);
        } else {
          tile_rows<T, X, kTogether, 0>(args, tile + t, row, rows, nullptr);
        }
      }
    } else {  // a single row: one tile after the other is one stream
      for (int64_t t = 0; t < kOutTiles && t < tiles; ++t) tile_rows<T, X, 1, 0>(args, tile + t, row, rows, nullptr);
    }
    row = stop;
  }
}

template <class T, class X>
void tile_products(const LinearArgs& args) {
  const Weight& weight = args.weight;
  // Some 25 GB of weights, or 100 billion products of float32, in a second.
  const double nanoseconds = static_cast<double>(kOutRows * weight.in * static_cast<int64_t>(sizeof(T))) *
                             (0.04 + 0.0025 * static_cast<double>(args.rows));
  const int64_t items = (weight.out + kOutRows - 1) / kOutRows;
  if (args.rows <= kTileRows) {
    Pool::instance().for_each(
        items, nanoseconds, [&](int64_t item) { tiles_of_item<T, X>(args, item * kOutTiles, 0, args.rows, nullptr); });
    return;
  }
  // Whole blocks of x, and the parts nearly of one size.
  const int64_t item_bytes = kOutRows * weight.in * static_cast<int64_t>(sizeof(T));
  const int64_t fit = tuning.part_bytes / (weight.in * static_cast<int64_t>(sizeof(X))) / kTileRows;
  const int64_t blocks = (args.rows + kTileRows - 1) / kTileRows, together = fit > kLeastBlocks ? fit : kLeastBlocks;
  const int64_t parts = (blocks + together - 1) / together;
  const auto begin_of = [&](int64_t part) {
    const int64_t row = blocks * part / parts * kTileRows;
    return row < args.rows ? row : args.rows;
  };
  const auto work = [&](int64_t item, int64_t next) {
    const char* ahead =
        next == Pool::kNone ? nullptr : static_cast<const char*>(weight.data) + next % items * item_bytes;
    tiles_of_item<T, X>(args, item % items * kOutTiles, begin_of(item / items), begin_of(item / items + 1), ahead);
  };
  Pool::instance().for_each_ahead(items * parts, nanoseconds / static_cast<double>(parts), work);
}

[[maybe_unused]] void bf16_tile_products(const LinearArgs& args) {
#if defined(WEFT_BF16)
  if (has_bf16_dot()) return tile_products<bf16, bf16>(args);
#endif
  with_widened_rows(args, tile_products<bf16, float>);
}

}  // namespace
}  // namespace weft
