#include "flush_denormals.hpp"
#include "matrix_unit.hpp"
#include "table.hpp"

// Each over some of those before it.
#include "linear_inputs.inl"
#include "code_forms.inl"
#include "tiles.inl"
#include "twelve_bit.inl"
#include "twelve_bit_neon.inl"
#include "coded_numbers.inl"
#include "coded_words.inl"
#include "coded_tiles.inl"
#include "matrix_pieces.inl"
#include "code_pieces.inl"
#include "matrix_products.inl"
#include "moe_routing.inl"
#include "moe_tiles.inl"
#include "products.inl"

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
