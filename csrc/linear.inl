// Matrix products y = x W^T of weights in every form but float tiles (tiles.inl). The memory bandwidth of W bounds them.
//
//     item     64 rows of W: four tiles of 16
//     inside   up to 6 rows of x at a time; every vector of W that is loaded meets all of them
//
//     rows (bfloat16, float32)    a row of W times a row of x, added across at the end
//     tiles (int8, int4)          tile | columns 0-3 of 16 rows | columns 4-7 of 16 rows | ...
//                                 a lane is a row of W: nothing is added across, a scale is one multiplication
//
// Tiles meet x in one of two ways. *Rounded*: x is int8 with a scale for 32 columns, and four products of bytes are one
// lane of vpdpbusd. Integers are exact, and scales are added in the order of the columns. So a row of x gives the same
// bits in any batch. *Exact*: codes are widened to float32 and meet x as it is. Machines without vpdpbusd run this too.

namespace weft {
namespace {

template <int BITS>
constexpr int64_t tile_line_bytes() {
  return kTile * kLine * BITS / 8;
}

#if !defined(__AVX512F__)
float widen_half(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, rest = bits & 0x7FFF;
  uint32_t wide = rest << 13;
  float y;
  std::memcpy(&y, &wide, sizeof y);
  y *= 0x1p112f;  // moves the exponent; denormals come out right as well
  std::memcpy(&wide, &y, sizeof y);
  wide |= sign;
  std::memcpy(&y, &wide, sizeof y);
  return y;
}
#endif

WEFT_INLINE f32x16 tile_scales(const Weight& weight, int64_t at) {
  if (!weight.half_scales) return load(static_cast<const float*>(weight.scales) + at);
  const uint16_t* from = static_cast<const uint16_t*>(weight.scales) + at;
#if defined(__AVX512F__)
  return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
  f32x16 x;
  for (int i = 0; i < kTile; ++i) x[i] = widen_half(from[i]);
  return x;
#endif
}

WEFT_INLINE i32x16 tile_zeros(const Weight& weight, int64_t at) {
  typedef uint8_t u8x16 __attribute__((vector_size(16)));
  u8x16 bytes;
  std::memcpy(&bytes, weight.zeros + at, sizeof bytes);
  return __builtin_convertvector(bytes, i32x16);
}

template <int BITS>
constexpr int kMiddle = BITS == 8 ? 128 : 8;

// TILES tiles from ``tile`` on, times ROWS rows of x from ``row`` on -> y [ROWS][kOutRows].
template <int BITS, int ROWS, int TILES, bool ZEROS>
WEFT_INLINE void exact_tiles(const Weight& weight, int64_t tile, const Prepared& x, int64_t row, float* y) {
  const int64_t lines = x.lines, groups = (x.padded + weight.group - 1) / weight.group;
  for (int t = 0; t < TILES; ++t) {
    const uint8_t* from = static_cast<const uint8_t*>(weight.data) + (tile + t) * lines * tile_line_bytes<BITS>();
    f32x16 total[ROWS] = {};
    f32x16 scale = splat(0), zero = splat(static_cast<float>(kMiddle<BITS>));
    for (int64_t line = 0; line < lines; ++line) {
      if (line * kLine % weight.group == 0) {
        const int64_t at = ((tile + t) * groups + line * kLine / weight.group) * kTile;
        scale = tile_scales(weight, at);
        if constexpr (ZEROS) zero = __builtin_convertvector(tile_zeros(weight, at), f32x16);
      }
      f32x16 acc[ROWS] = {};
      const float* values = x.values.data() + row * x.padded + line * kLine;
      for (int vector = 0; vector < BITS; ++vector, from += 64) {
        u32x16 bytes;
        std::memcpy(&bytes, from, sizeof bytes);
        for (int nibble = 0; nibble < 8 / BITS; ++nibble)
          for (int j = 0; j < 4; ++j) {
            const u32x16 code = (bytes >> (8 * j + 4 * nibble)) & (BITS == 8 ? 255u : 15u);
            const f32x16 wide = __builtin_convertvector((i32x16)code, f32x16);
            for (int r = 0; r < ROWS; ++r)
              acc[r] += wide * values[r * x.padded + (vector * (8 / BITS) + nibble) * 4 + j];
          }
      }
      for (int r = 0; r < ROWS; ++r)
        total[r] += (acc[r] - zero * x.value_sums[static_cast<size_t>((row + r) * lines + line)]) * scale;
    }
    for (int r = 0; r < ROWS; ++r) store(y + r * kOutRows + t * kTile, total[r]);
  }
}

#if defined(__AVX512F__)
template <int BITS, int ROWS, int TILES, bool ZEROS>
WEFT_VNNI void rounded_tiles(const Weight& weight, int64_t tile, const Prepared& x, int64_t row, float* y) {
  const int64_t lines = x.lines, groups = (x.padded + weight.group - 1) / weight.group;
  const uint8_t* from = static_cast<const uint8_t*>(weight.data) + tile * lines * tile_line_bytes<BITS>();
  const int64_t tile_bytes = lines * tile_line_bytes<BITS>();
  const __m512i low = _mm512_set1_epi8(15);
  f32x16 total[TILES][ROWS] = {};
  f32x16 scale[TILES] = {};
  __m512i zero[TILES] = {};
  int64_t left = 0, group = 0;
  for (int64_t line = 0; line < lines; ++line, from += tile_line_bytes<BITS>()) {
    if (left == 0) {
      for (int t = 0; t < TILES; ++t) {
        const int64_t at = ((tile + t) * groups + group) * kTile;
        scale[t] = tile_scales(weight, at);
        if constexpr (ZEROS) zero[t] = (__m512i)tile_zeros(weight, at);
      }
      left = weight.group;
      ++group;
    }
    left -= kLine;
    __m512i acc[TILES][ROWS];
    for (int r = 0; r < ROWS; ++r) {
      const int32_t sum = x.sums[static_cast<size_t>((row + r) * lines + line)];
      for (int t = 0; t < TILES; ++t)
        acc[t][r] = ZEROS ? _mm512_mullo_epi32(_mm512_set1_epi32(-sum), zero[t])
                          : _mm512_set1_epi32(-kMiddle<BITS> * sum);
    }
    const int8_t* codes = x.codes.data() + row * x.padded + line * kLine;
    for (int vector = 0; vector < BITS; ++vector) {
      __m512i w[TILES][8 / BITS];
      for (int t = 0; t < TILES; ++t) {
        const __m512i bytes = _mm512_loadu_si512(from + t * tile_bytes + vector * 64);
        if constexpr (BITS == 8) {
          w[t][0] = bytes;
        } else {
          w[t][0] = _mm512_and_si512(bytes, low);
          w[t][1] = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low);
        }
      }
      for (int nibble = 0; nibble < 8 / BITS; ++nibble)
        for (int r = 0; r < ROWS; ++r) {
          int32_t four;
          std::memcpy(&four, codes + r * x.padded + (vector * (8 / BITS) + nibble) * 4, sizeof four);
          const __m512i xs = _mm512_set1_epi32(four);
          for (int t = 0; t < TILES; ++t) acc[t][r] = _mm512_dpbusd_epi32(acc[t][r], w[t][nibble], xs);
        }
    }
    for (int r = 0; r < ROWS; ++r) {
      const float x_scale = x.scales[static_cast<size_t>((row + r) * lines + line)];
      for (int t = 0; t < TILES; ++t)
        total[t][r] += (f32x16)_mm512_cvtepi32_ps(acc[t][r]) * (scale[t] * x_scale);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int t = 0; t < TILES; ++t) store(y + r * kOutRows + t * kTile, total[t][r]);
}

// Few rows of x: one row of W after the other, so that W is one stream from memory (several short ones defeat the
// prefetcher). Sums are in several parts, so that they do not wait for one another.
template <int ROWS>
WEFT_BF16 void bf16_rows(const Weight& weight, int64_t first, const Prepared& x, int64_t row, float* y, int64_t count) {
  constexpr int together = ROWS <= 2 ? 1 : 2, parts = ROWS <= 2 ? 4 : ROWS <= 4 ? 2 : 1;
  const bf16* values = x.halves.data() + row * x.padded;
  for (int64_t o = 0; o < count; o += together) {
    const bf16* w[together];
    for (int i = 0; i < together; ++i)  // past the end: the last one again, not stored
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

template <int BITS, int ROWS, bool ZEROS>
void tile_item(const Weight& weight, int64_t first, const Prepared& x, int64_t row, float* y, int64_t count) {
  const int64_t tile = first / kTile;
  const int tiles = static_cast<int>((count + kTile - 1) / kTile);
  int t = 0;
#if defined(__AVX512F__)
  if (x.kind == Inputs::codes) {
    constexpr int together = ROWS <= 2 ? 4 : 2;  // with more, sums spill
    for (; t + together <= tiles; t += together)
      rounded_tiles<BITS, ROWS, together, ZEROS>(weight, tile + t, x, row, y + t * kTile);
    for (; t < tiles; ++t) rounded_tiles<BITS, ROWS, 1, ZEROS>(weight, tile + t, x, row, y + t * kTile);
    return;
  }
#endif
  for (; t < tiles; ++t) exact_tiles<BITS, ROWS, 1, ZEROS>(weight, tile + t, x, row, y + t * kTile);
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
    case WeightForm::int8_both: return;  // see tiles.inl, w8a8.inl
    case WeightForm::int8:
      if (weight.zeros) return tile_item<8, ROWS, true>(weight, first, x, row, y, count);
      return tile_item<8, ROWS, false>(weight, first, x, row, y, count);
    case WeightForm::int4:
      if (weight.zeros) return tile_item<4, ROWS, true>(weight, first, x, row, y, count);
      return tile_item<4, ROWS, false>(weight, first, x, row, y, count);
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
  x.resize(inputs_for(weight, args.exact), args.rows, weight.in);
  const auto set = [&](int64_t row) {
    x.set_row(row, static_cast<const T*>(args.x) + row * args.x_stride, weight.in);
  };
  if (args.rows < kRowsTogether)
    for (int64_t row = 0; row < args.rows; ++row) set(row);
  else
    Pool::instance().for_each(args.rows, set);
  const float* const minimums = minimums_of(weight);
  static thread_local std::vector<float> sums_room;
  std::vector<float>& sums = sums_room;
  if (minimums) {
    sums.resize(static_cast<size_t>(args.rows * x.lines));
    for (size_t i = 0; i < sums.size(); ++i)
      sums[i] = x.kind == Inputs::codes ? x.scales[i] * static_cast<float>(x.sums[i]) : x.value_sums[i];
  }
  Pool::instance().for_each((weight.out + kOutRows - 1) / kOutRows, [&](int64_t item) {
    const int64_t first = item * kOutRows;
    const int64_t count = weight.out - first < kOutRows ? weight.out - first : kOutRows;
    alignas(64) float y[kRowsTogether * kOutRows];
    for (int64_t row = 0; row < args.rows; row += kRowsTogether) {
      const int64_t rows = args.rows - row < kRowsTogether ? args.rows - row : kRowsTogether;
      item_products(weight, first, count, x, row, rows, y);
      if (minimums)
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t t = 0; t * kTile < count; ++t) {
            float* const to = y + r * kOutRows + t * kTile;
            store(to, without_minimums(minimums, first / kTile + t, sums.data() + (row + r) * x.lines, x.lines, load(to)));
          }
      for (int64_t r = 0; r < rows; ++r)
        write_row(static_cast<T*>(args.out) + (row + r) * weight.out + first, y + r * kOutRows,
                  args.bias ? args.bias + first : nullptr, count);
    }
  });
}

template <int BITS, class T>
void widen_tiles(const WidenArgs& args) {
  const Weight& weight = args.weight;
  const int64_t lines = (weight.in + kLine - 1) / kLine;
  const int64_t groups = (lines * kLine + weight.group - 1) / weight.group;
  const float* const minimums = minimums_of(weight);
  Pool::instance().for_each((args.last - args.first + kTile - 1) / kTile, [&](int64_t item) {
    const int64_t tile = args.first / kTile + item;
    const uint8_t* from = static_cast<const uint8_t*>(weight.data) + tile * lines * tile_line_bytes<BITS>();
    T* const to = static_cast<T*>(args.out) + item * kTile;
    for (int64_t line = 0; line < lines; ++line) {
      const int64_t at = (tile * groups + line * kLine / weight.group) * kTile;
      const f32x16 scale = tile_scales(weight, at);
      const f32x16 zero = weight.zeros ? __builtin_convertvector(tile_zeros(weight, at), f32x16)
                                       : splat(static_cast<float>(kMiddle<BITS>));
      for (int vector = 0; vector < BITS; ++vector, from += 64) {
        u32x16 bytes;
        std::memcpy(&bytes, from, sizeof bytes);
        for (int nibble = 0; nibble < 8 / BITS; ++nibble)
          for (int j = 0; j < 4; ++j) {
            const int64_t column = line * kLine + (vector * (8 / BITS) + nibble) * 4 + j;
            if (column >= weight.in) break;
            const u32x16 code = (bytes >> (8 * j + 4 * nibble)) & (BITS == 8 ? 255u : 15u);
            const f32x16 value = (__builtin_convertvector((i32x16)code, f32x16) - zero) * scale;
            store(to + column * args.stride, minimums ? value - load(minimums + at) : value);
          }
      }
    }
  });
}

void widen_weight(const WidenArgs& args) {
  const bool eight = args.weight.form == WeightForm::int8;
  if (args.out_dtype == Dtype::bfloat16) {
    if (eight) widen_tiles<8, bf16>(args);
    else widen_tiles<4, bf16>(args);
  } else {
    if (eight) widen_tiles<8, float>(args);
    else widen_tiles<4, float>(args);
  }
}

}  // namespace
}  // namespace weft
