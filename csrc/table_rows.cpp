#include "table.hpp"

#include "kv_numbers.inl"
#include "norm.inl"
#include "elementwise.inl"
#include "softmax.inl"

namespace weft::tables::WEFT_TABLE {

WEFT_GIVES(norm, NormArgs)
WEFT_GIVES(rotary, RotaryArgs)
WEFT_GIVES(write_kv, WriteKvArgs)
WEFT_GIVES(silu_mul, SiluMulArgs)
WEFT_GIVES(sigmoid_gate, GateArgs)
WEFT_GIVES(gelu_tanh, GeluArgs)
WEFT_GIVES(softmax, SoftmaxArgs)

}  // namespace weft::tables::WEFT_TABLE
