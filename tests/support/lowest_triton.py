"""The lowest Triton that pyproject.toml promises, in addition to the installed one.

    python -m tests.support.lowest_triton     fetches it where it is absent, and prints its directory

    pyproject.toml: triton>=3.6  -->  build/triton-3.6, to come first in PYTHONPATH

Tests need the newest version for its interpreter, and many GPU machines have the oldest: each torch brings one version.
A kernel that only the newest compiles would stop every server there. The wheel has 190 MB, 640 MB unpacked, which takes
5 CPU seconds, once on a machine.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def lowest_version() -> str:
    found = re.search(r'"triton>=([\d.]+)', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert found is not None, "pyproject.toml names no lowest triton"
    return found[1]


def directory() -> Path:
    """Return its directory. Raise CalledProcessError, after pip has printed why, if the version cannot be fetched."""
    place = ROOT / "build" / f"triton-{lowest_version()}"
    if not place.exists():
        place.parent.mkdir(exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{place.name}-", dir=place.parent))
        try:
            # Without its requirements: torch and all others stay unchanged.
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "pip",
                    "install",
                    "--quiet",
                    "--disable-pip-version-check",
                    "--no-deps",
                    "--no-compile",
                    "--target",
                    str(partial),
                    f"triton=={lowest_version()}",
                ],
                check=True,
            )
            if not place.exists():  # another process may have been quicker
                partial.rename(place)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return place


if __name__ == "__main__":
    print(directory())
