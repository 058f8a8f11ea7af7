#include "fused_block.hpp"

#include <cstring>

namespace weft {
namespace {

template <class T>
void take(const Projected& x, const int32_t* order, int64_t columns, void* out) {
  Pool::instance().for_each(x.tokens, static_cast<double>(columns), [&](int64_t row) {
    const T* const from = static_cast<const T*>(x.data) + row * x.stride;
    T* const to = static_cast<T*>(out) + row * columns;
    for (int64_t i = 0; i < columns; ++i) to[i] = from[order[i]];
  });
}

}  // namespace

void take_columns(const Projected& x, const int32_t* order, int64_t columns, void* out) {
  if (x.dtype == Dtype::bfloat16) take<uint16_t>(x, order, columns, out);
  else take<float>(x, order, columns, out);
}

int64_t Product::out() const {
  int64_t rows = 0;
  for (const Part& part : parts) rows += part.weight.out;
  return rows;
}

void Product::run(const Projected& x, void* to, const AdapterRows* whose) const {
  const int64_t bytes = x.dtype == Dtype::bfloat16 ? 2 : 4, stride = out() * bytes;
  char* at = static_cast<char*>(to);
  Projected ordered = x;
  const int32_t* order = nullptr;  // the order of the columns in ``ordered``
  for (const Part& part : parts) {
    if (part.order && part.order != order) {
      order = part.order;
      const Buffer room = fused_buffer(6, x, in());
      take_columns(x, order, in(), room.data);
      ordered = room;
    }
    const Projected& from = part.order ? ordered : x;
    const int64_t width = part.weight.out * bytes;
    // Kernels write dense rows. A single row is dense at its place in the result.
    const bool dense = parts.size() == 1 || x.tokens == 1;
    void* const made = dense ? at : fused_buffer(5, x, part.weight.out).data;
    kernels().linear({.x = from.data,
                      .x_stride = from.stride,
                      .x_dtype = x.dtype,
                      .rows = x.tokens,
                      .weight = part.weight,
                      .bias = bias,
                      .exact = part.exact,
                      .out = made});
    for (int64_t row = 0; !dense && row < x.tokens; ++row)
      std::memcpy(at + row * stride, static_cast<const char*>(made) + row * width, static_cast<size_t>(width));
    at += width;
  }
  if (whose)
    kernels().adapt({.x = x.data,
                     .x_stride = x.stride,
                     .y = to,
                     .y_stride = out(),
                     .dtype = x.dtype,
                     .product = adapted,
                     .whose = whose});
}

Buffer fused_buffer(int which, const Projected& like, int64_t width) {
  static thread_local std::vector<char> held[kFusedBlockRooms];
  const size_t bytes = static_cast<size_t>(like.tokens * width * (like.dtype == Dtype::bfloat16 ? 2 : 4));
  if (held[which].size() < bytes) held[which].resize(bytes);
  return {held[which].data(), width, like.tokens, like.dtype};
}

void FusedBlock::swiglu(const Projected& x, void* out, const AdapterRows* whose) const {
  run(
      x, out,
      [&](const Projected& projected, void* to) {
        kernels().silu_mul({.gate_up = projected.data,
                            .stride = projected.stride,
                            .tokens = projected.tokens,
                            .width = second.in(),
                            .dtype = projected.dtype,
                            .out = to});
      },
      whose);
}

// LFM2: [ B | C | x ] -> C conv(B x)
void FusedBlock::short_conv(const Runs& runs, const Projected& x, const ConvWeights& conv, const SlotView& window,
                            void* out, const AdapterRows* whose) const {
  run(
      x, out,
      [&](const Projected& projected, void* to) {
        log_rows(runs, projected, window.data);
        const int64_t channels = second.in(), bytes = projected.dtype == Dtype::bfloat16 ? 2 : 4;
        const auto part = [&](int64_t i) {
          return Rows{static_cast<const char*>(projected.data) + i * channels * bytes, projected.stride, 1,
                      projected.dtype};
        };
        kernels().conv({.runs = &runs,
                        .x = part(2),
                        .in_gate = part(0),
                        .out_gate = part(1),
                        .weight = conv.weight,
                        .bias = conv.bias,
                        .weight_dtype = conv.dtype,
                        .silu = false,
                        .out = to,
                        .window = window.data,
                        .slot_stride = window.slot_stride,
                        .channels = channels,
                        .kernel = conv.kernel,
                        .window_dtype = window.dtype});
      },
      whose);
}

void FusedBlock::replay_short_conv(const Runs& again, const Projected& logged, const ConvWeights& conv,
                                   const SlotView& window) const {
  const int64_t channels = second.in(), bytes = logged.dtype == Dtype::bfloat16 ? 2 : 4;
  const Rows gate = {logged.data, logged.stride, 1, logged.dtype};
  const Rows x = {static_cast<const char*>(logged.data) + channels * bytes, logged.stride, 1, logged.dtype};
  const Buffer dropped = fused_buffer(1, logged, channels);
  kernels().conv({.runs = &again,
                  .x = x,
                  .in_gate = gate,
                  .weight = conv.weight,
                  .bias = conv.bias,
                  .weight_dtype = conv.dtype,
                  .silu = false,
                  .out = dropped.data,
                  .window = window.data,
                  .slot_stride = window.slot_stride,
                  .channels = channels,
                  .kernel = conv.kernel,
                  .window_dtype = window.dtype});
}

}  // namespace weft
