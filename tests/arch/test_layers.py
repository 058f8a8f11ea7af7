"""The line between the two halves, and the arrows between folders."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest

from tests.arch.rules import (
    PURE,
    Source,
    arrow_complaints,
    group_of,
    purity_complaints,
    triton_complaints,
    weft_sources,
)


def _bad(path: str, text: str) -> list[Source]:
    return [Source(path, text)]


def test_folders_import_only_what_the_arrows_allow() -> None:
    assert arrow_complaints(weft_sources()) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("src/weft/memory/frames/arena.py", "from weft.schedule.plan import StepPlan\n"),
        ("src/weft/schedule/scheduler.py", "def late():\n    import weft.engine.engine\n"),
        ("src/weft/engine/engine.py", "from weft.runner import batch\n"),
        ("src/weft/tensor/views.py", "from weft.memory.frames.plan import ArenaPlan\n"),
        ("src/weft/models/qwen3.py", "from weft.engine.executor import Executor\n"),
        ("src/weft/runner/batch.py", "from weft.schedule.scheduler import Scheduler\n"),
        ("src/weft/runner/batch.py", "from ..memory.memory import Memory\n"),
        ("src/weft/units.py", "from weft import memory\n"),
        ("src/weft/server/app.py", "from weft.cli.main import main\n"),
        ("src/weft/api.py", "from weft.server.launch import launch\n"),
        ("src/weft/elsewhere/thing.py", "import weft.units\n"),
    ],
)
def test_a_wrong_arrow_is_noticed(path: str, text: str) -> None:
    assert len(arrow_complaints(_bad(path, text))) == 1


@pytest.mark.parametrize(
    "text",
    ["from weft.schedule.plan import StepPlan\n", "from weft.memory.frames.plan import ArenaPlan\n", "import torch\n"],
)
def test_the_seams_of_the_runner_are_open(text: str) -> None:
    assert arrow_complaints(_bad("src/weft/runner/batch.py", text)) == []


def test_the_pure_half_names_no_torch_no_clock_and_no_io() -> None:
    assert purity_complaints(weft_sources()) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("src/weft/memory/frames/arena.py", "import torch\n"),
        ("src/weft_tools/sim/replay.py", "def late():\n    from torch import nn\n"),
        ("src/weft/text/tokenizer.py", "from transformers import AutoTokenizer\n"),
        ("src/weft/families/__init__.py", "import torch.nn\n"),
        ("src/weft/schedule/queues.py", "import time\n"),
        ("src/weft/engine/engine.py", "from random import random\n"),
        ("src/weft/memory/frames/arena.py", "x = hasattr(y, 'z')\n"),
    ],
)
def test_an_impurity_is_noticed(path: str, text: str) -> None:
    assert len(purity_complaints(_bad(path, text))) == 1


@functools.cache
def _loaded_after(statements: str) -> frozenset[str]:
    """Return the modules of a fresh interpreter after ``statements``."""
    code = f"{statements}\nimport sys\nprint('LOADED', *sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return frozenset(answer.stdout.rsplit("LOADED", 1)[1].split())


ENGINE = "import weft.assemble, weft.models, weft.runner.torch_executor"


def test_importing_the_whole_pure_half_leaves_torch_out() -> None:
    modules = [s.module for s in weft_sources() if group_of(s.module) in PURE | {"weft", "eval"}]
    assert len(modules) > 20
    assert "torch" not in _loaded_after("\n".join(f"import {module}" for module in modules))


def test_importing_the_torch_half_is_noticed_by_the_same_check() -> None:
    assert "torch" in _loaded_after(ENGINE)


def test_triton_is_imported_by_kernels_alone() -> None:
    assert triton_complaints(weft_sources()) == []
    for path in ("src/weft/tensor/ops/moe/__init__.py", "src/weft/runner/arena.py", "src/weft/tensor/gpu.py"):
        assert len(triton_complaints(_bad(path, "def late():\n    import triton.language as tl\n"))) == 1
    assert triton_complaints(_bad("src/weft/tensor/kernels/moe.py", "import triton\n")) == []


def test_an_engine_without_a_gpu_never_imports_triton() -> None:
    assert "triton" not in _loaded_after(ENGINE)
