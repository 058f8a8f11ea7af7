#!/usr/bin/env bash
# The C++ kernels under sanitizers: addresses and undefined behaviour for every kernel of every instruction set
# (csrc/check.cpp), data races for the threads (csrc/check_pool.cpp). No Python: an interpreter under these tools is
# slow and reports its own. Says so and passes where there is no compiler; some minutes, most of them compiling.
set -euo pipefail
cd "$(dirname "$0")/.."
CXX=${CXX:-c++}
if ! command -v "$CXX" >/dev/null; then
  echo "sanitize: no C++ compiler ($CXX), nothing to check"
  exit 0
fi
build=build/sanitize
mkdir -p "$build"
flags=(-std=c++20 -Icsrc -g -O1 -Wno-psabi -pthread -fno-math-errno)
checked=(-fsanitize=address,undefined -fno-sanitize-recover=all)

if ! echo 'int main() {}' | "$CXX" -x c++ - "${checked[@]}" -o "$build/probe" 2>/dev/null; then
  echo "sanitize: $CXX has no sanitizers here, nothing to check"
  exit 0
fi

# What has not changed since the last time is not compiled again.
stale() { [ ! -e "$1" ] || [ -n "$(find csrc "$0" -newer "$1" -print -quit)" ]; }

tables=(portable)
arch=()
case "$(uname -m)" in
  x86_64|AMD64)
    tables+=(x86_64_v3 x86_64_v4)
    arch=(-DWEFT_X86)
    ;;
esac

table_flags() {
  case "$1" in
    x86_64_v3) echo "-march=x86-64-v3" ;;
    x86_64_v4) echo "-march=x86-64-v4 -mprefer-vector-width=512 -DWEFT_DOT_TABLE=x86_64_v4_bf16" ;;
  esac
}

if stale "$build/check"; then
  running=()
  for table in "${tables[@]}"; do
    # shellcheck disable=SC2046
    "$CXX" "${flags[@]}" "${checked[@]}" $(table_flags "$table") -DWEFT_TABLE="$table" \
      -c csrc/kernels_for.cpp -o "$build/$table.o" -w &
    running+=($!)
  done
  for job in "${running[@]}"; do wait "$job"; done
  objects=("${tables[@]/#/$build/}")
  "$CXX" "${flags[@]}" "${checked[@]}" "${arch[@]}" csrc/check.cpp csrc/kernels.cpp csrc/pool.cpp \
    "${objects[@]/%/.o}" -o "$build/check"
fi
"$build/check"

if stale "$build/check_pool"; then
  "$CXX" "${flags[@]}" -fsanitize=thread csrc/check_pool.cpp csrc/pool.cpp -o "$build/check_pool"
fi
TSAN_OPTIONS=die_after_fork=0 "$build/check_pool"
