"""Areas that do not keep a rule yet. This list only shrinks: an area that is clean must leave it."""

from __future__ import annotations

NOT_YET_CLEAN: dict[str, set[str]] = {
    "circles": set(),
    "sizes": set(),
    "vague names": {
        "src/weft/eval",
        "src/weft/text",
    },
    "class names": {
        "src/weft/api",
        "src/weft/cli",
        "src/weft/engine",
        "src/weft/eval",
        "src/weft/memory",
        "src/weft/server",
        "src/weft/sim",
    },
    "prose": {
        "docs/chat.md",
        "docs/embedded-model.md",
        "docs/page.md",
        "docs/server.md",
        "src/weft/engine",
        "src/weft/eval",
        "src/weft/schedule",
        "src/weft/sim",
        "src/weft/text",
    },
    "width": {
        "docs/chat.md",
        "docs/page.md",
        "docs/server.md",
    },
}
