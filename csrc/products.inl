// y = x W^T for a weight in any form: see the kernel of each.

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
      return twelve_bit_products(args);
#endif
#if defined(__AVX512F__)
    case WeightForm::bfloat16_fp8:
    case WeightForm::bfloat16_four_bits:
      if (matrix_unit() != MatrixUnit::none) return matrix_products(&args, 1);
      return coded_products(args);
#endif
    case WeightForm::int8_both:
      return args.x_dtype == Dtype::bfloat16 ? byte_products<bf16>(args) : byte_products<float>(args);
    case WeightForm::int8:
    case WeightForm::int6:
    case WeightForm::int4:
#if defined(__AVX512F__)
      if (matrix_unit() != MatrixUnit::none && args.x_dtype == Dtype::bfloat16) return matrix_products(&args, 1);
#endif
      [[fallthrough]];
    default: return args.x_dtype == Dtype::bfloat16 ? linear_in<bf16>(args) : linear_in<float>(args);
  }
}

}  // namespace
}  // namespace weft
