// All layers of a model for a step of few tokens, in one call from Python.
//
//   x --norm--> fused block -> y      x + y --norm--> fused block -> y     ...     x + y --norm--> hidden
//
// Between two products, Python's work would find none of its own code in the caches (see fused_block.hpp). A call
// passes the changing arguments: runs, cos and sin, the page table. src/weft/models/fused_decoder.py binds the rest
// once (weights, fused blocks, views of the arena), and decides which steps qualify.
#pragma once

#include "fused_block.hpp"

namespace weft {

struct StreamNorm {
  NormWeights norm;
  bool plus_one;
};

enum class Core : int { swiglu = 0, short_conv = 1, gated_delta = 2, mamba2 = 3, attention = 4 };

// One line of the residual: x += fused(norm(x)).
struct Stage {
  StreamNorm norm;
  const FusedBlock* fused;
  Core core;
  const void* layer;       // GatedDeltaLayer, Mamba2Layer or AttentionLayer.
  ConvWeights conv;        // of short_conv
  SlotView first, second;  // Window and state, or K and V pages.
  TokenScales scales;      // of pages
  int64_t number;          // of the layer, see StateKind
  int64_t rope;            // index in the step's cos and sin, -1 for none
};

struct FusedDecoder {
  float scale;  // factor on additions to the stream
  StreamNorm last;
  std::vector<Stage> stages;

  // x: [T, D], not changed; out: [T, D] dense, after the last norm
  // ``whose``: the rows of adapters, or null.
  void run(const Runs& runs, const Projected& x, const std::vector<Rotation>& rotated, const int32_t* page_table,
           int64_t table_stride, const AdapterRows* whose, void* out) const;

  // The log of a step with verify runs has a part for each stage with a state, one after the other: a row for each
  // token of these runs. Bytes of a token in all parts:
  int64_t log_token_bytes(Dtype dtype) const;

  // The next ``run`` over ``runs`` fills the log ``to``.
  void log(Runs& runs, Dtype dtype, char* to) const;

  // Computes only the states, from a log of ``rows`` rows; the offsets of ``again`` are rows of the log.
  void replay(const Runs& again, Dtype dtype, const char* log, int64_t rows) const;
};

}  // namespace weft
