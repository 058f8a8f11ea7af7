// A block's two matrix products and the kernels between them, in one call from Python.
//
//   x --first--> projected --core--> between --second--> out
//
// With few rows of x a product is a stream of weights that evicts everything else from the caches, the interpreter's
// code included. Python's work between two products then takes several times as long as in a loop: ten microseconds,
// four times in each layer. Kernels run in the order of separate calls, and the result has the same bits.
//
// With many rows this gains nothing, and ``projected`` and ``between`` (buffers of each thread, reused by the next
// call) would be large. tensor/fused_block.py sets the limit.
#pragma once

#include "adapters.hpp"
#include "layers.hpp"

namespace weft {

// Parts, each a matrix in its own form, multiply the same x. Their results are concatenated.
struct Product {
  struct Part {
    Weight weight;
    bool exact;            // see LinearArgs
    const int32_t* order;  // [in]: the column of x that each column of the weight is multiplied with, or null
  };
  std::vector<Part> parts;
  const float* bias;  // [out] of a single part, or null
  const AdaptedProduct* adapted;

  int64_t in() const { return parts.front().weight.in; }
  int64_t out() const;
  // to: [tokens, out()] dense, dtype of x. ``whose``: the rows of adapters, null if all rows are of the base model.
  void run(const Projected& x, void* to, const AdapterRows* whose) const;
};

// [T, width] in the dtype of ``like``, reused by the next call of this thread. ``which``: 0 and 1 are the fused block's,
// 5 and 6 a product's, the others belong to fused_decoder.cpp.
constexpr int kFusedBlockRooms = 7;
Buffer fused_buffer(int which, const Projected& like, int64_t width);

// out: [T, columns] dense, dtype of x: column i is column order[i] of x.
void take_columns(const Projected& x, const int32_t* order, int64_t columns, void* out);

struct FusedBlock {
  Product first, second;

  // core(projected, to): [T, first.out()] -> [T, second.in()]
  template <class Core>
  void run(const Projected& x, void* out, const Core& core, const AdapterRows* whose = nullptr) const {
    const Buffer projected = fused_buffer(0, x, first.out()), between = fused_buffer(1, x, second.in());
    first.run(x, projected.data, whose);
    core(projected, between.data);
    second.run(between, out, whose);
  }

  void swiglu(const Projected& x, void* out, const AdapterRows* whose = nullptr) const;
  void short_conv(const Runs& runs, const Projected& x, const ConvWeights& conv, const SlotView& window, void* out,
                  const AdapterRows* whose = nullptr) const;
  // ``logged``: the columns B and x. It computes only the windows.
  void replay_short_conv(const Runs& again, const Projected& logged, const ConvWeights& conv,
                         const SlotView& window) const;
};

}  // namespace weft
