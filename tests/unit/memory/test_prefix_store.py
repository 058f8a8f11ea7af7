"""How a fetch of a stored prefix fills a buffer."""

from __future__ import annotations

from weft.memory.prefix_store import EXACT_FORM, INT4_KV, INT8_KV, KvRows, StoredPrefix, StoredSpan

PAGE_BYTES = 640


def stored(*forms: tuple[int, int]) -> StoredPrefix:
    """A prefix of spans of 32 tokens, each in its form, with so many bytes a page."""
    spans = tuple(
        StoredSpan(number, number, 32 * number, 32 * number + 32, payload_bytes=2 * page_bytes, form=form)
        for number, (form, page_bytes) in enumerate(forms)
    )
    return StoredPrefix(1, 1, 32 * len(forms), spans, 100, EXACT_FORM, exact=False, tokens=b"")


def test_each_change_of_form_begins_a_row_behind_those_of_the_forms_before() -> None:
    prefix = stored((EXACT_FORM, 640), (INT8_KV, 320), (INT8_KV, 320), (INT4_KV, 160), (EXACT_FORM, 640))
    assert prefix.rows_from(0, PAGE_BYTES) == (
        KvRows(0, 32, 0, 2, EXACT_FORM),
        KvRows(32, 96, 2, 2, INT8_KV),  # four pages in the bytes of two
        KvRows(96, 128, 4, 1, INT4_KV),  # two pages in half of one
        KvRows(128, 160, 5, 2, EXACT_FORM),
    )
    assert prefix.rows_from(80, PAGE_BYTES) == (
        KvRows(80, 96, 0, 1, INT8_KV),
        KvRows(96, 128, 1, 1, INT4_KV),
        KvRows(128, 160, 2, 2, EXACT_FORM),
    )


def test_a_prefix_in_one_form_is_one_row() -> None:
    prefix = stored((EXACT_FORM, 640), (EXACT_FORM, 640))
    assert prefix.rows_from(16, PAGE_BYTES) == (KvRows(16, 64, 0, 3, EXACT_FORM),)
    assert prefix.rows_from(0, 0) == (KvRows(0, 64, 0, 0, EXACT_FORM),), "a model without KV"
