#!/bin/bash
# Clients of other projects against a server on loopback: a table of what works. Exit code 1 if one fails.
#
#   tests/clients/run.sh [CLIENT...]      all clients of clients.py, or those named
#
# The server is that of the checkout, with the embedded model. Each client has an environment of its own, without
# weft and without torch, in build/clients (or $CLIENTS_FOLDER): their demands on shared packages exclude each
# other. The first run downloads them.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
folder=${CLIENTS_FOLDER:-$root/build/clients}
python=${PYTHON:-$root/.venv/bin/python}
if [ $# -gt 0 ]; then names=("$@"); else mapfile -t names < <("$python" "$here/clients.py" names); fi

for name in "${names[@]}"; do
    mapfile -t packages < <("$python" "$here/clients.py" packages "$name")
    if [ ! -e "$folder/$name/complete" ]; then
        "$python" -m venv --clear "$folder/$name"
        "$folder/$name/bin/pip" install -q --upgrade pip
        "$folder/$name/bin/pip" install -q "${packages[@]}"
        touch "$folder/$name/complete"
    fi
done

work=$(mktemp -d)
PYTHONPATH="$root/src" "$python" -m weft serve --port 0 --memory 128MiB --file-store off \
    --response-store "$work/responses.sqlite" >"$work/log" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null || true; wait $server 2>/dev/null || true; rm -rf "$work"' EXIT
for _ in $(seq 300); do
    grep -q "Ctrl-C finishes" "$work/log" && break
    kill -0 $server || { cat "$work/log"; exit 1; }
    sleep 1
done
url=$(grep -oE 'http://127\.0\.0\.1:[0-9]+' "$work/log" | head -1)

echo "| client | version | API | works | fails |"
echo "|---|---|---|---|---|"
failed=0
for name in "${names[@]}"; do
    "$folder/$name/bin/python" "$here/clients.py" check "$name" "$url" || failed=1
done
exit $failed
