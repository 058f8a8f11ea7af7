#include "coded_tiles.hpp"
#include "table.hpp"

namespace weft::tables::WEFT_TABLE {

#if defined(__AVX512F__)
void linear_coded(const LinearArgs& args) { coded_products(args); }
void item_coded(const LinearArgs& args, int64_t tile, int64_t end, bool wide) {
  wide ? coded_item<float>(args, tile, end, 0, args.rows) : coded_item<bf16>(args, tile, end, 0, args.rows);
}
void unpack_coded(const Weight& weight, int64_t tile, int64_t unit, int64_t end, uint16_t* to) {
  unpack_coded_tile(weight, tile, unit, end, reinterpret_cast<Half*>(to));
}
bool has_coded_tiles() { return serves_coded(); }
#else
bool has_coded_tiles() { return false; }
#endif

}  // namespace weft::tables::WEFT_TABLE
