#include "fused_decoder.hpp"

namespace weft {
namespace {

// Computes the norm of x, or of x + scale * added; that sum is written to ``sum`` as well.
void norm_stream(const StreamNorm& with, const Projected& x, const Buffer* added, float scale, int64_t dim, void* sum,
                 void* out) {
  NormArgs args = {};
  args.x = {x.data, x.stride, 0, x.dtype};
  if (added) args.add = {added->data, added->stride, 0, added->dtype};
  args.add_scale = scale;
  args.sum_out = sum;
  args.weight = with.norm.weight;
  args.weight_dtype = with.norm.dtype;
  args.eps = with.norm.eps;
  args.plus_one = with.plus_one;
  args.tokens = x.tokens;
  args.heads = 1;
  args.dim = args.group = dim;
  args.out = out;
  kernels().norm(args);
}

void run_stage(const Stage& stage, const Runs& runs, const Projected& x, const std::vector<Rotation>& rotated,
               const int32_t* page_table, int64_t table_stride, const AdapterRows* whose, void* out) {
  const FusedBlock& fused = *stage.fused;
  switch (stage.core) {
    case Core::swiglu: return fused.swiglu(x, out, whose);
    case Core::short_conv: return fused.short_conv(runs, x, stage.conv, stage.first, out, whose);
    case Core::gated_delta:
      return fused.run(
          x, out,
          [&](const Projected& projected, void* to) {
            static_cast<const GatedDeltaLayer*>(stage.layer)
                ->run(runs, projected, stage.first, stage.second, stage.number, to);
          },
          whose);
    case Core::mamba2:
      return fused.run(
          x, out,
          [&](const Projected& projected, void* to) {
            static_cast<const Mamba2Layer*>(stage.layer)
                ->run(runs, projected, stage.first, stage.second, stage.number, to);
          },
          whose);
    case Core::attention:
      return fused.run(
          x, out,
          [&](const Projected& projected, void* to) {
            const Rotation none = {nullptr, nullptr, 0};
            static_cast<const AttentionLayer*>(stage.layer)
                ->run(runs, runs, projected, stage.rope < 0 ? none : rotated[static_cast<size_t>(stage.rope)],
                      {stage.first, stage.second, page_table, table_stride, stage.scales}, to);
          },
          whose);
  }
}

// A row of a stage's log: ``width`` numbers of the stage's projection, without ``gap_width`` from ``gap`` on.
struct LogRow {
  int64_t width, gap, gap_width;
};

LogRow log_row(const Stage& stage) {
  switch (stage.core) {
    case Core::short_conv: {
      const int64_t channels = stage.fused->second.in();
      return {2 * channels, channels, channels};
    }
    case Core::gated_delta: {
      const auto& layer = *static_cast<const GatedDeltaLayer*>(stage.layer);
      const int64_t values = layer.heads * layer.v_dim, channels = 2 * layer.k_heads * layer.k_dim + values;
      return {channels + 2 * layer.heads, channels, values};
    }
    case Core::mamba2: {
      const auto& layer = *static_cast<const Mamba2Layer*>(stage.layer);
      const int64_t inner = layer.heads * layer.head_dim;
      return {inner + 2 * layer.groups * layer.state_dim + layer.heads, 0, inner};
    }
    default: return {0, 0, 0};
  }
}

int64_t bytes_of(Dtype dtype) { return dtype == Dtype::bfloat16 ? 2 : 4; }

void replay_stage(const Stage& stage, const Runs& again, const Projected& logged) {
  if (stage.core == Core::gated_delta)
    static_cast<const GatedDeltaLayer*>(stage.layer)
        ->run(again, logged, stage.first, stage.second, stage.number, nullptr);
  if (stage.core == Core::mamba2)
    static_cast<const Mamba2Layer*>(stage.layer)->run(again, logged, stage.first, stage.second, stage.number, nullptr);
  if (stage.core == Core::short_conv) stage.fused->replay_short_conv(again, logged, stage.conv, stage.first);
}

}  // namespace

int64_t FusedDecoder::log_token_bytes(Dtype dtype) const {
  int64_t width = 0;
  for (const Stage& stage : stages) width += log_row(stage).width;
  return width * bytes_of(dtype);
}

void FusedDecoder::log(Runs& runs, Dtype dtype, char* to) const {
  const int64_t bytes = bytes_of(dtype);
  for (const Stage& stage : stages) {
    const LogRow row = log_row(stage);
    if (row.width == 0) continue;
    runs.logs.push_back({stage.first.data, to, row.width * bytes, row.gap * bytes, row.gap_width * bytes});
    to += runs.log_rows * row.width * bytes;
  }
}

void FusedDecoder::replay(const Runs& again, Dtype dtype, const char* log, int64_t rows) const {
  for (const Stage& stage : stages) {
    const int64_t width = log_row(stage).width;
    if (width == 0) continue;
    replay_stage(stage, again, {log, width, rows, dtype});
    log += rows * width * bytes_of(dtype);
  }
}

void FusedDecoder::run(const Runs& runs, const Projected& x, const std::vector<Rotation>& rotated,
                       const int32_t* page_table, int64_t table_stride, const AdapterRows* whose, void* out) const {
  const int64_t dim = stages.front().fused->first.in();
  const Buffer normed = fused_buffer(2, x, dim), rooms[2] = {fused_buffer(3, x, dim), fused_buffer(4, x, dim)};
  Projected stream = x;
  const Buffer* added = nullptr;
  int spare = 0;  // the index of the buffer that does not have the stream
  for (const Stage& stage : stages) {
    norm_stream(stage.norm, stream, added, scale, dim, added ? added->data : nullptr, normed.data);
    if (added) {
      stream = *added;  // the sum replaced it
      spare = added == &rooms[0] ? 1 : 0;
    }
    run_stage(stage, runs, normed, rotated, page_table, table_stride, whose, rooms[spare].data);
    added = &rooms[spare];
  }
  norm_stream(last, stream, added, scale, dim, added ? added->data : nullptr, out);
}

}  // namespace weft
