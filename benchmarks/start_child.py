"""One start of ``benchmarks.start``, in a process that begins as an engine process of ``weft serve`` does.

python -m benchmarks.start_child DIRECTORY SECONDS [CACHE]      SECONDS: the time before Python began
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from pathlib import Path

_SAMPLE_S = 0.02


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


def measure(directory: str, weights_cache: str | None, began: float) -> None:
    """One start, in this process; prints it as JSON."""
    gc.disable()
    peak, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(_SAMPLE_S):
            peak[0] = max(peak[0], _anonymous_bytes())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    from weft.api import Engine

    with Engine(directory, dtype="bfloat16", memory="256MB", max_model_len=1024, weights_cache=weights_cache) as engine:
        ready_s = time.time() - began
        stays = _anonymous_bytes()
        stop.set()
        watcher.join()
        engine.generate([[5, 6, 7]], progress=False, max_tokens=1, temperature=0.0)
        weights = next(row for row in engine.info.memory if row.name == "weights")
        print(
            json.dumps(
                {
                    "ready_s": ready_s,
                    "load_s": engine.info.load_s,
                    "weights_bytes": engine.info.weights_bytes,
                    "anonymous_peak_bytes": max(peak[0], stays),
                    "anonymous_stays_bytes": stays,
                    "form": weights.remark,
                }
            )
        )


if __name__ == "__main__":
    _directory, _began, *_cache = sys.argv[1:]
    measure(_directory, _cache[0] if _cache else None, float(_began))
