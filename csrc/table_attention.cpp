#include "attention.hpp"
#include "table.hpp"

namespace weft::tables::WEFT_TABLE {

WEFT_GIVES(attention, AttentionArgs)
#ifdef WEFT_DOT_TABLE
WEFT_GIVES(attention_dots, AttentionArgs)
#endif

}  // namespace weft::tables::WEFT_TABLE
