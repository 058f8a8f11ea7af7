#!/bin/sh
# The kernels for 64-bit Arm (NEON): compiled by a cross compiler, their products run under an emulator.
#
#   tests/aarch64.sh [BUILD_FOLDER]
#
# Needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: g++-aarch64-linux-gnu, qemu-user). Every kernel of the table is
# compiled; the matrix products are also run (csrc/check_products.cpp), on a CPU with products of pairs of bfloat16
# (FEAT_BF16) and on one without. Speed is not measured: an emulator has none.
set -eu
cd "$(dirname "$0")/.."
build=${1:-build/aarch64}
compiler=${CXX_AARCH64:-aarch64-linux-gnu-g++}
emulator=${QEMU_AARCH64:-qemu-aarch64}
for tool in "$compiler" "$emulator"; do
  command -v "$tool" > /dev/null || { echo "$tool is missing: apt-get install g++-aarch64-linux-gnu qemu-user" >&2; exit 2; }
done
mkdir -p "$build"
flags="-std=c++20 -O2 -fno-math-errno -ffp-contract=fast -Wall -Wno-psabi -Icsrc -DWEFT_TABLE=neon -DWEFT_HAS_neon"
compile() {
  "$compiler" $flags -c "csrc/$1.cpp" -o "$build/$1.o"
}
for part in table_products table_twelve_bit table_coded table_codes; do compile "$part"; done
"$compiler" $flags -ffp-contract=off -static -pthread csrc/check_products.cpp csrc/pool.cpp csrc/pack_twelve_bit.cpp \
  "$build"/table_products.o "$build"/table_twelve_bit.o "$build"/table_coded.o "$build"/table_codes.o \
  -o "$build/check_products"
check() {  # an emulated CPU, and what its products must be made of
  "$emulator" -cpu "$1" "$build/check_products" | tee "$build/check.log"
  grep -q "$2" "$build/check.log" || { echo "$1: not $2" >&2; exit 1; }
}
check max "by products of pairs"
check cortex-a57 "by widened weights"
for part in table_rows table_channels table_delta table_mamba2 table_adapters table_attention table kernels; do compile "$part"; done
