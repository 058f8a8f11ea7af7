// The output of a piece of a product by a matrix unit: rows of x times tiles of W, written where they belong.
//
// matrix_pieces.hpp, code_pieces.hpp and w8a8.hpp compute pieces; pool.hpp has the memory of staged rows.
#pragma once

#include "kernels.hpp"
#include "linear_inputs.hpp"
#include "pool.hpp"
#include "simd.hpp"

namespace weft {
namespace {

#if defined(__AVX512F__)
// Columns of a product's output, of which a piece computes some.
int64_t columns_of(const LinearArgs& args) { return args.gated ? args.weight.out / 2 : args.weight.out; }

// The output of a piece: [rows of x][tiles of W], written where it belongs or through a buffer.
//
//     direct   a line of 64 bytes for each row and pair of tiles. Rows are kilobytes apart, so each line is on a separate
//              page: misses of the TLB and reads for ownership took half of the time of 512 rows, in a copy of the loop.
//     staged   all tiles of the piece, until the last pair completes a row, which then goes past the caches. For outputs
//              that no cache holds until they are read: 1.05 to 1.35 times the products in a second (256 and 512 rows,
//              one core with AMX).
template <class T>
class PieceOutput {
 public:
  PieceOutput(const LinearArgs& args, int64_t first, int64_t last, int64_t tile, int64_t end)
      : args_(args), columns_(columns_of(args)), first_(first), tile_(tile), width_((end - tile) * kTile) {
    const bool in_lines = columns_ % (2 * kTile) == 0 && reinterpret_cast<uintptr_t>(args.out) % 64 == 0;
    if (in_lines && last - first >= kStagedRows && args.rows * columns_ * kNumberBytes >= kStagedBytes)
      staged_ = scratch_.take<T>((last - first) * width_);
  }
  ~PieceOutput() {
    if (staged_) _mm_sfence();  // an ordinary store tells other threads that this is written, and may not overtake it
  }
  PieceOutput(const PieceOutput&) = delete;
  PieceOutput& operator=(const PieceOutput&) = delete;

  // The line that ``write`` stores to.
  T* line(int64_t row, int64_t tile) const {
    return staged_ ? staged_ + (row - first_) * width_ + (tile - tile_) * kTile : out(row, tile);
  }

  // Sums of COUNT tiles: 1, or 2 from an even tile of the piece on. The last tiles of a row are written last.
  template <int COUNT>
  WEFT_INLINE void write(int64_t row, int64_t tile, const f32x16* sums) const {
    T* const to = line(row, tile);
    if (!args_.bias && columns_ >= (tile + COUNT) * kTile) {
      for (int t = 0; t < COUNT; ++t) store(to + t * kTile, sums[t]);
    } else {
      for (int t = 0; t < COUNT; ++t) {
        const int64_t left = columns_ - (tile + t) * kTile;
        store_some(to + t * kTile, args_.bias ? sums[t] + load_some(args_.bias + (tile + t) * kTile, left) : sums[t],
                   left);
      }
    }
    end_of_row<COUNT>(row, tile);
  }

  // ``write`` of two tiles' sums, none of which is a denormal number: the instruction takes those for zeros. Only where
  // ``has_bf16_dot`` and ``plain`` (0.9 of the time of a copy of the loop: 512 rows, 1024 columns).
  WEFT_BF16_PART void write_normal(int64_t row, int64_t tile, const float* first, const float* second) const {
    const __m512bh halves = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(second), _mm512_loadu_ps(first));
    std::memcpy(line(row, tile), &halves, sizeof halves);
    end_of_row<2>(row, tile);
  }

  // Whether two tiles from ``tile`` on have all their columns, and no bias.
  bool plain(int64_t tile) const { return !args_.bias && columns_ >= (tile + 2) * kTile; }

 private:
  static constexpr int64_t kStagedRows = 32, kStagedBytes = 1 << 20, kNumberBytes = sizeof(T);

  template <int COUNT>
  WEFT_INLINE void end_of_row(int64_t row, int64_t tile) const {
    if (staged_ && (tile + COUNT - tile_) * kTile == width_) stream(row);
  }
  T* out(int64_t row, int64_t tile) const { return static_cast<T*>(args_.out) + row * columns_ + tile * kTile; }
  void stream(int64_t row) const {
    T *const from = line(row, tile_), *const to = out(row, tile_);
    for (int64_t at = 0; at < width_; at += 64 / kNumberBytes)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), _mm512_load_si512(from + at));
  }

  const LinearArgs& args_;
  int64_t columns_, first_, tile_, width_;
  T* staged_ = nullptr;
  Scratch scratch_;
};
#endif

}  // namespace
}  // namespace weft
