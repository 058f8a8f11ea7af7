"""torch imported without its kernels for "meta" tensors: 0.4 of the 1.6 CPU seconds of its import.

    engine process      leave_out_meta_kernels()    later import_torch()    0.4 s less, at every start
    a user's program                                import_torch()          torch as ever

``torch._meta_registrations`` gives each operator a Python function that computes shapes alone, and brings the
decompositions and primitives that these stand on. Compilers of torch and "fake" tensors need them. An engine
computes on real tensors and never compiles with torch.

In a process of weft's own a placeholder stands for the module while torch is imported. Any use of it imports
the real one, and so does a later ``import torch._meta_registrations``. A program that imports weft may
compile with torch, so it gets no placeholder.

Rejected: the same for other parts of torch (the next largest, its distributions, takes 0.03 s).
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

_NAME = "torch._meta_registrations"


class _Placeholder(ModuleType):
    """Stands for the module. An attribute of it is one of the real module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system looks for some
            raise AttributeError(name)
        _remove(self)
        return getattr(importlib.import_module(_NAME), name)


def leave_out_meta_kernels() -> None:
    """For a process of weft's own, before it imports torch."""
    if "torch" not in sys.modules:
        sys.modules[_NAME] = _Placeholder(_NAME)


def import_torch() -> ModuleType:
    """``torch``. Behind it no placeholder is left."""
    import torch

    placeholder = sys.modules.get(_NAME)
    if isinstance(placeholder, _Placeholder):
        _remove(placeholder)
    return torch


def _remove(placeholder: _Placeholder) -> None:
    if sys.modules.get(_NAME) is placeholder:
        del sys.modules[_NAME]
    torch = sys.modules.get("torch")
    if torch is not None and torch.__dict__.get("_meta_registrations") is placeholder:
        del torch._meta_registrations
