// Sixteen floats at a time, in the compiler's own vector types: one AVX-512 register, two of AVX2, four of
// SSE or NEON. Intrinsics only where the compiler does not find the instruction (widening bytes): each file that includes this is compiled once per instruction set (see
// CMakeLists.txt), and everything here is inlined and local to that compilation.
//
// Arithmetic is float32. bf16 is widened by shifting (a bf16 is the upper half of the float of its value), so a
// kernel over bf16 pages does the same sums as one over float32 pages.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace weft {
namespace {

#define WEFT_INLINE inline __attribute__((always_inline))

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

struct bf16 {
  uint16_t bits;
};

WEFT_INLINE f32x16 splat(float x) { return f32x16{} + x; }

WEFT_INLINE f32x16 load(const float* from) {
  f32x16 x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

WEFT_INLINE f32x16 load(const bf16* from) {
  u16x16 x;
  std::memcpy(&x, from, sizeof x);
  return (f32x16)(__builtin_convertvector(x, u32x16) << 16);
}

WEFT_INLINE void store(float* to, f32x16 x) { std::memcpy(to, &x, sizeof x); }

// Round to nearest even; NaN stays NaN.
WEFT_INLINE void store(bf16* to, f32x16 x) {
  const u32x16 bits = (u32x16)x;
  const u32x16 rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const u32x16 nan = (u32x16)(x != x);
  const u16x16 half = __builtin_convertvector((rounded & ~nan) | (((bits >> 16) | 0x40) & nan), u16x16);
  std::memcpy(to, &half, sizeof half);
}

WEFT_INLINE float widen(float x) { return x; }

WEFT_INLINE float widen(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

WEFT_INLINE void narrow(float* to, float x) { *to = x; }

WEFT_INLINE void narrow(bf16* to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  to->bits = static_cast<uint16_t>(x != x ? (bits >> 16) | 0x40 : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// A line of 16 packed pairs of bf16 -> its first and its second elements.
WEFT_INLINE void load_pairs(const bf16* from, f32x16* first, f32x16* second) {
  u32x16 pairs;
  std::memcpy(&pairs, from, sizeof pairs);
  *first = (f32x16)(pairs << 16);
  *second = (f32x16)(pairs & 0xFFFF0000u);
}

// 16 signed bytes.
WEFT_INLINE f32x16 load_int8(const uint8_t* from) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  f32x16 x;
  float* out = reinterpret_cast<float*>(&x);
#if defined(__AVX2__)
  for (int half = 0; half < 2; ++half) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + 8 * half));
    _mm256_storeu_ps(out + 8 * half, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)));
  }
#else
  for (int i = 0; i < 16; ++i) out[i] = static_cast<float>(static_cast<int8_t>(from[i]));
#endif
  return x;
#endif
}

// 16 bytes of two halves each, 0 to 15: the low ones and the high ones, minus 8.
WEFT_INLINE void load_int4(const uint8_t* from, f32x16* low, f32x16* high) {
#if defined(__AVX512F__)
  const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  *low = (f32x16)_mm512_permutexvar_ps(wide, values);  // reads the lowest four bits only
  *high = (f32x16)_mm512_permutexvar_ps(_mm512_srli_epi32(wide, 4), values);
#else
  float* first = reinterpret_cast<float*>(low);
  float* second = reinterpret_cast<float*>(high);
#if defined(__AVX2__)
  for (int half = 0; half < 2; ++half) {
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + 8 * half)));
    const __m256i eight = _mm256_set1_epi32(8);
    const __m256i lows = _mm256_sub_epi32(_mm256_and_si256(wide, _mm256_set1_epi32(15)), eight);
    _mm256_storeu_ps(first + 8 * half, _mm256_cvtepi32_ps(lows));
    _mm256_storeu_ps(second + 8 * half, _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(wide, 4), eight)));
  }
#else
  for (int i = 0; i < 16; ++i) {
    first[i] = static_cast<float>((from[i] & 15) - 8);
    second[i] = static_cast<float>((from[i] >> 4) - 8);
  }
#endif
#endif
}

WEFT_INLINE f32x16 select(i32x16 chosen, f32x16 yes, f32x16 no) {
  return (f32x16)(((i32x16)yes & chosen) | ((i32x16)no & ~chosen));
}

WEFT_INLINE f32x16 max(f32x16 a, f32x16 b) { return select(a > b, a, b); }
WEFT_INLINE f32x16 min(f32x16 a, f32x16 b) { return select(a < b, a, b); }

typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x4 __attribute__((vector_size(16)));

WEFT_INLINE float sum(f32x16 x) {
  f32x8 halves[2];
  std::memcpy(halves, &x, sizeof x);
  const f32x8 eight = halves[0] + halves[1];
  f32x4 quarters[2];
  std::memcpy(quarters, &eight, sizeof eight);
  const f32x4 four = quarters[0] + quarters[1];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// Of numbers without NaN; with one, any of them or NaN.
WEFT_INLINE float largest(f32x16 x) {
  f32x8 halves[2];
  std::memcpy(halves, &x, sizeof x);
  const f32x8 eight = halves[0] > halves[1] ? halves[0] : halves[1];
  f32x4 quarters[2];
  std::memcpy(quarters, &eight, sizeof eight);
  const f32x4 four = quarters[0] > quarters[1] ? quarters[0] : quarters[1];
  const float even = four[0] > four[2] ? four[0] : four[2], odd = four[1] > four[3] ? four[1] : four[3];
  return even > odd ? even : odd;
}

// e^x to 2 units in the last place for x in [-87, 88]; below it is 0 or the least normal, above e^88; NaN stays
// NaN. Cody and Waite's reduction to |r| <= ln2 / 2 and a Taylor polynomial of degree 7.
WEFT_INLINE f32x16 exp(f32x16 x) {
  const f32x16 low = splat(-87.0f), high = splat(88.0f);
  const i32x16 under = x < low;
  f32x16 y = select(under, low, x);
  y = select(y > high, high, y);
  const f32x16 scaled = y * 1.44269504088896341f;
  const i32x16 n = __builtin_convertvector(scaled + select(scaled < splat(0), splat(-0.5f), splat(0.5f)), i32x16);
  const f32x16 whole = __builtin_convertvector(n, f32x16);
  const f32x16 r = (y - whole * 0.693359375f) + whole * 2.12194440e-4f;
  f32x16 p = splat(1.9841269841e-4f);
  p = p * r + 1.3888888889e-3f;
  p = p * r + 8.3333333333e-3f;
  p = p * r + 4.1666666667e-2f;
  p = p * r + 1.6666666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const f32x16 power = (f32x16)((n + 127) << 23);
  return select(under, splat(0), p * power);
}

WEFT_INLINE f32x16 sigmoid(f32x16 x) { return 1.0f / (1.0f + exp(-x)); }
WEFT_INLINE f32x16 silu(f32x16 x) { return x / (1.0f + exp(-x)); }

// log(1 + e^x) = max(x, 0) + log1p(e^-|x|), the second by 2 atanh(u / (2 + u)).
WEFT_INLINE f32x16 softplus(f32x16 x) {
  const f32x16 zero = splat(0), u = exp(-max(x, -x)), s = u / (2.0f + u), ss = s * s;
  f32x16 p = splat(1.0f / 15);
  p = p * ss + 1.0f / 13;
  p = p * ss + 1.0f / 11;
  p = p * ss + 1.0f / 9;
  p = p * ss + 1.0f / 7;
  p = p * ss + 1.0f / 5;
  p = p * ss + 1.0f / 3;
  p = p * ss + 1.0f;
  return max(x, zero) + 2.0f * s * p;
}

// What storing as T and reading back leaves of x.
template <class T>
WEFT_INLINE f32x16 rounded(f32x16 x) {
  if constexpr (sizeof(T) == sizeof(float)) return x;
  T kept[16];
  store(kept, x);
  return load(kept);
}

// ``count`` numbers, at most 16, and zeros behind them.
template <class T>
WEFT_INLINE f32x16 load_some(const T* from, int64_t count) {
  if (count >= 16) return load(from);
  alignas(64) float line[16] = {};
  for (int64_t i = 0; i < count; ++i) line[i] = widen(from[i]);
  return load(line);
}

template <class T>
WEFT_INLINE void store_some(T* to, f32x16 x, int64_t count) {
  if (count >= 16) return store(to, x);
  for (int64_t i = 0; i < count; ++i) narrow(to + i, x[i]);
}

}  // namespace
}  // namespace weft
