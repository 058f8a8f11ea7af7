// The products of adapters.hpp, over the blocks of tiles.hpp.
//
//     down   low = x A     a piece: rows of one adapter, up to four tiles of A      rows of x gathered, or in place
//     up     y += low B    a piece: rows of one adapter, up to 256 columns of y     sums are added as they are stored
//
// All pieces of a product are two jobs of the threads, whichever adapters the rows have. Each sum adds column after
// column in one accumulator, so the bits of a row depend on nothing but the row and its adapter.
#pragma once

#include "adapters.hpp"
#include "tiles.hpp"

namespace weft {
namespace {

constexpr int64_t kPieceRows = 8 * kTileRows;
constexpr int64_t kPieceTiles = 32;  // tiles of y in a piece
constexpr int64_t kAhead = 8192;     // bytes of a factor that few rows prefetch

#if defined(__AVX512F__)
template <class X>
constexpr bool kHalves = std::is_same_v<X, bf16>;
#else
template <class X>
constexpr bool kHalves = false;
#endif

struct FactorPiece {
  const Factors* factors;
  const FactorPart* part;  // null for ``down``
  int64_t begin, count;    // of AdapterRows.rows
  int64_t tile, end;
};

// Sums that are added to the rows of y that an index names. HALVES: on a CPU that rounds to bfloat16 in one instruction.
template <class T, bool HALVES>
struct AddedOut {
  T* to;
  const int64_t* rows;
  int64_t stride, count;
  const T *gain, *shift;
  WEFT_INLINE T* row(int64_t r) const { return to + rows[r] * stride; }
  WEFT_INLINE f32x16 added(const T* y, int64_t at, int64_t some, f32x16 sums) const {
    f32x16 before = load_some(y + at, some);
    if (gain || shift)
      before =
          fused(before, gain ? load_some(gain + at, some) : splat(1), shift ? load_some(shift + at, some) : splat(0));
    return before + sums;
  }
};

template <class T, int ROWS, int TILES>
WEFT_INLINE void store_sums(const AddedOut<T, false>& out, const f32x16 (&sums)[ROWS][TILES]) {
  for (int r = 0; r < ROWS; ++r) {
    T* const y = out.row(r);
    for (int t = 0; t < TILES; ++t) {
      const int64_t at = t * kTile, count = out.count - at;
      if (count > 0) store_some(y + at, out.added(y, at, count, sums[r][t]), count);
    }
  }
}

#if defined(__AVX512F__)
template <int ROWS, int TILES>
WEFT_BF16_PART inline void store_sums(const AddedOut<bf16, true>& out, const f32x16 (&sums)[ROWS][TILES]) {
  const auto each = [&](const auto& sum) WEFT_BF16_PART {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      bf16* const y = out.row(r);
#pragma GCC unroll 4
      for (int t = 0; t < TILES; ++t) sum(y + t * kTile, t * kTile, sums[r][t]);
    }
  };
  const auto halves = [](bf16* y, f32x16 x) WEFT_BF16_PART {  // denormal numbers become zeros
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(y, &rounded, sizeof rounded);
  };
  if (out.count >= TILES * kTile && !out.gain && !out.shift)
    return each([&](bf16* y, int64_t, f32x16 x) WEFT_BF16_PART { halves(y, load(y) + x); });
  each([&](bf16* y, int64_t at, f32x16 x) WEFT_BF16_PART {
    const int64_t count = out.count - at;
    if (count >= kTile) halves(y, out.added(y - at, at, kTile, x));
    else if (count > 0) store_some(y, out.added(y - at, at, count, x), count);
  });
}
#endif

// Returns ``count`` rows of ``width`` numbers: in place if they are dense, otherwise copied to ``room``.
template <class X, class T>
Rows block_rows(const T* from, int64_t stride, const int64_t* rows, int64_t count, int64_t width, Scratch& scratch) {
  if constexpr (std::is_same_v<X, T>)
    if (rows[count - 1] - rows[0] == count - 1) return {from + rows[0] * stride, stride, 1, Dtype::float32};
  X* const room = scratch.take<X>(count * width);
  for (int64_t r = 0; r < count; ++r) {
    const T* const row = from + rows[r] * stride;
    X* const to = room + r * width;
    if constexpr (std::is_same_v<X, T>) std::memcpy(to, row, static_cast<size_t>(width) * sizeof(T));
    else
      for (int64_t i = 0; i < width; i += 16) store_some(to + i, load_some(row + i, width - i), width - i);
  }
  return {room, width, 1, Dtype::float32};
}

// Multiplies up to kTogether tiles of ``weight`` from ``tile`` on, and returns their number. Few rows prefetch (``ahead``).
template <class T, class X, class Out>
int64_t factor_block(const Weight& weight, int64_t tile, int64_t end, const X* x, int64_t stride, int rows, bool ahead,
                     const Out& out) {
  const T* const tiles = static_cast<const T*>(weight.data) + tile * weight.in * kTile;
  const char* const next = reinterpret_cast<const char*>(tiles) + kAhead;
  if constexpr (kTogether == 4) {
    if (end - tile >= 4) {
      if (ahead) tile_block<4, 4>(tiles, weight.in, x, stride, rows, next, out);
      else tile_block<4, 0>(tiles, weight.in, x, stride, rows, nullptr, out);
      return 4;
    }
    if (end - tile >= 2) return tile_block<2, 0>(tiles, weight.in, x, stride, rows, nullptr, out), 2;
  }
  return tile_block<1, 0>(tiles, weight.in, x, stride, rows, nullptr, out), 1;
}

// Calls each(row, rows) for blocks of nearly one size.
template <class Each>
void in_blocks(int64_t count, const Each& each) {
  const int64_t blocks = (count + kTileRows - 1) / kTileRows;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t row = count * block / blocks;
    each(row, static_cast<int>(count * (block + 1) / blocks - row));
  }
}

template <class T, class X>
void down_piece(const AdaptArgs& args, const FactorPiece& piece, T* low, int64_t low_stride) {
  Scratch scratch;
  const Weight& down = piece.factors->down;
  const Rows x = block_rows<X>(static_cast<const T*>(args.x), args.x_stride, args.whose->rows.data() + piece.begin,
                               piece.count, down.in, scratch);
  in_blocks(piece.count, [&](int64_t row, int rows) {
    for (int64_t tile = piece.tile; tile < piece.end;) {
      const TileOut<T> out = {low + (piece.begin + row) * low_stride + tile * kTile, low_stride,
                              down.out - tile * kTile, nullptr};
      tile += factor_block<T>(down, tile, piece.end, static_cast<const X*>(x.data) + row * x.token_stride,
                              x.token_stride, rows, piece.count <= kTileRows, out);
    }
  });
}

template <class T, class X>
void up_piece(const AdaptArgs& args, const FactorPiece& piece, const T* low, int64_t low_stride) {
  Scratch scratch;
  const FactorPart& part = *piece.part;
  const Weight& up = part.up;
  Rows x = {nullptr, 0, 1, Dtype::float32};
  if (up.data) {
    int64_t* const places = scratch.take<int64_t>(piece.count);
    for (int64_t r = 0; r < piece.count; ++r) places[r] = piece.begin + r;
    x = block_rows<X>(low + part.begin, low_stride, places, piece.count, up.in, scratch);
  }
  in_blocks(piece.count, [&](int64_t row, int rows) {
    for (int64_t tile = piece.tile; tile < piece.end;) {
      const int64_t at = tile * kTile;
      const AddedOut<T, kHalves<X>> out = {static_cast<T*>(args.y) + part.first + at,
                                           args.whose->rows.data() + piece.begin + row,
                                           args.y_stride,
                                           part.rows - at,
                                           part.gain ? static_cast<const T*>(part.gain) + at : nullptr,
                                           part.shift ? static_cast<const T*>(part.shift) + at : nullptr};
      tile += factor_block<T>(up, tile, piece.end, static_cast<const X*>(x.data) + row * x.token_stride, x.token_stride,
                              rows, piece.count <= kTileRows, out);
    }
  });
}

template <class T, class X>
void adapt_in(const AdaptArgs& args) {
  static thread_local std::vector<FactorPiece> downs, ups;
  static thread_local std::vector<T> held;
  downs.clear();
  ups.clear();
  int64_t low_stride = 0, down_products = 0, up_products = 0, numbers = 0;  // of x in a piece, at most
  for (const AdapterRows::Group& group : args.whose->groups) {
    const Factors* const factors = args.product->find(group.adapter);
    if (!factors) continue;
    const int64_t pieces = (group.count + kPieceRows - 1) / kPieceRows;
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int64_t begin = group.begin + group.count * piece / pieces;
      const int64_t count = group.begin + group.count * (piece + 1) / pieces - begin;
      const Weight& down = factors->down;
      if (down.data) {
        const int64_t tiles = (down.out + kTile - 1) / kTile;
        for (int64_t tile = 0; tile < tiles; tile += kOutTiles)
          downs.push_back({.factors = factors,
                           .part = nullptr,
                           .begin = begin,
                           .count = count,
                           .tile = tile,
                           .end = tile + kOutTiles < tiles ? tile + kOutTiles : tiles});
        if (low_stride < tiles * kTile) low_stride = tiles * kTile;
        if (numbers < count * down.in) numbers = count * down.in;
        down_products += tiles * kTile * down.in * (16 + count);
      }
      for (const FactorPart& part : factors->parts) {
        const int64_t tiles = (part.rows + kTile - 1) / kTile;
        for (int64_t tile = 0; tile < tiles; tile += kPieceTiles)
          ups.push_back({.factors = factors,
                         .part = &part,
                         .begin = begin,
                         .count = count,
                         .tile = tile,
                         .end = tile + kPieceTiles < tiles ? tile + kPieceTiles : tiles});
        if (part.up.data && numbers < count * part.up.in) numbers = count * part.up.in;
        up_products += part.rows * (part.up.in * (16 + count) + 16 * count);
      }
    }
  }
  if (ups.empty()) return;
  const size_t wanted = static_cast<size_t>(low_stride) * args.whose->rows.size();
  if (held.size() < wanted) held.resize(wanted);
  T* const low = held.data();  // the caller's buffer: every thread has a variable of this name
  const FactorPiece *const down_pieces = downs.data(), *const up_pieces = ups.data();
  Pool::instance().reserve(scratch_bytes<int64_t>(kPieceRows) + scratch_bytes<X>(numbers));
  // A thread computes 100 billion products of float32 in a second, and loads a number of a factor in the time of 16.
  const auto each_ns = [](int64_t products, size_t pieces) {
    return pieces ? 0.0025 * sizeof(T) * static_cast<double>(products) / static_cast<double>(pieces) : 0;
  };
  Pool::instance().for_each(static_cast<int64_t>(downs.size()), each_ns(down_products, downs.size()),
                            [&](int64_t at) { down_piece<T, X>(args, down_pieces[at], low, low_stride); });
  Pool::instance().for_each(static_cast<int64_t>(ups.size()), each_ns(up_products, ups.size()),
                            [&](int64_t at) { up_piece<T, X>(args, up_pieces[at], low, low_stride); });
}

void adapt(const AdaptArgs& args) {
  if (args.product->empty()) return;
  if (args.dtype == Dtype::float32) return adapt_in<float, float>(args);
#if defined(WEFT_BF16)
  if (has_bf16_dot()) return adapt_in<bf16, bf16>(args);
#endif
  adapt_in<bf16, float>(args);
}

}  // namespace
}  // namespace weft
