// Tile products of a matrix unit: which unit multiplies, and the blocks that it is asked for.
//
//     none       the CPU has no unit that these kernels know: vectors multiply (tiles.hpp, twelve_bit.hpp, w8a8.hpp)
//     amx        Intel's AMX: tdpbf16ps and tdpbssd (amx.cpp)
//     software   the same tiles in plain C++, operation by operation as the manual states them: for tests on any CPU
//
//     block      2 tiles of x (16 rows each)  times  2 tiles of W (16 rows each), over some columns
//
//                w0   w1         a tile of x: 16 rows x 64 bytes
//          x0  | s0 | s1 |       a tile of W: 16 x 64 bytes, a line holds 2 (or 4) columns of its 16 rows
//          x1  | s2 | s3 |       a sum: 16 x 16 numbers of 4 bytes
//
// matrix_products.hpp cuts products into blocks, and tile_blocks.hpp computes a block by either unit.
//
// The order of a sum in float32, by the manual: for 32 columns, the even and the odd products go into two sums from
// zero, each product fused with its addition. Both are added, and that sum is added to the accumulator. Denormals are
// zeros. ``follows_manual`` is the answer of the unit itself: a product of chosen numbers has the bits of ``software``.
// Then vectors in the same order may serve few rows of x by codes (matrix_products.hpp): a row has the same bits in any
// batch. A unit of another order serves all rows itself.
#pragma once

#include <cstdint>

namespace weft {

enum class MatrixUnit : int { none = 0, amx = 1, software = 2 };

constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTileSide = 16;
constexpr int64_t kSumNumbers = kTileSide * kTileSide;

// Lines of 64 bytes that later blocks read: fetched into the L2 cache between products.
struct Ahead {
  const char* data = nullptr;
  int64_t lines = 0;
};

// Work for vectors while the unit multiplies: work(of, step) once for each step of a block, before its sums are stored.
// A core's vectors wait only for numbers they use, but it looks no further ahead than some 500 instructions, so work after
// a block would wait for all of it.
struct Between {
  void (*work)(const void* of, int64_t step) = nullptr;
  const void* of = nullptr;
};

// Counts of ``x_tiles`` and ``w_tiles`` are 1 or 2. Sums are [x_tiles][w_tiles][16][16].
struct HalfBlock {
  const uint16_t* x;           // bfloat16 [x_tiles][steps][16 rows][32 columns]; tiles of other rows x_stride apart
  const uint16_t* w;           // bfloat16 [w_tiles][steps][16 pairs of columns][16 rows][2]; w_stride apart
  int64_t x_stride, w_stride;  // in numbers
  int64_t steps;               // of 32 columns
  int x_tiles, w_tiles;
  bool first;  // sums begin at zero
  float* sums;
  Ahead ahead;
  Between between;
};

// As HalfBlock, in signed bytes: a step has 64 columns. Sums begin at zero.
struct ByteBlock {
  const int8_t *x, *w;
  int64_t x_stride, w_stride;
  int64_t steps;
  int x_tiles, w_tiles;
  int32_t* sums;
};

// Products of attention for up to 16 query rows and up to kPagesOfBlock pages of 16 tokens. A page is as a KV frame has it:
// keys [dim / 2][16 tokens][2], values [8 pairs of tokens][dim][2]. Null: a page that is skipped.
constexpr int kPagesOfBlock = 4;
struct ScoreBlock {
  const void* q;      // bfloat16 [rows][dim]
  int64_t row_bytes;  // from a row of q to the next
  const uint16_t* const* keys;
  int64_t pages, dim;  // dim: a multiple of 32
  float* scores;       // [pages][16][16 tokens]; those of a skipped page stay as they are
};
struct ValueBlock {
  const uint16_t* weights;  // bfloat16 [rows][4 pages][16 tokens]
  const uint16_t* const* values;
  int64_t pages, dim;
  float* acc;  // [rows][dim], added to
};

// A thread calls ``begin`` before blocks and ``end`` after them (UnitInUse). ``scores`` and ``values`` need ``begin_rows`` for
// their number of rows.
struct TileKernels {
  void (*begin)();
  void (*begin_rows)(int rows);
  void (*end)();
  void (*halves)(const HalfBlock&);
  void (*bytes)(const ByteBlock&);
  void (*scores)(const ScoreBlock&);
  void (*values)(const ValueBlock&);
};

// The unit is ready for blocks of this thread while this lives.
class UnitInUse {
 public:
  explicit UnitInUse(const TileKernels& unit) : end_(unit.end) { unit.begin(); }
  ~UnitInUse() { end_(); }
  UnitInUse(const UnitInUse&) = delete;
  UnitInUse& operator=(const UnitInUse&) = delete;

 private:
  void (*end_)();
};

// The unit in use: at first AMX where this process may use it.
MatrixUnit matrix_unit();

// For the entire process; false, and no change, if the unit cannot be used. For tests and measurements.
bool use_matrix_unit(MatrixUnit unit);

// Kernels of the unit in use, which is not ``none``.
const TileKernels& tile_kernels();

// Whether the unit in use sums bfloat16 in the manual's order.
bool follows_manual();

// The reason that AMX is not used: "" if it can be.
const char* amx_missing();

}  // namespace weft
