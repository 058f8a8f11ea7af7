#include "table.hpp"

#include "flush_denormals.hpp"
#include "kv_numbers.inl"
#include "rounding.inl"
#include "mamba2.inl"

namespace weft::tables::WEFT_TABLE {

WEFT_GIVES(mamba2, Mamba2Args)

}  // namespace weft::tables::WEFT_TABLE
