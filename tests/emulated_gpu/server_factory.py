"""The engine of a server whose engine process has an emulated GPU (``weft.server.launch.serve``)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from tests.emulated_gpu.engines import quick_start
from tests.emulated_gpu.install import CARD_BYTES, emulated
from weft.assemble.assembly import Assembled, assemble
from weft.config import EngineConfig

FACTORY = "tests.emulated_gpu.server_factory:make"
_until_the_process_ends = contextlib.ExitStack()


def make(config: EngineConfig, *, on_progress: Callable[[str], None]) -> Assembled:
    """What goes wrong silently on a GPU ends the engine here. ``EMULATED_GPU_BYTES``: of the card."""
    card = _until_the_process_ends.enter_context(emulated(int(os.environ.get("EMULATED_GPU_BYTES", CARD_BYTES))))
    with quick_start(card):
        made = assemble(config, on_progress=on_progress)
    card.begin_serving()

    def no_reports(*_: Any) -> None:
        assert not card.reports, "; ".join(str(report) for report in card.reports)

    made.core.on_step.append(no_reports)
    return made
