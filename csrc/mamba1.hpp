// The Mamba-1 selective state space, token by token, for decodes and prefills alike.
//
//   per channel   dt = softplus(dt + bias);   S <- e^(dt A) S + (dt x) B;   y = S . C + D x          S [C, N]
//
// An item of work is 16 channels of one run, as the lanes of a vector: their state is rotated to [N][16] once, stays
// in the L1 cache for all tokens of the run, and is rotated back. The exponentials are the cost.
#pragma once

#include "flush_denormals.hpp"
#include "kv_numbers.hpp"
#include "rounding.hpp"

namespace weft {
namespace {

constexpr int kMaxChannelState = 256;

// One room for all types: a thread pays for each, and clears it, when it first calls any kernel.
alignas(64) thread_local float channels_room[2][kMaxChannelState * 16];

template <class T, class S>
void mamba1_channels(const Mamba1Args& args, const Run& run, int64_t channel) {
  float *const state = channels_room[0], *const a = channels_room[1];
  const int64_t n_dim = args.state_dim;
  S* const slots = static_cast<S*>(args.state) + channel * n_dim;
  const S* before = slots + run.slot * args.slot_stride;
  const bool blank = run.fresh || run.slot == kPad;
  for (int64_t n = 0; n < n_dim; ++n)
    for (int64_t c = 0; c < 16; ++c) {
      state[n * 16 + c] = blank ? 0.0f : widen(before[c * n_dim + n]);
      a[n * 16 + c] = args.a[(channel + c) * n_dim + n];
    }
  const auto keep = [&](int64_t slot) {
    S* to = slots + slot * args.slot_stride;
    for (int64_t c = 0; c < 16; ++c)
      for (int64_t n = 0; n < n_dim; ++n) narrow(to + c * n_dim + n, state[n * 16 + c]);
  };
  const auto row = [&](const Rows& of, int64_t token) {
    return static_cast<const T*>(of.data) + token * of.token_stride;
  };
  const f32x16 bias = load(args.dt_bias + channel), skip = load(args.d + channel);
  size_t tap = 0;
  for (int64_t t = 0; t < run.length; ++t) {
    const int64_t token = run.offset + t;
    const uint32_t key = state_key(run.start + t, args.kind.layer);
    const T* b = row(args.b, token);
    const T* c = row(args.c, token);
    const f32x16 x = load(row(args.x, token) + channel);
    const f32x16 step = softplus(load(row(args.dt, token) + channel) + bias), added = step * x;
    f32x16 y = skip * x;
    for (int64_t n = 0; n < n_dim; ++n) {
      const f32x16 line = load(state + n * 16) * exp(step * load(a + n * 16)) + added * widen(b[n]);
      store(state + n * 16, rounded_state<S>(line, elements(channel * n_dim + n, n_dim), key));
      y += line * widen(c[n]);
    }
    store(static_cast<T*>(args.out) + token * args.channels + channel, y);
    for (; tap < run.taps.size() && run.taps[tap].offset == t + 1; ++tap) keep(run.taps[tap].slot);
  }
  if (run.slot != kPad && run.keeps) keep(run.slot);
}

template <class T>
void mamba1_of(const Mamba1Args& args) {
  const std::vector<Run>& runs = args.runs->runs;
  const int64_t blocks = args.channels / 16;
  int64_t tokens = 0;
  for (const Run& run : runs) tokens += run.length;
  // A state line costs an exponential: some 5 ns a token, and more where it is read and written.
  const double nanoseconds = static_cast<double>(args.state_dim) *
                             (15.0 + 5.0 * static_cast<double>(tokens) / static_cast<double>(runs.size() + 1));
  Pool::instance().for_each(static_cast<int64_t>(runs.size()) * blocks, nanoseconds, [&](int64_t item) {
    const FlushDenormals flush;
    with_state_type(args.kind.dtype, [&](auto* number) {
      using S = std::remove_pointer_t<decltype(number)>;
      mamba1_channels<T, S>(args, runs[item / blocks], item % blocks * 16);
    });
  });
}

void mamba1(const Mamba1Args& args) {
  if (args.x.dtype == Dtype::bfloat16) mamba1_of<bf16>(args);
  else mamba1_of<float>(args);
}

}  // namespace
}  // namespace weft
