// Tiles of bfloat16 that are codes in memory: fp8 (e4m3), or 4 bits that a table of 16 floats stands for (nf4, fp4).
//
//     weight   bfloat16(number of the code x scale)         a scale for each row and group of columns, or for a tile
//     unit     8 columns of 16 rows: a pair of columns lies as it becomes words, 16 bytes of 4 rows after the other
//                fp8      columns 0-3, columns 4-7                        2 lines of 64 bytes
//                4 bits   rows 0, 2, ... in the lower halves              1 line
//     two tiles  a unit of one, a unit of the other, ...: one stream from memory, as in twelve_bit.inl
//
// The weights are those of the model that was widened to bfloat16, and sums have the order of tiles.inl. So a product has
// the bits of the widened model, of one row as of many.
//
//     up to 4 rows of x    codes become weights in registers; 4 rows meet two tiles
//     more                 four tiles are unpacked into the L2 cache once, for all rows of a part of x
//
// A group has few different weights. So what a code may become is rounded once for the group. A table of 128 bytes then
// gives the lower bytes of 64 weights, and another the upper ones (vpermi2b):
//
//     table of            has                               and then
//     fp8, scale of a tile    the tile's 128 numbers            the sign
//     fp8, powers of two      128 numbers of the largest power  what the power has less is taken off, but of zeros
//     fp8, scales of rows     8 fractions of 16 rows            sign and exponent are added; codes without an exponent
//                                                               have tables of their own
//     4 bits                  16 numbers of 8 rows, twice       dwords of both are interleaved
//
// Exponents are added where no power leaves bfloat16's normal numbers. Another group takes the way of CPUs without
// look-ups: floats, and a rounding of each. There one arithmetic shift moves sign, exponent and fraction of e4m3 to their
// places. The scale is larger by 2^120, which the exponents differ by. Denormals come out right, so none may be flushed.
//
// Rejected: scales behind the sums of a group (faster, but other weights than the library's: they are never rounded).
// CPUs with products of pairs and without look-ups of bytes (Cooper Lake) have no kernels here.

namespace weft {
namespace {

bool is_coded(WeightForm form) { return form == WeightForm::bfloat16_fp8 || form == WeightForm::bfloat16_four_bits; }

#if defined(__AVX512F__)
#define WEFT_VBMI __attribute__((target("avx512bf16,avx512vbmi,gfni")))
#define WEFT_VBMI_PART __attribute__((always_inline, target("avx512bf16,avx512vbmi,gfni")))
WEFT_EACH(each_coded, WEFT_VBMI_PART)

constexpr float kFp8Up = 0x1p120f;
constexpr int kMostPower = 127 + 6;  // a byte of e8m0: 2^6 is below what a scale may be (tiles.py)
constexpr int kCodedRows = 4;

bool serves_coded() {
  static const bool serves = !has_bf16_dot() || (__builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("gfni"));
  return serves;
}

template <bool FP8>
constexpr int64_t kCodedBytes = kUnitWords / (FP8 ? 1 : 2);  // of a unit

// One tile of a coded weight.
template <bool FP8>
struct CodedTile {
  static constexpr int64_t kStep = kTwelveBitTiles * kCodedBytes<FP8>;
  const uint8_t* units;
  const void* scales;
  ScaleForm form;
  int64_t units_of_group;
  __m512 table;

  CodedTile(const Weight& weight, int64_t tile)
      : units(static_cast<const uint8_t*>(weight.data) + tile / 2 * (weight.in / kUnitColumns) * kStep + tile % 2 * kCodedBytes<FP8>),
        form(weight.scale_form), units_of_group(weight.group / kUnitColumns) {
    const int64_t groups = (weight.in + weight.group - 1) / weight.group;
    const int64_t bytes = form == ScaleForm::of_tiles ? 4 : form == ScaleForm::e8m0 ? kTile : 4 * kTile;
    scales = static_cast<const char*>(weight.scales) + tile * groups * bytes;
    table = FP8 ? _mm512_setzero_ps() : _mm512_loadu_ps(reinterpret_cast<const float*>(weight.table));
  }

  WEFT_INLINE const uint8_t* powers(int64_t unit) const {
    return static_cast<const uint8_t*>(scales) + unit / units_of_group * kTile;
  }

  // Of the group that ``unit`` is in.
  WEFT_INLINE __m512 scale(int64_t unit) const {
    const int64_t group = unit / units_of_group;
    if (form == ScaleForm::of_tiles) return _mm512_set1_ps(static_cast<const float*>(scales)[group]);
    if (form == ScaleForm::e8m0) return (__m512)powers_of_two(powers(unit));
    return _mm512_loadu_ps(static_cast<const float*>(scales) + group * kTile);
  }

  // Column ``COLUMN`` of 8, times its scale.
  template <int COLUMN>
  WEFT_INLINE __m512 number(const uint8_t* unit, __m512 scale) const {
    constexpr int PAIR = COLUMN / 2, SECOND = COLUMN % 2;
    const __m512i line = _mm512_loadu_si512(unit + (FP8 ? PAIR / 2 * 64 : 0));
    if constexpr (FP8) {
      const __m512i zero = _mm512_setzero_si512();
      const __m512i words = PAIR % 2 ? _mm512_unpackhi_epi8(zero, line) : _mm512_unpacklo_epi8(zero, line);
      const __m512i bits = _mm512_srai_epi32(SECOND ? words : _mm512_slli_epi32(words, 16), 4);
      return _mm512_mul_ps(number_of(bits), _mm512_mul_ps(scale, _mm512_set1_ps(kFp8Up)));
    } else {
      const __m512i shifts = _mm512_set4_epi32(20 + 8 * SECOND, 16 + 8 * SECOND, 4 + 8 * SECOND, 8 * SECOND);
      const __m512i pair = _mm512_shuffle_epi32(line, static_cast<_MM_PERM_ENUM>(PAIR * 0x55));
      return _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_srlv_epi32(pair, shifts), table), scale);
    }
  }

  // e4m3 whose sign, exponent and fraction begin at bit 31, 26 and 22.
  static WEFT_INLINE __m512 number_of(__m512i bits) {
    return _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0x87F00000u))));
  }
};

// Rounded to bfloat16, in the upper half of each lane.
WEFT_INLINE __m512i rounded_up_half(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7FFF));
}

// The weights of a unit by floats: pairs of columns of 16 rows, as they are in tiles.inl.
template <bool FP8>
WEFT_INLINE void pairs_by_floats(const CodedTile<FP8>& tile, const uint8_t* unit, __m512 scale, __m512i* pairs) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
  each_wide<kUnitPairs>([&](auto p) WEFT_WIDE_PART {
    const __m512i first = rounded_up_half(tile.template number<2 * p>(unit, scale));
    const __m512i second = rounded_up_half(tile.template number<2 * p + 1>(unit, scale));
    pairs[p] = _mm512_or_si512(_mm512_srli_epi32(first, 16), _mm512_and_si512(second, upper));
  });
}

template <bool FP8>
__attribute__((noinline, cold)) void rare_pairs(const CodedTile<FP8>& tile, const uint8_t* unit, __m512 scale, __m512i* pairs) {
  pairs_by_floats(tile, unit, scale, pairs);
}

enum class Lookup { four_bits, fp8_tile, fp8_powers, fp8_rows };

Lookup lookup_of(const Weight& weight) {
  if (weight.form == WeightForm::bfloat16_four_bits) return Lookup::four_bits;
  return weight.scale_form == ScaleForm::of_tiles ? Lookup::fp8_tile : weight.scale_form == ScaleForm::e8m0 ? Lookup::fp8_powers : Lookup::fp8_rows;
}

// A constant that the compiler does not make again, with a shuffle, in each turn of a loop.
WEFT_INLINE __m512i opaque(__m512i constant) {
  asm("" : "+v"(constant));
  return constant;
}

template <class Byte>
WEFT_INLINE __m512i bytes_by_place(const Byte& byte) {
  uint8_t bytes[64];
  for (int i = 0; i < 64; ++i) bytes[i] = static_cast<uint8_t>(byte(i));
  return _mm512_loadu_si512(bytes);
}

// 128 words as two tables of 128 bytes: what ``at`` of 7 bits gives is a byte for each byte.
struct ByteTables {
  __m512i low[2], high[2];

  WEFT_VBMI_PART inline void set(const __m512i (&words)[4]) {
    const __m512i lows = bytes_by_place([](int i) { return 2 * i; });
    const __m512i highs = bytes_by_place([](int i) { return 2 * i + 1; });
    for (int half = 0; half < 2; ++half) {
      low[half] = _mm512_permutex2var_epi8(words[2 * half], lows, words[2 * half + 1]);
      high[half] = _mm512_permutex2var_epi8(words[2 * half], highs, words[2 * half + 1]);
    }
  }
  WEFT_VBMI_PART inline __m512i lows(__m512i at) const { return _mm512_permutex2var_epi8(low[0], at, low[1]); }
  WEFT_VBMI_PART inline __m512i highs(__m512i at) const { return _mm512_permutex2var_epi8(high[0], at, high[1]); }
};

// ``second`` behind ``first``, rounded.
WEFT_VBMI_PART inline __m512i words_of(__m512 first, __m512 second) { return (__m512i)_mm512_cvtne2ps_pbh(second, first); }

// What a tile's codes of the group at hand become.
template <Lookup KIND>
struct Group {
  static constexpr bool FP8 = KIND != Lookup::four_bits;
  CodedTile<FP8> tile;
  __m512 scale;
  ByteTables tables[KIND == Lookup::four_bits ? 2 : 1];
  ByteTables without_exponent;
  __m512i powers;
  // Bits of a code that choose within a table, and of a byte's place: which of the table's rows.
  __m512i within, rows, exponent, of_highs, of_lows, sign;
  bool rare = false;

  WEFT_VBMI_PART Group(const Weight& weight, int64_t at) : tile(weight, at) {
    within = opaque(_mm512_set1_epi8(FP8 ? 7 : 15));
    rows = opaque(FP8 ? bytes_by_place([](int i) { return 8 * (i / 16 * 4 + i / 2 % 4); })
                    : bytes_by_place([](int i) { return 16 * (i / 16 * 2 + i / 2 % 2); }));
    exponent = opaque(_mm512_set1_epi8(0x78));
    of_highs = opaque(_mm512_set1_epi64(0x1020400000000080));  // bits 7, 6, 5, 4 to 7, 2, 1, 0
    of_lows = opaque(_mm512_set1_epi64(0x08));                 // bit 3 to 7
    sign = opaque(_mm512_set1_epi8(-128));
    if constexpr (KIND == Lookup::fp8_powers) {
      set_numbers(_mm512_set1_ps(kFp8Up * 0x1p6f));
      tables[0].high[0] = _mm512_or_si512(tables[0].high[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(0x80)));
    }
  }

  // Of the numbers of codes 0 to 127.
  WEFT_VBMI_PART inline void set_numbers(__m512 scale_up) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const auto sixteen = [&](int first) WEFT_VBMI_PART {
      return _mm512_mul_ps((__m512)_mm512_slli_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(first)), 20), scale_up);
    };
    __m512i words[4];
    for (int i = 0; i < 4; ++i) words[i] = words_of(sixteen(32 * i), sixteen(32 * i + 16));
    tables[0].set(words);
  }

  // Of codes [first, first + 8) of 16 rows.
  WEFT_VBMI_PART inline void set_rows(ByteTables& to, int first, __m512i less) const {
    const __m512i eight = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7);
    const __m512 numbers = (__m512)_mm512_slli_epi32(_mm512_add_epi32(eight, _mm512_set1_epi32(first)), 20);
    const __m512 up = _mm512_mul_ps(scale, _mm512_set1_ps(kFp8Up));
    const auto two_rows = [&](int row) WEFT_VBMI_PART {
      const __m512i at = _mm512_mask_blend_epi32(0xFF00, _mm512_set1_epi32(row), _mm512_set1_epi32(row + 1));
      return _mm512_mul_ps(numbers, _mm512_permutexvar_ps(at, up));
    };
    __m512i words[4];
    for (int i = 0; i < 4; ++i) words[i] = _mm512_sub_epi16(words_of(two_rows(4 * i), two_rows(4 * i + 2)), less);
    to.set(words);
  }

  // Of the group that begins at ``unit``.
  WEFT_VBMI_PART inline void begin(int64_t unit) {
    if constexpr (KIND == Lookup::fp8_powers) {
      const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(tile.powers(unit))));
      const __m512i less = _mm512_sub_epi32(_mm512_set1_epi32(kMostPower), bytes);
      rare = _mm512_cmpgt_epu32_mask(less, _mm512_set1_epi32(kMostPower - 16));
      powers = _mm512_or_si512(_mm512_slli_epi32(less, 7), _mm512_slli_epi32(less, 23));
      return;
    }
    scale = tile.scale(unit);
    if constexpr (KIND == Lookup::fp8_tile) set_numbers(_mm512_mul_ps(scale, _mm512_set1_ps(kFp8Up)));
    if constexpr (KIND == Lookup::fp8_rows) {
      rare = _mm512_cmp_ps_mask(_mm512_abs_ps(scale), _mm512_set1_ps(0x1p-100f), _CMP_NGE_UQ);
      set_rows(tables[0], 8, _mm512_set1_epi16(1 << 7));
      set_rows(without_exponent, 0, _mm512_setzero_si512());
    }
    if constexpr (KIND == Lookup::four_bits) {
      float own[kTile];    // in memory: spread over a vector there, a number takes no shuffle
      const float* scales = static_cast<const float*>(tile.scales) + unit / tile.units_of_group * kTile;
      if (tile.form != ScaleForm::float32) {
        _mm512_storeu_ps(own, scale);
        scales = own;
      }
      const auto row = [&](int r) WEFT_VBMI_PART { return _mm512_mul_ps(tile.table, _mm512_set1_ps(scales[r])); };
      for (int odd = 0; odd < 2; ++odd) {
        __m512i words[4];
        for (int i = 0; i < 4; ++i) words[i] = words_of(row(4 * i + odd), row(4 * i + 2 + odd));
        tables[odd].set(words);
      }
    }
  }

  // The four pairs of the unit at ``from``.
  WEFT_VBMI_PART inline void pairs(const uint8_t* from, __m512i* to) const {
    if constexpr (KIND == Lookup::four_bits) return four_bits(from, to);
    if (__builtin_expect(rare, 0)) {
      __m512i room[kUnitPairs];    // not ``to``, which would then be in memory always
      rare_pairs(tile, from, KIND == Lookup::fp8_powers ? rare_scale(from) : scale, room);
      for (int pair = 0; pair < kUnitPairs; ++pair) to[pair] = room[pair];
      return;
    }
    each_coded<2>([&](auto half) WEFT_VBMI_PART {
      const __m512i codes = _mm512_loadu_si512(from + 64 * half);
      if constexpr (KIND == Lookup::fp8_rows) {
        by_rows(codes, to + 2 * half);
      } else {
        const __m512i lows = tables[0].lows(codes);
        // highs | (codes & sign)
        const __m512i highs = _mm512_ternarylogic_epi32(tables[0].highs(codes), codes, sign, 0xF8);
        to[2 * half] = with_power(_mm512_unpacklo_epi8(lows, highs));
        to[2 * half + 1] = with_power(_mm512_unpackhi_epi8(lows, highs));
      }
    });
  }

  WEFT_INLINE __m512 rare_scale(const uint8_t* from) const { return tile.scale((from - tile.units) / CodedTile<FP8>::kStep); }

  // Zeros are negative ones in the table: no power takes them below the least word.
  WEFT_VBMI_PART inline __m512i with_power(__m512i words) const {
    return KIND == Lookup::fp8_powers ? _mm512_subs_epi16(words, powers) : words;
  }

  WEFT_VBMI_PART inline void by_rows(__m512i codes, __m512i* to) const {
    const __m512i at = _mm512_ternarylogic_epi32(codes, within, rows, 0xEA);  // (codes & within) | rows
    __m512i lows = tables[0].lows(at), highs = tables[0].highs(at);
    const __mmask64 small = _mm512_testn_epi8_mask(codes, exponent);
    if (__builtin_expect(small != 0, 0)) {
      lows = _mm512_mask_mov_epi8(lows, small, without_exponent.lows(at));
      highs = _mm512_mask_mov_epi8(highs, small, without_exponent.highs(at));
    }
    // Of each code the sign and all of the exponent but its last bit, and that bit, where a word has them.
    const __m512i upper = _mm512_gf2p8affine_epi64_epi8(codes, of_highs, 0);
    const __m512i lower = _mm512_gf2p8affine_epi64_epi8(codes, of_lows, 0);
    to[0] = _mm512_add_epi16(_mm512_unpacklo_epi8(lows, highs), _mm512_unpacklo_epi8(lower, upper));
    to[1] = _mm512_add_epi16(_mm512_unpackhi_epi8(lows, highs), _mm512_unpackhi_epi8(lower, upper));
  }

  WEFT_VBMI_PART inline void four_bits(const uint8_t* from, __m512i* to) const {
    const __m512i codes = _mm512_loadu_si512(from);
    const __m512i even = _mm512_ternarylogic_epi32(codes, within, rows, 0xEA);
    const __m512i odd = _mm512_ternarylogic_epi32(_mm512_srli_epi16(codes, 4), within, rows, 0xEA);
    const __m512i even_lows = tables[0].lows(even), even_highs = tables[0].highs(even);
    const __m512i odd_lows = tables[1].lows(odd), odd_highs = tables[1].highs(odd);
    const __m512i first = _mm512_unpacklo_epi8(even_lows, even_highs), second = _mm512_unpackhi_epi8(even_lows, even_highs);
    const __m512i first_odd = _mm512_unpacklo_epi8(odd_lows, odd_highs), second_odd = _mm512_unpackhi_epi8(odd_lows, odd_highs);
    to[0] = _mm512_unpacklo_epi32(first, first_odd);
    to[1] = _mm512_unpackhi_epi32(first, first_odd);
    to[2] = _mm512_unpacklo_epi32(second, second_odd);
    to[3] = _mm512_unpackhi_epi32(second, second_odd);
  }
};

// ROWS rows of x times tiles ``tile`` and the next, by products of pairs.
template <Lookup KIND, int ROWS>
WEFT_VBMI void coded_sums(const LinearArgs& args, int64_t tile, const Block<bf16>& block) {
  constexpr int TILES = kTwelveBitTiles;
  constexpr int64_t kStep = CodedTile<Group<KIND>::FP8>::kStep;
  const int64_t units = args.weight.in / kUnitColumns;
  const bf16* x = block.x;
  Group<KIND> groups[TILES] = {{args.weight, tile}, {args.weight, tile + 1}};
  const uint8_t* from = groups[0].tile.units;
  __m512 acc[ROWS][TILES];
  const auto each_sum = [&](const auto& body) WEFT_VBMI_PART {
    each_coded<ROWS>([&](auto r) WEFT_VBMI_PART { each_coded<TILES>([&](auto t) WEFT_VBMI_PART { body(r, t); }); });
  };
  each_sum([&](auto r, auto t) WEFT_VBMI_PART { acc[r][t] = _mm512_setzero_ps(); });
  for (int64_t unit = 0; unit < units;) {
    each_coded<TILES>([&](auto t) WEFT_VBMI_PART { groups[t].begin(unit); });
    const int64_t next = unit + groups[0].tile.units_of_group, end = next < units ? next : units;
    for (; unit < end; ++unit, from += kStep, x += ROWS * kUnitColumns) {
      for (int line = 0; line < kStep / 64; ++line) __builtin_prefetch(from + kFetchedAhead + line * 64, 0, 2);
      __m512i w[TILES][kUnitPairs];
      each_coded<TILES>([&](auto t) WEFT_VBMI_PART { groups[t].pairs(from + t * (kStep / TILES), w[t]); });
      each_coded<kUnitPairs>([&](auto pair) WEFT_VBMI_PART {
        each_sum([&](auto r, auto t) WEFT_VBMI_PART {
          int32_t two;
          std::memcpy(&two, x + r * kUnitColumns + 2 * pair, sizeof two);
          acc[r][t] = _mm512_dpbf16_ps(acc[r][t], (__m512bh)w[t][pair], (__m512bh)_mm512_set1_epi32(two));
        });
      });
    }
  }
  f32x16 sums[ROWS][TILES];
  each_sum([&](auto r, auto t) WEFT_VBMI_PART { sums[r][t] = (f32x16)acc[r][t]; });
  store_twelve_bit<ROWS>(args, tile, block.first, sums);
}

// The same by float32 products of widened weights, in the order of tiles.inl.
template <Lookup KIND, int ROWS>
void coded_sums(const LinearArgs& args, int64_t tile, const Block<float>& block) {
  constexpr int TILES = kTwelveBitTiles;
  constexpr bool FP8 = KIND != Lookup::four_bits;
  constexpr int64_t kStep = CodedTile<FP8>::kStep;
  const int64_t units = args.weight.in / kUnitColumns;
  const float* x = block.x;
  const CodedTile<FP8> tiles[TILES] = {{args.weight, tile}, {args.weight, tile + 1}};
  const uint8_t* from = tiles[0].units;
  f32x16 acc[ROWS][TILES];
  const auto each_sum = [&](const auto& body) WEFT_WIDE_PART {
    each_wide<ROWS>([&](auto r) WEFT_WIDE_PART { each_wide<TILES>([&](auto t) WEFT_WIDE_PART { body(r, t); }); });
  };
  each_sum([&](auto r, auto t) WEFT_WIDE_PART { acc[r][t] = splat(0); });
  for (int64_t unit = 0; unit < units; ++unit, from += kStep, x += ROWS * kUnitColumns) {
    each_wide<kUnitColumns>([&](auto column) WEFT_WIDE_PART {
      f32x16 w[TILES];
      each_wide<TILES>([&](auto t) WEFT_WIDE_PART {
        const __m512 number = tiles[t].template number<column>(from + t * (kStep / TILES), tiles[t].scale(unit));
        w[t] = (f32x16)_mm512_and_si512(rounded_up_half(number), _mm512_set1_epi32(static_cast<int>(0xFFFF0000u)));
      });
      each_sum([&](auto r, auto t) WEFT_WIDE_PART { acc[r][t] += w[t] * x[r * kUnitColumns + column]; });
    });
  }
  f32x16 sums[ROWS][TILES];
  each_sum([&](auto r, auto t) WEFT_WIDE_PART { sums[r][t] = acc[r][t]; });
  store_twelve_bit<ROWS>(args, tile, block.first, sums);
}

template <class X>
using CodedSums = void (*)(const LinearArgs&, int64_t, const Block<X>&);

template <Lookup KIND, class X, int... R>
constexpr std::array<CodedSums<X>, sizeof...(R)> coded_sums_of(std::integer_sequence<int, R...>) {
  return {{static_cast<CodedSums<X>>(&coded_sums<KIND, R + 1>)...}};
}
template <Lookup KIND, class X>
constexpr auto kCodedSums = coded_sums_of<KIND, X>(std::make_integer_sequence<int, kCodedRows>{});

// Units [unit, end) of one tile -> ``to``, as they are in tiles.inl.
template <Lookup KIND>
WEFT_VBMI void unpack_by_lookups(const Weight& weight, int64_t tile, int64_t unit, int64_t end, Half* to) {
  Group<KIND> group(weight, tile);
  constexpr int64_t kStep = CodedTile<Group<KIND>::FP8>::kStep;
  while (unit < end) {
    const int64_t of_group = group.tile.units_of_group, next = (unit / of_group + 1) * of_group;
    group.begin(unit);
    for (const int64_t last = next < end ? next : end; unit < last; ++unit, to += 2) {
      const uint8_t* const from = group.tile.units + unit * kStep;
      __builtin_prefetch(from + kFetchedAhead, 0, 2);
      group.pairs(from, reinterpret_cast<__m512i*>(to));  // two halves
    }
  }
}

template <bool FP8>
void unpack_by_floats(const Weight& weight, int64_t at, int64_t unit, int64_t end, Half* to) {
  const CodedTile<FP8> tile(weight, at);
  for (; unit < end; ++unit, to += 2)
    pairs_by_floats(tile, tile.units + unit * tile.kStep, tile.scale(unit), reinterpret_cast<__m512i*>(to));
}

void unpack_coded_tile(const Weight& weight, int64_t tile, int64_t unit, int64_t end, Half* to) {
  const Lookup kind = lookup_of(weight);
  if (!has_bf16_dot()) {
    if (kind == Lookup::four_bits) return unpack_by_floats<false>(weight, tile, unit, end, to);
    return unpack_by_floats<true>(weight, tile, unit, end, to);
  }
  switch (kind) {
    case Lookup::four_bits: return unpack_by_lookups<Lookup::four_bits>(weight, tile, unit, end, to);
    case Lookup::fp8_tile: return unpack_by_lookups<Lookup::fp8_tile>(weight, tile, unit, end, to);
    case Lookup::fp8_powers: return unpack_by_lookups<Lookup::fp8_powers>(weight, tile, unit, end, to);
    case Lookup::fp8_rows: return unpack_by_lookups<Lookup::fp8_rows>(weight, tile, unit, end, to);
  }
}

template <class X>
const std::array<CodedSums<X>, kCodedRows>& coded_sums_for(Lookup kind) {
  switch (kind) {
    case Lookup::four_bits: return kCodedSums<Lookup::four_bits, X>;
    case Lookup::fp8_tile: return kCodedSums<Lookup::fp8_tile, X>;
    case Lookup::fp8_powers: return kCodedSums<Lookup::fp8_powers, X>;
    default: return kCodedSums<Lookup::fp8_rows, X>;
  }
}

// Tiles [tile, end) of an item times rows [first, last) of x.
template <class X>
void coded_item(const LinearArgs& args, int64_t tile, int64_t end, int64_t first, int64_t last) {
  const Weight& weight = args.weight;
  if (last - first > kCodedRows && (tile + kOutTiles) * kTile <= weight.out) {
    static thread_local std::vector<Half> room;
    const int64_t units = weight.in / kUnitColumns;
    if (static_cast<int64_t>(room.size()) < kOutTiles * units * 2) room.resize(static_cast<size_t>(kOutTiles * units * 2));
    for (int t = 0; t < kOutTiles; ++t) unpack_coded_tile(weight, tile + t, 0, units, room.data() + t * units * 2);
    LinearArgs own = args;
    own.weight.data = room.data();
    own.out = static_cast<bf16*>(args.out) + tile * kTile;
    own.bias = args.bias ? args.bias + tile * kTile : nullptr;
    return tiles_of_item<bf16, X>(own, 0, first, last, nullptr);
  }
  static thread_local Blocks<X> x;
  LinearArgs own = args;
  own.rows = last - first;
  own.x = static_cast<const X*>(args.x) + first * args.x_stride;
  own.out = static_cast<bf16*>(args.out) + first * weight.out;
  x.set(own, [](int64_t count, const auto& job) { for (int64_t i = 0; i < count; ++i) job(i); }, kCodedRows);  // inside of a job
  const auto& sums = coded_sums_for<X>(lookup_of(weight));
  for (const Block<X>& block : x.blocks)
    for (int64_t t = tile; t < end; t += kTwelveBitTiles) sums[static_cast<size_t>(block.count - 1)](own, t, block);
}

template <class X>
void coded_products_of(const LinearArgs& args) {
  const Weight& weight = args.weight;
  const int64_t tiles = (weight.out + kTile - 1) / kTile, items = (tiles + kOutTiles - 1) / kOutTiles;
  const int64_t x_bytes = weight.in * static_cast<int64_t>(sizeof(X)), width = weight.in * 2;
  const int64_t parts = (args.rows * x_bytes + kUnpackedPartBytes - 1) / kUnpackedPartBytes;
  const double nanoseconds = static_cast<double>(kOutRows * width) * (0.02 + 0.0025 * static_cast<double>(args.rows) / static_cast<double>(parts));
  Pool::instance().for_each(items * parts, nanoseconds, [&](int64_t at) {
    const int64_t item = at % items, part = at / items, tile = item * kOutTiles;
    coded_item<X>(args, tile, tile + kOutTiles < tiles ? tile + kOutTiles : tiles, args.rows * part / parts,
                  args.rows * (part + 1) / parts);
  });
}

void coded_products(const LinearArgs& args) {
  if (has_bf16_dot()) return coded_products_of<bf16>(args);
  with_widened_rows(args, coded_products_of<float>);
}
#endif

}  // namespace
}  // namespace weft
