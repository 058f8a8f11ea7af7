"""Two commits have two versions, however the code came to run: a clone, a worktree, packed refs, a wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from weft import version
from weft.version import UNKNOWN, head_commit, version_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CLEAN = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
    **{f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
}


def git(folder: Path, *arguments: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, env=inherited | CLEAN
    )
    return done.stdout.strip()


def commit(folder: Path, text: str) -> str:
    (folder / "pyproject.toml").write_text(text)
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", text)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "first"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    commit(folder, "one")
    return folder


def test_the_commit_is_the_one_that_git_names(repository: Path, tmp_path: Path) -> None:
    first = git(repository, "rev-parse", "HEAD")
    assert head_commit(repository / ".git") == first
    second = commit(repository, "two")
    assert head_commit(repository / ".git") == second != first
    git(repository, "pack-refs", "--all")
    assert head_commit(repository / ".git") == second
    git(repository, "checkout", "-q", "--detach", first)
    assert head_commit(repository / ".git") == first
    git(repository, "worktree", "add", "-q", "-b", "a/side", str(tmp_path / "side"), second)
    assert head_commit(tmp_path / "side" / ".git") == second
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{tmp_path / 'side'}", str(tmp_path / "shallow"))
    assert head_commit(tmp_path / "shallow" / ".git") == second


def test_what_is_no_repository_has_no_commit(tmp_path: Path) -> None:
    assert head_commit(tmp_path / ".git") is None
    (tmp_path / ".git").write_text("gitdir: elsewhere")
    assert head_commit(tmp_path / ".git") is None
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "HEAD").write_text("ref: refs/heads/unborn\n")
    assert head_commit(tmp_path / ".git") is None


@pytest.mark.parametrize(
    ("installed", "head", "expected"),
    [
        ("0.1.0", None, "0.1.0"),
        ("0.1.0", COMMIT, "0.1.0+g01234567"),
        ("0.1.0.post1.dev7+g0123456789", None, "0.1.0+g01234567"),
        ("0.1.0.post1.dev7+gfedcba987", COMMIT, "0.1.0+g01234567"),
        ("0.1.0.post1.dev7+g0123456.d20260102", None, "0.1.0+g0123456.d20260102"),
        ("0.2.0", None, "0.2.0"),
        (None, COMMIT, "0+g01234567"),
        (None, None, UNKNOWN),
    ],
)
def test_a_checkout_and_a_wheel_of_one_commit_have_one_version(
    installed: str | None, head: str | None, expected: str
) -> None:
    assert version_of(installed, head) == expected


def test_two_checkouts_of_weft_differ_by_their_commit(repository: Path, tmp_path: Path) -> None:
    """``-S``: the finder of an editable install would import this checkout, whatever PYTHONPATH says."""
    sources = repository / "src" / "weft"
    sources.mkdir(parents=True)
    for name in ("__init__.py", "version.py"):
        shutil.copy(Path(version.__file__).parent / name, sources)
    commit(repository, "with sources")
    said = []
    for text in ("first", "second"):
        commit(repository, text)
        run = subprocess.run(
            [sys.executable, "-S", "-c", "import weft; print(weft.__version__)"],
            env=os.environ | {"PYTHONPATH": str(repository / "src")},
            capture_output=True,
            text=True,
            check=True,
        )
        said.append(run.stdout.strip())
        assert said[-1].endswith(f"+g{git(repository, 'rev-parse', 'HEAD')[:8]}")
    assert said[0] != said[1]
