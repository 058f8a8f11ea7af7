"""What stands where torchvision would be: it can be imported, and every name in it is a class without use.

vLLM's Qwen3.5 and the image processors of transformers import torchvision for pictures, which no benchmark
here sends. ``make_env`` copies this file into the peers' environment as torchvision/__init__.py.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _AnyName(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing


class _Nothing(metaclass=_AnyName):
    pass


class _Part(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing


__version__ = "0.0.0"
for _name in ("io", "ops", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    _part = _Part(f"{__name__}.{_name}")
    sys.modules[_part.__name__] = _part
    _above, _, _own = _part.__name__.rpartition(".")
    setattr(sys.modules[_above], _own, _part)
