#include "products.hpp"
#include "table.hpp"

namespace weft::tables::WEFT_TABLE {

WEFT_GIVES(linear, LinearArgs)
WEFT_GIVES(moe, MoeArgs)
#if defined(__AVX512F__)
void item_of_tiles(const LinearArgs& args, int64_t tile, int64_t first, int64_t last, const char* next, bool wide) {
  wide ? tiles_of_item<bf16, float>(args, tile, first, last, next)
       : tiles_of_item<bf16, bf16>(args, tile, first, last, next);
}
#endif

}  // namespace weft::tables::WEFT_TABLE
