// The Mamba-2 state space, token by token, for decodes and prefills alike.
//
//   per head   dt = clamp(softplus(dt + bias));   S <- e^(dt A) S + (dt x) B^T;   y = S C + D x      S [P, N]
//
//   rows of S (P)      one or two at a time, complete (N <= 128), in registers for up to 16 tokens:
//   16 at a time         per token and 16 numbers    s = decay s + added b;   y += s c
//                      B and C of these tokens in float32 in the L1 cache; y, a vector for each row and token, is added
//                      across at the end, 16 at once
//
// A row needs no other row, so the inner loop is over tokens: S stays in registers and only B and C are loaded. As in
// gated_delta.hpp the arithmetic is the recurrence itself: no cut of a prompt changes a bit, and a tap is a copy. States
// are read and written in place. A decode reads all states of a batch from memory, so a thread prefetches the states of
// the next item while it computes.
#pragma once

#include "flush_denormals.hpp"
#include "kv_numbers.hpp"
#include "rounding.hpp"

namespace weft {
namespace {

constexpr int kMaxStateDim = 256;
constexpr int kRowsOfItem = 16;
constexpr int kTokensTogether = 16;
constexpr int64_t kDecodeBytes = 65536;  // bytes of states in one item

// Up to 16 tokens of a group, for 16 rows of a head.
struct Mamba2Tokens {
  alignas(64) float b[kTokensTogether][kMaxStateDim], c[kTokensTogether][kMaxStateDim];
  alignas(64) float added[kTokensTogether][kRowsOfItem];
  alignas(64) float y[kTokensTogether][kRowsOfItem][16];
  float decays[kTokensTogether];
  uint32_t keys[kTokensTogether];
};

// ROWS rows of the state from ``row`` on, and of each 16 WIDE numbers from ``n`` on, through ``count`` tokens.
// ``next``: null, or a state of which the same part will be read soon. Without READS: a replay, which needs no y.
template <class S, int ROWS, int WIDE, bool READS>
WEFT_INLINE void mamba2_block(S* state, int64_t n_dim, int64_t element, int64_t row, int64_t n, int64_t count,
                              const S* next, Mamba2Tokens& of) {
  f32x16 s[ROWS][WIDE];
  if (next)
    for (int r = 0; r < ROWS; ++r)
      for (int byte = 0; byte < static_cast<int>(16 * WIDE * sizeof(S)); byte += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(next + (row + r) * n_dim + n) + byte, 0, 2);
  for (int r = 0; r < ROWS; ++r)
    for (int w = 0; w < WIDE; ++w) s[r][w] = load(state + (row + r) * n_dim + n + 16 * w);
  for (int64_t t = 0; t < count; ++t) {
    const float decay = of.decays[t];
    f32x16 y[ROWS], added[ROWS];
    for (int r = 0; r < ROWS; ++r) {
      y[r] = READS && n ? load(of.y[t][row + r]) : splat(0);
      added[r] = splat(of.added[t][row + r]);
    }
    for (int w = 0; w < WIDE; ++w) {
      const f32x16 b = load(of.b[t] + n + 16 * w), c = READS ? load(of.c[t] + n + 16 * w) : b;
      for (int r = 0; r < ROWS; ++r) {
        const f32x16 line = fused(b, added[r], s[r][w] * decay);
        s[r][w] = rounded_state<S>(line, elements(element + (row + r) * n_dim + n + 16 * w, 1), of.keys[t]);
        if (READS) y[r] = fused(line, c, y[r]);
      }
    }
    if (READS)
      for (int r = 0; r < ROWS; ++r) store(of.y[t][row + r], y[r]);
  }
  for (int r = 0; r < ROWS; ++r)
    for (int w = 0; w < WIDE; ++w) store(state + (row + r) * n_dim + n + 16 * w, s[r][w]);
}

template <class S, int WIDE, bool READS>
WEFT_INLINE void mamba2_blocks(S* state, int64_t n_dim, int64_t element, int64_t rows, int64_t* n, int64_t count,
                               const S* next, Mamba2Tokens& of) {
#if defined(__AVX512F__)
  constexpr int together = 16 / WIDE < 4 ? 16 / WIDE : 4;
#else
  constexpr int together = 1;
#endif
  for (; *n + 16 * WIDE <= n_dim; *n += 16 * WIDE) {
    int64_t row = 0;
    for (; row + together <= rows; row += together)
      mamba2_block<S, together, WIDE, READS>(state, n_dim, element, row, *n, count, next, of);
    for (; row < rows; ++row) mamba2_block<S, 1, WIDE, READS>(state, n_dim, element, row, *n, count, next, of);
  }
}

// All numbers of ``rows`` rows.
template <class S, bool READS>
WEFT_INLINE void mamba2_rows(S* state, int64_t n_dim, int64_t element, int64_t rows, int64_t count, const S* next,
                             Mamba2Tokens& of) {
  int64_t n = 0;
  mamba2_blocks<S, 8, READS>(state, n_dim, element, rows, &n, count, next, of);
  mamba2_blocks<S, 4, READS>(state, n_dim, element, rows, &n, count, next, of);
  mamba2_blocks<S, 2, READS>(state, n_dim, element, rows, &n, count, next, of);
  mamba2_blocks<S, 1, READS>(state, n_dim, element, rows, &n, count, next, of);
}

// Steps and decays of all tokens, [tokens, heads] each.
struct Mamba2Steps {
  float *steps, *decays;
};

// Tokens [begin, begin + count) of a run, at most 16, for ``rows`` rows of a head, at most 16, whose state is ``state``.
template <class T, class S>
void mamba2_tokens(const Mamba2Args& args, const Mamba2Steps& steps, const Run& run, int64_t begin, int64_t count,
                   int64_t head, int64_t first, int64_t rows, S* state, const S* next, bool same_group,
                   Mamba2Tokens& of) {
  const int64_t n_dim = args.state_dim, group = head / (args.heads / args.groups);
  const auto row = [&](const Rows& from, int64_t token, int64_t h) {
    return static_cast<const T*>(from.data) + token * from.token_stride + h * from.head_stride;
  };
  alignas(64) float x[kTokensTogether][kRowsOfItem];
  for (int64_t t = 0; t < count; ++t) {
    const int64_t token = run.offset + begin + t;
    if (!same_group) {
      const T *b = row(args.b, token, group), *c = row(args.c, token, group);
      for (int64_t n = 0; n < n_dim; n += 16) {
        store(of.b[t] + n, load(b + n));
        if (args.out) store(of.c[t] + n, load(c + n));
      }
    }
    of.keys[t] = state_key(run.start + begin + t, args.kind.layer);
    of.decays[t] = steps.decays[token * args.heads + head];
    const f32x16 values = load_some(row(args.x, token, head) + first, rows);
    store(x[t], values);
    store(of.added[t], values * steps.steps[token * args.heads + head]);
  }
  const int64_t element = (head * args.head_dim + first) * n_dim;
  if (!args.out) return mamba2_rows<S, false>(state, n_dim, element, rows, count, next, of);
  mamba2_rows<S, true>(state, n_dim, element, rows, count, next, of);
  for (int64_t t = 0; t < count; ++t) {
    const int64_t token = run.offset + begin + t;
    T* out = static_cast<T*>(args.out) + (token * args.heads + head) * args.head_dim + first;
    for (int64_t r = rows; r < kRowsOfItem; ++r) store(of.y[t][r], splat(0));
    store_some(out, fused(load(x[t]), splat(args.d[head]), sums_of(of.y[t])), rows);
  }
}

// 16 rows of a head at a time, then the remaining ones: body(first, rows).
template <class Body>
WEFT_INLINE void row_blocks(const Mamba2Args& args, const Body& body) {
  for (int64_t first = 0; first < args.head_dim; first += kRowsOfItem)
    body(first, args.head_dim - first < kRowsOfItem ? args.head_dim - first : kRowsOfItem);
}

// One room for all types: a thread pays for each, and clears it, when it first calls any kernel.
thread_local Mamba2Tokens mamba2_room;

// All tokens of a run, for a head. ``next``: the state that comes next, or null.
template <class T, class S>
void mamba2_head(const Mamba2Args& args, const Mamba2Steps& steps, const Run& run, int64_t head, const S* next) {
  Mamba2Tokens& of = mamba2_room;
  const int64_t numbers = args.head_dim * args.state_dim;
  const bool in_place = run.slot != kPad && run.keeps;
  Scratch scratch;
  S* const slots = static_cast<S*>(args.state) + head * numbers;
  S* const state = in_place ? slots + run.slot * args.slot_stride : scratch.take<S>(numbers);
  if (run.fresh || run.slot == kPad) std::memset(static_cast<void*>(state), 0, sizeof(S) * numbers);
  else if (!in_place) std::memcpy(static_cast<void*>(state), slots + run.slot * args.slot_stride, sizeof(S) * numbers);
  size_t tap = 0;
  for (int64_t t = 0; t < run.length;) {
    int64_t end = t + kTokensTogether < run.length ? t + kTokensTogether : run.length;
    if (tap < run.taps.size() && run.taps[tap].offset < end) end = run.taps[tap].offset;
    row_blocks(args, [&](int64_t first, int64_t rows) {
      mamba2_tokens<T, S>(args, steps, run, t, end - t, head, first, rows, state + first * args.state_dim,
                          t == 0 && next ? next + first * args.state_dim : nullptr, first > 0, of);
    });
    for (; tap < run.taps.size() && run.taps[tap].offset == end; ++tap)
      std::memcpy(static_cast<void*>(slots + run.taps[tap].slot * args.slot_stride), state, sizeof(S) * numbers);
    t = end;
  }
}

// Heads [begin, end) for a run of one token. ``next``: the states of the same number of heads that come next, or null.
template <class T, class S>
void mamba2_decode(const Mamba2Args& args, const Mamba2Steps& steps, const Run& run, int64_t begin, int64_t end,
                   const S* next) {
  Mamba2Tokens& of = mamba2_room;
  const int64_t head_numbers = args.head_dim * args.state_dim, per_group = args.heads / args.groups;
  S* const slot = static_cast<S*>(args.state) + run.slot * args.slot_stride;
  for (int64_t head = begin; head < end; ++head)
    row_blocks(args, [&](int64_t first, int64_t rows) {
      const int64_t numbers = rows * args.state_dim, at = head * head_numbers + first * args.state_dim;
      if (run.fresh) std::memset(static_cast<void*>(slot + at), 0, sizeof(S) * numbers);
      const bool same_group = first > 0 || (head > begin && head % per_group != 0);
      mamba2_tokens<T, S>(args, steps, run, 0, 1, head, first, rows, slot + at,
                          next ? next + at - begin * head_numbers : nullptr, same_group, of);
    });
}

template <class T>
Mamba2Steps mamba2_steps(const Mamba2Args& args) {
  int64_t tokens = 0;
  for (const Run& run : args.runs->runs) tokens = run.offset + run.length > tokens ? run.offset + run.length : tokens;
  static thread_local std::vector<float> numbers;
  numbers.resize(static_cast<size_t>(2 * tokens * args.heads));
  const Mamba2Steps steps = {numbers.data(), numbers.data() + tokens * args.heads};
  Pool::instance().for_each((tokens + 15) / 16, 16.0 * static_cast<double>(args.heads), [&](int64_t block) {
    for (int64_t token = block * 16; token < tokens && token < block * 16 + 16; ++token) {
      const T* dt = static_cast<const T*>(args.dt.data) + token * args.dt.token_stride;
      for (int64_t h = 0; h < args.heads; h += 16) {
        const int64_t some = args.heads - h;
        f32x16 step = softplus(load_some(dt + h, some) + load_some(args.dt_bias + h, some));
        step = min(max(step, splat(args.dt_min)), splat(args.dt_max));
        store_some(steps.steps + token * args.heads + h, step, some);
        store_some(steps.decays + token * args.heads + h, exp(step * load_some(args.a + h, some)), some);
      }
    }
  });
  return steps;
}

template <class T, class S>
void mamba2_of(const Mamba2Args& args) {
  const Mamba2Steps steps = mamba2_steps<T>(args);
  std::vector<const Run*> one, more;
  int64_t tokens = 0;
  for (const Run& run : args.runs->runs) {
    (run.decodes() ? one : more).push_back(&run);
    if (!run.decodes()) tokens += run.length;
  }
  Pool& pool = Pool::instance();
  pool.reserve(scratch_bytes<S>(args.head_dim * args.state_dim));
  const int64_t head_numbers = args.head_dim * args.state_dim;
  const double nanoseconds = static_cast<double>(head_numbers) / 16.0 *
                             (2.0 + static_cast<double>(tokens) / static_cast<double>(more.size() + 1));
  const auto head_of = [&](int64_t item) -> const S* {
    if (item == Pool::kNone || more[item / args.heads]->fresh || more[item / args.heads]->slot == kPad) return nullptr;
    return static_cast<const S*>(args.state) + more[item / args.heads]->slot * args.slot_stride +
           item % args.heads * head_numbers;
  };
  pool.for_each_ahead(static_cast<int64_t>(more.size()) * args.heads, nanoseconds, [&](int64_t item, int64_t next) {
    const FlushDenormals flush;
    mamba2_head<T, S>(args, steps, *more[item / args.heads], item % args.heads, head_of(next));
  });
  const int64_t fit = kDecodeBytes / (head_numbers * static_cast<int64_t>(sizeof(S))), heads = fit > 1 ? fit : 1;
  const int64_t parts = (args.heads + heads - 1) / heads;
  const auto state_of = [&](int64_t item) {
    return static_cast<const S*>(args.state) + one[item / parts]->slot * args.slot_stride +
           item % parts * heads * head_numbers;
  };
  pool.for_each_ahead(static_cast<int64_t>(one.size()) * parts, static_cast<double>(heads * head_numbers) * 0.2,
                      [&](int64_t item, int64_t next) {
                        const FlushDenormals flush;
                        const int64_t begin = item % parts * heads,
                                      end = begin + heads < args.heads ? begin + heads : args.heads;
                        mamba2_decode<T, S>(args, steps, *one[item / parts], begin, end,
                                            next == Pool::kNone ? nullptr : state_of(next));
                      });
}

void mamba2(const Mamba2Args& args) {
  with_state_type(args.kind.dtype, [&](auto* number) {
    using S = std::remove_pointer_t<decltype(number)>;
    if (args.x.dtype == Dtype::bfloat16) mamba2_of<bf16, S>(args);
    else mamba2_of<float, S>(args);
  });
}

}  // namespace
}  // namespace weft
