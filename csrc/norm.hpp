// Root-mean-square norm of rows, plain and gated, or of the sum of two; rounded where the torch path rounds.
#pragma once

#include "kv_numbers.hpp"

namespace weft {
namespace {

constexpr int64_t kGatedTogether = 4096;

template <class T, class W>
void norm_row(const NormArgs& args, const T* x, const T* gate, T* out) {
  const W* weight = static_cast<const W*>(args.weight);
  const bool gate_last = gate && !args.gate_first;
  alignas(64) float gated[kGatedTogether];  // a gate costs more than the rest: computed once, if there is room
  for (int64_t first = 0; first < args.dim; first += args.group) {
    const int64_t end = first + args.group;
    const bool keeps_gated = gate && args.gate_first && args.group <= kGatedTogether;
    f32x16 squares = splat(0);
    for (int64_t i = first; i < end; i += 16) {
      f32x16 value = load(x + i);
      if (gate && args.gate_first) value *= silu(load(gate + i));
      if (keeps_gated) store(gated + i - first, value);
      squares += value * value;
    }
    const float over = 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(args.group) + args.eps);
    for (int64_t i = first; i < end; i += 16) {
      f32x16 value = keeps_gated ? load(gated + i - first) : load(x + i);
      if (gate && args.gate_first && !keeps_gated) value *= silu(load(gate + i));
      value *= over;
      if (args.plus_one) value = rounded<T>(value * (1.0f + load(weight + i)));
      else value = rounded<T>(rounded<T>(value) * load(weight + i));
      store(out + i, gate_last ? value * silu(load(gate + i)) : value);
    }
  }
}

// x + scale y, keeps_gated: the residual stream.
template <class T>
void sum_row(const NormArgs& args, const T* x, const T* y, T* out) {
  for (int64_t i = 0; i < args.dim; i += 16) {
    const f32x16 added = load(y + i);
    store(out + i, load(x + i) + (args.add_scale == 1.0f ? added : rounded<T>(added * args.add_scale)));
  }
}

template <class T, class W>
void norm_of(const NormArgs& args) {
  const int64_t rows = args.tokens * args.heads;
  const double nanoseconds = 20.0 + static_cast<double>(args.dim) * (args.gate.data ? 1.0 : 0.25);
  Pool::instance().for_each(rows, nanoseconds, [&](int64_t row) {
    const int64_t token = row / args.heads, head = row % args.heads;
    const auto at = [&](const Rows& of) {
      return static_cast<const T*>(of.data) + token * of.token_stride + head * of.head_stride;
    };
    const T* x = at(args.x);
    if (args.add.data) {
      T* sum = static_cast<T*>(args.sum_out) + row * args.dim;
      sum_row(args, x, at(args.add), sum);
      x = sum;
    }
    norm_row<T, W>(args, x, args.gate.data ? at(args.gate) : nullptr, static_cast<T*>(args.out) + row * args.dim);
  });
}

void norm(const NormArgs& args) {
  const bool narrow_x = args.x.dtype == Dtype::bfloat16, narrow_w = args.weight_dtype == Dtype::bfloat16;
  if (narrow_x && narrow_w) return norm_of<bf16, bf16>(args);
  if (narrow_x) return norm_of<bf16, float>(args);
  if (narrow_w) return norm_of<float, bf16>(args);
  norm_of<float, float>(args);
}

}  // namespace
}  // namespace weft
