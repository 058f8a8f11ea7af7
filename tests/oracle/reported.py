"""Parts of the tests that are named after reported failures: what a check is, and how a mutant is caught.

A check serves something, and says whether every answer has the bits that it must have. Its test asserts the
check, and asserts that it fails once the mechanism behind it is broken on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from tests.oracle.serving import Answer
from tests.oracle.test_engine_prefix_cache import _COLD, _COLD_IN_COMPANY

Check = Callable[[], bool]


class DidNotHappenError(Exception):
    """A check did not bring about the case that it is named for: it proves nothing, a mutant neither."""


def happened(condition: object, what: str) -> None:
    """Raise ``DidNotHappenError`` unless ``condition``."""
    if not condition:
        raise DidNotHappenError(what)


def is_same(answer: Answer, wanted: Answer) -> bool:
    """Whether tokens and logits are equal to the last bit."""
    return answer.tokens == wanted.tokens and torch.equal(answer.logits, wanted.logits)


def are_same(answers: Iterable[Answer], wanted: Iterable[Answer]) -> bool:
    """``is_same`` of each pair."""
    return all(is_same(answer, one) for answer, one in zip(answers, wanted, strict=True))


def is_noticed(check: Check) -> bool:
    """Whether ``check`` fails, or the engine's own assertions do. What it computed as a truth was computed with what is
    broken: it is forgotten."""
    known = [(answers, dict(answers)) for answers in (_COLD, _COLD_IN_COMPANY)]
    try:
        return not check()
    except AssertionError:
        return True
    finally:
        for answers, before in known:
            answers.clear()
            answers.update(before)
