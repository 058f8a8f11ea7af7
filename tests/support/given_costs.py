"""Costs that tests give to engines whose decisions they assert (``debug.step_costs``)."""

from __future__ import annotations

GIVEN_COSTS = "fixed_s=0.05,token_s=0.02"
"""Seconds of a slow machine: a prefix of one page is worth a write and a read, and a read of it may take a second."""
