// Numbers of pages: reading a packed line of them, and making one number. The rounding is that of
// src/weft/tensor/few_bits.py, to the bit: nearest even, larger numbers as the largest, NaN stays NaN.
//
// A line is 16 lanes of 32 bits, each with pack = 4 / size neighbours of the summed axis (tensor/layout.py); it is
// read as pack vectors, one for each neighbour. Small floats are widened by moving their exponent: a number without
// one (below the least normal number) is taken as one binade up, and that binade's power of two is taken off again.
#pragma once

#include "table.hpp"

namespace weft {
namespace {

struct f16 {
  uint16_t bits;
};

struct f8 {  // e4m3, no infinities
  uint8_t bits;
};

struct i8 {
  int8_t value;
};

template <class KV>
constexpr int kPack = 4 / static_cast<int>(sizeof(KV));

template <class KV>
constexpr bool kScaled = false;
template <>
constexpr bool kScaled<i8> = true;

// A small float of ``kMantissa`` bits with its sign bit at ``kSign``, in the low bits of each lane.
template <int kMantissa, int kSign, int kBias>
WEFT_INLINE f32x16 widen_lanes(u32x16 lanes) {
  constexpr uint32_t rebias = 127 - kBias, least = 1u << kMantissa, top = (1u << kSign) - 1;
  const u32x16 size = lanes & top, moved = size << (23 - kMantissa);
  const f32x16 normal = (f32x16)(moved + (rebias << 23));
  f32x16 lift = {};
  lift = (f32x16)((u32x16)lift + ((rebias + 1) << 23));
  const f32x16 small = (f32x16)(moved + ((rebias + 1) << 23)) - lift;
  return select((i32x16)(size < least), small, normal);
}

WEFT_INLINE f32x16 with_sign(f32x16 size, u32x16 lanes, int sign) {
  return (f32x16)((u32x16)size | ((lanes >> sign & 1) << 31));
}

WEFT_INLINE f32x16 widen_f16(u32x16 lanes) {
  const f32x16 size = widen_lanes<10, 15, 15>(lanes);
  const i32x16 endless = (i32x16)((lanes & 0x7FFF) >= 0x7C00);  // infinities and NaN
  const f32x16 full = (f32x16)((u32x16)size + (112u << 23));
  return with_sign(select(endless, full, size), lanes, 15);
}

WEFT_INLINE f32x16 widen_f8(u32x16 lanes) {
  const f32x16 size = widen_lanes<3, 7, 7>(lanes);
  const i32x16 nan = (i32x16)((lanes & 0x7F) == 0x7F);
  return with_sign(select(nan, splat(__builtin_nanf("")), size), lanes, 7);
}

WEFT_INLINE void load_line(const float* from, f32x16* parts) { parts[0] = load(from); }

WEFT_INLINE void load_line(const bf16* from, f32x16* parts) { load_pairs(from, parts, parts + 1); }

WEFT_INLINE void load_line(const f16* from, f32x16* parts) {
  const u32x16 lanes = load_as<u32x16>(from);
  parts[0] = widen_f16(lanes & 0xFFFF);
  parts[1] = widen_f16(lanes >> 16);
}

WEFT_INLINE void load_line(const f8* from, f32x16* parts) {
  const u32x16 lanes = load_as<u32x16>(from);
  for (int i = 0; i < 4; ++i) parts[i] = widen_f8(lanes >> (8 * i) & 0xFF);
}

WEFT_INLINE void load_line(const i8* from, f32x16* parts) {
  const i32x16 lanes = load_as<i32x16>(from);
  for (int i = 0; i < 4; ++i) parts[i] = converted<f32x16>(lanes << (24 - 8 * i) >> 24);
}

// One float in ``kMantissa`` bits, ``most`` its largest: the bits without the sign.
template <int kMantissa, int kBias>
WEFT_INLINE uint32_t narrow_bits(float size, float most, uint32_t most_bits) {
  constexpr int shift = 23 - kMantissa;
  constexpr uint32_t rebias = 127 - kBias;
  if (size >= most) return most_bits;
  uint32_t bits;
  std::memcpy(&bits, &size, sizeof bits);
  if (bits < (rebias + 1) << 23) {  // in steps of the least number
    const uint32_t step_bits = (127 + kBias - 1 + kMantissa) << 23;
    float steps;
    std::memcpy(&steps, &step_bits, sizeof steps);
    return static_cast<uint32_t>(__builtin_nearbyintf(size * steps));
  }
  bits += (1u << (shift - 1)) - 1 + (bits >> shift & 1);
  return (bits >> shift) - (rebias << kMantissa);
}

WEFT_INLINE void narrow(f16* to, float x) {
  const uint32_t sign = __builtin_signbit(x) ? 0x8000 : 0, nan = 0x7E00;
  to->bits = static_cast<uint16_t>(sign | (x != x ? nan : narrow_bits<10, 15>(__builtin_fabsf(x), 65504.0f, 0x7BFF)));
}

WEFT_INLINE void narrow(f8* to, float x) {
  const uint32_t sign = __builtin_signbit(x) ? 0x80 : 0, nan = 0x7F;
  to->bits = static_cast<uint8_t>(sign | (x != x ? nan : narrow_bits<3, 7>(__builtin_fabsf(x), 448.0f, 0x7E)));
}

// A whole number of x, which is scaled already.
WEFT_INLINE void narrow(i8* to, float x) {
  const float whole = __builtin_nearbyintf(x);
  to->value = static_cast<int8_t>(whole != whole ? 0.0f : whole > 127.0f ? 127.0f : whole < -127.0f ? -127.0f : whole);
}

// The step of the int8 numbers of one token and head; NaN and infinities make it one.
template <class T>
WEFT_INLINE bf16 token_scale(const T* x, int64_t dim) {
  float most = 0;
  for (int64_t d = 0; d < dim; ++d) {
    const float size = __builtin_fabsf(widen(x[d]));
    most = size > most || size != size ? size : most;
  }
  bf16 scale;
  narrow(&scale, most * (1.0f / 127.0f));
  return scale;
}

// Calls ``run`` with a null pointer of the type of a page's numbers.
template <class Run>
void with_kv_type(Dtype dtype, Run&& run) {
  switch (dtype) {
    case Dtype::float32: return run(static_cast<float*>(nullptr));
    case Dtype::bfloat16: return run(static_cast<bf16*>(nullptr));
    case Dtype::float16: return run(static_cast<f16*>(nullptr));
    case Dtype::float8_e4m3: return run(static_cast<f8*>(nullptr));
    case Dtype::int8: return run(static_cast<i8*>(nullptr));
  }
}

}  // namespace
}  // namespace weft
