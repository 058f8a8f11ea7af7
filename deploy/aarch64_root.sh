#!/usr/bin/env bash
# Headers and libraries of Python 3.11 for aarch64, as packages of Debian unpacked into a folder, for the cross-compiled
# wheels and for qemu-aarch64. Nothing is installed into the system. Needs apt-get, dpkg and Debian 12.
#
#   deploy/aarch64_root.sh [DIR]     build/aarch64/root by default
set -euo pipefail
cd "$(dirname "$0")/.."
root=${1:-build/aarch64/root}
mkdir -p "$root" build/aarch64/apt/{state/lists/partial,cache/archives/partial,debs}
apt=$PWD/build/aarch64/apt
touch "$apt/status"
cat >"$apt/apt.conf" <<END
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
APT::Sandbox::User "root";
Dir::State "$apt/state";
Dir::State::status "$apt/status";
Dir::Cache "$apt/cache";
END
export APT_CONFIG=$apt/apt.conf
apt-get update -qq
packages="libpython3.11-dev libpython3.11-minimal libpython3.11-stdlib python3.11-minimal libc6 libstdc++6 libgcc-s1
  zlib1g libexpat1 libssl3 libffi8 liblzma5 libbz2-1.0 libsqlite3-0 libuuid1 libgomp1 libcrypt1"
# shellcheck disable=SC2086
(cd "$apt/debs" && apt-get download -qq $packages)
for package in "$apt"/debs/*.deb; do dpkg -x "$package" "$root"; done
echo "$root"
