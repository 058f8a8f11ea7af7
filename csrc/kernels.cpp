#include "kernels.hpp"

#include <atomic>
#include <cstring>

namespace weft {

#ifdef WEFT_HAS_portable
extern const Kernels portable;
#endif
#ifdef WEFT_HAS_neon
extern const Kernels neon;
#endif
#ifdef WEFT_HAS_x86_64_v3
extern const Kernels x86_64_v3;
#endif
#ifdef WEFT_HAS_x86_64_v4
extern const Kernels x86_64_v4;
extern const Kernels x86_64_v4_bf16;  // multiplies pairs of bf16
#endif

namespace {

// A build for only one instruction set (a sanitizer's) may have none that this machine runs.
std::vector<const Kernels*> usable() {
  std::vector<const Kernels*> tables;
#ifdef WEFT_HAS_x86_64_v4
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd")) {
    if (__builtin_cpu_supports("avx512bf16")) tables.push_back(&x86_64_v4_bf16);
    tables.push_back(&x86_64_v4);
  }
#endif
#ifdef WEFT_HAS_x86_64_v3
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
    tables.push_back(&x86_64_v3);
#endif
#ifdef WEFT_HAS_neon
  tables.push_back(&neon);  // every 64-bit Arm has it
#endif
#ifdef WEFT_HAS_portable
  tables.push_back(&portable);
#endif
  return tables;
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> table{usable().front()};
  return table;
}

}  // namespace

const Kernels& kernels() { return *chosen().load(std::memory_order_relaxed); }

std::vector<const char*> usable_kernels() {
  std::vector<const char*> names;
  for (const Kernels* table : usable()) names.push_back(table->name);
  return names;
}

bool use_kernels(const char* name) {
  for (const Kernels* table : usable())
    if (std::strcmp(table->name, name) == 0) {
      chosen().store(table);
      return true;
    }
  return false;
}

}  // namespace weft
