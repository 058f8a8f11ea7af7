// The tiles of a matrix unit in plain C++: tdpbf16ps and tdpbsud, operation by operation as Intel's manual states them.
// Some thousand times as slow. It is the reference that the vector kernel and the hardware are compared with, on any CPU.
//
// Arithmetic of float32: round to nearest even, denormal inputs and results are zeros of their sign. A result is denormal
// if it is below the least normal number after rounding with an unbounded exponent. A sum that may be so small is exact
// in double: then both of its parts are small, and their last bits lie within 53 places.
#include <cmath>
#include <cstring>

#include "matrix_unit.hpp"
#include "tile_blocks.inl"

namespace weft {
namespace {

constexpr float kLeastNormal = 0x1p-126f;

float flushed(float x) { return std::fabs(x) < kLeastNormal ? std::copysign(0.0f, x) : x; }

// Of an exact or nearly exact sum ``wide``, and that sum as a float.
float flushed(double wide, float rounded) {
  if (std::fabs(wide) < 0x1p-126 - 0x1p-151) return std::copysign(0.0f, static_cast<float>(wide));
  return rounded;
}

float fused(float a, float b, float c) {
  return flushed(static_cast<double>(a) * static_cast<double>(b) + static_cast<double>(c), std::fma(a, b, c));
}

float added(float a, float b) { return flushed(static_cast<double>(a) + static_cast<double>(b), a + b); }

// The number ``at`` of a tile, a bfloat16.
float half_of(const uint8_t* tile, int64_t at) {
  uint16_t bits;
  std::memcpy(&bits, tile + 2 * at, sizeof bits);
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, sizeof x);
  return flushed(x);
}

thread_local uint8_t tiles[8][kTileBytes];

struct SoftwareTiles {
  static void begin() {}
  static void end() {}

  template <int T>
  static void zero() {
    std::memset(tiles[T], 0, kTileBytes);
  }
  template <int T>
  static void load(const void* from) {
    std::memcpy(tiles[T], from, kTileBytes);
  }
  template <int T>
  static void store(void* to) {
    std::memcpy(to, tiles[T], kTileBytes);
  }

  template <int TO, int X, int W>
  static void dot_halves() {
    for (int64_t row = 0; row < kTileSide; ++row) {
      float sums[2 * kTileSide] = {};  // even and odd, of each row of W
      for (int64_t pair = 0; pair < kTileSide; ++pair)
        for (int64_t number = 0; number < 2 * kTileSide; ++number)
          sums[number] = fused(half_of(tiles[X], (row * kTileSide + pair) * 2 + number % 2),
                               half_of(tiles[W], pair * 2 * kTileSide + number), sums[number]);
      for (int64_t column = 0; column < kTileSide; ++column) {
        float total;
        uint8_t* const at = tiles[TO] + (row * kTileSide + column) * 4;
        std::memcpy(&total, at, sizeof total);
        total = added(flushed(total), added(sums[2 * column], sums[2 * column + 1]));
        std::memcpy(at, &total, sizeof total);
      }
    }
  }

  template <int TO, int X, int W>
  static void dot_bytes() {
    for (int64_t row = 0; row < kTileSide; ++row)
      for (int64_t column = 0; column < kTileSide; ++column) {
        int32_t total;
        uint8_t* const at = tiles[TO] + (row * kTileSide + column) * 4;
        std::memcpy(&total, at, sizeof total);
        for (int64_t quad = 0; quad < kTileSide; ++quad)
          for (int64_t byte = 0; byte < 4; ++byte)
            total += static_cast<int8_t>(tiles[X][row * 64 + quad * 4 + byte]) *
                     static_cast<int32_t>(tiles[W][quad * 64 + column * 4 + byte]);
        std::memcpy(at, &total, sizeof total);
      }
  }
};

}  // namespace

extern const TileKernels software_tiles;
const TileKernels software_tiles = kTileKernels<SoftwareTiles>;

}  // namespace weft
