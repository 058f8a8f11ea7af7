// Pieces of products of bfloat16 tiles, plain or in 12 bits, where a matrix unit multiplies (matrix_unit.hpp).
// matrix_products.hpp cuts a product into them; code_pieces.hpp has the pieces of int8 and int4.
//
// x is copied once into tiles of the unit; W is in tiles already. One row of x takes the time of sixteen, which is the
// time in which W comes out of memory: vectors in the unit's order were 1.1 (1 row) to 3 times (8 rows) slower. 1 or 2
// rows by fp8 and by tables of 4 bits go to these vectors, if the unit follows the manual.
//
//     piece    4 to 16 tiles of W, and up to 512 rows of x
//     chunk    512 columns of 2 tiles of W: 32 KB for the L1 cache. 12 bits are unpacked there, once for all rows of a
//              piece. 2 blocks of 16 rows of x pass by, 32 KB in all, and sums of 4 KB are added to
//
// All tiles of a piece take a chunk before the next one. Up to 1 MB of x stays in the L2 cache from piece to piece, with
// the sums and the output of 4 tiles. Of wider rows only a chunk stays, 512 KB, for 16 tiles: with 4,608 columns and
// whole rows at a time, x (4.7 MB) came out of the L3 cache for each pair of tiles, which was twice the time. With 256
// rows W comes out of memory twice as often, 1.03 to 1.18 times the time. After the last chunk a pair of blocks is
// written, a few rows at each step of the next pair.
//
// Sums of a chunk go through memory in float32, which rounds nothing. So rows of x have the same bits whatever the cut.
//
//     32 columns    even = sum of w[2 i] x[2 i]      odd = sum of w[2 i + 1] x[2 i + 1]      fused, from zero
//                   total = total + (even + odd)     denormals are zeros (MXCSR, for the time of a piece)
//
// Rejected: sums that stay in the unit for the whole width. W and x would both come out of the L2 cache, 64
// bytes in a cycle. Also rejected: tiles with fewer rows and columns at the edges. Zeros give the same sums.
#pragma once

#include "code_forms.hpp"
#include "coded_numbers.hpp"
#include "flush_denormals.hpp"
#include "matrix_unit.hpp"
#include "piece_output.hpp"
#include "table.hpp"

#include <optional>

namespace weft {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kStepColumns = 32;
constexpr int64_t kStepNumbers = kTileBytes / 2;
constexpr int64_t kStepUnits = kStepColumns / kUnitColumns;
constexpr int64_t kChunkSteps = 16;
constexpr int64_t kCodeChunkSteps = 8, kShortChunkSteps = 2;
constexpr int64_t kAheadLines = 2;           // of the next chunk for a step: 4 were slower for 128 rows of 4608 columns
constexpr int64_t kMatrixPartRows = 512;     // of a piece; W is read and unpacked for each
constexpr int64_t kCodePartBytes = 1 << 20;  // bytes of x in a piece of codes
constexpr int64_t kCodePartRows = 128;       // least rows of a part of codes
// Tiles of a piece with enough of them for the threads: few where all of its x stays in the L2 cache for the next piece.
constexpr int64_t kTiles = 4, kWideTiles = 16, kWideBytes = 1 << 20;

struct alignas(64) Line {
  uint16_t numbers[32];
};

// Codes whose groups have 16 columns take half of a step for each: the rest of a step is zeros, as the unit adds up all.
int64_t columns_of_step(const Weight& weight) { return kStepColumns / parts_of_line(weight); }
int64_t steps_of(const Weight& weight) { return (weight.in + kStepColumns - 1) / kStepColumns * parts_of_line(weight); }

// ``sums``: of one row of x, a number for each step.
WEFT_INLINE f32x16 without_minimums(const Weight& weight, int64_t tile, const float* sums, f32x16 total) {
  const GroupNumbers minimums = GroupNumbers::minimums(weight);
  const int64_t steps = steps_of(weight), of_group = weight.group / columns_of_step(weight);
  f32x16 taken = splat(0);
  for (int64_t step = 0, group = 0; step < steps; ++group) {
    const f32x16 minimum = minimums(tile, group);
    for (const int64_t end = step + of_group < steps ? step + of_group : steps; step < end; ++step)
      taken = fused(minimum, splat(sums[step]), taken);
  }
  return total - taken;
}

// Tiles [tile, tile + count) of W, a chunk of steps at a time. Chunks are asked for in order.
class TileChunks {
 public:
  TileChunks(const Weight& weight, int64_t tile, int count, Line* room)
      : weight_(weight), tile_(tile), count_(count), room_(room) {
    if (weight.form == WeightForm::bfloat16_twelve_bit)
      for (int t = 0; t < count; ++t) odd_[t] = SqueezedTile(weight, tile + t).odd;
  }

  // Steps of a chunk for one pair of blocks, if nothing has to stay in the L1 cache for the next pair. The number is
  // small, so one chunk is unpacked while the unit multiplies another (12 bits: 0.7 of the time for 4 rows). Tables of
  // fp8 by rows are computed again for each chunk.
  int64_t steps_of_one_pair() const {
    if (weight_.form == WeightForm::bfloat16_twelve_bit) return kShortChunkSteps;
    if (is_coded(weight_.form)) return lookup_of(weight_) == Lookup::fp8_rows ? kChunkSteps : kShortChunkSteps;
    return steps_of(weight_);
  }

  int64_t stride() const { return stride_; }

  int count() const { return count_; }

  // The part of a chunk that comes into the L2 cache during the product of pair ``pair`` of ``pairs`` before that chunk.
  // All pairs have equal parts, at most kAheadLines for a step. Coded weights fetch for themselves.
  Ahead part_of_chunk(int64_t first, int64_t steps, int64_t pair, int64_t pairs) const {
    if (is_coded(weight_.form) || count_ < 2) return {};
    const char* data;
    int64_t bytes, parts = pairs, part = pair;
    if (weight_.form == WeightForm::bfloat16_twelve_bit) {
      data = reinterpret_cast<const char*>(SqueezedTile(weight_, tile_).units) + first * kStepUnits * kStepBytes;
      bytes = steps * kStepUnits * kStepBytes;
    } else {  // half of the pairs for each tile
      parts = (pairs + 1) / 2;
      part = pair % parts;
      data = static_cast<const char*>(weight_.data) +
             ((tile_ + pair / parts) * weight_.in + first * kStepColumns) * kTile * 2;
      bytes = steps * kTileBytes;
    }
    const int64_t lines = bytes / 64, line = lines * part / parts, end = lines * (part + 1) / parts,
                  most = kAheadLines * steps;
    return {data + line * 64, end - line < most ? end - line : most};
  }

  // Steps [first, first + steps), all of them complete or a single incomplete one.
  const uint16_t* chunk(int64_t first, int64_t steps) {
    const bool whole = (first + steps) * kStepColumns <= weight_.in;
    const bool packed = weight_.form == WeightForm::bfloat16_twelve_bit || is_coded(weight_.form);
    if (!packed && whole) {
      stride_ = weight_.in * kTile;
      return static_cast<const uint16_t*>(weight_.data) + tile_ * stride_ + first * kStepNumbers;
    }
    stride_ = steps * kStepNumbers;
    if (!whole) std::memset(room_, 0, static_cast<size_t>(count_ * stride_ * 2));
    for (int t = 0; t < count_; ++t) {
      uint16_t* const to = room_->numbers + t * stride_;
      if (packed)
        unpack(t, first * kStepUnits, whole ? steps * kStepUnits : weight_.in / kUnitColumns - first * kStepUnits, to);
      else
        std::memcpy(
            to, static_cast<const uint16_t*>(weight_.data) + ((tile_ + t) * weight_.in + first * kStepColumns) * kTile,
            static_cast<size_t>((weight_.in - first * kStepColumns) * kTile * 2));
    }
    return room_->numbers;
  }

 private:
  void unpack(int t, int64_t unit, int64_t count, uint16_t* to) {
    if (is_coded(weight_.form)) {
      const KeepDenormals kept;  // of codes: only sums take them for zeros
      return tables::WEFT_TABLE::unpack_coded(weight_, tile_ + t, unit, unit + count, to);
    }
    const SqueezedTile tile(weight_, tile_ + t);
    const __m512i highs = tile.upper_bytes();
    for (const int64_t end = unit + count; unit < end; ++unit, to += kUnitWords) {
      const uint8_t* const from = tile.units + unit * kStepBytes;
      Half halves[2];
      for (int line = 0; line < 3; ++line) __builtin_prefetch(from + tuning.unit_fetched_ahead + line * 64, 0, 2);
      if (__builtin_expect(*odd_[t] >> 16 < (unit + 1) * kUnitWords, 0)) {
        odd_[t] = unpack_odd(tile, odd_[t], unit, halves);
      } else {
        halves[0] = unpacked<0>(from, highs);
        halves[1] = unpacked<1>(from, highs);
      }
      for (int pair = 0; pair < kUnitPairs; ++pair)
        _mm512_storeu_si512(to + pair * kPairWords, halves[pair / 2].pairs[pair % 2]);
    }
  }

  const Weight& weight_;
  int64_t tile_;
  int count_;
  Line* room_;
  int64_t stride_ = 0;
  const int64_t* odd_[2] = {};
};

// body(first, steps) for chunks of complete steps, then for a last step that is incomplete.
template <class Body>
WEFT_INLINE void each_chunk(const Weight& weight, int64_t chunk, const Body& body) {
  const int64_t whole = weight.in / kStepColumns;
  for (int64_t first = 0; first < whole; first += chunk) body(first, whole - first < chunk ? whole - first : chunk);
  if (whole * kStepColumns < weight.in) body(whole, 1);
}

// One tile of W times ROWS rows of x, added to sums [ROWS], in the order of a matrix unit.
template <int ROWS>
void few_row_sums(const uint16_t* w, const float* x, int64_t x_stride, int64_t steps, f32x16* sums) {
  for (int64_t step = 0; step < steps; ++step, x += kStepColumns) {
    f32x16 even[ROWS] = {}, odd[ROWS] = {};
    for (int64_t pair = 0; pair < kTileSide; ++pair, w += kPairWords) {
      const bf16* const pairs = reinterpret_cast<const bf16*>(w);
      const f32x16 first = widened<0>(pairs), second = widened<1>(pairs);
      for (int r = 0; r < ROWS; ++r) {
        even[r] = fused(first, splat(x[r * x_stride + 2 * pair]), even[r]);
        odd[r] = fused(second, splat(x[r * x_stride + 2 * pair + 1]), odd[r]);
      }
    }
    for (int r = 0; r < ROWS; ++r) sums[r] += even[r] + odd[r];
  }
}

// Bytes that the body of a piece of ``rows`` rows of x and ``tiles`` tiles of W takes: its output, the sums of its blocks,
// and, of codes, totals.
int64_t piece_scratch(int64_t rows, int64_t tiles) {
  const int64_t blocks = (rows + 2 * kTileSide - 1) / (2 * kTileSide) * 2, even = (tiles + 1) / 2 * 2;
  return scratch_bytes<bf16>(rows * tiles * kTile) + scratch_bytes<float>(blocks * (even > 4 ? even : 4) * kSumNumbers);
}

// A piece of fp8 and 4-bit tables, for whose unpacking the unit would wait: one row took 1.1 to 1.2 times as long in
// it.
void few_rows_piece(const LinearArgs& args, const float* x, int64_t tile, int64_t end) {
  alignas(64) Line room[2 * kCodeChunkSteps * kTileBytes / 64];
  f32x16 sums[2][kFewRows];
  const auto multiply = args.rows == 1 ? few_row_sums<1> : few_row_sums<2>;
  const int64_t rows = args.rows, width = steps_of(args.weight) * kStepColumns;
  const PieceOutput<bf16> output(args, 0, rows, tile, end);
  for (; tile < end; tile += 2) {
    const int count = tile + 1 < end ? 2 : 1;
    for (int t = 0; t < count; ++t)
      for (int64_t r = 0; r < rows; ++r) sums[t][r] = splat(0);
    {
      const FlushDenormals flushed;
      TileChunks w(args.weight, tile, count, room);
      each_chunk(args.weight, kCodeChunkSteps, [&](int64_t first, int64_t steps) {
        const uint16_t* const chunk = w.chunk(first, steps);
        for (int t = 0; t < count; ++t)
          multiply(chunk + t * w.stride(), x + first * kStepColumns, width, steps, sums[t]);
      });
    }
    for (int t = 0; t < count; ++t)
      for (int64_t r = 0; r < rows; ++r) output.write<1>(r, tile + t, &sums[t][r]);
  }
}

// A pair of blocks of x times ``count`` tiles of W, of which the first is ``tile``.
struct PairOfBlocks {
  const PieceOutput<bf16>* output;
  int64_t first, last;  // rows of x
  int64_t tile;
  int count;
  const float* sums;
  const float* gates;  // sums of the gates of the same numbers, or null

  // Prefetches the lines that ``write`` needs while the unit multiplies.
  void fetch_outputs() const {
    for (int64_t row = first; row < last; ++row) __builtin_prefetch(output->line(row, tile), 1, 3);
  }
  // Writes rows [first, last) of these.
  void write(int64_t from, int64_t to) const {
    if (count == 2 && !gates && has_bf16_dot() && output->plain(tile)) return write_normal(from, to);
    count == 2 ? write_rows<2>(from, to) : write_rows<1>(from, to);
  }

 private:
  // Of the sums of a row and of its first tile; the second tile's are kSumNumbers on.
  int64_t sums_of(int64_t row) const {
    return (row - first) / kTileSide * count * kSumNumbers + (row - first) % kTileSide * kTile;
  }
  WEFT_BF16 void write_normal(int64_t from, int64_t to) const {  // the unit makes no denormal numbers
    for (int64_t row = from; row < to; ++row)
      output->write_normal(row, tile, sums + sums_of(row), sums + sums_of(row) + kSumNumbers);
  }
  template <int COUNT>
  void write_rows(int64_t from, int64_t to) const {
    for (int64_t row = from; row < to; ++row) {
      f32x16 of_tiles[COUNT];
      for (int t = 0; t < COUNT; ++t) {
        const int64_t at = sums_of(row) + t * kSumNumbers;
        of_tiles[t] = load(sums + at);
        if (gates)  // rounded where a product, silu and their product by themselves are
          of_tiles[t] = rounded<bf16>(silu(rounded<bf16>(load(gates + at)))) * rounded<bf16>(of_tiles[t]);
      }
      output->write<COUNT>(row, tile, of_tiles);
    }
  }
};

// The last pair whose sums are complete, to be written while the unit multiplies the next one: some rows at each step. 512
// rows by 1024 columns take 0.93 of the time of writing each pair after its product, with SwiGLU 0.89 (in a copy of the
// loop).
class WrittenBetween {
 public:
  void begin(const PairOfBlocks& pair) {
    pair_ = pair;
    waits_ = true;
  }
  // For a block of ``steps`` steps, which then has written all of the pair.
  Between between(int64_t steps) {
    if (!waits_) return {};
    waits_ = false;
    rows_ = (pair_.last - pair_.first + steps - 1) / steps;
    return {[](const void* of, int64_t step) { static_cast<const WrittenBetween*>(of)->write(step); }, this};
  }
  void end() {
    if (waits_) pair_.write(pair_.first, pair_.last);
    waits_ = false;
  }

 private:
  void write(int64_t step) const {
    const int64_t from = pair_.first + step * rows_, to = from + rows_;
    if (from < pair_.last) pair_.write(from, to < pair_.last ? to : pair_.last);
  }

  PairOfBlocks pair_ = {};
  int64_t rows_ = 0;  // of a step
  bool waits_ = false;
};

// Rows [first, last) of x, whose tiles are ``x``, times tiles [tile, end): a chunk of columns for all tiles, then the next
// chunk. So that part of x comes out of the L2 cache for all tiles but the first pair. A single pair of blocks needs no
// such order, and reads W as a stream. Of a gated product, tiles are of gates, and the piece has those of the same columns
// of the second half of W as well.
void matrix_piece(const LinearArgs& args, const Line* x, int64_t first, int64_t last, int64_t tile, int64_t end) {
  alignas(64) Line room[2 * kChunkSteps * kTileBytes / 64];
  const int64_t steps_in_all = steps_of(args.weight), blocks = (last - first + kTileSide - 1) / kTileSide;
  const int64_t pairs = (blocks + 1) / 2, outputs = pairs > 1 ? (end - tile + 1) / 2 : 1;  // pairs of tiles
  const int64_t gates = args.gated ? outputs : 0, together = gates + outputs, sums_of_two = pairs * 4 * kSumNumbers;
  Scratch scratch;
  float* const sums = scratch.take<float>(together * sums_of_two);
  const uint16_t* const numbers = x->numbers + first / kTileSide * steps_in_all * kStepNumbers;
  const TileKernels& unit = tile_kernels();
  const PieceOutput<bf16> output(args, first, last, tile, end);
  const UnitInUse in_use(unit);
  WrittenBetween written;
  for (; tile < end; tile += 2 * outputs) {
    std::optional<TileChunks> weights[kWideTiles / 2];
    for (int64_t two = 0; two < together; ++two) {
      const int64_t column = tile + 2 * (two < gates ? two : two - gates);
      weights[two].emplace(args.weight, gates && two >= gates ? columns_of(args) / kTile + column : column,
                           column + 1 < end ? 2 : 1, room);
    }
    const int64_t chunk_steps = pairs > 1 ? kChunkSteps : weights[0]->steps_of_one_pair();
    each_chunk(args.weight, chunk_steps, [&](int64_t begin, int64_t steps) {
      const bool is_last = begin + steps == steps_in_all;
      for (int64_t two = 0; two < together; ++two) {
        TileChunks& w = *weights[two];
        const uint16_t* const chunk = w.chunk(begin, steps);
        const TileChunks* const next = two + 1 < together ? &*weights[two + 1] : is_last ? nullptr : &*weights[0];
        const bool is_written = is_last && two >= gates;
        float* const of_tiles = sums + two * sums_of_two;
        for (int64_t pair = 0; pair < pairs; ++pair) {
          const int64_t row = first + pair * 2 * kTileSide, at = pair * 4 * kSumNumbers;
          const PairOfBlocks rows = {&output,
                                     row,
                                     row + 2 * kTileSide < last ? row + 2 * kTileSide : last,
                                     tile + 2 * (two - gates),
                                     w.count(),
                                     of_tiles + at,
                                     gates ? of_tiles - gates * sums_of_two + at : nullptr};
          if (is_written) rows.fetch_outputs();
          Ahead ahead = {};
          if (pairs > 1 && next)
            ahead = next->part_of_chunk(two + 1 < together ? begin : begin + steps, steps, pair, pairs);
          unit.halves({.x = numbers + (2 * pair * steps_in_all + begin) * kStepNumbers,
                       .w = chunk,
                       .x_stride = steps_in_all * kStepNumbers,
                       .w_stride = w.stride(),
                       .steps = steps,
                       .x_tiles = 2 * pair + 1 < blocks ? 2 : 1,
                       .w_tiles = w.count(),
                       .first = begin == 0,
                       .sums = of_tiles + at,
                       .ahead = ahead,
                       .between = written.between(steps)});
          if (is_written) written.begin(rows);
        }
      }
    });
  }
  written.end();
}
#endif

}  // namespace
}  // namespace weft
