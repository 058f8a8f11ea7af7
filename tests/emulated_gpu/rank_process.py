"""A rank's own process with an emulated GPU: ``python -m tests.emulated_gpu.rank_process FD``.

It is ``weft.assemble.rank_process``. What goes wrong silently on a GPU ends the rank with its next step here,
and rank 0's step with the same words. ``EMULATED_GPU_UNPINNED``: the card locks no memory of the host.
"""

from __future__ import annotations

import contextlib
import os
import sys
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

from tests.emulated_gpu.engines import quick_start
from tests.emulated_gpu.install import Runtime, emulated
from weft.assemble import rank_process
from weft.ranks.messages import RankLaunch
from weft.schedule.plan import StepPlan

MODULE, UNPINNED = "tests.emulated_gpu.rank_process", "EMULATED_GPU_UNPINNED"


def serve(launch: RankLaunch, connection: Connection[Any, Any]) -> None:
    follow = rank_process.follow

    def watched(executor: Any, *more: Any) -> None:
        launch = executor.launch

        def reported(plan: StepPlan) -> Any:
            if not card.serving:
                card.begin_serving()
            launched = launch(plan)
            assert not card.reports, "; ".join(str(report) for report in card.reports)
            return launched

        executor.launch = reported
        try:
            follow(executor, *more)
        finally:
            card.serving = False

    refused = mock.patch.object(Runtime, "cudaHostRegister", return_value=1)
    unpinned = refused if os.environ.get(UNPINNED) else contextlib.nullcontext()
    with (
        emulated(index=launch.rank) as card,
        quick_start(card),
        unpinned,
        mock.patch.object(rank_process, "follow", watched),
    ):
        rank_process.serve_launch(launch, connection)


if __name__ == "__main__":
    code = rank_process.main(int(sys.argv[1]), serve)
    sys.stderr.flush()
    os._exit(code)
