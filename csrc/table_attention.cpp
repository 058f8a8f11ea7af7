#include "table.hpp"

#include <algorithm>
#include <vector>

#include "kv_numbers.inl"
#include "shared_pages.inl"
#include "attention_tile.inl"
#include "attention.inl"  // over both

namespace weft::tables::WEFT_TABLE {

WEFT_GIVES(attention, AttentionArgs)
#ifdef WEFT_DOT_TABLE
WEFT_GIVES(attention_dots, AttentionArgs)
#endif

}  // namespace weft::tables::WEFT_TABLE
