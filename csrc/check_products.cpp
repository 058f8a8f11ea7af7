// The float products of a table against sums in double precision, without Python: for an instruction set of another
// machine under an emulator (tests/aarch64.sh). float32 and bfloat16 tiles; rows alone give the bits of rows together.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "table.hpp"

namespace weft {
namespace {

int failures = 0;

void fail(const char* what, int64_t rows, int64_t out, int64_t in) {
  std::printf("%s: %d rows, %d x %d\n", what, static_cast<int>(rows), static_cast<int>(out), static_cast<int>(in));
  ++failures;
}

// [out][in] in tiles of 16 rows, PACK columns beside each other.
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

}  // namespace
}  // namespace weft

int main() {
  using namespace weft;
  for (int64_t out : {1, 16, 33, 130})
    for (int64_t in : {2, 64, 98, 512}) {
      check<float>(out, in, WeightForm::float32_tiles, Dtype::float32, 1e-5);
      check<bf16>(out, in, WeightForm::bfloat16_tiles, Dtype::bfloat16, 8e-3);
    }
  if (failures) return 1;
  std::printf("products are right, and rows alone have the bits of rows together\n");
  return 0;
}
