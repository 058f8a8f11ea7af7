"""The negative controls' checker: a simulation of a broken engine fails, and says the right thing."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.support.simulator import SimulationFailed


def assert_fails(words: str, simulate: Callable[[], object]) -> None:
    """Some run of ``simulate`` fails. The message names the run's seed and has what ``words`` matches."""
    with pytest.raises(SimulationFailed, match=r"^seed \d+: ") as caught:
        simulate()
    assert re.search(words, str(caught.value)), caught.value
