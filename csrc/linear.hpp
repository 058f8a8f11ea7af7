// Matrix products y = x W^T of weights in every form but float tiles (tiles.hpp). The memory bandwidth of W bounds
// them.
//
//     item     64 rows of W: four tiles of 16
//     inside   up to 6 rows of x at a time; every vector of W that is loaded is multiplied with all of them
//
//     rows (bfloat16, float32)    a row of W times a row of x, added across at the end
//     tiles (int8, int6, int4)    tile | columns 0-3 of 16 rows | columns 4-7 of 16 rows | ...
//                                 a lane is a row of W: nothing is added across, a scale is one multiplication
//
// Tiles are multiplied with x in one of two ways. *Rounded*: x is int8 with a scale for 32 columns, and four products
// of bytes are one lane of vpdpbusd. Integers are exact, and scales are added in the order of the columns. So a row of
// x gives the same bits in any batch. *Exact*: codes are widened to float32, and x is not rounded. Machines without
// vpdpbusd run this too.
#pragma once

#include "code_forms.hpp"

namespace weft {
namespace {

// ``tile`` times ROWS rows of x from ``row`` on -> y [ROWS][kOutRows]. PARTS: groups of a line, 1 where groups are whole
// lines.
template <int BITS, int ROWS, Zero ZERO, int PARTS>
WEFT_INLINE void exact_tile(const Weight& weight, int64_t tile, const Prepared& x, int64_t row, float* y) {
  const int64_t lines = x.lines, groups = (x.padded + weight.group - 1) / weight.group;
  const GroupNumbers scales = GroupNumbers::scales(weight);
  const uint8_t* from = static_cast<const uint8_t*>(weight.data) + tile * lines * tile_line_bytes<BITS>();
  f32x16 total[ROWS] = {};
  f32x16 scale = splat(0), zero = splat(static_cast<float>(kMiddleOf<BITS, ZERO>));
  for (int64_t part = 0; part < lines * PARTS; ++part) {
    if (PARTS == 2 || part * kLine % weight.group == 0) {
      const int64_t group = PARTS == 2 ? part : part * kLine / weight.group;
      scale = scales(tile, group);
      if constexpr (ZERO == Zero::of_group)
        zero = converted<f32x16>(tile_zeros(weight, (tile * groups + group) * kTile));
    }
    f32x16 acc[ROWS] = {};
    const float* values = x.values.data() + row * x.padded + part * (kLine / PARTS);
    for (int half = 0; half < 2 / PARTS; ++half, from += tile_line_bytes<BITS>() / 2)
      for (int pair = 0; pair < 2; ++pair) {
        u32x16 codes[2];
        pair_numbers<BITS, ZERO>(weight, from, pair, codes);
        for (int quad = 0; quad < 2; ++quad)
          for (int j = 0; j < 4; ++j) {
            i32x16 whole = (i32x16)((codes[quad] >> (8 * j)) & 255u);
            if constexpr (ZERO == Zero::looked_up) whole -= kMiddle<8>;  // small numbers, of which 128 would leave less
            const f32x16 wide = converted<f32x16>(whole);
            for (int r = 0; r < ROWS; ++r)
              acc[r] += wide * values[r * x.padded + ((half * 2 + pair) * 2 + quad) * 4 + j];
          }
      }
    for (int r = 0; r < ROWS; ++r) {
      if constexpr (ZERO == Zero::none || ZERO == Zero::looked_up) total[r] += acc[r] * scale;
      else total[r] += (acc[r] - zero * x.value_sums[static_cast<size_t>((row + r) * lines * PARTS + part)]) * scale;
    }
  }
  for (int r = 0; r < ROWS; ++r) store(y + r * kOutRows, total[r]);
}

#if defined(__AVX512F__)
template <int BITS, int ROWS, int TILES, Zero ZERO, int PARTS>
WEFT_VNNI void rounded_tiles(const Weight& weight, int64_t tile, const Prepared& x, int64_t row, float* y) {
  const int64_t lines = x.lines, groups = (x.padded + weight.group - 1) / weight.group;
  const GroupNumbers scales = GroupNumbers::scales(weight);
  const uint8_t* from = static_cast<const uint8_t*>(weight.data) + tile * lines * tile_line_bytes<BITS>();
  const int64_t tile_bytes = lines * tile_line_bytes<BITS>();
  f32x16 total[TILES][ROWS] = {};
  f32x16 scale[TILES] = {};
  __m512i zero[TILES] = {};
  int64_t left = 0, group = 0;
  for (int64_t part = 0; part < lines * PARTS; ++part) {
    if (PARTS == 2 || left == 0) {
      for (int t = 0; t < TILES; ++t) {
        scale[t] = scales(tile + t, group);
        if constexpr (ZERO == Zero::of_group)
          zero[t] = (__m512i)tile_zeros(weight, ((tile + t) * groups + group) * kTile);
      }
      left = weight.group;
      ++group;
    }
    left -= kLine / PARTS;
    __m512i acc[TILES][ROWS];
    for (int r = 0; r < ROWS; ++r) {
      const int32_t sum = ZERO == Zero::none ? 0 : x.sums[static_cast<size_t>((row + r) * lines * PARTS + part)];
      for (int t = 0; t < TILES; ++t)
        acc[t][r] = ZERO == Zero::of_group ? _mm512_mullo_epi32(_mm512_set1_epi32(-sum), zero[t])
                                           : _mm512_set1_epi32(-kMiddleOf<BITS, ZERO> * sum);
    }
    const int8_t* codes = x.codes.data() + row * x.padded + part * (kLine / PARTS);
    for (int half = 0; half < 2 / PARTS; ++half, from += tile_line_bytes<BITS>() / 2)
      for (int pair = 0; pair < 2; ++pair) {
        u32x16 w[TILES][2];
        for (int t = 0; t < TILES; ++t) pair_numbers<BITS, ZERO>(weight, from + t * tile_bytes, pair, w[t]);
        for (int quad = 0; quad < 2; ++quad)
          for (int r = 0; r < ROWS; ++r) {
            int32_t four;
            std::memcpy(&four, codes + r * x.padded + ((half * 2 + pair) * 2 + quad) * 4, sizeof four);
            const __m512i xs = _mm512_set1_epi32(four);
            for (int t = 0; t < TILES; ++t) acc[t][r] = _mm512_dpbusd_epi32(acc[t][r], (__m512i)w[t][quad], xs);
          }
      }
    for (int r = 0; r < ROWS; ++r) {
      const float x_scale = x.scales[static_cast<size_t>((row + r) * lines + part / PARTS)];
      for (int t = 0; t < TILES; ++t) total[t][r] += (f32x16)_mm512_cvtepi32_ps(acc[t][r]) * (scale[t] * x_scale);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int t = 0; t < TILES; ++t) store(y + r * kOutRows + t * kTile, total[t][r]);
}

WEFT_INLINE __m512i signed_bytes(const void* from, int64_t at) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const int8_t*>(from) + at)));
}

// The same for scales that are bytes with a float shared by columns: 256 of a block (``bytes``), or all of a row. A
// byte is a factor of integers, and the float a factor of sums of many groups. That takes a third of the time of a
// float for each group. Minimums are added up in the same loop as products, but after it for six rows of x, whose sums
// would not stay in registers.
template <int BITS, int ROWS, int TILES, Zero ZERO, int PARTS, ScaleForm SCALES>
WEFT_VNNI void rounded_blocks(const Weight& weight, int64_t tile, const Prepared& x, int64_t row, float* y) {
  constexpr bool of_blocks = SCALES == ScaleForm::bytes, minimums = ZERO == Zero::none && ROWS <= 4;
  const int64_t lines = x.lines, block_lines = of_blocks ? 256 / kLine : lines;
  const int64_t blocks = (lines + block_lines - 1) / block_lines;
  const int64_t tile_bytes = lines * tile_line_bytes<BITS>(), tile_numbers = lines * PARTS * kTile;
  const uint8_t* from = static_cast<const uint8_t*>(weight.data) + tile * tile_bytes;
  f32x16 total[TILES][ROWS] = {}, taken_off[TILES][ROWS] = {};
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t end = (block + 1) * block_lines < lines ? (block + 1) * block_lines : lines;
    f32x16 sums[TILES][ROWS] = {}, taken[TILES][ROWS] = {};
    for (int64_t line = block * block_lines; line < end; ++line) {
      __m512i whole[TILES][ROWS];
      f32x16 scaled[TILES][ROWS];
      for (int part = 0; part < PARTS; ++part) {
        __m512i acc[TILES][ROWS];
        const auto sum_at = [&](int r) { return static_cast<size_t>(((row + r) * lines + line) * PARTS + part); };
        for (int r = 0; r < ROWS; ++r)
          for (int t = 0; t < TILES; ++t)
            acc[t][r] = ZERO == Zero::none ? _mm512_setzero_si512()
                                           : _mm512_set1_epi32(-kMiddleOf<BITS, ZERO> * x.sums[sum_at(r)]);
        const int8_t* codes = x.codes.data() + row * x.padded + line * kLine + part * kHalfLine;
        for (int half = 0; half < 2 / PARTS; ++half, from += tile_line_bytes<BITS>() / 2)
          for (int pair = 0; pair < 2; ++pair) {
            u32x16 w[TILES][2];
            for (int t = 0; t < TILES; ++t) pair_numbers<BITS, ZERO>(weight, from + t * tile_bytes, pair, w[t]);
            for (int quad = 0; quad < 2; ++quad)
              for (int r = 0; r < ROWS; ++r) {
                int32_t four;
                std::memcpy(&four, codes + r * x.padded + ((half * 2 + pair) * 2 + quad) * 4, sizeof four);
                const __m512i xs = _mm512_set1_epi32(four);
                for (int t = 0; t < TILES; ++t) acc[t][r] = _mm512_dpbusd_epi32(acc[t][r], (__m512i)w[t][quad], xs);
              }
          }
        for (int t = 0; t < TILES; ++t) {
          const int64_t at = (tile + t) * tile_numbers + (line * PARTS + part) * kTile;
          if constexpr (of_blocks) {
            const __m512i scale = signed_bytes(weight.scales, at);
            for (int r = 0; r < ROWS; ++r) {
              const __m512i one = _mm512_mullo_epi32(acc[t][r], scale);  // below 2^24, for ggml's forms
              whole[t][r] = part ? _mm512_add_epi32(whole[t][r], one) : one;
            }
          } else {
            const uint8_t* const numbers = static_cast<const uint8_t*>(weight.scales) + at;
            const f32x16 scale = SCALES == ScaleForm::e8m0 ? powers_of_two(numbers) : small_floats(numbers);
            for (int r = 0; r < ROWS; ++r) {
              const f32x16 one = (f32x16)_mm512_cvtepi32_ps(acc[t][r]);
              scaled[t][r] = part ? fused(one, scale, scaled[t][r]) : one * scale;
            }
          }
          if constexpr (minimums) {
            const f32x16 minimum = (f32x16)_mm512_cvtepi32_ps(signed_bytes(weight.minimums, at));
            for (int r = 0; r < ROWS; ++r) taken[t][r] = fused(minimum, splat(x.value_sums[sum_at(r)]), taken[t][r]);
          }
        }
      }
      for (int r = 0; r < ROWS; ++r) {
        const f32x16 x_scale = splat(x.scales[static_cast<size_t>((row + r) * lines + line)]);
        for (int t = 0; t < TILES; ++t) {
          if constexpr (of_blocks) sums[t][r] = fused((f32x16)_mm512_cvtepi32_ps(whole[t][r]), x_scale, sums[t][r]);
          else sums[t][r] = fused(scaled[t][r], x_scale, sums[t][r]);
        }
      }
    }
    for (int t = 0; t < TILES; ++t) {
      const int64_t at = ((tile + t) * blocks + block) * kTile;
      const f32x16 shared = of_blocks ? load_halves(weight.block_scales + at) : load(weight.row_scales + at);
      const f32x16 minimum = minimums ? load_halves(weight.block_minimums + at) : splat(0);
      for (int r = 0; r < ROWS; ++r) {
        if constexpr (of_blocks) total[t][r] = fused(sums[t][r], shared, total[t][r]);
        else if constexpr (SCALES == ScaleForm::e8m0) total[t][r] = sums[t][r] * shared;
        else if constexpr (SCALES == ScaleForm::e4m3) total[t][r] = sums[t][r] * kSmallFloats * shared;
        else total[t][r] = sums[t][r] * kSmallFloats / shared;
        if constexpr (minimums) taken_off[t][r] = fused(taken[t][r], minimum, taken_off[t][r]);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int t = 0; t < TILES; ++t)
      store(y + r * kOutRows + t * kTile, minimums ? total[t][r] - taken_off[t][r] : total[t][r]);
}

// Subtracts the minimums that ``rounded_blocks`` does not add up itself, with the same bits, after a product.
template <int ROWS, int PARTS>
void take_block_minimums(const Weight& weight, int64_t tile, int tiles, const Prepared& x, int64_t row, float* y) {
  const int64_t groups = x.lines * PARTS, block_groups = 256 / kLine * PARTS,
                blocks = (groups + block_groups - 1) / block_groups;
  const float* const sums = x.value_sums.data() + row * groups;
  for (int t = 0; t < tiles; ++t) {
    f32x16 taken_off[ROWS] = {};
    for (int64_t block = 0, group = 0; block < blocks; ++block) {
      f32x16 taken[ROWS] = {};
      for (const int64_t end = group + block_groups < groups ? group + block_groups : groups; group < end; ++group) {
        const __m512i bytes = signed_bytes(weight.minimums, ((tile + t) * groups + group) * kTile);
        const f32x16 minimum = (f32x16)_mm512_cvtepi32_ps(bytes);
        for (int r = 0; r < ROWS; ++r) taken[r] = fused(minimum, splat(sums[r * groups + group]), taken[r]);
      }
      const f32x16 minimum = load_halves(weight.block_minimums + ((tile + t) * blocks + block) * kTile);
      for (int r = 0; r < ROWS; ++r) taken_off[r] = fused(taken[r], minimum, taken_off[r]);
    }
    for (int r = 0; r < ROWS; ++r) {
      float* const to = y + r * kOutRows + t * kTile;
      store(to, load(to) - taken_off[r]);
    }
  }
}

// Tiles that a pass takes. Few rows are bound by reading W, and one stream from memory comes faster than four that are
// 8 KiB apart: 32 bytes in a nanosecond, not 21, on Zen 4. A tile's sums wait for one another, but the next line's do
// not wait for them. With more rows two tiles share the loaded numbers of x; more would spill.
template <int ROWS>
constexpr int kTilesTogether = ROWS <= kOneTileRows ? 1 : 2;

template <int BITS, int ROWS, Zero ZERO, int PARTS, ScaleForm SCALES>
void blocks_item(const Weight& weight, int64_t tile, int tiles, const Prepared& x, int64_t row, float* y) {
  constexpr int together = kTilesTogether<ROWS>;
  int t = 0;
  for (; t + together <= tiles; t += together)
    rounded_blocks<BITS, ROWS, together, ZERO, PARTS, SCALES>(weight, tile + t, x, row, y + t * kTile);
  for (; t < tiles; ++t) rounded_blocks<BITS, ROWS, 1, ZERO, PARTS, SCALES>(weight, tile + t, x, row, y + t * kTile);
  if constexpr (ZERO == Zero::none && ROWS > 4) take_block_minimums<ROWS, PARTS>(weight, tile, tiles, x, row, y);
}

// Few rows of x: one row of W after the other, so that W is one stream from memory (several short ones defeat the
// prefetcher). Sums are in several parts, so that they do not wait for one another.
template <int ROWS>
WEFT_BF16 void bf16_rows(const Weight& weight, int64_t first, const Prepared& x, int64_t row, float* y, int64_t count) {
  constexpr int together = ROWS <= 2 ? 1 : 2, parts = ROWS <= 2 ? 4 : ROWS <= 4 ? 2 : 1;
  const bf16* values = x.halves.data() + row * x.padded;
  for (int64_t o = 0; o < count; o += together) {
    const bf16* w[together];
    for (int i = 0; i < together; ++i)  // past the end, the last row again, whose sum is not stored
      w[i] = static_cast<const bf16*>(weight.data) + (first + (o + i < count ? o + i : count - 1)) * weight.in;
    __m512 acc[together][parts][ROWS] = {};
    int64_t i = 0;
    const auto line = [&](int part) __attribute__((always_inline, target("avx512bf16"))) {
      __m512i from[ROWS];
      for (int r = 0; r < ROWS; ++r) from[r] = _mm512_loadu_si512(values + r * x.padded + i);
      for (int j = 0; j < together; ++j) {
        const __m512i bits = _mm512_loadu_si512(w[j] + i);
        for (int r = 0; r < ROWS; ++r)
          acc[j][part][r] = _mm512_dpbf16_ps(acc[j][part][r], (__m512bh)bits, (__m512bh)from[r]);
      }
      i += kLine;
    };
    while (i + parts * kLine <= weight.in)
      for (int part = 0; part < parts; ++part) line(part);
    while (i < weight.in) line(0);
    for (int j = 0; j < together && o + j < count; ++j)
      for (int r = 0; r < ROWS; ++r) {
        __m512 all = acc[j][0][r];
        for (int part = 1; part < parts; ++part) all = _mm512_add_ps(all, acc[j][part][r]);
        y[r * kOutRows + o + j] = _mm512_reduce_add_ps(all);
      }
  }
}
#endif

template <class W, int ROWS>
void float_rows(const Weight& weight, int64_t first, const Prepared& x, int64_t row, float* y, int64_t count) {
  constexpr int together = ROWS <= 4 ? 4 : 2;
  for (int64_t o = 0; o < count; o += together) {
    const W* w[together];
    for (int i = 0; i < together; ++i)
      w[i] = static_cast<const W*>(weight.data) + (first + (o + i < count ? o + i : count - 1)) * weight.in;
    const float* values = x.values.data() + row * x.padded;
    f32x16 acc[together][ROWS] = {};
    for (int64_t i = 0; i < weight.in; i += 16)
      for (int j = 0; j < together; ++j) {
        const f32x16 wide = load(w[j] + i);
        for (int r = 0; r < ROWS; ++r) acc[j][r] += wide * load(values + r * x.padded + i);
      }
    for (int j = 0; j < together && o + j < count; ++j)
      for (int r = 0; r < ROWS; ++r) y[r * kOutRows + o + j] = sum(acc[j][r]);
  }
}

// Subtracts minimums times the sums of x in their groups, group after group, after a product. So a row of x has the
// same bits in any batch here too.
template <int ROWS>
void take_minimums(const Weight& weight, int64_t tile, int tiles, const Prepared& x, int64_t row, float* y) {
  const GroupNumbers minimums = GroupNumbers::minimums(weight);
  const int64_t parts = x.lines * x.parts, of_group = weight.group / (kLine / x.parts);
  const float* const sums = x.value_sums.data() + row * parts;
  for (int t = 0; t < tiles; ++t) {
    f32x16 taken[ROWS] = {};
    for (int64_t part = 0, group = 0; part < parts; ++group) {
      const f32x16 minimum = minimums(tile + t, group);
      for (const int64_t end = part + of_group < parts ? part + of_group : parts; part < end; ++part)
        for (int r = 0; r < ROWS; ++r) taken[r] = fused(minimum, splat(sums[r * parts + part]), taken[r]);
    }
    for (int r = 0; r < ROWS; ++r) {
      float* const to = y + r * kOutRows + t * kTile;
      store(to, load(to) - taken[r]);
    }
  }
}

template <int BITS, int ROWS, Zero ZERO, int PARTS>
void tile_item(const Weight& weight, int64_t first, const Prepared& x, int64_t row, float* y, int64_t count) {
  const int64_t tile = first / kTile;
  const int tiles = static_cast<int>((count + kTile - 1) / kTile);
  int t = 0;
#if defined(__AVX512F__)
  if (x.kind == Inputs::codes && weight.scale_form == ScaleForm::bytes && ZERO != Zero::of_group)
    return blocks_item<BITS, ROWS, ZERO, PARTS, ScaleForm::bytes>(weight, tile, tiles, x, row, y);
  if constexpr (ZERO == Zero::looked_up) {
    if (x.kind == Inputs::codes && weight.scale_form == ScaleForm::e8m0)
      return blocks_item<BITS, ROWS, ZERO, PARTS, ScaleForm::e8m0>(weight, tile, tiles, x, row, y);
    if (x.kind == Inputs::codes && weight.scale_form == ScaleForm::e4m3)
      return blocks_item<BITS, ROWS, ZERO, PARTS, ScaleForm::e4m3>(weight, tile, tiles, x, row, y);
    if (x.kind == Inputs::codes && weight.scale_form == ScaleForm::e4m3_divided)
      return blocks_item<BITS, ROWS, ZERO, PARTS, ScaleForm::e4m3_divided>(weight, tile, tiles, x, row, y);
  }
  if (x.kind == Inputs::codes) {
    constexpr int together = kTilesTogether<ROWS>;
    for (; t + together <= tiles; t += together)
      rounded_tiles<BITS, ROWS, together, ZERO, PARTS>(weight, tile + t, x, row, y + t * kTile);
    for (; t < tiles; ++t) rounded_tiles<BITS, ROWS, 1, ZERO, PARTS>(weight, tile + t, x, row, y + t * kTile);
  }
#endif
  for (; t < tiles; ++t) exact_tile<BITS, ROWS, ZERO, PARTS>(weight, tile + t, x, row, y + t * kTile);
  if constexpr (ZERO == Zero::none || ZERO == Zero::middle)
    if (weight.minimums) take_minimums<ROWS>(weight, tile, tiles, x, row, y);
}

template <int BITS, int ROWS>
void codes_item(const Weight& weight, int64_t first, const Prepared& x, int64_t row, float* y, int64_t count) {
  const Zero zero = zero_of(weight);
  if constexpr (BITS != 6)
    if (zero == Zero::of_group) return tile_item<BITS, ROWS, Zero::of_group, 1>(weight, first, x, row, y, count);
  if constexpr (BITS == 4)
    if (zero == Zero::looked_up)
      return x.parts == 2 ? tile_item<BITS, ROWS, Zero::looked_up, 2>(weight, first, x, row, y, count)
                          : tile_item<BITS, ROWS, Zero::looked_up, 1>(weight, first, x, row, y, count);
  if (x.parts == 2) {
    if (zero == Zero::none) return tile_item<BITS, ROWS, Zero::none, 2>(weight, first, x, row, y, count);
    return tile_item<BITS, ROWS, Zero::middle, 2>(weight, first, x, row, y, count);
  }
  if (zero == Zero::none) return tile_item<BITS, ROWS, Zero::none, 1>(weight, first, x, row, y, count);
  return tile_item<BITS, ROWS, Zero::middle, 1>(weight, first, x, row, y, count);
}

template <int ROWS>
void item_of(const Weight& weight, int64_t first, const Prepared& x, int64_t row, float* y, int64_t count) {
  switch (weight.form) {
    case WeightForm::float32: return float_rows<float, ROWS>(weight, first, x, row, y, count);
    case WeightForm::bfloat16:
#if defined(__AVX512F__)
      if (x.kind == Inputs::halves) return bf16_rows<ROWS>(weight, first, x, row, y, count);
#endif
      return float_rows<bf16, ROWS>(weight, first, x, row, y, count);
    case WeightForm::bfloat16_tiles:
    case WeightForm::float32_tiles:
    case WeightForm::bfloat16_twelve_bit:
    case WeightForm::bfloat16_fp8:
    case WeightForm::bfloat16_four_bits:
    case WeightForm::int8_both: return;  // see tiles.hpp, w8a8.hpp
    case WeightForm::int8: return codes_item<8, ROWS>(weight, first, x, row, y, count);
    case WeightForm::int6: return codes_item<6, ROWS>(weight, first, x, row, y, count);
    case WeightForm::int4: return codes_item<4, ROWS>(weight, first, x, row, y, count);
  }
}

// y [kRowsTogether][kOutRows] = rows [first, first + count) of W times rows [row, row + rows) of x. ``first`` is a multiple
// of 16, ``count`` at most an item, ``rows`` at most 6. Sums have the same order for any number of rows.
void item_products(const Weight& weight, int64_t first, int64_t count, const Prepared& x, int64_t row, int64_t rows,
                   float* y) {
  if (rows > 4) return item_of<6>(weight, first, x, row, y, count);
  if (rows > 2) return item_of<4>(weight, first, x, row, y, count);
  if (rows > 1) return item_of<2>(weight, first, x, row, y, count);
  item_of<1>(weight, first, x, row, y, count);
}

template <class T>
void write_row(T* to, const float* y, const float* bias, int64_t count) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) store(to + i, bias ? load(y + i) + load(bias + i) : load(y + i));
  for (; i < count; ++i) narrow(to + i, bias ? y[i] + bias[i] : y[i]);
}

template <class T>
void linear_in(const LinearArgs& args) {
  static thread_local Prepared buffer;
  Prepared& x = buffer;
  const Weight& weight = args.weight;
  x.resize(weight, args.exact, args.rows);
  const auto set = [&](int64_t row) { x.set_row(row, static_cast<const T*>(args.x) + row * args.x_stride, weight.in); };
  if (args.rows < kRowsTogether)
    for (int64_t row = 0; row < args.rows; ++row) set(row);
  else Pool::instance().for_each(args.rows, set);
  Pool::instance().for_each((weight.out + kOutRows - 1) / kOutRows, [&](int64_t item) {
    const int64_t first = item * kOutRows;
    const int64_t count = weight.out - first < kOutRows ? weight.out - first : kOutRows;
    alignas(64) float y[kRowsTogether * kOutRows];
    for (int64_t row = 0; row < args.rows; row += kRowsTogether) {
      const int64_t rows = args.rows - row < kRowsTogether ? args.rows - row : kRowsTogether;
      item_products(weight, first, count, x, row, rows, y);
      for (int64_t r = 0; r < rows; ++r)
        write_row(static_cast<T*>(args.out) + (row + r) * weight.out + first, y + r * kOutRows,
                  args.bias ? args.bias + first : nullptr, count);
    }
  });
}

template <int BITS, class T>
void widen_tiles(const WidenArgs& args) {
  const Weight& weight = args.weight;
  const int64_t lines = (weight.in + kLine - 1) / kLine, groups = (lines * kLine + weight.group - 1) / weight.group;
  const GroupNumbers scales = GroupNumbers::scales(weight), minimums = GroupNumbers::minimums(weight);
  Pool::instance().for_each((args.last - args.first + kTile - 1) / kTile, [&](int64_t item) {
    const int64_t tile = args.first / kTile + item;
    const uint8_t* from = static_cast<const uint8_t*>(weight.data) + tile * lines * tile_line_bytes<BITS>();
    T* const to = static_cast<T*>(args.out) + item * kTile;
    for (int64_t half = 0; half < 2 * lines; ++half, from += tile_line_bytes<BITS>() / 2) {
      const int64_t group = half * kHalfLine / weight.group;
      const f32x16 scale = scales(tile, group), minimum = weight.minimums ? minimums(tile, group) : splat(0);
      const f32x16 zero = weight.minimums && !weight.middle ? splat(0)
                          : weight.zeros ? converted<f32x16>(tile_zeros(weight, (tile * groups + group) * kTile))
                                         : splat(static_cast<float>(weight.table ? kMiddle<8> : kMiddle<BITS>));
      for (int i = 0; i < kHalfLine; ++i) {
        const int64_t column = half * kHalfLine + i;
        if (column >= weight.in) break;
        u32x16 codes[2];
        pair_codes<BITS>(from, i / 8, codes);
        if (weight.table) codes[i / 4 % 2] = looked_up(codes[i / 4 % 2], weight.table);
        const u32x16 code = (codes[i / 4 % 2] >> (8 * (i % 4))) & 255u;
        const f32x16 value = (converted<f32x16>((i32x16)code) - zero) * scale;
        store(to + column * args.stride, weight.minimums ? value - minimum : value);
      }
    }
  });
}

template <class T>
void widen_weight_to(const WidenArgs& args) {
  if (args.weight.form == WeightForm::int8) return widen_tiles<8, T>(args);
  if (args.weight.form == WeightForm::int6) return widen_tiles<6, T>(args);
  widen_tiles<4, T>(args);
}

void widen_weight(const WidenArgs& args) {
  if (args.out_dtype == Dtype::bfloat16) widen_weight_to<bf16>(args);
  else widen_weight_to<float>(args);
}

}  // namespace
}  // namespace weft
