#include "adapters.hpp"
#include "table.hpp"

// Each over some of those before it.
#include "linear_inputs.inl"
#include "tiles.inl"
#include "adapters.inl"

namespace weft::tables::WEFT_TABLE {

WEFT_GIVES(adapt, AdaptArgs)

}  // namespace weft::tables::WEFT_TABLE
