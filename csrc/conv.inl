// Depthwise causal convolution with its window, decodes and prefills alike.
//
//   y[t] = sum_k weight[k] x[t - (K - 1) + k] (+ bias) (silu)      window [C, K-1] = the last inputs, oldest first
//
// An item of work is 64 channels of some spans of tokens: 16 channels at a time keep their weights and their last
// K - 1 inputs in registers from token to token. Where a prefill has few runs, long runs are cut into spans; a span
// takes the inputs before it from x, and the window of such a run is written when all of them are done.
//
// LFM2 multiplies what goes in and what comes out by a gate each: done here, rounded where two more passes would.

namespace weft {
namespace {

constexpr int kMaxKernel = 8;
constexpr int64_t kSpanTokens = 128;
constexpr int64_t kConvChannels = 64;

struct ConvSpan {
  const Run* run;
  int64_t begin, end;
};

// 16 channels of a window <-> K - 1 lines of 16.
template <class W>
WEFT_INLINE void read_window(const ConvArgs& args, int64_t channel, int64_t slot, float (*lines)[16]) {
  const int64_t kept = args.kernel - 1;
  const W* from = static_cast<const W*>(args.window) + slot * args.slot_stride + channel * kept;
  for (int c = 0; c < 16; ++c)
    for (int64_t k = 0; k < kept; ++k) lines[k][c] = widen(from[c * kept + k]);
}

template <class W>
WEFT_INLINE void write_window(const ConvArgs& args, int64_t channel, int64_t slot, const float (*lines)[16]) {
  const int64_t kept = args.kernel - 1;
  W* to = static_cast<W*>(args.window) + slot * args.slot_stride + channel * kept;
  for (int c = 0; c < 16; ++c)
    for (int64_t k = 0; k < kept; ++k) narrow(to + c * kept + k, lines[k][c]);
}

template <int K>
WEFT_INLINE void keep_window(const ConvArgs& args, int64_t channel, int64_t slot, const f32x16* past) {
  alignas(64) float lines[kMaxKernel][16];
  for (int k = 0; k < K - 1; ++k) store(lines[k], past[k]);
  if (args.window_dtype == Dtype::bfloat16) write_window<bf16>(args, channel, slot, lines);
  else write_window<float>(args, channel, slot, lines);
}

template <class T, int K>
WEFT_INLINE void conv_span(const ConvArgs& args, const ConvSpan& span, int64_t channel, const f32x16* weight,
                           f32x16 bias) {
  constexpr int kept = K - 1;
  const Run& run = *span.run;
  const auto row = [&](const Rows& of, int64_t t) {
    return static_cast<const T*>(of.data) + (run.offset + t) * of.token_stride + channel;
  };
  const auto input = [&](int64_t t) {
    const f32x16 x = load(row(args.x, t));
    return args.in_gate.data ? rounded<T>(x * load(row(args.in_gate, t))) : x;
  };
  f32x16 past[K];
  if (span.begin >= kept) {
    for (int k = 0; k < kept; ++k) past[k] = input(span.begin - kept + k);
  } else if (run.fresh || run.slot == kPad) {
    for (int k = 0; k < kept; ++k) past[k] = splat(0);
  } else {
    alignas(64) float lines[kMaxKernel][16];
    if (args.window_dtype == Dtype::bfloat16) read_window<bf16>(args, channel, run.slot, lines);
    else read_window<float>(args, channel, run.slot, lines);
    for (int k = 0; k < kept; ++k) past[k] = load(lines[k]);
  }
  T* out = static_cast<T*>(args.out) + run.offset * args.channels + channel;
  size_t tap = 0;
  while (tap < run.taps.size() && run.taps[tap].offset <= span.begin) ++tap;
  for (int64_t t = span.begin; t < span.end; ++t) {
    past[kept] = input(t);
    f32x16 y = bias;
    for (int k = 0; k < K; ++k) y += past[k] * weight[k];
    if (args.silu) y = silu(y);
    if (args.out_gate.data) y = rounded<T>(y) * load(row(args.out_gate, t));
    store(out + t * args.channels, y);
    for (int k = 0; k < kept; ++k) past[k] = past[k + 1];
    for (; tap < run.taps.size() && run.taps[tap].offset == t + 1; ++tap)
      keep_window<K>(args, channel, run.taps[tap].slot, past);
  }
  // A run in one span is done with its window; one in several may have a span that has not read it yet.
  if (run.slot != kPad && run.length <= kSpanTokens) keep_window<K>(args, channel, run.slot, past);
}

// The window of a run that is longer than a span: its last inputs.
template <class T, int K>
WEFT_INLINE void keep_last_inputs(const ConvArgs& args, const Run& run, int64_t channel) {
  f32x16 past[K];
  for (int k = 0; k < K - 1; ++k) {
    const int64_t token = run.offset + run.length - (K - 1) + k;
    past[k] = load(static_cast<const T*>(args.x.data) + token * args.x.token_stride + channel);
    if (args.in_gate.data)
      past[k] = rounded<T>(past[k] * load(static_cast<const T*>(args.in_gate.data) +
                                          token * args.in_gate.token_stride + channel));
  }
  keep_window<K>(args, channel, run.slot, past);
}

template <class G>
WEFT_INLINE f32x16 channels_of(const void* from, int64_t channel, int64_t stride, int64_t k) {
  alignas(64) float line[16];
  for (int c = 0; c < 16; ++c) line[c] = widen(static_cast<const G*>(from)[(channel + c) * stride + k]);
  return load(line);
}

template <class T, int K>
void conv_of(const ConvArgs& args) {
  std::vector<ConvSpan> spans;
  std::vector<size_t> groups = {0};  // spans of an item: those between two of these; some 64 tokens
  std::vector<const Run*> long_runs;
  int64_t tokens = 0, grouped = 0;
  for (const Run& run : args.runs->runs) {
    if (run.length > kSpanTokens && run.slot != kPad) long_runs.push_back(&run);
    for (int64_t begin = 0; begin < run.length; begin += kSpanTokens) {
      const int64_t end = begin + kSpanTokens < run.length ? begin + kSpanTokens : run.length;
      spans.push_back({&run, begin, end});
      tokens += end - begin;
      if (tokens - grouped >= 64) {
        groups.push_back(spans.size());
        grouped = tokens;
      }
    }
  }
  if (groups.back() != spans.size()) groups.push_back(spans.size());
  Pool& pool = Pool::instance();
  const int64_t blocks = (args.channels + kConvChannels - 1) / kConvChannels;
  const int64_t group_count = static_cast<int64_t>(groups.size()) - 1;
  const bool narrow_weight = args.weight_dtype == Dtype::bfloat16;
  const auto number = [&](const void* from, int64_t channel, int64_t stride, int64_t k) {
    return narrow_weight ? channels_of<bf16>(from, channel, stride, k) : channels_of<float>(from, channel, stride, k);
  };
  const auto channels_end = [&](int64_t first) {
    return first + kConvChannels < args.channels ? first + kConvChannels : args.channels;
  };
  const double nanoseconds = 60.0 + 25.0 * static_cast<double>(tokens) / static_cast<double>(group_count + 1);
  pool.for_each(group_count * blocks, nanoseconds, [&](int64_t item) {
    const int64_t group = item / blocks, first = item % blocks * kConvChannels;
    for (int64_t channel = first; channel < channels_end(first); channel += 16) {
      f32x16 weight[K];
      for (int k = 0; k < K; ++k) weight[k] = number(args.weight, channel, K, k);
      const f32x16 bias = args.bias ? number(args.bias, channel, 1, 0) : splat(0);
      for (size_t i = groups[group]; i < groups[group + 1]; ++i) conv_span<T, K>(args, spans[i], channel, weight, bias);
    }
  });
  const int64_t long_count = static_cast<int64_t>(long_runs.size());
  pool.for_each(long_count * blocks, 200.0, [&](int64_t item) {
    const int64_t first = item % blocks * kConvChannels;
    for (int64_t channel = first; channel < channels_end(first); channel += 16)
      keep_last_inputs<T, K>(args, *long_runs[item / blocks], channel);
  });
}

template <class T>
void conv_of_kernel(const ConvArgs& args) {
  switch (args.kernel) {
    case 2: return conv_of<T, 2>(args);
    case 3: return conv_of<T, 3>(args);
    case 4: return conv_of<T, 4>(args);
    case 5: return conv_of<T, 5>(args);
    case 6: return conv_of<T, 6>(args);
    case 7: return conv_of<T, 7>(args);
    default: return conv_of<T, 8>(args);
  }
}

void conv(const ConvArgs& args) {
  if (args.x.dtype == Dtype::bfloat16) conv_of_kernel<bf16>(args);
  else conv_of_kernel<float>(args);
}

}  // namespace
}  // namespace weft
