// The gated delta rule, token by token, for decodes and prefills alike; and Kimi's, whose decay is a number for each
// line of the state instead of one for all.
//
//   per value head   S <- e^g S;   d = beta (v - k^T S);   S <- S + k d^T;   o = q^T S      S [K, V]
//
// An item of work is 16 or 32 columns of one head of one run: its part of S (K x 16 floats, 8 kB) stays in the
// L1 cache for all tokens of the run, and one pass over it per token does everything:
//
//   line k of S:   s = e^g s + k_t[k] d       o += q_t[k] s       ahead += e^(g_(t+1)) k_(t+1)[k] s
//
// ``ahead`` is what the next token needs before it can start, so S is read and written once per token. The
// arithmetic is that of the recurrence itself: how a prompt was cut changes no bit of the result, and a tap at
// any position is a copy of S. On a CPU this beats the chunked form, whose extra matrix products only pay where
// a matrix unit makes them cheap.
//
// Decays and betas are made of the model's gates in a pass before it (given ``decay``), or taken as they are.

namespace weft {
namespace {

constexpr int kMaxKeyDim = 256;

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

// ``decays``: one for each line, or one. ``reader``: the next key times its decays.
// ``element``: of the first number of the columns; ``key``: what this token's state is rounded by.
template <class S, int WIDE, bool LINES>
WEFT_INLINE void delta_token(float* state, int64_t element, int64_t v_dim, uint32_t key, int64_t k_dim, const float* k, const float* q, const float* reader,
                             const float* decays, const f32x16* delta, f32x16* out, f32x16* ahead) {
  f32x16 o[WIDE] = {}, a[WIDE] = {}, d[WIDE];
  for (int w = 0; w < WIDE; ++w) d[w] = delta[w];
  for (int64_t i = 0; i < k_dim; ++i) {
    const float decay = decays[LINES ? i : 0];
    for (int w = 0; w < WIDE; ++w) {
      float* at = state + (i * WIDE + w) * 16;
      const f32x16 s = load(at) * decay + d[w] * k[i];
      const f32x16 next = kept<S>(s, elements(element + i * v_dim + w * 16, 1), key);
      store(at, next);
      o[w] += s * q[i];
      a[w] += next * reader[i];
    }
  }
  for (int w = 0; w < WIDE; ++w) {
    out[w] = o[w];
    ahead[w] = a[w];
  }
}

// Of all tokens: [tokens, heads] or [tokens, heads, K], and [tokens, heads].
struct DeltaGates {
  const float *decays, *betas;
};

template <class T, class S, int WIDE, bool LINES>
void delta_columns(const GatedDeltaArgs& args, const DeltaGates& gates, const Run& run, int64_t head, int64_t column) {
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
  // The key of a token, and what reads the state for it: the key once decayed.
  const auto key_of = [&](int64_t token, float* key) {
    unit(row(args.k, token, key_head), k_dim, 1.0f, key);
    const float* decays = decays_of(token);
    for (int64_t i = 0; i < k_dim; i += 16)
      store(reader + i, LINES ? load(key + i) * load(decays + i) : load(key + i) * decays[0]);
  };
  key_of(run.offset, k[0]);
  f32x16 ahead[WIDE] = {};
  for (int64_t i = 0; i < k_dim; ++i)
    for (int w = 0; w < WIDE; ++w) ahead[w] += load(state + (i * WIDE + w) * 16) * reader[i];
  size_t tap = 0;
  for (int64_t t = 0; t < run.length; ++t) {
    const int64_t token = run.offset + t;
    unit(row(args.q, token, key_head), k_dim, args.scale, q);
    if (t + 1 < run.length) key_of(token + 1, k[(t + 1) & 1]);
    const float beta = gates.betas[token * args.heads + head];
    const T* v = row(args.v, token, head) + column;
    f32x16 delta[WIDE], out[WIDE];
    for (int w = 0; w < WIDE; ++w) delta[w] = (load(v + 16 * w) - ahead[w]) * beta;
    const uint32_t key = state_key(run.start + t, args.kind.layer);
    delta_token<S, WIDE, LINES>(state, element, v_dim, key, k_dim, k[t & 1], q, reader, decays_of(token), delta, out, ahead);
    T* to = static_cast<T*>(args.out) + (token * args.heads + head) * v_dim + column;
    for (int w = 0; w < WIDE; ++w) store(to + 16 * w, out[w]);
    for (; tap < run.taps.size() && run.taps[tap].offset == t + 1; ++tap) keep(run.taps[tap].slot);
  }
  if (run.slot != kPad) keep(run.slot);
}

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

template <class T, bool LINES>
void gated_delta_of(const GatedDeltaArgs& args) {
  const std::vector<Run>& runs = args.runs->runs;
  int64_t tokens = 0;
  for (const Run& run : runs) tokens = run.offset + run.length > tokens ? run.offset + run.length : tokens;
  static thread_local std::vector<float> numbers;
  const int64_t rows = tokens * args.heads, decay_count = rows * (LINES ? args.k_dim : 1);
  numbers.resize(static_cast<size_t>(decay_count + rows));
  float* const decays = numbers.data();
  float* const betas = decays + decay_count;
  Pool& pool = Pool::instance();
  const double gates = static_cast<double>(args.heads * (LINES ? args.k_dim : 2));
  pool.for_each((tokens + 15) / 16, 16.0 * gates, [&](int64_t item) {
    for (int64_t token = item * 16; token < tokens && token < item * 16 + 16; ++token)
      if (args.g.dtype == Dtype::bfloat16) delta_gates<bf16>(args, token, decays, betas);
      else delta_gates<float>(args, token, decays, betas);
  });
  const DeltaGates made = {decays, betas};
  const int64_t wide = args.v_dim % 32 == 0 ? 32 : 16, columns = args.v_dim / wide;
  const double lines = static_cast<double>(args.k_dim * wide / 16);
  const double nanoseconds = lines * (3.0 + static_cast<double>(tokens) / static_cast<double>(runs.size() + 1));
  pool.for_each(static_cast<int64_t>(runs.size()) * args.heads * columns, nanoseconds, [&](int64_t item) {
    const int64_t column = item % columns * wide, head = item / columns % args.heads;
    const Run& run = runs[item / columns / args.heads];
    with_state_type(args.kind.dtype, [&](auto* number) {
      using S = std::remove_pointer_t<decltype(number)>;
      if (wide == 32) delta_columns<T, S, 2, LINES>(args, made, run, head, column);
      else delta_columns<T, S, 1, LINES>(args, made, run, head, column);
    });
  });
}

void gated_delta(const GatedDeltaArgs& args) {
  if (args.q.dtype == Dtype::bfloat16)
    args.line_decays ? gated_delta_of<bf16, true>(args) : gated_delta_of<bf16, false>(args);
  else
    args.line_decays ? gated_delta_of<float, true>(args) : gated_delta_of<float, false>(args);
}

}  // namespace
}  // namespace weft
