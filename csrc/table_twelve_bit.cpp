#include "table.hpp"
#include "twelve_bit_neon.hpp"

namespace weft::tables::WEFT_TABLE {

#if defined(__AVX512F__) || defined(__aarch64__)
void linear_twelve_bit(const LinearArgs& args) { twelve_bit_products(args); }
void item_twelve_bit(const LinearArgs& args, int64_t tile, int64_t end, bool wide) {
  wide ? twelve_bit_tiles<float>(args, tile, end) : twelve_bit_tiles<bf16>(args, tile, end);
}
bool has_twelve_bit_products() { return true; }
#else
bool has_twelve_bit_products() { return false; }
#endif

}  // namespace weft::tables::WEFT_TABLE
