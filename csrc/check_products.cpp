// Compares the products of a table with sums in double precision, without Python: for an instruction set of another machine
// under an emulator (tests/aarch64.sh). Tiles are of float32, of bfloat16, or of codes as the types of GGUF and NVFP4
// have them. A single row gives the same bits as in a batch. Where an Arm CPU multiplies pairs of bfloat16, the bits
// are those of its manual, in plain C++. 12 bits have the bits of plain tiles.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "pack_twelve_bit.hpp"
#include "table.hpp"

namespace weft {
namespace {

int failures = 0;

void fail(const char* what, int64_t rows, int64_t out, int64_t in) {
  std::printf("%s: %d rows, %d x %d\n", what, static_cast<int>(rows), static_cast<int>(out), static_cast<int>(in));
  ++failures;
}

// [out][in] in tiles of 16 rows, PACK columns next to each other.
template <class T>
std::vector<T> in_tiles(const std::vector<T>& rows, int64_t out, int64_t in) {
  const int64_t pack = 4 / static_cast<int64_t>(sizeof(T)), tiles = (out + 15) / 16;
  std::vector<T> to(static_cast<size_t>(tiles * 16 * in), T{});
  for (int64_t row = 0; row < out; ++row)
    for (int64_t i = 0; i < in; ++i)
      to[static_cast<size_t>(((row / 16 * (in / pack) + i / pack) * 16 + row % 16) * pack + i % pack)] =
          rows[static_cast<size_t>(row * in + i)];
  return to;
}

template <class T>
void check(int64_t out, int64_t in, WeightForm form, Dtype dtype, double tolerance) {
  std::mt19937 dice(static_cast<unsigned>(out * 1000 + in));
  std::normal_distribution<float> normal;
  const auto noise = [&](int64_t count) {
    std::vector<T> numbers(static_cast<size_t>(count));
    for (T& number : numbers) narrow(&number, normal(dice));
    return numbers;
  };
  const int64_t most = 40;
  const std::vector<T> weight = noise(out * in), x = noise(most * in), tiles = in_tiles(weight, out, in);
  std::vector<T> alone(static_cast<size_t>(most * out)), together(alone);
  LinearArgs args{};
  args.x_stride = in;
  args.x_dtype = dtype;
  args.weight.data = tiles.data();
  args.weight.form = form;
  args.weight.in = in;
  args.weight.out = out;
  for (int64_t row = 0; row < most; ++row) {
    args.x = x.data() + row * in;
    args.rows = 1;
    args.out = alone.data() + row * out;
    tables::WEFT_TABLE::linear(args);
  }
  for (int64_t rows : {int64_t{2}, int64_t{5}, int64_t{6}, int64_t{7}, int64_t{13}, most}) {
    args.x = x.data();
    args.rows = rows;
    args.out = together.data();
    tables::WEFT_TABLE::linear(args);
    if (std::memcmp(alone.data(), together.data(), static_cast<size_t>(rows * out) * sizeof(T)))
      fail("a row has other bits beside others", rows, out, in);
  }
  for (int64_t row = 0; row < most; ++row)
    for (int64_t to = 0; to < out; ++to) {
      double sum = 0;
      for (int64_t i = 0; i < in; ++i)
        sum += static_cast<double>(widen(x[static_cast<size_t>(row * in + i)])) *
               static_cast<double>(widen(weight[static_cast<size_t>(to * in + i)]));
      const double got = static_cast<double>(widen(alone[static_cast<size_t>(row * out + to)]));
      if (!(std::abs(got - sum) <= tolerance * (std::abs(sum) + std::sqrt(static_cast<double>(in)))))
        return fail("a sum is wrong", row, out, in);
    }
}

// Checks weights of which some are odd; the last row has a NaN.
void check_twelve_bits(int64_t out, int64_t in) {
  std::mt19937 dice(static_cast<unsigned>(out + 7 * in));
  std::normal_distribution<float> normal;
  const int64_t most = 40, tiles = (out + 31) / 32 * 2;
  std::vector<bf16> weight(static_cast<size_t>(out * in)), x(static_cast<size_t>(most * in));
  for (bf16& number : weight) narrow(&number, normal(dice) * (dice() % 300 ? 1 : 0x1p40f));
  for (bf16& number : x) narrow(&number, normal(dice));
  weight.back().bits = 0x7FC0;
  std::vector<const uint16_t*> rows(static_cast<size_t>(tiles * 16));
  for (int64_t row = 0; row < out; ++row) rows[static_cast<size_t>(row)] = &weight[static_cast<size_t>(row * in)].bits;
  std::vector<uint8_t> highs(static_cast<size_t>(tiles * 16)), units(static_cast<size_t>(tiles * in * 24));
  const auto odd_words = pack_twelve_bit(rows.data(), tiles, in, tiles * 16 * in, false, highs.data(), units.data());
  std::vector<int64_t> odd(static_cast<size_t>(odd_words->size()));
  odd_words->write(odd.data());
  const std::vector<bf16> plain_tiles = in_tiles(weight, out, in);
  std::vector<bf16> plain(static_cast<size_t>(most * out)), squeezed(plain);
  std::vector<float> bias(static_cast<size_t>(out), 0.5f);
  const auto multiply = [&](int64_t count, bool twelve_bit) {
    LinearArgs args{};
    args.x = x.data();
    args.x_stride = in;
    args.x_dtype = Dtype::bfloat16;
    args.rows = count;
    args.weight.in = in;
    args.weight.out = out;
    args.weight.form = twelve_bit ? WeightForm::bfloat16_twelve_bit : WeightForm::bfloat16_tiles;
    args.weight.data = twelve_bit ? static_cast<const void*>(units.data()) : plain_tiles.data();
    args.weight.scales = highs.data();
    args.weight.odd = odd.data();
    args.bias = bias.data();
    args.out = twelve_bit ? squeezed.data() : plain.data();
    tables::WEFT_TABLE::linear(args);
    return std::memcmp(plain.data(), squeezed.data(), static_cast<size_t>(count * out) * sizeof(bf16)) == 0;
  };
  for (int64_t count : {int64_t{1}, int64_t{2}, int64_t{6}, int64_t{7}, int64_t{13}, most}) {
    multiply(count, false);
    if (!multiply(count, true)) fail("12 bits have other bits than plain tiles", count, out, in);
  }
  for (uint8_t& high : highs) high = static_cast<uint8_t>(high ^ 1);  // the control
  if (multiply(most, true)) fail("other upper bytes give the same bits: the check sees nothing", most, out, in);
}

// Experts in tiles: a single token has the same bits as among others, and another token has others.
void check_experts(int64_t dim, int64_t width) {
  std::mt19937 dice(static_cast<unsigned>(dim + width));
  std::normal_distribution<float> normal;
  const int64_t experts = 3, choices = 2, tokens = 23, plain = static_cast<int64_t>(WeightForm::bfloat16_tiles);
  const auto noise = [&](int64_t count) {
    std::vector<bf16> numbers(static_cast<size_t>(count));
    for (bf16& number : numbers) narrow(&number, normal(dice));
    return numbers;
  };
  std::vector<std::vector<bf16>> matrices;
  std::vector<ExpertTiles> gate_up, down;
  for (int64_t expert = 0; expert < experts; ++expert) {
    matrices.push_back(in_tiles(noise(2 * width * dim), 2 * width, dim));
    matrices.push_back(in_tiles(noise(dim * width), dim, width));
  }
  for (size_t i = 0; i < matrices.size(); ++i)
    (i % 2 ? down : gate_up).push_back({matrices[i].data(), nullptr, nullptr, plain});
  const std::vector<bf16> x = noise(tokens * dim);
  std::vector<bf16> together(static_cast<size_t>(tokens * dim)), alone(together);
  std::vector<int64_t> ids;
  for (int64_t token = 0; token < tokens; ++token)
    for (int64_t choice = 0; choice < choices; ++choice) ids.push_back((token / 4 + choice) % experts);
  const std::vector<float> weights(ids.size(), 0.5f);
  const auto run = [&](int64_t first, int64_t count, bf16* out) {
    MoeArgs args{};
    args.x = x.data() + first * dim;
    args.x_stride = dim;
    args.x_dtype = Dtype::bfloat16;
    args.tokens = count;
    args.choices = choices;
    args.experts = experts;
    args.ids = ids.data() + first * choices;
    args.weights = weights.data();
    args.gate_up.in = args.down.out = dim;
    args.gate_up.out = 2 * width;
    args.down.in = width;
    args.gate_up_tiles = gate_up.data();
    args.down_tiles = down.data();
    args.gated = true;
    args.out = out;
    tables::WEFT_TABLE::moe(args);
  };
  run(0, tokens, together.data());
  for (int64_t token = 0; token < tokens; ++token) run(token, 1, alone.data() + token * dim);
  const size_t bytes = alone.size() * sizeof(bf16), row = static_cast<size_t>(dim) * sizeof(bf16);
  if (std::memcmp(alone.data(), together.data(), bytes))
    fail("a token has other bits beside others", tokens, dim, width);
  if (!std::memcmp(alone.data(), alone.data() + dim, row)) fail("two tokens have the same bits", tokens, dim, width);
}

// Arm's bfdot, as the manual has it without FPCR.EBF. Products are exact. Each of two sums is rounded to odd: an inexact
// one ends in a 1, whichever neighbour that is. Denormal inputs and results are zeros.
float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

float product(bf16 a, bf16 b) {
  const double exact = static_cast<double>(flushed(widen(a))) * static_cast<double>(flushed(widen(b)));
  return std::fabs(exact) < 0x1p-126 ? std::copysign(0.0f, static_cast<float>(exact)) : static_cast<float>(exact);
}

float odd_sum(float a, float b) {
  const double x = static_cast<double>(a), y = static_cast<double>(b);
  double total = x + y;
  const double part = total - x, rest = (x - (total - part)) + (y - part);  // total + rest is exact
  uint64_t bits;
  std::memcpy(&bits, &total, sizeof bits);
  if (rest != 0 && !(bits & 1)) total = std::nextafter(total, rest > 0 ? INFINITY : -INFINITY);
  if (std::fabs(total) < 0x1p-126) return std::copysign(0.0f, static_cast<float>(total));
  std::memcpy(&bits, &total, sizeof bits);
  const uint64_t lost = bits & 0x1FFFFFFF;
  bits -= lost;
  std::memcpy(&total, &bits, sizeof bits);
  float result = static_cast<float>(total);  // exact
  uint32_t narrow_bits;
  std::memcpy(&narrow_bits, &result, sizeof narrow_bits);
  if (lost) narrow_bits |= 1;
  std::memcpy(&result, &narrow_bits, sizeof result);
  return result;
}

// Rows of ordinary numbers, of numbers with denormal products, and of denormals. A bias cancels one row's sums except
// for their float32 rounding, so bfloat16 shows their last bits.
void check_pairs(int64_t out, int64_t in) {
  std::mt19937 dice(static_cast<unsigned>(out + in));
  std::normal_distribution<float> normal;
  const int64_t most = 13;
  const auto noise = [&](int64_t rows) {
    std::vector<bf16> numbers(static_cast<size_t>(rows * in));
    for (int64_t i = 0; i < rows * in; ++i)
      narrow(&numbers[static_cast<size_t>(i)], normal(dice) * (i / in % 3 == 0   ? 1
                                                               : i / in % 3 == 1 ? 0x1p-64f
                                                                                 : 0x1p-126f));
    return numbers;
  };
  const std::vector<bf16> weight = noise(out), x = noise(most), tiles = in_tiles(weight, out, in);
  std::vector<float> sums(static_cast<size_t>(most * out)), fused_sums(sums), bias(static_cast<size_t>(out));
  for (int64_t row = 0; row < most; ++row)
    for (int64_t to = 0; to < out; ++to) {
      float sum = 0, other = 0;
      for (int64_t i = 0; i < in; i += 2) {
        const bf16* const of_x = x.data() + row * in + i;
        const bf16* const of_w = weight.data() + to * in + i;
        sum = odd_sum(sum, odd_sum(product(of_x[0], of_w[0]), product(of_x[1], of_w[1])));
        for (int j = 0; j < 2; ++j) other = std::fma(widen(of_x[j]), widen(of_w[j]), other);
      }
      sums[static_cast<size_t>(row * out + to)] = sum;
      fused_sums[static_cast<size_t>(row * out + to)] = other;
    }
  std::vector<bf16> got(static_cast<size_t>(most * out));
  LinearArgs args{};
  args.x = x.data();
  args.x_stride = in;
  args.x_dtype = Dtype::bfloat16;
  args.weight.data = tiles.data();
  args.weight.form = WeightForm::bfloat16_tiles;
  args.weight.in = in;
  args.weight.out = out;
  args.bias = bias.data();
  args.out = got.data();
  int64_t seen = 0;
  for (int64_t of : {0, 1, 2, 3})
    for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 13}) {
      for (int64_t to = 0; to < out; ++to) bias[static_cast<size_t>(to)] = -sums[static_cast<size_t>(of * out + to)];
      args.rows = rows;
      tables::WEFT_TABLE::linear(args);
      for (int64_t at = 0; at < rows * out; ++at) {
        const float offset = bias[static_cast<size_t>(at % out)];
        bf16 expected, other;
        narrow(&expected, sums[static_cast<size_t>(at)] + offset);
        narrow(&other, fused_sums[static_cast<size_t>(at)] + offset);
        seen += expected.bits != other.bits;
        if (got[static_cast<size_t>(at)].bits != expected.bits)
          return fail("a sum of pairs is not the manual's", rows, out, in);
      }
    }
  if (in > 2 && seen == 0) fail("another order gives the same bits: the check sees nothing", most, out, in);
}

// Codes of ``bits`` with a scale for ``group`` columns, and the further numbers of a type.
struct CodeForm {
  const char* name;
  int bits;
  int64_t group;
  ScaleForm scales;
  bool zeros, minimums, table, middle = false;
};

constexpr CodeForm kCodeForms[] = {
    {"Q8_0", 8, 32, ScaleForm::float16, false, false, false},
    {"Q4_0", 4, 32, ScaleForm::float16, false, false, false},
    {"Q5_0", 6, 32, ScaleForm::float16, false, false, false},
    {"Q4_1", 4, 32, ScaleForm::float16, false, true, false},
    {"Q5_1", 6, 32, ScaleForm::float32, false, true, false},
    {"Q4_K", 4, 32, ScaleForm::bytes, false, true, false},
    {"Q5_K", 6, 32, ScaleForm::bytes, false, true, false},
    {"Q6_K", 6, 16, ScaleForm::bytes, false, false, false},
    {"Q3_K", 4, 16, ScaleForm::bytes, false, false, false},
    {"Q2_K", 4, 16, ScaleForm::bytes, false, true, false},
    {"IQ4_NL", 4, 32, ScaleForm::float16, false, false, true},
    {"IQ4_XS", 4, 32, ScaleForm::bytes, false, false, true},
    {"MXFP4", 4, 32, ScaleForm::e8m0, false, false, true},
    {"NVFP4", 4, 16, ScaleForm::e4m3, false, false, true},
    {"GPTQ", 4, 128, ScaleForm::float16, true, false, false},
    {"int8", 8, 128, ScaleForm::float32, true, false, false},
    {"torchao", 4, 128, ScaleForm::float16, false, true, false, true},
    {"torchao, groups of 32", 4, 32, ScaleForm::float32, false, true, false, true},
};

double half_value(uint16_t bits) {
  return std::ldexp(1.0 + (bits & 1023) / 1024.0, (bits >> 10) - 15);
}  // normal, positive

double e4m3_value(uint8_t bits) { return std::ldexp(1.0 + (bits & 7) / 8.0, (bits >> 3 & 15) - 7); }  // the same

// Scales or minimums [tiles][groups][16] in the form of a weight, and the numbers that they stand for.
struct CodeScales {
  std::vector<float> floats, of_rows;
  std::vector<uint16_t> halves, of_blocks;
  std::vector<uint8_t> bytes;
  std::vector<double> values;

  CodeScales(const CodeForm& form, int64_t tiles, int64_t groups, int64_t blocks, std::mt19937& dice) {
    for (int64_t row = 0; row < tiles * 16; ++row) of_rows.push_back(0.5f + static_cast<float>(dice() % 64) / 64);
    for (int64_t at = 0; at < tiles * blocks * 16; ++at) of_blocks.push_back(half(dice));
    for (int64_t at = 0; at < tiles * groups * 16; ++at) {
      const int64_t tile = at / (groups * 16), group = at / 16 % groups, lane = at % 16;
      halves.push_back(half(dice));
      floats.push_back(static_cast<float>(dice() % 1000 + 1) / 4096);
      bytes.push_back(static_cast<uint8_t>(form.scales == ScaleForm::e8m0   ? 120 + dice() % 10
                                           : form.scales == ScaleForm::e4m3 ? 8 + dice() % 96
                                                                            : dice() % 64));
      const double of_row = static_cast<double>(of_rows[static_cast<size_t>(tile * 16 + lane)]);
      const int64_t block = (tile * blocks + group * form.group / 256) * 16 + lane;
      values.push_back(form.scales == ScaleForm::float16   ? half_value(halves.back())
                       : form.scales == ScaleForm::float32 ? static_cast<double>(floats.back())
                       : form.scales == ScaleForm::bytes
                           ? bytes.back() * half_value(of_blocks[static_cast<size_t>(block)])
                       : form.scales == ScaleForm::e8m0 ? std::ldexp(of_row, bytes.back() - 127)
                                                        : e4m3_value(bytes.back()) * of_row);
    }
  }

  const void* data(ScaleForm form) const {
    if (form == ScaleForm::float32) return floats.data();
    return form == ScaleForm::float16 ? static_cast<const void*>(halves.data()) : bytes.data();
  }

 private:
  static uint16_t half(std::mt19937& dice) { return static_cast<uint16_t>(4096 + dice() % 8192); }
};

// Codes [out][in] in tiles (linear.hpp). Four columns of a row are next to each other. With four bits, a byte has two
// codes. The upper two bits of six are a line after two.
std::vector<uint8_t> code_tiles(const std::vector<uint8_t>& codes, int64_t out, int64_t in, int bits) {
  const int64_t tiles = (out + 15) / 16, tile_bytes = 16 * in * bits / 8;
  std::vector<uint8_t> to(static_cast<size_t>(tiles * tile_bytes));
  for (int64_t row = 0; row < out; ++row)
    for (int64_t i = 0; i < in; ++i) {
      uint8_t* const tile = to.data() + row / 16 * tile_bytes;
      const int64_t quad = i / 4, byte = row % 16 * 4 + i % 4;
      const int code = codes[static_cast<size_t>(row * in + i)];
      if (bits == 8) tile[quad * 64 + byte] = static_cast<uint8_t>(code);
      if (bits == 4) tile[quad / 2 * 64 + byte] |= static_cast<uint8_t>(code << quad % 2 * 4);
      if (bits == 6) {
        uint8_t* const sixteen = tile + quad / 4 * 192;
        sixteen[quad / 2 % 2 * 64 + byte] |= static_cast<uint8_t>((code & 15) << quad % 2 * 4);
        sixteen[128 + byte] |= static_cast<uint8_t>(code >> 4 << quad % 4 * 2);
      }
    }
  return to;
}

void check_codes(const CodeForm& form, int64_t out, int64_t in) {
  std::mt19937 dice(static_cast<unsigned>(out * 1000 + in));
  std::normal_distribution<float> normal;
  const int64_t tiles = (out + 15) / 16, groups = (in + form.group - 1) / form.group, blocks = (in + 255) / 256,
                most = 13;
  std::vector<uint8_t> codes, zeros, table;
  for (int64_t at = 0; at < out * in; ++at) codes.push_back(static_cast<uint8_t>(dice() % (1u << form.bits)));
  for (int64_t at = 0; at < tiles * groups * 16; ++at)
    zeros.push_back(static_cast<uint8_t>(dice() % (1u << form.bits)));
  for (int at = 0; at < 16; ++at) table.push_back(static_cast<uint8_t>(16 * at + 5));
  const CodeScales scales(form, tiles, groups, blocks, dice), minimums(form, tiles, groups, blocks, dice);
  const std::vector<uint8_t> data = code_tiles(codes, out, in, form.bits);
  std::vector<float> x, alone(static_cast<size_t>(most * out)), together(alone);
  for (int64_t at = 0; at < most * in; ++at) x.push_back(normal(dice));
  LinearArgs args{};
  args.x = x.data();
  args.x_stride = in;
  args.x_dtype = Dtype::float32;
  args.exact = true;
  const WeightForm weight_form = form.bits == 8   ? WeightForm::int8
                                 : form.bits == 6 ? WeightForm::int6
                                                  : WeightForm::int4;
  args.weight = {data.data(),
                 weight_form,
                 in,
                 out,
                 scales.data(form.scales),
                 form.scales,
                 form.zeros ? zeros.data() : nullptr,
                 form.group,
                 nullptr,
                 form.minimums ? minimums.data(form.scales) : nullptr,
                 scales.of_blocks.data(),
                 minimums.of_blocks.data(),
                 scales.of_rows.data(),
                 form.table ? table.data() : nullptr,
                 form.middle,
                 nullptr};
  for (int64_t row = 0; row < most; ++row) {
    args.x = x.data() + row * in;
    args.rows = 1;
    args.out = alone.data() + row * out;
    tables::WEFT_TABLE::linear(args);
  }
  args.x = x.data();
  args.out = together.data();
  for (int64_t rows : {int64_t{2}, int64_t{4}, int64_t{6}, most}) {
    args.rows = rows;
    tables::WEFT_TABLE::linear(args);
    if (std::memcmp(alone.data(), together.data(), static_cast<size_t>(rows * out) * sizeof(float)))
      return fail(form.name, rows, out, in);
  }
  for (int64_t row = 0; row < most; ++row)
    for (int64_t to = 0; to < out; ++to) {
      double sum = 0, terms = 0;
      for (int64_t i = 0; i < in; ++i) {
        const size_t group = static_cast<size_t>((to / 16 * groups + i / form.group) * 16 + to % 16);
        const int code = codes[static_cast<size_t>(to * in + i)];
        const int zero = form.minimums && !form.middle ? 0 : form.zeros ? zeros[group] : 1 << (form.bits - 1);
        const int number = form.table ? table[static_cast<size_t>(code)] - 128 : code - zero;
        const double value = number * scales.values[group] - (form.minimums ? minimums.values[group] : 0);
        const double term = value * static_cast<double>(x[static_cast<size_t>(row * in + i)]);
        sum += term;
        terms += std::abs(term);
      }
      if (!(std::abs(static_cast<double>(alone[static_cast<size_t>(row * out + to)]) - sum) <= 2e-5 * terms))
        return fail(form.name, row, out, in);
    }
}

}  // namespace
}  // namespace weft

int main() {
  using namespace weft;
  for (int64_t out : {1, 16, 33, 130})
    for (int64_t in : {2, 64, 98, 512}) {
      check<float>(out, in, WeightForm::float32_tiles, Dtype::float32, 1e-5);
      check<bf16>(out, in, WeightForm::bfloat16_tiles, Dtype::bfloat16, 8e-3);
    }
  if (tables::WEFT_TABLE::has_twelve_bit_products())
    for (int64_t out : {1, 16, 33, 130})
      for (int64_t in : {8, 64, 104, 1024}) check_twelve_bits(out, in);
  for (const CodeForm& form : kCodeForms)
    for (int64_t out : {1, 33, 130})
      for (int64_t in : {256, 512}) check_codes(form, out, in);
  check_experts(64, 32);
  check_experts(98, 40);
  const char* how = "";
#if defined(__aarch64__)
  const bool pairs = getauxval(AT_HWCAP2) & 1ul << 14;
  how = pairs ? ", by products of pairs" : ", by widened weights";
  if (pairs)
    for (int64_t out : {1, 16, 33, 130})
      for (int64_t in : {2, 64, 98, 512}) check_pairs(out, in);
#endif
  if (failures) return 1;
  std::printf("products are right, and rows alone have the bits of rows together%s\n", how);
  return 0;
}
