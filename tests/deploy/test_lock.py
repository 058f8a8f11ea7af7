"""deploy/requirements.lock: a version and hashes of every distribution that an image installs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "deploy" / "requirements.lock"
EXTRAS = ("store", "otlp", "ray", "gpu")
_ENTRY = re.compile(r"^([a-z0-9][a-z0-9._-]*)==(\S+)([^\\]*)\\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.M)


def locked(text: str) -> dict[str, list[Version]]:
    """Versions by name: one distribution may have several, each with a marker."""
    versions: dict[str, list[Version]] = {}
    for name, version, _, _ in _ENTRY.findall(text):
        versions.setdefault(canonicalize_name(name), []).append(Version(version))
    return versions


def wanted() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for extra in EXTRAS for line in project["optional-dependencies"][extra]]
    return [Requirement(line) for line in [*project["dependencies"], *extras]]


def test_every_line_of_the_lock_file_is_a_version_with_hashes() -> None:
    text = LOCK.read_text()
    assert _ENTRY.sub("", text) == ""
    assert len(locked(text)) > 40
    assert "://" not in text, "an index is the builder's own"


def test_the_lock_file_has_all_that_weft_declares_within_its_bounds() -> None:
    versions = locked(LOCK.read_text())
    for requirement in wanted():
        own = versions.get(canonicalize_name(requirement.name), [])
        assert own, requirement
        assert all(version in requirement.specifier for version in own), (requirement, own)


@pytest.mark.parametrize(
    "text", ["torch>=2.13\n", "torch==2.13.0\n", "torch==2.13.0 \\\n    --hash=md5:0\n"], ids=["range", "bare", "md5"]
)
def test_a_line_without_a_hash_is_noticed(text: str) -> None:
    assert _ENTRY.sub("", text) == text
