"""``python -m tests.emulated_gpu serve path/to/checkpoint --device cuda``: weft's command line, with engine
processes that have an emulated GPU. It is slow: small models, and ``--max-num-batched-tokens 128``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    os.environ["TRITON_INTERPRET"] = "1"
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    from tests.emulated_gpu.server_factory import FACTORY
    from weft.cli.main import main as command_line
    from weft.server.launch import serve

    assert serve.__kwdefaults__ is not None
    with mock.patch.dict(serve.__kwdefaults__, factory=FACTORY):
        return command_line(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
