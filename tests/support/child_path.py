"""PYTHONPATH of the processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def child_path(*first: Path | str) -> str:
    """Return ``first``, the sources and the tests, then the PYTHONPATH of this process (such as ``scaled_costs``)."""
    own = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(map(str, (*first, ROOT / "src", ROOT, *filter(None, own.split(os.pathsep)))))
