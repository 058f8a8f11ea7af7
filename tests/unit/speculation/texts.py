"""Texts to speculate on: those of the benchmark, of a smaller vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from benchmarks import speculation_sources
from weft.schedule.plan import Int32s

VOCABULARY = 5000

prose = partial(speculation_sources.prose, vocabulary=VOCABULARY, skew=0.6)
edited = partial(speculation_sources.edited, vocabulary=VOCABULARY)


def int32s(tokens: Sequence[int]) -> Int32s:
    return np.asarray(tokens, dtype=np.int32)
