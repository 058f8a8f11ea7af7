// A block's two matrix products and what lies between them, in one crossing from Python.
//
//   x --first--> made --core--> between --second--> out
//
// With few rows of x a product is a stream of weights that leaves nothing else in the caches, the interpreter's own
// code included: what Python does between two of them takes several times as long as it would in a loop, and its
// ten microseconds come four times a layer. The kernels and their order are those of separate calls, and so are the
// bits. With many rows nothing is gained, and ``made`` and ``between`` (kept from call to call, for each thread)
// would be large: tensor/fused_block.py says from when on.
#pragma once

#include "layers.hpp"

namespace weft {

struct Product {
  Weight weight;
  const float* bias;  // [out] or null
  bool exact;         // see LinearArgs

  // out: [tokens, weight.out] dense, dtype of x
  void run(const Projected& x, void* out) const;
};

// [T, width] like ``like``, kept for the next call of this thread. ``which``: 0 and 1 are the chain's, the others those
// of fused_decoder.cpp.
constexpr int kFusedBlockRooms = 5;
Projected fused_buffer(int which, const Projected& like, int64_t width);

struct FusedBlock {
  Product first, second;

  // core(made, to): [T, first.weight.out] -> [T, second.weight.in]
  template <class Core>
  void run(const Projected& x, void* out, const Core& core) const {
    const Projected made = fused_buffer(0, x, first.weight.out), between = fused_buffer(1, x, second.weight.in);
    first.run(x, const_cast<void*>(made.data));
    core(made, const_cast<void*>(between.data));
    second.run(between, out);
  }

  void swiglu(const Projected& x, void* out) const;
  void short_conv(const Runs& runs, const Projected& x, const ConvWeights& conv, const SlotView& window,
                  void* out) const;
};

}  // namespace weft
