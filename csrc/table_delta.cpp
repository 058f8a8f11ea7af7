#include "gated_delta.hpp"
#include "table.hpp"

namespace weft::tables::WEFT_TABLE {

WEFT_GIVES(gated_delta, GatedDeltaArgs)

}  // namespace weft::tables::WEFT_TABLE
