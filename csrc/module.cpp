// weft._native: the kernels as Python functions over addresses and strides. src/weft/tensor/native.py is the
// only caller. It checks the tensors, and says why they come as addresses.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>
#include <utility>

#include "adapters.hpp"
#include "fused_block.hpp"
#include "fused_decoder.hpp"
#include "kernels.hpp"
#include "layers.hpp"
#include "matrix_unit.hpp"
#include "pack_twelve_bit.hpp"

namespace nb = nanobind;
using namespace weft;

namespace {

using Address = uint64_t;
using RowsTuple = std::tuple<Address, int64_t, int64_t, int>;  // address, token stride, head stride, dtype

template <class T = void>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

Rows rows(const RowsTuple& from) {
  return {at(std::get<0>(from)), std::get<1>(from), std::get<2>(from), static_cast<Dtype>(std::get<3>(from))};
}

// address, form, in, out, scales, their form, zeros, group, odd; minimums, factors of the bytes of both, for blocks or
// for rows, the table of codes, whether codes have a middle in addition to minimums; the order of columns
using MinimumsTuple = std::tuple<Address, Address, Address, Address, Address, bool, Address>;
using WeightTuple = std::tuple<Address, int, int64_t, int64_t, Address, int, Address, int64_t, Address, MinimumsTuple>;

Weight weight_of(const WeightTuple& from) {
  const auto& [data, form, in, out, scales, scale_form, zeros, group, odd, more] = from;
  const auto& [minimums, block_scales, block_minimums, row_scales, table, middle, order] = more;
  return Weight{.data = at(data),
                .form = static_cast<WeightForm>(form),
                .in = in,
                .out = out,
                .scales = at(scales),
                .scale_form = static_cast<ScaleForm>(scale_form),
                .zeros = at<const uint8_t>(zeros),
                .group = group,
                .odd = at<const int64_t>(odd),
                .minimums = at(minimums),
                .block_scales = at<const uint16_t>(block_scales),
                .block_minimums = at<const uint16_t>(block_minimums),
                .row_scales = at<const float>(row_scales),
                .table = at<const uint8_t>(table),
                .middle = middle,
                .order = at<const int32_t>(order)};
}

// exact, order; bias
using ProductTuple = std::tuple<std::vector<std::tuple<WeightTuple, bool, Address>>, Address, const AdaptedProduct*>;

Product product(const ProductTuple& from) {
  const auto& [parts, bias, adapted] = from;
  Product made = {{}, at<const float>(bias), adapted};
  for (const auto& [weight, exact, order] : parts)
    made.parts.push_back({weight_of(weight), exact, at<const int32_t>(order)});
  return made;
}

// first, rows, begin; up, if there is one; gain, shift
using PartTuple = std::tuple<int64_t, int64_t, int64_t, std::optional<WeightTuple>, Address, Address>;

void set_factors(AdaptedProduct& product, int64_t adapter, const std::optional<WeightTuple>& down,
                 const std::vector<PartTuple>& parts) {
  Factors factors = {down ? weight_of(*down) : Weight{}, {}};
  for (const auto& [first, rows, begin, up, gain, shift] : parts)
    factors.parts.push_back({.first = first,
                             .rows = rows,
                             .begin = begin,
                             .up = up ? weight_of(*up) : Weight{},
                             .gain = at(gain),
                             .shift = at(shift)});
  product.set(adapter, std::move(factors));
}

AdapterRows make_adapter_rows(const std::vector<std::pair<int64_t, std::vector<int64_t>>>& by_adapter) {
  AdapterRows whose;
  for (const auto& [adapter, rows] : by_adapter) {
    whose.groups.push_back({adapter, static_cast<int64_t>(whose.rows.size()), static_cast<int64_t>(rows.size())});
    whose.rows.insert(whose.rows.end(), rows.begin(), rows.end());
  }
  return whose;
}

using ProjectedTuple = std::tuple<Address, int64_t, int64_t, int>;  // address, row stride, tokens, dtype
using SlotsTuple = std::tuple<Address, int64_t, int>;               // address, slot stride, dtype
using ConvTuple = std::tuple<Address, Address, int, int64_t>;       // weight, bias, dtype, kernel
using NormTuple = std::tuple<Address, int, float>;                  // weight, dtype, eps

Projected projected(const ProjectedTuple& from) {
  const auto& [data, stride, tokens, dtype] = from;
  return {at(data), stride, tokens, static_cast<Dtype>(dtype)};
}

SlotView slots(const SlotsTuple& from) {
  const auto& [data, stride, dtype] = from;
  return {at(data), stride, static_cast<Dtype>(dtype)};
}

ConvWeights conv_weights(const ConvTuple& from) {
  const auto& [weight, bias, dtype, kernel] = from;
  return {at(weight), at(bias), static_cast<Dtype>(dtype), kernel};
}

NormWeights norm_weights(const NormTuple& from) {
  const auto& [weight, dtype, eps] = from;
  return {at(weight), static_cast<Dtype>(dtype), eps};
}

template <class Layer>
void run_layer(const Layer& layer, const Runs& runs, const ProjectedTuple& inputs, const SlotsTuple& window,
               const SlotsTuple& state, int64_t number, Address out) {
  nb::gil_scoped_release unlocked;
  layer.run(runs, projected(inputs), slots(window), slots(state), number, at(out));
}

using RotationTuple = std::tuple<Address, Address, int64_t>;  // cos, sin, rotary dim

// The caller guarantees the lifetime of the objects that it was made of.
void add_stage(FusedDecoder& decoder, const NormTuple& norm, bool plus_one, const FusedBlock& fused, int core,
               nb::handle layer, const ConvTuple& conv, const SlotsTuple& first, const SlotsTuple& second,
               const std::tuple<Address, int64_t, int64_t>& scales, int64_t number, int64_t rope) {
  Stage stage = {.norm = {norm_weights(norm), plus_one},
                 .fused = &fused,
                 .core = static_cast<Core>(core),
                 .layer = nullptr,
                 .conv = conv_weights(conv),
                 .first = slots(first),
                 .second = slots(second),
                 .scales = {at(std::get<0>(scales)), std::get<1>(scales), std::get<2>(scales)},
                 .number = number,
                 .rope = rope};
  if (stage.core == Core::gated_delta) stage.layer = &nb::cast<const GatedDeltaLayer&>(layer);
  if (stage.core == Core::mamba2) stage.layer = &nb::cast<const Mamba2Layer&>(layer);
  if (stage.core == Core::attention) stage.layer = &nb::cast<const AttentionLayer&>(layer);
  decoder.stages.push_back(stage);
}

void run_fused_decoder(const FusedDecoder& decoder, const Runs& runs, const ProjectedTuple& x,
                       const std::vector<RotationTuple>& rotated, Address page_table, int64_t table_stride,
                       const AdapterRows* whose, Address out) {
  nb::gil_scoped_release unlocked;
  std::vector<Rotation> rotations;
  for (const auto& [cos, sin, rotary_dim] : rotated)
    rotations.push_back({at<const float>(cos), at<const float>(sin), rotary_dim});
  decoder.run(runs, projected(x), rotations, at<const int32_t>(page_table), table_stride, whose, at(out));
}

template <class Layer>
void fused_layer(const FusedBlock& fused, const Layer& layer, const Runs& runs, const ProjectedTuple& x,
                 const SlotsTuple& window, const SlotsTuple& state, int64_t number, Address out) {
  nb::gil_scoped_release unlocked;
  fused.run(projected(x), at(out),
            [&](const Projected& inner, void* to) { layer.run(runs, inner, slots(window), slots(state), number, to); });
}

Runs make_runs(const std::vector<int64_t>& offsets, const std::vector<int64_t>& starts,
               const std::vector<int64_t>& lengths, const std::vector<int64_t>& slots, const std::vector<bool>& fresh,
               const std::vector<std::tuple<int64_t, int64_t, int64_t>>& taps) {
  Runs step;
  for (size_t i = 0; i < offsets.size(); ++i)
    step.runs.push_back(
        {.offset = offsets[i], .start = starts[i], .length = lengths[i], .slot = slots[i], .fresh = fresh[i]});
  for (const auto& [run, offset, slot] : taps) step.runs[run].taps.push_back({offset, slot});  // by offset
  return step;
}

// Runs [first, first + count) are verify runs.
void set_windows(Runs& step, size_t first, size_t count) {
  for (size_t i = first; i < first + count; ++i) {
    step.runs[i].keeps = false;
    step.log_rows += step.runs[i].length;
  }
  step.log_first = step.runs[first].offset;
}

void add_log(Runs& step, Address window, Address to, int64_t row_bytes, int64_t gap, int64_t gap_bytes) {
  step.logs.push_back({at(window), at<char>(to), row_bytes, gap, gap_bytes});
}

}  // namespace

NB_MODULE(_native, m) {
  // Raised by one for every change of Python's arguments: their order, numbers of enums, the layout of data. The same
  // as INTERFACE in src/weft/tensor/native.py, which takes no other.
  m.attr("INTERFACE") = 29;
  nb::class_<Runs>(m, "Runs").def(nb::new_(&make_runs)).def("windows", &set_windows).def("log", &add_log);
  m.def("instruction_set", [] { return kernels().name; });
  m.def("instruction_sets", &usable_kernels);
  m.def("use", &use_kernels);
  m.def("threads", [] { return Pool::instance().threads(); });
  m.def("set_threads", [](int threads) { Pool::instance().resize(threads); });
  m.def("tuning", [] {
    return std::make_tuple(tuning.fetched_ahead, tuning.unit_fetched_ahead, tuning.part_bytes,
                           tuning.unpacked_part_bytes);
  });
  m.def("tune", [](int64_t fetched_ahead, int64_t unit_fetched_ahead, int64_t part_bytes, int64_t unpacked_part_bytes) {
    tuning = {.fetched_ahead = fetched_ahead,
              .unit_fetched_ahead = unit_fetched_ahead,
              .part_bytes = part_bytes,
              .unpacked_part_bytes = unpacked_part_bytes};
  });

  m.def("attention",
        [](const Runs& runs, const RowsTuple& q, Address out, Address k, Address v, int64_t k_page, int64_t v_page,
           int64_t kv_heads, int64_t group, int64_t dim, Address page_table, int64_t table_stride, float scale,
           int kv_dtype, Address scales, int64_t scale_page, int64_t scale_part, int64_t window, Address sinks) {
          nb::gil_scoped_release unlocked;
          kernels().attention({.runs = &runs,
                               .q = rows(q),
                               .out = at(out),
                               .k = at(k),
                               .v = at(v),
                               .k_page = k_page,
                               .v_page = v_page,
                               .kv_heads = kv_heads,
                               .group = group,
                               .dim = dim,
                               .page_table = at<const int32_t>(page_table),
                               .table_stride = table_stride,
                               .scale = scale,
                               .kv_dtype = static_cast<Dtype>(kv_dtype),
                               .scales = {at(scales), scale_page, scale_part},
                               .window = window,
                               .sinks = at<const float>(sinks)});
        });
  nb::class_<AttentionLayer>(m, "AttentionLayer")
      .def(nb::new_([](int64_t heads, int64_t kv_heads, int64_t dim, bool gated, bool head_gated, bool norm_whole,
                       const NormTuple& q_norm, const NormTuple& k_norm, bool plus_one, float scale, int64_t window,
                       Address sinks) {
        return AttentionLayer{.heads = heads,
                              .kv_heads = kv_heads,
                              .dim = dim,
                              .gated = gated,
                              .head_gated = head_gated,
                              .norm_whole = norm_whole,
                              .q_norm = norm_weights(q_norm),
                              .k_norm = norm_weights(k_norm),
                              .plus_one = plus_one,
                              .scale = scale,
                              .window = window,
                              .sinks = at<const float>(sinks)};
      }))
      .def("run", [](const AttentionLayer& layer, const Runs& runs, const Runs& asked, const ProjectedTuple& inputs,
                     Address cos, Address sin, int64_t rotary_dim, const SlotsTuple& k, const SlotsTuple& v,
                     Address page_table, int64_t table_stride, Address scales, int64_t scale_page, int64_t scale_part,
                     Address out) {
        nb::gil_scoped_release unlocked;
        const SlotView keys = slots(k), values = slots(v);
        layer.run(runs, asked, projected(inputs), {at<const float>(cos), at<const float>(sin), rotary_dim},
                  {keys, values, at<const int32_t>(page_table), table_stride, {at(scales), scale_page, scale_part}},
                  at(out));
      });
  m.def("gated_delta", [](const Runs& runs, const RowsTuple& q, const RowsTuple& k, const RowsTuple& v,
                          const RowsTuple& g, const RowsTuple& beta, bool line_decays, Address out, Address state,
                          int64_t slot_stride, int64_t k_heads, int64_t heads, int64_t k_dim, int64_t v_dim,
                          float scale, Address decay, Address dt_bias, int state_dtype, int64_t layer) {
    nb::gil_scoped_release unlocked;
    kernels().gated_delta({.runs = &runs,
                           .q = rows(q),
                           .k = rows(k),
                           .v = rows(v),
                           .g = rows(g),
                           .beta = rows(beta),
                           .line_decays = line_decays,
                           .decay = at<const float>(decay),
                           .dt_bias = at<const float>(dt_bias),
                           .beta_scale = 1.0f,
                           .out = at(out),
                           .state = at(state),
                           .slot_stride = slot_stride,
                           .k_heads = k_heads,
                           .heads = heads,
                           .k_dim = k_dim,
                           .v_dim = v_dim,
                           .scale = scale,
                           .kind = {static_cast<Dtype>(state_dtype), layer}});
  });
  m.def("wkv7", [](const Runs& runs, const RowsTuple& r, const RowsTuple& g, const RowsTuple& k, const RowsTuple& v,
                   const RowsTuple& kk, const RowsTuple& b, Address out, Address state, int64_t slot_stride,
                   int64_t heads, int64_t k_dim, int64_t v_dim, int state_dtype, int64_t layer) {
    nb::gil_scoped_release unlocked;
    kernels().gated_delta({.runs = &runs,
                           .q = rows(r),
                           .k = rows(k),
                           .v = rows(v),
                           .g = rows(g),
                           .line_decays = true,
                           .decay = nullptr,
                           .dt_bias = nullptr,
                           .beta_scale = 1.0f,
                           .out = at(out),
                           .state = at(state),
                           .slot_stride = slot_stride,
                           .k_heads = heads,
                           .heads = heads,
                           .k_dim = k_dim,
                           .v_dim = v_dim,
                           .scale = 1.0f,
                           .kind = {static_cast<Dtype>(state_dtype), layer},
                           .kk = rows(kk),
                           .b = rows(b)});
  });
  nb::class_<GatedDeltaLayer>(m, "GatedDeltaLayer")
      .def(nb::new_([](const ConvTuple& conv, const NormTuple& norm, Address decay, Address dt_bias, float beta_scale,
                       int64_t k_heads, int64_t heads, int64_t k_dim, int64_t v_dim) {
        return GatedDeltaLayer{.conv = conv_weights(conv),
                               .norm = norm_weights(norm),
                               .decay = at<const float>(decay),
                               .dt_bias = at<const float>(dt_bias),
                               .beta_scale = beta_scale,
                               .k_heads = k_heads,
                               .heads = heads,
                               .k_dim = k_dim,
                               .v_dim = v_dim};
      }))
      .def("run", &run_layer<GatedDeltaLayer>);
  nb::class_<Mamba2Layer>(m, "Mamba2Layer")
      .def(nb::new_([](const ConvTuple& conv, const NormTuple& norm, Address a, Address d, Address dt_bias,
                       int64_t heads, int64_t groups, int64_t head_dim, int64_t state_dim, int64_t norm_group,
                       bool gate_first, float dt_min, float dt_max) {
        return Mamba2Layer{.conv = conv_weights(conv),
                           .norm = norm_weights(norm),
                           .a = at<const float>(a),
                           .d = at<const float>(d),
                           .dt_bias = at<const float>(dt_bias),
                           .heads = heads,
                           .groups = groups,
                           .head_dim = head_dim,
                           .state_dim = state_dim,
                           .norm_group = norm_group,
                           .gate_first = gate_first,
                           .dt_min = dt_min,
                           .dt_max = dt_max};
      }))
      .def("run", &run_layer<Mamba2Layer>);
  m.def("mamba2",
        [](const Runs& runs, const RowsTuple& x, const RowsTuple& b, const RowsTuple& c, const RowsTuple& dt, Address a,
           Address d, Address dt_bias, Address out, Address state, int64_t slot_stride, int64_t heads, int64_t groups,
           int64_t head_dim, int64_t state_dim, float dt_min, float dt_max, int state_dtype, int64_t layer) {
          nb::gil_scoped_release unlocked;
          kernels().mamba2({.runs = &runs,
                            .x = rows(x),
                            .b = rows(b),
                            .c = rows(c),
                            .dt = rows(dt),
                            .a = at<const float>(a),
                            .d = at<const float>(d),
                            .dt_bias = at<const float>(dt_bias),
                            .out = at(out),
                            .state = at(state),
                            .slot_stride = slot_stride,
                            .heads = heads,
                            .groups = groups,
                            .head_dim = head_dim,
                            .state_dim = state_dim,
                            .dt_min = dt_min,
                            .dt_max = dt_max,
                            .kind = {static_cast<Dtype>(state_dtype), layer}});
        });
  m.def("mamba1", [](const Runs& runs, const RowsTuple& x, const RowsTuple& dt, const RowsTuple& b, const RowsTuple& c,
                     Address a, Address d, Address dt_bias, Address out, Address state, int64_t slot_stride,
                     int64_t channels, int64_t state_dim, int state_dtype, int64_t layer) {
    nb::gil_scoped_release unlocked;
    kernels().mamba1({.runs = &runs,
                      .x = rows(x),
                      .dt = rows(dt),
                      .b = rows(b),
                      .c = rows(c),
                      .a = at<const float>(a),
                      .d = at<const float>(d),
                      .dt_bias = at<const float>(dt_bias),
                      .out = at(out),
                      .state = at(state),
                      .slot_stride = slot_stride,
                      .channels = channels,
                      .state_dim = state_dim,
                      .kind = {static_cast<Dtype>(state_dtype), layer}});
  });
  m.def("conv", [](const Runs& runs, const RowsTuple& x, const RowsTuple& in_gate, const RowsTuple& out_gate,
                   const ConvTuple& conv, bool silu, Address out, const SlotsTuple& window, int64_t channels) {
    nb::gil_scoped_release unlocked;
    const ConvWeights with = conv_weights(conv);
    const SlotView window_view = slots(window);
    kernels().conv({.runs = &runs,
                    .x = rows(x),
                    .in_gate = rows(in_gate),
                    .out_gate = rows(out_gate),
                    .weight = with.weight,
                    .bias = with.bias,
                    .weight_dtype = with.dtype,
                    .silu = silu,
                    .out = at(out),
                    .window = window_view.data,
                    .slot_stride = window_view.slot_stride,
                    .channels = channels,
                    .kernel = with.kernel,
                    .window_dtype = window_view.dtype});
  });
  m.def("norm",
        [](const RowsTuple& x, const RowsTuple& gate, Address weight, int weight_dtype, float eps, bool plus_one,
           bool gate_first, int64_t tokens, int64_t heads, int64_t dim, int64_t group, Address out) {
          nb::gil_scoped_release unlocked;
          kernels().norm({.x = rows(x),
                          .gate = rows(gate),
                          .add_scale = 1.0f,
                          .sum_out = nullptr,
                          .weight = at(weight),
                          .weight_dtype = static_cast<Dtype>(weight_dtype),
                          .eps = eps,
                          .plus_one = plus_one,
                          .gate_first = gate_first,
                          .tokens = tokens,
                          .heads = heads,
                          .dim = dim,
                          .group = group,
                          .out = at(out)});
        });
  m.def("add_norm", [](const ProjectedTuple& x, const ProjectedTuple& added, float scale, int64_t dim, Address sum,
                       const NormTuple& norm, bool plus_one, Address out) {
    nb::gil_scoped_release unlocked;
    const Projected to = projected(x), from = projected(added);
    const NormWeights with = norm_weights(norm);
    kernels().norm({.x = {to.data, to.stride, 0, to.dtype},
                    .add = {from.data, from.stride, 0, from.dtype},
                    .add_scale = scale,
                    .sum_out = at(sum),
                    .weight = with.weight,
                    .weight_dtype = with.dtype,
                    .eps = with.eps,
                    .plus_one = plus_one,
                    .gate_first = false,
                    .tokens = to.tokens,
                    .heads = 1,
                    .dim = dim,
                    .group = dim,
                    .out = at(out)});
  });
  m.def("sigmoid_gate",
        [](Address x, const RowsTuple& gate, bool per_head, int64_t tokens, int64_t heads, int64_t dim) {
          nb::gil_scoped_release unlocked;
          kernels().sigmoid_gate(
              {.x = at(x), .gate = rows(gate), .per_head = per_head, .tokens = tokens, .heads = heads, .dim = dim});
        });
  m.def("rotary", [](const RowsTuple& q, const RowsTuple& k, Address cos, Address sin, int64_t tokens, int64_t q_heads,
                     int64_t kv_heads, int64_t dim, int64_t rotary_dim, Address q_out, Address k_out) {
    nb::gil_scoped_release unlocked;
    kernels().rotary({.q = rows(q),
                      .k = rows(k),
                      .cos = at<const float>(cos),
                      .sin = at<const float>(sin),
                      .tokens = tokens,
                      .q_heads = q_heads,
                      .kv_heads = kv_heads,
                      .dim = dim,
                      .rotary_dim = rotary_dim,
                      .q_out = at(q_out),
                      .k_out = at(k_out)});
  });
  m.def("write_kv", [](const Runs& runs, const RowsTuple& k, const RowsTuple& v, Address cache_k, Address cache_v,
                       int64_t k_page, int64_t v_page, int64_t kv_heads, int64_t dim, Address page_table,
                       int64_t table_stride, int kv_dtype, Address scales, int64_t scale_page, int64_t scale_part) {
    nb::gil_scoped_release unlocked;
    kernels().write_kv({.runs = &runs,
                        .k = rows(k),
                        .v = rows(v),
                        .cache_k = at(cache_k),
                        .cache_v = at(cache_v),
                        .k_page = k_page,
                        .v_page = v_page,
                        .kv_heads = kv_heads,
                        .dim = dim,
                        .page_table = at<const int32_t>(page_table),
                        .table_stride = table_stride,
                        .kv_dtype = static_cast<Dtype>(kv_dtype),
                        .scales = {at(scales), scale_page, scale_part}});
  });
  m.def("silu_mul", [](Address gate_up, int64_t stride, int64_t tokens, int64_t width, int dtype, Address out) {
    nb::gil_scoped_release unlocked;
    kernels().silu_mul({.gate_up = at(gate_up),
                        .stride = stride,
                        .tokens = tokens,
                        .width = width,
                        .dtype = static_cast<Dtype>(dtype),
                        .out = at(out)});
  });
  m.def("gelu_tanh", [](Address x, int64_t count, int dtype, Address out) {
    nb::gil_scoped_release unlocked;
    kernels().gelu_tanh({at(x), count, static_cast<Dtype>(dtype), at(out)});
  });
  m.def("softmax", [](Address x, int64_t rows, int64_t columns, float scale, int dtype) {
    nb::gil_scoped_release unlocked;
    kernels().softmax(
        {.x = at(x), .rows = rows, .columns = columns, .scale = scale, .dtype = static_cast<Dtype>(dtype)});
  });
  m.def("linear", [](Address x, int64_t x_stride, int x_dtype, int64_t rows, const WeightTuple& weight, Address bias,
                     bool exact, Address out, bool gated) {
    nb::gil_scoped_release unlocked;
    kernels().linear({.x = at(x),
                      .x_stride = x_stride,
                      .x_dtype = static_cast<Dtype>(x_dtype),
                      .rows = rows,
                      .weight = weight_of(weight),
                      .bias = at<const float>(bias),
                      .exact = exact,
                      .out = at(out),
                      .gated = gated});
  });
  m.def("moe", [](Address x, int64_t x_stride, int x_dtype, int64_t tokens, int64_t choices, int64_t experts,
                  Address ids, Address weights, const WeightTuple& gate_up, const WeightTuple& down,
                  Address gate_up_tiles, Address down_tiles, Address gate_up_bias, Address down_bias, int activation,
                  float limit, bool gated, bool exact, Address out) {
    nb::gil_scoped_release unlocked;
    kernels().moe({.x = at(x),
                   .x_stride = x_stride,
                   .x_dtype = static_cast<Dtype>(x_dtype),
                   .tokens = tokens,
                   .choices = choices,
                   .experts = experts,
                   .ids = at<const int64_t>(ids),
                   .weights = at<const float>(weights),
                   .gate_up = weight_of(gate_up),
                   .down = weight_of(down),
                   .gate_up_tiles = at<const ExpertTiles>(gate_up_tiles),
                   .down_tiles = at<const ExpertTiles>(down_tiles),
                   .gate_up_bias = at<const float>(gate_up_bias),
                   .down_bias = at<const float>(down_bias),
                   .activation = static_cast<Activation>(activation),
                   .limit = limit,
                   .gated = gated,
                   .exact = exact,
                   .out = at(out)});
  });
  // Units: 0 none, 1 AMX, 2 software.
  m.def("matrix_unit", [] { return static_cast<int>(matrix_unit()); });
  m.def("use_matrix_unit", [](int unit) { return use_matrix_unit(static_cast<MatrixUnit>(unit)); });
  m.def("amx_missing", &amx_missing);
  m.def("follows_manual", &follows_manual);
  m.def("has_twelve_bit_products", [] { return kernels().has_twelve_bit_products(); });
  m.def("has_coded_tiles", [] { return kernels().has_coded_tiles(); });
  m.def("has_byte_products", [] { return kernels().has_byte_products(); });
  m.def("widen_weight",
        [](const WeightTuple& weight, int64_t first, int64_t last, int64_t stride, int out_dtype, Address out) {
          nb::gil_scoped_release unlocked;
          kernels().widen_weight({.weight = weight_of(weight),
                                  .first = first,
                                  .last = last,
                                  .stride = stride,
                                  .out_dtype = static_cast<Dtype>(out_dtype),
                                  .out = at(out)});
        });
  nb::class_<OddWords>(m, "OddWords").def("size", &OddWords::size).def("write", [](const OddWords& odd, Address out) {
    odd.write(at<int64_t>(out));
  });
  m.def("pack_twelve_bit",
        [](Address rows, int64_t tiles, int64_t in, int64_t odd_most, bool finite, Address highs, Address units) {
          nb::gil_scoped_release unlocked;
          return pack_twelve_bit(at<const uint16_t* const>(rows), tiles, in, odd_most, finite, at<uint8_t>(highs),
                                 at<uint8_t>(units));
        });
  m.def("pack_tiles", [](Address rows, int64_t tiles, int64_t in, Address out) {
    nb::gil_scoped_release unlocked;
    pack_tiles(at<const uint16_t* const>(rows), tiles, in, at<uint16_t>(out));
  });
  // False: a row is beyond the table, and nothing was done.
  m.def("table_rows", [](const WeightTuple& weight, Address rows, int64_t count, Address out) {
    for (int64_t i = 0; i < count; ++i)
      if (at<const int64_t>(rows)[i] < 0 || at<const int64_t>(rows)[i] >= std::get<3>(weight)) return false;
    nb::gil_scoped_release unlocked;
    table_rows(weight_of(weight), at<const int64_t>(rows), count, at(out));
    return true;
  });
  m.def("take_columns", [](const ProjectedTuple& x, Address order, int64_t columns, Address out) {
    nb::gil_scoped_release unlocked;
    take_columns(projected(x), at<const int32_t>(order), columns, at(out));
  });
  nb::class_<FusedBlock>(m, "FusedBlock")
      .def(nb::new_([](const ProductTuple& first, const ProductTuple& second) {
        return FusedBlock{product(first), product(second)};
      }))
      .def("swiglu",
           [](const FusedBlock& fused, const ProjectedTuple& x, Address out) {
             nb::gil_scoped_release unlocked;
             fused.swiglu(projected(x), at(out));
           })
      .def("short_conv",
           [](const FusedBlock& fused, const Runs& runs, const ProjectedTuple& x, const ConvTuple& conv,
              const SlotsTuple& window, Address out) {
             nb::gil_scoped_release unlocked;
             fused.short_conv(runs, projected(x), conv_weights(conv), slots(window), at(out));
           })
      .def("gated_delta", &fused_layer<GatedDeltaLayer>)
      .def("mamba2", &fused_layer<Mamba2Layer>)
      .def("attention", [](const FusedBlock& fused, const AttentionLayer& layer, const Runs& runs,
                           const ProjectedTuple& x, Address cos, Address sin, int64_t rotary_dim, const SlotsTuple& k,
                           const SlotsTuple& v, Address page_table, int64_t table_stride, Address scales,
                           int64_t scale_page, int64_t scale_part, Address out) {
        nb::gil_scoped_release unlocked;
        const Pages pages = {.k = slots(k),
                             .v = slots(v),
                             .table = at<const int32_t>(page_table),
                             .table_stride = table_stride,
                             .scales = {at(scales), scale_page, scale_part}};
        fused.run(projected(x), at(out), [&](const Projected& inner, void* to) {
          layer.run(runs, runs, inner, {at<const float>(cos), at<const float>(sin), rotary_dim}, pages, to);
        });
      });
  nb::class_<FusedDecoder>(m, "FusedDecoder")
      .def(nb::new_([](float scale, const NormTuple& last, bool plus_one) {
        return FusedDecoder{scale, {norm_weights(last), plus_one}, {}};
      }))
      .def("add", &add_stage)
      .def("log_token_bytes",
           [](const FusedDecoder& decoder, int dtype) { return decoder.log_token_bytes(static_cast<Dtype>(dtype)); })
      .def("log", [](const FusedDecoder& decoder, Runs& runs, int dtype,
                     Address to) { decoder.log(runs, static_cast<Dtype>(dtype), at<char>(to)); })
      .def("replay",
           [](const FusedDecoder& decoder, const Runs& again, int dtype, Address log, int64_t rows) {
             nb::gil_scoped_release unlocked;
             decoder.replay(again, static_cast<Dtype>(dtype), at<const char>(log), rows);
           })
      .def("run", &run_fused_decoder, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(),
           nb::arg());
  nb::class_<AdapterRows>(m, "AdapterRows").def(nb::new_(&make_adapter_rows));
  nb::class_<AdaptedProduct>(m, "AdaptedProduct")
      .def(nb::init<>())
      .def("set", &set_factors, nb::arg(), nb::arg().none(), nb::arg())
      .def("erase", &AdaptedProduct::erase)
      .def("add", [](const AdaptedProduct& adapted, const AdapterRows& whose, const ProjectedTuple& x, Address y,
                     int64_t y_stride) {
        nb::gil_scoped_release unlocked;
        const Projected from = projected(x);
        kernels().adapt({.x = from.data,
                         .x_stride = from.stride,
                         .y = at(y),
                         .y_stride = y_stride,
                         .dtype = from.dtype,
                         .product = &adapted,
                         .whose = &whose});
      });
}
