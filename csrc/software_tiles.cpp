// The tiles of a matrix unit in plain C++: tdpbf16ps and tdpbssd, operation by operation as Intel's manual states
// them. Some thousand times as slow. It is the reference that the vector kernel and the hardware are compared with, on
// any CPU.
//
// Arithmetic of float32: round to nearest even, denormal inputs and results are zeros of their sign. A result is
// denormal if it is below the least normal number after rounding with an unbounded exponent. A sum that may be so
// small is exact in double: then both of its parts are small, and their last bits are within 53 places.
#include <cmath>
#include <cstring>

#include "matrix_unit.hpp"
#include "tile_blocks.hpp"

namespace weft {
namespace {

constexpr float kLeastNormal = 0x1p-126f;

float flushed(float x) { return std::fabs(x) < kLeastNormal ? std::copysign(0.0f, x) : x; }

// ``wide``, an exact or nearly exact sum, as zero if it is denormal; ``rounded``: that sum as a float.
float flushed(double wide, float rounded) {
  if (std::fabs(wide) < 0x1p-126 - 0x1p-151) return std::copysign(0.0f, static_cast<float>(wide));
  return rounded;
}

float fused(float a, float b, float c) {
  return flushed(static_cast<double>(a) * static_cast<double>(b) + static_cast<double>(c), std::fma(a, b, c));
}

float added(float a, float b) { return flushed(static_cast<double>(a) + static_cast<double>(b), a + b); }

// The bfloat16 numbers of a tile, widened once: each is multiplied sixteen times.
void halves_of(const uint8_t* tile, float* to) {
  for (int64_t at = 0; at < kTileBytes / 2; ++at) {
    uint16_t bits;
    std::memcpy(&bits, tile + 2 * at, sizeof bits);
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float x;
    std::memcpy(&x, &wide, sizeof x);
    to[at] = flushed(x);
  }
}

thread_local uint8_t tiles[8][kTileBytes];

struct Shape {
  int64_t rows = kTileSide, row_bytes = 64;
};
thread_local Shape shapes[8];

struct SoftwareTiles {
  static void begin() {
    for (Shape& shape : shapes) shape = {};
  }
  static void begin_rows(int rows) {
    begin();
    for (int tile = 0; tile < 6; ++tile) shapes[tile].rows = rows;
    shapes[5].row_bytes = 32;
    shapes[7].rows = 8;
  }
  static void end() {}

  template <int T>
  static void zero() {
    std::memset(tiles[T], 0, kTileBytes);
  }
  template <int T>
  static void load(const void* from, int64_t row_bytes = 64) {
    std::memset(tiles[T], 0, kTileBytes);
    for (int64_t row = 0; row < shapes[T].rows; ++row)
      std::memcpy(tiles[T] + row * 64, static_cast<const char*>(from) + row * row_bytes, shapes[T].row_bytes);
  }
  template <int T>
  static void load_passing(const void* from) {
    load<T>(from);
  }
  template <int T>
  static void store(void* to, int64_t row_bytes = 64) {
    for (int64_t row = 0; row < shapes[T].rows; ++row)
      std::memcpy(static_cast<char*>(to) + row * row_bytes, tiles[T] + row * 64, shapes[T].row_bytes);
  }
  static void fetch(const char*) {}

  template <int TO, int X, int W>
  static void dot_halves() {
    constexpr int64_t kNumbers = 2 * kTileSide;  // of a row
    float x[kTileSide * kNumbers], w[kTileSide * kNumbers];
    halves_of(tiles[X], x);
    halves_of(tiles[W], w);
    uint8_t* at = tiles[TO];
    for (int64_t row = 0; row < kTileSide; ++row) {
      float sums[kNumbers] = {};  // even and odd, of each row of W
      for (int64_t pair = 0; pair < kTileSide; ++pair)
        for (int64_t number = 0; number < kNumbers; ++number)
          sums[number] = fused(x[row * kNumbers + 2 * pair + number % 2], w[pair * kNumbers + number], sums[number]);
      for (int64_t column = 0; column < kTileSide; ++column, at += 4) {
        float total;
        std::memcpy(&total, at, sizeof total);
        total = added(flushed(total), added(sums[2 * column], sums[2 * column + 1]));
        std::memcpy(at, &total, sizeof total);
      }
    }
  }

  template <int TO, int X, int W>
  static void dot_bytes() {
    const uint8_t *const x = tiles[X], *const w = tiles[W];
    uint8_t* at = tiles[TO];
    for (int64_t row = 0; row < kTileSide; ++row)
      for (int64_t column = 0; column < kTileSide; ++column, at += 4) {
        int32_t total;
        std::memcpy(&total, at, sizeof total);
        for (int64_t quad = 0; quad < kTileSide; ++quad)
          for (int64_t byte = 0; byte < 4; ++byte)
            total += static_cast<int8_t>(x[row * 64 + quad * 4 + byte]) *
                     static_cast<int8_t>(w[quad * 64 + column * 4 + byte]);
        std::memcpy(at, &total, sizeof total);
      }
  }
};

}  // namespace

extern const TileKernels software_tiles;
const TileKernels software_tiles = kTileKernels<SoftwareTiles>;

}  // namespace weft
