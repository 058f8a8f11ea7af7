// All kernels for one instruction set: compiled once for each, as WEFT_TABLE (see CMakeLists.txt). Whatever is
// included here is local to this file, so that no code of one set can be linked into another.
#include <cmath>
#include <cstring>
#include <type_traits>

#include "kernels.hpp"
#include "simd.hpp"

#include "kv_numbers.inl"
#include "rounding.inl"
#include "attention.inl"
#include "conv.inl"
#include "gated_delta.inl"
#include "linear.inl"
#include "tiles.inl"  // over linear.inl
#include "mamba1.inl"
#include "mamba2.inl"
#include "norm.inl"
#include "moe.inl"  // over linear.inl

#include "elementwise.inl"

namespace weft {

#define WEFT_STRING_OF(x) #x
#define WEFT_STRING(x) WEFT_STRING_OF(x)

#define WEFT_KERNELS(table, attention_form)                                                                     \
  extern const Kernels table;                                                                                   \
  const Kernels table = {WEFT_STRING(table), attention_form, gated_delta, mamba2, mamba1, conv, norm, rotary,    \
                         write_kv, silu_mul, sigmoid_gate, linear, widen_weight, has_vnni, has_bf16_dot, moe}

WEFT_KERNELS(WEFT_TABLE, attention);
#ifdef WEFT_DOT_TABLE
WEFT_KERNELS(WEFT_DOT_TABLE, attention_dots);
#endif

}  // namespace weft
