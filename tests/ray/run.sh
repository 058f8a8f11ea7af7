#!/bin/sh
# Replicas on a real Ray cluster of several nodes on this machine. Not in the main suite: it takes minutes.
# It needs an environment with weft[ray]:  PYTHON=path/to/python tests/ray/run.sh
set -e
cd "$(dirname "$0")/../.."
PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH
"${PYTHON:-python3}" -m tests.ray.cluster
"${PYTHON:-python3}" -m tests.ray.ranks
