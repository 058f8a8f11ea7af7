// Small operations between the matrix products, one pass each: rotary, K and V into their pages, silu(gate) * up, x *
// sigmoid(gate), gelu.
#pragma once

#include "kv_numbers.hpp"

namespace weft {
namespace {

template <class T>
WEFT_INLINE void rotate_head(const T* from, T* to, const float* cos, const float* sin, int64_t rotary_dim,
                             int64_t dim) {
  const int64_t half = rotary_dim / 2;
  int64_t i = 0;
  for (; i + 16 <= half; i += 16) {
    const f32x16 first = load(from + i), second = load(from + half + i);
    const f32x16 c = load(cos + i), s = load(sin + i);
    store(to + i, first * c - second * s);
    store(to + half + i, second * c + first * s);
  }
  for (; i < half; ++i) {
    const float first = widen(from[i]), second = widen(from[half + i]);
    narrow(to + i, first * cos[i] - second * sin[i]);
    narrow(to + half + i, second * cos[i] + first * sin[i]);
  }
  if (rotary_dim < dim && from != to) std::memcpy(to + rotary_dim, from + rotary_dim, sizeof(T) * (dim - rotary_dim));
}

template <class T>
void rotary_of(const RotaryArgs& args) {
  const double nanoseconds = static_cast<double>((args.q_heads + args.kv_heads) * args.dim) * 0.2;
  Pool::instance().for_each(args.tokens, nanoseconds, [&](int64_t token) {
    const float* cos = args.cos + token * args.rotary_dim;
    const float* sin = args.sin + token * args.rotary_dim;
    const auto rotate = [&](const Rows& x, int64_t heads, void* into) {
      for (int64_t head = 0; head < heads; ++head)
        rotate_head(static_cast<const T*>(x.data) + token * x.token_stride + head * x.head_stride,
                    static_cast<T*>(into) + (token * heads + head) * args.dim, cos, sin, args.rotary_dim, args.dim);
    };
    rotate(args.q, args.q_heads, args.q_out);
    rotate(args.k, args.kv_heads, args.k_out);
  });
}

void rotary(const RotaryArgs& args) {
  if (args.q.dtype == Dtype::bfloat16) rotary_of<bf16>(args);
  else rotary_of<float>(args);
}

// Writes one token of one head into its page: see tensor/layout.py.
template <class T, class KV>
void write_token(const WriteKvArgs& args, int64_t token, int64_t page, int64_t place) {
  constexpr int64_t pack = kPack<KV>;
  KV* k_page = static_cast<KV*>(args.cache_k) + page * args.k_page;
  KV* v_page = static_cast<KV*>(args.cache_v) + page * args.v_page;
  for (int64_t head = 0; head < args.kv_heads; ++head) {
    const T* k = static_cast<const T*>(args.k.data) + token * args.k.token_stride + head * args.k.head_stride;
    const T* v = static_cast<const T*>(args.v.data) + token * args.v.token_stride + head * args.v.head_stride;
    KV* k_head = k_page + head * args.dim * kPageTokens;
    KV* v_head = v_page + head * args.dim * kPageTokens + place / pack * args.dim * pack + place % pack;
    float k_over = 1, v_over = 1;
    if constexpr (kScaled<KV>) {
      bf16* scales = static_cast<bf16*>(args.scales.data) + page * args.scales.page + head * kPageTokens + place;
      scales[0] = token_scale(k, args.dim);
      scales[args.scales.part] = token_scale(v, args.dim);
      if (widen(scales[0]) != 0) k_over = widen(scales[0]);
      if (widen(scales[args.scales.part]) != 0) v_over = widen(scales[args.scales.part]);
    }
    for (int64_t d = 0; d < args.dim; ++d) {
      const float key = widen(k[d]), value = widen(v[d]);
      narrow(k_head + (d / pack * kPageTokens + place) * pack + d % pack, kScaled<KV> ? key / k_over : key);
      narrow(v_head + d * pack, kScaled<KV> ? value / v_over : value);
    }
  }
}

template <class T, class KV>
void write_kv_of(const WriteKvArgs& args) {
  struct Place {
    int64_t token, page, place;
  };
  std::vector<Place> places;
  int64_t row = -1;
  for (const Run& run : args.runs->runs) {
    ++row;
    if (run.start == kPad) continue;
    for (int64_t i = 0; i < run.length; ++i) {
      const int64_t position = run.start + i;
      const int64_t page = args.page_table[row * args.table_stride + position / kPageTokens];
      if (page != kPad) places.push_back({run.offset + i, page, position % kPageTokens});
    }
  }
  const double nanoseconds = static_cast<double>(args.kv_heads * args.dim);
  Pool::instance().for_each(static_cast<int64_t>(places.size()), nanoseconds, [&](int64_t i) {
    write_token<T, KV>(args, places[i].token, places[i].page, places[i].place);
  });
}

void write_kv(const WriteKvArgs& args) {
  with_kv_type(args.kv_dtype, [&](auto* kv) {
    using KV = std::remove_pointer_t<decltype(kv)>;
    if (args.k.dtype == Dtype::bfloat16) write_kv_of<bf16, KV>(args);
    else write_kv_of<float, KV>(args);
  });
}

template <class T>
void silu_mul_of(const SiluMulArgs& args) {
  const int64_t wide = args.width < 1024 ? args.width : 1024, blocks = (args.width + wide - 1) / wide;
  Pool::instance().for_each(args.tokens * blocks, static_cast<double>(wide), [&](int64_t item) {
    const int64_t token = item / blocks, begin = item % blocks * wide;
    const int64_t end = begin + wide < args.width ? begin + wide : args.width;
    const T* gate = static_cast<const T*>(args.gate_up) + token * args.stride;
    T* out = static_cast<T*>(args.out) + token * args.width;
    for (int64_t i = begin; i < end; i += 16)
      store(out + i, rounded<T>(silu(load(gate + i))) * load(gate + args.width + i));
  });
}

void silu_mul(const SiluMulArgs& args) {
  if (args.dtype == Dtype::bfloat16) silu_mul_of<bf16>(args);
  else silu_mul_of<float>(args);
}

template <class T>
void gelu_tanh_of(const GeluArgs& args) {
  constexpr int64_t wide = 4096;
  Pool::instance().for_each((args.count + wide - 1) / wide, static_cast<double>(wide), [&](int64_t block) {
    const int64_t end = (block + 1) * wide < args.count ? (block + 1) * wide : args.count;
    const T* x = static_cast<const T*>(args.x);
    T* out = static_cast<T*>(args.out);
    for (int64_t i = block * wide; i < end; i += 16) store_some(out + i, gelu_tanh(load_some(x + i, end - i)), end - i);
  });
}

void gelu_tanh(const GeluArgs& args) {
  if (args.dtype == Dtype::bfloat16) gelu_tanh_of<bf16>(args);
  else gelu_tanh_of<float>(args);
}

// Multiplies x by sigmoid(gate), with a gate for each number or one for each head.
template <class T>
void sigmoid_gate_of(const GateArgs& args) {
  Pool::instance().for_each(args.tokens, static_cast<double>(args.heads * args.dim), [&](int64_t token) {
    T* x = static_cast<T*>(args.x) + token * args.heads * args.dim;
    const T* gate = static_cast<const T*>(args.gate.data) + token * args.gate.token_stride;
    for (int64_t head = 0; head < args.heads; ++head) {
      const f32x16 whole = args.per_head ? rounded<T>(sigmoid(splat(widen(gate[head])))) : splat(1);
      for (int64_t d = 0; d < args.dim; d += 16) {
        T* at = x + head * args.dim + d;
        store(at, load(at) * (args.per_head ? whole : rounded<T>(sigmoid(load(gate + head * args.dim + d)))));
      }
    }
  });
}

void sigmoid_gate(const GateArgs& args) {
  if (args.gate.dtype == Dtype::bfloat16) sigmoid_gate_of<bf16>(args);
  else sigmoid_gate_of<float>(args);
}

}  // namespace
}  // namespace weft
