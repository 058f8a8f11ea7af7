#include "conv.hpp"
#include "mamba1.hpp"
#include "table.hpp"

namespace weft::tables::WEFT_TABLE {

WEFT_GIVES(conv, ConvArgs)
WEFT_GIVES(mamba1, Mamba1Args)

}  // namespace weft::tables::WEFT_TABLE
