// The kernels between the two projections of a layer, in one call from Python. Each call and each tensor costs some
// microseconds there: a decode step of 24 layers would spend more time on that than in the kernels.
//
//     gated delta   [ q | k | v | z | b | a ]    conv -> delta rule -> norm, gated by z
//     Mamba-2       [ gate | x | B | C | dt ]    conv -> state space -> norm, gated
//     attention     [ q | (gate) | k | v | (head gates) ]    norms -> rotary -> pages -> attention -> gates
//
// A layer is built once, from addresses of weights that its owner keeps alive. A call passes only the arguments that
// change from step to step. Numbers between the kernels have the dtype of the model, and are rounded where separate
// calls would round them.
#pragma once

#include "kernels.hpp"

namespace weft {

// [T, width], rows ``stride`` apart.
struct Projected {
  const void* data;
  int64_t stride, tokens;
  Dtype dtype;
};

// The same, for a kernel to write and another to read.
struct Buffer {
  void* data;
  int64_t stride, tokens;
  Dtype dtype;
  operator Projected() const { return {data, stride, tokens, dtype}; }
};

// A state's view over the arena: slots ``slot_stride`` elements apart.
struct SlotView {
  void* data;
  int64_t slot_stride;
  Dtype dtype;
};

// Copies the rows of the windows of drafts into the log of the layer with these convolution windows, if it has one.
void log_rows(const Runs& runs, const Projected& projected, const void* window);

struct ConvWeights {
  const void *weight, *bias;  // [C, K], [C] or null
  Dtype dtype;
  int64_t kernel;
};

struct NormWeights {
  const void* weight;
  Dtype dtype;
  float eps;
};

struct GatedDeltaLayer {
  ConvWeights conv;
  NormWeights norm;              // [v_dim]
  const float *decay, *dt_bias;  // [heads]
  float beta_scale;
  int64_t k_heads, heads, k_dim, v_dim;

  // projected: columns q, k, v, z, b, a. out: [T, heads * v_dim] dense, of its dtype; ``layer``: see StateKind.
  // Without out the projection has no z, and only the states are computed.
  void run(const Runs& runs, const Projected& projected, const SlotView& window, const SlotView& state, int64_t layer,
           void* out) const;
};

struct Mamba2Layer {
  ConvWeights conv;
  NormWeights norm;              // [heads * head_dim]
  const float *a, *d, *dt_bias;  // [heads]
  int64_t heads, groups, head_dim, state_dim, norm_group;
  bool gate_first;
  float dt_min, dt_max;

  // projected: columns z, x, B, C, dt. out: [T, heads * head_dim] dense; without it as above
  void run(const Runs& runs, const Projected& projected, const SlotView& window, const SlotView& state, int64_t layer,
           void* out) const;
};

struct Rotation {
  const float *cos, *sin;  // [T, rotary_dim]; null for a layer without rotary
  int64_t rotary_dim;
};

struct Pages {
  SlotView k, v;         // slots are pages
  const int32_t* table;  // [R, ...]
  int64_t table_stride;
  TokenScales scales;
};

struct AttentionLayer {
  int64_t heads, kv_heads, dim;
  bool gated, head_gated, norm_whole;  // norm_whole: over all heads at once
  NormWeights q_norm, k_norm;          // weight null for a layer without
  bool plus_one;
  float scale;
  int64_t window;      // 0 for all
  const float* sinks;  // [heads] or null

  // out: [T, heads * dim] dense. KV of all ``runs`` is written; the output is computed only for ``asked``, rows of runs.
  void run(const Runs& runs, const Runs& asked, const Projected& projected, const Rotation& rotated, const Pages& pages,
           void* out) const;
};

}  // namespace weft
