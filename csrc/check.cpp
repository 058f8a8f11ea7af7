// Every kernel of every table that this machine runs, over buffers that end where their data ends. Built with
// sanitizers (tests/sanitize.sh), so that a read or write outside of them, and arithmetic that C++ does not define,
// ends it. Results are compared with the portable table's; what they ought to be is in tests/ops/test_native*.py.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>

#include "kernels.hpp"

namespace {

using namespace weft;

uint32_t random_state = 1;

float random_number() {  // in [-1, 1)
  random_state = random_state * 1664525u + 1013904223u;
  return static_cast<float>(static_cast<int32_t>(random_state)) * 4.656613e-10f;
}

// On the heap, of exactly its length.
struct Buffer {
  Dtype dtype;
  int64_t count;
  std::vector<char> bytes;

  Buffer(Dtype dtype_, int64_t count_, float scale = 1.0f, float offset = 0.0f) : dtype(dtype_), count(count_) {
    bytes.resize(static_cast<size_t>(count * size()));
    for (int64_t i = 0; i < count; ++i) set(i, offset + scale * random_number());
  }
  int64_t size() const { return dtype == Dtype::float32 ? 4 : dtype == Dtype::bfloat16 || dtype == Dtype::float16 ? 2 : 1; }
  void set(int64_t i, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (dtype == Dtype::float32) std::memcpy(&bytes[static_cast<size_t>(4 * i)], &x, 4);
    else if (dtype == Dtype::bfloat16) std::memcpy(&bytes[static_cast<size_t>(2 * i)], reinterpret_cast<char*>(&bits) + 2, 2);
    else std::memset(&bytes[static_cast<size_t>(size() * i)], 0, static_cast<size_t>(size()));
  }
  float get(int64_t i) const {
    uint32_t bits = 0;
    if (dtype == Dtype::bfloat16) std::memcpy(reinterpret_cast<char*>(&bits) + 2, &bytes[static_cast<size_t>(2 * i)], 2);
    else if (dtype == Dtype::float32) std::memcpy(&bits, &bytes[static_cast<size_t>(4 * i)], 4);
    else bits = 0;  // pages of other dtypes: what reads them is compared
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  }
  void* data() { return bytes.data(); }
  void* at(int64_t i) { return bytes.data() + i * size(); }
  float* floats() { return reinterpret_cast<float*>(bytes.data()); }
  Rows rows(int64_t token_stride, int64_t head_stride, int64_t first = 0) {
    return {at(first), token_stride, head_stride, dtype};
  }
};

// What one case leaves behind.
using Results = std::vector<Buffer>;

// Decodes (a slot, a padding row, a fresh one, none), then prefills around 16, 64 and 128 with taps.
Runs mixed() {
  Runs made;
  int64_t offset = 0;
  const auto add = [&](int64_t start, int64_t length, int64_t slot, bool fresh, std::vector<Tap> taps = {}) {
    made.runs.push_back({offset, start, length, slot, fresh, taps});
    offset += length;
  };
  add(7, 1, 3, false);
  add(kPad, 1, kPad, false);
  add(0, 1, 6, true);
  add(200, 1, kPad, false);
  add(0, 65, 1, true, {{64, 10}});
  add(40, 130, 5, false, {{2, 7}, {24, 8}, {130, 9}});
  add(63, 2, 4, false);
  add(0, 16, kPad, true);
  return made;
}

constexpr int64_t kSlots = 11;
const Runs& runs() {
  static const Runs made = mixed();
  return made;
}
int64_t tokens() { return runs().runs.back().offset + runs().runs.back().length; }

Results conv_case(Dtype dtype, int64_t kernel, bool gates, Dtype window_dtype) {
  const int64_t channels = 80, width = gates ? 3 * channels : channels;
  Buffer x(dtype, tokens() * width), weight(dtype, channels * kernel), bias(dtype, channels);
  Results out;
  out.emplace_back(dtype, tokens() * channels);
  out.emplace_back(window_dtype, kSlots * channels * (kernel - 1));
  ConvArgs args = {};
  args.runs = &runs();
  args.x = x.rows(width, 0, gates ? 2 * channels : 0);
  if (gates) args.in_gate = x.rows(width, 0), args.out_gate = x.rows(width, 0, channels);
  args.weight = weight.data(), args.bias = gates ? nullptr : bias.data(), args.weight_dtype = dtype;
  args.silu = !gates, args.out = out[0].data(), args.window = out[1].data();
  args.slot_stride = channels * (kernel - 1), args.channels = channels, args.kernel = kernel;
  args.window_dtype = window_dtype;
  kernels().conv(args);
  return out;
}

Results delta_case(Dtype dtype, bool lines, bool gates, int64_t k_heads, int64_t heads, int64_t k_dim, int64_t v_dim) {
  Buffer q(dtype, tokens() * k_heads * k_dim), k(dtype, tokens() * k_heads * k_dim), v(dtype, tokens() * heads * v_dim);
  const int64_t g_width = heads * (lines ? k_dim : 1);
  Buffer g(Dtype::float32, tokens() * g_width, 0.5f, -0.6f), beta(Dtype::float32, tokens() * heads, 0.5f, 0.5f);
  Buffer decay(Dtype::float32, heads, 0.4f, -0.5f), dt_bias(Dtype::float32, g_width);
  Results out;
  out.emplace_back(dtype, tokens() * heads * v_dim);
  out.emplace_back(Dtype::float32, kSlots * heads * k_dim * v_dim);
  kernels().gated_delta({&runs(), q.rows(k_heads * k_dim, k_dim), k.rows(k_heads * k_dim, k_dim),
                         v.rows(heads * v_dim, v_dim), g.rows(g_width, lines ? k_dim : 1), beta.rows(heads, 1), lines,
                         gates ? decay.floats() : nullptr, gates ? dt_bias.floats() : nullptr, 1.0f, out[0].data(),
                         out[1].floats(), heads * k_dim * v_dim, k_heads, heads, k_dim, v_dim, 0.2f});
  return out;
}

Results mamba2_case(Dtype dtype, int64_t heads, int64_t groups, int64_t head_dim, int64_t state_dim) {
  Buffer x(dtype, tokens() * heads * head_dim), b(dtype, tokens() * groups * state_dim);
  Buffer c(dtype, tokens() * groups * state_dim), dt(dtype, tokens() * heads);
  Buffer a(Dtype::float32, heads, 0.4f, -0.5f), d(Dtype::float32, heads), bias(Dtype::float32, heads);
  Results out;
  out.emplace_back(dtype, tokens() * heads * head_dim);
  out.emplace_back(Dtype::float32, kSlots * heads * head_dim * state_dim);
  kernels().mamba2({&runs(), x.rows(heads * head_dim, head_dim), b.rows(groups * state_dim, state_dim),
                    c.rows(groups * state_dim, state_dim), dt.rows(heads, 1), a.floats(), d.floats(), bias.floats(),
                    out[0].data(), out[1].floats(), heads * head_dim * state_dim, heads, groups, head_dim, state_dim,
                    0.001f, 5.0f});
  return out;
}

Results mamba1_case(Dtype dtype, int64_t channels, int64_t state_dim) {
  Buffer x(dtype, tokens() * channels), dt(dtype, tokens() * channels), b(dtype, tokens() * state_dim);
  Buffer c(dtype, tokens() * state_dim), a(Dtype::float32, channels * state_dim, 0.4f, -0.5f);
  Buffer d(Dtype::float32, channels), bias(Dtype::float32, channels);
  Results out;
  out.emplace_back(dtype, tokens() * channels);
  out.emplace_back(Dtype::float32, kSlots * channels * state_dim);
  kernels().mamba1({&runs(), x.rows(channels, 0), dt.rows(channels, 0), b.rows(state_dim, 0), c.rows(state_dim, 0),
                    a.floats(), d.floats(), bias.floats(), out[0].data(), out[1].floats(), channels * state_dim,
                    channels, state_dim});
  return out;
}

Results norm_case(Dtype dtype, bool gated, bool gate_first, bool added, int64_t group) {
  const int64_t heads = added ? 1 : 3, dim = 64, count = 5;
  Buffer x(dtype, count * heads * dim), gate(dtype, count * heads * dim), weight(dtype, dim);
  Results out;
  out.emplace_back(dtype, count * heads * dim);
  out.emplace_back(dtype, count * heads * dim);
  NormArgs args = {};
  args.x = x.rows(heads * dim, dim);
  if (gated) args.gate = gate.rows(heads * dim, dim);
  if (added) args.add = gate.rows(heads * dim, dim), args.sum_out = out[1].data();
  args.add_scale = 0.5f, args.weight = weight.data(), args.weight_dtype = dtype, args.eps = 1e-5f;
  args.plus_one = added, args.gate_first = gate_first, args.tokens = count, args.heads = heads;
  args.dim = dim, args.group = group, args.out = out[0].data();
  kernels().norm(args);
  return out;
}

Results small_cases(Dtype dtype, int64_t rotary_dim) {
  const int64_t count = 7, heads = 3, kv_heads = 2, dim = 64, width = 80;
  Buffer q(dtype, count * heads * dim), k(dtype, count * kv_heads * dim), gate_up(dtype, count * 2 * width);
  Buffer cos(Dtype::float32, count * rotary_dim), sin(Dtype::float32, count * rotary_dim);
  Buffer gate(dtype, count * heads * dim), head_gate(dtype, count * heads);
  Results out;
  for (int64_t each : {heads * dim, kv_heads * dim, width, heads * dim}) out.emplace_back(dtype, count * each);
  kernels().rotary({q.rows(heads * dim, dim), k.rows(kv_heads * dim, dim), cos.floats(), sin.floats(), count, heads,
                    kv_heads, dim, rotary_dim, out[0].data(), out[1].data()});
  kernels().silu_mul({gate_up.data(), 2 * width, count, width, dtype, out[2].data()});
  kernels().sigmoid_gate({out[3].data(), gate.rows(heads * dim, dim), false, count, heads, dim});
  kernels().sigmoid_gate({out[3].data(), head_gate.rows(heads, 1), true, count, heads, dim});
  return out;
}

// Writes and reads pages; what no run wrote is NaN in pages of floats.
Results attention_case(Dtype dtype, Dtype kv_dtype, int64_t kv_heads, int64_t group, int64_t dim, int64_t window) {
  const int64_t block = kv_heads * dim * kPageTokens, columns = 14;
  std::vector<int32_t> table(runs().runs.size() * columns, -1);
  int32_t pages = 0;
  for (size_t row = 0; row < runs().runs.size(); ++row)
    for (int64_t i = 0; runs().runs[row].start != kPad && i * kPageTokens < runs().runs[row].start + runs().runs[row].length; ++i)
      table[row * columns + static_cast<size_t>(i)] = pages++;
  Buffer q(dtype, tokens() * kv_heads * group * dim), k(dtype, tokens() * kv_heads * dim), v(dtype, tokens() * kv_heads * dim);
  Buffer scales(Dtype::bfloat16, pages * 2 * kv_heads * kPageTokens, 0.0f, 0.01f);
  Buffer k_pages(kv_dtype, pages * block), v_pages(kv_dtype, pages * block);
  for (size_t row = 0; row < runs().runs.size(); ++row) {  // behind the context
    const Run& run = runs().runs[row];
    if (run.start == kPad || kv_dtype != Dtype::float32) continue;
    for (int64_t place = (run.start + run.length) % kPageTokens; place && place < kPageTokens; ++place)
      for (int64_t i = 0; i < kv_heads * dim; ++i) {
        const int64_t page = table[row * columns + static_cast<size_t>((run.start + run.length) / kPageTokens)];
        k_pages.set(page * block + i * kPageTokens + place, NAN);
        v_pages.set(page * block + i / dim * dim * kPageTokens + place * dim + i % dim, NAN);
      }
  }
  const TokenScales token_scales = {scales.data(), 2 * kv_heads * kPageTokens, kv_heads * kPageTokens};
  kernels().write_kv({&runs(), k.rows(kv_heads * dim, dim), v.rows(kv_heads * dim, dim), k_pages.data(), v_pages.data(),
                      block, block, kv_heads, dim, table.data(), columns, kv_dtype, token_scales});
  Results out;
  out.emplace_back(dtype, tokens() * kv_heads * group * dim);
  kernels().attention({&runs(), q.rows(kv_heads * group * dim, dim), out[0].data(), k_pages.data(), v_pages.data(),
                       block, block, kv_heads, group, dim, table.data(), columns, 0.2f, kv_dtype, token_scales, window});
  return out;
}

Results linear_case(Dtype dtype, WeightForm form, int64_t rows, bool exact) {
  const int64_t in = 96, count = 75, tiles = (count + 15) / 16;
  const bool tiled = form == WeightForm::int8 || form == WeightForm::int4;
  Buffer x(dtype, rows * in), bias(Dtype::float32, count), scales(Dtype::float32, tiles * 3 * 16, 0.01f, 0.02f);
  Buffer floats(form == WeightForm::bfloat16 ? Dtype::bfloat16 : Dtype::float32, tiled ? 1 : count * in);
  std::vector<uint8_t> codes(static_cast<size_t>(tiled ? tiles * 16 * in / (form == WeightForm::int4 ? 2 : 1) : 1));
  for (uint8_t& code : codes) code = static_cast<uint8_t>(random_number() * 127 + 128);
  const Weight weight = {tiled ? static_cast<const void*>(codes.data()) : floats.data(), form, in, count,
                         scales.data(), false, nullptr, 32};
  Results out;
  out.emplace_back(dtype, rows * count);
  out.emplace_back(dtype, in * 80, 0.0f);
  kernels().linear({x.data(), in, dtype, rows, weight, bias.floats(), exact, out[0].data()});
  if (tiled) kernels().widen_weight({weight, 0, count, 80, dtype, out[1].data()});
  return out;
}

// Where a table has no products of pairs, the sums are made here.
Results tiles_case(Dtype dtype, int64_t rows) {
  const int64_t in = 98, count = 75, tiles = (count + 15) / 16, pack = dtype == Dtype::bfloat16 ? 2 : 1;
  Buffer x(dtype, rows * in), weight(dtype, tiles * 16 * in), bias(Dtype::float32, count);
  Results out;
  out.emplace_back(dtype, rows * count);
  const WeightForm form = pack == 2 ? WeightForm::bfloat16_tiles : WeightForm::float32_tiles;
  if (pack == 1 || kernels().has_bf16_products()) {
    kernels().linear({x.data(), in, dtype, rows, {weight.data(), form, in, count, nullptr, false, nullptr, in},
                      bias.floats(), false, out[0].data()});
    return out;
  }
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t o = 0; o < count; ++o) {
      float sum = bias.get(o);
      for (int64_t i = 0; i < in; ++i)
        sum += x.get(row * in + i) * weight.get((o / 16 * in + i / pack * pack) * 16 + o % 16 * pack + i % pack);
      out[0].set(row * count + o, sum);
    }
  return out;
}

int failures = 0;

void check(const std::string& name, double close, const std::function<Results()>& one) {
  Results want;
  std::vector<const char*> names = usable_kernels();
  for (auto table = names.rbegin(); table != names.rend(); ++table) {  // portable first
    use_kernels(*table);
    random_state = 1;
    Results got = one();
    if (want.empty()) want = got;
    double most = 0;
    for (size_t b = 0; b < got.size(); ++b)
      for (int64_t i = 0; i < got[b].count; ++i) {
        const double one_value = got[b].get(i), other = want[b].get(i);
        const double apart = std::fabs(one_value - other) / (1 + std::fabs(other));
        most = apart > most || apart != apart ? apart : most;
        if (most != most) break;
      }
    if (!(most <= close)) {
      std::printf("%s: %s is %g away from portable\n", name.c_str(), *table, most);
      ++failures;
    }
  }
}

}  // namespace

int main() {
  for (int threads : {1, 3}) {
    Pool::instance().resize(threads);
    for (Dtype dtype : {Dtype::float32, Dtype::bfloat16}) {
      const double close = dtype == Dtype::float32 ? 1e-4 : 2e-2;
      for (int64_t kernel : {2, 3, 4, 8})
        for (Dtype window : {Dtype::float32, Dtype::bfloat16})
          check("conv", close, [&] { return conv_case(dtype, kernel, kernel == 3, window); });
      for (bool lines : {false, true})
        for (bool gates : {false, true}) {
          check("delta", close, [&] { return delta_case(dtype, lines, gates, 2, 4, 32, 32); });
          check("delta", close, [&] { return delta_case(dtype, lines, gates, 1, 3, 16, 48); });
        }
      check("mamba2", close, [&] { return mamba2_case(dtype, 4, 2, 24, 32); });
      check("mamba2", close, [&] { return mamba2_case(dtype, 18, 1, 16, 128); });
      check("mamba1", close, [&] { return mamba1_case(dtype, 32, 16); });
      check("mamba1", close, [&] { return mamba1_case(dtype, 16, 5); });
      for (bool first : {false, true}) {
        check("norm", close, [&] { return norm_case(dtype, true, first, false, first ? 32 : 64); });
        check("add_norm", close, [&] { return norm_case(dtype, false, false, first, 64); });
      }
      for (int64_t rotary_dim : {8, 32, 64}) check("small", close, [&] { return small_cases(dtype, rotary_dim); });
      for (Dtype kv : {Dtype::float32, Dtype::bfloat16, Dtype::float16, Dtype::float8_e4m3, Dtype::int8})
        for (int64_t window : {0, 40}) {
          check("attention", close, [&] { return attention_case(dtype, kv, 2, 2, 64, window); });
          check("attention", close, [&] { return attention_case(dtype, kv, 1, 9, 16, window); });
        }
      for (int64_t rows : {1, 2, 6, 7, 13}) check("linear in tiles", close, [&] { return tiles_case(dtype, rows); });
      for (int64_t rows : {1, 3, 8, 9}) {
        check("linear", close, [&] { return linear_case(dtype, WeightForm::float32, rows, false); });
        check("linear", 2e-2, [&] { return linear_case(dtype, WeightForm::bfloat16, rows, false); });
        for (bool exact : {false, true}) {
          check("linear int8", exact ? close : 0.1, [&] { return linear_case(dtype, WeightForm::int8, rows, exact); });
          check("linear int4", exact ? close : 0.1, [&] { return linear_case(dtype, WeightForm::int4, rows, exact); });
        }
      }
    }
  }
  Pool::instance().resize(1);
  if (!failures) std::printf("every kernel is inside its buffers\n");
  return failures ? 1 : 0;
}
