// Bfloat16 weights that are codes in memory: fp8 (e4m3), or 4 bits with a table of 16 floats (nf4, fp4).
//
//     weight   bfloat16(number of the code x scale)         a scale for each row and group of columns, or for a tile
//     unit     8 columns of 16 rows, in lines of 64 bytes
//                fp8            columns 0-3, then columns 4-7. A pair of columns is in word order, 16 bytes of 4
//                               rows after the other
//                fp8 by rows    words: a column's rows 4 n and 4 n + 1. Then 4 n + 2 and 4 n + 3
//                4 bits         words: a column's rows 4 n to 4 n + 3
//                               words of 8 columns, 16 bytes, for n = 0, 1, 2, 3
//     two tiles  a unit of one, a unit of the other, ...: one stream from memory, as in twelve_bit.hpp
//
// Conversion of a code to a weight by floats, for CPUs without look-ups and for scales that these do not take. One
// arithmetic shift moves sign, exponent and fraction of e4m3 to their places. The scale is larger by 2^120, which the
// exponents differ by. Denormals come out right, so none may be flushed.
//
// Bytes of 64 weights are looked up at once in coded_tiles.hpp, words of 32 in coded_words.hpp.
#pragma once

#include "tile_units.hpp"

namespace weft {
namespace {

constexpr bool is_coded(WeightForm form) {
  return form == WeightForm::bfloat16_fp8 || form == WeightForm::bfloat16_four_bits;
}

#if defined(__AVX512F__)
#define WEFT_VBMI __attribute__((target("avx512bf16,avx512vbmi,gfni")))
#define WEFT_VBMI_PART __attribute__((always_inline, target("avx512bf16,avx512vbmi,gfni")))
WEFT_EACH(each_coded, WEFT_VBMI_PART)

constexpr float kFp8Up = 0x1p120f;
constexpr int kMostPower = 127 + 6;  // a byte of e8m0: 2^6 is below the least scale (tiles.py)
constexpr int kCodedRows = 4;

template <bool FP8>
constexpr int64_t kCodedBytes = kUnitWords / (FP8 ? 1 : 2);  // of a unit

enum class Lookup { four_bits, fp8_tile, fp8_powers, fp8_rows };

Lookup lookup_of(const Weight& weight) {
  if (weight.form == WeightForm::bfloat16_four_bits) return Lookup::four_bits;
  return weight.scale_form == ScaleForm::of_tiles ? Lookup::fp8_tile
         : weight.scale_form == ScaleForm::e8m0   ? Lookup::fp8_powers
                                                  : Lookup::fp8_rows;
}

// Codes in words, whose products add up four sums for each row of W.
constexpr bool in_words(Lookup kind) { return kind == Lookup::four_bits || kind == Lookup::fp8_rows; }

// One tile of a coded weight.
template <Lookup KIND>
struct CodedTile {
  static constexpr bool FP8 = KIND != Lookup::four_bits;
  static constexpr int64_t kStep = kTwelveBitTiles * kCodedBytes<FP8>;
  const uint8_t* units;
  const void* scales;
  ScaleForm form;
  int64_t units_of_group;
  __m512 table;

  CodedTile(const Weight& weight, int64_t tile)
      : units(static_cast<const uint8_t*>(weight.data) + tile / 2 * (weight.in / kUnitColumns) * kStep +
              tile % 2 * kCodedBytes<FP8>),
        form(weight.scale_form),
        units_of_group(weight.group / kUnitColumns) {
    const int64_t groups = (weight.in + weight.group - 1) / weight.group;
    const int64_t bytes = form == ScaleForm::of_tiles ? 4 : form == ScaleForm::e8m0 ? kTile : 4 * kTile;
    scales = static_cast<const char*>(weight.scales) + tile * groups * bytes;
    table = FP8 ? _mm512_setzero_ps() : _mm512_loadu_ps(reinterpret_cast<const float*>(weight.table));
  }

  WEFT_INLINE const uint8_t* powers(int64_t unit) const {
    return static_cast<const uint8_t*>(scales) + unit / units_of_group * kTile;
  }

  // Scale of the group that ``unit`` is in.
  WEFT_INLINE __m512 scale(int64_t unit) const { return scale_of(unit / units_of_group); }

  WEFT_INLINE __m512 scale_of(int64_t group) const {
    if (form == ScaleForm::of_tiles) return _mm512_set1_ps(static_cast<const float*>(scales)[group]);
    if (form == ScaleForm::e8m0) return (__m512)powers_of_two(static_cast<const uint8_t*>(scales) + group * kTile);
    return _mm512_loadu_ps(static_cast<const float*>(scales) + group * kTile);
  }

  // Column ``COLUMN`` of 8, times its scale.
  template <int COLUMN>
  WEFT_INLINE __m512 number(const uint8_t* unit, __m512 scale) const {
    constexpr int PAIR = COLUMN / 2, SECOND = COLUMN % 2;
    const auto spread = [&](int line) WEFT_WIDE_PART {
      return _mm512_shuffle_epi32(_mm512_loadu_si512(unit + 64 * line), static_cast<_MM_PERM_ENUM>(PAIR * 0x55));
    };
    const auto fp8_of = [&](__m512i bits) WEFT_WIDE_PART {
      return _mm512_mul_ps(number_of(_mm512_srai_epi32(bits, 4)), _mm512_mul_ps(scale, _mm512_set1_ps(kFp8Up)));
    };
    if constexpr (KIND == Lookup::four_bits) {
      const __m512i shifts = _mm512_set4_epi32(12 + 16 * SECOND, 8 + 16 * SECOND, 4 + 16 * SECOND, 16 * SECOND);
      return _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_srlv_epi32(spread(0), shifts), table), scale);
    } else if constexpr (KIND == Lookup::fp8_rows) {
      const __m512i shifts = _mm512_set4_epi32(16 - 16 * SECOND, 24 - 16 * SECOND, 16 - 16 * SECOND, 24 - 16 * SECOND);
      return fp8_of(_mm512_sllv_epi32(_mm512_mask_blend_epi32(0xCCCC, spread(0), spread(1)), shifts));
    } else {
      const __m512i zero = _mm512_setzero_si512(), line = _mm512_loadu_si512(unit + PAIR / 2 * 64);
      const __m512i words = PAIR % 2 ? _mm512_unpackhi_epi8(zero, line) : _mm512_unpacklo_epi8(zero, line);
      return fp8_of(SECOND ? words : _mm512_slli_epi32(words, 16));
    }
  }

  // e4m3 whose sign, exponent and fraction begin at bit 31, 26 and 22.
  static WEFT_INLINE __m512 number_of(__m512i bits) {
    return _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0x87F00000u))));
  }
};

// Rounded to bfloat16, in the upper half of each lane.
WEFT_INLINE __m512i rounded_up_half(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x),
                odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7FFF));
}

// The weights of a unit by floats: pairs of columns of 16 rows, as they are in tiles.hpp.
template <Lookup KIND>
WEFT_INLINE void pairs_by_floats(const CodedTile<KIND>& tile, const uint8_t* unit, __m512 scale, __m512i* pairs) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
  each_wide<kUnitPairs>([&](auto p) WEFT_WIDE_PART {
    const __m512i first = rounded_up_half(tile.template number<2 * p>(unit, scale));
    const __m512i second = rounded_up_half(tile.template number<2 * p + 1>(unit, scale));
    pairs[p] = _mm512_or_si512(_mm512_srli_epi32(first, 16), _mm512_and_si512(second, upper));
  });
}

template <Lookup KIND>
__attribute__((noinline, cold)) void rare_pairs(const CodedTile<KIND>& tile, const uint8_t* unit, __m512 scale,
                                                __m512i* pairs) {
  pairs_by_floats(tile, unit, scale, pairs);
}

// A constant that the compiler does not compute again, with a shuffle, in each iteration of a loop.
WEFT_INLINE __m512i opaque(__m512i constant) {
  asm("" : "+v"(constant));
  return constant;
}

// ``second`` after ``first``, rounded.
WEFT_VBMI_PART inline __m512i words_of(__m512 first, __m512 second) {
  return (__m512i)_mm512_cvtne2ps_pbh(second, first);
}
#endif

}  // namespace
}  // namespace weft
