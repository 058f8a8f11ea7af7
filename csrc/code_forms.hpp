// Codes of int8, int6 and int4 tiles in memory (linear.hpp), and the zeros that are subtracted from them.
#pragma once

#include "linear_inputs.hpp"

namespace weft {
namespace {

template <int BITS>
constexpr int64_t tile_line_bytes() {
  return kTile * kLine * BITS / 8;
}

WEFT_INLINE i32x16 tile_zeros(const Weight& weight, int64_t at) { return (i32x16)load_bytes(weight.zeros + at); }

template <int BITS>
constexpr int kMiddle = 1 << (BITS - 1);

// The number to subtract from a code: the middle, a number of its group, or nothing. Minimums are subtracted from the
// totals. ``looked_up``: a code is a place in a table of bytes, whose middle is that of int8.
enum class Zero { middle, of_group, none, looked_up };

[[maybe_unused]] Zero zero_of(const Weight& weight) {
  if (weight.table) return Zero::looked_up;
  if (weight.minimums) return weight.middle ? Zero::middle : Zero::none;
  return weight.zeros ? Zero::of_group : Zero::middle;
}

template <int BITS, Zero ZERO>
constexpr int kMiddleOf = ZERO == Zero::looked_up ? kMiddle<8> : kMiddle<BITS>;

// Bytes of ``table`` for codes of four bits, each in a byte.
WEFT_INLINE u32x16 looked_up(u32x16 codes, const uint8_t* table) {
#if defined(__AVX512F__)
  const __m512i numbers = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return (u32x16)_mm512_shuffle_epi8(numbers, (__m512i)codes);
#elif defined(__AVX2__)
  const __m256i numbers = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return {(u32x8)_mm256_shuffle_epi8(numbers, (__m256i)codes.low),
          (u32x8)_mm256_shuffle_epi8(numbers, (__m256i)codes.high)};
#elif defined(__aarch64__)
  uint8x16_t quarters[4];
  std::memcpy(quarters, &codes, sizeof codes);
  for (uint8x16_t& quarter : quarters) quarter = vqtbl1q_u8(vld1q_u8(table), quarter);
  std::memcpy(&codes, quarters, sizeof codes);
  return codes;
#else
  uint8_t bytes[64];
  std::memcpy(bytes, &codes, sizeof codes);
  for (uint8_t& byte : bytes) byte = table[byte];
  std::memcpy(&codes, bytes, sizeof codes);
  return codes;
#endif
}

// Loads columns 8 pair ... 8 pair + 7 of the 16 columns of a tile at ``from``: a byte for each of 4 columns, twice.
template <int BITS>
WEFT_INLINE void pair_codes(const uint8_t* from, int pair, u32x16* codes) {
  codes[0] = load_as<u32x16>(from + (BITS == 8 ? 2 : 1) * pair * 64);
  if constexpr (BITS == 8) {
    codes[1] = load_as<u32x16>(from + (2 * pair + 1) * 64);
  } else {
    codes[1] = (codes[0] >> 4) & 0x0F0F0F0Fu;
    codes[0] &= 0x0F0F0F0Fu;
  }
  if constexpr (BITS == 6) {
    const u32x16 high = load_as<u32x16>(from + 128);  // two bits for each of 16 columns, in their order
    codes[0] |= (pair ? high : high << 4) & 0x30303030u;
    codes[1] |= (pair ? high >> 2 : high << 2) & 0x30303030u;
  }
}

// The same as bytes from which their middle is subtracted.
template <int BITS, Zero ZERO>
WEFT_INLINE void pair_numbers(const Weight& weight, const uint8_t* from, int pair, u32x16* codes) {
  pair_codes<BITS>(from, pair, codes);
  if constexpr (ZERO == Zero::looked_up)
    for (int quad = 0; quad < 2; ++quad) codes[quad] = looked_up(codes[quad], weight.table);
}

}  // namespace
}  // namespace weft
