// Tiles of bfloat16 that are codes in memory: fp8 (e4m3), or 4 bits that a table of 16 floats stands for (nf4, fp4).
//
//     weight   bfloat16(number of the code x scale)         a scale for each row and group of columns, or for a tile
//     unit     8 columns of 16 rows
//                fp8      columns 0-3 of each row, columns 4-7            2 lines of 64 bytes
//                4 bits   columns 0-3 in the lower halves, 4-7 above      1 line
//     two tiles  a unit of one, a unit of the other, ...: one stream from memory, as in twelve_bit.inl
//
// The weights are those of the model that was widened to bfloat16, and sums have the order of tiles.inl. So a product has
// the bits of the widened model, of one row as of many.
//
//     up to 4 rows of x    codes become weights in registers; 4 rows meet two tiles
//     more                 four tiles are unpacked into the L2 cache once, for all rows of a part of x
//
// e4m3 in a float: sign, exponent and fraction are moved to their places in one arithmetic shift, and the scale is larger
// by 2^120, which the exponents differ by. Denormals come out right, so none may be flushed here.
//
// Rejected: scales behind the sums of a group (faster, but other weights than the library's: they are never rounded).

namespace weft {
namespace {

bool is_coded(WeightForm form) { return form == WeightForm::bfloat16_fp8 || form == WeightForm::bfloat16_four_bits; }

#if defined(__AVX512F__)
constexpr float kFp8Up = 0x1p120f;
constexpr int kCodedRows = 4;

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

  // Of the group that ``unit`` is in.
  WEFT_INLINE __m512 scale(int64_t unit) const {
    const int64_t group = unit / units_of_group;
    const __m512 up = _mm512_set1_ps(FP8 ? kFp8Up : 1.0f);
    if (form == ScaleForm::of_tiles) return _mm512_mul_ps(_mm512_set1_ps(static_cast<const float*>(scales)[group]), up);
    if (form == ScaleForm::e8m0) return _mm512_mul_ps((__m512)powers_of_two(static_cast<const uint8_t*>(scales) + group * kTile), up);
    return _mm512_mul_ps(_mm512_loadu_ps(static_cast<const float*>(scales) + group * kTile), up);
  }

  // Column ``COLUMN`` of 4, of the half whose codes are ``codes``, times its scale.
  template <int HALF, int COLUMN>
  WEFT_INLINE __m512 number(__m512i codes, __m512 scale) const {
    if constexpr (FP8) {
      const __m512i top = COLUMN == 3 ? codes : _mm512_slli_epi32(codes, 24 - 8 * COLUMN);
      const __m512i bits = _mm512_and_si512(_mm512_srai_epi32(top, 4), _mm512_set1_epi32(static_cast<int>(0x87F00000u)));
      return _mm512_mul_ps(_mm512_castsi512_ps(bits), scale);
    } else {
      return _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 8 * COLUMN + 4 * HALF), table), scale);
    }
  }

  template <int HALF>
  WEFT_INLINE __m512i codes(const uint8_t* unit) const { return _mm512_loadu_si512(unit + (FP8 ? HALF * 64 : 0)); }
};

// Rounded to bfloat16, in the upper half of each lane.
WEFT_INLINE __m512i rounded_up_half(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7FFF));
}

WEFT_INLINE __m512i pair_of(__m512 first, __m512 second) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
  return _mm512_or_si512(_mm512_srli_epi32(rounded_up_half(first), 16), _mm512_and_si512(rounded_up_half(second), upper));
}

template <bool FP8, int HALF>
WEFT_INLINE Half coded_half(const CodedTile<FP8>& tile, const uint8_t* unit, __m512 scale) {
  const __m512i codes = tile.template codes<HALF>(unit);
  return {{pair_of(tile.template number<HALF, 0>(codes, scale), tile.template number<HALF, 1>(codes, scale)),
           pair_of(tile.template number<HALF, 2>(codes, scale), tile.template number<HALF, 3>(codes, scale))}};
}

// The same by one instruction for both roundings.
WEFT_BF16_PART inline __m512i pair_by_halves(__m512 first, __m512 second) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
                                         19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

// ROWS rows of x times tiles ``tile`` and the next, by products of pairs.
template <bool FP8, int ROWS>
WEFT_BF16 void coded_sums(const LinearArgs& args, int64_t tile, const Block<bf16>& block) {
  constexpr int TILES = kTwelveBitTiles;
  const int64_t units = args.weight.in / kUnitColumns;
  const bf16* x = block.x;
  const CodedTile<FP8> tiles[TILES] = {{args.weight, tile}, {args.weight, tile + 1}};
  const uint8_t* from = tiles[0].units;
  __m512 acc[ROWS][TILES];
  const auto each_sum = [&](const auto& body) WEFT_BF16_PART {
    each<ROWS>([&](auto r) WEFT_BF16_PART { each<TILES>([&](auto t) WEFT_BF16_PART { body(r, t); }); });
  };
  each_sum([&](auto r, auto t) WEFT_BF16_PART { acc[r][t] = _mm512_setzero_ps(); });
  for (int64_t unit = 0; unit < units;) {
    __m512 scale[TILES];
    each<TILES>([&](auto t) WEFT_BF16_PART { scale[t] = tiles[t].scale(unit); });
    const int64_t next = unit + tiles[0].units_of_group, end = next < units ? next : units;
    for (; unit < end; ++unit, from += CodedTile<FP8>::kStep, x += ROWS * kUnitColumns) {
      for (int line = 0; line < CodedTile<FP8>::kStep / 64; ++line) __builtin_prefetch(from + kFetchedAhead + line * 64, 0, 2);
      each<2>([&](auto half) WEFT_BF16_PART {
        __m512i codes[TILES];
        each<TILES>([&](auto t) WEFT_BF16_PART { codes[t] = tiles[t].template codes<half>(from + t * kCodedBytes<FP8>); });
        each<2>([&](auto pair) WEFT_BF16_PART {
          __m512i w[TILES];
          each<TILES>([&](auto t) WEFT_BF16_PART {
            w[t] = pair_by_halves(tiles[t].template number<half, 2 * pair>(codes[t], scale[t]),
                                  tiles[t].template number<half, 2 * pair + 1>(codes[t], scale[t]));
          });
          each_sum([&](auto r, auto t) WEFT_BF16_PART {
            int32_t two;
            std::memcpy(&two, x + r * kUnitColumns + 4 * half + 2 * pair, sizeof two);
            acc[r][t] = _mm512_dpbf16_ps(acc[r][t], (__m512bh)w[t], (__m512bh)_mm512_set1_epi32(two));
          });
        });
      });
    }
  }
  f32x16 sums[ROWS][TILES];
  each_sum([&](auto r, auto t) WEFT_BF16_PART { sums[r][t] = (f32x16)acc[r][t]; });
  store_twelve_bit<ROWS>(args, tile, block.first, sums);
}

// The same by float32 products of widened weights, in the order of tiles.inl.
template <bool FP8, int ROWS>
void coded_sums(const LinearArgs& args, int64_t tile, const Block<float>& block) {
  constexpr int TILES = kTwelveBitTiles;
  const int64_t units = args.weight.in / kUnitColumns;
  const float* x = block.x;
  const CodedTile<FP8> tiles[TILES] = {{args.weight, tile}, {args.weight, tile + 1}};
  const uint8_t* from = tiles[0].units;
  f32x16 acc[ROWS][TILES];
  const auto each_sum = [&](const auto& body) WEFT_WIDE_PART {
    each_wide<ROWS>([&](auto r) WEFT_WIDE_PART { each_wide<TILES>([&](auto t) WEFT_WIDE_PART { body(r, t); }); });
  };
  each_sum([&](auto r, auto t) WEFT_WIDE_PART { acc[r][t] = splat(0); });
  for (int64_t unit = 0; unit < units; ++unit, from += CodedTile<FP8>::kStep, x += ROWS * kUnitColumns) {
    each_wide<2>([&](auto half) WEFT_WIDE_PART {
      each_wide<4>([&](auto column) WEFT_WIDE_PART {
        f32x16 w[TILES];
        each_wide<TILES>([&](auto t) WEFT_WIDE_PART {
          const __m512i codes = tiles[t].template codes<half>(from + t * kCodedBytes<FP8>);
          const __m512i bits = rounded_up_half(tiles[t].template number<half, column>(codes, tiles[t].scale(unit)));
          w[t] = (f32x16)_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u)));
        });
        each_sum([&](auto r, auto t) WEFT_WIDE_PART { acc[r][t] += w[t] * x[r * kUnitColumns + 4 * half + column]; });
      });
    });
  }
  f32x16 sums[ROWS][TILES];
  each_sum([&](auto r, auto t) WEFT_WIDE_PART { sums[r][t] = acc[r][t]; });
  store_twelve_bit<ROWS>(args, tile, block.first, sums);
}

template <class X>
using CodedSums = void (*)(const LinearArgs&, int64_t, const Block<X>&);

template <bool FP8, class X, int... R>
constexpr std::array<CodedSums<X>, sizeof...(R)> coded_sums_of(std::integer_sequence<int, R...>) {
  return {{static_cast<CodedSums<X>>(&coded_sums<FP8, R + 1>)...}};
}
template <bool FP8, class X>
constexpr auto kCodedSums = coded_sums_of<FP8, X>(std::make_integer_sequence<int, kCodedRows>{});

// Units [unit, end) of one tile -> ``to``, as they are in tiles.inl.
template <bool FP8>
void unpack_coded(const CodedTile<FP8>& tile, int64_t unit, int64_t end, Half* to) {
  for (; unit < end; ++unit, to += 2) {
    const uint8_t* const from = tile.units + unit * CodedTile<FP8>::kStep;
    const __m512 scale = tile.scale(unit);
    __builtin_prefetch(from + kFetchedAhead, 0, 2);
    to[0] = coded_half<FP8, 0>(tile, from, scale);
    to[1] = coded_half<FP8, 1>(tile, from, scale);
  }
}

void unpack_coded_tile(const Weight& weight, int64_t tile, int64_t unit, int64_t end, Half* to) {
  if (weight.form == WeightForm::bfloat16_fp8) return unpack_coded(CodedTile<true>(weight, tile), unit, end, to);
  unpack_coded(CodedTile<false>(weight, tile), unit, end, to);
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
  const auto& sums = weight.form == WeightForm::bfloat16_fp8 ? kCodedSums<true, X> : kCodedSums<false, X>;
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
