// Depthwise causal convolution with its window, decodes and prefills alike.
//
//   y[t] = sum_k weight[k] x[t - (K - 1) + k] (+ bias) (silu)      window [C, K-1] = the last inputs, oldest first
//
// An item of work is 128 channels of some spans of tokens: 16 channels at a time keep their weights and their last
// K - 1 inputs in registers from token to token. Where a prefill has few runs, long runs are cut into spans; a span
// takes the inputs before it from x, and the window of such a run is written when all of them are done.
//
// LFM2 multiplies input and output by a gate each: done here, with the roundings of two more passes.
#pragma once

#include "kv_numbers.hpp"
#include "rounding.hpp"

namespace weft {
namespace {

constexpr int64_t kSpanTokens = 128;
constexpr int64_t kConvChannels = 128;
constexpr int64_t kAheadChannels = 32;  // decodes: some runs' windows of two vectors of channels are on their way

struct ConvSpan {
  const Run* run;
  int64_t begin, end;
};

// 16 channels of N numbers each, one channel after the other <-> N lines of 16 channels.
template <int N>
WEFT_INLINE void lines_of(const f32x16* flat, f32x16* lines) {
#if defined(__AVX512F__)
  static constexpr auto lanes = [] {
    struct Lanes {
      alignas(64) int32_t at[N][16] = {};
      uint16_t from[N][N] = {};  // lanes of a line that are in a vector
    } table;
    for (int k = 0; k < N; ++k)
      for (int c = 0; c < 16; ++c) {
        table.at[k][c] = (c * N + k) % 16;
        table.from[k][(c * N + k) / 16] |= static_cast<uint16_t>(1 << c);
      }
    return table;
  }();
  for (int k = 0; k < N; ++k) {
    __m512 line = _mm512_setzero_ps();
    for (int j = 0; j < N; ++j)
      line = _mm512_mask_permutexvar_ps(line, lanes.from[k][j], _mm512_load_si512(lanes.at[k]), (__m512)flat[j]);
    lines[k] = (f32x16)line;
  }
#else
  float numbers[N * 16];
  std::memcpy(numbers, flat, sizeof numbers);
  for (int k = 0; k < N; ++k)
    for (int c = 0; c < 16; ++c) lines[k][c] = numbers[c * N + k];
#endif
}

template <int N>
WEFT_INLINE void flat_of(const f32x16* lines, f32x16* flat) {
#if defined(__AVX512F__)
  static constexpr auto lanes = [] {
    struct Lanes {
      alignas(64) int32_t at[N][16] = {};
      uint16_t from[N][N] = {};  // lanes of a vector that are in a line
    } table;
    for (int i = 0; i < 16 * N; ++i) {
      table.at[i / 16][i % 16] = i / N;
      table.from[i / 16][i % N] |= static_cast<uint16_t>(1 << (i % 16));
    }
    return table;
  }();
  for (int j = 0; j < N; ++j) {
    __m512 vector = _mm512_setzero_ps();
    for (int k = 0; k < N; ++k)
      vector = _mm512_mask_permutexvar_ps(vector, lanes.from[j][k], _mm512_load_si512(lanes.at[j]), (__m512)lines[k]);
    flat[j] = (f32x16)vector;
  }
#else
  float numbers[N * 16];
  for (int k = 0; k < N; ++k)
    for (int c = 0; c < 16; ++c) numbers[c * N + k] = lines[k][c];
  std::memcpy(flat, numbers, sizeof numbers);
#endif
}

// N numbers of each of 16 channels, from ``channel`` on, of a dense [C, N].
template <class W, int N>
WEFT_INLINE void read_channels(const void* all, int64_t channel, f32x16* lines) {
  f32x16 flat[N];
  for (int j = 0; j < N; ++j) flat[j] = load(static_cast<const W*>(all) + channel * N + 16 * j);
  lines_of<N>(flat, lines);
}

template <class W, int N>
WEFT_INLINE void write_channels(void* all, int64_t channel, const f32x16* lines) {
  f32x16 flat[N];
  flat_of<N>(lines, flat);
  for (int j = 0; j < N; ++j) store(static_cast<W*>(all) + channel * N + 16 * j, flat[j]);
}

template <class W>
WEFT_INLINE W* slot_of(const ConvArgs& args, int64_t slot) {
  return static_cast<W*>(args.window) + slot * args.slot_stride;
}

template <int K>
WEFT_INLINE void read_window(const ConvArgs& args, int64_t channel, int64_t slot, f32x16* past) {
  if (args.window_dtype == Dtype::bfloat16) read_channels<bf16, K - 1>(slot_of<bf16>(args, slot), channel, past);
  else read_channels<float, K - 1>(slot_of<float>(args, slot), channel, past);
}

template <int K>
WEFT_INLINE void ask_for_window(const ConvArgs& args, int64_t channel, int64_t slot) {
  const int64_t bytes = args.window_dtype == Dtype::bfloat16 ? 2 : 4;
  const char* from = static_cast<const char*>(args.window) + (slot * args.slot_stride + channel * (K - 1)) * bytes;
  for (int64_t byte = 0; byte < 16 * (K - 1) * bytes; byte += 64) __builtin_prefetch(from + byte);
}

template <int K>
WEFT_INLINE void keep_window(const ConvArgs& args, int64_t channel, int64_t slot, const f32x16* past) {
  if (args.window_dtype == Dtype::bfloat16) write_channels<bf16, K - 1>(slot_of<bf16>(args, slot), channel, past);
  else write_channels<float, K - 1>(slot_of<float>(args, slot), channel, past);
}

template <class T, int K>
WEFT_INLINE void conv_span(const ConvArgs& args, const ConvSpan& span, int64_t channel, const f32x16* weight,
                           f32x16 bias) {
  constexpr int past_count = K - 1;
  const Run& run = *span.run;
  const auto row = [&](const Rows& of, int64_t t) {
    return static_cast<const T*>(of.data) + (run.offset + t) * of.token_stride + channel;
  };
  const auto input = [&](int64_t t) {
    const f32x16 x = load(row(args.x, t));
    return args.in_gate.data ? rounded<T>(x * load(row(args.in_gate, t))) : x;
  };
  f32x16 past[K];
  if (span.begin >= past_count) {
    for (int k = 0; k < past_count; ++k) past[k] = input(span.begin - past_count + k);
  } else if (run.fresh || run.slot == kPad) {
    for (int k = 0; k < past_count; ++k) past[k] = splat(0);
  } else {
    ask_for_window<K>(args, channel + kAheadChannels, run.slot);
    read_window<K>(args, channel, run.slot, past);
  }
  T* out = static_cast<T*>(args.out) + run.offset * args.channels + channel;
  size_t tap = 0;
  while (tap < run.taps.size() && run.taps[tap].offset <= span.begin) ++tap;
  for (int64_t t = span.begin; t < span.end; ++t) {
    past[past_count] = input(t);
    f32x16 y = bias;
    for (int k = 0; k < K; ++k) y += past[k] * weight[k];
    if (args.silu) y = silu(y);
    if (args.out_gate.data) y = rounded<T>(y) * load(row(args.out_gate, t));
    store(out + t * args.channels, y);
    for (int k = 0; k < past_count; ++k) past[k] = past[k + 1];
    for (; tap < run.taps.size() && run.taps[tap].offset == t + 1; ++tap)
      keep_window<K>(args, channel, run.taps[tap].slot, past);
  }
  // A run in one span is done with its window; one in several may have a span that has not read it yet.
  if (run.slot != kPad && run.keeps && run.length <= kSpanTokens) keep_window<K>(args, channel, run.slot, past);
}

// The window of a run that is longer than a span: its last inputs.
template <class T, int K>
WEFT_INLINE void keep_last_inputs(const ConvArgs& args, const Run& run, int64_t channel) {
  f32x16 past[K];
  for (int k = 0; k < K - 1; ++k) {
    const int64_t token = run.offset + run.length - (K - 1) + k;
    past[k] = load(static_cast<const T*>(args.x.data) + token * args.x.token_stride + channel);
    if (args.in_gate.data)
      past[k] = rounded<T>(
          past[k] * load(static_cast<const T*>(args.in_gate.data) + token * args.in_gate.token_stride + channel));
  }
  keep_window<K>(args, channel, run.slot, past);
}

template <class T, int K>
void conv_of(const ConvArgs& args) {
  std::vector<ConvSpan> spans;
  std::vector<size_t> groups = {0};  // spans of an item: those between two of these; some 64 tokens
  std::vector<const Run*> long_runs;
  int64_t tokens = 0, grouped = 0;
  for (const Run& run : args.runs->runs) {
    if (run.length > kSpanTokens && run.slot != kPad && run.keeps) long_runs.push_back(&run);
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
  const auto channels_end = [&](int64_t first) {
    return first + kConvChannels < args.channels ? first + kConvChannels : args.channels;
  };
  const double nanoseconds = 60.0 + 25.0 * static_cast<double>(tokens) / static_cast<double>(group_count + 1);
  pool.for_each(group_count * blocks, nanoseconds, [&](int64_t item) {
    const int64_t group = item / blocks, first = item % blocks * kConvChannels;
    for (int64_t channel = first; channel < channels_end(first); channel += 16) {
      f32x16 weight[K], bias = splat(0);
      if (narrow_weight) read_channels<bf16, K>(args.weight, channel, weight);
      else read_channels<float, K>(args.weight, channel, weight);
      if (args.bias && narrow_weight) bias = load(static_cast<const bf16*>(args.bias) + channel);
      else if (args.bias) bias = load(static_cast<const float*>(args.bias) + channel);
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
