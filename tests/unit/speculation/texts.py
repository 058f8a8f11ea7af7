"""Texts to speculate on: those of the benchmark, of a smaller vocabulary."""

from __future__ import annotations

from functools import partial

from benchmarks import speculation_sources

VOCABULARY = 5000

prose = partial(speculation_sources.prose, vocabulary=VOCABULARY, skew=0.6)
edited = partial(speculation_sources.edited, vocabulary=VOCABULARY)
