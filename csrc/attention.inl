// Paged attention over packed pages, decode and prefill in one. An item of work is a tile of query rows that share a KV
// head; attention_tile.inl computes a block of its rows over a few pages.
//
//   rows of an item    (query, head of the group) pairs, query-major: a decode has group rows, a prefill many
//   pages of an item   those that some row of it sees; a page of PAD is skipped (law L4)
//
// The context of a decode is split over the threads if there are few rows. The parts are joined by their maxima and
// sums. Decodes that begin with the same pages are one item (shared_pages.inl): all rows over those pages, then each
// run over its own. A row that sees no page at all gets zeros.

namespace weft {
namespace {

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
  int64_t partial;                  // index of the part's result, -1: the item is whole
  const Group* group = nullptr;     // decodes that share pages, rows member-major; null: one run
};

// Row ``r`` of an item: query head ``head`` of the KV head, token ``query`` of ``run``.
struct Place {
  const Run* run;
  int64_t query, head;
};

WEFT_INLINE Place place_of(const AttentionArgs& args, const Item& item, int64_t r) {
  if (item.group) return {item.group->members[r / args.group].run, 0, r % args.group};
  return {item.run, (item.first_row + r) / args.group, (item.first_row + r) % args.group};
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
    const float over = states[r].total == 0 ? 0.0f : 1.0f / states[r].total;
    for (int64_t d = 0; d < args.dim; d += 16) store(out + d, load(acc + r * args.dim + d) * over);
  }
}

// The first page that a row with limit ``limit`` sees.
WEFT_INLINE int64_t first_page_seen(const AttentionArgs& args, int64_t limit) {
  return args.window && limit > args.window ? (limit - args.window) / kPageTokens : 0;
}

// The buffers of an item's rows.
struct ItemRows {
  float *q, *acc;
  const int64_t* limits;
  RowState* states;
};

// Rows [first_row, first_row + rows) over pages [page, end).
template <class KV, bool DOTS>
void attend_pages(const AttentionArgs& args, const Item& item, const ItemRows& of, int64_t first_row, int64_t rows,
                  int64_t page, int64_t end) {
  const Context context{args.page_table + item.table_row * args.table_stride, item.run->start + item.run->length,
                        item.kv_head};
  for (; page < end; page += kTilePages) {
    const int64_t pages = end - page < kTilePages ? end - page : kTilePages, after = end - page - pages;
    if (after > 0) prefetch_pages<KV>(args, context, page + pages, after < kTilePages ? after : kTilePages);
    for (int64_t first = first_row; first < first_row + rows; first += kBlockRows) {
      const int64_t left = first_row + rows - first;
      const int block = static_cast<int>(left < kBlockRows ? left : kBlockRows);
      const float* q[kBlockRows];
      float* into[kBlockRows];
      for (int r = 0; r < block; ++r) {
        q[r] = of.q + (first + r) * args.dim;
        into[r] = of.acc + (first + r) * args.dim;
      }
      attend_rows<KV, DOTS>(args, context, block, page, pages, q, of.limits + first, into, of.states + first);
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
  const ItemRows of = {q_rows, acc, limits, states};
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

// One run alone. A decode with a long context is cut into up to ``parts`` parts.
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
    if (run.start == kPad)
      std::memset(static_cast<Q*>(args.out) + run.offset * width, 0, sizeof(Q) * run.length * width);
    else (run.length == 1 ? decodes : prompts).push_back({&run, table_row});
    ++table_row;
  }
  const int64_t parts = wholes >= wanted || !wholes ? 1 : (wanted + wholes - 1) / wholes;
  // Group only as many decodes as leave two items for each thread.
  const int64_t members_max =
      std::min(static_cast<int64_t>(decodes.size()) * args.kv_heads / wanted, kItemRows / args.group);
  const std::vector<Group> groups = groups_of(args, decodes, members_max);
  Work work;
  for (const Group& group : groups)
    if (group.shared_pages) add_group(args, group, work);
    else add_run(args, *group.members[0].run, group.members[0].table_row, parts, work);
  for (const Member& prompt : prompts) add_run(args, *prompt.run, prompt.table_row, parts, work);
  // The last tiles of a prompt are the heavy ones. They go first, so that none is left over at the end.
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
