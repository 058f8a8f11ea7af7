// y = x W^T for a weight in any form, and experts: see the kernel of each. Those of plain rows and of codes that vectors
// multiply are in table_codes.cpp, those of bfloat16 in fewer bits in table_twelve_bit.cpp and table_coded.cpp.
#pragma once

#include "moe_tiles.hpp"

namespace weft {
namespace {

void linear(const LinearArgs& args) {
  if (!args.rows) return;
  switch (args.weight.form) {
    case WeightForm::float32_tiles: return tile_products<float, float>(args);
    case WeightForm::bfloat16_tiles:
#if defined(__AVX512F__)
      if (matrix_unit() != MatrixUnit::none) return matrix_products(&args, 1);
#endif
      return bf16_tile_products(args);
#if defined(__AVX512F__) || defined(__aarch64__)
    case WeightForm::bfloat16_twelve_bit:
#if defined(__AVX512F__)
      if (matrix_unit() != MatrixUnit::none) return matrix_products(&args, 1);
#endif
      return tables::WEFT_TABLE::linear_twelve_bit(args);
#endif
#if defined(__AVX512F__)
    case WeightForm::bfloat16_fp8:
    case WeightForm::bfloat16_four_bits:
      if (matrix_unit() != MatrixUnit::none) return matrix_products(&args, 1);
      return tables::WEFT_TABLE::linear_coded(args);
#endif
    case WeightForm::int8:
    case WeightForm::int6:
    case WeightForm::int4:
#if defined(__AVX512F__)
      if (matrix_unit() != MatrixUnit::none && args.x_dtype == Dtype::bfloat16) return matrix_products(&args, 1);
#endif
      [[fallthrough]];
    default: return tables::WEFT_TABLE::linear_codes(args);
  }
}

void moe(const MoeArgs& args) {
  if (args.gate_up_tiles) return args.x_dtype == Dtype::bfloat16 ? tiled_moe<bf16>(args) : tiled_moe<float>(args);
#if defined(__AVX512F__)
  if (in_tiles(args.gate_up.form) && args.x_dtype == Dtype::bfloat16 && matrix_unit() != MatrixUnit::none)
    return tiled_moe<bf16>(args);
#endif
  tables::WEFT_TABLE::moe_codes(args);
}

}  // namespace
}  // namespace weft
