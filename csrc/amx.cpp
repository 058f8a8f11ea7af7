// The tiles of Intel's AMX. Nothing here runs before matrix_unit.cpp has found the unit and has the system's permission.
//
// The instructions are written out: GCC's intrinsics take numbers of tiles as text only, and do not tell the compiler
// that they read and write memory. CMakeLists.txt defines WEFT_HAS_AMX where the compiler knows the instruction set.
#include "matrix_unit.hpp"
#include "tile_blocks.hpp"

namespace weft {
namespace {

// Eight tiles of 16 rows and 64 bytes. The layout is the manual's: palette, start row, 14 reserved bytes, then the bytes
// of a row for each of 16 tiles, then the rows of each.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileShapes) == 64);

struct AmxTiles {
  static void begin() {
    static constexpr TileShapes shapes;
    __asm__ volatile("ldtilecfg %0" ::"m"(shapes) : "memory");
  }
  // Tiles of sums, of q and of weights have ``rows`` rows.
  static void begin_rows(int rows) {
    TileShapes shapes;
    for (int tile = 0; tile < 6; ++tile) shapes.rows[tile] = static_cast<uint8_t>(rows);
    shapes.row_bytes[5] = 32;
    shapes.rows[7] = 8;
    __asm__ volatile("ldtilecfg %0" ::"m"(shapes) : "memory");
  }
  static void end() { __asm__ volatile("tilerelease" ::: "memory"); }

  template <int T>
  static void zero() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  template <int T>
  static void load(const void* from, int64_t row_bytes = 64) {
    __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(from), "r"(row_bytes) : "memory");
  }
  // Bypasses the L1 cache, as far as the CPU heeds the hint.
  template <int T>
  static void load_passing(const void* from) {
    __asm__ volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(from), "r"(int64_t{64}) : "memory");
  }
  template <int T>
  static void store(void* to, int64_t row_bytes = 64) {
    __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(to), "r"(row_bytes) : "memory");
  }
  // A line for the L2 cache.
  static void fetch(const char* line) { __builtin_prefetch(line, 0, 2); }
  template <int TO, int X, int W>
  static void dot_halves() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(TO), "i"(X), "i"(W));
  }
  template <int TO, int X, int W>
  static void dot_bytes() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(TO), "i"(X), "i"(W));
  }
};

}  // namespace

extern const TileKernels amx_tiles;
const TileKernels amx_tiles = kTileKernels<AmxTiles>;

}  // namespace weft
