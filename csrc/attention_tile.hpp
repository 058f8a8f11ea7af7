// Attention of a few query rows over one tile of packed pages: scores, online softmax, weighted sum of values.
//
//   scores[row][64 tokens] = q . K      a line of K holds 16 tokens of 1, 2 or 4 channels
//   online softmax                      (Milakov and Gimelshein, 2018)
//   acc[row][D] += p . V                a line of V holds 16 channels of 1, 2 or 4 tokens
//
// A block is 8, 4 or fewer rows. Its scores stay in registers while each line is used for all of them. With pairs it is
// up to 6 rows and four lines, which are 24 sums in registers and fewer loads than products.
//
// A token that a row may not see is replaced: its score by -inf. V of unwritten tokens is replaced by 0, because 0 x
// NaN is NaN (law L6). A page id of PAD inside a context is skipped: its tokens are not seen and nothing is read (law
// L4). The test is one predicted branch a page, cheap compared with the kilobytes read from the page.
//
// bf16 queries over bf16 pages have a second form (WEFT_DOTS) on machines that multiply pairs of bf16. It uses lines as
// they are. Scores lose nothing, as both factors are bf16 anyway. Weights are rounded to bf16, also in the sum that
// divides them, so they still add up to one.
//
// A matrix unit (matrix_unit.hpp) has a third form, of the same pages, queries and weights: blocks of up to 16 rows.
// Its order of sums is another one, so it serves a single row as well as a prompt. Decision 0045 has the times.
#pragma once

#include "kv_numbers.hpp"
#include "matrix_unit.hpp"

namespace weft {
namespace {

constexpr int kTilePages = 4;
constexpr int kTileTokens = kTilePages * kPageTokens;
constexpr int kMaxDim = 512;
#if defined(__AVX512F__)
constexpr int kSumRows = 8;
#else
constexpr int kSumRows = 4;  // the sums of more rows do not stay in registers
#endif

// What multiplies: vectors of floats, vectors of pairs of bf16, or a matrix unit.
enum class By { floats, pairs, unit };

// One KV head of one sequence: its page table and its number of tokens.
struct Context {
  const int32_t* pages;
  int64_t tokens;
  int64_t kv_head;
};

struct RowState {
  float most, total;
};

// scores[row][0..16) of one page for ROWS rows
template <class KV, int ROWS>
WEFT_INLINE void score_page(const KV* k, const float* const* q, int64_t dim, f32x16* scores) {
  constexpr int pack = kPack<KV>;
  f32x16 acc[ROWS] = {}, line[pack];
  for (int64_t d = 0; d < dim; d += pack) {
    load_line(k + d * kPageTokens, line);
    for (int r = 0; r < ROWS; ++r)
      for (int i = 0; i < pack; ++i) acc[r] += line[i] * q[r][d + i];
  }
  for (int r = 0; r < ROWS; ++r) scores[r] = acc[r];
}

// acc[row][dim] += p[row][tokens of the page] . V; ``written`` tokens of the page may be read
template <class KV, int ROWS>
WEFT_INLINE void add_values(const KV* v, const float* const* p, int written, int64_t dim, float* const* acc) {
  constexpr int pack = kPack<KV>;
  for (int64_t d = 0; d < dim; d += 16) {
    f32x16 sum_[ROWS], line[pack];
    for (int r = 0; r < ROWS; ++r) sum_[r] = load(acc[r] + d);
    for (int t = 0; t < written; t += pack) {
      load_line(v + t * dim + d * pack, line);
      for (int i = 1; i < pack; ++i)
        if (t + i >= written) line[i] = splat(0);
      for (int r = 0; r < ROWS; ++r)
        for (int i = 0; i < pack; ++i) sum_[r] += line[i] * p[r][t + i];
    }
    for (int r = 0; r < ROWS; ++r) store(acc[r] + d, sum_[r]);
  }
}

// The softmax weights of a row; returns their sum.
WEFT_INLINE float weigh(const f32x16* scores, int64_t pages, float shift, float* weights) {
  f32x16 total = splat(0);
  for (int64_t i = 0; i < pages; ++i) {
    const f32x16 weight = exp(scores[i] - shift);
    store(weights + i * kPageTokens, weight);
    total += weight;
  }
  return sum(total);
}

#ifdef WEFT_DOT_TABLE
#define WEFT_DOTS __attribute__((target("avx512bf16")))

// The same with pairs of bf16, which q holds too, of PAGES pages at once: a pair of q meets a line of each page. Scores of
// a row are kTilePages apart.
template <int ROWS, int PAGES>
WEFT_DOTS void score_pages_dots(const bf16* const* keys, const float* const* q, int64_t dim, f32x16* scores) {
  __m512 acc[ROWS][PAGES] = {};
  for (int64_t pair = 0; pair < dim / 2; ++pair) {
    __m512i lines[PAGES];
    for (int i = 0; i < PAGES; ++i) lines[i] = _mm512_loadu_si512(keys[i] + pair * 2 * kPageTokens);
    for (int r = 0; r < ROWS; ++r) {
      const __m512bh both = (__m512bh)_mm512_set1_ps(q[r][pair]);
      for (int i = 0; i < PAGES; ++i) acc[r][i] = _mm512_dpbf16_ps(acc[r][i], (__m512bh)lines[i], both);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int i = 0; i < PAGES; ++i) scores[r * kTilePages + i] = (f32x16)acc[r][i];
}

// The same rounded to bf16.
WEFT_DOTS float weigh_dots(const f32x16* scores, int64_t pages, float shift, bf16* weights) {
  f32x16 total = splat(0);
  for (int64_t i = 0; i < pages; ++i) {
    // No weight is a denormal number, which this instruction would take for 0.
    const __m256i rounded_weight = (__m256i)_mm512_cvtneps_pbh((__m512)exp(scores[i] - shift));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + i * kPageTokens), rounded_weight);
    total += (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded_weight), 16);
  }
  return sum(total);
}

// acc[row][channels from d on] += p[row][tokens of the pages] . V, 16 LINES channels at once; returns the next channel.
// ``values``: null for a page that is skipped; ``weights``: bf16, from the start of each row.
template <int ROWS, int LINES>
WEFT_DOTS int64_t add_values_dots(const bf16* const* values, const int* written, int64_t pages,
                                  const float (*weights)[kTileTokens], int64_t d, int64_t dim, float* const* acc) {
  for (; d + 16 * LINES <= dim; d += 16 * LINES) {
    __m512 sums[ROWS][LINES];
    for (int r = 0; r < ROWS; ++r)
      for (int l = 0; l < LINES; ++l) sums[r][l] = _mm512_loadu_ps(acc[r] + d + 16 * l);
    for (int64_t i = 0; i < pages; ++i) {
      if (!values[i]) continue;
      const bf16* v = values[i] + d * 2;
      for (int t = 0; t < written[i]; t += 2, v += dim * 2) {
        __m512i lines[LINES];
        for (int l = 0; l < LINES; ++l) lines[l] = _mm512_loadu_si512(v + l * 32);
        if (t + 1 >= written[i])
          for (int l = 0; l < LINES; ++l) lines[l] = _mm512_and_si512(lines[l], _mm512_set1_epi32(0xFFFF));
        for (int r = 0; r < ROWS; ++r) {
          const __m512bh both = (__m512bh)_mm512_set1_ps(weights[r][i * (kPageTokens / 2) + t / 2]);
          for (int l = 0; l < LINES; ++l) sums[r][l] = _mm512_dpbf16_ps(sums[r][l], (__m512bh)lines[l], both);
        }
      }
    }
    for (int r = 0; r < ROWS; ++r)
      for (int l = 0; l < LINES; ++l) _mm512_storeu_ps(acc[r] + d + 16 * l, sums[r][l]);
  }
  return d;
}
#endif

// The pages of a tile: a KV head's part of each, null for one that is skipped, and the tokens in it.
template <class KV>
struct TilePages {
  int64_t count;
  const KV *keys[kTilePages], *values[kTilePages];
  int written[kTilePages];
  bool all;  // whether the tile is complete and no page is skipped
};

template <class KV>
WEFT_INLINE TilePages<KV> tile_pages(const AttentionArgs& args, const Context& context, int64_t page, int64_t pages) {
  TilePages<KV> tile;
  tile.count = pages;
  tile.all = pages == kTilePages;
  for (int64_t i = 0; i < pages; ++i) {
    const int64_t id = context.pages[page + i], head = context.kv_head * args.dim * kPageTokens;
    const int64_t left = context.tokens - (page + i) * kPageTokens;
    tile.written[i] = left < kPageTokens ? static_cast<int>(left) : kPageTokens;
    tile.keys[i] = id == kPad ? nullptr : static_cast<const KV*>(args.k) + id * args.k_page + head;
    tile.values[i] = id == kPad ? nullptr : static_cast<const KV*>(args.v) + id * args.v_page + head;
    if (id == kPad) tile.all = false;
  }
  return tile;
}

// The scales of a page's tokens, 0 for unwritten tokens. Part 0 is K's, part 1 is V's.
WEFT_INLINE f32x16 token_scales(const AttentionArgs& args, const Context& context, int64_t page, int part) {
  const bf16* from = static_cast<const bf16*>(args.scales.data) + context.pages[page] * args.scales.page +
                     part * args.scales.part + context.kv_head * kPageTokens;
  return select(lane_numbers<i32x16>() < static_cast<int32_t>(context.tokens - page * kPageTokens), load(from),
                splat(0));
}

// The products of ROWS rows with the keys of a tile. Those of a skipped page stay as they are.
template <class KV, int ROWS, By BY>
WEFT_INLINE void score_tile(const AttentionArgs& args, const Context& context, int64_t page, const TilePages<KV>& tile,
                            const float* const* q, f32x16 (*scores)[kTilePages]) {
#ifdef WEFT_DOT_TABLE
  if constexpr (BY == By::pairs) {
    if (tile.all) return score_pages_dots<ROWS, kTilePages>(tile.keys, q, args.dim, scores[0]);
    for (int64_t i = 0; i < tile.count; ++i)
      if (tile.keys[i]) score_pages_dots<ROWS, 1>(tile.keys + i, q, args.dim, scores[0] + i);
    return;
  }
#endif
  for (int64_t i = 0; i < tile.count; ++i) {
    if (!tile.keys[i]) continue;
    f32x16 products[ROWS];
    score_page<KV, ROWS>(tile.keys[i], q, args.dim, products);
    const f32x16 scales = kScaled<KV> ? token_scales(args, context, page + i, 0) : splat(1);
    for (int r = 0; r < ROWS; ++r) scores[r][i] = kScaled<KV> ? products[r] * scales : products[r];
  }
}

// Adds the values of a tile by their weights, which are bf16 for pairs.
template <class KV, int ROWS, By BY>
WEFT_INLINE void add_tile(const AttentionArgs& args, const Context& context, int64_t page, const TilePages<KV>& tile,
                          float (*weights)[kTileTokens], float* const* acc) {
#ifdef WEFT_DOT_TABLE
  if constexpr (BY == By::pairs) {
    const int64_t d = add_values_dots<ROWS, 4>(tile.values, tile.written, tile.count, weights, 0, args.dim, acc);
    add_values_dots<ROWS, 1>(tile.values, tile.written, tile.count, weights, d, args.dim, acc);
    return;
  }
#endif
  for (int64_t i = 0; i < tile.count; ++i) {
    if (!tile.values[i]) continue;
    const float* p[ROWS];
    for (int r = 0; r < ROWS; ++r) p[r] = weights[r] + i * kPageTokens;
    if constexpr (kScaled<KV>) {
      const f32x16 scales = token_scales(args, context, page + i, 1);
      for (int r = 0; r < ROWS; ++r) store(weights[r] + i * kPageTokens, load(weights[r] + i * kPageTokens) * scales);
    }
    add_values<KV, ROWS>(tile.values[i], p, tile.written[i], args.dim, acc);
  }
}

// The weights of a row, of its products with the keys of a tile; what the row summed before decays.
template <class KV, By BY>
WEFT_INLINE void weigh_row(const AttentionArgs& args, const TilePages<KV>& tile, int64_t page, int64_t limit,
                           f32x16* scores, float* weights, float* acc, RowState& state) {
  const f32x16 unseen = splat(-__builtin_inff());
  const i32x16 lane = lane_numbers<i32x16>();
  f32x16 tops = unseen;
  for (int64_t i = 0; i < tile.count; ++i) {
    const int64_t seen = limit - (page + i) * kPageTokens;        // tokens of this page that the row sees
    const int64_t before = args.window ? seen - args.window : 0;  // tokens of this page before the window
    f32x16& score = scores[i];
    if (!tile.keys[i]) {
      score = unseen;
      continue;
    }
    score *= args.scale;
    if (seen < kPageTokens) score = select(lane < static_cast<int32_t>(seen < 0 ? 0 : seen), score, unseen);
    if (before > 0)
      score = select(lane < static_cast<int32_t>(before < kPageTokens ? before : kPageTokens), unseen, score);
    tops = max(tops, score);
  }
  const float before = state.most;
  float most = largest(tops);
  if (before > most) most = before;
  const float shift = most == -__builtin_inff() ? 0.0f : most;  // nothing seen yet: all weights become 0
  float total;
#ifdef WEFT_DOT_TABLE
  if constexpr (BY != By::floats) total = weigh_dots(scores, tile.count, shift, reinterpret_cast<bf16*>(weights));
  else
#endif
    total = weigh(scores, tile.count, shift, weights);
  state.most = most;
  if (before == shift) {  // nearly always: the largest score came before, and nothing decays
    state.total += total;
    return;
  }
  const float decay = before == -__builtin_inff() ? 0.0f : exp(splat(before - shift))[0];
  state.total = state.total * decay + total;
  if (decay != 1.0f)
    for (int64_t d = 0; d < args.dim; d += 16) store(acc + d, load(acc + d) * decay);
}

// One block of rows over one tile of pages; row r sees positions [limits[r] - window, limits[r]).
template <class KV, int ROWS, By BY>
void attend_tile(const AttentionArgs& args, const Context& context, int64_t page, int64_t pages, const float* const* q,
                 const int64_t* limits, float* const* acc, RowState* states) {
  const TilePages<KV> tile = tile_pages<KV>(args, context, page, pages);
  f32x16 scores[ROWS][kTilePages];
  score_tile<KV, ROWS, BY>(args, context, page, tile, q, scores);
  alignas(64) float weights[ROWS][kTileTokens];  // of pairs bf16, from the start of each row
  for (int r = 0; r < ROWS; ++r)
    weigh_row<KV, BY>(args, tile, page, limits[r], scores[r], weights[r], acc[r], states[r]);
  add_tile<KV, ROWS, BY>(args, context, page, tile, weights, acc);
}

#ifdef WEFT_DOT_TABLE
constexpr int kUnitRows = 16;
static_assert(kTilePages == kPagesOfBlock);

// The values of a page with unwritten tokens, which become zeros. Returns ``room``.
inline const uint16_t* written_values(const uint16_t* values, int written, int64_t dim, uint16_t* room) {
  for (int64_t pair = 0; pair < kPageTokens / 2; ++pair)
    for (int64_t at = pair * dim * 2; at < (pair + 1) * dim * 2; at += 2) {
      room[at] = 2 * pair < written ? values[at] : 0;
      room[at + 1] = 2 * pair + 1 < written ? values[at + 1] : 0;
    }
  return room;
}

// One block of up to kUnitRows rows over one tile of pages, by a matrix unit that is shaped for that number of rows
// (TileKernels::begin_rows). q: bf16 from the start of each row, [rows] at a distance of dim floats; acc [rows][dim].
inline void attend_tile_by_unit(const AttentionArgs& args, const Context& context, int rows, int64_t page,
                                int64_t pages, const float* q, const int64_t* limits, float* acc, RowState* states) {
  const TileKernels& unit = tile_kernels();
  const TilePages<bf16> tile = tile_pages<bf16>(args, context, page, pages);
  alignas(64) float scores[kTilePages * kSumNumbers];
  alignas(64) uint16_t weights[kUnitRows][kTileTokens];
  alignas(64) uint16_t room[kPageTokens * kMaxDim];
  const uint16_t *keys[kTilePages], *values[kTilePages];
  for (int64_t i = 0; i < pages; ++i) {
    keys[i] = reinterpret_cast<const uint16_t*>(tile.keys[i]);
    values[i] = reinterpret_cast<const uint16_t*>(tile.values[i]);
    if (values[i] && tile.written[i] < kPageTokens)  // the last page of a context
      values[i] = written_values(values[i], tile.written[i], args.dim, room);
  }
  const int64_t row_bytes = args.dim * static_cast<int64_t>(sizeof(float));
  unit.scores({.q = q, .row_bytes = row_bytes, .keys = keys, .pages = pages, .dim = args.dim, .scores = scores});
  for (int r = 0; r < rows; ++r) {
    f32x16 of_row[kTilePages];
    for (int64_t i = 0; i < pages; ++i) of_row[i] = load(scores + i * kSumNumbers + r * kPageTokens);
    weigh_row<bf16, By::unit>(args, tile, page, limits[r], of_row, reinterpret_cast<float*>(weights[r]),
                              acc + r * args.dim, states[r]);
  }
  unit.values({.weights = weights[0], .values = values, .pages = pages, .dim = args.dim, .acc = acc});
}
#endif

// Rows of a block of vectors, at most.
template <By BY>
constexpr int kBlockRows = BY == By::floats ? kSumRows : 6;

// ``rows`` of a block; blocks of floats with 5 to 7 rows are split into 4 and the rest.
template <class KV, By BY>
void attend_rows(const AttentionArgs& args, const Context& context, int rows, int64_t page, int64_t pages,
                 const float* const* q, const int64_t* limits, float* const* acc, RowState* states) {
  const auto attend = [&](auto count) {
    attend_tile<KV, decltype(count)::value, BY>(args, context, page, pages, q, limits, acc, states);
  };
  if constexpr (BY == By::pairs) {
    if (rows == 6) return attend(std::integral_constant<int, 6>());
    if (rows == 5) return attend(std::integral_constant<int, 5>());
  } else if constexpr (kSumRows == 8) {
    if (rows == 8) return attend(std::integral_constant<int, 8>());
  }
  if (rows >= 4) {
    attend(std::integral_constant<int, 4>());
    rows -= 4, q += 4, limits += 4, acc += 4, states += 4;
  }
  switch (rows) {
    case 1: return attend(std::integral_constant<int, 1>());
    case 2: return attend(std::integral_constant<int, 2>());
    case 3: return attend(std::integral_constant<int, 3>());
    default: return;
  }
}

// Prefetches pages [page, page + pages) of a head. A head's part of a page is a few kB at a separate address, so the
// hardware's prefetcher starts again at each.
template <class KV>
WEFT_INLINE void prefetch_pages(const AttentionArgs& args, const Context& context, int64_t page, int64_t pages) {
  const int64_t bytes = args.dim * kPageTokens * static_cast<int64_t>(sizeof(KV));
  const auto prefetch = [&](const void* all, int64_t at) {
    const char* from = static_cast<const char*>(all) + at * static_cast<int64_t>(sizeof(KV)) + context.kv_head * bytes;
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(from + byte, 0, 2);
  };
  for (int64_t i = page; i < page + pages; ++i) {
    if (context.pages[i] == kPad) continue;
    prefetch(args.k, context.pages[i] * args.k_page);
    prefetch(args.v, context.pages[i] * args.v_page);
  }
}

}  // namespace
}  // namespace weft
