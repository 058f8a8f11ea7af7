// The gated delta rule, token by token, for decodes and prefills. Kimi's variant has one decay for each line of the
// state instead of one for all. RWKV-7's variant has separate keys: kk reads the part that b erases, and k writes the
// full value.
//
//     per value head   S <- e^g S;   d = beta (v - k^T S);   S <- S + k d^T;   o = q^T S      S [K, V]
//     keys apart       u = kk^T S;   S <- e^g S - b u^T + k v^T;               o = q^T S
//
// Prefills: an item of work is 16, 32 or 64 columns of one head of one run. Its part of S (K x 16 floats, 8 kB, to 32
// kB) stays in the L1 cache for all tokens of the run. 64 columns share the loads of k and q, and their eight sums do
// not wait for one another. One pass over it per token does everything:
//
//     line k of S:   s = e^g s + k_t[k] d       o += q_t[k] s       ahead += e^(g_(t+1)) k_(t+1)[k] s
//
// The next token needs ``ahead`` before it can start, so S is read and written once per token. The arithmetic is that
// of the recurrence itself. How a prompt is cut changes no bit of the result, and a tap at any position is a copy of
// S. On a CPU this beats the chunked form: its extra matrix products pay only where a matrix unit makes them cheap.
//
// Decodes: all states of a batch are read from memory once, and this takes nearly all of the time. An item is a head of
// one run, whose S is one stream of K x V numbers. The first pass computes ``ahead`` and brings S into the L2 cache; the
// second pass does the rest from there. Meanwhile the thread prefetches the S of its next item. Items of 32 columns would
// read 128 bytes out of each 512, which no prefetcher follows, at half the speed. Sums have the same order.
//
// Runs of several tokens read such pieces of lines. There a thread prefetches the piece of its next item in the first two
// passes over the present one. A replay (``out`` null) has the same passes without q and o.
//
// Before either, a pass over the tokens computes decays and betas from the model's gates (given ``decay``), or reads
// them as they are.
#pragma once

#include "flush_denormals.hpp"
#include "kv_numbers.hpp"
#include "rounding.hpp"

namespace weft {
namespace {

constexpr int kMaxKeyDim = 256;
constexpr int kMostWide = 4;           // 16 columns each
constexpr int64_t kLongColumns = 128;  // the longest of which 64 stay in the L1 cache

// Unit-length k and q of one token (eps 1e-6 as in the model code), q scaled too.
template <class T>
WEFT_INLINE void unit(const T* from, int64_t dim, float scale, float* to) {
  f32x16 squares = splat(0);
  for (int64_t i = 0; i < dim; i += 16) {
    const f32x16 x = load(from + i);
    squares += x * x;
    store(to + i, x);
  }
  const float over = scale / __builtin_sqrtf(sum(squares) + 1e-6f);
  for (int64_t i = 0; i < dim; i += 16) store(to + i, load(to + i) * over);
}

// A decay for each head, or for each line of it; with ``apart``, keys that read, erase and write besides.
enum class Rule { heads, lines, apart };

// The same for a token whose keys are used as they come from the model.
template <class T>
WEFT_INLINE void widened(const T* from, int64_t dim, float* to) {
  for (int64_t i = 0; i < dim; i += 16) store(to + i, load(from + i));
}

// Change of 16 columns of the state by a token: key k writes ``delta``; with keys apart, key b adds ``erased``.
struct DeltaChange {
  f32x16 delta, erased;
};

// ``ahead``: the reader's product with the state.
template <Rule RULE>
WEFT_INLINE DeltaChange delta_change(f32x16 v, f32x16 ahead, float beta) {
  if constexpr (RULE == Rule::apart) return {v, splat(0) - ahead};
  return {(v - ahead) * beta, splat(0)};
}

// A state row after the update.
template <Rule RULE>
WEFT_INLINE f32x16 delta_line(f32x16 line, float decay, const DeltaChange& change, float k, float b) {
  const f32x16 written = fused(change.delta, splat(k), line * decay);
  if constexpr (RULE == Rule::apart) return fused(change.erased, splat(b), written);
  return written;
}

// The part of a state that is read next, with the lines and columns of the present one; null: none.
template <class S, int WIDE>
struct NextState {
  static constexpr int kLines = static_cast<int>(WIDE * sizeof(S) / 4 + 1) / 2;  // of 64 bytes, half of a line
  const S* from;
  int64_t v_dim;
  WEFT_INLINE void ask(int64_t i, int half) const {
    if (from)
      for (int line = 0; line < kLines; ++line)
        __builtin_prefetch(reinterpret_cast<const char*>(from + i * v_dim) + (half * kLines + line) * 64, 0, 2);
  }
};

// ``decays``: one for each line, or one. ``reader``: the next key times its decays, or the next kk. ``element``: of
// the first number of the columns; ``key``: random key for the rounding of this token's state.
template <class S, int WIDE, Rule RULE, bool READS, bool ASKS>
WEFT_INLINE void delta_token(float* state, int64_t element, int64_t v_dim, uint32_t key, int64_t k_dim, const float* k,
                             const float* b, const float* q, const float* reader, const float* decays,
                             const DeltaChange* changes, f32x16* out, f32x16* ahead,
                             const NextState<S, WIDE>& next_state) {
  f32x16 o[WIDE] = {}, a[WIDE] = {};
  DeltaChange d[WIDE];
  for (int w = 0; w < WIDE; ++w) d[w] = changes[w];
  for (int64_t i = 0; i < k_dim; ++i) {
    const float decay = decays[RULE == Rule::heads ? 0 : i];
    if (ASKS) next_state.ask(i, 1);
    for (int w = 0; w < WIDE; ++w) {
      float* at = state + (i * WIDE + w) * 16;
      const f32x16 s = delta_line<RULE>(load(at), decay, d[w], k[i], RULE == Rule::apart ? b[i] : 0.0f);
      const f32x16 next = rounded_state<S>(s, elements(element + i * v_dim + w * 16, 1), key);
      store(at, next);
      if (READS) o[w] = fused(s, splat(q[i]), o[w]);
      a[w] = fused(next, splat(reader[i]), a[w]);
    }
  }
  for (int w = 0; w < WIDE; ++w) {
    out[w] = o[w];
    ahead[w] = a[w];
  }
}

// Gates of all tokens: [tokens, heads] or [tokens, heads, K], and [tokens, heads].
struct DeltaGates {
  float *decays, *betas;
};

// Keys of one token and head: the one that writes, the one that erases, and the one that reads the state before the
// token.
struct DeltaKeys {
  alignas(64) float k[kMaxKeyDim];
  alignas(64) float b[kMaxKeyDim];
};

template <class T>
WEFT_INLINE const T* row_of(const Rows& rows, int64_t token, int64_t head) {
  return static_cast<const T*>(rows.data) + token * rows.token_stride + head * rows.head_stride;
}

// ``reader``: the key, once decayed; or kk, which reads the state before its decay.
template <class T, Rule RULE>
WEFT_INLINE void delta_keys(const GatedDeltaArgs& args, int64_t token, int64_t key_head, const float* decays,
                            DeltaKeys& keys, float* reader) {
  const T* key = row_of<T>(args.k, token, key_head);
  if constexpr (RULE == Rule::apart) {
    widened(key, args.k_dim, keys.k);
    widened(row_of<T>(args.b, token, key_head), args.k_dim, keys.b);
    widened(row_of<T>(args.kk, token, key_head), args.k_dim, reader);
    return;
  }
  unit(key, args.k_dim, 1.0f, keys.k);
  for (int64_t i = 0; i < args.k_dim; i += 16)
    store(reader + i, load(keys.k + i) * (RULE == Rule::lines ? load(decays + i) : splat(decays[0])));
}

template <class T, Rule RULE>
WEFT_INLINE void delta_query(const GatedDeltaArgs& args, int64_t token, int64_t key_head, float* q) {
  const T* query = row_of<T>(args.q, token, key_head);
  if constexpr (RULE == Rule::apart) widened(query, args.k_dim, q);
  else unit(query, args.k_dim, args.scale, q);
}

// One room for all types and widths: a thread pays for each, and clears it, when it first calls any kernel.
alignas(64) thread_local float delta_room[kMaxKeyDim * 16 * kMostWide];

// ``next``: the part that the thread reads next, or null.
template <class T, class S, int WIDE, Rule RULE>
void delta_columns(const GatedDeltaArgs& args, const DeltaGates& gates, const Run& run, int64_t head, int64_t column,
                   const S* next) {
  static_assert(WIDE <= kMostWide);
  float* const state = delta_room;
  alignas(64) float q[kMaxKeyDim], reader[kMaxKeyDim];
  DeltaKeys keys[2];
  const int64_t k_dim = args.k_dim, v_dim = args.v_dim, width = 16 * WIDE;
  const int64_t key_head = head / (args.heads / args.k_heads);
  const int64_t element = head * k_dim * v_dim + column;
  S* const slots = static_cast<S*>(args.state) + element;
  if (run.fresh || run.slot == kPad) {
    std::memset(state, 0, sizeof(float) * k_dim * width);
  } else {
    const S* from = slots + run.slot * args.slot_stride;
    for (int64_t i = 0; i < k_dim; ++i) read_state(from + i * v_dim, state + i * width, width);
  }
  const auto keep = [&](int64_t slot) {
    S* to = slots + slot * args.slot_stride;
    for (int64_t i = 0; i < k_dim; ++i) write_state(to + i * v_dim, state + i * width, width);
  };
  const auto decays_of = [&](int64_t token) {
    return gates.decays + (token * args.heads + head) * (RULE == Rule::heads ? 1 : k_dim);
  };
  const auto keys_of = [&](int64_t token, DeltaKeys& of_token) {
    delta_keys<T, RULE>(args, token, key_head, decays_of(token), of_token, reader);
  };
  keys_of(run.offset, keys[0]);
  f32x16 ahead[WIDE] = {};
  const NextState<S, WIDE> next_state = {next, v_dim};
  for (int64_t i = 0; i < k_dim; ++i) {
    next_state.ask(i, 0);
    for (int w = 0; w < WIDE; ++w) ahead[w] = fused(load(state + (i * WIDE + w) * 16), splat(reader[i]), ahead[w]);
  }
  size_t tap = 0;
  for (int64_t t = 0; t < run.length; ++t) {
    const int64_t token = run.offset + t;
    if (args.out) delta_query<T, RULE>(args, token, key_head, q);
    if (t + 1 < run.length) keys_of(token + 1, keys[(t + 1) & 1]);
    const float beta = gates.betas[token * args.heads + head];
    const T* v = row_of<T>(args.v, token, head) + column;
    f32x16 out[WIDE];
    DeltaChange changes[WIDE];
    for (int w = 0; w < WIDE; ++w) changes[w] = delta_change<RULE>(load(v + 16 * w), ahead[w], beta);
    const uint32_t key = state_key(run.start + t, args.kind.layer);
    const auto pass = [&](auto reads, auto asks) {
      delta_token<S, WIDE, RULE, decltype(reads)::value, decltype(asks)::value>(
          state, element, v_dim, key, k_dim, keys[t & 1].k, keys[t & 1].b, q, reader, decays_of(token), changes, out,
          ahead, next_state);
    };
    const bool asks = t == 0 && next;
    if (args.out) {
      asks ? pass(std::true_type(), std::true_type()) : pass(std::true_type(), std::false_type());
      T* to = static_cast<T*>(args.out) + (token * args.heads + head) * v_dim + column;
      for (int w = 0; w < WIDE; ++w) store(to + 16 * w, out[w]);
    } else {
      asks ? pass(std::false_type(), std::true_type()) : pass(std::false_type(), std::false_type());
    }
    for (; tap < run.taps.size() && run.taps[tap].offset == t + 1; ++tap) keep(run.taps[tap].slot);
  }
  if (run.slot != kPad && run.keeps) keep(run.slot);
}

// 16 WIDE columns of a head for a run of one token, in place. ``to`` null: a replay.
template <class T, class S, int WIDE, Rule RULE>
WEFT_INLINE void delta_decode(S* state, bool fresh, int64_t element, int64_t v_dim, uint32_t key, int64_t k_dim,
                              const DeltaKeys& keys, const float* q, const float* reader, const float* decays,
                              float beta, const T* v, T* to, const NextState<S, WIDE>& next_state) {
  f32x16 o[WIDE] = {}, ahead[WIDE] = {};
  DeltaChange d[WIDE];
  if (!fresh)
    for (int64_t i = 0; i < k_dim; ++i) {
      next_state.ask(i, 0);
      for (int w = 0; w < WIDE; ++w) ahead[w] = fused(load(state + i * v_dim + w * 16), splat(reader[i]), ahead[w]);
    }
  for (int w = 0; w < WIDE; ++w) d[w] = delta_change<RULE>(load(v + 16 * w), ahead[w], beta);
  for (int64_t i = 0; i < k_dim; ++i) {
    const float decay = decays[RULE == Rule::heads ? 0 : i];
    next_state.ask(i, 1);
    for (int w = 0; w < WIDE; ++w) {
      S* at = state + i * v_dim + w * 16;
      const float b = RULE == Rule::apart ? keys.b[i] : 0.0f;
      const f32x16 s = delta_line<RULE>(fresh ? splat(0) : load(at), decay, d[w], keys.k[i], b);
      store(at, rounded_state<S>(s, elements(element + i * v_dim + w * 16, 1), key));
      if (to) o[w] = fused(s, splat(q[i]), o[w]);
    }
  }
  if (to)
    for (int w = 0; w < WIDE; ++w) store(to + 16 * w, o[w]);
}

// ``next``: the state of the head that comes next, or null.
template <class T, class S, Rule RULE>
void delta_head(const GatedDeltaArgs& args, const DeltaGates& gates, const Run& run, int64_t head, const S* next) {
  const int64_t k_dim = args.k_dim, v_dim = args.v_dim, token = run.offset;
  const int64_t key_head = head / (args.heads / args.k_heads), first = head * k_dim * v_dim;
  S* const state = static_cast<S*>(args.state) + run.slot * args.slot_stride + first;
  const float* const decays = gates.decays + (token * args.heads + head) * (RULE == Rule::heads ? 1 : k_dim);
  const float beta = gates.betas[token * args.heads + head];
  const T* v = row_of<T>(args.v, token, head);
  T* to = args.out ? static_cast<T*>(args.out) + (token * args.heads + head) * v_dim : nullptr;
  const uint32_t key = state_key(run.start, args.kind.layer);
  alignas(64) float q[kMaxKeyDim], reader[kMaxKeyDim];
  DeltaKeys keys;
  delta_keys<T, RULE>(args, token, key_head, decays, keys, reader);
  if (to) delta_query<T, RULE>(args, token, key_head, q);
  int64_t column = 0;
  const auto columns = [&](auto wide) {
    constexpr int WIDE = decltype(wide)::value;
    for (; column + 16 * WIDE <= v_dim; column += 16 * WIDE)
      delta_decode<T, S, WIDE, RULE>(state + column, run.fresh, first + column, v_dim, key, k_dim, keys, q, reader,
                                     decays, beta, v + column, to ? to + column : nullptr,
                                     {next ? next + column : nullptr, v_dim});
  };
#if defined(__AVX512F__)
  columns(std::integral_constant<int, 8>());
  columns(std::integral_constant<int, 4>());
#endif
  columns(std::integral_constant<int, 2>());
  columns(std::integral_constant<int, 1>());
}

// Gates of one token, of dtype G, into ``decays`` and ``betas``.
template <class G>
void delta_gates(const GatedDeltaArgs& args, int64_t token, float* decays, float* betas) {
  const G* g = static_cast<const G*>(args.g.data) + token * args.g.token_stride;
  const G* b = args.beta.data ? static_cast<const G*>(args.beta.data) + token * args.beta.token_stride : nullptr;
  for (int64_t h = 0; b && h < args.heads; h += 16) {
    const f32x16 beta = load_some(b + h, args.heads - h);
    store_some(betas + token * args.heads + h, args.decay ? sigmoid(beta) * args.beta_scale : beta, args.heads - h);
  }
  if (!args.line_decays) {
    for (int64_t h = 0; h < args.heads; h += 16) {
      const int64_t some = args.heads - h;
      f32x16 log_decay = load_some(g + h, some);
      if (args.decay)
        log_decay = load_some(args.decay + h, some) * softplus(log_decay + load_some(args.dt_bias + h, some));
      store_some(decays + token * args.heads + h, exp(log_decay), some);
    }
    return;
  }
  for (int64_t h = 0; h < args.heads; ++h)
    for (int64_t k = 0; k < args.k_dim; k += 16) {
      f32x16 log_decay = load(g + h * args.g.head_stride + k);
      if (args.decay) log_decay = args.decay[h] * softplus(log_decay + load(args.dt_bias + h * args.k_dim + k));
      store(decays + (token * args.heads + h) * args.k_dim + k, exp(log_decay));
    }
}

template <Rule RULE>
DeltaGates all_gates(const GatedDeltaArgs& args) {
  int64_t tokens = 0;
  for (const Run& run : args.runs->runs) tokens = run.offset + run.length > tokens ? run.offset + run.length : tokens;
  static thread_local std::vector<float> numbers;
  const int64_t rows = tokens * args.heads, decay_count = rows * (RULE == Rule::heads ? 1 : args.k_dim);
  numbers.resize(static_cast<size_t>(decay_count + rows));
  const DeltaGates gates = {numbers.data(), numbers.data() + decay_count};
  const double numbers_of_token = static_cast<double>(args.heads * (RULE == Rule::heads ? 2 : args.k_dim));
  Pool::instance().for_each((tokens + 15) / 16, 16.0 * numbers_of_token, [&](int64_t item) {
    for (int64_t token = item * 16; token < tokens && token < item * 16 + 16; ++token)
      if (args.g.dtype == Dtype::bfloat16) delta_gates<bf16>(args, token, gates.decays, gates.betas);
      else delta_gates<float>(args, token, gates.decays, gates.betas);
  });
  return gates;
}

template <class T, class S, Rule RULE>
void gated_delta_of(const GatedDeltaArgs& args) {
  const DeltaGates gates = all_gates<RULE>(args);
  std::vector<const Run*> one, more;
  int64_t tokens = 0;
  for (const Run& run : args.runs->runs) {
    (run.decodes() ? one : more).push_back(&run);
    if (!run.decodes()) tokens += run.length;
  }
  Pool& pool = Pool::instance();
  int64_t wide = args.v_dim % 32 == 0 ? 32 : 16;
#if defined(__AVX512F__)
  constexpr bool kStaysFloat = std::is_same_v<S, float>;  // states in fewer bits are rounded in registers
  const int64_t heads_in_all = static_cast<int64_t>(more.size()) * args.heads;
  if (kStaysFloat && args.v_dim % 64 == 0 && args.k_dim <= kLongColumns &&
      heads_in_all * args.v_dim / 64 >= pool.threads())
    wide = 64;
#endif
  const int64_t columns = args.v_dim / wide;
  const double lines = static_cast<double>(args.k_dim * wide / 16);
  const double each = static_cast<double>(tokens) / static_cast<double>(more.size() + 1);
  const auto columns_of = [&](int64_t item) -> const S* {
    if (item == Pool::kNone) return nullptr;
    const Run& run = *more[item / columns / args.heads];
    if (run.fresh || run.slot == kPad) return nullptr;
    return static_cast<const S*>(args.state) + run.slot * args.slot_stride +
           item / columns % args.heads * args.k_dim * args.v_dim + item % columns * wide;
  };
  pool.for_each_ahead(static_cast<int64_t>(more.size()) * args.heads * columns, lines * (3.0 + each),
                      [&](int64_t item, int64_t next) {
                        const FlushDenormals flush;
                        const int64_t column = item % columns * wide, head = item / columns % args.heads;
                        const Run& run = *more[item / columns / args.heads];
#if defined(__AVX512F__)
                        if constexpr (kStaysFloat)
                          if (wide == 64)
                            return delta_columns<T, S, 4, RULE>(args, gates, run, head, column, columns_of(next));
#endif
                        if (wide == 32) delta_columns<T, S, 2, RULE>(args, gates, run, head, column, columns_of(next));
                        else delta_columns<T, S, 1, RULE>(args, gates, run, head, column, columns_of(next));
                      });
  const auto state_of = [&](int64_t item) {
    return static_cast<const S*>(args.state) + one[item / args.heads]->slot * args.slot_stride +
           item % args.heads * args.k_dim * args.v_dim;
  };
  const double nanoseconds = static_cast<double>(args.k_dim * args.v_dim) * 0.2;
  pool.for_each_ahead(static_cast<int64_t>(one.size()) * args.heads, nanoseconds, [&](int64_t item, int64_t next) {
    const FlushDenormals flush;
    delta_head<T, S, RULE>(args, gates, *one[item / args.heads], item % args.heads,
                           next == Pool::kNone ? nullptr : state_of(next));
  });
}

void gated_delta(const GatedDeltaArgs& args) {
  with_state_type(args.kind.dtype, [&](auto* number) {
    using S = std::remove_pointer_t<decltype(number)>;
    const auto of_rule = [&](auto* of_model) {
      using T = std::remove_pointer_t<decltype(of_model)>;
      if (args.kk.data) gated_delta_of<T, S, Rule::apart>(args);
      else args.line_decays ? gated_delta_of<T, S, Rule::lines>(args) : gated_delta_of<T, S, Rule::heads>(args);
    };
    if (args.q.dtype == Dtype::bfloat16) of_rule(static_cast<bf16*>(nullptr));
    else of_rule(static_cast<float*>(nullptr));
  });
}

}  // namespace
}  // namespace weft
