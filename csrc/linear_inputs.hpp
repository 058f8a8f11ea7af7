// Rows of x in the shape that a matrix kernel reads: float32, bfloat16, or int8 codes with a scale for 32 columns.
//
//     floats   values [rows][padded]     value_sums [rows][parts]     exact products with any form of weight
//     halves   bfloat16 [rows][padded]                                products of pairs (vdpbf16ps)
//     codes    int8 [rows][padded]       scales [rows][lines]         products of four bytes (vpdpbusd)
//                                        sums [rows][parts]
//
// A line is 32 columns; the columns after the last one are zero. A part is a line, or half of one where the weight's
// groups have 16 columns. The sums of a part fold the zero point of the weights into one multiplication, and minimums
// of groups as well. A row depends on no other row, so a row of x gives the same bits in any batch.
#pragma once

#include "table.hpp"

namespace weft {
namespace {

constexpr int kTile = 16;
constexpr int kOutTiles = 4;
constexpr int kOutRows = kTile * kOutTiles;
constexpr int kRowsTogether = 6;
constexpr int kOneTileRows = 4;  // up to this number of rows of x, W is read as one stream (linear.hpp)
// On a CPU with a matrix unit, vectors still multiply up to this number of rows of x, by codes and by bytes: they widen
// codes in registers, and reading W takes them less time than a step of the unit.
constexpr int64_t kFewRows = 2, kFewByteRows = 8;
constexpr int64_t kLine = 32;  // columns that share a scale of x
constexpr int64_t kHalfLine = 16;

#if defined(__AVX512F__)
#define WEFT_VNNI __attribute__((target("avx512vnni")))
#define WEFT_BF16 __attribute__((target("avx512bf16")))
// Attributes of such a function, always inlined.
#define WEFT_BF16_PART __attribute__((always_inline, target("avx512bf16")))
bool has_vnni() {
  static const bool has = __builtin_cpu_supports("avx512vnni");
  return has;
}
bool has_bf16_dot() {
  static const bool has = __builtin_cpu_supports("avx512bf16");
  return has;
}
#elif defined(__aarch64__)
#define WEFT_BF16 __attribute__((target("arch=armv8.2-a+bf16")))
bool has_vnni() { return false; }
bool has_bf16_dot() {
#if defined(__linux__)
  constexpr unsigned long kHalves = 1ul << 14;  // HWCAP2_BF16: FEAT_BF16
  static const bool has = getauxval(AT_HWCAP2) & kHalves;
  return has;
#else
  return false;
#endif
}
#else
bool has_vnni() { return false; }
[[maybe_unused]] bool has_bf16_dot() { return false; }
#endif

enum class Inputs { floats, halves, codes };

bool in_tiles(WeightForm form) {
  return form == WeightForm::int8 || form == WeightForm::int4 || form == WeightForm::int6;
}

// The most groups that a line of ``weight`` has: 1 if groups are whole lines.
int64_t parts_of_line(const Weight& weight) { return in_tiles(weight.form) && weight.group == kHalfLine ? 2 : 1; }

Inputs inputs_for(const Weight& weight, bool exact) {
#if defined(__AVX512F__)
  if (weight.form == WeightForm::bfloat16 && has_bf16_dot()) return Inputs::halves;
#endif
  return in_tiles(weight.form) && !exact && has_vnni() ? Inputs::codes : Inputs::floats;
}

// [rows][padded] values of one kind. There is room after the last row: a kernel may read up to kRowsTogether rows at
// once, and drops the products of the additional ones.
struct Prepared {
  Inputs kind;
  int64_t padded, lines, parts;  // parts: of a line
  bool scaled_sums;
  std::vector<float> values;
  std::vector<bf16> halves;
  std::vector<int8_t> codes;
  std::vector<float> scales;      // [rows][lines]
  std::vector<int32_t> sums;      // [rows][lines][parts] of codes
  std::vector<float> value_sums;  // the same of values: of floats, and for minimums

  // For products of ``rows`` rows with ``weight``.
  void resize(const Weight& weight, bool exact, int64_t rows) {
    kind = inputs_for(weight, exact);
    lines = (weight.in + kLine - 1) / kLine;
    parts = parts_of_line(weight);
    padded = lines * kLine;
    scaled_sums = kind == Inputs::floats || weight.minimums;
    const int64_t whole = rows + kRowsTogether;
    if (kind == Inputs::halves) halves.resize(static_cast<size_t>(whole * padded));
    if (kind == Inputs::floats) values.resize(static_cast<size_t>(whole * padded));
    if (scaled_sums) value_sums.resize(static_cast<size_t>(whole * lines * parts));
    if (kind == Inputs::codes) {
      codes.resize(static_cast<size_t>(whole * padded));
      scales.resize(static_cast<size_t>(whole * lines));
      sums.resize(static_cast<size_t>(whole * lines * parts));
    }
  }

  // Sets the ``count`` <= 32 values of one line, followed by zeros.
  void set_line(int64_t row, int64_t line, const float* from, int64_t count) {
    alignas(64) float x[kLine] = {};
    for (int64_t i = 0; i < count; ++i) x[i] = from[i];
    const f32x16 first = load(x), second = load(x + 16);
    const int64_t at = row * padded + line * kLine;
    const size_t sum_at = static_cast<size_t>((row * lines + line) * parts);
    if (kind == Inputs::halves) {
      store(halves.data() + at, first);
      store(halves.data() + at + 16, second);
    } else if (kind == Inputs::floats) {
      store(values.data() + at, first);
      store(values.data() + at + 16, second);
      value_sums[sum_at] = parts == 2 ? sum(first) : sum(first + second);
      if (parts == 2) value_sums[sum_at + 1] = sum(second);
    } else {
      const bool finite = sum(first * 0.0f + second * 0.0f) == 0;  // else the scale is NaN, and so are all products
      const float most = finite ? largest(max(max(first, -first), max(second, -second))) : 0;
      const float up = most > 0 ? 127.0f / most : 0;
      int32_t totals[2] = {};
      int8_t* const to = codes.data() + at;
      const f32x16 half = splat(0.5f);
      for (int part = 0; part < 2; ++part) {
        const f32x16 scaled = finite ? (part ? second : first) * up : splat(0);
        const i32x16 whole = converted<i32x16>(scaled + select(scaled < splat(0), -half, half));
        for (int i = 0; i < 16; ++i) {
          to[part * 16 + i] = static_cast<int8_t>(whole[i]);
          totals[part] += whole[i];
        }
      }
      if (parts == 1) totals[0] += totals[1];
      const float scale = finite ? most / 127.0f : std::nanf("");
      scales[static_cast<size_t>(row * lines + line)] = scale;
      for (int64_t part = 0; part < parts; ++part) {
        sums[sum_at + static_cast<size_t>(part)] = totals[part];
        if (scaled_sums) value_sums[sum_at + static_cast<size_t>(part)] = scale * static_cast<float>(totals[part]);
      }
    }
  }

  // ``order``: the number of x at each place, or null.
  template <class T>
  void set_row(int64_t row, const T* x, int64_t in, const int32_t* order = nullptr) {
    for (int64_t line = 0; line < lines; ++line) {
      alignas(64) float wide[kLine];
      const int64_t count = in - line * kLine < kLine ? in - line * kLine : kLine;
      if (order) {
        for (int64_t i = 0; i < count; ++i) wide[i] = widen(x[order[line * kLine + i]]);
      } else if (count == kLine) {
        store(wide, load(x + line * kLine));
        store(wide + 16, load(x + line * kLine + 16));
      } else {
        for (int64_t i = 0; i < count; ++i) wide[i] = widen(x[line * kLine + i]);
      }
      set_line(row, line, wide, count);
    }
  }
};

#if !defined(__AVX2__) && !defined(__aarch64__)
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

WEFT_INLINE f32x16 load_halves(const uint16_t* from) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
  const __m128i* const halves = reinterpret_cast<const __m128i*>(from);
  return {(f32x8)_mm256_cvtph_ps(_mm_loadu_si128(halves)), (f32x8)_mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
#elif defined(__aarch64__)
  const auto four = [from](int at) { return (f32x4)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + at))); };
  return {{four(0), four(4)}, {four(8), four(12)}};
#else
  f32x16 x;
  for (int i = 0; i < kTile; ++i) x[i] = widen_half(from[i]);
  return x;
#endif
}

// 2^(byte - 127), of 16 bytes. 0: a number without a leading one.
WEFT_INLINE f32x16 powers_of_two(const uint8_t* from) {
  const u32x16 bits = load_bytes(from), powers = bits << 23;
#if defined(__AVX512F__)
  const __mmask16 least = _mm512_testn_epi32_mask((__m512i)bits, (__m512i)bits);
  return (f32x16)_mm512_mask_mov_epi32((__m512i)powers, least, _mm512_set1_epi32(1 << 22));
#else
  return (f32x16)(powers | ((u32x16)(bits == 0) & (1u << 22)));
#endif
}

// 16 bytes of e4m3 without a sign: a float16 with the same bits is smaller by 2^8.
constexpr float kSmallFloats = 256;
WEFT_INLINE f32x16 small_floats(const uint8_t* from) {
#if defined(__AVX512F__)
  const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return (f32x16)_mm512_cvtph_ps(_mm256_slli_epi16(wide, 7));
#else
  alignas(32) uint16_t halves[kTile];
  for (int i = 0; i < kTile; ++i) halves[i] = static_cast<uint16_t>(from[i] << 7);
  return load_halves(halves);
#endif
}

// The scales of groups, or their minimums: 16 numbers of a tile's group.
class GroupNumbers {
 public:
  static GroupNumbers scales(const Weight& weight) { return {weight, weight.scales, weight.block_scales}; }
  static GroupNumbers minimums(const Weight& weight) { return {weight, weight.minimums, weight.block_minimums}; }

  WEFT_INLINE f32x16 operator()(int64_t tile, int64_t group) const {
    const int64_t at = (tile * groups_ + group) * kTile;
    if (form_ == ScaleForm::float16) return load_halves(static_cast<const uint16_t*>(numbers_) + at);
    if (form_ == ScaleForm::float32) return load(static_cast<const float*>(numbers_) + at);
    if (form_ != ScaleForm::bytes) {
      const uint8_t* const from = static_cast<const uint8_t*>(numbers_) + at;
      const f32x16 shared = load(of_rows_ + tile * kTile);
      if (form_ == ScaleForm::e8m0) return powers_of_two(from) * shared;
      const f32x16 wide = small_floats(from) * kSmallFloats;
      return form_ == ScaleForm::e4m3 ? wide * shared : wide / shared;
    }
    const f32x16 wide = load_int8(static_cast<const uint8_t*>(numbers_) + at);
    // A float16 times seven bits is exact, so bytes lose nothing against floats.
    return wide * load_halves(of_blocks_ + (tile * blocks_ + (group >> shift_)) * kTile);
  }

 private:
  GroupNumbers(const Weight& weight, const void* numbers, const uint16_t* of_blocks)
      : numbers_(numbers),
        of_blocks_(of_blocks),
        of_rows_(weight.row_scales),
        form_(weight.scale_form),
        groups_((padded_of(weight) + weight.group - 1) / weight.group),
        blocks_((padded_of(weight) + kBlockColumns - 1) / kBlockColumns),
        shift_(weight.group == kHalfLine ? 4 : 3) {}

  static constexpr int64_t kBlockColumns = 256;
  static int64_t padded_of(const Weight& weight) { return (weight.in + kLine - 1) / kLine * kLine; }

  const void* numbers_;
  const uint16_t* of_blocks_;
  const float* of_rows_;
  ScaleForm form_;
  int64_t groups_, blocks_;
  int shift_;
};

}  // namespace
}  // namespace weft
