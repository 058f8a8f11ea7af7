#include "mamba2.hpp"
#include "table.hpp"

namespace weft::tables::WEFT_TABLE {

WEFT_GIVES(mamba2, Mamba2Args)

}  // namespace weft::tables::WEFT_TABLE
