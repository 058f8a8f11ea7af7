"""Set before anything imports torch: one thread and a patient one.

The models of these tests are tiny, so a second thread only adds a barrier per operation; and a thread that
spins at a barrier while another process holds the core turns microseconds into milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# transformers hands each tensor of a few kB to a thread: a fifth of what it takes to load a reference.
os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
# Names of models mean the hub's cache here, not what the user of this machine has pulled.
os.environ["WEFT_MODEL_DIR"] = os.path.join(os.path.dirname(__file__), "no-models")
# Read where a Triton kernel is defined; only ``tests/gpu`` runs some (see ``weft.tensor.gpu``).
os.environ.setdefault("TRITON_INTERPRET", "0" if os.environ.get("WEFT_TEST_DEVICE") == "cuda" else "1")

# Costs that engines of the tests measure are longer or shorter by this: decisions that tests assert must not change.
if "WEFT_TEST_COST_SCALE" in os.environ:
    from tests.support.child_path import child_path
    from tests.support.scaled_costs import sitecustomize

    os.environ["PYTHONPATH"] = child_path(os.path.dirname(sitecustomize.__file__))


from weft.logs import FILE_VARIABLE, FORMAT_VARIABLE, LEVEL_VARIABLE, JsonFormatter, TextFormatter

LOG_VARIABLES = (FORMAT_VARIABLE, FILE_VARIABLE, LEVEL_VARIABLE)

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h


def keep_freed_memory() -> None:
    """A worker's heap grows and does not shrink. Otherwise glibc gives large matrices back to the system, and
    the kernel clears each page of the next one: a sixth to a third of what an oracle takes. Processes that a
    test starts keep their own malloc."""
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the most that glibc takes
        libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)
        libc.mallopt(M_TOP_PAD, 16 << 20)


keep_freed_memory()
gc.disable()  # what imports make stays: looking through it costs each worker 1.7 CPU seconds


@pytest.fixture(autouse=True)
def logging_of_one_test() -> Iterator[None]:
    """Take back what a test's ``weft serve`` sets up in this process. Its handler writes to the stderr of that test,
    which is closed afterwards: each later warning would print a traceback, thousands of calls for tests that count."""
    level, hooks = logging.getLogger("weft").level, (sys.excepthook, threading.excepthook)
    variables = {name: os.environ.get(name) for name in LOG_VARIABLES}
    yield
    root = logging.getLogger()
    root.handlers = [
        handler for handler in root.handlers if not isinstance(handler.formatter, TextFormatter | JsonFormatter)
    ]
    if logging.getLogger("weft").level != level:  # which forgets of all loggers which levels they let through
        logging.getLogger("weft").setLevel(level)
    logging.captureWarnings(False)
    sys.excepthook, threading.excepthook = hooks
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def pytest_configure(config: pytest.Config) -> None:
    """A directory for the checkpoints that ``tests.fixtures.checkpoints`` makes: once, not in each worker."""
    if "SHARED_CHECKPOINTS" not in os.environ:
        path = os.environ["SHARED_CHECKPOINTS"] = tempfile.mkdtemp(prefix="weft-checkpoints-")
        config.add_cleanup(lambda: os.environ.pop("SHARED_CHECKPOINTS"))
        config.add_cleanup(lambda: shutil.rmtree(path, ignore_errors=True))


def pytest_collection_finish() -> None:
    """What was imported lives to the end. Else each full collection looks through it: half a second.

    Young objects are looked through after 10,000 in place of 700: 2 to 5 % of what the simulator computes.

    Torch's 50 loggers pass their records on. Pytest would otherwise put its handlers on each of them, and take them off
    again, three times in each test: more than half of what a short test takes.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 5, 5)
    gc.enable()
