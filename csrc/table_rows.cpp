#include "elementwise.hpp"
#include "norm.hpp"
#include "softmax.hpp"
#include "table.hpp"

namespace weft::tables::WEFT_TABLE {

WEFT_GIVES(norm, NormArgs)
WEFT_GIVES(rotary, RotaryArgs)
WEFT_GIVES(write_kv, WriteKvArgs)
WEFT_GIVES(silu_mul, SiluMulArgs)
WEFT_GIVES(sigmoid_gate, GateArgs)
WEFT_GIVES(gelu_tanh, GeluArgs)
WEFT_GIVES(softmax, SoftmaxArgs)

}  // namespace weft::tables::WEFT_TABLE
