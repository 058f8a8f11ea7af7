#include "pack_twelve_bit.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>

#include "pool.hpp"

namespace weft {
namespace {

constexpr int64_t kRows = 16, kPairs = 4, kPairWords = 2 * kRows, kUnitWords = kPairs * kPairWords;
constexpr int64_t kHalfBytes = kUnitWords / 2, kUnitBytes = 3 * kHalfBytes;
constexpr int kCodes = 16;

// Where the word of a pair of columns and a row lies in its half of a unit: 16 bytes are four rows of the half's first
// pair, then the same rows of the second. Interleaving with as many upper bytes gives the words back.
int64_t byte_of(int64_t pair, int64_t row, int64_t word) { return row / 4 * 16 + pair % 2 * 8 + row % 4 * 2 + word; }

// Of a tile's first unit; two tiles take turns.
int64_t begin_of(int64_t tile, int64_t in) { return (tile / 2 * 2 * (in * kRows / kUnitWords) + tile % 2) * kUnitBytes; }

}  // namespace

void choose_highs(const uint16_t* words, int64_t tiles, int64_t in, uint8_t* highs, int64_t* counts) {
  const int64_t size = in * kRows;
  Pool::instance().for_each(tiles, static_cast<double>(size), [&](int64_t tile) {
    std::array<int64_t, 256> frequencies{};
    for (int64_t i = 0; i < size; ++i) ++frequencies[words[tile * size + i] >> 8];
    std::array<int, 256> order;
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + kCodes, order.end(), [&](int a, int b) {
      return frequencies[a] != frequencies[b] ? frequencies[a] > frequencies[b] : a < b;
    });
    counts[tile] = size;
    for (int code = 0; code < kCodes; ++code) {
      highs[tile * kCodes + code] = static_cast<uint8_t>(order[code]);
      counts[tile] -= frequencies[order[code]];
    }
  });
}

void pack_twelve_bit(const uint16_t* words, int64_t tiles, int64_t in, const uint8_t* highs, uint8_t* units, int64_t* odd) {
  const int64_t size = in * kRows;
  Pool::instance().for_each(tiles, 2.0 * static_cast<double>(size), [&](int64_t tile) {
    constexpr uint8_t none = kCodes;
    std::array<uint8_t, 256> code_of;
    code_of.fill(none);
    for (int code = 0; code < kCodes; ++code) code_of[highs[tile * kCodes + code]] = static_cast<uint8_t>(code);
    const uint16_t* from = words + tile * size;
    uint8_t* to = units + begin_of(tile, in);
    int64_t* next = odd + odd[tile];
    for (int64_t unit = 0; unit < size; unit += kUnitWords, to += 2 * kUnitBytes)
      for (int64_t i = 0; i < kHalfBytes; ++i) {
        // The words of a byte's place in the first and in the second half.
        uint8_t codes = 0;
        const int64_t row = i / 16 * 4 + i % 8 / 2, pair = i / 8 % 2, word = i % 2;
        for (int64_t half = 0; half < 2; ++half) {
          const uint16_t bits = from[unit + (2 * half + pair) * kPairWords + row * 2 + word];
          const uint8_t code = code_of[bits >> 8];
          to[half * kHalfBytes + i] = static_cast<uint8_t>(bits);
          codes = static_cast<uint8_t>(codes | (code == none ? 0 : code) << (4 * half));
        }
        to[2 * kHalfBytes + i] = codes;
      }
    for (int64_t i = 0; i < size; ++i)
      if (code_of[from[i] >> 8] == none) *next++ = i << 16 | from[i];
    *next = std::numeric_limits<int64_t>::max();
  });
}

void twelve_bit_rows(const Weight& weight, const int64_t* rows, int64_t count, uint16_t* out) {
  const int64_t units = weight.in / (2 * kPairs), size = weight.in * kRows;
  Pool::instance().for_each(count, static_cast<double>(weight.in), [&](int64_t at) {
    const int64_t tile = rows[at] / kRows, row = rows[at] % kRows;
    const uint8_t* from = static_cast<const uint8_t*>(weight.data) + begin_of(tile, weight.in);
    const uint8_t* highs = static_cast<const uint8_t*>(weight.scales) + tile * kCodes;
    uint16_t* const to = out + at * weight.in;
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
  });
}

}  // namespace weft
