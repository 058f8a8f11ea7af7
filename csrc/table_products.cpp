#include "matrix_unit.hpp"
#include "table.hpp"

#include "linear_inputs.inl"
#include "linear.inl"  // over linear_inputs.inl
#include "w8a8.inl"   // over linear.inl
#include "tiles.inl"  // over linear.inl
#include "twelve_bit.inl"  // over tiles.inl
#include "matrix_products.inl"  // over twelve_bit.inl
#include "products.inl"  // over all of them
#include "moe_routing.inl"
#include "moe_tiles.inl"  // over tiles.inl to products.inl
#include "moe.inl"    // over linear.inl

namespace weft::tables::WEFT_TABLE {

WEFT_GIVES(linear, LinearArgs)
WEFT_GIVES(widen_weight, WidenArgs)
WEFT_GIVES(moe, MoeArgs)
bool has_byte_products() { return has_vnni(); }
bool has_twelve_bit_products() {
#if defined(__AVX512F__)
  return true;
#else
  return false;
#endif
}

}  // namespace weft::tables::WEFT_TABLE
