#include "table.hpp"

namespace weft {

#define WEFT_STRING_OF(x) #x
#define WEFT_STRING(x) WEFT_STRING_OF(x)

namespace own = tables::WEFT_TABLE;

namespace {

constexpr Kernels own_kernels(const char* name) noexcept {
#define WEFT_KERNEL(name, Args) .name = own::name,
#define WEFT_ABILITY(name) .name = own::name,
  return {.name = name, WEFT_EACH_KERNEL(WEFT_KERNEL) WEFT_EACH_ABILITY(WEFT_ABILITY)};
#undef WEFT_KERNEL
#undef WEFT_ABILITY
}

#ifdef WEFT_DOT_TABLE
constexpr Kernels dot_kernels(const char* name) noexcept {
  Kernels kernels = own_kernels(name);
  kernels.attention = own::attention_dots;
  return kernels;
}
#endif

}  // namespace

// A constant initialiser: the table of a set that this CPU lacks must not be written by code of that set.
extern const Kernels WEFT_TABLE;
constinit const Kernels WEFT_TABLE = own_kernels(WEFT_STRING(WEFT_TABLE));
#ifdef WEFT_DOT_TABLE
extern const Kernels WEFT_DOT_TABLE;
constinit const Kernels WEFT_DOT_TABLE = dot_kernels(WEFT_STRING(WEFT_DOT_TABLE));
#endif

}  // namespace weft
