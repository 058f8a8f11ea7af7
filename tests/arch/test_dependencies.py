"""pyproject.toml declares what the code imports, and nothing that it does not."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable

from tests.arch.rules import ROOT, Source, imported_modules, weft_sources

IMPORT_NAMES = {
    "pyzmq": "zmq",
    "pillow": "PIL",
    "opentelemetry-sdk": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
}
"""Distributions whose package has another name, or is one namespace of several."""
FOR_OTHERS: dict[str, str] = {"python-multipart": "forms of starlette requests: /v1/files"}
"""Declared for what they do to another dependency, not imported here."""


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
    """Top-level packages imported by ``sources`` that are neither weft nor of the standard library."""
    tops = {module.split(".")[0] for source in sources for _, module in imported_modules(source)}
    return tops - set(sys.stdlib_module_names) - {"weft", ""}


def test_every_import_is_declared() -> None:
    assert third_party(weft_sources()) <= declared()


def test_every_declared_dependency_is_used() -> None:
    assert declared() - third_party(weft_sources()) == set(FOR_OTHERS)


def test_an_undeclared_import_is_noticed() -> None:
    late = Source("src/weft/a.py", "import os\ndef f():\n    from pandas.core import x\n")
    assert third_party([late]) - declared() == {"pandas"}
