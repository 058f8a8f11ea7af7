// States that are stored in fewer bits than they are computed in are rounded up or down at random after each token. The
// random bits are a hash of layer, position and element. Results are those of src/weft/tensor/rounding.py, bit for bit;
// that file gives the reasons.
#pragma once

#include "kv_numbers.hpp"

namespace weft {
namespace {

WEFT_INLINE u32x16 mixed(u32x16 x) {  // Wellons' lowbias32
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// Key for the rounding of a layer's state after the token at ``position``.
inline uint32_t state_key(int64_t position, int64_t layer) {
  uint32_t x = static_cast<uint32_t>(position) * 0x9E3779B1u + static_cast<uint32_t>(layer) * 0x85EBCA77u;
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// Lane i has element ``first`` + i ``stride``.
WEFT_INLINE u32x16 elements(int64_t first, int64_t stride) {
  return lane_numbers<u32x16>() * static_cast<uint32_t>(stride) + static_cast<uint32_t>(first);
}

// x rounded to the numbers of a state of S, as a float.
template <class S>
WEFT_INLINE f32x16 rounded_state(f32x16 x, u32x16 element, uint32_t key) {
  if constexpr (sizeof(S) == 4) {
    return x;
  } else {
    constexpr bool half = std::is_same_v<S, f16>;
    constexpr uint32_t mask = half ? 0x1FFF : 0xFFFF;
    const u32x16 sign = (u32x16)x & 0x80000000u;
    f32x16 size = (f32x16)((u32x16)x & 0x7FFFFFFFu);
    const f32x16 least = splat(half ? 6.103515625e-05f : 0.0f);  // below it float16 counts in steps of 2^-24
    const i32x16 small = size < least;
    if constexpr (half) size = select(small, size + least, size);
    f32x16 stored = (f32x16)(((u32x16)size + (mixed(element + key) & mask)) & ~mask);
    if constexpr (half) stored = select(small, stored - least, stored);
    stored = min(stored, splat(half ? 65504.0f : 3.3895313892515355e38f));
    return select(x != x, x, (f32x16)((u32x16)stored | sign));
  }
}

WEFT_INLINE f32x16 load(const f16* from) {
  u16x16 bits;
  std::memcpy(&bits, from, sizeof bits);
  return widen_f16(widened_bits(bits));
}

// Stores numbers that float16 represents.
WEFT_INLINE void store(f16* to, f32x16 x) {
  const u32x16 bits = (u32x16)x, size = bits & 0x7FFFFFFFu;
  const i32x16 small = (i32x16)(size < (113u << 23));
  const f32x16 steps = select(small, (f32x16)size * 16777216.0f, splat(0));
  const u32x16 normal = (size >> 13) - (112u << 10), few = (u32x16)converted<i32x16>(steps);
  const u32x16 number = (few & (u32x16)small) | (normal & ~(u32x16)small);
  const u32x16 nan = (u32x16)(x != x);
  const u16x16 half = converted<u16x16>(((number & ~nan) | (0x7E00u & nan)) | (bits >> 31 << 15));
  std::memcpy(to, &half, sizeof half);
}

WEFT_INLINE float widen(f16 x) {
  const uint32_t size = x.bits & 0x7FFFu, sign = (x.bits & 0x8000u) << 16;
  float y = static_cast<float>(size) * 5.9604644775390625e-08f;
  uint32_t bits;
  std::memcpy(&bits, &y, sizeof bits);
  if (size >= 0x400) bits = (size << 13) + ((size >= 0x7C00 ? 224u : 112u) << 23);
  bits |= sign;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

// Reads ``count`` numbers, a multiple of 16.
template <class S>
WEFT_INLINE void read_state(const S* from, float* to, int64_t count) {
  if constexpr (sizeof(S) == 4) std::memcpy(to, from, sizeof(float) * count);
  else
    for (int64_t i = 0; i < count; i += 16) store(to + i, load(from + i));
}

template <class S>
WEFT_INLINE void write_state(S* to, const float* from, int64_t count) {
  if constexpr (sizeof(S) == 4) std::memcpy(to, from, sizeof(float) * count);
  else
    for (int64_t i = 0; i < count; i += 16) store(to + i, load(from + i));
}

// Calls ``run`` with a null pointer of the type of a state's numbers.
template <class Run>
void with_state_type(Dtype dtype, Run&& run) {
  if (dtype == Dtype::bfloat16) return run(static_cast<bf16*>(nullptr));
  if (dtype == Dtype::float16) return run(static_cast<f16*>(nullptr));
  run(static_cast<float*>(nullptr));
}

}  // namespace
}  // namespace weft
