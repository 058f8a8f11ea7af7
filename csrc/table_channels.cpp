#include "table.hpp"

#include "flush_denormals.hpp"
#include "kv_numbers.inl"
#include "rounding.inl"
#include "conv.inl"
#include "mamba1.inl"

namespace weft::tables::WEFT_TABLE {

WEFT_GIVES(conv, ConvArgs)
WEFT_GIVES(mamba1, Mamba1Args)

}  // namespace weft::tables::WEFT_TABLE
