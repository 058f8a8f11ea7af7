// The Mamba-2 state space, token by token, for decodes and prefills alike.
//
//   per head   dt = clamp(softplus(dt + bias));   S <- e^(dt A) S + (dt x) B^T;   y = S C + D x      S [P, N]
//
// An item of work is 16 rows of one head of one run: that part of S (16 x N floats, 8 kB for N = 128) stays in
// the L1 cache for all tokens of the run, and is read and written once per token. As in gated_delta.inl the
// arithmetic is the recurrence itself: no cut of a prompt changes a bit, and a tap is a copy.

namespace weft {
namespace {

constexpr int kMaxStateDim = 256;
constexpr int kRowsOfItem = 16;

template <class T, class S>
void mamba2_rows(const Mamba2Args& args, const Run& run, int64_t head, int64_t first, int64_t rows,
                 const float* steps, const float* decays) {
  alignas(64) static thread_local float state[kRowsOfItem * kMaxStateDim];
  alignas(64) float b[kMaxStateDim], c[kMaxStateDim];
  const int64_t n_dim = args.state_dim, group = head / (args.heads / args.groups);
  const int64_t element = (head * args.head_dim + first) * n_dim;
  S* const slots = static_cast<S*>(args.state) + element;
  if (run.fresh || run.slot == kPad) std::memset(state, 0, sizeof(float) * rows * n_dim);
  else read_state(slots + run.slot * args.slot_stride, state, rows * n_dim);
  const auto row = [&](const Rows& of, int64_t token, int64_t h) {
    return static_cast<const T*>(of.data) + token * of.token_stride + h * of.head_stride;
  };
  const float skip = args.d[head];
  size_t tap = 0;
  for (int64_t t = 0; t < run.length; ++t) {
    const int64_t token = run.offset + t;
    const T* from_b = row(args.b, token, group);
    const T* from_c = row(args.c, token, group);
    for (int64_t n = 0; n < n_dim; n += 16) {
      store(b + n, load(from_b + n));
      store(c + n, load(from_c + n));
    }
    const uint32_t key = state_key(run.start + t, args.kind.layer);
    const float step = steps[token * args.heads + head], decay = decays[token * args.heads + head];
    const T* x = row(args.x, token, head) + first;
    T* out = static_cast<T*>(args.out) + (token * args.heads + head) * args.head_dim + first;
    for (int64_t p = 0; p < rows; ++p) {
      const float value = widen(x[p]), added = step * value;
      float* s = state + p * n_dim;
      f32x16 y = splat(0);
      for (int64_t n = 0; n < n_dim; n += 16) {
        const f32x16 line = load(s + n) * decay + load(b + n) * added;
        store(s + n, kept<S>(line, elements(element + p * n_dim + n, 1), key));
        y += line * load(c + n);
      }
      narrow(out + p, sum(y) + skip * value);
    }
    for (; tap < run.taps.size() && run.taps[tap].offset == t + 1; ++tap)
      write_state(slots + run.taps[tap].slot * args.slot_stride, state, rows * n_dim);
  }
  if (run.slot != kPad) write_state(slots + run.slot * args.slot_stride, state, rows * n_dim);
}

template <class T>
void mamba2_of(const Mamba2Args& args) {
  const std::vector<Run>& runs = args.runs->runs;
  int64_t tokens = 0;
  for (const Run& run : runs) tokens = run.offset + run.length > tokens ? run.offset + run.length : tokens;
  static thread_local std::vector<float> numbers;  // steps, then decays: [tokens, heads] each
  numbers.resize(static_cast<size_t>(2 * tokens * args.heads));
  float* const steps = numbers.data();
  float* const decays = steps + tokens * args.heads;
  Pool& pool = Pool::instance();
  pool.for_each((tokens + 15) / 16, 16.0 * static_cast<double>(args.heads), [&](int64_t block) {
    for (int64_t token = block * 16; token < tokens && token < block * 16 + 16; ++token) {
      const T* dt = static_cast<const T*>(args.dt.data) + token * args.dt.token_stride;
      for (int64_t h = 0; h < args.heads; h += 16) {
        const int64_t some = args.heads - h;
        f32x16 step = softplus(load_some(dt + h, some) + load_some(args.dt_bias + h, some));
        step = min(max(step, splat(args.dt_min)), splat(args.dt_max));
        store_some(steps + token * args.heads + h, step, some);
        store_some(decays + token * args.heads + h, exp(step * load_some(args.a + h, some)), some);
      }
    }
  });
  const int64_t blocks = (args.head_dim + kRowsOfItem - 1) / kRowsOfItem;
  const double lines = static_cast<double>(kRowsOfItem * args.state_dim / 16);
  const double nanoseconds = lines * (2.0 + static_cast<double>(tokens) / static_cast<double>(runs.size() + 1));
  pool.for_each(static_cast<int64_t>(runs.size()) * args.heads * blocks, nanoseconds, [&](int64_t item) {
    const int64_t first = item % blocks * kRowsOfItem, head = item / blocks % args.heads;
    const int64_t rows = args.head_dim - first < kRowsOfItem ? args.head_dim - first : kRowsOfItem;
    with_state_type(args.kind.dtype, [&](auto* number) {
      using S = std::remove_pointer_t<decltype(number)>;
      mamba2_rows<T, S>(args, runs[item / blocks / args.heads], head, first, rows, steps, decays);
    });
  });
}

void mamba2(const Mamba2Args& args) {
  if (args.x.dtype == Dtype::bfloat16) mamba2_of<bf16>(args);
  else mamba2_of<float>(args);
}

}  // namespace
}  // namespace weft
