// Products of bfloat16 rows where a matrix unit multiplies: x is laid out once, and pieces are jobs of the threads.
//
//     weights                  pieces               1 or 2 rows     more rows: by the unit
//     bfloat16, 12 bits        matrix_pieces.hpp    by the unit     4 to 16 tiles of W and a part of the rows of x
//     fp8, tables of 4 bits    matrix_pieces.hpp    by vectors      the same
//     int8, int6, int4         code_pieces.hpp      by vectors      the same
//
//     few rows    x in float32, [rows][columns, zeros up to a step]
//     more rows   x in tiles of the unit, [blocks of 16 rows][steps of 32 columns][16 rows][32 columns]
//
// Products of many experts are one job: the threads are busy alike whichever expert has the rows.
#pragma once

#include "code_pieces.hpp"

namespace weft {
namespace {

#if defined(__AVX512F__)
// A product and the position of its x: in tiles from ``block`` on, or, with few rows, in floats from ``number`` on.
struct MatrixJob {
  LinearArgs args;
  bool few;
  int64_t block, number;
  int64_t sums;  // index of the sums of x, -1 for none
};

struct MatrixPiece {
  int64_t job, tile, first, last;  // rows of x
};

struct MatrixStep {
  std::vector<MatrixJob> jobs;
  std::vector<MatrixPiece> pieces;
  std::vector<Line> tiles;     // of x: [blocks][steps][16 rows][32 columns]
  std::vector<float> numbers;  // of x: [rows][steps * 32]
  std::vector<float> sums;     // of x: [rows][steps], for weights with minimums
};

// Rows [16 block, ...) of x into a block's tiles.
void set_block(const LinearArgs& args, int64_t block, uint16_t* to) {
  const int64_t steps = steps_of(args.weight), columns = columns_of_step(args.weight);
  for (int64_t step = 0; step < steps; ++step)
    for (int64_t r = 0; r < kTileSide; ++r, to += kStepColumns) {
      const int64_t row = block * kTileSide + r, left = args.weight.in - step * columns;
      const size_t count = row >= args.rows || left <= 0 ? 0 : static_cast<size_t>(left < columns ? left : columns);
      const bf16* const from = static_cast<const bf16*>(args.x) + row * args.x_stride + step * columns;
      if (count == kStepColumns) {  // nearly all: one line, where a copy of any length costs a tenth of a product
        _mm512_storeu_si512(to, _mm512_loadu_si512(from));
        continue;
      }
      if (count) std::memcpy(to, from, count * sizeof(bf16));
      std::memset(to + count, 0, (kStepColumns - count) * sizeof(bf16));
    }
}

void set_numbers(const LinearArgs& args, int64_t row, float* to) {
  const bf16* const from = static_cast<const bf16*>(args.x) + row * args.x_stride;
  const int64_t width = steps_of(args.weight) * columns_of_step(args.weight);
  for (int64_t i = 0; i < width; i += 16)
    store(to + i, i < args.weight.in ? load_some(from + i, args.weight.in - i) : splat(0));
}

void set_sums(const LinearArgs& args, int64_t row, float* to) {
  const bf16* const from = static_cast<const bf16*>(args.x) + row * args.x_stride;
  const auto sixteen = [&](int64_t i) {
    return i < args.weight.in ? load_some(from + i, args.weight.in - i) : splat(0);
  };
  const int64_t steps = steps_of(args.weight), columns = columns_of_step(args.weight);
  for (int64_t i = 0; i < steps * columns; i += columns)
    *to++ = sum(columns == kStepColumns ? sixteen(i) + sixteen(i + 16) : sixteen(i));
}

// Tiles of W in a piece: a multiple of kOutTiles, with some four pieces for each thread if there are enough tiles.
int64_t tiles_of_piece(const LinearArgs* products, int64_t count, int64_t most_rows, int threads) {
  const Weight& weight = products[0].weight;
  int64_t parts = 0, rows = 0;
  for (int64_t i = 0; i < count; ++i) {
    parts += (products[i].rows + most_rows - 1) / most_rows;
    if (rows < products[i].rows) rows = products[i].rows;
  }
  if (in_tiles(weight.form) || rows <= 2 * kTileSide) return kOutTiles;
  const bool wide = (rows < most_rows ? rows : most_rows) * weight.in * 2 > kWideBytes;
  const int64_t most = !wide ? kTiles : products[0].gated ? kWideTiles / 2 : kWideTiles;
  const int64_t fair = (columns_of(products[0]) + kTile - 1) / kTile * parts / (4 * threads) / kOutTiles * kOutTiles;
  return fair < kOutTiles ? kOutTiles : fair < most ? fair : most;
}

// ``products``: of weights of one size, all of numbers or all of codes, such as experts.
void matrix_products(const LinearArgs* products, int64_t count) {
  static thread_local MatrixStep buffer;
  MatrixStep& step = buffer;
  step.jobs.clear();
  step.pieces.clear();
  const Weight& weight = products[0].weight;
  const int64_t steps = steps_of(weight), tiles = (columns_of(products[0]) + kTile - 1) / kTile,
                width = steps * columns_of_step(weight);
  const int64_t fit = kCodePartBytes / (width * 2), of_codes = fit > kCodePartRows ? fit : kCodePartRows,
                most = in_tiles(weight.form) ? of_codes : kMatrixPartRows;
  Pool& pool = Pool::instance();
  const int64_t of_piece = tiles_of_piece(products, count, most, pool.threads());
  int64_t blocks = 0, few = 0, rows_in_all = 0, rows_of_piece = 0;
  for (int64_t i = 0; i < count; ++i) {
    const LinearArgs& args = products[i];
    const bool has_codes = in_tiles(args.weight.form) || is_coded(args.weight.form);
    const MatrixJob job = {args, has_codes && args.rows <= kFewRows && follows_manual(), blocks, few * width,
                           args.weight.minimums ? rows_in_all * steps : -1};
    const int64_t own = (args.rows + kTileSide - 1) / kTileSide, parts = job.few ? 1 : (args.rows + most - 1) / most;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t first = own * part / parts * kTileSide, last = own * (part + 1) / parts * kTileSide;
      for (int64_t tile = 0; tile < tiles; tile += of_piece)
        step.pieces.push_back({i, tile, first, last < args.rows ? last : args.rows});
      if (rows_of_piece < last - first) rows_of_piece = last - first;
    }
    step.jobs.push_back(job);
    if (job.few) few += args.rows;
    else blocks += own;
    rows_in_all += args.rows;
  }
  if (step.tiles.size() < static_cast<size_t>(blocks * steps * kTileBytes / 64))
    step.tiles.resize(static_cast<size_t>(blocks * steps * kTileBytes / 64));
  if (step.numbers.size() < static_cast<size_t>(few * width)) step.numbers.resize(static_cast<size_t>(few * width));
  if (weight.minimums && step.sums.size() < static_cast<size_t>(rows_in_all * steps))
    step.sums.resize(static_cast<size_t>(rows_in_all * steps));
  // A product's rows, or blocks of 16 rows, one after the other in all products.
  pool.for_each(count, 0.2 * static_cast<double>(width * rows_in_all / count), [&](int64_t i) {
    const MatrixJob& job = step.jobs[static_cast<size_t>(i)];
    for (int64_t row = 0; job.sums >= 0 && row < job.args.rows; ++row)
      set_sums(job.args, row, step.sums.data() + job.sums + row * steps);
    if (job.few)
      for (int64_t row = 0; row < job.args.rows; ++row)
        set_numbers(job.args, row, step.numbers.data() + job.number + row * width);
    else if (count > 1)
      for (int64_t block = 0; block * kTileSide < job.args.rows; ++block)
        set_block(job.args, block, (step.tiles.data() + (job.block + block) * steps * kTileBytes / 64)->numbers);
  });
  if (count == 1 && !step.jobs[0].few)
    pool.for_each(blocks, 0.2 * static_cast<double>(kTileSide * width), [&](int64_t block) {
      set_block(products[0], block, (step.tiles.data() + block * steps * kTileBytes / 64)->numbers);
    });
  pool.reserve(piece_scratch(rows_of_piece, products[0].gated ? 2 * of_piece : of_piece));
  // Some 25 GB of weights, or 500 billion products, in a second.
  const double nanoseconds = static_cast<double>(of_piece * kTile * weight.in) *
                             (0.08 + 0.002 * static_cast<double>(rows_in_all) / static_cast<double>(count));
  pool.for_each(static_cast<int64_t>(step.pieces.size()), nanoseconds, [&](int64_t at) {
    const MatrixPiece& piece = step.pieces[static_cast<size_t>(at)];
    const MatrixJob& job = step.jobs[static_cast<size_t>(piece.job)];
    const int64_t end = piece.tile + of_piece < tiles ? piece.tile + of_piece : tiles;
    const bool codes = in_tiles(job.args.weight.form);
    const float* const sums = job.sums < 0 ? nullptr : step.sums.data() + job.sums;
    const float* const numbers = step.numbers.data() + job.number;
    const Line* const x = step.tiles.data() + job.block * steps * kTileBytes / 64;
    if (job.few && codes) few_code_rows_piece(job.args, numbers, sums, piece.tile, end);
    else if (job.few) few_rows_piece(job.args, numbers, piece.tile, end);
    else if (codes) matrix_code_piece(job.args, x, sums, piece.first, piece.last, piece.tile, end);
    else matrix_piece(job.args, x, piece.first, piece.last, piece.tile, end);
  });
}
#endif

}  // namespace
}  // namespace weft
