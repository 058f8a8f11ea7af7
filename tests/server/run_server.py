"""The server as a process of its own, from one JSON argument: what ``weft serve`` does, with any engine."""

from __future__ import annotations

import gc
import json
import os
import sys

if __name__ == "__main__":
    gc.disable()  # until it serves (``host.end_start``): what imports make stays, and is a sixth of a start

    from tests.support.turns import VARIABLE, note_turns
    from weft.config import EngineConfig
    from weft.rpc.client import ASSEMBLE
    from weft.server.config import ServerConfig
    from weft.server.launch import serve

    if VARIABLE in os.environ:
        note_turns(os.environ[VARIABLE])
    given = json.loads(sys.argv[1])
    server = {key: tuple(value) if isinstance(value, list) else value for key, value in given["server"].items()}
    sys.exit(
        serve(
            EngineConfig(**given["engine"]),
            ServerConfig(**server),
            given.get("models", ()),
            factory=given["factory"] or ASSEMBLE,
        )
    )
