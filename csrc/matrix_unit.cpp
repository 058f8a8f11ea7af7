// Finds the matrix unit, asks the system for it, and compares its order of sums with the manual's.
#include "matrix_unit.hpp"

#include <atomic>
#include <cstring>
#include <random>
#include <vector>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace weft {

extern const TileKernels software_tiles;
#ifdef WEFT_HAS_AMX
extern const TileKernels amx_tiles;
#endif

namespace {

// "" where AMX with bfloat16 and bytes can be used by this process; else the reason.
const char* ask_for_amx() {
#if !defined(WEFT_HAS_AMX)
  return "the compiler of these kernels knows no AMX";
#elif defined(__x86_64__) && defined(__linux__)
  constexpr unsigned kHalves = 1u << 22, kTiles = 1u << 24, kBytes = 1u << 25, kSavedBySystem = 1u << 27;
  constexpr unsigned kTileStates = 3u << 17;  // of XCR0: their shapes, their numbers
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (kHalves | kTiles | kBytes)) != (kHalves | kTiles | kBytes))
    return "the CPU has no AMX";
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & kSavedBySystem)) return "the system saves no tiles";
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & kTileStates) != kTileStates) return "the system saves no tiles";
  constexpr long kAskForState = 0x1023, kTileNumbers = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  if (syscall(SYS_arch_prctl, kAskForState, kTileNumbers) != 0) return "the system refuses the use of AMX";
  return "";
#else
  return "AMX is used on Linux only";
#endif
}

// Whether the unit and the software give the same bits for a product whose sums differ by order.
bool has_order_of_software(const TileKernels& unit) {
  constexpr int64_t kSteps = 3, kNumbers = kSteps * kTileBytes / 2;
  std::mt19937 dice(1);
  std::vector<uint16_t> x(2 * kNumbers), w(2 * kNumbers);
  for (auto* numbers : {&x, &w})
    for (uint16_t& bits : *numbers)  // any sign and mantissa; exponents of 2^-7 to 2^8, and now and then a denormal
      bits = static_cast<uint16_t>((dice() & 0x807F) | (dice() % 64 ? (120 + dice() % 16) << 7 : 0));
  std::vector<float> got(4 * kSumNumbers), expected(4 * kSumNumbers);
  HalfBlock block = {.x = x.data(),
                     .w = w.data(),
                     .x_stride = kNumbers,
                     .w_stride = kNumbers,
                     .steps = kSteps,
                     .x_tiles = 2,
                     .w_tiles = 2,
                     .first = true,
                     .sums = got.data()};
  {
    const UnitInUse in_use(unit);
    unit.halves(block);
  }
  block.sums = expected.data();
  const UnitInUse in_use(software_tiles);
  software_tiles.halves(block);
  return std::memcmp(got.data(), expected.data(), got.size() * sizeof(float)) == 0;
}

struct Unit {
  MatrixUnit unit;
  const TileKernels* kernels;
  bool follows_manual;
};

const Unit kNone = {MatrixUnit::none, nullptr, false};
const Unit kSoftware = {MatrixUnit::software, &software_tiles, true};

// AMX, or none.
const Unit& hardware() {
#ifdef WEFT_HAS_AMX
  static const Unit amx = {MatrixUnit::amx, &amx_tiles, *amx_missing() == 0 && has_order_of_software(amx_tiles)};
  if (*amx_missing() == 0) return amx;
#endif
  return kNone;
}

std::atomic<const Unit*>& chosen() {
  static std::atomic<const Unit*> unit{&hardware()};
  return unit;
}

const Unit& in_use() { return *chosen().load(std::memory_order_relaxed); }

}  // namespace

const char* amx_missing() {
  static const char* const reason = ask_for_amx();
  return reason;
}

MatrixUnit matrix_unit() { return in_use().unit; }

bool use_matrix_unit(MatrixUnit unit) {
  const Unit* const wanted = unit == MatrixUnit::none       ? &kNone
                             : unit == MatrixUnit::software ? &kSoftware
                                                            : &hardware();
  if (wanted->unit != unit) return false;
  chosen().store(wanted);
  return true;
}

const TileKernels& tile_kernels() { return *in_use().kernels; }

bool follows_manual() { return in_use().follows_manual; }

}  // namespace weft
