// Matrix products y = x W^T of float weights in tiles: float32 on every CPU, bfloat16 by products of pairs
// (AVX512-BF16).
//
//   tile   column 0 of 16 rows | column 1 of 16 rows | ...       64 bytes each, one stream from memory
//          (bfloat16: columns 0-1, columns 2-3, ...)
//   item   64 rows of W: four tiles
//   block  6 rows of x meet 4 tiles: 24 sums in registers for the whole width of W     (AVX2: 6 rows, 1 tile)
//
//   per 64 bytes of a tile     4 vectors of W loaded, 6 numbers of x spread over the lanes, 24 products added
//
// A lane is a row of W: nothing is added across. Each sum is made column after column in one accumulator, so a row of
// x gives the same bits whatever rows are beside it. The four tiles (128 KB at 1,024 columns of bfloat16) stay in the
// L2 cache for all blocks of x, and x comes by the few bytes: prompts run at some 95 % of the products a core can
// make, and a single row at the speed of memory.
//
// Rejected: cutting the columns into parts that fit the L1 cache (sums would go through memory; nothing gained up
// to 12,288 columns); blocks of 8 rows and 3 tiles (as fast, and 64 rows are no whole number of them).

namespace weft {
namespace {

#if defined(__AVX512F__)
constexpr int kTogether = 4;
#else
constexpr int kTogether = 1;
#endif
#if defined(__AVX512F__) || defined(__AVX2__)
constexpr int kTileRows = 6;
#else
constexpr int kTileRows = 2;
#endif

// ROWS rows of x times TILES tiles -> sums [ROWS][TILES].
template <int ROWS, int TILES>
WEFT_INLINE void tile_sums(const float* tiles, int64_t tile_stride, const float* x, int64_t x_stride, int64_t in,
                           f32x16* sums) {
  f32x16 acc[ROWS][TILES] = {};
  for (int64_t i = 0; i < in; ++i) {
    f32x16 w[TILES];
    for (int t = 0; t < TILES; ++t) w[t] = load(tiles + t * tile_stride + i * kTile);
    for (int r = 0; r < ROWS; ++r)
      for (int t = 0; t < TILES; ++t) acc[r][t] += w[t] * x[r * x_stride + i];
  }
  for (int r = 0; r < ROWS; ++r)
    for (int t = 0; t < TILES; ++t) sums[r * TILES + t] = acc[r][t];
}

#if defined(__AVX512F__)
template <int ROWS, int TILES>
WEFT_BF16 void tile_sums(const bf16* tiles, int64_t tile_stride, const bf16* x, int64_t x_stride, int64_t in,
                         f32x16* sums) {
  __m512 acc[ROWS][TILES] = {};
  for (int64_t pair = 0; pair < in / 2; ++pair) {
    __m512i w[TILES];
    for (int t = 0; t < TILES; ++t) w[t] = _mm512_loadu_si512(tiles + t * tile_stride + pair * 2 * kTile);
    for (int r = 0; r < ROWS; ++r) {
      int32_t two;
      std::memcpy(&two, x + r * x_stride + 2 * pair, sizeof two);
      const __m512i both = _mm512_set1_epi32(two);
      for (int t = 0; t < TILES; ++t) acc[r][t] = _mm512_dpbf16_ps(acc[r][t], (__m512bh)w[t], (__m512bh)both);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int t = 0; t < TILES; ++t) sums[r * TILES + t] = (f32x16)acc[r][t];
}
#endif

template <class T, int TILES>
void tile_rows(const LinearArgs& args, int64_t tile, int64_t row, int rows) {
  const Weight& weight = args.weight;
  const int64_t stride = weight.in * kTile, x_stride = args.x_stride, in = weight.in;
  const T* tiles = static_cast<const T*>(weight.data) + tile * stride;
  const T* x = static_cast<const T*>(args.x) + row * x_stride;
  f32x16 sums[kTileRows * TILES];
  switch (rows) {
    case 1: tile_sums<1, TILES>(tiles, stride, x, x_stride, in, sums); break;
    case 2: tile_sums<2, TILES>(tiles, stride, x, x_stride, in, sums); break;
    case 3: if constexpr (kTileRows >= 3) tile_sums<3, TILES>(tiles, stride, x, x_stride, in, sums); break;
    case 4: if constexpr (kTileRows >= 4) tile_sums<4, TILES>(tiles, stride, x, x_stride, in, sums); break;
    case 5: if constexpr (kTileRows >= 5) tile_sums<5, TILES>(tiles, stride, x, x_stride, in, sums); break;
    default: if constexpr (kTileRows >= 6) tile_sums<6, TILES>(tiles, stride, x, x_stride, in, sums);
  }
  for (int r = 0; r < rows; ++r)
    for (int t = 0; t < TILES; ++t) {
      const int64_t at = (tile + t) * kTile, count = weight.out - at;
      f32x16 y = sums[r * TILES + t];
      if (args.bias) {
        f32x16 bias = splat(0);
        if (count >= kTile) bias = load(args.bias + at);
        else for (int64_t i = 0; i < count; ++i) bias[i] = args.bias[at + i];
        y += bias;
      }
      store_some(static_cast<T*>(args.out) + (row + r) * weight.out + at, y, count);
    }
}

template <class T>
void tile_products(const LinearArgs& args) {
  const Weight& weight = args.weight;
  const int64_t blocks = (args.rows + kTileRows - 1) / kTileRows;
  // Some 25 GB of weights, or 100 billion products of float32, in a second.
  const double nanoseconds = static_cast<double>(kOutRows * weight.in * static_cast<int64_t>(sizeof(T))) *
                             (0.04 + 0.0025 * static_cast<double>(args.rows));
  Pool::instance().for_each((weight.out + kOutRows - 1) / kOutRows, nanoseconds, [&](int64_t item) {
    const int64_t tile = item * kOutTiles, tiles = (weight.out + kTile - 1) / kTile - tile;
    // Rows in blocks of nearly one size: 8 are 4 and 4.
    for (int64_t block = 0, row = 0; block < blocks; ++block) {
      const int64_t end = args.rows * (block + 1) / blocks;
      const int rows = static_cast<int>(end - row);
      if (rows > 1 && tiles >= kOutTiles) {
        for (int64_t t = 0; t < kOutTiles; t += kTogether) tile_rows<T, kTogether>(args, tile + t, row, rows);
      } else {  // a single row: one tile after the other is one stream
        for (int64_t t = 0; t < kOutTiles && t < tiles; ++t) tile_rows<T, 1>(args, tile + t, row, rows);
      }
      row = end;
    }
  });
}

void linear(const LinearArgs& args) {
  if (args.weight.form == WeightForm::float32_tiles) return tile_products<float>(args);
#if defined(__AVX512F__)
  if (args.weight.form == WeightForm::bfloat16_tiles) return tile_products<bf16>(args);
#endif
  if (args.weight.form == WeightForm::int8_both)
    return args.x_dtype == Dtype::bfloat16 ? byte_products<bf16>(args) : byte_products<float>(args);
  if (args.x_dtype == Dtype::bfloat16) linear_in<bf16>(args);
  else linear_in<float>(args);
}

}  // namespace
}  // namespace weft
