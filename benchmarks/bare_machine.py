"""Stand-ins for the packages that a machine with a GPU, torch, Triton and numpy alone does not have.

    with_stand_ins() -> names of what is missing     before anything of weft is imported

weft's kernels import torch, Triton and numpy and nothing else. Its engine also imports msgspec, for the
values that cross to another process. Here msgspec's ``Struct`` is a class that stores its arguments. Every
name of the other packages exists and does nothing. The stand-ins serve for measuring on a borrowed machine
where nothing can be installed, and for nothing else: they read no file and check no request.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

WANTED = (
    "PIL",
    "click",
    "gguf",
    "httpcore",
    "httptools",
    "httpx",
    "huggingface_hub",
    "jinja2",
    "llguidance",
    "msgspec",
    "prometheus_client",
    "psutil",
    "python_multipart",
    "rich",
    "starlette",
    "tokenizers",
    "uvicorn",
    "uvloop",
    "xxhash",
    "zmq",
)
"""By the names they are imported by: weft's dependencies without torch and numpy."""


def missing() -> list[str]:
    return [name for name in WANTED if importlib.util.find_spec(name) is None]


def with_stand_ins() -> list[str]:
    """What is missing; from now on it can be imported."""
    absent = missing()
    if absent:
        sys.meta_path.append(_Finder(absent))
    return absent


class Anything:
    """Every attribute, call and item of it is it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **more: Any) -> Any:
        return self


class Struct:
    """Keeps what it is given, and defaults of what it is not."""

    __struct_fields__: tuple[str, ...] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        own = tuple(name for name in inspect.get_annotations(cls) if name not in cls.__struct_fields__)
        cls.__struct_fields__ = cls.__struct_fields__ + own

    def __init__(self, *args: Any, **named: Any) -> None:
        given = dict(zip(self.__struct_fields__, args, strict=False)) | named
        for name in self.__struct_fields__:
            value = given[name] if name in given else getattr(type(self), name)
            if name not in given and isinstance(value, list | dict | set):
                value = type(value)(value)
            object.__setattr__(self, name, value() if isinstance(value, _Made) else value)


class _Made:
    def __init__(self, make: Any) -> None:
        self._make = make

    def __call__(self) -> Any:
        return self._make()


def _field(*, default: Any = None, default_factory: Any = None, name: str = "") -> Any:
    return default if default_factory is None else _Made(default_factory)


class _Finder(MetaPathFinder, Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.split(".")[0] not in self._names:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _Module(spec.name)
        if spec.name == "msgspec":
            vars(module).update(Struct=Struct, field=_field)
        return module

    def exec_module(self, module: ModuleType) -> None:
        return None


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()
