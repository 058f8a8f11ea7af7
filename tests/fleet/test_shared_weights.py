"""Replicas with ``--weights-cache`` map one file: its pages are in memory once, for all of them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.fixtures.packed_weights import build, pack_small_weights, packs_twelve_bits, stored_in_bfloat16
from tests.fleet.test_replicas import engine_pids
from tests.server.running import RunningServer
from weft.config import EngineConfig

ASKED = {"model": "default", "prompt": [5, 9, 2, 40, 7], "max_tokens": 12, "temperature": 0}


def mapped_kib(pid: int) -> dict[str, int]:
    """Of the cache's file in a process: resident KiB, and how many of them no other process has."""
    sums = {"Rss": 0, "Private": 0}
    of_cache = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            of_cache = line.endswith(".weft")
        elif of_cache and (field := re.match(r"(Rss|Private)(?:_Clean|_Dirty)?: +(\d+) kB", line)):
            sums[field.group(1)] += int(field.group(2))
    return sums


def test_replicas_share_the_pages_of_packed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack_small_weights(monkeypatch)
    if not packs_twelve_bits():
        return  # no AVX-512: there are no packed weights
    engine = {
        "model": str(stored_in_bfloat16("qwen3_5", tmp_path / "model")),
        "dtype": "bfloat16",
        "memory": "16MB",
        "max_model_len": 128,
        "threads": 1,
        "speculate": "off",
        "weights_cache": str(tmp_path / "cache"),
    }
    config = EngineConfig(**engine)
    build(config, on_progress=str).core.close()
    [file] = (tmp_path / "cache").iterdir()
    assert mapped_kib(os.getpid())["Rss"] == 0, "the engine that packed the weights has its own"
    alone = build(config, on_progress=str)
    own = mapped_kib(os.getpid())
    alone.core.close()
    assert own["Rss"] * 1024 >= 0.9 * file.stat().st_size
    assert own["Private"] == own["Rss"], "the control: no other process has these pages"
    del alone
    server = RunningServer(
        "tests.fixtures.packed_weights:build", engine, {"replicas": "2", "router": "least-loaded"}, "Ctrl-C finishes"
    )
    try:
        replicas = [mapped_kib(pid) for pid in engine_pids(server)]
        assert replicas == [{"Rss": own["Rss"], "Private": 0}] * 2
        first, second = [server.client().completions.create(**ASKED).choices[0].text for _ in range(2)]
        assert first == second
    finally:
        server.stop()
