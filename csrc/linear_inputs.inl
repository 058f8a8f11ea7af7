// Rows of x in the shape that a matrix kernel reads: float32, bfloat16, or int8 codes with a scale for 32 columns.
//
//     floats   values [rows][padded]     value_sums [rows][lines]     exact products with any form of weight
//     halves   bfloat16 [rows][padded]                                products of pairs (vdpbf16ps)
//     codes    int8 [rows][padded]       scales, sums [rows][lines]   products of four bytes (vpdpbusd)
//
// A line is 32 columns; the columns behind the last one are zero. The sums of a line fold the zero point of the weights
// into one multiplication. A row depends on no other row, so a row of x gives the same bits in any batch.

namespace weft {
namespace {

constexpr int kTile = 16;
constexpr int kOutTiles = 4;
constexpr int kOutRows = kTile * kOutTiles;
constexpr int kRowsTogether = 6;
constexpr int64_t kFewRows = 8;  // of x, by vectors also where there is a matrix unit
constexpr int64_t kLine = 32;  // columns that share a scale of x

#if defined(__AVX512F__)
#define WEFT_VNNI __attribute__((target("avx512vnni")))
#define WEFT_BF16 __attribute__((target("avx512bf16")))
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
bool has_bf16_dot() { return false; }
#endif

enum class Inputs { floats, halves, codes };

// [rows][padded] values of one kind. There is room behind the last row: a kernel may read up to kRowsTogether rows at
// once, and drops the products of the additional ones.
struct Prepared {
  Inputs kind;
  int64_t padded, lines;
  std::vector<float> values;
  std::vector<bf16> halves;
  std::vector<int8_t> codes;
  std::vector<float> scales;     // [rows][lines]
  std::vector<int32_t> sums;     // [rows][lines] of codes
  std::vector<float> value_sums; // [rows][lines] of values

  void resize(Inputs kind_, int64_t rows, int64_t in) {
    kind = kind_;
    lines = (in + kLine - 1) / kLine;
    padded = lines * kLine;
    const int64_t whole = rows + kRowsTogether;
    if (kind == Inputs::halves) halves.resize(static_cast<size_t>(whole * padded));
    if (kind == Inputs::floats) {
      values.resize(static_cast<size_t>(whole * padded));
      value_sums.resize(static_cast<size_t>(whole * lines));
    }
    if (kind == Inputs::codes) {
      codes.resize(static_cast<size_t>(whole * padded));
      scales.resize(static_cast<size_t>(whole * lines));
      sums.resize(static_cast<size_t>(whole * lines));
    }
  }

  // Sets the ``count`` <= 32 values of one line, and zeros behind them.
  void set_line(int64_t row, int64_t line, const float* from, int64_t count) {
    alignas(64) float x[kLine] = {};
    for (int64_t i = 0; i < count; ++i) x[i] = from[i];
    const f32x16 first = load(x), second = load(x + 16);
    const int64_t at = row * padded + line * kLine;
    if (kind == Inputs::halves) {
      store(halves.data() + at, first);
      store(halves.data() + at + 16, second);
    } else if (kind == Inputs::floats) {
      store(values.data() + at, first);
      store(values.data() + at + 16, second);
      value_sums[static_cast<size_t>(row * lines + line)] = sum(first + second);
    } else {
      const bool finite = sum(first * 0.0f + second * 0.0f) == 0;  // else the scale is NaN, and so are all products
      const float most = finite ? largest(max(max(first, -first), max(second, -second))) : 0;
      const float up = most > 0 ? 127.0f / most : 0;
      int32_t total = 0;
      int8_t* const to = codes.data() + at;
      const f32x16 half = splat(0.5f);
      for (int part = 0; part < 2; ++part) {
        const f32x16 scaled = finite ? (part ? second : first) * up : splat(0);
        const i32x16 whole =
            __builtin_convertvector(scaled + select(scaled < splat(0), -half, half), i32x16);
        for (int i = 0; i < 16; ++i) {
          to[part * 16 + i] = static_cast<int8_t>(whole[i]);
          total += whole[i];
        }
      }
      scales[static_cast<size_t>(row * lines + line)] = finite ? most / 127.0f : std::nanf("");
      sums[static_cast<size_t>(row * lines + line)] = total;
    }
  }

  template <class T>
  void set_row(int64_t row, const T* x, int64_t in) {
    for (int64_t line = 0; line < lines; ++line) {
      alignas(64) float wide[kLine];
      const int64_t count = in - line * kLine < kLine ? in - line * kLine : kLine;
      if (count == kLine) {
        store(wide, load(x + line * kLine));
        store(wide + 16, load(x + line * kLine + 16));
      } else {
        for (int64_t i = 0; i < count; ++i) wide[i] = widen(x[line * kLine + i]);
      }
      set_line(row, line, wide, count);
    }
  }
};

bool in_tiles(WeightForm form) { return form == WeightForm::int8 || form == WeightForm::int4; }

// Float minimums of codes, [tiles][lines][16]: value = code scale - minimum, a scale for 32 columns. They are added up
// behind a product, line after line, as the sum of x in a line times the minimum. So a row of x has the same bits in any
// batch here too.
const float* minimums_of(const Weight& weight) {
  return in_tiles(weight.form) ? reinterpret_cast<const float*>(weight.odd) : nullptr;
}

// ``sums``: of x, a number for each line of one row.
WEFT_INLINE f32x16 without_minimums(const float* minimums, int64_t tile, const float* sums, int64_t lines, f32x16 total) {
  const float* const from = minimums + tile * lines * kTile;
  f32x16 taken = splat(0);
  for (int64_t line = 0; line < lines; ++line) taken = fused(load(from + line * kTile), splat(sums[line]), taken);
  return total - taken;
}

Inputs inputs_for(const Weight& weight, bool exact) {
#if defined(__AVX512F__)
  if (weight.form == WeightForm::bfloat16 && has_bf16_dot()) return Inputs::halves;
#endif
  return in_tiles(weight.form) && !exact && has_vnni() ? Inputs::codes : Inputs::floats;
}

}  // namespace
}  // namespace weft
