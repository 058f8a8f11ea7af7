#include "products.hpp"
#include "table.hpp"

namespace weft::tables::WEFT_TABLE {

WEFT_GIVES(linear, LinearArgs)
WEFT_GIVES(moe, MoeArgs)
bool has_coded_tiles() {
#if defined(__AVX512F__)
  return serves_coded();
#else
  return false;
#endif
}
bool has_twelve_bit_products() {
#if defined(__AVX512F__) || defined(__aarch64__)
  return true;
#else
  return false;
#endif
}

}  // namespace weft::tables::WEFT_TABLE
