"""An engine process that gets kill -9 while it writes to its store, and the engine that follows it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fixtures.checkpoints import asked, checkpoint
from tests.fixtures.store_life import answer, engine
from weft.store.ledger import ROW_BYTES
from weft.store.survey import verify

LIMIT_S = 120.0


def ledger_rows(store: Path) -> int:
    return sum(file.stat().st_size for file in store.glob("ledger-*.rows")) // ROW_BYTES


@pytest.fixture(scope="module", params=asked("lfm2"))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def killed(family: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[int]]]:
    """The store of a process that was killed at work, and the answers that it gave before."""
    store = tmp_path_factory.mktemp("killed") / "store"
    command = [sys.executable, "-m", "tests.fixtures.store_life", str(checkpoint(family)), str(store)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + LIMIT_S
        while ledger_rows(store) < 12 and time.monotonic() < end:
            assert process.poll() is None, "the engine ended by itself"
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        lines = process.stdout.read().splitlines() if process.stdout is not None else []
    assert process.returncode == -signal.SIGKILL
    assert ledger_rows(store) >= 12
    return store, dict(map(json.loads, lines))


def test_what_was_durable_is_a_hit_and_every_token_is_right(
    family: str, killed: tuple[Path, dict[int, list[int]]], tmp_path: Path
) -> None:
    store, answers = killed
    assert verify(store, lambda done, total: None).good
    core = engine(checkpoint(family), shutil.copytree(store, tmp_path / "store"))
    numbers = sorted(answers)[:4]
    again = [answer(core, number) for number in numbers]
    core.close()
    assert [tokens for tokens, _ in again] == [answers[number] for number in numbers]
    assert again[0][1] >= 384, "the first prompt was durable when the process died"


def test_another_number_of_threads_is_another_namespace(
    family: str, killed: tuple[Path, dict[int, list[int]]], tmp_path: Path
) -> None:
    """Sums of a decode are split by thread, so bytes of one number are not those of another."""
    import torch

    from weft.tensor import native

    store, _ = killed
    threads = torch.get_num_threads()
    try:
        core = engine(checkpoint(family), shutil.copytree(store, tmp_path / "store"), threads=2)
        _, cached = answer(core, 0)
        core.close()
    finally:
        torch.set_num_threads(threads)
        native.set_threads(threads)
    assert cached == 0
