#include "adapter_products.hpp"
#include "table.hpp"

namespace weft::tables::WEFT_TABLE {

WEFT_GIVES(adapt, AdaptArgs)

}  // namespace weft::tables::WEFT_TABLE
