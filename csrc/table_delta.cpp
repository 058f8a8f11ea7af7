#include "table.hpp"

#include "flush_denormals.hpp"
#include "kv_numbers.inl"
#include "rounding.inl"
#include "gated_delta.inl"

namespace weft::tables::WEFT_TABLE {

WEFT_GIVES(gated_delta, GatedDeltaArgs)

}  // namespace weft::tables::WEFT_TABLE
