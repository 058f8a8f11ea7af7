#!/bin/bash
# Clients of other projects against a server on loopback: a table of what works. Exit code 1 if one fails.
#
#   tests/clients/run.sh [CLIENT...]      all clients of clients.py, or those named
#   tests/clients/run.sh agents [AGENT...]   coding agents of agents.py, which needs node
#
# The server is that of the checkout, with the embedded model, and for pictures with one that sees. Each client has
# an environment of its own, without weft and without torch, in build/clients (or $CLIENTS_FOLDER): their demands on
# shared packages exclude each other. The first run downloads them.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
folder=${CLIENTS_FOLDER:-$root/build/clients}
python=${PYTHON:-$root/.venv/bin/python}
if [ "${1:-}" = agents ]; then
    shift
    cd "$root"
    exec env PYTHONPATH="$root/src" "$python" -m tests.clients.agents "$folder/agents" "$@"
fi
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
servers=()
trap 'kill "${servers[@]}" 2>/dev/null || true; wait "${servers[@]}" 2>/dev/null || true; rm -rf "$work"' EXIT

start() {    # LOG ARGUMENTS...; the address in $url
    local log=$work/$1
    shift
    WEFT_NAME_STORE="$work/names.json" WEFT_FILE_STORE=off PYTHONPATH="$root/src" \
        "$python" -m weft serve --port 0 --memory 128MiB "$@" >"$log" 2>&1 &
    servers+=($!)
    for _ in $(seq 300); do
        grep -q "Ctrl-C finishes" "$log" && break
        kill -0 "${servers[-1]}" || { cat "$log"; exit 1; }
        sleep 1
    done
    url=$(grep -oE 'http://127\.0\.0\.1:[0-9]+' "$log" | head -1)
}

if [[ " ${names[*]} " == *" pictures "* ]]; then   # of a tiny checkpoint with random weights
    (cd "$root" && PYTHONPATH=src "$python" -m tests.clients.seeing "$work/seeing")
    WEFT_RESPONSE_STORE=off start seeing.log "$work/seeing"
    export SEEING_URL=$url
fi
WEFT_RESPONSE_STORE="$work/responses.sqlite" start log

echo "| client | version | API | works | fails |"
echo "|---|---|---|---|---|"
failed=0
for name in "${names[@]}"; do
    "$folder/$name/bin/python" "$here/clients.py" check "$name" "$url" || failed=1
done
exit $failed
