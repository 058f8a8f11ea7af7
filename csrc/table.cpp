#include "table.hpp"

namespace weft {

#define WEFT_STRING_OF(x) #x
#define WEFT_STRING(x) WEFT_STRING_OF(x)

#define WEFT_KERNELS(table, attention_form)                                                                         \
  extern const Kernels table;                                                                                       \
  const Kernels table = {WEFT_STRING(table), own::attention_form, own::gated_delta, own::mamba2, own::mamba1,       \
                         own::conv, own::norm, own::rotary, own::write_kv, own::silu_mul, own::sigmoid_gate,        \
                         own::gelu_tanh, own::softmax, own::linear, own::widen_weight, own::has_byte_products,      \
                         own::has_twelve_bit_products, own::has_coded_tiles, own::moe, own::adapt}

namespace own = tables::WEFT_TABLE;

WEFT_KERNELS(WEFT_TABLE, attention);
#ifdef WEFT_DOT_TABLE
WEFT_KERNELS(WEFT_DOT_TABLE, attention_dots);
#endif

}  // namespace weft
