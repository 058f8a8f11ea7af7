#!/usr/bin/env bash
# The image of deploy/Dockerfile built without a daemon, by buildah, and run as an orchestrator runs it: a user that is
# not root, a root file system that is read-only, the health check.
#
#   deploy/image.sh                        FROM python:3.12-slim-bookworm, of a registry
#   BASE=bootstrap deploy/image.sh         FROM a minimal Debian 12 by debootstrap, where no registry is reached
#   TARGET=cuda deploy/image.sh            the other target; it is built, and not run
#
# Needs root, buildah, and with BASE=bootstrap debootstrap (Debian: apt-get install buildah debootstrap). A wheel of
# `make release` in dist/ is taken; without one the sources are compiled. Options of pip, such as an index, come from
# PIP_...; TORCH_INDEX as in the Dockerfile. MOUNT=DIR shows a folder, such as one of wheels, to the build.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${TARGET:-cpu}
base=${BASE:-python:3.12-slim-bookworm}
work=${WORK:-build/image}
mkdir -p "$work"
work=$(cd "$work" && pwd)
export STORAGE_DRIVER=vfs
tool() { buildah --root "$work/root" --runroot "$work/run" "$@"; }

if [ "$base" = bootstrap ]; then
  base=localhost/weft-base
  if ! tool inspect --type image "$base" >/dev/null 2>&1; then
    debootstrap --variant=minbase --include=python3,python3-pip,ca-certificates bookworm "$work/debian" >/dev/null
    [ ! -e /etc/ssl/certs/ca-certificates.crt ] ||
      cp /etc/ssl/certs/ca-certificates.crt "$work/debian/etc/ssl/certs/ca-certificates.crt"
    rm -f "$work"/debian/usr/lib/python3*/EXTERNALLY-MANAGED
    ln -sf python3 "$work/debian/usr/bin/python"
    container=$(tool from scratch)
    tool copy --quiet "$container" "$work/debian" / >/dev/null
    tool config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
    tool commit --quiet "$container" "$base" >/dev/null
    tool rm "$container" >/dev/null
    rm -rf "$work/debian"
  fi
fi

version=$(git describe --exact-match --tags 2>/dev/null | sed 's/^v//' || true)
args=(--build-arg "BASE=$base" --build-arg "VERSION=${version:-0.1.0+g$(git rev-parse --short=8 HEAD)}")
args+=(--build-arg "TORCH_INDEX=${TORCH_INDEX:-}")
while read -r name; do args+=(--env "$name=${!name}"); done < <(compgen -e | grep '^PIP_' || true)
[ -z "${MOUNT:-}" ] || args+=(--volume "$MOUNT:$MOUNT:ro")
tool bud --isolation chroot --format docker --target "$target" "${args[@]}" --tag "weft:$target" \
  --file deploy/Dockerfile . >"$work/build.log" 2>&1 || { tail -n 30 "$work/build.log"; exit 1; }
tool images --format '{{.Name}}:{{.Tag}} {{.Size}}' | grep "weft:$target"
[ "$target" = cpu ] || exit 0

container=$(tool from "weft:$target")
root=$(tool mount "$container")
# In a mount namespace of its own: the root read-only, /tmp and the state in memory, and the image's user.
unshare --mount bash -euo pipefail -c '
  root=$1
  mount --bind "$root" "$root"
  mount -t tmpfs tmpfs "$root/tmp"
  mount -t tmpfs -o mode=755,uid=10001,gid=10001 tmpfs "$root/var/lib/weft"
  mount -t proc proc "$root/proc"
  mount --bind /dev "$root/dev"
  mount -o remount,bind,ro "$root"
  inside() { exec chroot --userspec=10001:10001 "$root" env -i PATH=/usr/local/bin:/usr/bin:/bin HOME=/var/lib/weft \
    OMP_NUM_THREADS="${OMP_NUM_THREADS:-}" WEFT_PORT=18000 "$@"; }
  ! (inside sh -c "touch /usr/here" 2>/dev/null) || { echo "the root can be written"; exit 1; }
  [ "$(inside id -u)" = 10001 ]
  inside weft serve --port 18000 >"$2" 2>&1 &
  server=$!
  check=$(sed -n "s/^HEALTHCHECK.*CMD \[\"python\", \"-c\", \"\(.*\)\"\]$/\1/p" deploy/Dockerfile | head -n 1)
  for _ in $(seq 300); do
    (inside python -c "$check" 2>/dev/null) && break
    kill -0 "$server" || { tail "$2"; exit 1; }
    sleep 1
  done
  (inside python -c "$check")
  (inside weft --version)
  kill -TERM "$server"
  wait "$server"
' - "$root" "$work/serve.log"
tool umount "$container" >/dev/null
tool rm "$container" >/dev/null
echo "served as user 10001 on a read-only root; the health check passes, and SIGTERM ends it with code 0"
