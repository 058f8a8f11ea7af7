"""The page of models lists each decoder of transformers that is not served, and no other."""

from __future__ import annotations

import re

from tests.oracle import decoders_left
from weft.families import served


def test_the_section_is_what_the_script_writes() -> None:
    page = decoders_left.PAGE.read_text(encoding="utf-8")
    _, title, rest = page.partition(decoders_left.TITLE)
    written = title + rest.partition(decoders_left.NEXT)[0]
    assert written == decoders_left.section(), "run python -m tests.oracle.decoders_left"
    listed = re.findall(r"^\| `([\w-]+)` \|", written, re.MULTILINE)
    assert listed
    assert not set(listed) & set(served())
    assert {*listed, *served()} >= set(decoders_left.decoders())


def test_a_part_that_no_family_asks_for_is_named() -> None:
    stated = {"index_topk": 64, "kv_lora_rank": 16, "hidden_size": 64, "frobnication": 3, "mup_scale": 2}
    assert decoders_left.lacks("some_model", stated) == ["multipliers of its own", "`frobnication`"]
    assert decoders_left.has(stated) == ["latent attention", "an index"]
