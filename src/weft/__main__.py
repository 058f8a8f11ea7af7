"""``python -m weft`` is the same as the ``weft`` command."""

from __future__ import annotations

import sys

from weft.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
