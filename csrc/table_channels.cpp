#include "table.hpp"

#include "conv.inl"

namespace weft::tables::WEFT_TABLE {

WEFT_GIVES(conv, ConvArgs)

}  // namespace weft::tables::WEFT_TABLE
