// Paged attention over packed pages, decode and prefill in one: an item of work is a tile of query rows that
// share a KV head.
//
//   rows of an item    (query, head of the group) pairs, query-major: a decode has group rows, a prefill many
//   per tile of pages  scores[row][64 tokens] = q . K      one line of K = 16 tokens of 1, 2 or 4 channels
//                      online softmax                       (Milakov and Gimelshein, 2018)
//                      acc[row][D] += p . V                 one line of V = 16 channels of 1, 2 or 4 tokens
//
// Rows go through in blocks of 8, 4 or fewer, whose scores stay in registers while a line is used for all of them.
// A token that a row may not see is replaced: its score by -inf, its V by 0 in the one page where some tokens
// are not written yet, because 0 x NaN is NaN (law L6). Pages that no row of the item sees are not touched.
//
// A long context of few rows is split over the threads; parts are joined by their maxima and sums. Decodes that begin
// with the same pages are one item (shared_pages.inl): all rows over those pages, then each run over its own.
//
// bf16 queries over bf16 pages have a second form (DOTS) where the machine multiplies pairs of bf16: a line is
// used as it is. Scores lose nothing by it, as both factors are bf16 anyway; weights are rounded to bf16, in the
// sum that divides them too, so that they still add up to one.

namespace weft {
namespace {

constexpr int kTilePages = 4;
constexpr int kTileTokens = kTilePages * kPageTokens;
#if defined(__AVX512F__)
constexpr int kBlockRows = 8;
#else
constexpr int kBlockRows = 4;  // the sums of more do not stay in registers
#endif
constexpr int64_t kItemRows = 32;
constexpr int kMaxDim = 512;
static_assert(kSharedStep % kTilePages == 0);
constexpr int64_t kSplitTokens = 512;  // least context of a part

struct Item {
  const Run* run;                   // of a group the first
  int64_t table_row;
  int64_t kv_head;
  int64_t first_row, rows;          // of the run's length * group rows
  int64_t first_page, last_page;    // the part of the context
  int64_t partial;                  // where the part's result goes, -1: it is whole
  const Group* group = nullptr;     // decodes that share pages, rows member-major; null: one run
};

// What row ``r`` of an item is: head ``head`` of the KV head's, of token ``query`` of ``run``.
struct Place {
  const Run* run;
  int64_t query, head;
};

WEFT_INLINE Place place_of(const AttentionArgs& args, const Item& item, int64_t r) {
  if (item.group) return {item.group->members[r / args.group].run, 0, r % args.group};
  return {item.run, (item.first_row + r) / args.group, (item.first_row + r) % args.group};
}

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
    for (int r = 0; r < ROWS; ++r)
      acc[r] = _mm512_dpbf16_ps(acc[r], line, (__m512bh)_mm512_set1_ps(q[r][d]));
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

struct RowState {
  float most, total;
};

// One block of rows over one tile of pages; row r sees positions [limits[r] - window, limits[r]).
template <class KV, int ROWS, bool DOTS>
void attend_tile(const AttentionArgs& args, const Item& item, int64_t page, int64_t pages, const float* const* q,
                 const int64_t* limits, float* const* acc, RowState* states) {
  f32x16 scores[ROWS][kTilePages];
  const KV* k = static_cast<const KV*>(args.k);
  const KV* v = static_cast<const KV*>(args.v);
  const int64_t block = args.dim * kPageTokens;
  const int32_t* table = args.page_table + item.table_row * args.table_stride;
  const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int64_t context = item.run->start + item.run->length;
  // The scales of a page's tokens, 0 for those not written yet: part 0 is K's, 1 is V's.
  const auto token_scales = [&](int64_t i, int part) {
    const bf16* from = static_cast<const bf16*>(args.scales.data) + table[page + i] * args.scales.page +
                       part * args.scales.part + item.kv_head * kPageTokens;
    return select(lane < static_cast<int32_t>(context - (page + i) * kPageTokens), load(from), splat(0));
  };
  for (int64_t i = 0; i < pages; ++i) {
    f32x16 made[ROWS];
    const KV* keys = k + table[page + i] * args.k_page + item.kv_head * block;
#ifdef WEFT_DOT_TABLE
    if constexpr (DOTS) score_page_dots<ROWS>(keys, q, args.dim, made);
    else
#endif
      score_page<KV, ROWS>(keys, q, args.dim, made);
    if constexpr (kScaled<KV>) {
      const f32x16 scales = token_scales(i, 0);
      for (int r = 0; r < ROWS; ++r) made[r] *= scales;
    }
    const int64_t begin = (page + i) * kPageTokens;
    for (int r = 0; r < ROWS; ++r) {
      const int64_t seen = limits[r] - begin;  // tokens of this page that the row sees
      scores[r][i] = seen >= kPageTokens
                         ? made[r] * args.scale
                         : select(lane < static_cast<int32_t>(seen < 0 ? 0 : seen), made[r] * args.scale,
                                  splat(-__builtin_inff()));
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
    const float kept = before == -__builtin_inff() ? 0.0f : exp(splat(before - shift))[0];
    states[r].total = states[r].total * kept + sum(total);
    states[r].most = most;
    if (kept != 1.0f)
      for (int64_t d = 0; d < args.dim; d += 16) store(acc[r] + d, load(acc[r] + d) * kept);
  }
  for (int64_t i = 0; i < pages; ++i) {
    if constexpr (kScaled<KV>) {
      const f32x16 scales = token_scales(i, 1);
      for (int r = 0; r < ROWS; ++r)
        store(weights[r] + i * kPageTokens, load(weights[r] + i * kPageTokens) * scales);
    }
    const int64_t left = context - (page + i) * kPageTokens;
    const int written = left < kPageTokens ? static_cast<int>(left) : kPageTokens;
    const KV* values = v + table[page + i] * args.v_page + item.kv_head * block;
    for (int r = 0; r < ROWS; ++r) p[r] = weights[r] + i * (DOTS ? kPageTokens / 2 : kPageTokens);
#ifdef WEFT_DOT_TABLE
    if constexpr (DOTS) add_values_dots<ROWS>(values, p, written, args.dim, acc);
    else
#endif
      add_values<KV, ROWS>(values, p, written, args.dim, acc);
  }
}

// Up to kBlockRows rows; 5 to 7 are 4 and the rest.
template <class KV, bool DOTS>
void attend_rows(const AttentionArgs& args, const Item& item, int rows, int64_t page, int64_t pages,
                 const float* const* q, const int64_t* limits, float* const* acc, RowState* states) {
  if constexpr (kBlockRows == 8)
    if (rows == 8) return attend_tile<KV, 8, DOTS>(args, item, page, pages, q, limits, acc, states);
  if (rows >= 4) {
    attend_tile<KV, 4, DOTS>(args, item, page, pages, q, limits, acc, states);
    rows -= 4, q += 4, limits += 4, acc += 4, states += 4;
  }
  switch (rows) {
    case 1: return attend_tile<KV, 1, DOTS>(args, item, page, pages, q, limits, acc, states);
    case 2: return attend_tile<KV, 2, DOTS>(args, item, page, pages, q, limits, acc, states);
    case 3: return attend_tile<KV, 3, DOTS>(args, item, page, pages, q, limits, acc, states);
  }
}

// The parts of a context: [rows, dim] sums, then each row's maximum and total.
struct Partial {
  std::vector<float> acc;
  std::vector<RowState> states;
};

template <class Q>
void finish_rows(const AttentionArgs& args, const Item& item, const float* acc, const RowState* states) {
  const int64_t heads = args.kv_heads * args.group;
  for (int64_t r = 0; r < item.rows; ++r) {
    const Place at = place_of(args, item, r);
    Q* out = static_cast<Q*>(args.out) +
             ((at.run->offset + at.query) * heads + item.kv_head * args.group + at.head) * args.dim;
    const float over = 1.0f / states[r].total;
    for (int64_t d = 0; d < args.dim; d += 16) store(out + d, load(acc + r * args.dim + d) * over);
  }
}

// The first page that the first of some rows sees, of those that end with ``limit``.
WEFT_INLINE int64_t first_page_seen(const AttentionArgs& args, int64_t limit) {
  return args.window && limit > args.window ? (limit - args.window) / kPageTokens : 0;
}

// The rows of an item, while it is worked on.
struct RowsAtWork {
  float *q, *acc;
  const int64_t* limits;
  RowState* states;
};

// Asks memory for pages [page, page + pages) of an item's head: a page's part is some kB that lie alone, where the
// hardware's prefetcher starts anew each time.
template <class KV>
WEFT_INLINE void ask_for_pages(const AttentionArgs& args, const Item& item, int64_t page, int64_t pages) {
  const int64_t bytes = args.dim * kPageTokens * static_cast<int64_t>(sizeof(KV));
  const int32_t* table = args.page_table + item.table_row * args.table_stride;
  const auto ask = [&](const void* all, int64_t at) {
    const char* from = static_cast<const char*>(all) + at * static_cast<int64_t>(sizeof(KV)) + item.kv_head * bytes;
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(from + byte, 0, 2);
  };
  for (int64_t i = page; i < page + pages; ++i) {
    ask(args.k, table[i] * args.k_page);
    ask(args.v, table[i] * args.v_page);
  }
}

// Rows [first_row, first_row + rows) over pages [page, end).
template <class KV, bool DOTS>
void attend_pages(const AttentionArgs& args, const Item& item, const RowsAtWork& of, int64_t first_row, int64_t rows,
                  int64_t page, int64_t end) {
  for (; page < end; page += kTilePages) {
    const int64_t pages = end - page < kTilePages ? end - page : kTilePages, after = end - page - pages;
    if (after > 0) ask_for_pages<KV>(args, item, page + pages, after < kTilePages ? after : kTilePages);
    for (int64_t first = first_row; first < first_row + rows; first += kBlockRows) {
      const int64_t left = first_row + rows - first;
      const int block = static_cast<int>(left < kBlockRows ? left : kBlockRows);
      const float* q[kBlockRows];
      float* into[kBlockRows];
      for (int r = 0; r < block; ++r) {
        q[r] = of.q + (first + r) * args.dim;
        into[r] = of.acc + (first + r) * args.dim;
      }
      attend_rows<KV, DOTS>(args, item, block, page, pages, q, of.limits + first, into, of.states + first);
    }
  }
}

template <class Q, class KV, bool DOTS>
void attend_item(const AttentionArgs& args, const Item& item, Partial* partials) {
  alignas(64) static thread_local float q_rows[kItemRows * kMaxDim];
  alignas(64) static thread_local float acc_rows[kItemRows * kMaxDim];
  int64_t limits[kItemRows] = {};
  RowState states[kItemRows];
  float* acc = item.partial < 0 ? acc_rows : partials[item.partial].acc.data();
  std::memset(acc, 0, sizeof(float) * item.rows * args.dim);
  for (int64_t r = 0; r < item.rows; ++r) {
    const Place at = place_of(args, item, r);
    const Q* from = static_cast<const Q*>(args.q.data) + (at.run->offset + at.query) * args.q.token_stride +
                    (item.kv_head * args.group + at.head) * args.q.head_stride;
    if constexpr (DOTS) std::memcpy(q_rows + r * args.dim, from, sizeof(Q) * args.dim);
    else
      for (int64_t d = 0; d < args.dim; d += 16) store(q_rows + r * args.dim + d, load(from + d));
    limits[r] = at.run->start + at.query + 1;
    states[r] = {-__builtin_inff(), 0.0f};
  }
  const RowsAtWork of = {q_rows, acc, limits, states};
  const auto pages_until = [](int64_t limit) { return (limit + kPageTokens - 1) / kPageTokens; };
  if (item.group) {
    const int64_t shared = item.group->shared_pages;
    attend_pages<KV, DOTS>(args, item, of, 0, item.rows, 0, shared);
    for (size_t i = 0; i < item.group->members.size(); ++i) {
      const auto& [run, table_row] = item.group->members[i];
      const int64_t first = static_cast<int64_t>(i) * args.group;
      const Item own{run, table_row, item.kv_head, 0, args.group, 0, 0, -1};
      attend_pages<KV, DOTS>(args, own, of, first, args.group, shared, pages_until(limits[first]));
    }
  } else {
    const int64_t begin = first_page_seen(args, limits[0]);
    attend_pages<KV, DOTS>(args, item, of, 0, item.rows, std::max(item.first_page, begin),
                           std::min(item.last_page, pages_until(limits[item.rows - 1])));
  }
  if (item.partial < 0) finish_rows<Q>(args, item, acc, states);
  else std::memcpy(partials[item.partial].states.data(), states, sizeof(RowState) * item.rows);
}

// Parts ``first`` .. ``first + count`` into the one result.
template <class Q>
void join_parts(const AttentionArgs& args, const Item& item, Partial* parts, int64_t count) {
  Partial& whole = parts[0];
  for (int64_t r = 0; r < item.rows; ++r) {
    RowState& state = whole.states[r];
    float* into = whole.acc.data() + r * args.dim;
    for (int64_t i = 1; i < count; ++i) {
      const RowState other = parts[i].states[r];
      if (other.total == 0) continue;
      const float most = state.total == 0 || other.most > state.most ? other.most : state.most;
      const float mine = state.total == 0 ? 0.0f : exp(splat(state.most - most))[0];
      const float theirs = exp(splat(other.most - most))[0];
      const float* from = parts[i].acc.data() + r * args.dim;
      for (int64_t d = 0; d < args.dim; d += 16) store(into + d, load(into + d) * mine + load(from + d) * theirs);
      state = {most, state.total * mine + other.total * theirs};
    }
  }
  finish_rows<Q>(args, item, whole.acc.data(), whole.states.data());
}

struct Join {
  Item item;
  int64_t first, count;  // of the parts
};

struct Work {
  std::vector<Item> items;
  std::vector<Partial> partials;
  std::vector<Join> joins;
  double pages_of_rows = 0;
};

// One run by itself; a decode in up to ``parts`` parts where its context is long enough.
void add_run(const AttentionArgs& args, const Run& run, int64_t table_row, int64_t parts, Work& work) {
  const int64_t rows = run.length * args.group, pages_before = first_page_seen(args, run.start + 1);
  const int64_t pages = (run.start + run.length + kPageTokens - 1) / kPageTokens;
  work.pages_of_rows += static_cast<double>(rows * args.kv_heads * (pages - pages_before));
  parts = run.length > 1 ? 1 : std::min(parts, (pages - pages_before) * kPageTokens / kSplitTokens);
  for (int64_t head = 0; head < args.kv_heads; ++head)
    for (int64_t first = 0; first < rows; first += kItemRows) {
      Item item{&run, table_row, head, first, std::min(rows - first, kItemRows), 0, pages, -1};
      if (parts <= 1) {
        work.items.push_back(item);
        continue;
      }
      work.joins.push_back({item, static_cast<int64_t>(work.partials.size()), parts});
      for (int64_t i = 0; i < parts; ++i) {
        item.first_page = pages_before + (pages - pages_before) * i / parts;
        item.last_page = pages_before + (pages - pages_before) * (i + 1) / parts;
        item.partial = static_cast<int64_t>(work.partials.size());
        work.partials.push_back({std::vector<float>(item.rows * args.dim), std::vector<RowState>(item.rows)});
        work.items.push_back(item);
      }
    }
}

void add_group(const AttentionArgs& args, const Group& group, Work& work) {
  const int64_t rows = static_cast<int64_t>(group.members.size()) * args.group;
  for (const Member& member : group.members)
    work.pages_of_rows += static_cast<double>(args.group * args.kv_heads * (member.run->start / kPageTokens + 1));
  for (int64_t head = 0; head < args.kv_heads; ++head)
    work.items.push_back({group.members[0].run, group.members[0].table_row, head, 0, rows, 0, 0, -1, &group});
}

template <class Q, class KV, bool DOTS = false>
void attention_of(const AttentionArgs& args) {
  Pool& pool = Pool::instance();
  const int64_t wanted = 2 * pool.threads(), width = args.kv_heads * args.group * args.dim;
  std::vector<Member> decodes, prompts;
  int64_t table_row = 0, wholes = 0;
  for (const Run& run : args.runs->runs) {
    wholes += args.kv_heads * ((run.length * args.group + kItemRows - 1) / kItemRows);
    if (run.start == kPad) std::memset(static_cast<Q*>(args.out) + run.offset * width, 0, sizeof(Q) * run.length * width);
    else (run.length == 1 ? decodes : prompts).push_back({&run, table_row});
    ++table_row;
  }
  const int64_t parts = wholes >= wanted || !wholes ? 1 : (wanted + wholes - 1) / wholes;
  // As many decodes in one item as leave two items for each thread.
  const int64_t members_max =
      std::min(static_cast<int64_t>(decodes.size()) * args.kv_heads / wanted, kItemRows / args.group);
  const std::vector<Group> groups = groups_of(args, decodes, members_max);
  Work work;
  for (const Group& group : groups)
    if (group.shared_pages) add_group(args, group, work);
    else add_run(args, *group.members[0].run, group.members[0].table_row, parts, work);
  for (const Member& prompt : prompts) add_run(args, *prompt.run, prompt.table_row, parts, work);
  // Prefill tiles late in a prompt are the heavy ones: first, so that none is left over at the end.
  const int64_t count = static_cast<int64_t>(work.items.size());
  const double nanoseconds = work.pages_of_rows * static_cast<double>(args.dim) / static_cast<double>(count + 1);
  pool.for_each(count, nanoseconds, [&](int64_t i) {
    attend_item<Q, KV, DOTS>(args, work.items[count - 1 - i], work.partials.data());
  });
  for (const Join& join : work.joins) join_parts<Q>(args, join.item, work.partials.data() + join.first, join.count);
}

void attention(const AttentionArgs& args) {
  with_kv_type(args.kv_dtype, [&](auto* kv) {
    using KV = std::remove_pointer_t<decltype(kv)>;
    if (args.q.dtype == Dtype::bfloat16) attention_of<bf16, KV>(args);
    else attention_of<float, KV>(args);
  });
}

#ifdef WEFT_DOT_TABLE
void attention_dots(const AttentionArgs& args) {
  if (args.q.dtype == Dtype::bfloat16 && args.kv_dtype == Dtype::bfloat16) attention_of<bf16, bf16, true>(args);
  else attention(args);
}
#endif

}  // namespace
}  // namespace weft
