// The gated delta rule, token by token, for decodes and prefills. Kimi's variant has one decay for each line of the
// state instead of one for all.
//
//     per value head   S <- e^g S;   d = beta (v - k^T S);   S <- S + k d^T;   o = q^T S      S [K, V]
//
// Prefills: an item of work is 16, 32 or 64 columns of one head of one run. Its part of S (K x 16 floats, 8 kB, to 32 kB)
// stays in the L1 cache for all tokens of the run. 64 columns share the loads of k and q, and their eight sums do not wait
// for one another. One pass over it per token does everything:
//
//     line k of S:   s = e^g s + k_t[k] d       o += q_t[k] s       ahead += e^(g_(t+1)) k_(t+1)[k] s
//
// The next token needs ``ahead`` before it can start, so S is read and written once per token. The arithmetic is that of
// the recurrence itself. How a prompt is cut changes no bit of the result, and a tap at any position is a copy of S. On
// a CPU this beats the chunked form: its extra matrix products pay only where a matrix unit makes them cheap.
//
// Decodes: all states of a batch come out of memory once, and nothing else takes long. An item is a head of one run,
// whose S is one stream of K x V numbers. The first pass computes ``ahead``; the second does the rest, over what the L2
// cache holds by then. Meanwhile the thread prefetches the S of its next item. Columns of 32 would be 128 bytes out of
// each 512, which no prefetcher follows: half the speed. Sums have the same order.
//
// Runs of some tokens read such pieces of lines. There too a thread prefetches the piece of its next item, in the first
// two passes over the one at hand. A replay (``out`` null) has the same passes without q and o.
//
// Before either, a pass over the tokens computes decays and betas from the model's gates (given ``decay``), or reads them
// as they are.

namespace weft {
namespace {

constexpr int kMaxKeyDim = 256;
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

// A line of the state behind a token.
WEFT_INLINE f32x16 delta_line(f32x16 line, float decay, f32x16 delta, float k) {
  return fused(delta, splat(k), line * decay);
}

// A part of a state that is read next, as many lines and columns as the one at hand; null: none is.
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

// ``decays``: one for each line, or one. ``reader``: the next key times its decays.
// ``element``: of the first number of the columns; ``key``: what this token's state is rounded by.
template <class S, int WIDE, bool LINES, bool READS, bool ASKS>
WEFT_INLINE void delta_token(float* state, int64_t element, int64_t v_dim, uint32_t key, int64_t k_dim, const float* k,
                             const float* q, const float* reader, const float* decays, const f32x16* delta,
                             f32x16* out, f32x16* ahead, const NextState<S, WIDE>& next_state) {
  f32x16 o[WIDE] = {}, a[WIDE] = {}, d[WIDE];
  for (int w = 0; w < WIDE; ++w) d[w] = delta[w];
  for (int64_t i = 0; i < k_dim; ++i) {
    const float decay = decays[LINES ? i : 0];
    if (ASKS) next_state.ask(i, 1);
    for (int w = 0; w < WIDE; ++w) {
      float* at = state + (i * WIDE + w) * 16;
      const f32x16 s = delta_line(load(at), decay, d[w], k[i]);
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

// Of all tokens: [tokens, heads] or [tokens, heads, K], and [tokens, heads].
struct DeltaGates {
  float *decays, *betas;
};

// What reads the state for a token: its key, once decayed.
template <bool LINES>
WEFT_INLINE void read_by(const float* key, const float* decays, int64_t k_dim, float* reader) {
  for (int64_t i = 0; i < k_dim; i += 16)
    store(reader + i, LINES ? load(key + i) * load(decays + i) : load(key + i) * decays[0]);
}

// ``next``: what the thread reads next, or null.
template <class T, class S, int WIDE, bool LINES>
void delta_columns(const GatedDeltaArgs& args, const DeltaGates& gates, const Run& run, int64_t head, int64_t column,
                   const S* next) {
  alignas(64) static thread_local float state[kMaxKeyDim * 16 * WIDE];
  alignas(64) float k[2][kMaxKeyDim], q[kMaxKeyDim], reader[kMaxKeyDim];
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
  const auto row = [&](const Rows& rows, int64_t token, int64_t h) {
    return static_cast<const T*>(rows.data) + token * rows.token_stride + h * rows.head_stride;
  };
  const auto decays_of = [&](int64_t token) {
    return gates.decays + (token * args.heads + head) * (LINES ? k_dim : 1);
  };
  // The key of a token, and what reads the state for it.
  const auto key_of = [&](int64_t token, float* key) {
    unit(row(args.k, token, key_head), k_dim, 1.0f, key);
    read_by<LINES>(key, decays_of(token), k_dim, reader);
  };
  key_of(run.offset, k[0]);
  f32x16 ahead[WIDE] = {};
  const NextState<S, WIDE> next_state = {next, v_dim};
  for (int64_t i = 0; i < k_dim; ++i) {
    next_state.ask(i, 0);
    for (int w = 0; w < WIDE; ++w)
      ahead[w] = fused(load(state + (i * WIDE + w) * 16), splat(reader[i]), ahead[w]);
  }
  size_t tap = 0;
  for (int64_t t = 0; t < run.length; ++t) {
    const int64_t token = run.offset + t;
    if (args.out) unit(row(args.q, token, key_head), k_dim, args.scale, q);
    if (t + 1 < run.length) key_of(token + 1, k[(t + 1) & 1]);
    const float beta = gates.betas[token * args.heads + head];
    const T* v = row(args.v, token, head) + column;
    f32x16 delta[WIDE], out[WIDE];
    for (int w = 0; w < WIDE; ++w) delta[w] = (load(v + 16 * w) - ahead[w]) * beta;
    const uint32_t key = state_key(run.start + t, args.kind.layer);
    const auto pass = [&](auto reads, auto asks) {
      delta_token<S, WIDE, LINES, decltype(reads)::value, decltype(asks)::value>(
          state, element, v_dim, key, k_dim, k[t & 1], q, reader, decays_of(token), delta, out, ahead, next_state);
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
template <class T, class S, int WIDE, bool LINES>
WEFT_INLINE void delta_decode(S* state, bool fresh, int64_t element, int64_t v_dim, uint32_t key, int64_t k_dim,
                              const float* k, const float* q, const float* reader, const float* decays, float beta,
                              const T* v, T* to, const NextState<S, WIDE>& next_state) {
  f32x16 o[WIDE] = {}, ahead[WIDE] = {}, d[WIDE];
  if (!fresh)
    for (int64_t i = 0; i < k_dim; ++i) {
      next_state.ask(i, 0);
      for (int w = 0; w < WIDE; ++w) ahead[w] = fused(load(state + i * v_dim + w * 16), splat(reader[i]), ahead[w]);
    }
  for (int w = 0; w < WIDE; ++w) d[w] = (load(v + 16 * w) - ahead[w]) * beta;
  for (int64_t i = 0; i < k_dim; ++i) {
    const float decay = decays[LINES ? i : 0];
    next_state.ask(i, 1);
    for (int w = 0; w < WIDE; ++w) {
      S* at = state + i * v_dim + w * 16;
      const f32x16 s = delta_line(fresh ? splat(0) : load(at), decay, d[w], k[i]);
      store(at, rounded_state<S>(s, elements(element + i * v_dim + w * 16, 1), key));
      if (to) o[w] = fused(s, splat(q[i]), o[w]);
    }
  }
  if (to)
    for (int w = 0; w < WIDE; ++w) store(to + 16 * w, o[w]);
}

// ``next``: the state of the head that comes next, or null.
template <class T, class S, bool LINES>
void delta_head(const GatedDeltaArgs& args, const DeltaGates& gates, const Run& run, int64_t head, const S* next) {
  const int64_t k_dim = args.k_dim, v_dim = args.v_dim, token = run.offset;
  const int64_t key_head = head / (args.heads / args.k_heads), first = head * k_dim * v_dim;
  S* const state = static_cast<S*>(args.state) + run.slot * args.slot_stride + first;
  const auto row = [&](const Rows& rows, int64_t h) {
    return static_cast<const T*>(rows.data) + token * rows.token_stride + h * rows.head_stride;
  };
  const float* const decays = gates.decays + (token * args.heads + head) * (LINES ? k_dim : 1);
  const float beta = gates.betas[token * args.heads + head];
  const T* v = row(args.v, head);
  T* to = args.out ? static_cast<T*>(args.out) + (token * args.heads + head) * v_dim : nullptr;
  const uint32_t key = state_key(run.start, args.kind.layer);
  alignas(64) float k[kMaxKeyDim], q[kMaxKeyDim], reader[kMaxKeyDim];
  unit(row(args.k, key_head), k_dim, 1.0f, k);
  if (to) unit(row(args.q, key_head), k_dim, args.scale, q);
  read_by<LINES>(k, decays, k_dim, reader);
  int64_t column = 0;
  const auto columns = [&](auto wide) {
    constexpr int WIDE = decltype(wide)::value;
    for (; column + 16 * WIDE <= v_dim; column += 16 * WIDE)
      delta_decode<T, S, WIDE, LINES>(state + column, run.fresh, first + column, v_dim, key, k_dim, k, q, reader,
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

// One token, of a run that keeps its state and has no tap.
bool decodes(const Run& run) { return run.length == 1 && run.slot != kPad && run.keeps && run.taps.empty(); }

// Gates of one token, of dtype G, into ``decays`` and ``betas``.
template <class G>
void delta_gates(const GatedDeltaArgs& args, int64_t token, float* decays, float* betas) {
  const G* g = static_cast<const G*>(args.g.data) + token * args.g.token_stride;
  const G* b = static_cast<const G*>(args.beta.data) + token * args.beta.token_stride;
  for (int64_t h = 0; h < args.heads; h += 16) {
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

template <bool LINES>
DeltaGates all_gates(const GatedDeltaArgs& args) {
  int64_t tokens = 0;
  for (const Run& run : args.runs->runs) tokens = run.offset + run.length > tokens ? run.offset + run.length : tokens;
  static thread_local std::vector<float> numbers;
  const int64_t rows = tokens * args.heads, decay_count = rows * (LINES ? args.k_dim : 1);
  numbers.resize(static_cast<size_t>(decay_count + rows));
  const DeltaGates gates = {numbers.data(), numbers.data() + decay_count};
  const double numbers_of_token = static_cast<double>(args.heads * (LINES ? args.k_dim : 2));
  Pool::instance().for_each((tokens + 15) / 16, 16.0 * numbers_of_token, [&](int64_t item) {
    for (int64_t token = item * 16; token < tokens && token < item * 16 + 16; ++token)
      if (args.g.dtype == Dtype::bfloat16) delta_gates<bf16>(args, token, gates.decays, gates.betas);
      else delta_gates<float>(args, token, gates.decays, gates.betas);
  });
  return gates;
}

template <class T, class S, bool LINES>
void gated_delta_of(const GatedDeltaArgs& args) {
  const DeltaGates gates = all_gates<LINES>(args);
  std::vector<const Run*> one, more;
  int64_t tokens = 0;
  for (const Run& run : args.runs->runs) {
    (decodes(run) ? one : more).push_back(&run);
    if (!decodes(run)) tokens += run.length;
  }
  Pool& pool = Pool::instance();
  int64_t wide = args.v_dim % 32 == 0 ? 32 : 16;
#if defined(__AVX512F__)
  constexpr bool kStaysFloat = std::is_same_v<S, float>;  // states in fewer bits are rounded in registers
  const int64_t heads_in_all = static_cast<int64_t>(more.size()) * args.heads;
  if (kStaysFloat && args.v_dim % 64 == 0 && args.k_dim <= kLongColumns && heads_in_all * args.v_dim / 64 >= pool.threads())
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
      if (wide == 64) return delta_columns<T, S, 4, LINES>(args, gates, run, head, column, columns_of(next));
#endif
    if (wide == 32) delta_columns<T, S, 2, LINES>(args, gates, run, head, column, columns_of(next));
    else delta_columns<T, S, 1, LINES>(args, gates, run, head, column, columns_of(next));
  });
  const auto state_of = [&](int64_t item) {
    return static_cast<const S*>(args.state) + one[item / args.heads]->slot * args.slot_stride +
           item % args.heads * args.k_dim * args.v_dim;
  };
  const double nanoseconds = static_cast<double>(args.k_dim * args.v_dim) * 0.2;
  pool.for_each_ahead(static_cast<int64_t>(one.size()) * args.heads, nanoseconds, [&](int64_t item, int64_t next) {
    const FlushDenormals flush;
    delta_head<T, S, LINES>(args, gates, *one[item / args.heads], item % args.heads,
                            next == Pool::kNone ? nullptr : state_of(next));
  });
}

void gated_delta(const GatedDeltaArgs& args) {
  with_state_type(args.kind.dtype, [&](auto* number) {
    using S = std::remove_pointer_t<decltype(number)>;
    if (args.q.dtype == Dtype::bfloat16)
      args.line_decays ? gated_delta_of<bf16, S, true>(args) : gated_delta_of<bf16, S, false>(args);
    else
      args.line_decays ? gated_delta_of<float, S, true>(args) : gated_delta_of<float, S, false>(args);
  });
}

}  // namespace
}  // namespace weft
