// Pieces of products of int8, int6 and int4 weights where a matrix unit multiplies: codes are exact, scales are
// float32.
//
//     code - zero    a whole number from -255 to 255: bfloat16 has 8 bits for it, so it is exact, and x is not rounded
//     group          the columns that share a scale (32 in int4, 128 in int8): sum of x (code - zero), by the unit's order;
//                    16 columns are half a step of the unit and zeros, so they take twice the products
//     total          fused(sum of the group, scale, total), group after group, in float32
//
//     few rows    1 or 2 rows of x, if the unit follows the manual: vectors in the same order, codes widened in registers
//     more rows   a chunk, 256 columns of 2 tiles of W, becomes bfloat16 in the L1 cache once for all rows of a piece;
//                 the unit adds up a group from zero, and vectors add the scaled sum to the totals
//
// Minimums of codes are subtracted from the totals at the end (matrix_pieces.hpp). So a row of x has the same bits in
// any batch, by vectors as by the unit. Denormals are zeros in both.
//
// Cost of scales in the unit, for 2 x 2 tiles: 4 products of 16 cycles in 32 columns, and for each group 64 stores of
// sums and 64 of totals, one in a cycle. In int8 stores take half of the products' time, in parallel with them. In
// int4 they take twice the time, so the unit reaches a third of its rate: still more products in a cycle than vectors
// of bytes have.
//
// Rejected: scales multiplied into the bfloat16 weights, as oneDNN's path did (they lose 8 of 16 bits, and the unit
// gains nothing in int8); a weight as a sum of two bfloat16 (exact in int4, but twice the products: the time of the
// stores); products of bytes by the unit, whose x has a scale for 32 columns (the same stores, and x loses bits).
#pragma once

#include "matrix_pieces.hpp"

namespace weft {
namespace {

#if defined(__AVX512F__)
// Bytes ahead that are prefetched into the L2 and the L1 cache.
constexpr int64_t kCodesAhead = 2048, kCodesNext = 256;

// The numbers to subtract from codes, as floats, for 16 rows of a group.
template <int BITS, Zero ZERO>
WEFT_INLINE f32x16 code_base(const Weight& weight, int64_t at) {
  static_assert(BITS != 6 || ZERO != Zero::of_group);
  if constexpr (ZERO == Zero::looked_up)  // the table itself, without its middle
    return converted<f32x16>((i32x16)load_bytes(weight.table)) - static_cast<float>(kMiddle<8>);
  f32x16 zero = splat(ZERO == Zero::middle ? static_cast<float>(kMiddle<BITS>) : 0.0f);
  if constexpr (ZERO == Zero::of_group) zero = converted<f32x16>(tile_zeros(weight, at));
  return BITS == 4 ? zero : zero + 8388608.0f;  // 2^23: see below
}

// The codes at bit ``shift`` of 16 lanes, without their zero. Bytes: the last bits of 2^23 + code; int4: looked up.
template <int BITS, Zero ZERO>
WEFT_INLINE f32x16 code_numbers(u32x16 bytes, int shift, f32x16 base) {
  if constexpr (BITS != 4) {
    return (f32x16)(((bytes >> shift) & 255u) | 0x4B000000u) - base;
  } else {
    const f32x16 numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const f32x16 table = ZERO == Zero::looked_up ? base
                         : ZERO == Zero::middle  ? numbers - static_cast<float>(kMiddle<BITS>)
                                                 : numbers;
    const f32x16 looked_up = (f32x16)_mm512_permutexvar_ps((__m512i)(bytes >> shift), (__m512)table);  // of 4 bits
    return ZERO == Zero::of_group ? looked_up - base : looked_up;
  }
}

// Loads columns 8 pair ... 8 pair + 7 of 16, for code_numbers: int4 twice, the second at a shift of 4.
template <int BITS>
WEFT_INLINE void raw_pair(const uint8_t* from, int pair, u32x16* bytes) {
  if constexpr (BITS != 4) return pair_codes<BITS>(from, pair, bytes);
  bytes[0] = bytes[1] = load_as<u32x16>(from + pair * 64);
}

struct Groups {
  int64_t steps, count;  // of a group, and groups of a tile

  explicit Groups(const Weight& weight)
      : steps(weight.group / columns_of_step(weight)), count((steps_of(weight) + steps - 1) / steps) {}

  int64_t scales_at(int64_t tile, int64_t group) const { return (tile * count + group) * kTile; }
};

// The codes of a step, in bytes.
template <int BITS>
int64_t step_bytes(const Weight& weight) {
  return tile_line_bytes<BITS>() / parts_of_line(weight);
}

// Prefetches 16 columns. Widening fills a core's window of instructions, so the core requests a line too late. A row from
// memory took 1.4 times as long without this.
template <int BITS>
WEFT_INLINE void fetch_codes(const uint8_t* from) {
  for (int line = 0; line < BITS / 2; ++line) {
    __builtin_prefetch(from + line * 64 + kCodesAhead, 0, 2);
    __builtin_prefetch(from + line * 64 + kCodesNext, 0, 3);
  }
}

// One tile of W times ROWS rows of x -> totals [ROWS].
template <int BITS, int ROWS, Zero ZERO>
void few_code_rows(const Weight& weight, int64_t tile, const float* x, int64_t x_stride, f32x16* totals) {
  const int64_t steps = steps_of(weight);
  const int64_t columns = columns_of_step(weight);
  const Groups groups(weight);
  const GroupNumbers scales = GroupNumbers::scales(weight);
  const uint8_t* from = static_cast<const uint8_t*>(weight.data) + tile * steps * step_bytes<BITS>(weight);
  f32x16 total[ROWS] = {};
  for (int64_t group = 0, step = 0; group < groups.count; ++group) {
    const int64_t at = groups.scales_at(tile, group), end = step + groups.steps < steps ? step + groups.steps : steps;
    const f32x16 base = code_base<BITS, ZERO>(weight, at);
    f32x16 sums[ROWS] = {};
    for (; step < end; ++step) {
      f32x16 halves[2][ROWS] = {};  // even columns, odd columns
      for (int64_t half = 0; half < columns / kHalfLine; ++half, from += tile_line_bytes<BITS>() / 2, x += kHalfLine) {
        fetch_codes<BITS>(from);
#pragma GCC unroll 2
        for (int pair = 0; pair < 2; ++pair) {
          u32x16 bytes[2];
          raw_pair<BITS>(from, pair, bytes);
#pragma GCC unroll 2
          for (int quad = 0; quad < 2; ++quad)
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
              const f32x16 w = code_numbers<BITS, ZERO>(bytes[quad], 8 * j + (BITS == 4 ? 4 * quad : 0), base);
              const float* const column = x + (2 * pair + quad) * 4 + j;
              for (int r = 0; r < ROWS; ++r) halves[j % 2][r] = fused(w, splat(column[r * x_stride]), halves[j % 2][r]);
            }
        }
      }
      for (int r = 0; r < ROWS; ++r) sums[r] += halves[0][r] + halves[1][r];
    }
    const f32x16 scale = scales(tile, group);
    for (int r = 0; r < ROWS; ++r) total[r] = fused(sums[r], scale, total[r]);
  }
  for (int r = 0; r < ROWS; ++r) totals[r] = total[r];
}

template <int BITS, Zero ZERO>
void few_code_rows_of(const LinearArgs& args, const float* x, int64_t tile, f32x16* totals) {
  const int64_t width = steps_of(args.weight) * columns_of_step(args.weight);
  if (args.rows == 1) return few_code_rows<BITS, 1, ZERO>(args.weight, tile, x, width, totals);
  return few_code_rows<BITS, 2, ZERO>(args.weight, tile, x, width, totals);
}

// ``of``.operator()<bits, zero>(), for those of ``weight``.
template <class Of>
auto with_codes(const Weight& weight, const Of& of) {
  const auto of_bits = [&]<int BITS>() {
    const Zero zero = zero_of(weight);
    if constexpr (BITS != 6)
      if (zero == Zero::of_group) return of.template operator()<BITS, Zero::of_group>();
    if constexpr (BITS == 4)
      if (zero == Zero::looked_up) return of.template operator()<BITS, Zero::looked_up>();
    return zero == Zero::none ? of.template operator()<BITS, Zero::none>()
                              : of.template operator()<BITS, Zero::middle>();
  };
  return weight.form == WeightForm::int8   ? of_bits.template operator()<8>()
         : weight.form == WeightForm::int6 ? of_bits.template operator()<6>()
                                           : of_bits.template operator()<4>();
}

// ``sums``: of x, [rows][steps], where the weight has minimums; else null.
void few_code_rows_piece(const LinearArgs& args, const float* x, const float* sums, int64_t tile, int64_t end) {
  const auto multiply = with_codes(args.weight, []<int BITS, Zero ZERO>() { return few_code_rows_of<BITS, ZERO>; });
  f32x16 totals[kFewRows];
  const PieceOutput<bf16> output(args, 0, args.rows, tile, end);
  for (; tile < end; ++tile) {
    {
      const FlushDenormals flushed;
      multiply(args, x, tile, totals);
    }
    for (int64_t r = 0; r < args.rows; ++r) {
      if (sums) totals[r] = without_minimums(args.weight, tile, sums + r * steps_of(args.weight), totals[r]);
      output.write<1>(r, tile, totals + r);
    }
  }
}

// 4 columns of 16 rows, a byte each, as two lines of pairs. Floats of whole numbers below 2^8 end in 16 zeros.
template <int BITS, Zero ZERO>
WEFT_INLINE void unpack_four(u32x16 bytes, int shift, f32x16 base, uint16_t* to) {
  for (int pair = 0; pair < 2; ++pair) {
    const u32x16 first = (u32x16)code_numbers<BITS, ZERO>(bytes, 16 * pair + shift, base);
    const u32x16 second = (u32x16)code_numbers<BITS, ZERO>(bytes, 16 * pair + 8 + shift, base);
    store_as(to + pair * kPairWords, (first >> 16) | (second & 0xFFFF0000u));
  }
}

// int4 without zeros of groups: lower and upper bytes of 64 numbers from two tables, as 12 bits have them.
template <Zero ZERO>
WEFT_INLINE void unpack_nibbles(__m512i bytes, uint16_t* to) {
  alignas(16) static constexpr uint8_t kLows[2][16] = {
      {0x00, 0xE0, 0xC0, 0xA0, 0x80, 0x40, 0x00, 0x80, 0x00, 0x80, 0x00, 0x40, 0x80, 0xA0, 0xC0, 0xE0},
      {0x00, 0x80, 0x00, 0x40, 0x80, 0xA0, 0xC0, 0xE0, 0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70}};
  alignas(16) static constexpr uint8_t kHighs[2][16] = {
      {0xC1, 0xC0, 0xC0, 0xC0, 0xC0, 0xC0, 0xC0, 0xBF, 0x00, 0x3F, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40},
      {0x00, 0x3F, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41}};
  constexpr int kTable = ZERO == Zero::none ? 1 : 0;  // 0 to 15, or -8 to 7
  // The order for 4 rows: their columns 0 and 1, then their columns 2 and 3.
  alignas(16) static constexpr uint8_t kOrder[16] = {0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15};
  const auto four_times = [](const uint8_t* from) {
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(from)));
  };
  const __m512i ordered = _mm512_shuffle_epi8(bytes, four_times(kOrder)), low = _mm512_set1_epi8(15);
  for (int nibble = 0; nibble < 2; ++nibble, to += 2 * kPairWords) {
    const __m512i codes = _mm512_and_si512(nibble ? _mm512_srli_epi16(ordered, 4) : ordered, low);
    const __m512i lows = _mm512_shuffle_epi8(four_times(kLows[kTable]), codes);
    const __m512i highs = _mm512_shuffle_epi8(four_times(kHighs[kTable]), codes);
    _mm512_storeu_si512(to, _mm512_unpacklo_epi8(lows, highs));
    _mm512_storeu_si512(to + kPairWords, _mm512_unpackhi_epi8(lows, highs));
  }
}

// Steps [first, first + count) of one tile, as an operand of the unit.
template <int BITS, Zero ZERO>
void unpack_codes(const Weight& weight, int64_t tile, int64_t first, int64_t count, uint16_t* to) {
  const Groups groups(weight);
  const int64_t halves = columns_of_step(weight) / kHalfLine;
  const uint8_t* from =
      static_cast<const uint8_t*>(weight.data) + (tile * steps_of(weight) + first) * step_bytes<BITS>(weight);
  f32x16 base = splat(0);
  for (int64_t step = first; step < first + count; ++step) {
    if (step == first || step % groups.steps == 0)
      base = code_base<BITS, ZERO>(weight, groups.scales_at(tile, step / groups.steps));
    for (int64_t half = 0; half < halves; ++half, from += tile_line_bytes<BITS>() / 2) {
      fetch_codes<BITS>(from);
      for (int pair = 0; pair < 2; ++pair, to += 4 * kPairWords) {
        u32x16 bytes[2];
        raw_pair<BITS>(from, pair, bytes);
        if constexpr (BITS == 4 && ZERO != Zero::of_group && ZERO != Zero::looked_up) {
          unpack_nibbles<ZERO>((__m512i)bytes[0], to);
        } else {
          for (int quad = 0; quad < 2; ++quad)
            unpack_four<BITS, ZERO>(bytes[quad], BITS == 4 ? 4 * quad : 0, base, to + quad * 2 * kPairWords);
        }
      }
    }
    if (halves == 1) {
      std::memset(to, 0, 8 * kPairWords * sizeof *to);
      to += 8 * kPairWords;
    }
  }
}

// Adds the sums of ``rows`` rows of x and one tile of W for a group, scaled, to their totals.
WEFT_INLINE void add_scaled(const float* sums, f32x16 scale, int64_t rows, float* totals) {
  for (int64_t r = 0; r < rows; ++r)
    store(totals + r * kTile, fused(load(sums + r * kTile), scale, load(totals + r * kTile)));
}

// Rows [first, last) of x, whose tiles are ``x``, times tiles [tile, end).
void matrix_code_piece(const LinearArgs& args, const Line* x, const float* sums_of_x, int64_t first, int64_t last,
                       int64_t tile, int64_t end) {
  constexpr int64_t kPairSums = 4 * kSumNumbers;
  alignas(64) Line room[2 * kCodeChunkSteps * kTileBytes / 64];
  const Weight& weight = args.weight;
  const Groups groups(weight);
  const int64_t steps = steps_of(weight), blocks = (last - first + kTileSide - 1) / kTileSide, pairs = (blocks + 1) / 2;
  Scratch scratch;
  float* const sums = scratch.take<float>(pairs * 2 * kPairSums);
  float* const totals = sums + pairs * kPairSums;
  const uint16_t* const numbers = x->numbers + first / kTileSide * steps * kStepNumbers;
  const auto unpack = with_codes(weight, []<int BITS, Zero ZERO>() { return unpack_codes<BITS, ZERO>; });
  const GroupNumbers scales = GroupNumbers::scales(weight);
  const TileKernels& unit = tile_kernels();
  // The rows of block ``block`` that exist.
  const auto rows_of = [&](int64_t block) {
    const int64_t left = last - first - block * kTileSide;
    return left < kTileSide ? left : kTileSide;
  };
  const int64_t chunk_steps = pairs > 1 ? kCodeChunkSteps : kShortChunkSteps;
  const PieceOutput<bf16> output(args, first, last, tile, end);
  for (; tile < end; tile += 2) {
    const int count = tile + 1 < end ? 2 : 1;
    std::memset(totals, 0, static_cast<size_t>(pairs * kPairSums) * sizeof(float));
    {
      const UnitInUse in_use(unit);
      for (int64_t begin = 0; begin < steps; begin += chunk_steps) {
        const FlushDenormals flushed;
        const int64_t chunk_end = begin + chunk_steps < steps ? begin + chunk_steps : steps,
                      w_stride = (chunk_end - begin) * kStepNumbers;
        for (int t = 0; t < count; ++t)
          unpack(weight, tile + t, begin, chunk_end - begin, room->numbers + t * w_stride);
        for (int64_t pair = 0; pair < pairs; ++pair) {
          const int both = 2 * pair + 1 < blocks ? 2 : 1;
          for (int64_t step = begin, stop; step < chunk_end; step = stop) {
            const int64_t group = step / groups.steps, group_end = (group + 1) * groups.steps;
            stop = group_end < chunk_end ? group_end : chunk_end;
            unit.halves({.x = numbers + (2 * pair * steps + step) * kStepNumbers,
                         .w = room->numbers + (step - begin) * kStepNumbers,
                         .x_stride = steps * kStepNumbers,
                         .w_stride = w_stride,
                         .steps = stop - step,
                         .x_tiles = both,
                         .w_tiles = count,
                         .first = step == group * groups.steps,
                         .sums = sums + pair * kPairSums});
            if (stop < group_end && stop < steps) continue;  // the rest of the group is in the next chunk
            for (int b = 0; b < both; ++b)
              for (int t = 0; t < count; ++t) {
                const int64_t at = pair * kPairSums + (b * count + t) * kSumNumbers;
                add_scaled(sums + at, scales(tile + t, group), rows_of(2 * pair + b), totals + at);
              }
          }
        }
      }
    }
    for (int64_t block = 0; block < blocks; ++block)
      for (int64_t r = 0; r < rows_of(block); ++r) {
        const int64_t row = first + block * kTileSide + r;
        f32x16 of_tiles[2];
        for (int t = 0; t < count; ++t) {
          of_tiles[t] = load(totals + block / 2 * kPairSums + (block % 2 * count + t) * kSumNumbers + r * kTile);
          if (sums_of_x) of_tiles[t] = without_minimums(weight, tile + t, sums_of_x + row * steps, of_tiles[t]);
        }
        count == 2 ? output.write<2>(row, tile, of_tiles) : output.write<1>(row, tile, of_tiles);
      }
  }
}
#endif

}  // namespace
}  // namespace weft
