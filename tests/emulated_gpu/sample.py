"""The suite has a part of the cases; ``make test-emulated-gpu`` has all."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import TypeVar

Case = TypeVar("Case")
ALL = os.environ.get("EMULATED_GPU") == "all"
SEED = 31


def sample(cases: Iterable[Case], count: int) -> list[Case]:
    """``count`` of them, the same ones every time."""
    listed = list(cases)
    return listed if ALL else random.Random(SEED).sample(listed, count)
