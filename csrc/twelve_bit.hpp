// Tiles of bfloat16 in 12 bits a weight, without loss. A step that is bound by memory takes three quarters of the time.
//
//     bfloat16   s e e e e e e e | e m m m m m m m   the upper byte is a sign and an exponent without its last bit;
//                                                   16 of its 256 values cover nearly all weights of a tile
//
//     tile       16 bytes, indexed by a code of 4 bits       (Weight.scales)
//     unit       8 columns of 16 rows: 128 weights in 3 lines of 64 bytes
//                  lower bytes of columns 0-3 | lower bytes of columns 4-7 | codes, 0-3 in the lower halves
//     two tiles  a unit of one, a unit of the other, the next unit of the one, ...: one stream from memory
//     odd        the weights whose upper byte is none of the 16, in full: place in the tile << 16 | bits, by place,
//                and one beyond all places at the end of each tile's
//
// Sums are added in the order of tiles.hpp, so they are those of plain tiles to the last bit. A unit becomes the four
// vectors that it was (table lookups and interleaving of bytes, 9 instructions) as follows:
//
//     under 96 rows of x   in registers, each time that it is multiplied
//       block              up to 12 rows of x times two tiles: 24 sums in registers for the full width of W, and half a
//                          unit of both tiles at a time
//       x                  copied once: 8 columns of all rows of a block, the next 8, ..., as a separate stream
//       item               4 tiles, for all blocks of a part of x; prefetches are as in tiles.hpp
//       ahead              a unit of both tiles prefetches the next one into the L1 cache, and lines further on into
//                          the L2 cache
//       one block of x     neighbouring items are one stream
//     more                 an item is unpacked into the L2 cache, and multiplied with up to 512 KB of x like plain tiles;
//                          an item of W so wide that it leaves no room for x there: as above
//
// Without products of pairs (AVX512-BF16) rows of x are widened to float32 once, and a unit's weights in registers.
//
// Interleaving within 16 bytes fixes the order of a unit's bytes; pack_twelve_bit.cpp writes them.
//
// Rejected, for 32 rows: unpacking into memory (6 to 8 % slower than plain tiles: the L2 cache also writes and reads
// each line), whether at once, by the first block for the others, or in parallel with all blocks of the item before;
// 128 columns at a time, which stay in the L1 cache (15 % slower: sums go through memory); blocks of 24 rows and one
// tile (5 % slower: each product loads its own number of x, and a core loads one vector in the time of a product);
// tiles one after the other (a single row waits for its one sum, or reads two streams at four fifths of the speed of
// one).
#pragma once

#include "table.hpp"
#include "tile_units.hpp"

namespace weft {
namespace {

#if defined(__AVX512F__)
constexpr int kTwelveBitRows = 12;
constexpr int64_t kRowsUnpacked = 96;
constexpr int64_t kUnpackedItemBytes = 1 << 18;

// Lines to prefetch with each unit of both tiles: ``lines`` lines of 64 bytes, from ``from`` on.
struct Fetched {
  const uint8_t* from;
  int64_t lines;
};

// With each unit: lines of the stream itself, some way ahead, where OWN; else ``fetched``. A loop that counts lines would
// cost 8 rows 6 % of their time.
template <bool OWN>
WEFT_INLINE void fetch_lines(const uint8_t* unit, Fetched& fetched) {
  if constexpr (OWN)
    for (int line = 0; line < kStepBytes / 64; ++line)
      __builtin_prefetch(unit + tuning.fetched_ahead + line * 64, 0, 2);
  else
    for (int64_t line = 0; line < fetched.lines; ++line, fetched.from += 64) __builtin_prefetch(fetched.from, 0, 2);
}

// Prefetches the next unit of both tiles; 8 rows take a tenth less time with it. Their products fill a core's window of
// instructions, so the core would request a line too late and wait for the L2 cache.
WEFT_INLINE void fetch_next_unit(const uint8_t* unit) {
  for (int line = 0; line < kStepBytes / 64; ++line) __builtin_prefetch(unit + kStepBytes + line * 64, 0, 3);
}

// ROWS rows of x times tiles ``tile`` and the next, by products of pairs.
template <int ROWS, bool OWN>
WEFT_BF16 void twelve_bit_sums(const LinearArgs& args, int64_t tile, const Block<bf16>& block, Fetched fetched) {
  constexpr int TILES = kTwelveBitTiles;
  const int64_t units = args.weight.in / kUnitColumns;
  const bf16* x = block.x;
  const SqueezedTile tiles[TILES] = {{args.weight, tile}, {args.weight, tile + 1}};
  const int64_t* odd[TILES] = {tiles[0].odd, tiles[1].odd};
  const uint8_t* from = tiles[0].units;
  __m512 acc[ROWS][TILES];
  const auto each_sum = [&](const auto& body) WEFT_BF16_PART {
    each<ROWS>([&](auto r) WEFT_BF16_PART { each<TILES>([&](auto t) WEFT_BF16_PART { body(r, t); }); });
  };
  each_sum([&](auto r, auto t) WEFT_BF16_PART { acc[r][t] = _mm512_setzero_ps(); });
  for (int64_t unit = 0; unit < units; ++unit, from += kStepBytes, x += ROWS * kUnitColumns) {
    fetch_lines<OWN>(from, fetched);
    Half rare[TILES][2];
    bool has_odd[TILES];
    each<TILES>([&](auto t) WEFT_BF16_PART {
      has_odd[t] = __builtin_expect(*odd[t] >> 16 < (unit + 1) * kUnitWords, 0);
      if (has_odd[t]) odd[t] = unpack_odd(tiles[t], odd[t], unit, rare[t]);
    });
    each<2>([&](auto half) WEFT_BF16_PART {
      Half w[TILES];
      each<TILES>([&](auto t) WEFT_BF16_PART {
        w[t] = has_odd[t] ? rare[t][half] : unpacked<half>(from + t * kUnitBytes, tiles[t].upper_bytes());
      });
      each<2>([&](auto pair) WEFT_BF16_PART {
        each_sum([&](auto r, auto t) WEFT_BF16_PART {
          int32_t two;
          std::memcpy(&two, x + r * kUnitColumns + 4 * half + 2 * pair, sizeof two);
          acc[r][t] = _mm512_dpbf16_ps(acc[r][t], (__m512bh)w[t].pairs[pair], (__m512bh)_mm512_set1_epi32(two));
        });
      });
    });
  }
  f32x16 sums[ROWS][TILES];
  each_sum([&](auto r, auto t) WEFT_BF16_PART { sums[r][t] = (f32x16)acc[r][t]; });
  store_twelve_bit<ROWS>(args, tile, block.first, sums);
}

// The same by float32 products of widened weights, in the order of tiles.hpp.
template <int ROWS, bool OWN>
void twelve_bit_sums(const LinearArgs& args, int64_t tile, const Block<float>& block, Fetched fetched) {
  constexpr int TILES = kTwelveBitTiles;
  const int64_t units = args.weight.in / kUnitColumns;
  const float* x = block.x;
  const SqueezedTile tiles[TILES] = {{args.weight, tile}, {args.weight, tile + 1}};
  const int64_t* odd[TILES] = {tiles[0].odd, tiles[1].odd};
  const uint8_t* from = tiles[0].units;
  f32x16 acc[ROWS][TILES];
  const auto each_sum = [&](const auto& body) WEFT_WIDE_PART {
    each_wide<ROWS>([&](auto r) WEFT_WIDE_PART { each_wide<TILES>([&](auto t) WEFT_WIDE_PART { body(r, t); }); });
  };
  each_sum([&](auto r, auto t) WEFT_WIDE_PART { acc[r][t] = splat(0); });
  for (int64_t unit = 0; unit < units; ++unit, from += kStepBytes, x += ROWS * kUnitColumns) {
    fetch_lines<OWN>(from, fetched);
    fetch_next_unit(from);
    Half rare[TILES][2];
    bool has_odd[TILES];
    each_wide<TILES>([&](auto t) WEFT_WIDE_PART {
      has_odd[t] = __builtin_expect(*odd[t] >> 16 < (unit + 1) * kUnitWords, 0);
      if (has_odd[t]) odd[t] = unpack_odd(tiles[t], odd[t], unit, rare[t]);
    });
    each_wide<2>([&](auto half) WEFT_WIDE_PART {
      Half w[TILES];
      each_wide<TILES>([&](auto t) WEFT_WIDE_PART {
        w[t] = has_odd[t] ? rare[t][half] : unpacked<half>(from + t * kUnitBytes, tiles[t].upper_bytes());
      });
      each_wide<2>([&](auto pair) WEFT_WIDE_PART {
        f32x16 numbers[TILES];
        each_wide<TILES>([&](auto t) WEFT_WIDE_PART { numbers[t] = (f32x16)_mm512_slli_epi32(w[t].pairs[pair], 16); });
        each_sum([&](auto r, auto t)
                     WEFT_WIDE_PART { acc[r][t] += numbers[t] * x[r * kUnitColumns + 4 * half + 2 * pair]; });
        each_wide<TILES>([&](auto t) WEFT_WIDE_PART {
          numbers[t] = (f32x16)_mm512_and_si512(w[t].pairs[pair], _mm512_set1_epi32(static_cast<int>(0xFFFF0000)));
        });
        each_sum([&](auto r, auto t)
                     WEFT_WIDE_PART { acc[r][t] += numbers[t] * x[r * kUnitColumns + 4 * half + 2 * pair + 1]; });
      });
    });
  }
  f32x16 sums[ROWS][TILES];  // a copy: sums that are stored by counting would be in memory in the loop too
  each_sum([&](auto r, auto t) WEFT_WIDE_PART { sums[r][t] = acc[r][t]; });
  store_twelve_bit<ROWS>(args, tile, block.first, sums);
}

template <class X>
using SqueezedSums = void (*)(const LinearArgs&, int64_t, const Block<X>&, Fetched);

template <class X, bool OWN, int... R>
constexpr std::array<SqueezedSums<X>, sizeof...(R)> sums_of(std::integer_sequence<int, R...>) {
  return {{static_cast<SqueezedSums<X>>(&twelve_bit_sums<R + 1, OWN>)...}};
}
template <class X, bool OWN>
constexpr auto kTwelveBitSums = sums_of<X, OWN>(std::make_integer_sequence<int, kTwelveBitRows>{});

// Blocks [block, end) times an item's tiles [tile, last). ``next``: the item that this thread takes next; null: unknown,
// so lines further on in the same stream are prefetched.
template <class X>
void twelve_bit_item(const LinearArgs& args, int64_t tile, int64_t last, const Block<X>* block, const Block<X>* end,
                     const uint8_t* next) {
  const int64_t units = args.weight.in / kUnitColumns;
  const int64_t passes = (end - block) * ((last - tile + kTwelveBitTiles - 1) / kTwelveBitTiles);
  const int64_t lines = kOutTiles * kUnitBytes / 64;  // of an item, for each unit
  Fetched fetched = {next, next ? (lines + passes - 1) / passes : 0};
  for (; block < end; ++block)
    for (int64_t t = tile; t < last; t += kTwelveBitTiles) {
      const auto& sums = next ? kTwelveBitSums<X, false> : kTwelveBitSums<X, true>;
      sums[static_cast<size_t>(block->count - 1)](args, t, *block, fetched);
      fetched.from += fetched.lines * units * 64;
    }
}

// Tiles [tile, end) of an item times rows [first, last), by one thread.
template <class X>
void few_tiles(const LinearArgs& args, int64_t tile, int64_t end, int64_t first, int64_t last) {
  LinearArgs own = args;
  own.rows = last - first;
  own.x = static_cast<const X*>(args.x) + first * args.x_stride;
  own.out = static_cast<bf16*>(args.out) + first * args.weight.out;
  Scratch scratch;
  const Block<X>* const blocks = own_blocks<X>(own, kTwelveBitRows, scratch);
  twelve_bit_item<X>(own, tile, end, blocks, blocks + blocks_of(own.rows, kTwelveBitRows), nullptr);
}

// Four tiles from ``tile`` on, as they are in tiles.hpp.
const bf16* unpacked_item(const Weight& weight, int64_t tile, Scratch& scratch) {
  const int64_t units = weight.in / kUnitColumns;
  Half* const item = scratch.take<Half>(kOutTiles * units * 2);
  Half* to = item;
  for (int t = 0; t < kOutTiles; ++t) {
    const SqueezedTile one(weight, tile + t);
    const __m512i highs = one.upper_bytes();
    const int64_t* odd = one.odd;
    for (int64_t unit = 0; unit < units; ++unit, to += 2) {
      if (*odd >> 16 < (unit + 1) * kUnitWords) {
        odd = unpack_odd(one, odd, unit, to);
      } else {
        to[0] = unpacked<0>(one.units + unit * kStepBytes, highs);
        to[1] = unpacked<1>(one.units + unit * kStepBytes, highs);
      }
    }
  }
  return reinterpret_cast<const bf16*>(item);
}

// Multiplies the item from ``tile`` on, unpacked once, with rows [first, last) of x, like plain tiles. The item is
// complete.
template <class X>
void unpacked_item_products(const LinearArgs& args, int64_t tile, int64_t first, int64_t last, const char* next) {
  LinearArgs own = args;
  Scratch scratch;
  own.weight.data = unpacked_item(args.weight, tile, scratch);
  own.out = static_cast<bf16*>(args.out) + tile * kTile;
  own.bias = args.bias ? args.bias + tile * kTile : nullptr;
  tables::WEFT_TABLE::item_of_tiles(own, 0, first, last, next, std::is_same_v<X, float>);
}

// Many rows of x times a weight whose items, unpacked, leave most of the L2 cache to x: each item is unpacked once for a
// part of x, and multiplied as tiles are.
template <class X>
void unpacked_products(const LinearArgs& args) {
  const Weight& weight = args.weight;
  const int64_t tiles = (weight.out + kTile - 1) / kTile, items = (tiles + kOutTiles - 1) / kOutTiles;
  const int64_t bytes = kOutTiles * (weight.in / kUnitColumns) * kUnitBytes, width = weight.in * 2;
  const int64_t x_bytes = weight.in * static_cast<int64_t>(sizeof(X));
  const int64_t parts = (args.rows * x_bytes + tuning.unpacked_part_bytes - 1) / tuning.unpacked_part_bytes;
  const double nanoseconds = 0.0025 * static_cast<double>(kOutRows * width * args.rows / parts);
  Pool::instance().reserve(item_scratch<X>(weight, args.rows / parts + 1));
  Pool::instance().for_each_ahead(items * parts, nanoseconds, [&](int64_t at, int64_t after) {
    const int64_t item = at % items, part = at / items, tile = item * kOutTiles;
    const int64_t first = args.rows * part / parts, last = args.rows * (part + 1) / parts;
    if (weight.out - tile * kTile < kOutRows)
      return few_tiles<X>(args, tile, tiles, first, last);  // the last item is incomplete
    const char* next = after == Pool::kNone ? nullptr : static_cast<const char*>(weight.data) + after % items * bytes;
    unpacked_item_products<X>(args, tile, first, last, next);
  });
}

bool gains_unpacked(const LinearArgs& args) {
  return args.rows >= kRowsUnpacked && args.weight.in * kOutRows * 2 <= kUnpackedItemBytes;
}

template <class X>
void twelve_bit_products_of(const LinearArgs& args) {
  if (gains_unpacked(args)) return unpacked_products<X>(args);
  static thread_local std::vector<Block<X>> rows_of;
  static thread_local std::vector<X> copies;
  const int64_t count = blocks_of(args.rows, kTwelveBitRows);
  const size_t numbers = static_cast<size_t>(args.rows * args.weight.in);
  rows_of.resize(static_cast<size_t>(count));
  if (args.rows > 1 && copies.size() < numbers) copies.resize(numbers);
  const Block<X>* const blocks = rows_of.data();  // the caller's vector: every thread has a variable of this name
  set_blocks(args, kTwelveBitRows, rows_of.data(), copies.data(), [&](int64_t blocks_in_all, const auto& job) {
    Pool::instance().for_each(blocks_in_all, static_cast<double>(args.weight.in), job);
  });
  const Weight& weight = args.weight;
  const int64_t tiles = (weight.out + kTile - 1) / kTile, items = (tiles + kOutTiles - 1) / kOutTiles;
  const int64_t bytes = kOutTiles * (weight.in / kUnitColumns) * kUnitBytes, width = weight.in * 2;
  const double nanoseconds =
      0.04 * static_cast<double>(bytes) + 0.0025 * static_cast<double>(kOutRows * width * args.rows);
  const auto last_of = [&](int64_t item) { return item + 1 < items ? (item + 1) * kOutTiles : tiles; };
  if (count == 1) {
    // Neighbouring items are one stream from memory, as each stream begins slowly: four for a thread.
    const int64_t most = 4 * Pool::instance().threads(), streams = items < most ? items : most;
    const double each = nanoseconds * static_cast<double>(items) / static_cast<double>(streams);
    return Pool::instance().for_each(streams, each, [&](int64_t stream) {
      const int64_t first = items * stream / streams, end = items * (stream + 1) / streams;
      twelve_bit_item<X>(args, first * kOutTiles, last_of(end - 1), blocks, blocks + 1, nullptr);
    });
  }
  // Parts of x that stay in the L2 cache, nearly of one size.
  const int64_t fit = tuning.part_bytes / (weight.in * static_cast<int64_t>(sizeof(X))) / kTwelveBitRows,
                together = 2 * fit > 8 ? 2 * fit : 8;
  const int64_t parts = (count + together - 1) / together;
  const auto work = [&](int64_t at, int64_t after) {
    const int64_t item = at % items, part = at / items;
    const uint8_t* next =
        after == Pool::kNone ? nullptr : static_cast<const uint8_t*>(weight.data) + after % items * bytes;
    twelve_bit_item<X>(args, item * kOutTiles, last_of(item), blocks + count * part / parts,
                       blocks + count * (part + 1) / parts, next);
  };
  Pool::instance().for_each_ahead(items * parts, nanoseconds / static_cast<double>(parts), work);
}

// Tiles [tile, end) of an item times all rows of x, by one thread.
template <class X>
void twelve_bit_tiles(const LinearArgs& args, int64_t tile, int64_t end) {
  if (gains_unpacked(args) && args.weight.out - tile * kTile >= kOutRows)
    return unpacked_item_products<X>(args, tile, 0, args.rows, nullptr);
  few_tiles<X>(args, tile, end, 0, args.rows);
}

void twelve_bit_products(const LinearArgs& args) {
  if (has_bf16_dot()) return twelve_bit_products_of<bf16>(args);
  with_widened_rows(args, twelve_bit_products_of<float>);
}

#endif

}  // namespace
}  // namespace weft
