"""File descriptors: connections are capped below the limit of the system, and some are left to children."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

PROGRAM = """
import logging, resource, sys
logging.basicConfig(format="%(message)s")
hard = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1024), hard))
from weft.server.http import raise_file_limit
print(raise_file_limit(4096), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("hard", "room", "soft"), [(64, 16, 64), (1024, 384, 1024), (4096, 1920, 4096), (20_000, 4096, 8448)]
)
def test_connections_leave_descriptors_for_children_whatever_the_limit_is(hard: int, room: int, soft: int) -> None:
    if hard > resource.getrlimit(resource.RLIMIT_NOFILE)[1]:
        hard, soft = resource.getrlimit(resource.RLIMIT_NOFILE)[1], 0
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(hard)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(room), str(soft or hard)]
    assert (f"room for {room} connections; limits.max_connections asks for 4096" in done.stderr) == (room < 4096)
