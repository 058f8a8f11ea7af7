"""The lines of one batch, so many at once: in the order of the prefix cache, each answered and written.

    lines --sorted by prefix_key--> deque --window of tasks--> answer_line --> write, as each one is done

The window keeps the engine full: it holds somewhat more sequences than run at once, so that one that ends is
followed in the same step. A line that the engine cannot take now (``LaterError``) goes back to the front, and
the window pauses. Cancelling ``run_lines`` cancels what runs; lines without an answer stay unwritten.

Laws: L11 (the window; the engine's queue is bounded besides).

Rejected: ``asyncio.wait`` on all tasks of the window (it visits each of them for each one that ends); all
lines at once (the queue refuses them, and their prompts fill the memory); a window for each
group of equal prefixes (the engine shares prefixes in flight already).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from weft.server.batches.answering import LaterError, answer_line
from weft.server.batches.lines import IndexedLine, OutputLine, output_line, read_body_of
from weft.server.service import Service
from weft.server.tenants import Tenant

_PAUSE_S = 0.5


def window_of(service: Service) -> int:
    """How many lines are worked on at once."""
    assert service.model is not None
    sizes = service.model.info.sizes
    return max(1, min(sizes.rows_max + sizes.rows_max // 2 + 4, sizes.queue_max // 2))


def in_order(lines: Iterable[IndexedLine]) -> list[IndexedLine]:
    """Neighbours share as much of their beginning as possible."""
    return sorted(lines, key=lambda line: (line.url, line.key, line.offset))


async def run_lines(service: Service, source: Path, lines: Iterable[IndexedLine],
                    write: Callable[[OutputLine], None], *, window: int,
                    tenant: Tenant | None = None) -> None:
    """``write`` gets each answer once. Raises WeftError when the engine is lost for good."""
    waiting = deque(in_order(lines))
    running: dict[asyncio.Task[tuple[int, bytes]], IndexedLine] = {}
    ended: asyncio.Queue[asyncio.Task[tuple[int, bytes]]] = asyncio.Queue()
    try:
        while waiting or running:
            while waiting and len(running) < window:
                line = waiting.popleft()
                body = read_body_of(source, line)
                task = asyncio.create_task(answer_line(service, line.url, body, tenant=tenant))
                task.add_done_callback(ended.put_nowait)
                running[task] = line
            done = [await ended.get()]
            while not ended.empty():
                done.append(ended.get_nowait())
            pause = False
            for task in done:
                line = running.pop(task)
                try:
                    status, body = task.result()
                except LaterError:
                    if service.engine.death is not None:
                        raise service.engine.death from None
                    waiting.appendleft(line)
                    pause = True
                    continue
                write(output_line(line, status, body))
            if pause:
                await asyncio.sleep(_PAUSE_S)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
