// Sixteen floats at a time: one AVX-512 register, two of AVX2 or four of SSE and NEON, by name (``Two``). Intrinsics
// appear only where the compiler does not find the instruction (widening bytes). Each file that includes this is compiled
// once per instruction set (CMakeLists.txt). Everything here is inlined and local to that compilation.
//
// Arithmetic is float32. bf16 is widened by a shift, as it is the upper half of the float of its value. So a kernel over
// bf16 pages does the same sums as one over float32 pages.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#endif

namespace weft {
namespace {

#define WEFT_INLINE inline __attribute__((always_inline))

// ``bytes`` bytes of numbers of type T, as one vector of the compiler.
template <class T, int bytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(bytes)));
};
template <class T, int bytes>
using Vector = typename VectorOf<T, bytes>::type;

template <class Half>
struct Two;
template <class T>
constexpr bool kIsTwo = false;
template <class Half>
constexpr bool kIsTwo<Two<Half>> = true;

typedef Vector<uint16_t, 32> u16x16;

#if defined(__AVX512F__)
typedef Vector<float, 64> f32x16;
typedef Vector<int32_t, 64> i32x16;
typedef Vector<uint32_t, 64> u32x16;
typedef Vector<float, 32> f32x8;
#else
#if defined(__AVX2__)
typedef Vector<float, 32> f32x8;
typedef Vector<int32_t, 32> i32x8;
typedef Vector<uint32_t, 32> u32x8;
#else
typedef Two<Vector<float, 16>> f32x8;
typedef Two<Vector<int32_t, 16>> i32x8;
typedef Two<Vector<uint32_t, 16>> u32x8;
#endif
typedef Two<f32x8> f32x16;
typedef Two<i32x8> i32x16;
typedef Two<u32x8> u32x16;
#endif

// Two registers, or twice two, by name, with the operators of one. GCC keeps its own vectors of 64 bytes in memory where
// registers are smaller, and converts them in pieces: with AVX2 products took ten times as long, norms and attention
// three to ten times.
template <class Half>
struct Two {
  Half low, high;

  Two() = default;
  WEFT_INLINE Two(Half low, Half high) : low(low), high(high) {}
  // The bits of another type.
  template <class Other>
  WEFT_INLINE explicit Two(const Two<Other>& x) : low((Half)x.low), high((Half)x.high) {}
  static constexpr int64_t kHalf = sizeof(Half) / 4;
  WEFT_INLINE auto operator[](int64_t i) const { return i < kHalf ? low[i] : high[i - kHalf]; }
  WEFT_INLINE auto& operator[](int64_t i) { return i < kHalf ? low[i] : high[i - kHalf]; }
};
template <class Half>
Two(Half, Half) -> Two<Half>;

// clang-format off: it takes op##= for an assignment.
#define WEFT_OPERATOR(op)                                                                                             \
  template <class H>                                                                                                  \
  WEFT_INLINE Two<H> operator op(const Two<H>& a, const Two<H>& b) {                                                  \
    return {a.low op b.low, a.high op b.high};                                                                        \
  }                                                                                                                   \
  template <class H, class S, class = std::enable_if_t<std::is_arithmetic_v<S>>>                                      \
  WEFT_INLINE Two<H> operator op(const Two<H>& a, S b) {                                                              \
    return {a.low op b, a.high op b};                                                                                 \
  }                                                                                                                   \
  template <class H, class S, class = std::enable_if_t<std::is_arithmetic_v<S>>>                                      \
  WEFT_INLINE Two<H> operator op(S a, const Two<H>& b) {                                                              \
    return {a op b.low, a op b.high};                                                                                 \
  }                                                                                                                   \
  template <class H, class B>                                                                                         \
  WEFT_INLINE Two<H>& operator op##=(Two<H>& a, const B& b) {                                                         \
    return a = a op b;                                                                                                \
  }
// clang-format on
WEFT_OPERATOR(+)
WEFT_OPERATOR(-)
WEFT_OPERATOR(*)
WEFT_OPERATOR(/)
WEFT_OPERATOR(&)
WEFT_OPERATOR(|)
WEFT_OPERATOR(^)
WEFT_OPERATOR(<<)
WEFT_OPERATOR(>>)
#undef WEFT_OPERATOR

// All ones where it holds, as 32-bit integers.
#define WEFT_COMPARISON(op)                                                      \
  template <class H>                                                             \
  WEFT_INLINE auto operator op(const Two<H>& a, const Two<H>& b) {               \
    return Two{a.low op b.low, a.high op b.high};                                \
  }                                                                              \
  template <class H, class S, class = std::enable_if_t<std::is_arithmetic_v<S>>> \
  WEFT_INLINE auto operator op(const Two<H>& a, S b) {                           \
    return Two{a.low op b, a.high op b};                                         \
  }
WEFT_COMPARISON(<)
WEFT_COMPARISON(>)
WEFT_COMPARISON(<=)
WEFT_COMPARISON(>=)
WEFT_COMPARISON(==)
WEFT_COMPARISON(!=)
#undef WEFT_COMPARISON

template <class H>
WEFT_INLINE Two<H> operator-(const Two<H>& x) {
  return {-x.low, -x.high};
}
template <class H>
WEFT_INLINE Two<H> operator~(const Two<H>& x) {
  return {~x.low, ~x.high};
}

// ``yes`` where ``chosen`` is all ones, ``no`` where it is 0.
template <class M, class T>
WEFT_INLINE T chosen_of(const M& chosen, const T& yes, const T& no) {
  if constexpr (kIsTwo<T>) return {chosen_of(chosen.low, yes.low, no.low), chosen_of(chosen.high, yes.high, no.high)};
  else return chosen ? yes : no;
}

// A vector of the compiler in two: numbers of type T in ``bytes`` bytes each.
template <class T, int bytes, class From>
WEFT_INLINE Two<Vector<T, bytes>> halves_of(const From& x) {
  Vector<T, bytes> halves[2];
  static_assert(sizeof halves == sizeof x);
  std::memcpy(halves, &x, sizeof x);
  return {halves[0], halves[1]};
}

// Lanes 0 to 7 and 8 to 15.
template <class T>
WEFT_INLINE auto low_half(const T& x) {
  if constexpr (kIsTwo<T>) return x.low;
  else return halves_of<float, sizeof(T) / 2>(x).low;
}
template <class T>
WEFT_INLINE auto high_half(const T& x) {
  if constexpr (kIsTwo<T>) return x.high;
  else return halves_of<float, sizeof(T) / 2>(x).high;
}

// ``first``, ``first`` + 1, ...
template <class To>
WEFT_INLINE To lane_numbers(int first = 0) {
  if constexpr (kIsTwo<To>) {
    typedef decltype(To::low) Half;
    return {lane_numbers<Half>(first), lane_numbers<Half>(first + static_cast<int>(sizeof(Half) / 4))};
  } else {
    To x;
    for (int i = 0; i < static_cast<int>(sizeof(To) / 4); ++i) x[i] = first + i;
    return x;
  }
}

// Each number in the type of ``To``'s numbers.
template <class To, class From>
WEFT_INLINE To converted(const From& x) {
  if constexpr (kIsTwo<To> && kIsTwo<From>) {
    typedef decltype(To::low) Half;
    return {converted<Half>(x.low), converted<Half>(x.high)};
  } else if constexpr (kIsTwo<To>) {  // from smaller numbers
    typedef std::remove_cvref_t<decltype(x[0])> Number;
    typedef decltype(To::low) Half;
    const auto halves = halves_of<Number, sizeof(From) / 2>(x);
    return {converted<Half>(halves.low), converted<Half>(halves.high)};
  } else if constexpr (kIsTwo<From>) {  // to smaller numbers
    typedef Vector<std::remove_cvref_t<decltype(To{}[0])>, sizeof(To) / 2> Half;
    const Half halves[2] = {converted<Half>(x.low), converted<Half>(x.high)};
    To y;
    std::memcpy(&y, halves, sizeof y);
    return y;
  } else {
    return __builtin_convertvector(x, To);
  }
}
WEFT_INLINE u32x16 widened_bits(u16x16 x) { return converted<u32x16>(x); }

// The bytes at ``from``.
template <class To>
WEFT_INLINE To load_as(const void* from) {
  if constexpr (kIsTwo<To>) {
    typedef decltype(To::low) Half;
    return {load_as<Half>(from), load_as<Half>(static_cast<const char*>(from) + sizeof(Half))};
  } else {
    To x;
    std::memcpy(&x, from, sizeof x);
    return x;
  }
}
template <class From>
WEFT_INLINE void store_as(void* to, const From& x) {
  if constexpr (kIsTwo<From>) {
    store_as(to, x.low);
    store_as(static_cast<char*>(to) + sizeof x.low, x.high);
  } else {
    std::memcpy(to, &x, sizeof x);
  }
}

// 16 bytes, each in 32 bits. GCC widens bytes to 16 bits and these to 32 in registers, and both at once in memory.
template <class To, class Byte, class Wide>
WEFT_INLINE To widened_bytes(const void* from) {
  typedef Vector<Byte, 16> Bytes;
  return converted<To>(converted<Two<Vector<Wide, 16>>>(load_as<Bytes>(from)));
}

struct bf16 {
  uint16_t bits;
};

WEFT_INLINE f32x16 splat(float x) { return x - f32x16{}; }  // 0 + x would be an addition: of -0 it makes 0

WEFT_INLINE f32x16 load(const float* from) { return load_as<f32x16>(from); }

WEFT_INLINE f32x16 load(const bf16* from) {
  u16x16 x;
  std::memcpy(&x, from, sizeof x);
  return (f32x16)(widened_bits(x) << 16);
}

WEFT_INLINE void store(float* to, f32x16 x) { store_as(to, x); }

// Round to nearest even; NaN stays NaN.
#if defined(__AVX512F__)
// Numbers whose upper halves are x in bfloat16.
WEFT_INLINE __m512i rounded_to_half(f32x16 x) {
  const __m512i bits = (__m512i)x, odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7FFF));
  const __mmask16 nan = _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
}
#endif

WEFT_INLINE void store(bf16* to, f32x16 x) {
#if defined(__AVX512F__)
  const __m512i halves = _mm512_srli_epi32(rounded_to_half(x), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(halves));
#else
  const u32x16 bits = (u32x16)x;
  const u32x16 rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const u32x16 nan = (u32x16)(x != x);
  const u16x16 half = converted<u16x16>((rounded & ~nan) | (((bits >> 16) | 0x40) & nan));
  std::memcpy(to, &half, sizeof half);
#endif
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
  const u32x16 pairs = load_as<u32x16>(from);
  *first = (f32x16)(pairs << 16);
  *second = (f32x16)(pairs & 0xFFFF0000u);
}

// 16 bytes, 0 to 255.
WEFT_INLINE u32x16 load_bytes(const uint8_t* from) {
#if defined(__AVX512F__)  // of the lines below, GCC 12 makes 16 loads
  return (u32x16)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
  const auto eight = [](const uint8_t* of) {
    return (u32x8)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(of)));
  };
  return {eight(from), eight(from + 8)};
#else
  return widened_bytes<u32x16, uint8_t, uint16_t>(from);
#endif
}

// 16 signed bytes.
WEFT_INLINE f32x16 load_int8(const uint8_t* from) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  const auto eight = [](const uint8_t* of) {
    return (f32x8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(of))));
  };
  return {eight(from), eight(from + 8)};
#else
  return converted<f32x16>(widened_bytes<i32x16, int8_t, int16_t>(from));
#endif
}

// 16 bytes of two halves each, 0 to 15: the low ones and the high ones, minus 8.
WEFT_INLINE void load_int4(const uint8_t* from, f32x16* low, f32x16* high) {
  const u32x16 wide = load_bytes(from);
#if defined(__AVX512F__)
  const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  *low = (f32x16)_mm512_permutexvar_ps((__m512i)wide, values);  // reads the lowest four bits only
  *high = (f32x16)_mm512_permutexvar_ps((__m512i)(wide >> 4), values);
#else
  *low = converted<f32x16>((i32x16)(wide & 15) - 8);
  *high = converted<f32x16>((i32x16)(wide >> 4) - 8);
#endif
}

WEFT_INLINE f32x16 select(i32x16 chosen, f32x16 yes, f32x16 no) {
  return (f32x16)(((i32x16)yes & chosen) | ((i32x16)no & ~chosen));
}

WEFT_INLINE f32x16 max(f32x16 a, f32x16 b) { return select(a > b, a, b); }
WEFT_INLINE f32x16 min(f32x16 a, f32x16 b) { return select(a < b, a, b); }

// a b + c, rounded once where the CPU can: kernels that share a sum bit for bit say so, and leave no choice to the
// compiler.
template <class V>
WEFT_INLINE V fused(V a, V b, V c) {
#if defined(__AVX512F__)
  return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  if constexpr (kIsTwo<V>) {
    return {fused(a.low, b.low, c.low), fused(a.high, b.high, c.high)};
  } else {
#if defined(__AVX2__)
    return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (V)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
  }
#endif
}

typedef Vector<float, 16> f32x4;

WEFT_INLINE float sum(f32x16 x) {
  const f32x8 eight = low_half(x) + high_half(x);
  f32x4 quarters[2];
  std::memcpy(quarters, &eight, sizeof eight);
  const f32x4 four = quarters[0] + quarters[1];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// The sums of 16 vectors, each added as ``sum`` adds it.
WEFT_INLINE f32x16 sums_of(const float (*rows)[16]) {
#if defined(__AVX512F__)
  __m512 x[16];
  for (int i = 0; i < 16; ++i) x[i] = _mm512_loadu_ps(rows[i]);
  // Each step adds the halves of the rest of a sum, and puts two vectors into one: lanes 8 apart, 4, 2, 1.
  const auto halves = [&](int count, __m512i low, __m512i high) __attribute__((always_inline)) {
    for (int i = 0; i < count; ++i)
      x[i] = _mm512_add_ps(_mm512_permutex2var_ps(x[i], low, x[i + count]),
                           _mm512_permutex2var_ps(x[i], high, x[i + count]));
  };
  halves(8, _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
         _mm512_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
  halves(4, _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
         _mm512_setr_epi32(4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
  halves(2, _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29),
         _mm512_setr_epi32(2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31));
  halves(1, _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
         _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31));
  // Vectors i and i + count went together at each step: lane l is of row 8 b0 + 4 b1 + 2 b2 + b3, b0 l's lowest bit.
  return (f32x16)_mm512_permutexvar_ps(_mm512_setr_epi32(0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15), x[0]);
#else
  float sums[16];
  for (int i = 0; i < 16; ++i) sums[i] = sum(load(rows[i]));
  return load(sums);
#endif
}

// The largest number of x without NaN; with one, any of them or NaN.
WEFT_INLINE float largest(f32x16 x) {
  const f32x8 low = low_half(x), high = high_half(x), eight = chosen_of(low > high, low, high);
  f32x4 quarters[2];
  std::memcpy(quarters, &eight, sizeof eight);
  const f32x4 four = quarters[0] > quarters[1] ? quarters[0] : quarters[1];
  const float even = four[0] > four[2] ? four[0] : four[2], odd = four[1] > four[3] ? four[1] : four[3];
  return even > odd ? even : odd;
}

// e^x to 2 units in the last place for x in [-87, 88]; below it is 0 or the least normal, above e^88; NaN stays
// NaN. Cody and Waite's reduction to |r| <= ln2 / 2 and a Taylor polynomial of degree 7.
WEFT_INLINE f32x16 exp(f32x16 x) {
#if defined(__AVX512F__)
  // For a NaN, min and max return the second operand.
  const __m512 y = _mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_max_ps(_mm512_set1_ps(-87.0f), (__m512)x));
  const __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(y, _mm512_set1_ps(1.44269504088896341f)),
                                            _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const f32x16 r = ((f32x16)y - (f32x16)whole * 0.693359375f) + (f32x16)whole * 2.12194440e-4f;
#else
  const f32x16 low = splat(-87.0f), high = splat(88.0f);
  const i32x16 under = x < low;
  f32x16 y = select(under, low, x);
  y = select(y > high, high, y);
  const f32x16 scaled = y * 1.44269504088896341f;
  const i32x16 n = converted<i32x16>(scaled + select(scaled < splat(0), splat(-0.5f), splat(0.5f)));
  const f32x16 whole = converted<f32x16>(n);
  const f32x16 r = (y - whole * 0.693359375f) + whole * 2.12194440e-4f;
#endif
  f32x16 p = splat(1.9841269841e-4f);
  p = p * r + 1.3888888889e-3f;
  p = p * r + 8.3333333333e-3f;
  p = p * r + 4.1666666667e-2f;
  p = p * r + 1.6666666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
#if defined(__AVX512F__)
  const __mmask16 seen = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
  return (f32x16)_mm512_maskz_scalef_ps(seen, (__m512)p, whole);
#else
  const f32x16 power = (f32x16)((n + 127) << 23);
  return select(under, splat(0), p * power);
#endif
}

WEFT_INLINE f32x16 sigmoid(f32x16 x) { return 1.0f / (1.0f + exp(-x)); }
WEFT_INLINE f32x16 silu(f32x16 x) { return x / (1.0f + exp(-x)); }

// x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), as a sigmoid.
WEFT_INLINE f32x16 gelu_tanh(f32x16 x) {
  return x / (1.0f + exp(x * (-1.5957691216057308f - 0.07135481282725557f * x * x)));
}

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

// x after storing it as T and reading it back.
template <class T>
WEFT_INLINE f32x16 rounded(f32x16 x) {
  if constexpr (sizeof(T) == sizeof(float)) return x;
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, bf16>)  // without the way through memory
    return (f32x16)_mm512_and_si512(rounded_to_half(x), _mm512_set1_epi32(static_cast<int>(0xFFFF0000)));
#endif
  T narrow_lanes[16];
  store(narrow_lanes, x);
  return load(narrow_lanes);
}

// ``count`` numbers, at most 16, followed by zeros.
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
