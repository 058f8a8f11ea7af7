"""pyproject.toml declares all distributions that the code imports, and no others."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable

import pytest

from tests.arch.rules import PACKAGES, ROOT, Source, imported_modules, weft_sources

IMPORT_NAMES = {
    "pyzmq": "zmq",
    "pillow": "PIL",
    "opentelemetry-sdk": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
}
"""Distributions whose package has another name, or is one namespace of several."""
FOR_OTHERS: dict[str, str] = {"python-multipart": "forms of starlette requests: /v1/files"}
"""Distributions that another dependency needs for this use, and that this code does not import."""


FIXED = {
    "httpcore": ((1, 0, 9), "asks for h11 without CVE-2025-43859 (chunks whose ends are not checked)"),
    "jinja2": ((3, 1, 6), "CVE-2025-27516: |attr reaches format, and so the environment of the process"),
    "pillow": ((12, 3), "CVE-2026-59204 (JPEG 2000), CVE-2026-59199 (crop, paste), CVE-2026-25990 (PSD)"),
    "python-multipart": ((0, 0, 27), "CVE-2024-53981, CVE-2026-40347: forms that stall the parser"),
    "starlette": ((1, 3, 1), "CVE-2025-62727: Range headers in quadratic time; CVE-2025-54121: rolled-over uploads"),
    "torch": ((2, 7), "CVE-2025-32434: torch.load runs code; weft loads no pickles, its tests' tools do"),
}
"""Distributions with holes that a request, a template or a picture reaches -> (first version without them, which)."""


def lower_bounds() -> dict[str, tuple[int, ...]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = (re.match(r"([\w-]+)>=([\d.]+)", requirement) for requirement in project["dependencies"])
    return {match[1]: tuple(map(int, match[2].split("."))) for match in found if match is not None}


@pytest.mark.parametrize("name", FIXED)
def test_a_lower_bound_admits_no_version_with_a_known_hole(name: str) -> None:
    version, why = FIXED[name]
    assert lower_bounds()[name] >= version, why


def declared() -> set[str]:
    """Import names of the run-time dependencies, those of extras that users install among them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [
        requirement
        for name, requirements in project["optional-dependencies"].items()
        if name != "test"
        for requirement in requirements
    ]
    names = {requirement.split(">")[0].strip() for requirement in [*project["dependencies"], *extras]}
    return {IMPORT_NAMES.get(name, name) for name in names}


def third_party(sources: Iterable[Source]) -> set[str]:
    """Return the top-level packages imported by ``sources`` that are neither weft nor of the standard library."""
    tops = {module.split(".")[0] for source in sources for _, module in imported_modules(source)}
    return tops - set(sys.stdlib_module_names) - {*PACKAGES, ""}


def test_every_import_is_declared() -> None:
    assert third_party(weft_sources()) <= declared()


def test_every_declared_dependency_is_used() -> None:
    assert declared() - third_party(weft_sources()) == set(FOR_OTHERS)


def test_an_undeclared_import_is_noticed() -> None:
    late = Source("src/weft/a.py", "import os\ndef f():\n    from pandas.core import x\n")
    assert third_party([late]) - declared() == {"pandas"}
