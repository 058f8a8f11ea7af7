// Arguments of the kernels, and the table of kernels that one instruction set fills.
//
// Tensors come as an address and strides in elements: the caller guarantees the memory that a kernel reads
// (src/weft/tensor/native.py checks dtypes, contiguity and shapes once). Rows of dimension D are dense.
#pragma once

#include <cstdint>
#include <vector>

#include "pool.hpp"

namespace weft {

// Numbers of products that depend on the caches and the memory of a CPU and change no bit of a result. They are set
// before products run, by measured seconds (src/weft/tensor/tuning.py); these suit the CPUs that were at hand.
struct Tuning {
  // Bytes of tiles that are prefetched ahead: mostly in the page of 4 KiB that is read, as lines of others slow Zen 4's
  // reads. A matrix unit asks beyond what it multiplies meanwhile.
  int64_t fetched_ahead = 2048, unit_fetched_ahead = 8192;
  // Bytes of x that stay in the L2 cache, with the tiles of two items, or with those of an unpacked one.
  int64_t part_bytes = 196608, unpacked_part_bytes = 1 << 19;
};
inline Tuning tuning;

constexpr int64_t kPad = -1;
constexpr int kPageTokens = 16;

// Inputs have one of the first two, pages any of them.
enum class Dtype : int { float32 = 0, bfloat16 = 1, float16 = 2, float8_e4m3 = 3, int8 = 4 };

// bfloat16 [pages, K and V, kv_heads, 16] of int8 pages, the heads dense; null for the others.
struct TokenScales {
  void* data;
  int64_t page, part;  // strides in elements
};

struct Tap {
  int64_t offset;  // the state after ``offset`` tokens of the run
  int64_t slot;
};

// One span of tokens of one sequence. ``slot`` PAD: the state starts from zeros and is not kept. ``start`` PAD: a
// padding row; it reads and writes nothing. Without ``keeps`` the state after the run is not written: a verify run,
// whose drafts may be wrong.
struct Run {
  int64_t offset, start, length, slot;
  bool fresh;
  std::vector<Tap> taps;  // by offset
  bool keeps = true;
  // Whether this is one token of a run that keeps its state and has no tap.
  bool decodes() const { return length == 1 && slot != kPad && keeps && taps.empty(); }
};

// A copy of a recurrent layer's inputs: the rows of verify runs, ``row_bytes`` each. A row is the layer's projection
// without ``gap_bytes`` from ``gap`` on: the gate of its output, which no state depends on. ``window``: the address of
// the layer's convolution windows, which tells one layer from another.
struct Log {
  const void* window;
  char* to;
  int64_t row_bytes, gap, gap_bytes;
};

// Verify runs are consecutive rows [log_first, log_first + log_rows) of the step.
struct Runs {
  std::vector<Run> runs;
  int64_t log_first = 0, log_rows = 0;
  std::vector<Log> logs;
};

// [tokens, heads, dim]: token and head strides in elements.
struct Rows {
  const void* data;
  int64_t token_stride, head_stride;
  Dtype dtype;
};

struct AttentionArgs {
  const Runs* runs;
  Rows q;                  // [T, q_heads, dim]
  void* out;               // [T, q_heads, dim] dense, dtype of q
  const void *k, *v;       // packed pages, see tensor/layout.py
  int64_t k_page, v_page;  // strides of a page, in elements
  int64_t kv_heads, group, dim;
  const int32_t* page_table;  // [R, ...]
  int64_t table_stride;
  float scale;
  Dtype kv_dtype;
  TokenScales scales;
  int64_t window;      // in tokens, counted from the last, 0 for all
  const float* sinks;  // [q_heads]: a score that takes part in each sum and adds nothing; or null
};

// Dtype of a recurrent state (one of the first three), and the number of its layer.
struct StateKind {
  Dtype dtype;
  int64_t layer;
};

struct GatedDeltaArgs {
  const Runs* runs;
  Rows q, k, v;          // [T, k_heads, K], [T, k_heads, K], [T, heads, V]
  Rows g, beta;          // [T, heads] or, with line_decays, [T, heads, K]; [T, heads]; both of one dtype
  bool line_decays;      // a decay for each line of the state
  const float* decay;    // [heads], or null: g is the log decay and beta is beta. Given, they are gates:
  const float* dt_bias;  //   g <- decay softplus(g + dt_bias), [heads] or [heads, K]; beta <- scale sigmoid(beta)
  float beta_scale;
  void* out;    // [T, heads, V] dense, dtype of q
  void* state;  // [slots, heads, K, V]; a slot's part is dense
  int64_t slot_stride;
  int64_t k_heads, heads, k_dim, v_dim;
  float scale;
  StateKind kind;
  Rows kk, b;  // [T, heads, K], or null: separate keys (RWKV-7). Then q and k are unchanged, without beta
};

struct Mamba2Args {
  const Runs* runs;
  Rows x, b, c;                  // [T, heads, P], [T, groups, N] twice;
  Rows dt;                       // [T, heads] (head_stride 1), before bias and softplus;
  const float *a, *d, *dt_bias;  // [heads]
  void* out;                     // [T, heads, P] dense, dtype of x
  void* state;                   // [slots, heads, P, N]
  int64_t slot_stride;
  int64_t heads, groups, head_dim, state_dim;
  float dt_min, dt_max;
  StateKind kind;
};

struct Mamba1Args {
  const Runs* runs;
  Rows x, dt;                // [T, 1, C]; dt before bias and softplus
  Rows b, c;                 // [T, 1, N]
  const float* a;            // [C, N]
  const float *d, *dt_bias;  // [C]
  void* out;                 // [T, C] dense, dtype of x
  void* state;               // [slots, C, N]
  int64_t slot_stride;
  int64_t channels, state_dim;
  StateKind kind;
};

struct ConvArgs {
  const Runs* runs;
  Rows x;                  // [T, 1, C]
  Rows in_gate, out_gate;  // [T, 1, C], multiplied in before and after; data null for none
  const void* weight;      // [C, K] dense
  const void* bias;        // [C] or null, dtype of the weight
  Dtype weight_dtype;
  bool silu;
  void* out;     // [T, C] dense, dtype of x
  void* window;  // [slots, C, K-1]; a slot's part is dense
  int64_t slot_stride;
  int64_t channels, kernel;
  Dtype window_dtype;
};

struct NormArgs {
  Rows x, gate;  // [tokens, heads, dim]; gate.data null for none
  Rows add;      // as x, or data null: x + add_scale add goes to sum_out (dense; may be add itself) and is normed
  float add_scale;
  void* sum_out;
  const void* weight;  // [dim]
  Dtype weight_dtype;
  float eps;
  bool plus_one, gate_first;
  int64_t tokens, heads, dim, group;
  void* out;  // [tokens, heads, dim] dense, dtype of x
};

struct RotaryArgs {
  Rows q, k;               // [tokens, heads, dim], of one dtype
  const float *cos, *sin;  // [tokens, rotary_dim]
  int64_t tokens, q_heads, kv_heads, dim, rotary_dim;
  void *q_out, *k_out;  // dense
};

struct WriteKvArgs {
  const Runs* runs;
  Rows k, v;  // [T, kv_heads, dim]
  void *cache_k, *cache_v;
  int64_t k_page, v_page, kv_heads, dim;
  const int32_t* page_table;
  int64_t table_stride;
  Dtype kv_dtype;
  TokenScales scales;
};

struct SiluMulArgs {
  const void* gate_up;  // [tokens, 2 width], stride apart
  int64_t stride, tokens, width;
  Dtype dtype;
  void* out;  // [tokens, width] dense
};

struct GeluArgs {  // by tanh, of contiguous numbers
  const void* x;   // [count]
  int64_t count;
  Dtype dtype;
  void* out;  // [count]; may be x
};

struct SoftmaxArgs {  // of scale x, in place
  void* x;            // [rows, columns] dense; kSoftmaxColumns at most
  int64_t rows, columns;
  float scale;  // above 0
  Dtype dtype;
};

constexpr int64_t kSoftmaxColumns = 16384;

struct GateArgs {
  void* x;    // [tokens, heads, dim] dense, in place
  Rows gate;  // [tokens, heads * dim], or [tokens, heads] with per_head
  bool per_head;
  int64_t tokens, heads, dim;
};

// How a weight matrix [out, in] is stored, see linear.hpp and src/weft/tensor/weights/quantized.py.
enum class WeightForm : int {
  float32 = 0,         // dense rows; in is a multiple of 32
  bfloat16 = 1,        // the same
  int8 = 2,            // tiles of 16 rows: for each 4 columns 16 x 4 bytes
  bfloat16_tiles = 4,  // tiles of 16 rows: for each 2 columns 16 x 2 numbers; x is bfloat16
  float32_tiles = 5,   // tiles of 16 rows: for each column 16 numbers; x is float32
  int4 = 3,            // tiles of 16 rows: for each 8 columns 16 x 4 bytes, columns 0-3 in the low halves
  int6 = 8,            // tiles of 16 rows: for each 16 columns 128 bytes as in int4, then 64 with two more bits of each
  int8_both = 6,       // as int8, and x becomes int8 too (w8a8.hpp): no zeros, groups of 128 n columns, or one
  bfloat16_fp8 = 9,    // bfloat16_tiles as codes of e4m3 with scales (coded_tiles.hpp); in is a multiple of 8
  bfloat16_four_bits = 10,  // the same of four bits, and a table of 16 floats
  bfloat16_twelve_bit =
      7,  // bfloat16_tiles in 12 bits (twelve_bit.hpp); where has_twelve_bit_products; in is a multiple of 8
};

// Numbers of groups. ``bytes``: signed, each times a float16 that a block of 256 columns shares. Bytes of e4m3 without
// a sign, or of e8m0, are multiplied by a float32 that a row shares, or divided by it. ``of_tiles``: float32
// [tiles][groups], of coded tiles; e8m0 have no float there.
enum class ScaleForm : int { float32 = 0, float16 = 1, bytes = 2, e4m3 = 3, e8m0 = 4, e4m3_divided = 5, of_tiles = 6 };

struct Weight {
  const void* data;
  WeightForm form;
  int64_t in, out;
  const void* scales;    // of tiles: [tiles][groups][16]; the rest is of tiles as well. Squeezed: bytes [tiles][16]
  ScaleForm scale_form;  // of scales and minimums
  const uint8_t* zeros;  // [tiles][groups][16], or null: 128, 32 or 8; only int8 and int4
  int64_t group;         // columns that share a scale: 16, or a multiple of 32
  const int64_t* odd;    // 12-bit: for each tile where in this array its odd weights begin, then those. fp8 by rows:
                         // [tiles][units / 64 rounded up], a bit for each unit with codes without an exponent
  const void* minimums;  // as scales, or null. Subtracted: value = code scale - minimum
  const uint16_t *block_scales, *block_minimums;  // float16 [tiles][blocks][16], of bytes
  const float* row_scales;                        // [tiles][16], of e4m3 and e8m0
  const uint8_t* table;  // of int4, 16 bytes: the value of each code plus 128; or null. Coded tiles: 16 floats
  bool middle;           // with minimums: the middle is subtracted from codes. Scales are floats
  const int32_t* order;  // of experts: [in], the number of x for each column; or null
};

struct LinearArgs {
  const void* x;  // [rows, in], x_stride apart
  int64_t x_stride;
  Dtype x_dtype;
  int64_t rows;
  Weight weight;
  const float* bias;  // [out] or null
  bool exact;         // x is not rounded to int8
  void* out;          // [rows, out] dense, dtype of x
  // out is [rows, out / 2]: silu of the first half of the weight's rows times the second. Only of bfloat16 by a matrix
  // unit, of more rows of x than a pair of blocks has, without bias.
  bool gated = false;
};

// The tiles of one expert, where each has its own: a Weight without its sizes.
struct ExpertTiles {
  const void* data;
  const void* highs;  // 12-bit: Weight.scales
  const int64_t* odd;
  int64_t form;  // of WeightForm
};

enum class Activation : int { silu = 0, gelu = 1, relu2 = 2, clamped_swiglu = 3, gelu_tanh = 4 };

struct MoeArgs {
  const void* x;  // [tokens, dim], x_stride apart
  int64_t x_stride;
  Dtype x_dtype;
  int64_t tokens, choices, experts;
  const int64_t* ids;    // [tokens, choices], PAD: skipped
  const float* weights;  // [tokens, choices]
  Weight gate_up, down;  // of the first expert; the others follow it. Widths are multiples of 16.
  const ExpertTiles *gate_up_tiles, *down_tiles;  // [experts], or null. Given, the weights are only sizes, and any.
  const float *gate_up_bias, *down_bias;          // [experts, rows of the matrix], or null
  Activation activation;
  float limit;  // the gate is at most this, up within it on both sides; 0: any
  bool gated, exact;
  void* out;  // [tokens, dim] dense, dtype of x
};

struct WidenArgs {  // weight rows [first, last), first a multiple of 16 -> [in, stride], transposed
  Weight weight;
  int64_t first, last, stride;  // stride: last - first rounded up to 16, or more
  Dtype out_dtype;
  void* out;
};

struct AdaptArgs;  // adapters.hpp

// Every kernel, with its arguments. The table below, its declarations for an instruction set (table.hpp) and its contents
// (table.cpp) are written from this list.
#define WEFT_EACH_KERNEL(KERNEL)      \
  KERNEL(attention, AttentionArgs)    \
  KERNEL(gated_delta, GatedDeltaArgs) \
  KERNEL(mamba2, Mamba2Args)          \
  KERNEL(mamba1, Mamba1Args)          \
  KERNEL(conv, ConvArgs)              \
  KERNEL(norm, NormArgs)              \
  KERNEL(rotary, RotaryArgs)          \
  KERNEL(write_kv, WriteKvArgs)       \
  KERNEL(silu_mul, SiluMulArgs)       \
  KERNEL(sigmoid_gate, GateArgs)      \
  KERNEL(gelu_tanh, GeluArgs)         \
  KERNEL(softmax, SoftmaxArgs)        \
  KERNEL(linear, LinearArgs)          \
  KERNEL(widen_weight, WidenArgs)     \
  KERNEL(moe, MoeArgs)                \
  KERNEL(adapt, AdaptArgs)

// Forms of weights that an instruction set may lack.
#define WEFT_EACH_ABILITY(ABILITY) \
  ABILITY(has_byte_products)       \
  ABILITY(has_twelve_bit_products) \
  ABILITY(has_coded_tiles)

struct Kernels {
  const char* name;
#define WEFT_KERNEL(name, Args) void (*name)(const Args&);
#define WEFT_ABILITY(name) bool (*name)();
  WEFT_EACH_KERNEL(WEFT_KERNEL)
  WEFT_EACH_ABILITY(WEFT_ABILITY)
#undef WEFT_KERNEL
#undef WEFT_ABILITY
};

// The best set that this machine runs, or the set that ``use_kernels`` chose.
const Kernels& kernels();

// Sets that this machine runs, the best first.
std::vector<const char*> usable_kernels();

// Chooses for the entire process, by name; false if this machine cannot run the set. For tests and measurements.
bool use_kernels(const char* name);

}  // namespace weft
