// Products by codes that become bfloat16 (coded_numbers.hpp), and of fp8 in bytes: with a scale for a tile, or powers
// of two.
//
//     up to 4 rows of x    codes become weights in registers; 4 rows meet two tiles
//     more                 four tiles are unpacked into the L2 cache once, for all rows of a part of x
//
// The weights are those of the model that was widened to bfloat16. Sums here have the order of tiles.hpp too, so a
// product has the bits of that model, of one row as of many. Codes in words have another order (coded_words.hpp).
//
// A group has few different weights. So the possible weights are rounded once for the group. A table of 128 bytes then
// gives the lower bytes of 64 weights, and another the upper ones (vpermi2b):
//
//     table of            has                               and then
//     scale of a tile     the tile's 128 numbers            the sign
//     powers of two       128 numbers of the largest power  the powers' difference subtracted, except from zeros
//
// Exponents are added where no power leaves bfloat16's normal numbers. Other groups are computed as on CPUs without
// look-ups: floats, and a rounding of each.
//
// Rejected: scales after the sums of a group (faster, but other weights than the library's: they are never rounded).
// CPUs with products of pairs and without look-ups of bytes (Cooper Lake) have no kernels here.
#pragma once

#include "coded_words.hpp"
#include "table.hpp"

namespace weft {
namespace {

#if defined(__AVX512F__)
bool serves_coded() {
  static const bool serves =
      !has_bf16_dot() || (__builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("gfni"));
  return serves;
}

template <class Byte>
WEFT_INLINE __m512i bytes_by_place(const Byte& byte) {
  uint8_t bytes[64];
  for (int i = 0; i < 64; ++i) bytes[i] = static_cast<uint8_t>(byte(i));
  return _mm512_loadu_si512(bytes);
}

// 128 words as two tables of 128 bytes: each byte of ``at``, 7 bits, is replaced by a byte of the table.
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

// Weights of a tile's codes in the present group.
template <Lookup KIND>
struct Group {
  CodedTile<KIND> tile;
  __m512 scale;
  ByteTables table;
  __m512i powers, sign;
  bool rare = false;

  WEFT_VBMI_PART Group(const Weight& weight, int64_t at) : tile(weight, at), sign(opaque(_mm512_set1_epi8(-128))) {
    if constexpr (KIND == Lookup::fp8_powers) {
      set_numbers(_mm512_set1_ps(kFp8Up * 0x1p6f));
      table.high[0] = _mm512_or_si512(table.high[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(0x80)));
    }
  }

  // Sets the numbers of codes 0 to 127.
  WEFT_VBMI_PART inline void set_numbers(__m512 scale_up) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const auto sixteen = [&](int first) WEFT_VBMI_PART {
      return _mm512_mul_ps((__m512)_mm512_slli_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(first)), 20), scale_up);
    };
    __m512i words[4];
    for (int i = 0; i < 4; ++i) words[i] = words_of(sixteen(32 * i), sixteen(32 * i + 16));
    table.set(words);
  }

  // Begins the group that starts at ``unit``.
  WEFT_VBMI_PART inline void begin(int64_t unit) {
    if constexpr (KIND == Lookup::fp8_powers) {
      const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(tile.powers(unit))));
      const __m512i less = _mm512_sub_epi32(_mm512_set1_epi32(kMostPower), bytes);
      rare = _mm512_cmpgt_epu32_mask(less, _mm512_set1_epi32(kMostPower - 16));
      powers = _mm512_or_si512(_mm512_slli_epi32(less, 7), _mm512_slli_epi32(less, 23));
    } else {
      scale = tile.scale(unit);
      set_numbers(_mm512_mul_ps(scale, _mm512_set1_ps(kFp8Up)));
    }
  }

  // The four pairs of the unit at ``from``.
  WEFT_VBMI_PART inline void pairs(const uint8_t* from, __m512i* to) const {
    if (__builtin_expect(rare, 0)) {
      __m512i room[kUnitPairs];  // not ``to``, which would then be in memory always
      rare_pairs(tile, from, rare_scale(from), room);
      for (int pair = 0; pair < kUnitPairs; ++pair) to[pair] = room[pair];
      return;
    }
    each_coded<2>([&](auto half) WEFT_VBMI_PART {
      const __m512i codes = _mm512_loadu_si512(from + 64 * half);
      const __m512i lows = table.lows(codes);
      // highs | (codes & sign)
      const __m512i highs = _mm512_ternarylogic_epi32(table.highs(codes), codes, sign, 0xF8);
      to[2 * half] = with_power(_mm512_unpacklo_epi8(lows, highs));
      to[2 * half + 1] = with_power(_mm512_unpackhi_epi8(lows, highs));
    });
  }

  WEFT_INLINE __m512 rare_scale(const uint8_t* from) const {
    return tile.scale((from - tile.units) / CodedTile<KIND>::kStep);
  }

  // Zeros are negative ones in the table: no power takes them below the least word.
  WEFT_VBMI_PART inline __m512i with_power(__m512i words) const {
    return KIND == Lookup::fp8_powers ? _mm512_subs_epi16(words, powers) : words;
  }
};

// ROWS rows of x times tiles ``tile`` and the next, by products of pairs.
template <Lookup KIND, int ROWS>
WEFT_VBMI void coded_sums(const LinearArgs& args, int64_t tile, const Block<bf16>& block) {
  constexpr int TILES = kTwelveBitTiles;
  constexpr int64_t kStep = CodedTile<KIND>::kStep;
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
      for (int line = 0; line < kStep / 64; ++line) __builtin_prefetch(from + tuning.fetched_ahead + line * 64, 0, 2);
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

// The same by float32 products of widened weights, in the order of tiles.hpp.
template <Lookup KIND, int ROWS>
void coded_sums(const LinearArgs& args, int64_t tile, const Block<float>& block) {
  constexpr int TILES = kTwelveBitTiles;
  constexpr int64_t kStep = CodedTile<KIND>::kStep;
  const int64_t units = args.weight.in / kUnitColumns;
  const float* x = block.x;
  const CodedTile<KIND> tiles[TILES] = {{args.weight, tile}, {args.weight, tile + 1}};
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
  if constexpr (in_words(KIND) && std::is_same_v<X, bf16>) return {{&quad_sums<KIND, R + 1>...}};
  else return {{static_cast<CodedSums<X>>(&coded_sums<KIND, R + 1>)...}};
}
template <Lookup KIND, class X>
constexpr auto kCodedSums = coded_sums_of<KIND, X>(std::make_integer_sequence<int, kCodedRows>{});

// Units [unit, end) of one tile -> ``to``, as they are in tiles.hpp.
template <Lookup KIND>
WEFT_VBMI void unpack_by_lookups(const Weight& weight, int64_t tile, int64_t unit, int64_t end, Half* to) {
  Group<KIND> group(weight, tile);
  constexpr int64_t kStep = CodedTile<KIND>::kStep;
  while (unit < end) {
    const int64_t of_group = group.tile.units_of_group, next = (unit / of_group + 1) * of_group;
    group.begin(unit);
    for (const int64_t last = next < end ? next : end; unit < last; ++unit, to += 2) {
      const uint8_t* const from = group.tile.units + unit * kStep;
      __builtin_prefetch(from + tuning.fetched_ahead, 0, 2);
      group.pairs(from, reinterpret_cast<__m512i*>(to));  // two halves
    }
  }
}

// The same of codes in words.
template <Lookup KIND>
WEFT_VBMI void unpack_by_words(const Weight& weight, int64_t tile, int64_t unit, int64_t end, Half* to) {
  __m512i* const quads = reinterpret_cast<__m512i*>(to);
  unpack_quads<KIND>(weight, tile, unit, end, quads);
  for (int64_t i = 0; i < end - unit; ++i) transpose(quads + i * kQuads);
}

template <Lookup KIND>
void unpack_by_floats(const Weight& weight, int64_t at, int64_t unit, int64_t end, Half* to) {
  const CodedTile<KIND> tile(weight, at);
  for (; unit < end; ++unit, to += 2)
    pairs_by_floats(tile, tile.units + unit * tile.kStep, tile.scale(unit), reinterpret_cast<__m512i*>(to));
}

template <Lookup KIND>
void unpack_kind(const Weight& weight, int64_t tile, int64_t unit, int64_t end, Half* to) {
  if (!has_bf16_dot()) return unpack_by_floats<KIND>(weight, tile, unit, end, to);
  if constexpr (in_words(KIND)) unpack_by_words<KIND>(weight, tile, unit, end, to);
  else unpack_by_lookups<KIND>(weight, tile, unit, end, to);
}

void unpack_coded_tile(const Weight& weight, int64_t tile, int64_t unit, int64_t end, Half* to) {
  switch (lookup_of(weight)) {
    case Lookup::four_bits: return unpack_kind<Lookup::four_bits>(weight, tile, unit, end, to);
    case Lookup::fp8_tile: return unpack_kind<Lookup::fp8_tile>(weight, tile, unit, end, to);
    case Lookup::fp8_powers: return unpack_kind<Lookup::fp8_powers>(weight, tile, unit, end, to);
    case Lookup::fp8_rows: return unpack_kind<Lookup::fp8_rows>(weight, tile, unit, end, to);
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
    const int64_t units = weight.in / kUnitColumns;
    Scratch scratch;
    Half* const room = scratch.take<Half>(kOutTiles * units * 2);
    const Lookup kind = lookup_of(weight);
    if constexpr (std::is_same_v<X, bf16>) {
      if (in_words(kind)) {
        __m512i* const quads = reinterpret_cast<__m512i*>(room);
        const auto unpack =
            kind == Lookup::four_bits ? unpack_quads<Lookup::four_bits> : unpack_quads<Lookup::fp8_rows>;
        for (int t = 0; t < kOutTiles; ++t) unpack(weight, tile + t, 0, units, quads + t * units * kQuads);
        return unpacked_quad_products(args, quads, tile, kOutTiles, first, last);
      }
    }
    for (int t = 0; t < kOutTiles; ++t) unpack_coded_tile(weight, tile + t, 0, units, room + t * units * 2);
    LinearArgs own = args;
    own.weight.data = room;
    own.out = static_cast<bf16*>(args.out) + tile * kTile;
    own.bias = args.bias ? args.bias + tile * kTile : nullptr;
    return tables::WEFT_TABLE::item_of_tiles(own, 0, first, last, nullptr, std::is_same_v<X, float>);
  }
  LinearArgs own = args;
  own.rows = last - first;
  own.x = static_cast<const X*>(args.x) + first * args.x_stride;
  own.out = static_cast<bf16*>(args.out) + first * weight.out;
  Scratch scratch;
  const Block<X>* const blocks = own_blocks<X>(own, kCodedRows, scratch);
  const auto& sums = coded_sums_for<X>(lookup_of(weight));
  for (int64_t i = 0; i < blocks_of(own.rows, kCodedRows); ++i)
    for (int64_t t = tile; t < end; t += kTwelveBitTiles)
      sums[static_cast<size_t>(blocks[i].count - 1)](own, t, blocks[i]);
}

template <class X>
void coded_products_of(const LinearArgs& args) {
  const Weight& weight = args.weight;
  const int64_t tiles = (weight.out + kTile - 1) / kTile, items = (tiles + kOutTiles - 1) / kOutTiles;
  const int64_t x_bytes = weight.in * static_cast<int64_t>(sizeof(X)), width = weight.in * 2;
  const int64_t parts = (args.rows * x_bytes + tuning.unpacked_part_bytes - 1) / tuning.unpacked_part_bytes;
  const double nanoseconds = static_cast<double>(kOutRows * width) *
                             (0.02 + 0.0025 * static_cast<double>(args.rows) / static_cast<double>(parts));
  Pool::instance().reserve(item_scratch<X>(weight, args.rows / parts + 1));
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
