"""``python -m weft.fleet.ray_member``: a joining process started by a Ray actor, with the order on stdin.

It is ``weft join`` with options from a pipe, so the token is in no file and on no command line. The process never
outlives the actor: the end of stdin ends the process and the engine.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

from weft.fleet.join import join
from weft.fleet.start_progress import ServiceConsole, StartProgress
from weft.rpc.child import die_with_parent
from weft.rpc.link import LinkKeys, tcp_address

STARTED_BY = "ray"


def main() -> int:
    order = json.loads(os.fdopen(os.dup(sys.stdin.fileno()), "rb", 0).readline())
    die_with_parent(sys.stdin.fileno(), tempfile.mkdtemp(prefix="weft-"))
    return join(
        tcp_address(order["server"], flag="--listen-engines"),
        LinkKeys.of(order["token"]),
        order["own"],
        1,
        StartProgress(ServiceConsole(soft_wrap=True)),
        started_by=STARTED_BY,
    )


if __name__ == "__main__":
    sys.exit(main())
