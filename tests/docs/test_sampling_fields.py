"""docs/python.md lists every field of SamplingParams."""

from __future__ import annotations

from tests.arch.rules import ROOT
from weft import SamplingParams

PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")


def test_every_sampling_field_is_on_the_page() -> None:
    assert [
        name for name in SamplingParams.__struct_fields__ if f"`{name}`" not in PAGE and f"`{name}=" not in PAGE
    ] == []
