// Products of bfloat16 rows by codes in words: nf4, fp4, and fp8 with scales of rows (coded_numbers.hpp).
//
//     quad     8 columns of rows n, 4 + n, 8 + n and 12 + n of a tile: a vector of words. A unit is four quads
//     table    of a quad, 64 words: weights of the 16 codes of four bits in each of its rows. One look-up of words
//              (vpermi2w) makes a quad of codes
//     fp8      the table has fractions and the last bit of exponents. Sign and the rest of the exponent are added to the
//              upper bytes. Codes without an exponent have separate tables
//
//     x        8 columns of a row are four pairs. They meet all rows of a quad at once
//     sums     four for each row of W: of pairs 0, 4, 8, ..., of pairs 1, 5, 9, ..., and so on. At the end
//              (sum 0 + sum 1) + (sum 2 + sum 3)
//
//     up to 4 rows of x    codes become quads in registers; two tiles in turn, 64 columns at a time
//     more                 four tiles are unpacked into the L2 cache once, for all rows of a part of x
//
// Both add up in one order, so a row of x has the same bits in any batch. They are not those of the widened model,
// where a row of W has one sum: quads would have to be transposed, which takes 8 shuffles of 12. Weights are those of
// that model.
#pragma once

#include "coded_numbers.hpp"

namespace weft {
namespace {

#if defined(__AVX512F__)
constexpr int kQuads = 4;
constexpr int64_t kUnitsInTurn = 8;  // of 64 bits

// Four vectors of 4 x 4 dwords each, transposed: quads become pairs of columns of 16 rows, and those quads.
WEFT_VBMI_PART inline void transpose(__m512i* four) {
  const __m512i low[2] = {_mm512_unpacklo_epi32(four[0], four[1]), _mm512_unpacklo_epi32(four[2], four[3])};
  const __m512i high[2] = {_mm512_unpackhi_epi32(four[0], four[1]), _mm512_unpackhi_epi32(four[2], four[3])};
  four[0] = _mm512_unpacklo_epi64(low[0], low[1]);
  four[1] = _mm512_unpackhi_epi64(low[0], low[1]);
  four[2] = _mm512_unpacklo_epi64(high[0], high[1]);
  four[3] = _mm512_unpackhi_epi64(high[0], high[1]);
}

// Tables of a quad: weights of 16 codes in its four rows.
struct QuadTables {
  __m512i halves[kQuads][2];

  // ``numbers`` of the codes, times the scales of 16 rows.
  WEFT_VBMI_PART inline void set(__m512 numbers, const float* scales) {
    const auto row = [&](int r) WEFT_VBMI_PART { return _mm512_mul_ps(numbers, _mm512_set1_ps(scales[r])); };
    each_half([&](auto quad, auto half)
                  WEFT_VBMI_PART { halves[quad][half] = words_of(row(8 * half + quad), row(8 * half + 4 + quad)); });
  }

  // One by one: as one object they would be copied through memory.
  WEFT_VBMI_PART inline void copy(const QuadTables& from) {
    each_half([&](auto quad, auto half) WEFT_VBMI_PART { halves[quad][half] = from.halves[quad][half]; });
  }

  template <class Body>
  static WEFT_VBMI_PART inline void each_half(const Body& body) {
    each_coded<kQuads>([&](auto quad)
                           WEFT_VBMI_PART { each_coded<2>([&](auto half) WEFT_VBMI_PART { body(quad, half); }); });
  }
};

// Weights of the codes of a tile's present group.
template <Lookup KIND>
struct Quads {
  static constexpr bool FP8 = KIND == Lookup::fp8_rows;
  CodedTile<KIND> tile;
  const uint64_t* small;                       // fp8: a bit for each unit that has codes without an exponent
  QuadTables tables;                           // fp8: of the group. Those of four bits cost less than to keep them
  __m512i without_exponent[FP8 ? kQuads : 1];  // 8 words for each row
  __m512 scale;
  int64_t group = 0, next_scales;
  bool rare = false;

  WEFT_VBMI_PART Quads(const Weight& weight, int64_t at)
      : tile(weight, at), next_scales(kTwelveBitTiles * kTile * ((weight.in + weight.group - 1) / weight.group)) {
    if constexpr (FP8)
      small = reinterpret_cast<const uint64_t*>(weight.odd) + at * ((weight.in / kUnitColumns + 63) / 64);
  }

  static WEFT_VBMI_PART inline __m512 numbers_of(int first) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return (__m512)_mm512_slli_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(first)), 20);
  }

  // Begins group ``at``.
  WEFT_VBMI_PART inline void begin(int64_t at) {
    group = at;
    if constexpr (FP8) {
      scale = tile.scale_of(group);
      rare = _mm512_cmp_ps_mask(_mm512_abs_ps(scale), _mm512_set1_ps(0x1p-100f), _CMP_NGE_UQ);
      alignas(64) float scales[kTile];
      _mm512_store_ps(scales, _mm512_mul_ps(scale, _mm512_set1_ps(kFp8Up)));
      // Codes 16 to 31 have a leading one. Their exponents are larger by 2 than those that others are added to.
      tables.set(numbers_of(16), scales);
      for (auto& halves : tables.halves)
        for (__m512i& half : halves) half = _mm512_sub_epi16(half, _mm512_set1_epi16(2 << 7));
      const __m512 eight = _mm512_shuffle_f32x4(numbers_of(0), numbers_of(0), 0x44);
      const auto both = [&](int r) WEFT_VBMI_PART {  // of rows ``r`` and ``r`` + 4
        return _mm512_mul_ps(eight,
                             _mm512_mask_blend_ps(0xFF00, _mm512_set1_ps(scales[r]), _mm512_set1_ps(scales[r + 4])));
      };
      for (int quad = 0; quad < kQuads; ++quad) without_exponent[quad] = words_of(both(quad), both(quad + 8));
    }
  }

  WEFT_VBMI_PART inline void set_tables(QuadTables& own) const {
    if constexpr (FP8) return own.copy(tables);
    float room[kTile];  // in memory: reading a number from there and spreading it over a vector takes no shuffle
    const float* scales = static_cast<const float*>(tile.scales) + group * kTile;
    // Prefetches those of the next two tiles. A tenth of the time is a wait for scales that no hardware sees coming.
    __builtin_prefetch(scales + next_scales, 0, 3);
    if (tile.form != ScaleForm::float32) {
      _mm512_storeu_ps(room, tile.scale_of(group));
      scales = room;
    }
    own.set(tile.table, scales);
  }
};

// Constants of a loop over units.
template <Lookup KIND>
struct QuadCodes {
  __m512i within, rows, rows_of_eight, upper_bits;

  WEFT_VBMI_PART QuadCodes() {
    const __m512i lanes = _mm512_srli_epi16(
        _mm512_cvtepu8_epi16(_mm256_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20,
                                              21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31)),
        3);
    within = opaque(_mm512_set1_epi16(15));
    rows = opaque(_mm512_slli_epi16(lanes, 4));
    rows_of_eight = _mm512_slli_epi16(lanes, 3);
    upper_bits = opaque(_mm512_set1_epi64(0x1020400000000080));  // bits 7, 6, 5, 4 to 7, 2, 1, 0
  }

  // Weights of ``codes`` by the table of ``quad``.
  WEFT_VBMI_PART inline __m512i words(const QuadTables& tables, int quad, __m512i codes) const {
    const __m512i at = _mm512_ternarylogic_epi32(codes, within, rows, 0xEA);  // (codes & within) | rows
    return _mm512_permutex2var_epi16(tables.halves[quad][0], at, tables.halves[quad][1]);
  }

  // The quads of the unit at ``from``, each to ``body(quad, words)``. SMALL: fp8 with codes without an exponent.
  template <bool SMALL, class Body>
  WEFT_VBMI_PART inline void each_quad(const Quads<KIND>& of, const QuadTables& tables, const uint8_t* from,
                                       const Body& body) const {
    if constexpr (KIND == Lookup::four_bits) {
      const __m512i codes = _mm512_loadu_si512(from);
      each_coded<kQuads>([&](auto quad) WEFT_VBMI_PART {
        body(quad, words(tables, quad, quad ? _mm512_srli_epi16(codes, 4 * quad) : codes));
      });
    } else {
      each_coded<2>([&](auto line) WEFT_VBMI_PART {
        constexpr int quad = 2 * line;
        const __m512i first = _mm512_loadu_si512(from + 64 * line), second = _mm512_srli_epi16(first, 8);
        __m512i low = words(tables, quad, first), high = words(tables, quad + 1, second);
        if constexpr (SMALL) {
          low = without_exponents(low, first, of.without_exponent[quad]);
          high = without_exponents(high, second, of.without_exponent[quad + 1]);
        }
        // Added only to upper bytes: a carry out of a negative scale's sign is lost.
        const __m512i upper = _mm512_gf2p8affine_epi64_epi8(first, upper_bits, 0);
        body(std::integral_constant<int, quad>{}, _mm512_add_epi16(low, _mm512_slli_epi16(upper, 8)));
        body(std::integral_constant<int, quad + 1>{}, _mm512_mask_add_epi8(high, 0xAAAAAAAAAAAAAAAAu, high, upper));
      });
    }
  }

  WEFT_VBMI_PART inline __m512i without_exponents(__m512i words, __m512i codes, __m512i table) const {
    const __m512i at = _mm512_ternarylogic_epi32(codes, _mm512_set1_epi16(7), rows_of_eight, 0xEA);
    return _mm512_mask_permutexvar_epi16(words, _mm512_testn_epi16_mask(codes, _mm512_set1_epi16(0x78)), at, table);
  }
};

// The quads of the unit at ``from`` by floats. Out of line, so that this rare case sends no other unit through memory.
template <Lookup KIND>
WEFT_VBMI __attribute__((noinline, cold)) void rare_quads(const Quads<KIND>& of, const uint8_t* from, __m512i* to) {
  pairs_by_floats(of.tile, from, of.scale, to);
  transpose(to);
}

// Units [unit, end) of one group and of one turn -> quads, each unit's to ``body(unit, quad, words)``.
template <Lookup KIND, class Body>
WEFT_VBMI_PART inline void quads_of_units(const Quads<KIND>& of, const QuadCodes<KIND>& codes, int64_t unit,
                                          int64_t end, const Body& body) {
  constexpr int64_t kStep = CodedTile<KIND>::kStep;
  const uint8_t* from = of.tile.units + unit * kStep;
  if (__builtin_expect(of.rare, 0)) {
    for (; unit < end; ++unit, from += kStep) {
      __m512i room[kQuads];
      rare_quads(of, from, room);
      each_coded<kQuads>([&](auto quad) WEFT_VBMI_PART { body(unit, quad, room[quad]); });
    }
    return;
  }
  QuadTables tables;  // in registers for all units
  of.set_tables(tables);
  const auto one = [&](int64_t at, auto small) WEFT_VBMI_PART {
    const uint8_t* const own = from + at * kStep;
    for (int line = 0; line < kStep / 128; ++line) __builtin_prefetch(own + tuning.fetched_ahead + line * 64, 0, 2);
    codes.template each_quad<small>(of, tables, own,
                                    [&](auto quad, __m512i words) WEFT_VBMI_PART { body(unit + at, quad, words); });
  };
  const std::false_type usual;
  if constexpr (KIND == Lookup::fp8_rows) {
    const uint64_t small = of.small[unit / 64] >> unit % 64;
    if (__builtin_expect((small & 255) != 0, 0)) {
      for (int64_t at = 0; at < end - unit; ++at)
        if (small >> at & 1) one(at, std::true_type{});
        else one(at, usual);
      return;
    }
  }
  // A separate loop for each place in a turn: the hardware sees lines coming, and a tenth less time is spent on
  // reading memory.
  if (end - unit == kUnitsInTurn) return each_coded<kUnitsInTurn>([&](auto at) WEFT_VBMI_PART { one(at, usual); });
  for (int64_t at = 0; at < end - unit; ++at) one(at, usual);
}

// Units [unit, end) as turns of one group: body(group, begins, unit, end). ``begins``: the first of a group.
template <Lookup KIND, class Body>
WEFT_VBMI_PART inline void each_turn(const CodedTile<KIND>& tile, int64_t unit, int64_t end, const Body& body) {
  int64_t group = unit / tile.units_of_group;
  for (int64_t next = (group + 1) * tile.units_of_group; unit < end; ++group, next += tile.units_of_group) {
    const int64_t last = next < end ? next : end;
    for (bool begins = true; unit < last; begins = false) {
      const int64_t turn = (unit | (kUnitsInTurn - 1)) + 1, stop = turn < last ? turn : last;
      body(group, begins, unit, stop);
      unit = stop;
    }
  }
}

// Four sums of each row of W, one after the other in four vectors -> their sums, row after row.
WEFT_VBMI_PART inline f32x16 added_up(const __m512* quads) {
  __m512 sums[kQuads];
  each_coded<kQuads>([&](auto quad) WEFT_VBMI_PART {
    const __m512 two = _mm512_add_ps(quads[quad], _mm512_permute_ps(quads[quad], 0xB1));
    sums[quad] = _mm512_add_ps(two, _mm512_permute_ps(two, 0x4E));
  });
  const __m512 first = _mm512_mask_blend_ps(0x2222, sums[0], sums[1]),
               second = _mm512_mask_blend_ps(0x8888, sums[2], sums[3]);
  return (f32x16)_mm512_mask_blend_ps(0xCCCC, first, second);
}

// 8 columns of a row of x, for each row of a quad.
WEFT_VBMI_PART inline __m512bh four_times(const bf16* x) {
  return (__m512bh)_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}

// ROWS rows of x times tiles ``tile`` and the next.
template <Lookup KIND, int ROWS>
WEFT_VBMI void quad_sums(const LinearArgs& args, int64_t tile, const Block<bf16>& block) {
  constexpr int TILES = kTwelveBitTiles;
  const int64_t units = args.weight.in / kUnitColumns;
  const QuadCodes<KIND> codes;
  Quads<KIND> groups[TILES] = {{args.weight, tile}, {args.weight, tile + 1}};
  __m512 acc[TILES][ROWS][kQuads] = {};
  each_turn(groups[0].tile, 0, units, [&](int64_t group, bool begins, int64_t unit, int64_t end) WEFT_VBMI_PART {
    each_coded<TILES>([&](auto t) WEFT_VBMI_PART {
      if (begins) groups[t].begin(group);
      __m512 own[ROWS][kQuads];  // in registers for the turn
      const auto each_sum = [&](const auto& body) WEFT_VBMI_PART {
        each_coded<ROWS>([&](auto r)
                             WEFT_VBMI_PART { each_coded<kQuads>([&](auto quad) WEFT_VBMI_PART { body(r, quad); }); });
      };
      each_sum([&](auto r, auto quad) WEFT_VBMI_PART { own[r][quad] = acc[t][r][quad]; });
      quads_of_units(groups[t], codes, unit, end, [&](int64_t at, auto quad, __m512i words) WEFT_VBMI_PART {
        each_coded<ROWS>([&](auto r) WEFT_VBMI_PART {
          own[r][quad] =
              _mm512_dpbf16_ps(own[r][quad], (__m512bh)words, four_times(block.x + (at * ROWS + r) * kUnitColumns));
        });
      });
      each_sum([&](auto r, auto quad) WEFT_VBMI_PART { acc[t][r][quad] = own[r][quad]; });
    });
  });
  f32x16 sums[ROWS][TILES];
  for (int r = 0; r < ROWS; ++r)
    for (int t = 0; t < TILES; ++t) sums[r][t] = added_up(acc[t][r]);
  store_twelve_bit<ROWS>(args, tile, block.first, sums);
}

// Units [unit, end) of one tile as quads.
template <Lookup KIND>
WEFT_VBMI void unpack_quads(const Weight& weight, int64_t tile, int64_t unit, int64_t end, __m512i* to) {
  const QuadCodes<KIND> codes;
  Quads<KIND> group(weight, tile);
  each_turn(group.tile, unit, end, [&](int64_t at, bool begins, int64_t first, int64_t last) WEFT_VBMI_PART {
    if (begins) group.begin(at);
    quads_of_units(group, codes, first, last, [&](int64_t own, auto quad, __m512i words) WEFT_VBMI_PART {
      _mm512_storeu_si512(to + (own - unit) * kQuads + quad, words);
    });
  });
}

// ROWS rows of x times a tile of quads.
template <int ROWS>
WEFT_VBMI void unpacked_quad_sums(const __m512i* quads, const bf16* x, int64_t x_stride, int64_t in,
                                  const TileOut<bf16>& out) {
  __m512 acc[ROWS][kQuads] = {};
  for (int r = 0; r < ROWS; ++r) __builtin_prefetch(out.row(r), 1);
  for (int64_t unit = 0; unit < in / kUnitColumns; ++unit) {
    __m512bh own[ROWS];
    for (int r = 0; r < ROWS; ++r) own[r] = four_times(x + r * x_stride + unit * kUnitColumns);
    for (int quad = 0; quad < kQuads; ++quad) {
      const __m512bh words = (__m512bh)_mm512_loadu_si512(quads + unit * kQuads + quad);
      for (int r = 0; r < ROWS; ++r) acc[r][quad] = _mm512_dpbf16_ps(acc[r][quad], words, own[r]);
    }
  }
  f32x16 sums[ROWS][1];
  for (int r = 0; r < ROWS; ++r) sums[r][0] = added_up(acc[r]);
  store_sums(out, sums);
}

using QuadSums = void (*)(const __m512i*, const bf16*, int64_t, int64_t, const TileOut<bf16>&);
constexpr QuadSums kQuadSums[kTileRows] = {unpacked_quad_sums<1>, unpacked_quad_sums<2>, unpacked_quad_sums<3>,
                                           unpacked_quad_sums<4>, unpacked_quad_sums<5>, unpacked_quad_sums<6>};

// Rows [first, last) of x, in blocks of nearly one size, times ``tiles`` consecutive tiles of quads; their rows of W
// begin with tile ``tile``.
void unpacked_quad_products(const LinearArgs& args, const __m512i* quads, int64_t tile, int64_t tiles, int64_t first,
                            int64_t last) {
  const int64_t in = args.weight.in, out = args.weight.out, count = last - first,
                blocks = (count + kTileRows - 1) / kTileRows;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t row = first + count * block / blocks, rows = first + count * (block + 1) / blocks - row;
    const bf16* const x = static_cast<const bf16*>(args.x) + row * args.x_stride;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t at = (tile + t) * kTile;
      kQuadSums[rows - 1](
          quads + t * (in / kUnitColumns) * kQuads, x, args.x_stride, in,
          {static_cast<bf16*>(args.out) + row * out + at, out, out - at, args.bias ? args.bias + at : nullptr});
    }
  }
}
#endif

}  // namespace
}  // namespace weft
