"""A pytest plugin: ``weft._native`` is the file that WEFT_NATIVE_UNDER_TEST names (``tests/sanitize.sh``)."""

from __future__ import annotations

import importlib.util
import os
import sys

import weft

spec = importlib.util.spec_from_file_location("weft._native", os.environ["WEFT_NATIVE_UNDER_TEST"])
assert spec is not None
assert spec.loader is not None
module = importlib.util.module_from_spec(spec)
sys.modules["weft._native"] = module
spec.loader.exec_module(module)
weft._native = module  # type: ignore[attr-defined]
