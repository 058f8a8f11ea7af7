#!/usr/bin/env bash
# The C++ kernels under sanitizers: the kernels' own tests, run with an extension built for addresses and undefined
# behaviour; and the threads' jobs (csrc/check_pool.cpp) for data races.
#
#   tests/sanitize.sh [TABLE]     one instruction set: the best of this machine, or portable, x86_64_v3, x86_64_v4
#   ONLY=compile tests/sanitize.sh    without the tests, and so before there is a .venv (PYTHON=python3)
#
# Every buffer of a test ends in a red zone, as torch's memory comes from the sanitizer's allocator then; what a
# kernel reads behind its input, or computes outside of what C++ defines, ends the run. Only our files are built so:
# the interpreter and torch are as they are, and what they leak is not looked for. Says so and passes where there is
# no compiler with sanitizers. A minute or two on two cores, half of it compiling; what has not changed is kept.
set -euo pipefail
cd "$(dirname "$0")/.."
CXX=${CXX:-c++}
PYTHON=${PYTHON:-.venv/bin/python}
JOBS=${JOBS:-2}
build=build/sanitize
checked=(-fsanitize=address,undefined -fno-sanitize-recover=undefined)
# A quarter less time to compile: what the address sanitizer sees anyway is checked once. A null pointer, an access
# behind a known object and one through a pointer that wrapped around end the run with it too (the controls below).
checked+=(-fno-sanitize=null,object-size,vptr,pointer-overflow)
# Half of the time again: a check of an address is a call, and undefined behaviour is a trap without a message.
checked+=(--param asan-instrumentation-with-call-threshold=0 -fsanitize-undefined-trap-on-error)
# GCC compiles this in a third less time than -O1, and the tests take as long.
optimised=(-Og -g1)

mkdir -p "$build"
# One run at a time: .ci/run compiles beside pip, and tests when that has ended.
exec 9>"$build/lock"
! command -v flock >/dev/null || flock 9
if ! command -v "$CXX" >/dev/null ||
   ! echo 'int main() {}' | "$CXX" -x c++ - "${checked[@]}" -o "$build/probe" 2>/dev/null; then
  echo "sanitize: no C++ compiler with sanitizers ($CXX), nothing to check"
  exit 0
fi

has() { grep -qw "$1" /proc/cpuinfo 2>/dev/null; }
table=${1:-}
if [ -z "$table" ]; then
  if has avx512f && has avx512bw && has avx512dq && has avx512vl && has avx512cd; then table=x86_64_v4
  elif has avx2 && has fma && has bmi2; then table=x86_64_v3
  else table=portable
  fi
fi
case "$table" in  # as in CMakeLists.txt
  portable) instructions="" ;;
  x86_64_v3) instructions="-march=x86-64-v3" ;;
  x86_64_v4) instructions="-march=x86-64-v4 -mprefer-vector-width=512 -DWEFT_DOT_TABLE=x86_64_v4_bf16" ;;
  *) echo "sanitize: no table is called $table"; exit 2 ;;
esac

tools="$build/tools"
[ -d "$tools/nanobind" ] ||
  "$PYTHON" -m pip install --quiet --disable-pip-version-check --target "$tools" "nanobind>=2.4"
python_headers=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')
suffix=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
objects="$build/$table"
mkdir -p "$objects"

common="-std=c++20 -fPIC -fvisibility=hidden -pthread -w -I$python_headers -I$tools/nanobind/include \
  -I$tools/nanobind/ext/robin_map/include"
ours="$common ${optimised[*]} -fno-math-errno -ffp-contract=fast ${checked[*]} -Icsrc -DWEFT_HAS_$table"

# object, then how it is compiled; the longest first
jobs() {
  for part in table_codes table_adapters table_twelve_bit table_coded table_products table_delta table_mamba2 table_attention table_channels table_rows table; do
    echo "$objects/$part.o $CXX $ours $instructions -DWEFT_TABLE=$table -c csrc/$part.cpp"
  done
  for part in module kernels layers fused_block fused_decoder pool pack_twelve_bit matrix_unit software_tiles; do
    echo "$objects/$part.o $CXX $ours -c csrc/$part.cpp"
  done
  echo "$objects/nanobind.o $CXX $common -O1 -DNDEBUG -fno-strict-aliasing -c $tools/nanobind/src/nb_combined.cpp"
}
# Which files an object is of, its own compiler wrote down (-MMD).
stale() {
  local object=$1 made_of="${1%.o}.d"
  [ -e "$object" ] && [ -e "$made_of" ] || return 0
  local source
  for source in $(sed 's/\\$//; s/^[^:]*://' "$made_of"); do
    [ "$source" -nt "$object" ] || [ ! -e "$source" ] && return 0
  done
  [ "$0" -nt "$object" ]
}
jobs | while read -r object command; do
  if stale "$object"; then echo "$command -MMD -MF ${object%.o}.d -o $object"; fi
done | xargs -r -d '\n' -P "$JOBS" -n 1 sh -c

extension="$objects/_native$suffix"
"$CXX" -shared -pthread "${checked[@]}" "$objects"/*.o -o "$extension"

if [ "$0" -nt "$build/check_pool" ] || [ csrc/pool.cpp -nt "$build/check_pool" ] || \
   [ csrc/pool.hpp -nt "$build/check_pool" ] || [ csrc/check_pool.cpp -nt "$build/check_pool" ]; then
  "$CXX" -std=c++20 -Icsrc -g -O1 -pthread -fsanitize=thread csrc/check_pool.cpp csrc/pool.cpp -o "$build/check_pool"
fi
[ "${ONLY:-}" != compile ] || exit 0

# --capture=sys: what a sanitizer writes as the process ends is not kept by pytest, and lost with it. Two processes and no
# pytest-xdist, which waits for workers that are gone. The folder is named, and not its files: a file that is named is
# collected although tests/ops/conftest.py leaves it out on this machine.
tested() {
  local file others=()
  for file in tests/ops/test_*.py; do
    [[ " $* " = *" $file "* ]] || others+=("--ignore=$file")
  done
  LD_PRELOAD=$("$CXX" -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
    WEFT_NATIVE_UNDER_TEST="$PWD/$extension" OMP_NUM_THREADS=1 \
    "$PYTHON" -m pytest -x --capture=sys -p no:cacheprovider -p tests.sanitized_native tests/ops "${others[@]}" \
    --deselect tests/ops/test_native.py::test_the_kernels_are_there_where_a_compiler_is
}
first_half=(tests/ops/test_native.py tests/ops/test_native_matrix_unit.py tests/ops/test_native_expert_tiles.py
            tests/ops/test_twelve_bit.py)
others=()
for file in tests/ops/test_native_*.py tests/ops/test_tiled_linear.py tests/ops/test_byte_inputs.py; do
  [[ " ${first_half[*]} tests/ops/test_native_interface.py " = *" $file "* ]] || others+=("$file")
done
# The controls: with these flags each fault still ends a process.
cat > "$build/faults.cpp" <<'END'
#include <cstddef>
#include <cstdlib>
int at(int* numbers, int index) { return numbers[index]; }
int main(int count, char** words) {
  int known[4] = {1, 2, 3, 4};
  int* volatile nothing = nullptr;
  int* held = static_cast<int*>(std::calloc(4, sizeof(int)));
  int number = 2147483646;
  volatile int result = 0;  // computed, and no exit code: without a sanitizer only the null pointer ends the process
  switch (std::atoi(words[1])) {
    case 1: result = at(nothing, 0); break;
    case 2: result = at(known, 2 + count); break;
    case 3: result = at(held, 2 + count); break;
    case 4: result = 1 << (30 + count); break;
    case 5: result = number + count; break;
    case 6: result = *reinterpret_cast<int*>(reinterpret_cast<char*>(held) + count); break;
    case 7: result = held[~std::size_t{0} / sizeof(int) - count];  // the address wraps around
  }
  return 0;
}
END
"$CXX" "${optimised[@]}" -fno-inline "${checked[@]}" "$build/faults.cpp" -o "$build/faults"
ASAN_OPTIONS=detect_leaks=0 "$build/faults" 0 0
for fault in 1 2 3 4 5 6 7; do
  ! (ASAN_OPTIONS=detect_leaks=0 "$build/faults" "$fault" 0; exit $?) 2>/dev/null ||
    { echo "sanitize: fault $fault of $build/faults.cpp was not noticed"; exit 1; }
done
echo "sanitize: the kernels' tests, $table"
tested "${first_half[@]}" > "$build/tests.log" 2>&1 &
first=$!
TSAN_OPTIONS=die_after_fork=0 "$build/check_pool" > "$build/pool.log" 2>&1 &
pool=$!
failed=0
tested "${others[@]}" || failed=1
wait "$first" || failed=1
wait "$pool" || failed=1
cat "$build/tests.log" "$build/pool.log"
if [ "$failed" = 1 ]; then
  echo "sanitize: failed"
  exit 1
fi
