// Mixture of experts whose matrices are in float tiles, plain or in 12 bits: products of many experts as one job. int8
// and int4 too, where a matrix unit multiplies their codes by bfloat16 (code_pieces.hpp).
//
//     pairs (token, choice) sorted by expert     e0 e0 e3 e3 e3 e7
//     1   x of each pair                         rows next to each other, so that an expert's are one matrix
//     2   (expert, 64 rows of gate and up)       projected, rounded to the dtype of x
//     3   act(gate) * up                         inner, rounded to the dtype of x
//     4   (expert, 64 rows of down)              expert_out, rounded to the dtype of x
//     5   each token                             its choices weighted and added in float32, in the router's order
//
// An item is 64 rows of an expert and all rows of x that chose it: one thread reads the weights once, from memory, and
// all experts and threads are busy alike. Every product has the bits of a separate product of that expert (tiles.hpp,
// twelve_bit.hpp, matrix_products.hpp), so a token's bits do not depend on other tokens. Roundings are those of
// separate products.
//
// Rejected: keeping inner in float32 (the unit and the products of pairs only take bfloat16).
#pragma once

#include "matrix_products.hpp"
#include "moe_routing.hpp"
#include "table.hpp"

namespace weft {
namespace {

template <class T>
struct TiledMoeStep : Routing {
  std::vector<T> x, projected, inner, expert_out;
  std::vector<float> wide;
  std::vector<LinearArgs> products;
};

// Products of one size. ``X``: the type of rows of x.
template <class T, class X>
void items_of_products(const std::vector<LinearArgs>& products) {
  const Weight& size = products[0].weight;
  const int64_t tiles = (size.out + kTile - 1) / kTile, items = (tiles + kOutTiles - 1) / kOutTiles;
  const int64_t item_bytes = kOutRows * size.in * static_cast<int64_t>(sizeof(T));
  int64_t rows = 0;
  [[maybe_unused]] int64_t rows_to_pack = 0;  // at most, of a product whose items are unpacked
  for (const LinearArgs& args : products) {
    rows += args.rows;
    if (args.weight.form == WeightForm::bfloat16_twelve_bit || is_coded(args.weight.form))
      rows_to_pack = args.rows > rows_to_pack ? args.rows : rows_to_pack;
  }
#if defined(__AVX512F__)
  if (rows_to_pack > 0) Pool::instance().reserve(item_scratch<X>(size, rows_to_pack));
#endif
  const int64_t count = static_cast<int64_t>(products.size());
  // Some 25 GB of weights, or 100 billion products of float32, in a second.
  const double nanoseconds =
      static_cast<double>(item_bytes) * (0.04 + 0.0025 * static_cast<double>(rows) / static_cast<double>(count));
  Pool::instance().for_each_ahead(items * count, nanoseconds, [&](int64_t at, int64_t after) {
    const LinearArgs& args = products[static_cast<size_t>(at / items)];
    const int64_t tile = at % items * kOutTiles;
#if defined(__AVX512F__) || defined(__aarch64__)
    [[maybe_unused]] const int64_t end = tile + kOutTiles < tiles ? tile + kOutTiles : tiles;
    if (args.weight.form == WeightForm::bfloat16_twelve_bit)
      return tables::WEFT_TABLE::item_twelve_bit(args, tile, end, std::is_same_v<X, float>);
#endif
#if defined(__AVX512F__)
    if (is_coded(args.weight.form)) return tables::WEFT_TABLE::item_coded(args, tile, end, std::is_same_v<X, float>);
#endif
    const Weight* const next = after == Pool::kNone ? nullptr : &products[static_cast<size_t>(after / items)].weight;
    const char* const ahead = !next || next->form == WeightForm::bfloat16_twelve_bit || is_coded(next->form)
                                  ? nullptr
                                  : static_cast<const char*>(next->data) + after % items * item_bytes;
    tiles_of_item<T, X>(args, tile, 0, args.rows, ahead);
  });
}

void run_products(TiledMoeStep<float>& step) { items_of_products<float, float>(step.products); }

void run_products(TiledMoeStep<bf16>& step) {
#if defined(__AVX512F__)
  if (matrix_unit() != MatrixUnit::none)
    return matrix_products(step.products.data(), static_cast<int64_t>(step.products.size()));
#endif
#if defined(WEFT_BF16)
  if (has_bf16_dot()) return items_of_products<bf16, bf16>(step.products);
#endif
  // The rows of all products are contiguous.
  const bf16* const from = static_cast<const bf16*>(step.products[0].x);
  const int64_t in = step.products[0].weight.in, rows = static_cast<int64_t>(step.pairs.size());
  if (static_cast<int64_t>(step.wide.size()) < rows * in) step.wide.resize(static_cast<size_t>(rows * in));
  Pool::instance().for_each(rows, 0.2 * static_cast<double>(in), [&](int64_t row) {
    for (int64_t i = row * in; i < (row + 1) * in; i += 16) {
      const int64_t left = (row + 1) * in - i;
      store_some(step.wide.data() + i, load_some(from + i, left), left);
    }
  });
  for (LinearArgs& args : step.products) args.x = step.wide.data() + (static_cast<const bf16*>(args.x) - from);
  items_of_products<bf16, float>(step.products);
}

Weight in_own_tiles(const Weight& size, const ExpertTiles& own) {
  Weight weight = size;
  weight.data = own.data;
  weight.form = static_cast<WeightForm>(own.form);
  weight.scales = own.highs;
  weight.odd = own.odd;
  return weight;
}

// x [pairs][in] times the matrix of each pair's expert -> out [pairs][size.out]. ``tiles``: null for a stack of codes.
template <class T>
void expert_products(TiledMoeStep<T>& step, const std::vector<T>& x, const Weight& size, const ExpertTiles* tiles,
                     std::vector<T>& out, Dtype dtype) {
  step.products.clear();
  if (out.size() < step.pairs.size() * static_cast<size_t>(size.out))
    out.resize(step.pairs.size() * static_cast<size_t>(size.out));
  for (const ExpertRows& group : step.groups) {
    const Weight weight = tiles ? in_own_tiles(size, tiles[group.expert]) : expert_of(size, group.expert);
    step.products.push_back({.x = x.data() + group.first * size.in,
                             .x_stride = size.in,
                             .x_dtype = dtype,
                             .rows = group.count,
                             .weight = weight,
                             .bias = nullptr,
                             .exact = false,
                             .out = out.data() + group.first * size.out});
  }
  if (!step.products.empty()) run_products(step);
}

template <class T>
void tiled_moe(const MoeArgs& args) {
  static thread_local TiledMoeStep<T> buffer;
  TiledMoeStep<T>& step = buffer;
  step.sort(args);
  const int64_t pairs = static_cast<int64_t>(step.pairs.size()), in = args.gate_up.in;
  const int64_t width = args.down.in, dim = args.down.out, stride = args.gate_up.out;
  Pool& pool = Pool::instance();
  if (static_cast<int64_t>(step.x.size()) < pairs * in) step.x.resize(static_cast<size_t>(pairs * in));
  if (static_cast<int64_t>(step.inner.size()) < pairs * width) step.inner.resize(static_cast<size_t>(pairs * width));
  const auto expert_of_pair = [&](int64_t pair) { return args.ids[step.pairs[static_cast<size_t>(pair)]]; };
  pool.for_each(pairs, 0.1 * static_cast<double>(in), [&](int64_t pair) {
    const int64_t token = step.pairs[static_cast<size_t>(pair)] / args.choices;
    const T* const from = static_cast<const T*>(args.x) + token * args.x_stride;
    T* const to = step.x.data() + pair * in;
    if (args.gate_up.order) take_in_order(from, args.gate_up.order + expert_of_pair(pair) * in, in, to);
    else std::memcpy(to, from, static_cast<size_t>(in) * sizeof(T));
  });
  expert_products(step, step.x, args.gate_up, args.gate_up_tiles, step.projected, args.x_dtype);
  pool.for_each(pairs, static_cast<double>(width), [&](int64_t pair) {
    const T* const from = step.projected.data() + pair * stride;
    const float* const bias = args.gate_up_bias ? args.gate_up_bias + expert_of_pair(pair) * stride : nullptr;
    const auto with_bias = [&](int64_t i, int64_t left) {
      const f32x16 value = load_some(from + i, left);
      return bias ? rounded<T>(value + load_some(bias + i, left)) : value;
    };
    for (int64_t i = 0; i < width; i += 16) {
      const int64_t left = width - i;
      f32x16 gate = with_bias(i, left), up = args.gated ? with_bias(width + i, left) : gate;
      T* const to = step.inner.data() + pair * width + i;
      if (args.limit && args.gated) limit_both(gate, up, rounded<T>(splat(args.limit)));
      if (args.activation == Activation::clamped_swiglu) store_some(to, activated(gate, up, args.activation), left);
      else if (args.gated) store_some(to, rounded<T>(activated(gate, args.activation)) * up, left);
      else store_some(to, rounded<T>(activated(gate, args.activation)), left);
    }
    if (args.down.order) {  // through the pair's projection, which was read
      T *const inner = step.inner.data() + pair * width, *const row = step.projected.data() + pair * stride;
      std::memcpy(row, inner, static_cast<size_t>(width) * sizeof(T));
      take_in_order(row, args.down.order + expert_of_pair(pair) * width, width, inner);
    }
  });
  expert_products(step, step.inner, args.down, args.down_tiles, step.expert_out, args.x_dtype);
  pool.for_each(args.tokens, static_cast<double>(args.choices * dim), [&](int64_t token) {
    T* const out = static_cast<T*>(args.out) + token * dim;
    for (int64_t d = 0; d < dim; d += 16) {
      f32x16 sum = splat(0);
      for (int64_t choice = 0; choice < args.choices; ++choice) {
        const int64_t pair = token * args.choices + choice, from = step.place[static_cast<size_t>(pair)];
        if (from == kPad) continue;
        f32x16 value = load_some(step.expert_out.data() + from * dim + d, dim - d);
        if (args.down_bias) value = rounded<T>(value + load_some(args.down_bias + args.ids[pair] * dim + d, dim - d));
        sum += value * args.weights[pair];
      }
      store_some(out + d, sum, dim - d);
    }
  });
}

}  // namespace
}  // namespace weft
