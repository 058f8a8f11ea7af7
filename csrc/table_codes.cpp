#include "moe.hpp"
#include "table.hpp"

namespace weft::tables::WEFT_TABLE {

void linear_codes(const LinearArgs& args) {
  const bool halves = args.x_dtype == Dtype::bfloat16;
  if (args.weight.form == WeightForm::int8_both) return halves ? byte_products<bf16>(args) : byte_products<float>(args);
  halves ? linear_in<bf16>(args) : linear_in<float>(args);
}
WEFT_GIVES(moe_codes, MoeArgs)
WEFT_GIVES(widen_weight, WidenArgs)
bool has_byte_products() { return has_vnni(); }

}  // namespace weft::tables::WEFT_TABLE
