"""weft: serves hybrid language models.

    from weft import Engine, SamplingParams

    with Engine("path/to/checkpoint") as engine:
        print(engine.generate("Once upon a time", max_tokens=64)[0].text)

The names below are imported when they are first used, so that ``import weft`` costs nothing; torch is imported when a
program constructs an Engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.api import ChatReply, Completion, Engine
    from weft.request import SamplingParams

__all__ = ["ChatReply", "Completion", "Engine", "SamplingParams", "__version__"]

_HOMES = {"ChatReply": "weft.api", "Completion": "weft.api", "Engine": "weft.api", "SamplingParams": "weft.request"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from weft.version import weft_version

        return weft_version()
    if name not in _HOMES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
