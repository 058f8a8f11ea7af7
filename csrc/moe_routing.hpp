// Pairs of a token and an expert, sorted by expert; one expert of a stack; the activation between its two products.
#pragma once

#include "linear_inputs.hpp"
#include "table.hpp"

namespace weft {
namespace {

WEFT_INLINE f32x16 activated(f32x16 x, Activation activation) {
  if (activation == Activation::silu) return silu(x);
  if (activation == Activation::relu2) {
    const f32x16 up = max(x, splat(0));
    return up * up;
  }
  if (activation == Activation::gelu_tanh) return gelu_tanh(x);
  for (int i = 0; i < 16; ++i) x[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678118654752f));
  return x;
}

// ``limit`` of MoeArgs. A NaN stays one.
WEFT_INLINE void limit_both(f32x16& gate, f32x16& up, f32x16 limit) {
  gate = select(gate > limit, limit, gate);
  up = select(up > limit, limit, select(up < -limit, -limit, up));
}

// The activation between the two products of an expert with gates. Clamped, as in gpt-oss: (up + 1) gate sigmoid(1.702
// gate).
WEFT_INLINE f32x16 activated(f32x16 gate, f32x16 up, Activation activation) {
  if (activation != Activation::clamped_swiglu) return activated(gate, activation) * up;
  return (up + 1.0f) * gate / (1.0f + exp(gate * -1.702f));
}

// ``from`` with number order[i] at place i.
template <class T>
void take_in_order(const T* from, const int32_t* order, int64_t count, T* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[order[i]];
}

// ``weight`` is the first of a stack of ``experts`` consecutive weights.
Weight expert_of(const Weight& weight, int64_t expert) {
  Weight one = weight;
  const auto move = [&](const void* from, int64_t bytes) { return static_cast<const uint8_t*>(from) + expert * bytes; };
  if (!in_tiles(weight.form)) {
    one.data = move(weight.data, weight.out * weight.in * (weight.form == WeightForm::bfloat16 ? 2 : 4));
    return one;
  }
  const int64_t tiles = (weight.out + kTile - 1) / kTile, lines = (weight.in + kLine - 1) / kLine;
  const int64_t numbers = tiles * ((lines * kLine + weight.group - 1) / weight.group) * kTile;
  const int64_t bits = weight.form == WeightForm::int8 ? 8 : weight.form == WeightForm::int6 ? 6 : 4;
  const int64_t blocks = tiles * ((lines * kLine + 255) / 256) * kTile * 2;  // bytes
  const int64_t size = weight.scale_form == ScaleForm::float32 ? 4 : weight.scale_form == ScaleForm::float16 ? 2 : 1;
  const auto halves = [&](const uint16_t* from) { return reinterpret_cast<const uint16_t*>(move(from, blocks)); };
  one.data = move(weight.data, tiles * lines * kTile * kLine * bits / 8);
  one.scales = move(weight.scales, numbers * size);
  if (weight.zeros) one.zeros = weight.zeros + expert * numbers;
  if (weight.minimums) one.minimums = move(weight.minimums, numbers * size);
  if (weight.block_scales) one.block_scales = halves(weight.block_scales);
  if (weight.block_minimums) one.block_minimums = halves(weight.block_minimums);
  if (weight.order) one.order = weight.order + expert * weight.in;
  if (weight.row_scales) one.row_scales = weight.row_scales + expert * tiles * kTile;
  return one;
}

struct ExpertRows {
  int64_t expert, first, count;  // rows [first, first + count) of the sorted pairs
};

struct Routing {
  std::vector<int64_t> pairs, place;  // sorted: token * choices + choice; place of each pair, or kPad
  std::vector<ExpertRows> groups;

  void sort(const MoeArgs& args) {
    const int64_t count = args.tokens * args.choices;
    pairs.clear();
    groups.clear();
    place.assign(static_cast<size_t>(count), kPad);
    std::vector<int64_t> begin(static_cast<size_t>(args.experts + 1), 0);
    for (int64_t i = 0; i < count; ++i)
      if (args.ids[i] != kPad) ++begin[static_cast<size_t>(args.ids[i] + 1)];
    for (int64_t e = 0; e < args.experts; ++e) {
      if (const int64_t rows = begin[static_cast<size_t>(e + 1)])
        groups.push_back({e, begin[static_cast<size_t>(e)], rows});
      begin[static_cast<size_t>(e + 1)] += begin[static_cast<size_t>(e)];
    }
    pairs.resize(static_cast<size_t>(begin.back()));
    for (int64_t i = 0; i < count; ++i)
      if (args.ids[i] != kPad) {
        const int64_t to = begin[static_cast<size_t>(args.ids[i])]++;
        pairs[static_cast<size_t>(to)] = i;
        place[static_cast<size_t>(i)] = to;
      }
  }
};

}  // namespace
}  // namespace weft
