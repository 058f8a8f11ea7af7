#include "layers.hpp"

#include <cstring>

namespace weft {
namespace {

int64_t bytes_of(Dtype dtype) { return dtype == Dtype::bfloat16 ? 2 : 4; }

// Columns from ``first`` on, as heads ``head_stride`` apart.
Rows columns(const Projected& projected, int64_t first, int64_t head_stride) {
  return {static_cast<const char*>(projected.data) + first * bytes_of(projected.dtype), projected.stride, head_stride,
          projected.dtype};
}

// A buffer [T, width] of the calling thread, which the next call may overwrite. It grows to the largest step so far.
Buffer between(int which, const Projected& like, int64_t width) {
  static thread_local std::vector<char> held[2];
  const size_t bytes = static_cast<size_t>(like.tokens * width * bytes_of(like.dtype));
  if (held[which].size() < bytes) held[which].resize(bytes);
  return {held[which].data(), width, like.tokens, like.dtype};
}

}  // namespace

// Copies the rows of verify runs into the layer's log, where it has one.
void log_rows(const Runs& runs, const Projected& projected, const void* window) {
  for (const Log& log : runs.logs) {
    if (log.window != window) continue;
    const int64_t stride = projected.stride * bytes_of(projected.dtype);
    const char* from = static_cast<const char*>(projected.data) + runs.log_first * stride;
    for (int64_t row = 0; row < runs.log_rows; ++row) {
      char* const to = log.to + row * log.row_bytes;
      const char* const x = from + row * stride;
      std::memcpy(to, x, static_cast<size_t>(log.gap));
      std::memcpy(to + log.gap, x + log.gap + log.gap_bytes, static_cast<size_t>(log.row_bytes - log.gap));
    }
  }
}

namespace {

void convolve(const Runs& runs, const ConvWeights& conv, const Rows& x, int64_t channels, const SlotView& window,
              const Buffer& out) {
  ConvArgs args = {};
  args.runs = &runs;
  args.x = x;
  args.weight = conv.weight;
  args.bias = conv.bias;
  args.weight_dtype = conv.dtype;
  args.silu = true;
  args.out = out.data;
  args.window = window.data;
  args.slot_stride = window.slot_stride;
  args.channels = channels;
  args.kernel = conv.kernel;
  args.window_dtype = window.dtype;
  kernels().conv(args);
}

NormArgs gated_norm(const NormWeights& norm, const Rows& x, const Rows& gate, int64_t tokens, void* out) {
  NormArgs args = {};
  args.x = x;
  args.gate = gate;
  args.weight = norm.weight;
  args.weight_dtype = norm.dtype;
  args.eps = norm.eps;
  args.tokens = tokens;
  args.out = out;
  return args;
}

}  // namespace

void GatedDeltaLayer::run(const Runs& runs, const Projected& projected, const SlotView& window, const SlotView& state,
                          int64_t layer, void* out) const {
  log_rows(runs, projected, window.data);
  const int64_t keys = k_heads * k_dim, values = heads * v_dim, channels = 2 * keys + values;
  const int64_t gates = channels + (out ? values : 0);
  const Buffer qkv = between(0, projected, channels), o = between(1, projected, values);
  convolve(runs, conv, columns(projected, 0, 0), channels, window, qkv);
  GatedDeltaArgs args = {};
  args.runs = &runs;
  args.q = columns(qkv, 0, k_dim);
  args.k = columns(qkv, keys, k_dim);
  args.v = columns(qkv, 2 * keys, v_dim);
  args.beta = columns(projected, gates, 1);
  args.g = columns(projected, gates + heads, 1);
  args.decay = decay;
  args.dt_bias = dt_bias;
  args.beta_scale = beta_scale;
  args.out = out ? o.data : nullptr;
  args.state = state.data;
  args.kind = {state.dtype, layer};
  args.slot_stride = state.slot_stride;
  args.k_heads = k_heads;
  args.heads = heads;
  args.k_dim = k_dim;
  args.v_dim = v_dim;
  args.scale = 1.0f / __builtin_sqrtf(static_cast<float>(k_dim));
  kernels().gated_delta(args);
  if (!out) return;
  NormArgs last = gated_norm(norm, columns(o, 0, v_dim), columns(projected, channels, v_dim), projected.tokens, out);
  last.heads = heads;
  last.dim = last.group = v_dim;
  kernels().norm(last);
}

void Mamba2Layer::run(const Runs& runs, const Projected& projected, const SlotView& window, const SlotView& state,
                      int64_t layer, void* out) const {
  log_rows(runs, projected, window.data);
  const int64_t inner = heads * head_dim, group = groups * state_dim, channels = inner + 2 * group;
  const int64_t first = out ? inner : 0;
  const Buffer xbc = between(0, projected, channels), y = between(1, projected, inner);
  convolve(runs, conv, columns(projected, first, 0), channels, window, xbc);
  Mamba2Args args = {};
  args.runs = &runs;
  args.x = columns(xbc, 0, head_dim);
  args.b = columns(xbc, inner, state_dim);
  args.c = columns(xbc, inner + group, state_dim);
  args.dt = columns(projected, first + channels, 1);
  args.a = a;
  args.d = d;
  args.dt_bias = dt_bias;
  args.out = out ? y.data : nullptr;
  args.state = state.data;
  args.kind = {state.dtype, layer};
  args.slot_stride = state.slot_stride;
  args.heads = heads;
  args.groups = groups;
  args.head_dim = head_dim;
  args.state_dim = state_dim;
  args.dt_min = dt_min;
  args.dt_max = dt_max;
  kernels().mamba2(args);
  if (!out) return;
  NormArgs last = gated_norm(norm, columns(y, 0, inner), columns(projected, 0, inner), projected.tokens, out);
  last.gate_first = gate_first;
  last.heads = 1;
  last.dim = inner;
  last.group = norm_group;
  kernels().norm(last);
}

void AttentionLayer::run(const Runs& runs, const Runs& asked, const Projected& projected, const Rotation& rotated,
                         const Pages& pages, void* out) const {
  const int64_t q_width = heads * dim, kv_width = kv_heads * dim, k_at = q_width * (gated ? 2 : 1);
  Rows q = columns(projected, 0, dim), k = columns(projected, k_at, dim);
  const Rows v = columns(projected, k_at + kv_width, dim);
  if (q_norm.weight || rotated.cos) {
    const Buffer own_q = between(0, projected, q_width), own_k = between(1, projected, kv_width);
    const auto normed = [&](const NormWeights& norm, const Rows& x, int64_t count, const Buffer& to) {
      NormArgs args = gated_norm(norm, x, {}, projected.tokens, to.data);
      args.plus_one = plus_one;
      args.heads = norm_whole ? 1 : count;
      args.dim = args.group = norm_whole ? count * dim : dim;
      kernels().norm(args);
      return columns(to, 0, dim);
    };
    if (q_norm.weight) {
      q = normed(q_norm, q, heads, own_q);
      k = normed(k_norm, k, kv_heads, own_k);
    }
    if (rotated.cos) {  // in place where it was normed
      kernels().rotary({.q = q,
                        .k = k,
                        .cos = rotated.cos,
                        .sin = rotated.sin,
                        .tokens = projected.tokens,
                        .q_heads = heads,
                        .kv_heads = kv_heads,
                        .dim = dim,
                        .rotary_dim = rotated.rotary_dim,
                        .q_out = own_q.data,
                        .k_out = own_k.data});
      q = columns(own_q, 0, dim);
      k = columns(own_k, 0, dim);
    }
  }
  kernels().write_kv({.runs = &runs,
                      .k = k,
                      .v = v,
                      .cache_k = pages.k.data,
                      .cache_v = pages.v.data,
                      .k_page = pages.k.slot_stride,
                      .v_page = pages.v.slot_stride,
                      .kv_heads = kv_heads,
                      .dim = dim,
                      .page_table = pages.table,
                      .table_stride = pages.table_stride,
                      .kv_dtype = pages.k.dtype,
                      .scales = pages.scales});
  kernels().attention({.runs = &asked,
                       .q = q,
                       .out = out,
                       .k = pages.k.data,
                       .v = pages.v.data,
                       .k_page = pages.k.slot_stride,
                       .v_page = pages.v.slot_stride,
                       .kv_heads = kv_heads,
                       .group = heads / kv_heads,
                       .dim = dim,
                       .page_table = pages.table,
                       .table_stride = pages.table_stride,
                       .scale = scale,
                       .kv_dtype = pages.k.dtype,
                       .scales = pages.scales,
                       .window = window,
                       .sinks = sinks});
  if (head_gated)
    kernels().sigmoid_gate({.x = out,
                            .gate = columns(projected, k_at + 2 * kv_width, 1),
                            .per_head = true,
                            .tokens = projected.tokens,
                            .heads = heads,
                            .dim = dim});
  if (gated)
    kernels().sigmoid_gate({.x = out,
                            .gate = columns(projected, q_width, dim),
                            .per_head = false,
                            .tokens = projected.tokens,
                            .heads = heads,
                            .dim = dim});
}

}  // namespace weft
