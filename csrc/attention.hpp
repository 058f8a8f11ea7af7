// Paged attention over packed pages, decode and prefill in one. An item of work is a tile of query rows that share a KV
// head; attention_tile.hpp computes a block of its rows over a few pages.
//
//   rows of an item    (query, head of the group) pairs, query-major: a decode has group rows, a prefill many
//   pages of an item   those that some row of it sees; a page of PAD is skipped (law L4)
//
// A context is cut at fixed places, every 512 tokens. The parts of a row are joined from left to right by their maxima
// and sums. If there are few rows, threads take parts as items; otherwise an item computes its parts in turn. Decodes
// that begin with the same pages are one item (shared_pages.hpp): all rows over those pages, then each run over its
// own. A row that sees no page at all gets zeros.
//
// The bits of a row depend only on its own context: not on the length of its run, on other rows of the step, or on the
// number of threads. Tiles and parts begin at absolute positions, and a tile that a row does not see changes nothing.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "attention_tile.hpp"
#include "shared_pages.hpp"

namespace weft {
namespace {

constexpr int64_t kItemRows = 48;  // blocks of 8, of 6, and of 16
static_assert(kSharedStep % kTilePages == 0);
constexpr int64_t kPartPages = 32;  // 512 tokens
static_assert(kPartPages % kTilePages == 0);

struct Item {
  const Run* run;  // of a group, its first run
  int64_t table_row;
  int64_t kv_head;
  int64_t first_row, rows;        // of the run's length * group rows
  int64_t first_part, last_part;  // the parts of the context
  int64_t partial;                // index of the part's result, -1: the item is whole
  const Group* group = nullptr;   // decodes that share pages, rows member-major; null: one run
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

// A part of a context: [rows, dim] sums, then each row's maximum and total.
struct Partial {
  std::vector<float> acc;
  std::vector<RowState> states;
};

// The sum of a row's weights with the weight of its head's sink, added at the end when the row's maximum is known.
WEFT_INLINE float with_sink(const AttentionArgs& args, int64_t head, const RowState& state) {
  return args.sinks ? state.total + exp(splat(args.sinks[head] - state.most))[0] : state.total;
}

template <class Q>
void finish_rows(const AttentionArgs& args, const Item& item, const float* acc, const RowState* states) {
  const int64_t heads = args.kv_heads * args.group;
  for (int64_t r = 0; r < item.rows; ++r) {
    const Place at = place_of(args, item, r);
    Q* out = static_cast<Q*>(args.out) +
             ((at.run->offset + at.query) * heads + item.kv_head * args.group + at.head) * args.dim;
    const float over =
        states[r].total == 0 ? 0.0f : 1.0f / with_sink(args, item.kv_head * args.group + at.head, states[r]);
    for (int64_t d = 0; d < args.dim; d += 16) store(out + d, load(acc + r * args.dim + d) * over);
  }
}

// The first page of the first tile that a row with limit ``limit`` sees.
WEFT_INLINE int64_t first_page_seen(const AttentionArgs& args, int64_t limit) {
  return args.window && limit > args.window ? (limit - args.window) / kTileTokens * kTilePages : 0;
}

WEFT_INLINE int64_t pages_until(int64_t limit) { return (limit + kPageTokens - 1) / kPageTokens; }

// Joins the next part of a row to the result of the parts before it.
__attribute__((noinline)) void join_part(int64_t dim, const float* from, RowState other, float* into, RowState& state) {
  if (other.total == 0) return;
  if (state.total == 0) {
    std::memcpy(into, from, sizeof(float) * dim);
    state = other;
    return;
  }
  const float most = other.most > state.most ? other.most : state.most;
  const float mine = exp(splat(state.most - most))[0], theirs = exp(splat(other.most - most))[0];
  for (int64_t d = 0; d < dim; d += 16) store(into + d, load(into + d) * mine + load(from + d) * theirs);
  state = {most, state.total * mine + other.total * theirs};
}

// The buffers of an item's rows.
struct ItemRows {
  float *q, *acc;
  const int64_t* limits;
  RowState* states;
};

// Rows [first_row, first_row + rows) over pages [page, end).
template <class KV, By BY>
void attend_pages(const AttentionArgs& args, const Item& item, const ItemRows& of, int64_t first_row, int64_t rows,
                  int64_t page, int64_t end) {
  const Context context{args.page_table + item.table_row * args.table_stride, item.run->start + item.run->length,
                        item.kv_head};
  [[maybe_unused]] int shape = 0;  // rows for which the unit is shaped
  for (; page < end; page += kTilePages) {
    constexpr int64_t kAhead = BY == By::unit ? 2 * kTilePages : kTilePages;  // the unit has a tile done sooner
    const int64_t pages = std::min<int64_t>(end - page, kTilePages), after = end - page - kAhead;
    if (after > 0) prefetch_pages<KV>(args, context, page + kAhead, std::min<int64_t>(after, kTilePages));
    if constexpr (BY == By::unit) {
#ifdef WEFT_DOT_TABLE
      for (int64_t first = first_row; first < first_row + rows; first += kUnitRows) {
        const int block = static_cast<int>(std::min<int64_t>(first_row + rows - first, kUnitRows));
        if (block != shape) tile_kernels().begin_rows(block);
        shape = block;
        attend_tile_by_unit(args, context, block, page, pages, of.q + first * args.dim, of.limits + first,
                            of.acc + first * args.dim, of.states + first);
      }
#endif
    } else {
      constexpr int kMost = kBlockRows<BY>;
      for (int64_t first = first_row; first < first_row + rows; first += kMost) {
        const int64_t left = first_row + rows - first;
        const int block = static_cast<int>(left < kMost ? left : kMost);
        const float* q[kMost];
        float* into[kMost];
        for (int r = 0; r < block; ++r) {
          q[r] = of.q + (first + r) * args.dim;
          into[r] = of.acc + (first + r) * args.dim;
        }
        attend_rows<KV, BY>(args, context, block, page, pages, q, of.limits + first, into, of.states + first);
      }
    }
  }
}

// One part of the context of all rows of an item.
template <class KV, By BY>
void attend_part(const AttentionArgs& args, const Item& item, const ItemRows& of, int64_t part) {
  const int64_t begin = part * kPartPages, end = begin + kPartPages;
  std::memset(of.acc, 0, sizeof(float) * item.rows * args.dim);
  for (int64_t r = 0; r < item.rows; ++r) of.states[r] = {-__builtin_inff(), 0.0f};
  if (!item.group) {
    attend_pages<KV, BY>(args, item, of, 0, item.rows, std::max(begin, first_page_seen(args, of.limits[0])),
                         std::min(end, pages_until(of.limits[item.rows - 1])));
    return;
  }
  const int64_t shared = item.group->shared_pages;
  attend_pages<KV, BY>(args, item, of, 0, item.rows, begin, std::min(end, shared));
  for (size_t i = 0; i < item.group->members.size(); ++i) {
    const auto& [run, table_row] = item.group->members[i];
    const int64_t first = static_cast<int64_t>(i) * args.group;
    const Item own{run, table_row, item.kv_head, 0, args.group, 0, 0, -1};
    attend_pages<KV, BY>(args, own, of, first, args.group, std::max(begin, shared),
                         std::min(end, pages_until(of.limits[first])));
  }
}

// One room for all types of rows and pages: a thread pays for each, and clears it, when it first calls any kernel.
alignas(64) thread_local float q_rows[kItemRows * kMaxDim];
alignas(64) thread_local float acc_rows[2][kItemRows * kMaxDim];

template <class Q, class KV, By BY>
void attend_item(const AttentionArgs& args, const Item& item, Partial* partials) {
  int64_t limits[kItemRows] = {};
  RowState states[2][kItemRows];
  std::optional<UnitInUse> unit;
  if constexpr (BY == By::unit) unit.emplace(tile_kernels());
  for (int64_t r = 0; r < item.rows; ++r) {
    const Place at = place_of(args, item, r);
    const Q* from = static_cast<const Q*>(args.q.data) + (at.run->offset + at.query) * args.q.token_stride +
                    (item.kv_head * args.group + at.head) * args.q.head_stride;
    if constexpr (BY != By::floats) std::memcpy(q_rows + r * args.dim, from, sizeof(Q) * args.dim);
    else
      for (int64_t d = 0; d < args.dim; d += 16) store(q_rows + r * args.dim + d, load(from + d));
    limits[r] = at.run->start + at.query + 1;
  }
  if (item.partial >= 0) {
    Partial& to = partials[item.partial];
    attend_part<KV, BY>(args, item, {q_rows, to.acc.data(), limits, to.states.data()}, item.first_part);
    return;
  }
  attend_part<KV, BY>(args, item, {q_rows, acc_rows[0], limits, states[0]}, item.first_part);
  for (int64_t part = item.first_part + 1; part < item.last_part; ++part) {
    attend_part<KV, BY>(args, item, {q_rows, acc_rows[1], limits, states[1]}, part);
    for (int64_t r = 0; r < item.rows; ++r)
      join_part(args.dim, acc_rows[1] + r * args.dim, states[1][r], acc_rows[0] + r * args.dim, states[0][r]);
  }
  finish_rows<Q>(args, item, acc_rows[0], states[0]);
}

// Joins ``count`` parts from ``parts`` on into the one result.
template <class Q>
void join_parts(const AttentionArgs& args, const Item& item, Partial* parts, int64_t count) {
  Partial& whole = parts[0];
  for (int64_t i = 1; i < count; ++i)
    for (int64_t r = 0; r < item.rows; ++r)
      join_part(args.dim, parts[i].acc.data() + r * args.dim, parts[i].states[r], whole.acc.data() + r * args.dim,
                whole.states[r]);
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

// Adds a single run. ``split``: each part of its context is an item.
void add_run(const AttentionArgs& args, const Run& run, int64_t table_row, bool split, Work& work) {
  const int64_t rows = run.length * args.group, pages_before = first_page_seen(args, run.start + 1);
  const int64_t pages = pages_until(run.start + run.length);
  work.pages_of_rows += static_cast<double>(rows * args.kv_heads * (pages - pages_before));
  for (int64_t head = 0; head < args.kv_heads; ++head)
    for (int64_t first = 0; first < rows; first += kItemRows) {
      const int64_t count = std::min(rows - first, kItemRows);
      const int64_t begin = first_page_seen(args, run.start + first / args.group + 1) / kPartPages;
      const int64_t last = (run.start + (first + count - 1) / args.group) / (kPartPages * kPageTokens) + 1;
      Item item{&run, table_row, head, first, count, begin, last, -1};
      if (!split || last - begin < 2) {
        work.items.push_back(item);
        continue;
      }
      work.joins.push_back({item, static_cast<int64_t>(work.partials.size()), last - begin});
      for (int64_t part = begin; part < last; ++part) {
        item.first_part = part;
        item.last_part = part + 1;
        item.partial = static_cast<int64_t>(work.partials.size());
        work.partials.push_back({std::vector<float>(item.rows * args.dim), std::vector<RowState>(item.rows)});
        work.items.push_back(item);
      }
    }
}

void add_group(const AttentionArgs& args, const Group& group, Work& work) {
  const int64_t rows = static_cast<int64_t>(group.members.size()) * args.group;
  int64_t last = 0;
  for (const Member& member : group.members) {
    work.pages_of_rows += static_cast<double>(args.group * args.kv_heads * (member.run->start / kPageTokens + 1));
    last = std::max(last, member.run->start / (kPartPages * kPageTokens) + 1);
  }
  for (int64_t head = 0; head < args.kv_heads; ++head)
    work.items.push_back({.run = group.members[0].run,
                          .table_row = group.members[0].table_row,
                          .kv_head = head,
                          .first_row = 0,
                          .rows = rows,
                          .first_part = 0,
                          .last_part = last,
                          .partial = -1,
                          .group = &group});
}

template <class Q, class KV, By BY = By::floats>
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
  const bool split = wholes < wanted;
  // Groups of at most this size leave two items for each thread.
  const int64_t members_max =
      std::min(static_cast<int64_t>(decodes.size()) * args.kv_heads / wanted, kItemRows / args.group);
  const std::vector<Group> groups = groups_of(args, decodes, members_max);
  Work work;
  for (const Group& group : groups)
    if (group.shared_pages) add_group(args, group, work);
    else add_run(args, *group.members[0].run, group.members[0].table_row, split, work);
  for (const Member& prompt : prompts) add_run(args, *prompt.run, prompt.table_row, split, work);
  // The last tiles of a prompt are the heavy ones. They go first, so that none is left over at the end.
  const int64_t count = static_cast<int64_t>(work.items.size());
  const double nanoseconds = work.pages_of_rows * static_cast<double>(args.dim) / static_cast<double>(count + 1);
  pool.for_each(count, nanoseconds,
                [&](int64_t i) { attend_item<Q, KV, BY>(args, work.items[count - 1 - i], work.partials.data()); });
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
  if (args.q.dtype != Dtype::bfloat16 || args.kv_dtype != Dtype::bfloat16) return attention(args);
  if (matrix_unit() != MatrixUnit::none && args.dim % 32 == 0) return attention_of<bf16, bf16, By::unit>(args);
  attention_of<bf16, bf16, By::pairs>(args);
}
#endif

}  // namespace
}  // namespace weft
