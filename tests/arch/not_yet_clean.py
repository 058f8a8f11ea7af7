"""Areas that do not keep a rule yet. This list only shrinks: an area that is clean must leave it."""

from __future__ import annotations

NOT_YET_CLEAN: dict[str, set[str]] = {
    "circles": set(),
    "sizes": set(),
    "vague names": set(),
    "class names": set(),
    "prose": set(),
    "width": set(),
}
