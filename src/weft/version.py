"""The version of the running code, which differs between two commits.

    a checkout         0.1.0+g66aeaaa5    release of the installed metadata, and the commit that .git names
    a wheel or sdist   0.1.0+g66aeaaa5    the same, from metadata that setuptools-scm wrote when it was built
    neither has git    0.1.0              metadata alone, such as from a tarball

The metadata of an editable install stays the same while its checkout gets new commits, so .git is read: a few small
files, without running git, which takes longer than the whole ``weft --version``. Uncommitted edits are not shown.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import metadata
from pathlib import Path

UNKNOWN = "unknown (not installed)"
_COMMIT_CHARS = 8
_RELEASE = re.compile(r"\d+(?:\.\d+)*")
_NODE = re.compile(r"\+.*?g([0-9a-f]{7,40})(?:\.(d\d+))?")
"""Local part of a version that setuptools-scm makes: the commit, and the day where there were edits."""


@cache
def weft_version() -> str:
    """Return the version of this process's code."""
    try:
        installed = metadata.version("weft")
    except metadata.PackageNotFoundError:
        installed = None
    root = Path(__file__).resolve().parents[2]
    return version_of(installed, head_commit(root / ".git") if (root / "pyproject.toml").is_file() else None)


def version_of(installed: str | None, commit: str | None) -> str:
    """Return the version in the same form for both sources. ``installed``: version in the metadata; ``commit``: of a
    checkout."""
    if installed is None:
        return UNKNOWN if commit is None else f"0+g{commit[:_COMMIT_CHARS]}"
    release, node = _RELEASE.match(installed), _NODE.search(installed)
    if release is None or (commit is None and node is None):
        return installed
    if commit is not None:
        return f"{release[0]}+g{commit[:_COMMIT_CHARS]}"
    assert node is not None
    return f"{release[0]}+g{node[1][:_COMMIT_CHARS]}" + (f".{node[2]}" if node[2] else "")


def head_commit(git: Path) -> str | None:
    """Return the commit that is checked out in the repository ``git``, which is a directory or, of a worktree, a file;
    None where it cannot be read."""
    try:
        if git.is_file():
            git = git.parent / git.read_text().removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref:"):
            return head
        name = head.removeprefix("ref:").strip()
        shared = git / "commondir"
        common = git / shared.read_text().strip() if shared.is_file() else git
        for place in (git, common):
            if (place / name).is_file():
                return (place / name).read_text().strip()
        for line in (common / "packed-refs").read_text().splitlines():
            commit, _, packed = line.partition(" ")
            if packed == name:
                return commit
    except (OSError, UnicodeDecodeError):
        pass
    return None
