"""The kernels' threads, and what the kernels may not do to the process they run in. That each item of a job
is done once, whatever meets whatever, is checked under a thread sanitizer too (tests/sanitize.sh)."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.ops.test_native import noise
from tests.support import native_ops
from weft.tensor import native


@pytest.fixture(autouse=True)
def three_threads(torch_kernels: None) -> Iterator[None]:
    native.choose("native")
    before = native.extension().threads()
    native.set_threads(3)
    yield
    native.set_threads(before)


def thread_bytes(library: bytes) -> int:
    """Return the bytes that each thread that calls into an ELF ``library`` takes for its variables of threads."""
    [table] = struct.unpack_from("<Q", library, 32)
    size, count = struct.unpack_from("<HH", library, 54)
    entries = [library[at : at + size] for at in range(table, table + size * count, size)]
    return sum(struct.unpack_from("<Q", entry, 40)[0] for entry in entries if entry[:4] == struct.pack("<I", 7))


def test_a_thread_takes_no_room_of_its_own_for_each_type_of_a_kernel() -> None:
    """14.6 MB when every instance of a template had a room: a thread clears them all when it first calls a kernel."""
    library = Path(native.extension().__file__).read_bytes()
    assert library[:4] != b"\x7fELF" or 0 < thread_bytes(library) < 2 << 20


def test_threads_that_call_at_once_and_change_the_count_between_get_their_own_results() -> None:
    inputs = [noise(seed, 64, 2048) for seed in range(3)]
    want = [native_ops.silu_mul(x) for x in inputs]
    wrong: list[int] = []

    def call(index: int) -> None:
        for round_ in range(30):
            if not torch.equal(native_ops.silu_mul(inputs[index]), want[index]):
                wrong.append(index)
            if index == 0:
                native.set_threads(1 + round_ % 4)

    callers = [threading.Thread(target=call, args=(index,)) for index in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


@pytest.mark.parametrize("threads_in_child", [1, 2])
def test_a_forked_child_computes_alone_and_may_have_threads_again(threads_in_child: int) -> None:
    x = noise(1, 64, 2048)
    want = native_ops.silu_mul(x)
    child = os.fork()
    if child == 0:
        alone = native.extension().threads() == 1
        native.set_threads(threads_in_child)
        # Not torch.equal: torch's own threads do not survive a fork, and it would wait for them.
        right = np.array_equal(native_ops.silu_mul(x).numpy(), want.numpy())
        os._exit(0 if alone and right else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(native_ops.silu_mul(x), want)


DENORMALS = """
import numpy, sys
tiny = numpy.array([1e-40, 1e-40], numpy.float32)
def alive(): return float(tiny[0] + tiny[1]) > 0
before = alive()
import torch
from weft.tensor import native
native.choose("native")
native.set_threads(3)
from tests.support import native_ops
x = torch.full((256, 4096), 1.5e-38)  # halved by silu: a denormal, on whatever thread
x[:, 2048:] = 1.0
y = native_ops.silu_mul(x)
print(before, alive(), bool((y > 0).all()))
"""


def test_numbers_too_small_to_be_normal_live_on_in_the_process_and_on_the_kernels_threads() -> None:
    told = subprocess.run(
        [sys.executable, "-c", DENORMALS],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert told.stdout.split() == ["True", "True", "True"], told.stderr
