// Matrix products y = x W^T where both sides are int8 (``--quantize w8a8``): W is rounded once, x at each product.
//
//   x      rounded by rows and parts of 128 columns, to nearest even; a scale for each part
//   W      the int8 tiles of linear.hpp: codes 0..255 around 128, a scale for 128 columns or more
//
//   item   64 rows of W: four tiles
//   block  6 rows of x times 4 tiles: 24 sums in registers for the 128 columns of a part      vpdpbusd, int32
//          then total += float(sum) * (scale of W * scale of x), part after part             float32, in the L1 cache
//
//   (code - 128) x = code x - 128 x:   a sum begins at -128 times the sum of its x, so W need not be signed. A matrix
//                                      unit multiplies signed bytes, and has a chunk of W as such for all rows
//
// Sums of a part are integers below 2^24, exact in any order and in float32 as well: where there is no vpdpbusd they
// are made of floats. Totals are made part after part, each product rounded before it is added (``alone``; a fused one
// would round once less). So every CPU, and torch (ops/byte_linear/cpu.py), gives the same bits for a row of x,
// whatever other rows there are.
//
// A part of x with a number that is not finite has a scale of NaN: its row is NaN, no other.
//
// Why parts of 128, not of 32 (as linear.hpp rounds) nor the whole row: docs/decisions/quantized-weights.md (0016).
#pragma once

#include "flush_denormals.hpp"
#include "linear.hpp"
#include "matrix_unit.hpp"
#include "piece_output.hpp"

namespace weft {
namespace {

constexpr int64_t kPart = 128;          // columns of x that share a scale
constexpr float kLeastOfPart = 1e-30f;  // a part that stays below is zeros: 127 over it would be too large for a float
#if defined(__AVX512F__) || defined(__AVX2__)
constexpr int kBlockRows = 6;
#else
constexpr int kBlockRows = 2;
#endif

// Returns x as a number that is new to the compiler, so nothing is fused with the operation that computed it.
template <class V>
WEFT_INLINE V alone(V x) {
  if constexpr (kIsTwo<V>) {
    return {alone(x.low), alone(x.high)};
  } else {
#if defined(__x86_64__)
    __asm__("" : "+v"(x));
#elif defined(__aarch64__)
    __asm__("" : "+w"(x));
#else
    __asm__("" : "+m"(x));
#endif
    return x;
  }
}

WEFT_INLINE i32x16 larger(i32x16 a, i32x16 b) {
#if defined(__AVX512F__)
  return (i32x16)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
  return chosen_of(a > b, a, b);
#endif
}

WEFT_INLINE int32_t largest_of(i32x16 x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)x);
#else
  int32_t most = x[0];
  for (int i = 1; i < 16; ++i) most = x[i] > most ? x[i] : most;
  return most;
#endif
}

WEFT_INLINE int32_t sum_of(i32x16 x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)x);
#else
  int32_t total = 0;
  for (int i = 0; i < 16; ++i) total += x[i];
  return total;
#endif
}

WEFT_INLINE void store_codes(float* to, i32x16 codes) { store(to, converted<f32x16>(codes)); }

WEFT_INLINE void store_codes(int8_t* to, i32x16 codes) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)codes));
#else
  for (int i = 0; i < 16; ++i) to[i] = static_cast<int8_t>(codes[i]);
#endif
}

// Rows of x, rounded. ``Code``: int8_t for products of bytes, float where there are none. ``TILES``: codes are in
// tiles of a matrix unit, [rows / 16][parts][2][16 rows][64 columns], else in rows, [rows][padded].
template <class Code, bool TILES = false>
struct ByteRows {
  // Tiles whose rows cross lines took the unit twice the time.
  struct alignas(64) Line {
    Code codes[64 / sizeof(Code)];
  };
  int64_t parts = 0, padded = 0;
  std::vector<Line> lines;
  std::vector<float> scales;    // [rows][parts]; for tiles [rows / 16][parts][16]
  std::vector<int32_t> starts;  // [rows][parts]: -128 times the sum of the codes; none for tiles, whose W is signed

  void resize(int64_t rows, int64_t in) {
    parts = (in + kPart - 1) / kPart;
    padded = parts * kPart;
    const int64_t places = TILES ? (rows + kTile - 1) / kTile * kTile : rows;
    lines.resize(static_cast<size_t>(places * padded) / (64 / sizeof(Code)));
    scales.resize(static_cast<size_t>(places * parts));
    if (!TILES) starts.resize(static_cast<size_t>(rows * parts));
  }

  Code* codes() { return lines.data()->codes; }
  const Code* codes() const { return lines.data()->codes; }

  template <class T>
  void set_row(int64_t row, const T* x, int64_t in) {
    for (int64_t part = 0; part < parts; ++part) set_part(row, part, x + part * kPart, in - part * kPart);
  }

  // The first ``count`` values are there; the rest of the 128 are zero.
  template <class T>
  void set_part(int64_t row, int64_t part, const T* x, int64_t count) {
    constexpr int kVectors = kPart / 16;
    f32x16 values[kVectors];
    i32x16 most = {};  // bits without their sign are in the order of the numbers, with NaN above all
    for (int i = 0; i < kVectors; ++i) {
      values[i] = count > 16 * i ? load_some(x + 16 * i, count - 16 * i) : splat(0);
      most = larger(most, (i32x16)values[i] & 0x7FFFFFFF);
    }
    const int32_t largest_bits = largest_of(most);
    float reach;
    std::memcpy(&reach, &largest_bits, sizeof reach);
    const bool finite = largest_bits < 0x7F800000, some = finite && reach >= kLeastOfPart;
    const f32x16 up = splat(some ? 127.0f / reach : 0), whole = splat(12582912.0f);  // 1.5 * 2^23: its last bit is 1
    Code* const to = codes() + (TILES ? (row / kTile * parts + part) * kPart * kTile + row % kTile * (kPart / 2)
                                      : row * padded + part * kPart);
    i32x16 total = {};
    for (int i = 0; i < kVectors; ++i) {
      const i32x16 rounded = some ? (i32x16)(alone(values[i] * up) + whole) - (i32x16)whole : i32x16{};
      total += rounded;
      store_codes(to + (TILES ? i / 4 * (kPart / 2) * kTile + i % 4 * 16 : 16 * i), rounded);
    }
    const int64_t at = TILES ? (row / kTile * parts + part) * kTile + row % kTile : row * parts + part;
    scales[static_cast<size_t>(at)] = some ? reach / 127.0f : finite ? 0 : std::nanf("");
    if (!TILES) starts[static_cast<size_t>(at)] = -128 * sum_of(total);
  }
};

#if defined(__AVX512F__)
// One part of ROWS rows of x times TILES tiles, 4 columns ``quads`` times, added to totals [ROWS][TILES]. A separate
// function by attribute, and unrolled: otherwise the compiler keeps the sums in memory.
template <int ROWS, int TILES>
__attribute__((noinline)) WEFT_VNNI void add_part(const uint8_t* tiles, int64_t tile_stride, const f32x16* tile_scale,
                                                  const int8_t* x, int64_t x_stride, const float* x_scale,
                                                  const int32_t* starts, int64_t parts, int64_t quads, f32x16* totals) {
  i32x16 acc[ROWS][TILES];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int t = 0; t < TILES; ++t) acc[r][t] = i32x16{} + starts[r * parts];
  for (int64_t quad = 0; quad < quads; ++quad) {
    __m512i w[TILES];
    for (int t = 0; t < TILES; ++t) w[t] = _mm512_loadu_si512(tiles + t * tile_stride + quad * 64);
    for (int r = 0; r < ROWS; ++r) {
      int32_t four;
      std::memcpy(&four, x + r * x_stride + 4 * quad, sizeof four);
      const __m512i fours = _mm512_set1_epi32(four);
      for (int t = 0; t < TILES; ++t) acc[r][t] = (i32x16)_mm512_dpbusd_epi32((__m512i)acc[r][t], w[t], fours);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int t = 0; t < TILES; ++t)
      totals[r * TILES + t] += alone(converted<f32x16>(acc[r][t]) * (tile_scale[t] * x_scale[r * parts]));
}
#endif

// The same of floats, whole numbers all of them.
template <int ROWS, int TILES>
void add_part(const uint8_t* tiles, int64_t tile_stride, const f32x16* tile_scale, const float* x, int64_t x_stride,
              const float* x_scale, const int32_t*, int64_t parts, int64_t quads, f32x16* totals) {
  for (int t = 0; t < TILES; ++t) {
    f32x16 acc[ROWS] = {};
    for (int64_t quad = 0; quad < quads; ++quad) {
      const u32x16 bytes = load_as<u32x16>(tiles + t * tile_stride + quad * 64);
      for (int j = 0; j < 4; ++j) {
        const f32x16 w = converted<f32x16>((i32x16)((bytes >> (8 * j)) & 255u)) - 128.0f;
        for (int r = 0; r < ROWS; ++r) acc[r] += w * x[r * x_stride + 4 * quad + j];
      }
    }
    for (int r = 0; r < ROWS; ++r) totals[r * TILES + t] += alone(acc[r] * (tile_scale[t] * x_scale[r * parts]));
  }
}

// ROWS rows of x times TILES tiles -> totals [ROWS][TILES].
template <int ROWS, int TILES, class Code>
void byte_sums(const Weight& weight, int64_t tile, const ByteRows<Code>& x, int64_t row, f32x16* totals) {
  const int64_t quads = (weight.in + kLine - 1) / kLine * (kLine / 4);
  const int64_t stride = quads * 64;
  const GroupNumbers scales_of = GroupNumbers::scales(weight);
  const uint8_t* from = static_cast<const uint8_t*>(weight.data) + tile * stride;
  for (int i = 0; i < ROWS * TILES; ++i) totals[i] = splat(0);
  for (int64_t part = 0; part < x.parts; ++part) {
    const int64_t first = part * (kPart / 4), count = quads - first < kPart / 4 ? quads - first : kPart / 4;
    f32x16 scales[TILES];
    for (int t = 0; t < TILES; ++t) scales[t] = scales_of(tile + t, part * kPart / weight.group);
    const int64_t at = row * x.parts + part;
    add_part<ROWS, TILES>(from + first * 64, stride, scales, x.codes() + row * x.padded + 4 * first, x.padded,
                          x.scales.data() + at, x.starts.data() + at, x.parts, count, totals);
  }
}

template <class T, int TILES, class Code>
void byte_block(const LinearArgs& args, const ByteRows<Code>& x, int64_t tile, int64_t row, int rows) {
  f32x16 totals[kBlockRows * TILES];
  switch (rows) {
    case 1: byte_sums<1, TILES>(args.weight, tile, x, row, totals); break;
    case 2: byte_sums<2, TILES>(args.weight, tile, x, row, totals); break;
    case 3:
      if constexpr (kBlockRows >= 3) byte_sums<3, TILES>(args.weight, tile, x, row, totals);
      break;
    case 4:
      if constexpr (kBlockRows >= 4) byte_sums<4, TILES>(args.weight, tile, x, row, totals);
      break;
    case 5:
      if constexpr (kBlockRows >= 5) byte_sums<5, TILES>(args.weight, tile, x, row, totals);
      break;
    default:
      if constexpr (kBlockRows >= 6) byte_sums<6, TILES>(args.weight, tile, x, row, totals);
  }
  for (int r = 0; r < rows; ++r)
    for (int t = 0; t < TILES; ++t) {
      const int64_t at = (tile + t) * kTile, count = args.weight.out - at;
      const f32x16 y = totals[r * TILES + t];
      store_some(static_cast<T*>(args.out) + (row + r) * args.weight.out + at,
                 args.bias ? y + load_some(args.bias + at, count) : y, count);
    }
}

template <class T, class Code>
void byte_products_of(const LinearArgs& args) {
  static thread_local ByteRows<Code> buffer;
  ByteRows<Code>& x = buffer;
  const Weight& weight = args.weight;
  x.resize(args.rows, weight.in);
  const double in = static_cast<double>(weight.in), count = static_cast<double>(args.rows);
  Pool::instance().for_each(args.rows, 0.2 * in, [&](int64_t row) {
    x.set_row(row, static_cast<const T*>(args.x) + row * args.x_stride, weight.in);
  });
  const int64_t blocks = (args.rows + kBlockRows - 1) / kBlockRows;
  // Some 25 GB of weights, or 200 billion products, in a second.
  const double nanoseconds = static_cast<double>(kOutRows) * in * (0.04 + 0.005 * count);
  Pool::instance().for_each((weight.out + kOutRows - 1) / kOutRows, nanoseconds, [&](int64_t item) {
    const int64_t tile = item * kOutTiles, tiles = (weight.out + kTile - 1) / kTile - tile;
    for (int64_t block = 0, row = 0; block < blocks; ++block) {  // of nearly one size: 8 rows are 4 and 4
      const int64_t end = args.rows * (block + 1) / blocks;
      const int rows = static_cast<int>(end - row);
      // Few rows: one tile after the other is one stream (linear.hpp).
      if (args.rows > kOneTileRows && tiles >= kOutTiles) byte_block<T, kOutTiles>(args, x, tile, row, rows);
      else
        for (int64_t t = 0; t < tiles && t < kOutTiles; ++t) byte_block<T, 1>(args, x, tile + t, row, rows);
      row = end;
    }
  });
}

#if defined(__AVX512F__)
constexpr int64_t kByteRows = 512;  // of a piece; W comes out of memory for each
constexpr int64_t kByteTiles = 8;   // most tiles of W in a piece
constexpr int64_t kChunkParts = 4;  // 512 columns of 2 tiles of W: 16 KB for the L1 cache
constexpr int64_t kPartTile = kPart * kTile, kPairSums = 4 * kSumNumbers;

// Sums of PARTS parts, ``kPairSums`` apart, scaled and added one after the other to the totals of ``rows`` rows of x and one
// tile of W, as vectors do it. ``w_scales`` [parts], ``x_scales`` [parts][16].
template <int PARTS>
WEFT_INLINE void add_byte_sums(const int32_t* sums, const f32x16* w_scales, const float* x_scales, int64_t rows,
                               float* totals) {
  for (int64_t r = 0; r < rows; ++r) {
    f32x16 total = load(totals + r * kTile);
    for (int part = 0; part < PARTS; ++part)
      total += alone(converted<f32x16>(load_as<i32x16>(sums + part * kPairSums + r * kTile)) *
                     (w_scales[part] * x_scales[part * kTile + r]));
    store(totals + r * kTile, total);
  }
}

// Tiles [tile, tile + count) of W as signed codes: ``parts`` parts of 128 columns from ``part`` on.
void signed_chunk(const Weight& weight, int64_t tile, int count, int64_t part, int64_t parts, int8_t* to) {
  const int64_t stride = (weight.in + kLine - 1) / kLine * kLine * kTile, first = part * kPartTile;
  const int64_t bytes = parts * kPartTile < stride - first ? parts * kPartTile : stride - first;
  const __m512i middle = _mm512_set1_epi8(-128);
  for (int t = 0; t < count; ++t, to += parts * kPartTile) {
    const uint8_t* const from = static_cast<const uint8_t*>(weight.data) + (tile + t) * stride + first;
    for (int64_t at = 0; at < bytes; at += 64)
      _mm512_store_si512(to + at, _mm512_xor_si512(_mm512_loadu_si512(from + at), middle));
    std::memset(to + bytes, 0, static_cast<size_t>(parts * kPartTile - bytes));
  }
}

// Rows [first, last) of x times tiles [tile, end) by the matrix unit: a chunk of columns for all tiles, then the next
// chunk, as in matrix_pieces.hpp. Vectors scale the parts of a chunk together.
template <class T>
void matrix_byte_piece(const LinearArgs& args, const ByteRows<int8_t, true>& x, int64_t first, int64_t last,
                       int64_t tile, int64_t end) {
  constexpr int64_t kPartSteps = 2;
  const Weight& weight = args.weight;
  const int64_t pairs = (last - first + 2 * kTile - 1) / (2 * kTile), twos = (end - tile + 1) / 2;
  const GroupNumbers scales = GroupNumbers::scales(weight);
  const TileKernels& unit = tile_kernels();
  alignas(64) int8_t room[2 * kChunkParts * kPartTile];
  alignas(64) int32_t sums[kChunkParts][kPairSums];
  Scratch scratch;
  float* const totals = scratch.take<float>(twos * pairs * kPairSums);  // [twos][pairs][blocks][tiles][16 rows][16]
  std::memset(totals, 0, static_cast<size_t>(twos * pairs * kPairSums) * sizeof(float));
  const PieceOutput<T> output(args, first, last, tile, end);
  const UnitInUse in_use(unit);
  for (int64_t begin = 0; begin < x.parts; begin += kChunkParts) {
    const int64_t parts = begin + kChunkParts < x.parts ? kChunkParts : x.parts - begin;
    const bool is_last = begin + parts == x.parts;
    for (int64_t two = 0; two < twos; ++two) {
      const int64_t column = tile + 2 * two;
      const int count = column + 1 < end ? 2 : 1;
      signed_chunk(weight, column, count, begin, parts, room);
      f32x16 w_scales[2][kChunkParts];
      for (int64_t part = 0; part < parts; ++part)
        for (int t = 0; t < count; ++t) w_scales[t][part] = scales(column + t, (begin + part) * kPart / weight.group);
      for (int64_t pair = 0; pair < pairs; ++pair) {
        const int64_t row = first + pair * 2 * kTile;
        const int blocks = row + kTile < last ? 2 : 1;
        float* const of_pair = totals + (two * pairs + pair) * kPairSums;
        for (int64_t part = 0; part < parts; ++part)
          unit.bytes({.x = x.codes() + (row / kTile * x.parts + begin + part) * kPartTile,
                      .w = room + part * kPartTile,
                      .x_stride = x.parts * kPartTile,
                      .w_stride = parts * kPartTile,
                      .steps = kPartSteps,
                      .x_tiles = blocks,
                      .w_tiles = count,
                      .sums = sums[part]});
        for (int block = 0; block < blocks; ++block)
          for (int tile = 0; tile < count; ++tile) {
            const int64_t from = row + block * kTile, rows = last - from < kTile ? last - from : kTile;
            const int64_t at = (block * count + tile) * kSumNumbers;
            const float* const x_scales = x.scales.data() + (from / kTile * x.parts + begin) * kTile;
            const auto add = parts == 4   ? add_byte_sums<4>
                             : parts == 3 ? add_byte_sums<3>
                             : parts == 2 ? add_byte_sums<2>
                                          : add_byte_sums<1>;
            add(sums[0] + at, w_scales[tile], x_scales, rows, of_pair + at);
          }
        if (!is_last) continue;
        for (int64_t r = row; r < last && r < row + 2 * kTile; ++r) {
          const float* const of_row = of_pair + (r - row) / kTile * count * kSumNumbers + (r - row) % kTile * kTile;
          const f32x16 of_tiles[2] = {load(of_row), count == 2 ? load(of_row + kSumNumbers) : splat(0)};
          count == 2 ? output.template write<2>(r, column, of_tiles) : output.template write<1>(r, column, of_tiles);
        }
      }
    }
  }
}

template <class T>
void matrix_byte_products(const LinearArgs& args) {
  static thread_local ByteRows<int8_t, true> buffer;
  ByteRows<int8_t, true>& x = buffer;
  const Weight& weight = args.weight;
  Pool& pool = Pool::instance();
  x.resize(args.rows, weight.in);
  pool.for_each(args.rows, 0.2 * static_cast<double>(weight.in),
                [&](int64_t row) { x.set_row(row, static_cast<const T*>(args.x) + row * args.x_stride, weight.in); });
  const int64_t tiles = (weight.out + kTile - 1) / kTile;
  const int64_t blocks = (args.rows + kTile - 1) / kTile, parts = (args.rows + kByteRows - 1) / kByteRows;
  // Some four pieces for each thread if there are enough tiles.
  const int64_t fair = tiles * parts / (4 * pool.threads()) / 2 * 2;
  const int64_t of_piece = args.rows <= 2 * kTile || fair < kOutTiles ? kOutTiles
                           : fair < kByteTiles                        ? fair
                                                                      : kByteTiles;
  const int64_t items = (tiles + of_piece - 1) / of_piece, rows_of_piece = (blocks + parts - 1) / parts * kTile;
  pool.reserve(scratch_bytes<T>(rows_of_piece * of_piece * kTile) +
               scratch_bytes<float>((rows_of_piece + kTile) * of_piece * kTile));
  // Some 25 GB of weights, or 500 billion products, in a second.
  const double nanoseconds = static_cast<double>(of_piece * kTile * weight.in) *
                             (0.04 + 0.002 * static_cast<double>(args.rows) / static_cast<double>(parts));
  pool.for_each(items * parts, nanoseconds, [&](int64_t at) {
    const int64_t tile = at % items * of_piece, part = at / items;
    const int64_t first = blocks * part / parts * kTile, last = blocks * (part + 1) / parts * kTile;
    matrix_byte_piece<T>(args, x, first, last < args.rows ? last : args.rows, tile,
                         tile + of_piece < tiles ? tile + of_piece : tiles);
  });
}
#endif

template <class T>
void byte_products(const LinearArgs& args) {
#if defined(__AVX512F__)
  if (matrix_unit() != MatrixUnit::none && args.rows > kFewByteRows) return matrix_byte_products<T>(args);
  if (has_vnni()) return byte_products_of<T, int8_t>(args);
#endif
  byte_products_of<T, float>(args);
}

}  // namespace
}  // namespace weft
