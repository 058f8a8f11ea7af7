// Products of bfloat16 tiles, plain or in 12 bits, where a matrix unit multiplies (matrix_unit.hpp).
//
//     few rows    up to 8 rows of x, if the unit follows the manual: vectors in the unit's order, at the speed of memory
//     more rows   x is copied once into tiles of the unit; W lies in them already
//
//     piece    4 tiles of W, and rows of x that stay in the L2 cache
//     chunk    256 columns of 2 tiles of W: 16 KB for the L1 cache. 12 bits are unpacked there, once for all rows of a
//              piece. 2 blocks of 16 rows of x pass by, 16 KB each, and sums of 4 KB are added to
//
// Sums of a chunk go through memory in float32, which rounds nothing. So rows of x have the same bits whatever the cut,
// and by vectors as by the unit: the order of a sum is the unit's in both.
//
//     32 columns    even = sum of w[2 i] x[2 i]      odd = sum of w[2 i + 1] x[2 i + 1]      fused, from zero
//                   total = total + (even + odd)     denormals are zeros (MXCSR, for the time of a piece)
//
// Rejected: sums that stay in the unit for the whole width. W and x would both come out of the L2 cache, 64 bytes in a
// cycle. Also rejected: tiles with fewer rows and columns at the edges. Zeros give the same sums.

namespace weft {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kStepColumns = 32;
constexpr int64_t kStepNumbers = kTileBytes / 2;
constexpr int64_t kStepUnits = kStepColumns / kUnitColumns;
constexpr int64_t kChunkSteps = 8;
constexpr int64_t kMatrixPartBytes = 1 << 20;  // of x in a piece
constexpr int64_t kMatrixPartRows = 128;       // at least: W is unpacked for each part

struct alignas(64) Line {
  uint16_t numbers[32];
};

// Denormals are zeros while this lives, as they are to a matrix unit.
class FlushedDenormals {
 public:
  FlushedDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushedDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
};

// A product and where its x lies: in tiles from ``block`` on, or, of few rows, in floats from ``number`` on.
struct MatrixJob {
  LinearArgs args;
  bool few;
  int64_t block, number;
};

struct MatrixPiece {
  int64_t job, tile, first, last;  // rows of x
};

struct MatrixStep {
  std::vector<MatrixJob> jobs;
  std::vector<MatrixPiece> pieces;
  std::vector<Line> tiles;     // of x: [blocks][steps][16 rows][32 columns]
  std::vector<float> numbers;  // of x: [rows][steps * 32]
};

int64_t steps_of(const Weight& weight) { return (weight.in + kStepColumns - 1) / kStepColumns; }

// Tiles [tile, tile + count) of W, a chunk of steps at a time. Chunks are asked for in order.
class TileChunks {
 public:
  TileChunks(const Weight& weight, int64_t tile, int count, Line* room) : weight_(weight), tile_(tile), count_(count), room_(room) {
    if (packed())
      for (int t = 0; t < count; ++t) odd_[t] = SqueezedTile(weight, tile + t).odd;
  }

  bool packed() const { return weight_.form == WeightForm::bfloat16_twelve_bit; }
  int64_t stride() const { return stride_; }

  // Steps [first, first + steps), all of them whole or one that is not.
  const uint16_t* chunk(int64_t first, int64_t steps) {
    const bool whole = (first + steps) * kStepColumns <= weight_.in;
    if (!packed() && whole) {
      stride_ = weight_.in * kTile;
      return static_cast<const uint16_t*>(weight_.data) + tile_ * stride_ + first * kStepNumbers;
    }
    stride_ = steps * kStepNumbers;
    if (!whole) std::memset(room_, 0, static_cast<size_t>(count_ * stride_ * 2));
    for (int t = 0; t < count_; ++t) {
      uint16_t* const to = room_->numbers + t * stride_;
      if (packed()) unpack(t, first * kStepUnits, whole ? steps * kStepUnits : weight_.in / kUnitColumns - first * kStepUnits, to);
      else std::memcpy(to, static_cast<const uint16_t*>(weight_.data) + ((tile_ + t) * weight_.in + first * kStepColumns) * kTile,
                       static_cast<size_t>((weight_.in - first * kStepColumns) * kTile * 2));
    }
    return room_->numbers;
  }

 private:
  void unpack(int t, int64_t unit, int64_t count, uint16_t* to) {
    const SqueezedTile tile(weight_, tile_ + t);
    const __m512i highs = tile.upper_bytes();
    for (const int64_t end = unit + count; unit < end; ++unit, to += kUnitWords) {
      const uint8_t* const from = tile.units + unit * kStepBytes;
      Half halves[2];
      for (int line = 0; line < 3; ++line) __builtin_prefetch(from + kFetchedAhead + line * 64, 0, 2);
      if (__builtin_expect(*odd_[t] >> 16 < (unit + 1) * kUnitWords, 0)) {
        odd_[t] = unpack_odd(tile, odd_[t], unit, halves);
      } else {
        halves[0] = unpacked<0>(from, highs);
        halves[1] = unpacked<1>(from, highs);
      }
      for (int pair = 0; pair < kUnitPairs; ++pair)
        _mm512_storeu_si512(to + pair * kPairWords, halves[pair / 2].pairs[pair % 2]);
    }
  }

  const Weight& weight_;
  int64_t tile_;
  int count_;
  Line* room_;
  int64_t stride_ = 0;
  const int64_t* odd_[2] = {};
};

// body(first, steps) for chunks of whole steps, then for a last step that is not whole.
template <class Body>
WEFT_INLINE void each_chunk(const Weight& weight, int64_t chunk, const Body& body) {
  const int64_t whole = weight.in / kStepColumns;
  for (int64_t first = 0; first < whole; first += chunk) body(first, whole - first < chunk ? whole - first : chunk);
  if (whole * kStepColumns < weight.in) body(whole, 1);
}

// One tile of W times ROWS rows of x, added to sums [ROWS], in the order of a matrix unit.
template <int ROWS>
void few_row_sums(const uint16_t* w, const float* x, int64_t x_stride, int64_t steps, f32x16* sums) {
  for (int64_t step = 0; step < steps; ++step, x += kStepColumns) {
    f32x16 even[ROWS] = {}, odd[ROWS] = {};
    for (int64_t pair = 0; pair < kTileSide; ++pair, w += kPairWords) {
      const bf16* const pairs = reinterpret_cast<const bf16*>(w);
      const f32x16 first = widened<0>(pairs), second = widened<1>(pairs);
      for (int r = 0; r < ROWS; ++r) {
        even[r] = fused(first, splat(x[r * x_stride + 2 * pair]), even[r]);
        odd[r] = fused(second, splat(x[r * x_stride + 2 * pair + 1]), odd[r]);
      }
    }
    for (int r = 0; r < ROWS; ++r) sums[r] += even[r] + odd[r];
  }
}

using FewRowSums = void (*)(const uint16_t*, const float*, int64_t, int64_t, f32x16*);
constexpr FewRowSums kFewRowSums[kFewRows] = {few_row_sums<1>, few_row_sums<2>, few_row_sums<3>, few_row_sums<4>,
                                              few_row_sums<5>, few_row_sums<6>, few_row_sums<7>, few_row_sums<8>};

WEFT_INLINE void write_sum(const LinearArgs& args, int64_t row, int64_t tile, f32x16 sum) {
  const int64_t at = tile * kTile, count = args.weight.out - at;
  store_some(static_cast<bf16*>(args.out) + row * args.weight.out + at,
             args.bias ? sum + load_some(args.bias + at, count) : sum, count);
}

void few_rows_piece(const LinearArgs& args, const float* x, int64_t tile, int64_t end) {
  alignas(64) Line room[2 * kChunkSteps * kTileBytes / 64];
  f32x16 sums[2][kFewRows];
  const int64_t rows = args.rows, width = steps_of(args.weight) * kStepColumns;
  for (; tile < end; tile += 2) {
    const int count = tile + 1 < end ? 2 : 1;
    for (int t = 0; t < count; ++t)
      for (int64_t r = 0; r < rows; ++r) sums[t][r] = splat(0);
    {
      const FlushedDenormals flushed;
      TileChunks w(args.weight, tile, count, room);
      each_chunk(args.weight, w.packed() ? kChunkSteps : args.weight.in, [&](int64_t first, int64_t steps) {
        const uint16_t* const chunk = w.chunk(first, steps);
        for (int t = 0; t < count; ++t)
          kFewRowSums[rows - 1](chunk + t * w.stride(), x + first * kStepColumns, width, steps, sums[t]);
      });
    }
    for (int t = 0; t < count; ++t)
      for (int64_t r = 0; r < rows; ++r) write_sum(args, r, tile + t, sums[t][r]);
  }
}

// Rows [first, last) of x, whose tiles are ``x``, times tiles [tile, end).
void matrix_piece(const LinearArgs& args, const Line* x, int64_t first, int64_t last, int64_t tile, int64_t end) {
  static thread_local std::vector<Line> sums_room;
  alignas(64) Line room[2 * kChunkSteps * kTileBytes / 64];
  const int64_t steps_in_all = steps_of(args.weight), blocks = (last - first + kTileSide - 1) / kTileSide;
  const int64_t pairs = (blocks + 1) / 2;
  const size_t lines = static_cast<size_t>(pairs * 4 * kSumNumbers * 4 / 64);
  if (sums_room.size() < lines) sums_room.resize(lines);
  float* const sums = reinterpret_cast<float*>(sums_room.data());
  const uint16_t* const numbers = x->numbers + first / kTileSide * steps_in_all * kStepNumbers;
  const TileKernels& unit = tile_kernels();
  for (; tile < end; tile += 2) {
    const int count = tile + 1 < end ? 2 : 1;
    TileChunks w(args.weight, tile, count, room);
    // With one pair of blocks nothing comes twice, so nothing has to stay in the L1 cache.
    const int64_t chunk_steps = w.packed() || pairs > 1 ? kChunkSteps : steps_in_all;
    unit.begin();
    each_chunk(args.weight, chunk_steps, [&](int64_t begin, int64_t steps) {
      const uint16_t* const chunk = w.chunk(begin, steps);
      for (int64_t pair = 0; pair < pairs; ++pair)
        unit.halves({numbers + (2 * pair * steps_in_all + begin) * kStepNumbers, chunk, steps_in_all * kStepNumbers,
                     w.stride(), steps, 2 * pair + 1 < blocks ? 2 : 1, count, begin == 0,
                     sums + pair * 4 * kSumNumbers});
    });
    unit.end();
    for (int64_t block = 0; block < blocks; ++block)
      for (int t = 0; t < count; ++t) {
        const float* from = sums + (block / 2 * 4 + block % 2 * count + t) * kSumNumbers;
        for (int64_t row = first + block * kTileSide; row < last && row < first + (block + 1) * kTileSide; ++row, from += kTile)
          write_sum(args, row, tile + t, load(from));
      }
  }
}

// Rows [16 block, ...) of x into a block's tiles.
void set_block(const LinearArgs& args, int64_t block, uint16_t* to) {
  const int64_t steps = steps_of(args.weight);
  for (int64_t step = 0; step < steps; ++step)
    for (int64_t r = 0; r < kTileSide; ++r, to += kStepColumns) {
      const int64_t row = block * kTileSide + r, left = args.weight.in - step * kStepColumns;
      const size_t count = row >= args.rows ? 0 : static_cast<size_t>(left < kStepColumns ? left : kStepColumns);
      const bf16* const from = static_cast<const bf16*>(args.x) + row * args.x_stride + step * kStepColumns;
      if (count) std::memcpy(to, from, count * sizeof(bf16));
      std::memset(to + count, 0, (kStepColumns - count) * sizeof(bf16));
    }
}

void set_numbers(const LinearArgs& args, int64_t row, float* to) {
  const bf16* const from = static_cast<const bf16*>(args.x) + row * args.x_stride;
  const int64_t width = steps_of(args.weight) * kStepColumns;
  for (int64_t i = 0; i < width; i += 16)
    store(to + i, i < args.weight.in ? load_some(from + i, args.weight.in - i) : splat(0));
}

// ``products``: of weights of one size and form, such as experts.
void matrix_products(const LinearArgs* products, int64_t count) {
  static thread_local MatrixStep buffer;
  MatrixStep& step = buffer;
  step.jobs.clear();
  step.pieces.clear();
  const Weight& weight = products[0].weight;
  const int64_t steps = steps_of(weight), tiles = (weight.out + kTile - 1) / kTile, width = steps * kStepColumns;
  const int64_t fit = kMatrixPartBytes / (width * 2), most = fit > kMatrixPartRows ? fit : kMatrixPartRows;
  int64_t blocks = 0, few = 0, rows_in_all = 0;
  for (int64_t i = 0; i < count; ++i) {
    const LinearArgs& args = products[i];
    const MatrixJob job = {args, args.rows <= kFewRows && follows_manual(), blocks, few * width};
    const int64_t own = (args.rows + kTileSide - 1) / kTileSide, parts = job.few ? 1 : (args.rows + most - 1) / most;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t first = own * part / parts * kTileSide, last = own * (part + 1) / parts * kTileSide;
      for (int64_t tile = 0; tile < tiles; tile += kOutTiles)
        step.pieces.push_back({i, tile, first, last < args.rows ? last : args.rows});
    }
    step.jobs.push_back(job);
    if (job.few) few += args.rows;
    else blocks += own;
    rows_in_all += args.rows;
  }
  if (step.tiles.size() < static_cast<size_t>(blocks * steps * kTileBytes / 64))
    step.tiles.resize(static_cast<size_t>(blocks * steps * kTileBytes / 64));
  if (step.numbers.size() < static_cast<size_t>(few * width)) step.numbers.resize(static_cast<size_t>(few * width));
  // A product's rows, or blocks of 16 rows, one after the other in all products.
  Pool& pool = Pool::instance();
  pool.for_each(count, 0.2 * static_cast<double>(width * rows_in_all / count), [&](int64_t i) {
    const MatrixJob& job = step.jobs[static_cast<size_t>(i)];
    if (job.few)
      for (int64_t row = 0; row < job.args.rows; ++row) set_numbers(job.args, row, step.numbers.data() + job.number + row * width);
    else if (count > 1)
      for (int64_t block = 0; block * kTileSide < job.args.rows; ++block)
        set_block(job.args, block, (step.tiles.data() + (job.block + block) * steps * kTileBytes / 64)->numbers);
  });
  if (count == 1 && !step.jobs[0].few)
    pool.for_each(blocks, 0.2 * static_cast<double>(kTileSide * width), [&](int64_t block) {
      set_block(products[0], block, (step.tiles.data() + block * steps * kTileBytes / 64)->numbers);
    });
  // Some 25 GB of weights, or 500 billion products, in a second.
  const double nanoseconds = static_cast<double>(kOutRows * weight.in) *
                             (0.08 + 0.002 * static_cast<double>(rows_in_all) / static_cast<double>(count));
  pool.for_each(static_cast<int64_t>(step.pieces.size()), nanoseconds, [&](int64_t at) {
    const MatrixPiece& piece = step.pieces[static_cast<size_t>(at)];
    const MatrixJob& job = step.jobs[static_cast<size_t>(piece.job)];
    const int64_t end = piece.tile + kOutTiles < tiles ? piece.tile + kOutTiles : tiles;
    if (job.few) few_rows_piece(job.args, step.numbers.data() + job.number, piece.tile, end);
    else matrix_piece(job.args, step.tiles.data() + job.block * steps * kTileBytes / 64, piece.first, piece.last, piece.tile, end);
  });
}
#endif

}  // namespace
}  // namespace weft
