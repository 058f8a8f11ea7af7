#include "table.hpp"

#include "flush_denormals.hpp"
#include "kv_numbers.inl"
#include "rounding.inl"
#include "gated_delta.inl"
#include "mamba2.inl"

namespace weft::tables::WEFT_TABLE {

WEFT_GIVES(gated_delta, GatedDeltaArgs)
WEFT_GIVES(mamba2, Mamba2Args)

}  // namespace weft::tables::WEFT_TABLE
