// Attention of a few query rows over one tile of packed pages: scores, online softmax, weighted sum of values.
//
//   scores[row][64 tokens] = q . K      a line of K holds 16 tokens of 1, 2 or 4 channels
//   online softmax                      (Milakov and Gimelshein, 2018)
//   acc[row][D] += p . V                a line of V holds 16 channels of 1, 2 or 4 tokens
//
// A block is 8, 4 or fewer rows. Its scores stay in registers while each line is used for all of them.
//
// A token that a row may not see is replaced: its score by -inf. V of unwritten tokens is replaced by 0, because 0 x
// NaN is NaN (law L6). A page id of PAD inside a context is skipped: its tokens are not seen and nothing is read (law
// L4). The test is one predicted branch a page, cheap compared with the kilobytes read from the page.
//
// bf16 queries over bf16 pages have a second form (DOTS) on machines that multiply pairs of bf16. It uses lines as they
// are. Scores lose nothing, as both factors are bf16 anyway. Weights are rounded to bf16, also in the sum that divides
// them, so they still add up to one.
#pragma once

#include "kv_numbers.hpp"

namespace weft {
namespace {

constexpr int kTilePages = 4;
constexpr int kTileTokens = kTilePages * kPageTokens;
#if defined(__AVX512F__)
constexpr int kBlockRows = 8;
#else
constexpr int kBlockRows = 4;  // the sums of more do not stay in registers
#endif

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

#ifdef WEFT_DOT_TABLE
// The same with pairs of bf16: q and p hold pairs too.
template <int ROWS>
__attribute__((target("avx512bf16"))) void score_page_dots(const bf16* k, const float* const* q, int64_t dim,
                                                           f32x16* scores) {
  __m512 acc[ROWS];
  for (int r = 0; r < ROWS; ++r) acc[r] = _mm512_setzero_ps();
  for (int64_t d = 0; d < dim / 2; ++d) {
    const __m512bh line = (__m512bh)_mm512_loadu_si512(k + 2 * d * kPageTokens);
    for (int r = 0; r < ROWS; ++r) acc[r] = _mm512_dpbf16_ps(acc[r], line, (__m512bh)_mm512_set1_ps(q[r][d]));
  }
  for (int r = 0; r < ROWS; ++r) scores[r] = (f32x16)acc[r];
}

template <int ROWS>
__attribute__((target("avx512bf16"))) void add_values_dots(const bf16* v, const float* const* p, int written,
                                                           int64_t dim, float* const* acc) {
  for (int64_t d = 0; d < dim; d += 16) {
    __m512 sums[ROWS];
    for (int r = 0; r < ROWS; ++r) sums[r] = _mm512_loadu_ps(acc[r] + d);
    for (int t = 0; t < written; t += 2) {
      __m512i line = _mm512_loadu_si512(v + t * dim + d * 2);
      if (t + 1 >= written) line = _mm512_and_si512(line, _mm512_set1_epi32(0xFFFF));
      for (int r = 0; r < ROWS; ++r)
        sums[r] = _mm512_dpbf16_ps(sums[r], (__m512bh)line, (__m512bh)_mm512_set1_ps(p[r][t / 2]));
    }
    for (int r = 0; r < ROWS; ++r) _mm512_storeu_ps(acc[r] + d, sums[r]);
  }
}
#endif

// One block of rows over one tile of pages; row r sees positions [limits[r] - window, limits[r]).
template <class KV, int ROWS, bool DOTS>
void attend_tile(const AttentionArgs& args, const Context& context, int64_t page, int64_t pages, const float* const* q,
                 const int64_t* limits, float* const* acc, RowState* states) {
  f32x16 scores[ROWS][kTilePages];
  const KV* k = static_cast<const KV*>(args.k);
  const KV* v = static_cast<const KV*>(args.v);
  const int64_t block = args.dim * kPageTokens;
  const i32x16 lane = lane_numbers<i32x16>();
  const int32_t* page_ids = context.pages + page;
  // The scales of a page's tokens, 0 for unwritten tokens. Part 0 is K's, part 1 is V's.
  const auto token_scales = [&](int64_t i, int part) {
    const bf16* from = static_cast<const bf16*>(args.scales.data) + page_ids[i] * args.scales.page +
                       part * args.scales.part + context.kv_head * kPageTokens;
    return select(lane < static_cast<int32_t>(context.tokens - (page + i) * kPageTokens), load(from), splat(0));
  };
  for (int64_t i = 0; i < pages; ++i) {
    if (page_ids[i] == kPad) {
      for (int r = 0; r < ROWS; ++r) scores[r][i] = splat(-__builtin_inff());
      continue;
    }
    f32x16 products[ROWS];
    const KV* keys = k + page_ids[i] * args.k_page + context.kv_head * block;
#ifdef WEFT_DOT_TABLE
    if constexpr (DOTS) score_page_dots<ROWS>(keys, q, args.dim, products);
    else
#endif
      score_page<KV, ROWS>(keys, q, args.dim, products);
    if constexpr (kScaled<KV>) {
      const f32x16 scales = token_scales(i, 0);
      for (int r = 0; r < ROWS; ++r) products[r] *= scales;
    }
    const int64_t begin = (page + i) * kPageTokens;
    for (int r = 0; r < ROWS; ++r) {
      const int64_t seen = limits[r] - begin;  // tokens of this page that the row sees
      scores[r][i] = seen >= kPageTokens ? products[r] * args.scale
                                         : select(lane < static_cast<int32_t>(seen < 0 ? 0 : seen),
                                                  products[r] * args.scale, splat(-__builtin_inff()));
      const int64_t before = args.window ? seen - args.window : 0;  // tokens of this page before the window
      if (before > 0)
        scores[r][i] = select(lane < static_cast<int32_t>(before < kPageTokens ? before : kPageTokens),
                              splat(-__builtin_inff()), scores[r][i]);
    }
  }
  alignas(64) float weights[ROWS][kTileTokens];  // with DOTS bf16, from the start of each row
  const float* p[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    f32x16 tops = scores[r][0];
    for (int64_t i = 1; i < pages; ++i) tops = max(tops, scores[r][i]);
    const float before = states[r].most;
    float most = largest(tops);
    if (before > most) most = before;
    const float shift = most == -__builtin_inff() ? 0.0f : most;  // nothing seen yet: all weights become 0
    f32x16 total = splat(0);
    for (int64_t i = 0; i < pages; ++i) {
      f32x16 weight = exp(scores[r][i] - shift);
      if constexpr (DOTS) {
        weight = rounded<bf16>(weight);
        store(reinterpret_cast<bf16*>(weights[r]) + i * kPageTokens, weight);
      } else {
        store(weights[r] + i * kPageTokens, weight);
      }
      total += weight;
    }
    const float decay = before == -__builtin_inff() ? 0.0f : exp(splat(before - shift))[0];
    states[r].total = states[r].total * decay + sum(total);
    states[r].most = most;
    if (decay != 1.0f)
      for (int64_t d = 0; d < args.dim; d += 16) store(acc[r] + d, load(acc[r] + d) * decay);
  }
  for (int64_t i = 0; i < pages; ++i) {
    if (page_ids[i] == kPad) continue;
    if constexpr (kScaled<KV>) {
      const f32x16 scales = token_scales(i, 1);
      for (int r = 0; r < ROWS; ++r) store(weights[r] + i * kPageTokens, load(weights[r] + i * kPageTokens) * scales);
    }
    const int64_t left = context.tokens - (page + i) * kPageTokens;
    const int written = left < kPageTokens ? static_cast<int>(left) : kPageTokens;
    const KV* values = v + page_ids[i] * args.v_page + context.kv_head * block;
    for (int r = 0; r < ROWS; ++r) p[r] = weights[r] + i * (DOTS ? kPageTokens / 2 : kPageTokens);
#ifdef WEFT_DOT_TABLE
    if constexpr (DOTS) add_values_dots<ROWS>(values, p, written, args.dim, acc);
    else
#endif
      add_values<KV, ROWS>(values, p, written, args.dim, acc);
  }
}

// Up to kBlockRows rows. Blocks of 5 to 7 rows are split into 4 and the rest.
template <class KV, bool DOTS>
void attend_rows(const AttentionArgs& args, const Context& context, int rows, int64_t page, int64_t pages,
                 const float* const* q, const int64_t* limits, float* const* acc, RowState* states) {
  if constexpr (kBlockRows == 8)
    if (rows == 8) return attend_tile<KV, 8, DOTS>(args, context, page, pages, q, limits, acc, states);
  if (rows >= 4) {
    attend_tile<KV, 4, DOTS>(args, context, page, pages, q, limits, acc, states);
    rows -= 4, q += 4, limits += 4, acc += 4, states += 4;
  }
  switch (rows) {
    case 1: return attend_tile<KV, 1, DOTS>(args, context, page, pages, q, limits, acc, states);
    case 2: return attend_tile<KV, 2, DOTS>(args, context, page, pages, q, limits, acc, states);
    case 3: return attend_tile<KV, 3, DOTS>(args, context, page, pages, q, limits, acc, states);
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
