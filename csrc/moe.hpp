// Mixture of experts: each chosen expert is read once.
//
//     pairs (token, choice) sorted by expert     e0 e0 e3 e3 e3 e7
//     1   x of each pair                         in the form of the weights' kernel (linear.hpp), in the expert's order
//     2   (expert, 64 rows of gate and up)       inner = act(gate) * up, float32
//     3   inner of each pair                     in the form of the kernel
//     4   (expert, 64 rows of down)              expert_out, float32
//     5   each token                             its choices weighted and added, in the router's order
//
// Between 1 and 5, numbers are rounded only to the form of inputs that a kernel reads. moe_tiles.hpp has experts in float
// tiles, and codes that a matrix unit multiplies.
#pragma once

#include "moe_routing.hpp"
#include "w8a8.hpp"

namespace weft {
namespace {

// Calls body(group, first row of W, rows of W) for each chosen expert and each 64 rows.
template <class Body>
void for_each_block(const std::vector<ExpertRows>& groups, int64_t rows, const Body& body) {
  const int64_t blocks = (rows + kOutRows - 1) / kOutRows;
  Pool::instance().for_each(static_cast<int64_t>(groups.size()) * blocks, [&](int64_t item) {
    const int64_t first = item % blocks * kOutRows;
    body(groups[static_cast<size_t>(item / blocks)], first, rows - first < kOutRows ? rows - first : kOutRows);
  });
}

struct MoeStep : Routing {
  std::vector<float> inner, expert_out;
  Prepared x, core;
};

template <class T>
void moe_in(const MoeArgs& args) {
  static thread_local MoeStep buffer;
  MoeStep& step = buffer;
  step.sort(args);
  const int64_t pairs = static_cast<int64_t>(step.pairs.size());
  const int64_t width = args.down.in, dim = args.down.out;
  step.x.resize(args.gate_up, args.exact, pairs);
  step.core.resize(args.down, args.exact, pairs);
  step.inner.resize(static_cast<size_t>(pairs * width));
  step.expert_out.resize(static_cast<size_t>(pairs * dim));
  const auto order_of = [&](const Weight& weight, int64_t pair) {
    return weight.order ? weight.order + args.ids[step.pairs[static_cast<size_t>(pair)]] * weight.in : nullptr;
  };
  Pool::instance().for_each(pairs, [&](int64_t pair) {
    const int64_t token = step.pairs[static_cast<size_t>(pair)] / args.choices;
    const T* const from = static_cast<const T*>(args.x) + token * args.x_stride;
    step.x.set_row(pair, from, args.gate_up.in, order_of(args.gate_up, pair));
  });
  for_each_block(step.groups, width, [&](const ExpertRows& group, int64_t first, int64_t count) {
    const Weight weight = expert_of(args.gate_up, group.expert);
    const float* const bias = args.gate_up_bias ? args.gate_up_bias + group.expert * args.gate_up.out : nullptr;
    alignas(64) float gate[kRowsTogether * kOutRows], up[kRowsTogether * kOutRows];
    for (int64_t row = 0; row < group.count; row += kRowsTogether) {
      const int64_t rows = group.count - row < kRowsTogether ? group.count - row : kRowsTogether;
      item_products(weight, first, count, step.x, group.first + row, rows, gate);
      if (args.gated) item_products(weight, width + first, count, step.x, group.first + row, rows, up);
      for (int64_t r = 0; r < rows; ++r) {
        float* const to = step.inner.data() + (group.first + row + r) * width + first;
        for (int64_t i = 0; i < count; i += 16) {
          f32x16 of_gate = load(gate + r * kOutRows + i);
          if (bias) of_gate += load(bias + first + i);
          if (!args.gated) {
            store(to + i, activated(of_gate, args.activation));
            continue;
          }
          f32x16 of_up = load(up + r * kOutRows + i);
          if (bias) of_up += load(bias + width + first + i);
          if (args.limit) limit_both(of_gate, of_up, splat(args.limit));
          store(to + i, activated(of_gate, of_up, args.activation));
        }
      }
    }
  });
  Pool::instance().for_each(pairs, [&](int64_t pair) {
    step.core.set_row(pair, step.inner.data() + pair * width, width, order_of(args.down, pair));
  });
  for_each_block(step.groups, dim, [&](const ExpertRows& group, int64_t first, int64_t count) {
    const Weight weight = expert_of(args.down, group.expert);
    alignas(64) float y[kRowsTogether * kOutRows];
    for (int64_t row = 0; row < group.count; row += kRowsTogether) {
      const int64_t rows = group.count - row < kRowsTogether ? group.count - row : kRowsTogether;
      item_products(weight, first, count, step.core, group.first + row, rows, y);
      for (int64_t r = 0; r < rows; ++r)
        write_row(step.expert_out.data() + (group.first + row + r) * dim + first, y + r * kOutRows,
                  args.down_bias ? args.down_bias + group.expert * dim + first : nullptr, count);
    }
  });
  Pool::instance().for_each(args.tokens, [&](int64_t token) {
    T* const out = static_cast<T*>(args.out) + token * dim;
    for (int64_t d = 0; d < dim; d += 16) {
      f32x16 sum = splat(0);
      for (int64_t choice = 0; choice < args.choices; ++choice) {
        const int64_t pair = token * args.choices + choice, from = step.place[static_cast<size_t>(pair)];
        if (from != kPad) sum += load(step.expert_out.data() + from * dim + d) * args.weights[pair];
      }
      store(out + d, sum);
    }
  });
}

void moe_codes(const MoeArgs& args) {
  if (args.x_dtype == Dtype::bfloat16) moe_in<bf16>(args);
  else moe_in<float>(args);
}

}  // namespace
}  // namespace weft
