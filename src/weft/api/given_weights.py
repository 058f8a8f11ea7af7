"""Weights that a program passes to its engine, as a directory or as tensors by name."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weft.engine.engine import EngineCore
from weft.errors import EngineUnavailableError
from weft.models.hub import resolve_model

_PREFIX = "weft-weights-"


@contextmanager
def written_weights(core: EngineCore, weights: str | Path | Iterable[tuple[str, Any]]) -> Iterator[Path]:
    """Yield the directory to read ``weights`` from. A directory that is written for tensors is removed after the block.
    Raise CheckpointError."""
    if isinstance(weights, str | Path):
        yield resolve_model(weights)
        return
    from weft.models.replaced_tensors import write_replaced

    if core.source is None:
        raise EngineUnavailableError("this engine was made from a model in memory: no checkpoint can take its place")
    before = Path(core.source.place)
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        write_replaced(before, weights, directory)
        yield directory
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    core.on_close.append(lambda: shutil.rmtree(directory, ignore_errors=True))
    if before.name.startswith(_PREFIX) and before.parent == directory.parent:
        shutil.rmtree(before, ignore_errors=True)
