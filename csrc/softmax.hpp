// Softmax of rows in place: the largest number, powers of e and their sum, the quotients. Powers are kept in float32.
#pragma once

#include "table.hpp"

namespace weft {
namespace {

// ``count`` numbers, at most 16, followed by numbers whose power of e is 0.
template <class T>
WEFT_INLINE f32x16 load_scores(const T* from, int64_t count) {
  if (count >= 16) return load(from);
  f32x16 x = splat(-HUGE_VALF);
  for (int64_t i = 0; i < count; ++i) x[i] = widen(from[i]);
  return x;
}

template <class T>
void softmax_row(T* x, int64_t columns, float scale) {
  alignas(64) float powers[kSoftmaxColumns];
  f32x16 most = load_scores(x, columns);
  for (int64_t i = 16; i < columns; i += 16) most = max(most, load_scores(x + i, columns - i));
  const float top = largest(most);
  f32x16 total = splat(0);
  for (int64_t i = 0; i < columns; i += 16) {
    const f32x16 power = exp((load_scores(x + i, columns - i) - top) * scale);
    store(powers + i, power);
    total += power;
  }
  const float over = 1.0f / sum(total);  // a NaN among the scores is in it
  for (int64_t i = 0; i < columns; i += 16) store_some(x + i, load(powers + i) * over, columns - i);
}

void softmax(const SoftmaxArgs& args) {
  Pool::instance().for_each(args.rows, 0.5 * static_cast<double>(args.columns), [&](int64_t row) {
    if (args.dtype == Dtype::bfloat16)
      softmax_row(static_cast<bf16*>(args.x) + row * args.columns, args.columns, args.scale);
    else softmax_row(static_cast<float*>(args.x) + row * args.columns, args.columns, args.scale);
  });
}

}  // namespace
}  // namespace weft
