#include "pack_twelve_bit.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels.hpp"
#include "pool.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace weft {
namespace {

constexpr int64_t kRows = 16, kPairs = 4, kPairWords = 2 * kRows, kUnitWords = kPairs * kPairWords;
constexpr int64_t kHalfBytes = kUnitWords / 2, kUnitBytes = 3 * kHalfBytes;
constexpr int kCodes = 16;
constexpr int64_t kTables = 8;

// Position of the word of a pair of columns and a row in its half of a unit: 16 bytes are four rows of the half's
// first pair, then the same rows of the second. Interleaving with the same number of upper bytes gives the words back.
int64_t byte_of(int64_t pair, int64_t row, int64_t word) { return row / 4 * 16 + pair % 2 * 8 + row % 4 * 2 + word; }

// Begin of a tile's first unit; two tiles take turns.
int64_t begin_of(int64_t tile, int64_t in) {
  return (tile / 2 * 2 * (in * kRows / kUnitWords) + tile % 2) * kUnitBytes;
}

using TileRows = std::array<const uint16_t*, kRows>;
using CodeTable = std::array<uint8_t, 256>;
using Frequencies = std::array<uint32_t, 256>;

// How often each upper byte occurs in a tile. Neighbours count in separate tables: a core that counts at an address
// that it has just written waits for that write. The tables begin at different distances from a page of 4 KiB, as a
// core takes equal distances for the same address.
Frequencies upper_bytes(const TileRows& from, int64_t in) {
  alignas(64) std::array<std::array<uint32_t, 256 + 16>, kTables> tables{};
  for (const uint16_t* row : from) {
    int64_t i = 0;
    for (; i + kTables <= in; i += kTables) {
      uint64_t low, high;
      std::memcpy(&low, row + i, sizeof low);
      std::memcpy(&high, row + i + 4, sizeof high);
      static_assert(kTables == 8, "two reads of four words");
      ++tables[0][low >> 8 & 255], ++tables[1][low >> 24 & 255], ++tables[2][low >> 40 & 255], ++tables[3][low >> 56];
      ++tables[4][high >> 8 & 255], ++tables[5][high >> 24 & 255], ++tables[6][high >> 40 & 255],
          ++tables[7][high >> 56];
    }
    for (; i < in; ++i) ++tables[0][row[i] >> 8];
  }
  Frequencies frequencies{};
  for (const auto& table : tables)
    for (size_t byte = 0; byte < 256; ++byte) frequencies[byte] += table[byte];
  return frequencies;
}

// The sixteen most frequent ones; of equally frequent ones the lower. Returns how many words have another.
int64_t choose_highs(const Frequencies& frequencies, int64_t words, uint8_t* highs) {
  std::array<int, 256> order;
  std::iota(order.begin(), order.end(), 0);
  const auto at = [&](int byte) { return frequencies[static_cast<size_t>(byte)]; };
  std::partial_sort(order.begin(), order.begin() + kCodes, order.end(),
                    [&](int a, int b) { return at(a) != at(b) ? at(a) > at(b) : a < b; });
  for (int code = 0; code < kCodes; ++code) {
    highs[code] = static_cast<uint8_t>(order[static_cast<size_t>(code)]);
    words -= at(order[static_cast<size_t>(code)]);
  }
  return words;
}

bool has_nonfinite(const TileRows& from, int64_t in, const Frequencies& frequencies) {
  if (!frequencies[0x7F] && !frequencies[0xFF]) return false;
  return std::any_of(from.begin(), from.end(), [&](const uint16_t* row) {
    return std::any_of(row, row + in, [](uint16_t bits) { return (bits & 0x7F80) == 0x7F80; });
  });
}

// The odd words of a unit: from the place ``unit * kUnitWords`` on, by place.
void note_odd(const TileRows& rows, int64_t unit, const CodeTable& code_of, std::vector<int64_t>& odd) {
  for (int64_t pair = 0; pair < kPairs; ++pair)
    for (int64_t row = 0; row < kRows; ++row)
      for (int64_t word = 0; word < 2; ++word) {
        const uint16_t bits = rows[static_cast<size_t>(row)][unit * 2 * kPairs + 2 * pair + word];
        if (code_of[bits >> 8] == kCodes)
          odd.push_back((unit * kUnitWords + pair * kPairWords + row * 2 + word) << 16 | bits);
      }
}

// Packs one unit, a weight at a time. Returns whether it has odd ones.
bool pack_unit(const TileRows& from, int64_t unit, const CodeTable& code_of, uint8_t* to) {
  uint8_t seen = 0;
  for (int64_t row = 0; row < kRows; ++row) {
    const uint16_t* words = from[static_cast<size_t>(row)] + unit * 2 * kPairs;
    for (int64_t place = 0; place < 4; ++place) {  // the words of one place in the first and in the second half
      const int64_t i = byte_of(place / 2, row, place % 2);
      const uint16_t first = words[place], second = words[place + 4];
      const uint8_t code = code_of[first >> 8], other = code_of[second >> 8];
      seen = static_cast<uint8_t>(seen | code | other);
      to[i] = static_cast<uint8_t>(first);
      to[kHalfBytes + i] = static_cast<uint8_t>(second);
      to[2 * kHalfBytes + i] = static_cast<uint8_t>((code & 15) | (other & 15) << 4);
    }
  }
  return seen & kCodes;
}

using PackUnit = bool (*)(const TileRows&, int64_t, const CodeTable&, uint8_t*);

#if defined(__x86_64__)
// The same, four rows in a vector: one permutation parts their bytes into [lower, 0-3 | 4-7 | upper, 0-3 | 4-7], and two
// lookups of 128 bytes give the codes.
__attribute__((target("avx512f,avx512bw,avx512vbmi"))) bool pack_unit_by_vectors(const TileRows& from, int64_t unit,
                                                                                 const CodeTable& code_of,
                                                                                 uint8_t* to) {
  alignas(64) static constexpr auto kParts = [] {
    std::array<uint8_t, 64> parts{};
    for (size_t i = 0; i < 64; ++i) {
      const size_t column = i / 16 % 2 * 4 + i % 16 / 8 * 2 + i % 2, row = i % 8 / 2;
      parts[i] = static_cast<uint8_t>(16 * row + 2 * column + i / 32);
    }
    return parts;
  }();
  const __m512i order = _mm512_load_si512(kParts.data());
  __m512i rows[4];
  for (size_t quarter = 0; quarter < 4; ++quarter) {
    const auto words = [&](size_t row) {
      return reinterpret_cast<const __m128i*>(from[4 * quarter + row] + unit * 2 * kPairs);
    };
    __m512i four = _mm512_castsi128_si512(_mm_loadu_si128(words(0)));
    four = _mm512_inserti32x4(four, _mm_loadu_si128(words(1)), 1);
    four = _mm512_inserti32x4(four, _mm_loadu_si128(words(2)), 2);
    four = _mm512_inserti32x4(four, _mm_loadu_si128(words(3)), 3);
    rows[quarter] = _mm512_permutexvar_epi8(order, four);
  }
  const __m512i lows01 = _mm512_shuffle_i32x4(rows[0], rows[1], 0x44),
                lows23 = _mm512_shuffle_i32x4(rows[2], rows[3], 0x44);
  const __m512i highs01 = _mm512_shuffle_i32x4(rows[0], rows[1], 0xEE),
                highs23 = _mm512_shuffle_i32x4(rows[2], rows[3], 0xEE);
  const uint8_t* const table = code_of.data();
  __m512i codes[2];
  for (int half = 0; half < 2; ++half) {
    const __m512i high =
        half ? _mm512_shuffle_i32x4(highs01, highs23, 0xDD) : _mm512_shuffle_i32x4(highs01, highs23, 0x88);
    const __m512i below = _mm512_permutex2var_epi8(_mm512_loadu_si512(table), high, _mm512_loadu_si512(table + 64));
    const __m512i above =
        _mm512_permutex2var_epi8(_mm512_loadu_si512(table + 128), high, _mm512_loadu_si512(table + 192));
    codes[half] = _mm512_mask_blend_epi8(_mm512_movepi8_mask(high), below, above);
  }
  const __m512i low_halves = _mm512_set1_epi8(15);
  _mm512_storeu_si512(to, _mm512_shuffle_i32x4(lows01, lows23, 0x88));
  _mm512_storeu_si512(to + kHalfBytes, _mm512_shuffle_i32x4(lows01, lows23, 0xDD));
  _mm512_storeu_si512(to + 2 * kHalfBytes,
                      _mm512_or_si512(_mm512_and_si512(codes[0], low_halves),
                                      _mm512_slli_epi16(_mm512_and_si512(codes[1], low_halves), 4)));
  return _mm512_test_epi8_mask(_mm512_or_si512(codes[0], codes[1]), _mm512_set1_epi8(kCodes)) != 0;
}
#endif

PackUnit best_pack_unit() {
#if defined(__x86_64__)
  if (kernels().has_twelve_bit_products() && __builtin_cpu_supports("avx512vbmi")) return pack_unit_by_vectors;
#endif
  return pack_unit;
}

}  // namespace

void OddWords::write(int64_t* out) const {
  int64_t next = static_cast<int64_t>(of_tile_.size());
  for (const std::vector<int64_t>& words : of_tile_) {
    *out++ = next;
    next += static_cast<int64_t>(words.size()) + 1;
  }
  for (const std::vector<int64_t>& words : of_tile_) {
    out = std::copy(words.begin(), words.end(), out);
    *out++ = std::numeric_limits<int64_t>::max();
  }
}

int64_t OddWords::size() const {
  size_t size = 2 * of_tile_.size();
  for (const std::vector<int64_t>& words : of_tile_) size += words.size();
  return static_cast<int64_t>(size);
}

std::optional<OddWords> pack_twelve_bit(const uint16_t* const* rows, int64_t tiles, int64_t in, int64_t odd_most,
                                        bool finite, uint8_t* highs, uint8_t* units) {
  const std::vector<uint16_t> zeros(static_cast<size_t>(in));
  const PackUnit pack = best_pack_unit();
  OddWords odd(tiles);
  std::atomic<int64_t> odd_count = 0;
  std::atomic<bool> refused = false;
  Pool::instance().for_each(tiles, 3.0 * static_cast<double>(in * kRows), [&](int64_t tile) {
    if (refused.load(std::memory_order_relaxed)) return;
    TileRows from;
    for (int64_t row = 0; row < kRows; ++row) {
      const uint16_t* own = rows[tile * kRows + row];
      from[static_cast<size_t>(row)] = own ? own : zeros.data();
    }
    const Frequencies frequencies = upper_bytes(from, in);
    uint8_t* const own_highs = highs + tile * kCodes;
    const int64_t others = choose_highs(frequencies, in * kRows, own_highs);
    if (odd_count.fetch_add(others, std::memory_order_relaxed) + others > odd_most ||
        (finite && has_nonfinite(from, in, frequencies))) {
      refused.store(true, std::memory_order_relaxed);
      return;
    }
    CodeTable code_of;
    code_of.fill(kCodes);
    for (int code = 0; code < kCodes; ++code) code_of[own_highs[code]] = static_cast<uint8_t>(code);
    odd.of(tile).reserve(static_cast<size_t>(others));
    uint8_t* to = units + begin_of(tile, in);
    for (int64_t unit = 0; unit < in / (2 * kPairs); ++unit, to += 2 * kUnitBytes)
      if (pack(from, unit, code_of, to)) note_odd(from, unit, code_of, odd.of(tile));
  });
  if (refused.load()) return std::nullopt;
  return odd;
}

void pack_tiles(const uint16_t* const* rows, int64_t tiles, int64_t in, uint16_t* out) {
  Pool::instance().for_each(tiles, static_cast<double>(in * kRows), [&](int64_t tile) {
    for (int64_t row = 0; row < kRows; ++row) {
      const uint16_t* from = rows[tile * kRows + row];
      uint16_t* to = out + tile * in * kRows + 2 * row;
      for (int64_t column = 0; column < in; column += 2, to += kPairWords) {
        if (from) std::memcpy(to, from + column, 2 * sizeof *to);
        else std::memset(to, 0, 2 * sizeof *to);
      }
    }
  });
}

namespace {

void twelve_bit_row(const Weight& weight, int64_t tile, int64_t row, uint16_t* to) {
  const int64_t units = weight.in / (2 * kPairs), size = weight.in * kRows;
  const uint8_t* from = static_cast<const uint8_t*>(weight.data) + begin_of(tile, weight.in);
  const uint8_t* highs = static_cast<const uint8_t*>(weight.scales) + tile * kCodes;
  for (int64_t unit = 0; unit < units; ++unit, from += 2 * kUnitBytes)
    for (int64_t pair = 0; pair < kPairs; ++pair)
      for (int64_t word = 0; word < 2; ++word) {
        const int64_t i = byte_of(pair, row, word), half = pair / 2;
        const int code = from[2 * kHalfBytes + i] >> (4 * half) & 15;
        to[(unit * kPairs + pair) * 2 + word] = static_cast<uint16_t>(highs[code] << 8 | from[half * kHalfBytes + i]);
      }
  for (const int64_t* odd = weight.odd + weight.odd[tile]; *odd >> 16 < size; ++odd) {
    const int64_t place = *odd >> 16;
    if (place % kPairWords / 2 == row) to[place / kPairWords * 2 + place % 2] = static_cast<uint16_t>(*odd);
  }
}

}  // namespace

void table_rows(const Weight& weight, const int64_t* rows, int64_t count, void* out) {
  const bool wide = weight.form == WeightForm::float32 || weight.form == WeightForm::float32_tiles;
  const bool tiled = weight.form == WeightForm::float32_tiles || weight.form == WeightForm::bfloat16_tiles;
  const int64_t bytes = weight.in * (wide ? 4 : 2), words = bytes / 4;
  Pool::instance().for_each(count, static_cast<double>(weight.in), [&](int64_t at) {
    const int64_t tile = rows[at] / kRows, row = rows[at] % kRows;
    uint8_t* const to = static_cast<uint8_t*>(out) + at * bytes;
    if (weight.form == WeightForm::bfloat16_twelve_bit) {
      twelve_bit_row(weight, tile, row, reinterpret_cast<uint16_t*>(to));
    } else if (tiled) {  // a float32, or two of bfloat16, are a word
      const uint8_t* from = static_cast<const uint8_t*>(weight.data) + (tile * words * kRows + row) * 4;
      for (int64_t word = 0; word < words; ++word) std::memcpy(to + word * 4, from + word * kRows * 4, 4);
    } else {
      std::memcpy(to, static_cast<const uint8_t*>(weight.data) + rows[at] * bytes, static_cast<size_t>(bytes));
    }
  });
}

}  // namespace weft
