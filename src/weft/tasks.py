"""Tasks of an event loop: begun and kept while they run, and ended."""

import asyncio
from collections.abc import Coroutine
from typing import Any


def begin_task(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    """Start a task; ``tasks`` hold it while it runs, as the loop alone holds no task."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel ``tasks``, and wait until they have ended, however they end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
