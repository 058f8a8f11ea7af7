// Denormal numbers (below 1.2e-38) become zeros for the lifetime of an object, on its thread.
//
// A state that a gate forgets is multiplied by e^(-80) and less. The product is a denormal number, and the next token
// reads it. On x86-64 each vector with one of them takes some 150 cycles instead of 4. States of Mamba-2 with decays
// of this kind made a row of a window four times as expensive. Compared with the same token's addition, these numbers
// are nothing.
//
// The kernels of states hold one object for each item of work, so every path over a state has the same bits: decode,
// window, replay and prompt, on any thread. Other kernels leave the process as it is.
#pragma once

#include <cstdint>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace weft {
namespace {

class FlushDenormals {
 public:
  FlushDenormals() : before_(control()) { set(before_ | kFlush); }
  ~FlushDenormals() { set(before_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
#if defined(__x86_64__) || defined(__i386__)
  static constexpr uint64_t kFlush = 0x8040;  // results, and operands
  static uint64_t control() { return _mm_getcsr(); }
  static void set(uint64_t value) {
    asm volatile("" ::: "memory");
    _mm_setcsr(static_cast<unsigned>(value));
    asm volatile("" ::: "memory");
  }
#elif defined(__aarch64__)
  static constexpr uint64_t kFlush = uint64_t{1} << 24;
  static uint64_t control() {
    uint64_t value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void set(uint64_t value) { asm volatile("msr fpcr, %0" ::"r"(value) : "memory"); }
#else
  static constexpr uint64_t kFlush = 0;
  static uint64_t control() { return 0; }
  static void set(uint64_t) {}
#endif
  const uint64_t before_;

  friend class KeepDenormals;
};

// Keeps denormal numbers for its lifetime, inside of the scope of a FlushDenormals.
class KeepDenormals {
 public:
  KeepDenormals() : before_(FlushDenormals::control()) { FlushDenormals::set(before_ & ~FlushDenormals::kFlush); }
  ~KeepDenormals() { FlushDenormals::set(before_); }
  KeepDenormals(const KeepDenormals&) = delete;
  KeepDenormals& operator=(const KeepDenormals&) = delete;

 private:
  const uint64_t before_;
};

}  // namespace
}  // namespace weft
