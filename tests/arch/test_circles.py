"""No module imports itself by way of others."""

from __future__ import annotations

import pytest

from tests.arch.circles import import_circles
from tests.arch.not_yet_clean import NOT_YET_CLEAN
from tests.arch.rules import Source, beyond_the_ratchet, weft_sources


def test_no_import_circle() -> None:
    complaints = [
        f"{'/'.join(['src', *module.split('.')])}.py: in the circle {' '.join(circle)}"
        for circle in import_circles(weft_sources())
        for module in circle
    ]
    assert beyond_the_ratchet(complaints, NOT_YET_CLEAN["circles"]) == []


@pytest.mark.parametrize(
    "back",
    [
        "import weft.a\n",
        "from weft import a\n",
        "from weft.a import f\n",
        "from .a import f\n",
        "def late():\n    from weft.a import f\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from weft.a import f\n",
    ],
)
def test_a_circle_is_noticed(back: str) -> None:
    """Check that each import of a by c closes the circle a -> b -> c -> a."""
    around = [Source("src/weft/a.py", "import weft.b\n"), Source("src/weft/b.py", "from weft.c import f\n")]
    assert import_circles([*around, Source("src/weft/c.py", back)]) == [["weft.a", "weft.b", "weft.c"]]
    assert import_circles([*around, Source("src/weft/c.py", "import weft.d\n")]) == []


def test_a_package_that_collects_its_modules_is_no_circle() -> None:
    package = Source("src/weft/p/__init__.py", "from weft.p.a import f\n")
    alone = [Source("src/weft/p/a.py", "from weft.p import b\n"), Source("src/weft/p/b.py", "import weft._native\n")]
    assert import_circles([package, *alone]) == []
    back = Source("src/weft/p/a.py", "from weft.p import f\n")
    assert import_circles([package, back]) == [["weft.p", "weft.p.a"]]
